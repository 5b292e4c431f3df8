"""What samplers share: equality by content where they hold arrays, memory of what was computed, and arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from dataload.state import fingerprint
from dataload.types import Int64Array

__all__ = ["ArrayValue", "Memo", "divide", "split_by_group"]

T = TypeVar("T")

_FEW_GROUPS = 16


class ArrayValue:
    """Equality and hash of a frozen dataclass with arrays among its fields."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and fingerprint(other) == fingerprint(self)

    def __hash__(self) -> int:
        return hash(fingerprint(self))


class Memo(Generic[T]):
    """What a sampler has computed for the last two keys, to save time: no part of its value, and never pickled.

    Two, because a loader may be at the end of one epoch and at the start of the next at once. Threads may lose
    each other's entries and then compute them again, nothing worse.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: tuple[tuple[Any, T], ...] = ()

    def recall(self, key: Any) -> T | None:
        """What was kept for `key`."""
        for known, value in self._entries:
            if known == key:
                return value
        return None

    def keep(self, key: Any, value: T) -> T:
        """Remember `value`, and return it."""
        self._entries = ((key, value), *(entry for entry in self._entries if entry[0] != key))[:2]
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


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
