"""What was computed, kept for as long as it is likely to be asked for again."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

__all__ = ["Memo"]

T = TypeVar("T")


class Memo(Generic[T]):
    """What was computed for the last few keys, to save time: no part of its owner's value, and never pickled.

    Two by default, because a loader may be at the end of one epoch and at the start of the next at once. Threads may
    lose each other's entries and then compute them again, nothing worse.

    Args:
        size: Keys to remember; they are hashable.
    """

    __slots__ = ("_entries", "_size")

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._entries: dict[Any, T] = {}

    def recall(self, key: Any) -> T | None:
        """What was kept for `key`."""
        return self._entries.get(key)

    def keep(self, key: Any, value: T) -> T:
        """Remember `value`, and return it."""
        others = [entry for entry in self._entries.items() if entry[0] != key]
        self._entries = {key: value, **dict(others[: self._size - 1])}  # a new one, for others may be reading the old
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._size,)
