"""Caches: of the last values, of a value per process, and of decoded values of files."""

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """Values for the last keys: two by default, because a loader may be in two epochs at once. Never pickled."""

    __slots__ = ("_entries", "_size")

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._entries: dict[Any, T] = {}

    def recall(self, key: Any) -> T | None:
        return self._entries.get(key)

    def keep(self, key: Any, value: T) -> T:
        others = [entry for entry in self._entries.items() if entry[0] != key]
        self._entries = {
            key: value,
            **dict(others[: self._size - 1]),
        }  # a new dict: other threads may be reading the old one
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._size,)


def on_fork(callback: Callable[[], None]) -> None:
    """Call `callback` in every child that this process forks, where the system supports it."""
    if sys.platform != "win32" and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=callback)


@cache
def first_process(library: str) -> int:
    """Return the process that first used a library that does not survive forks: this one or an ancestor."""
    del library
    return os.getpid()


_pickling = threading.local()


@contextmanager
def pickling_for_worker() -> Generator[None]:
    """Mark pickles made by this thread inside the ``with`` block as sent to a worker process."""
    _pickling.for_worker = True
    try:
        yield
    finally:
        _pickling.for_worker = False


def is_pickled_for_worker() -> bool:
    """Return whether this thread pickles for a new process of this program, ours or `multiprocessing`'s."""
    context: Any = sys.modules.get("multiprocessing.context")
    return getattr(_pickling, "for_worker", False) or (context is not None and context.get_spawning_popen() is not None)


class PerProcess(Generic[T]):
    """A value that each process makes on first use. A forked child leaves the parent's alone; pickles have none."""

    __slots__ = ("_drops", "_locks", "_value")

    def __init__(self) -> None:
        self._value: tuple[int, T] | None = None
        self._drops = 0
        self._locks: dict[int, threading.Lock] = {}

    def get(self, make: Callable[[], T]) -> T:
        """Return this process's value, made by `make` on first use."""
        value, pid = self._value, os.getpid()
        if value is not None and value[0] == pid:
            return value[1]
        # Each process has its own lock: a thread of the parent may have held the parent's lock during the fork, and
        # would never release it here.
        with self._locks.setdefault(pid, threading.Lock()):
            value = self._value
            if value is None or value[0] != pid:
                drops = self._drops
                self._value = value = pid, make()
                if drops != self._drops:  # dropped during `make`: only earlier callers use the value
                    self._value = None
            return value[1]

    def peek(self) -> T | None:
        """Return this process's value; None if it has not made one."""
        value = self._value
        return value[1] if value is not None and value[0] == os.getpid() else None

    def drop(self) -> T | None:
        """Forget the value, even one being made; return it if this process made it."""
        self._drops += 1
        value, self._value = self.peek(), None
        return value

    def __reduce__(self) -> Any:
        return PerProcess, ()


CACHED_BYTES = 1 << 29
"""Default of the option `cached_bytes`."""


@dataclass(slots=True)
class _Decoded:
    lock: threading.Lock = field(default_factory=threading.Lock)
    found: OrderedDict[Hashable, tuple[Any, int]] = field(default_factory=OrderedDict[Hashable, tuple[Any, int]])
    decoding: dict[Hashable, threading.Lock] = field(default_factory=dict[Hashable, threading.Lock])
    bytes: int = 0
    largest: int = 0

    def leave(self, most: int, least: int = 0) -> None:
        """Forget the longest unused values until the others take `most` bytes, or are only `least`."""
        while self.bytes > most and len(self.found) > least:
            self.bytes -= self.found.popitem(last=False)[1][1]


class DecodedCache:
    """The last decoded values of files, up to `limit` bytes but at least one. Thread-safe, separate per process."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._decoded: PerProcess[_Decoded] = PerProcess()

    def get(self, key: Hashable, decode: Callable[[], tuple[Any, int]]) -> Any:
        """Return a value; if it is missing, `decode` returns it and its size in bytes, one thread at a time."""
        kept = self._decoded.get(_Decoded)
        with kept.lock:
            found = kept.found.get(key)
            if found is not None:
                kept.found.move_to_end(key)
                return found[0]
            decoding = kept.decoding.setdefault(key, threading.Lock())
        with decoding:
            with kept.lock:
                found = kept.found.get(key)
                if found is None:  # so that it has room
                    kept.leave(self._limit - min(kept.largest, self._limit // 2))
            if found is None:
                found = decode()
                self._keep(kept, key, found)
        return found[0]

    def get_all(
        self, keys: Sequence[Hashable | None], decode: Callable[[list[int]], list[tuple[Any, int]]]
    ) -> list[Any]:
        """Return values; `decode` returns the missing ones, given their numbers in `keys`, with their sizes in bytes.

        A value whose key is None is not kept.
        """
        kept = self._decoded.get(_Decoded)
        with kept.lock:
            known = [kept.found.get(key) for key in keys]
        missing = [number for number, found in enumerate(known) if found is None]
        for number, found in zip(missing, decode(missing) if missing else (), strict=True):
            known[number] = found
            if keys[number] is not None:
                self._keep(kept, keys[number], found)
        self.touch(keys)
        return [found[0] for found in known if found is not None]

    def touch(self, keys: Iterable[Hashable]) -> None:
        """Note that values are used, if they are kept."""
        kept = self._decoded.get(_Decoded)
        with kept.lock:
            for key in keys:
                if key in kept.found:
                    kept.found.move_to_end(key)

    def _keep(self, kept: _Decoded, key: Hashable, found: tuple[Any, int]) -> None:
        with kept.lock:
            kept.decoding.pop(key, None)
            _, before = kept.found.pop(key, (None, 0))
            kept.found[key] = found
            kept.bytes += found[1] - before
            kept.largest = max(kept.largest, found[1])
            kept.leave(self._limit, 1)

    def clear(self) -> None:
        self._decoded.drop()

    def __reduce__(self) -> Any:
        return DecodedCache, (self._limit,)
