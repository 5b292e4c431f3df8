"""The checks, by group: plain functions, each documented with its rule and the reason for it."""

from dataload.testing.cases import Check, checks_in
from dataload.testing.checks import concurrency, identity, lifetime, reads, requests

CHECKS: tuple[Check, ...] = checks_in(reads, requests, lifetime, concurrency, identity)
"""All checks, in the order of reports."""
