"""Threads that fetch chunks of objects before they are read."""

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
    """Prefetching has ended. This error is never raised to users."""


class DownloadThreads(ABC, Generic[T]):
    """Fetches queued chunks in as many daemon threads as there are connections, until it is closed."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards everything below, and the state of subclasses
        self._queued = threading.Condition(self._lock)
        self._conditions = [self._queued]  # that threads wait for
        self._stopped = False
        self._chunks: deque[tuple[T, Chunk]] = deque()
        self._threads: list[threading.Thread] = []

    def _condition(self) -> threading.Condition:
        self._conditions.append(threading.Condition(self._lock))
        return self._conditions[-1]

    def _start(self, name: str, *others: tuple[str, Callable[[], None], int]) -> None:
        """Start the threads that fetch chunks, and others: (name, target, number). Names are for people."""
        kinds = [*others, (name, self._fetch_chunks, self._remote.options.connections)]
        self._threads += [
            threading.Thread(target=target, name=f"dataload-ahead-{kind}-{number}", daemon=True)
            for kind, target, count in kinds
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop fetching. May be called twice, and in a forked child."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._stopped = True
            self._chunks.clear()
            self._release()
            for condition in self._conditions:
                condition.notify_all()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    @abstractmethod
    def _release(self) -> None:
        """Let go of everything, and wake the readers that wait. Called by `close`, with the lock."""

    @abstractmethod
    def _fetch_chunk(self, owner: T, chunk: Chunk) -> None:
        """Fetch a chunk on behalf of `owner`, which keeps the errors."""

    def _fetch_chunks(self) -> None:
        while True:
            with self._lock:
                while not (self._chunks or self._stopped):
                    self._queued.wait()
                if self._stopped:
                    return
                owner, chunk = self._chunks.popleft()
            self._fetch_chunk(owner, chunk)
            del owner  # it may hold memory, or a file

    def _check(self) -> None:
        if self._stopped:
            raise Stopped
