"""Threads that fetch parts of objects before they are read."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from dataload.errors import DataloadError
from dataload.storage.remote.requests import Chunk
from dataload.storage.remote.settings import Remote

T = TypeVar("T")

_CLOSE_SECONDS = 1.0


class Stopped(DataloadError):
    """Reading ahead has ended; nobody sees this error."""


class DownloadThreads(ABC, Generic[T]):
    """Fetches queued parts in as many threads as there are connections, until it is closed.

    Its threads are daemons: the end of the interpreter does not wait for a request.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of all below, and of what subclasses add
        self._part = threading.Condition(self._lock)
        self._conditions = [self._part]  # those that threads wait for
        self._stopped = False
        self._parts: deque[tuple[T, Chunk]] = deque()
        self._threads: list[threading.Thread] = []

    def _condition(self) -> threading.Condition:
        """Return a new condition, which `close` notifies."""
        self._conditions.append(threading.Condition(self._lock))
        return self._conditions[-1]

    def _start(self, part: str, *others: tuple[str, Callable[[], None], int]) -> None:
        """Start the threads that fetch parts, and others: name, target and number. Names are for people."""
        kinds = [*others, (part, self._fetch_parts, self._remote.options.connections)]
        self._threads += [
            threading.Thread(target=target, name=f"dataload-ahead-{kind}-{number}", daemon=True)
            for kind, target, count in kinds
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop fetching. May be called twice; a forked child may call it, too."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._stopped = True
            self._parts.clear()
            self._release()
            for condition in self._conditions:
                condition.notify_all()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    @abstractmethod
    def _release(self) -> None:
        """Let go of everything, and of the readers that wait. Called by `close`, with the lock."""

    @abstractmethod
    def _fetch_part(self, owner: T, piece: Chunk) -> None:
        """Fetch a part on behalf of `owner`, which keeps the errors."""

    def _fetch_parts(self) -> None:
        while True:
            with self._lock:
                while not (self._parts or self._stopped):
                    self._part.wait()
                if self._stopped:
                    return
                owner, piece = self._parts.popleft()
            self._fetch_part(owner, piece)
            del owner  # it may hold memory, or a file

    def _check(self) -> None:
        if self._stopped:
            raise Stopped
