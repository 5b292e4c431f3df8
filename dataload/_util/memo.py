"""A cache of the last few values computed."""

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """Values for the last few keys. Not part of its owner's value, and never pickled.

    It holds two by default because a loader may be at the end of one epoch and at the start of the next at once.
    Concurrent threads may drop each other's entries, which are then computed again.
    """

    __slots__ = ("_entries", "_size")

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._entries: dict[Any, T] = {}

    def recall(self, key: Any) -> T | None:
        return self._entries.get(key)

    def keep(self, key: Any, value: T) -> T:
        others = [entry for entry in self._entries.items() if entry[0] != key]
        self._entries = {key: value, **dict(others[: self._size - 1])}  # a new dict: others may be reading the old one
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._size,)
