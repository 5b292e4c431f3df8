"""The checks, by group: plain functions, each with its rule, the reason for it, and the release that brought it."""

from __future__ import annotations

from dataload.testing.cases import Check, checks_in
from dataload.testing.checks import (
    bounds,
    columns,
    concurrency,
    damage,
    identity,
    lifecycle,
    ownership,
    processes,
    reads,
    round_trip,
    sizes,
)

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = checks_in(
    reads,
    columns,
    sizes,
    bounds,
    ownership,
    lifecycle,
    concurrency,
    processes,
    identity,
    damage,
    round_trip,
)
"""All of them, in the order in which a report lists them."""
