"""Values that belong to one process: a forked child makes its own. And pickles that go to worker processes."""

import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def on_fork(callback: Callable[[], None]) -> None:
    """Have `callback` called in every child that this process forks, where the system can."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=callback)


@cache
def first_process(library: str) -> int:
    """Return the process that first asked this about a library: this one, or one of which it is a fork.

    For libraries that do not survive a fork once they were used.
    """
    del library
    return os.getpid()


_pickling = threading.local()


@contextmanager
def pickling_for_worker() -> Generator[None]:
    """Tell objects that this thread pickles inside the ``with`` that they go to a worker process."""
    _pickling.for_worker = True
    try:
        yield
    finally:
        _pickling.for_worker = False


def is_pickled_for_worker() -> bool:
    """Return whether what this thread is pickling goes to a new process of this program, ours or `multiprocessing`'s.

    Other pickles may be loaded on another machine, or much later.
    """
    context: Any = sys.modules.get("multiprocessing.context")
    return getattr(_pickling, "for_worker", False) or (context is not None and context.get_spawning_popen() is not None)


class PerProcess(Generic[T]):
    """A value that each process makes on first use, once, whatever number of threads ask for it.

    What a forked child inherits is left alone, not closed: it belongs to the parent.
    """

    def __init__(self) -> None:
        self._value: tuple[int, T] | None = None
        self._drops = 0
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
                drops = self._drops
                self._value = value = pid, make()
                if drops != self._drops:  # during `make`: only those who have asked before use the value
                    self._value = None
            return value[1]

    def drop(self) -> T | None:
        """Forget the value, also one that is being made; return it if it is of this process."""
        self._drops += 1
        value, self._value = self._value, None
        return value[1] if value is not None and value[0] == os.getpid() else None
