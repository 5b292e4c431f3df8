"""What was computed, kept for as long as it is likely to be asked for again."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

__all__ = ["Memo"]

T = TypeVar("T")


class Memo(Generic[T]):
    """What was computed for the last two keys, to save time: no part of its owner's value, and never pickled.

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
