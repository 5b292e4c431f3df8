"""Threads for calls that may wait long for files or a store."""

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two checks
_MOST_IN_BLOCK = 16  # calls that a thread takes at once

LONGEST_SLEEP = 0.5
"""Seconds that a thread sleeps for another: CPython handles a signal that comes just before a sleep only after it."""


class Wait:
    """A wait that ends after `seconds` without progress, or after `most` seconds. `pause` sleeps."""

    def __init__(self, seconds: float, most: float = math.inf, pause: Callable[[float], Any] = time.sleep) -> None:
        self._seconds = seconds
        self._begun = self._last = time.monotonic()
        self._most = most
        self.pause = pause
        self._next = _SHORTEST_PAUSE
        self._seen: Any = None

    def goes_on(self, progress: Any = None) -> bool:
        """Pause, and return False if the wait has ended. A new value of `progress` prolongs it."""
        now = time.monotonic()
        if progress is not None and progress != self._seen:
            self._seen, self._last = progress, now
        if now - self._last >= self._seconds or now - self._begun >= self._most:
            return False
        self.pause(self._next)
        self._next = min(_LONGEST_PAUSE, 1.5 * self._next)
        return True


T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class _Future(Future[T]):
    """A `Future` whose `result` Ctrl-C always ends; see `LONGEST_SLEEP`."""

    def result(self, timeout: float | None = None) -> T:
        while timeout is None and not self.done():
            with suppress(TimeoutError):
                return super().result(LONGEST_SLEEP)
        return super().result(timeout)


class DaemonThreads(Executor):
    """A pool like `ThreadPoolExecutor`; neither Ctrl-C nor the interpreter's exit waits for its threads."""

    def __init__(self, count: int, name: str = "dataload-pool") -> None:
        self._count, self._name = count, name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ended = False
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = _Future()
        self._put(partial(_fulfil, future, partial(fn, *args, **kwargs)))
        return future

    def _put(self, call: Callable[[], None]) -> None:
        if self._ended:
            raise RuntimeError("a call was submitted after shutdown")
        self._calls.put(call)
        if not self._idle.acquire(blocking=False):
            with self._lock:
                if len(self._threads) < self._count:
                    name = f"{self._name}-{len(self._threads)}"
                    thread = threading.Thread(target=_work, args=(self._calls, self._idle), name=name, daemon=True)
                    try:
                        thread.start()
                        self._threads.append(thread)
                    except RuntimeError:  # the machine starts no more threads: those that run have to do
                        if not self._threads:
                            raise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the queued calls, or only after the running ones."""
        self._ended = True
        try:
            while cancel_futures:
                call = self._calls.get_nowait()
                if isinstance(call, partial):
                    call.args[0].cancel()
        except Empty:
            pass
        self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Do not wait after Ctrl-C, or in a generator that it ends: running calls may last until their time-outs.
        self.shutdown(wait=kind is None or issubclass(kind, Exception), cancel_futures=kind is not None)


def run_each(call: Callable[[T], R], items: Sequence[T], threads: int, slow: float) -> Iterator[R]:
    """Yield the results of a call for each item, in order; whenever one takes `slow` seconds, the next are in threads.

    Calls that take less are faster one by one, because they would wait for the GIL.
    """
    at, ahead = 0, 4 * threads
    with DaemonThreads(threads) as pool:
        while at < len(items):
            begun = perf_counter()
            yield call(items[at])
            at += 1
            if perf_counter() - begun < slow:
                continue
            # Handing over a call takes as long as a short one. Longer calls are rather shared out evenly.
            size = min(_MOST_IN_BLOCK, ahead // (4 * threads))
            stop = min(at + ahead, len(items))
            blocks = [items[start : min(start + size, stop)] for start in range(at, stop, size)]
            for found in [pool.submit(list, map(call, block)) for block in blocks]:
                yield from found.result()
            at, ahead = stop, 2 * ahead


def _fulfil(future: Future[Any], call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:  # raised to the caller of `result`
            future.set_exception(error)


def _work(calls: SimpleQueue[Callable[[], None] | None], idle: threading.Semaphore) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it may hold memory or a file
        idle.release()
    calls.put(None)  # for the other threads
