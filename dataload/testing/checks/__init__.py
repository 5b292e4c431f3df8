"""The checks, by group: plain functions, each documented with its rule and the reason for it."""

from dataload.testing.cases import Check, checks_in
from dataload.testing.checks import bounds, columns, concurrency, files, identity, lifecycle, ownership, reads

CHECKS: tuple[Check, ...] = checks_in(reads, columns, bounds, ownership, lifecycle, concurrency, identity, files)
"""All checks, in the order of reports."""
