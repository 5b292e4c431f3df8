"""What samplers share: equality by content where they hold arrays, and arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dataload._util.fingerprint import fingerprint
from dataload.types import Int64Array

__all__ = ["ArrayValue", "divide", "split_by_group"]

_FEW_GROUPS = 16


class ArrayValue:
    """Equality and hash of a frozen dataclass with arrays among its fields."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and fingerprint(other) == fingerprint(self)

    def __hash__(self) -> int:
        return hash(fingerprint(self))


def split_by_group(groups: Int64Array) -> Iterator[tuple[int, Int64Array]]:
    """The rows of each group.

    Args:
        groups: (n,) int64, 0 or more: number of each row's group.

    Yields:
        Number of a group that occurs, in rising order, and its rows, (k,) int64, in rising order.
    """
    if not groups.size:
        return
    last = int(groups.max())
    if last < _FEW_GROUPS:  # to look for each is quicker than to sort
        narrow = groups.astype(np.uint8)
        for group in range(last + 1):
            rows = np.flatnonzero(narrow == group)
            if rows.size:
                yield group, rows
        return
    # numpy sorts 16 bits by radix, several times as fast as wider ones.
    order = np.argsort(groups.astype(np.uint16) if last < 2**16 else groups, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        yield int(groups[rows[0]]), rows


def divide(values: Int64Array, divisor: int) -> tuple[Int64Array, Int64Array]:
    """Quotients and remainders of numbers of 0 or more: what `np.divmod` gives, in a fifth of its time."""
    quotients = values // divisor
    remainders = quotients * divisor
    return quotients, np.subtract(values, remainders, out=remainders)
