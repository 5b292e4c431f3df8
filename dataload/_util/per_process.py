"""Values that belong to one process: a forked child makes its own."""

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def on_fork(callback: Callable[[], None]) -> None:
    """Have `callback` called in every child that this process forks, where the system can."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=callback)


class PerProcess(Generic[T]):
    """A value that each process makes on first use, once, whatever number of threads ask for it.

    What a forked child inherits is left alone, not closed: it belongs to the parent.
    """

    def __init__(self) -> None:
        self._value: tuple[int, T] | None = None
        self._locks: dict[int, threading.Lock] = {}

    def get(self, make: Callable[[], T]) -> T:
        """Return the value of this process, made by `make` if there is none yet."""
        value, pid = self._value, os.getpid()
        if value is not None and value[0] == pid:
            return value[1]
        # Each process has a lock of its own: a thread of the parent may have held the parent's at the moment of the
        # fork, and would never release it here.
        with self._locks.setdefault(pid, threading.Lock()):
            value = self._value
            if value is None or value[0] != pid:
                self._value = value = pid, make()
            return value[1]

    def drop(self) -> T | None:
        """Forget the value; return it if it is of this process."""
        value, self._value = self._value, None
        return value[1] if value is not None and value[0] == os.getpid() else None
