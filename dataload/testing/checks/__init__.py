"""The checks, by group: plain functions, each documented with its rule and the reason for it."""

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
    reads, columns, sizes, bounds, ownership, lifecycle, concurrency, processes, identity, damage, round_trip
)
"""All checks, in the order of reports."""
