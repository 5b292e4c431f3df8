"""The checks, by group: plain functions whose docstring's first line is the rule."""

from dataload.testing.cases import Check, checks_in
from dataload.testing.checks import concurrency, identity, lifetime, reads, requests

CHECKS: tuple[Check, ...] = checks_in(reads, requests, lifetime, concurrency, identity)
"""All checks, in the order in which reports list them."""
