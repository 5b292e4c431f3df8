"""Runs tasks in threads: for reading and decoding, which release the GIL."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar

from dataload._util.cpus import usable_cpus
from dataload.executors.base import (
    Place,
    Result,
    StallMonitor,
    TimeoutPolicy,
    WorkerLostError,
    WorkerStatus,
    check_process,
    raise_closed,
)

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_CLOSE_SECONDS = 10.0


class _Task:
    """A submitted task. Uses bare locks because a `Future` costs 20 us a batch, a fifth of a small one."""

    __slots__ = ("_cancelled", "_errors", "_finished", "_pool", "_task", "_unclaimed", "_value", "status", "thread")

    def __init__(self, pool: _Pool, task: Any) -> None:
        self._pool = pool
        self._task = task
        self._value: Any = None
        self._errors: list[BaseException] = []
        self._cancelled = False
        self._unclaimed = threading.Lock()
        self._finished = threading.Lock()
        self._finished.acquire()
        self.thread: threading.Thread | None = None
        self.status: WorkerStatus | None = None

    def run(self) -> bool:
        if not self._pool.lets_consumer_help() or not self.run_in(threading.current_thread(), WorkerStatus()):
            return False
        if self._errors and not isinstance(self._errors[0], Exception):
            raise self._errors.pop()  # Ctrl-C, at once: the consumer may never ask for this result
        return True

    def run_in(self, thread: threading.Thread, status: WorkerStatus) -> bool:
        if not self._unclaimed.acquire(blocking=False):
            return False
        self.thread, self.status = thread, status
        try:
            self._value = self._pool.work(self._task, status)
        except BaseException as error:  # raised to whoever asks for the result
            self._errors.append(error)
        self._finished.release()
        if self._pool.finished is not None:
            self._pool.finished.put(None)
        return True

    def done(self) -> bool:
        return not self._finished.locked()

    def result(self) -> Any:
        if not self._finished.acquire(blocking=False):
            check_process(self._pool.pid)
            watch = self._pool.timeouts.watch()
            while not self._finished.acquire(timeout=min(watch.next_look() + 1e-3, threading.TIMEOUT_MAX)):
                self._pool.look(watch, self)
        if self._cancelled:
            raise_closed()
        if self._errors:
            raise self._errors.pop()  # not from a local variable: its traceback would refer to it
        return self._value

    def cancel(self) -> None:
        if self._unclaimed.acquire(blocking=False):
            self._cancelled = True
            self._finished.release()


def _stacks(threads: list[threading.Thread]) -> str:
    """Return the stack traces of threads, one after another."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] # documented, despite its name
    return "".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )


class _Pool:
    """The threads of one executor in one process."""

    def __init__(
        self, work: Callable[[Any, WorkerStatus], Any], timeouts: TimeoutPolicy, size: int, first: int
    ) -> None:
        self.work = work
        self._first = first
        self.timeouts = timeouts
        self.size = 0
        self._cpus = usable_cpus()
        self.pid = os.getpid()
        self.queue: SimpleQueue[_Task | None] = SimpleQueue()
        self.finished: SimpleQueue[None] | None = None  # gets one item per finished task once `wait_for_any` is used
        self.threads: list[threading.Thread] = []
        self._hanging: set[threading.Thread] = set()
        self.grow(size)

    def grow(self, size: int) -> None:
        for number in range(self.size, size):
            self._start(f"dataload-{self._first + number}")
        self.size = max(self.size, size)

    def _start(self, name: str) -> None:
        # Daemons, because the interpreter joins other threads before it runs what would stop them.
        thread = threading.Thread(target=_work, args=(self.queue,), name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def lets_consumer_help(self) -> bool:
        """Return True if running a task here beats waiting for a worker."""
        # Not with a timeout, because nobody would watch the consumer's thread. And not if the workers leave it no
        # CPU: one more thread would compete for the GIL, and cost the workers as much as it produces.
        return self.timeouts.timeout is None and self.size < max(2, self._cpus)

    def look(self, watch: StallMonitor, task: Any) -> None:
        """Warn about the thread that runs a late task, or give up on it and replace it."""

        def describe() -> tuple[str, Place, str]:
            place = task.status.place() if task.status is not None else Place(-1, -1, -1)
            name = task.thread.name if task.thread is not None else "the next free thread"
            return name, place, _stacks(self.threads)

        try:
            watch.look(describe)
        except WorkerLostError:
            # A thread cannot be stopped, so leave it alone and start another.
            thread = task.thread
            if thread in self.threads and thread not in self._hanging:
                self._hanging.add(thread)
                self._start(thread.name)
            raise

    def stop(self) -> None:
        if self.pid != os.getpid():
            return
        with contextlib.suppress(Empty):
            while (task := self.queue.get_nowait()) is not None:
                task.cancel()
        for _ in self.threads:
            self.queue.put(None)
        until = monotonic() + _CLOSE_SECONDS
        # The last reference may be dropped by a worker.
        others = [thread for thread in self.threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(0.0 if thread in self._hanging else max(0.0, until - monotonic()))
        if late := [thread for thread in others if thread.is_alive()]:
            warnings.warn(
                f"{len(late)} of the loader's threads did not stop and are left behind:\n{_stacks(late)}",
                RuntimeWarning,
                stacklevel=2,
            )


class ThreadExecutor(Generic[TaskT, ResultT]):
    """Runs tasks in threads that live until `close`, until this object is dropped, or until the interpreter exits.

    Args:
        work: The function to apply; called by several threads at once.
        workers: Number of threads, at least 1. They start with the first task.
        timeouts: When to warn about a task and when to give up on it.
        first: Number of the first thread, for names.
    """

    def __init__(
        self,
        work: Callable[[TaskT, WorkerStatus], ResultT],
        workers: int,
        *,
        timeouts: TimeoutPolicy | None = None,
        first: int = 0,
    ) -> None:
        self._work = work
        self._workers = workers
        self._first = first
        self._timeouts = timeouts or TimeoutPolicy()
        self._pool: _Pool | None = None
        self._stop: Callable[[], Any] | None = None
        self._closed = False

    def submit(self, task: TaskT) -> Result[ResultT]:
        """See `Executor`."""
        pool = self._pool
        if pool is None or pool.pid != os.getpid():  # threads do not survive a fork
            if self._closed or not threading.main_thread().is_alive():
                raise_closed()
            pool = self._pool = _Pool(self._work, self._timeouts, self._workers, self._first)
            self._stop = weakref.finalize(self, pool.stop)
        submitted = _Task(pool, task)
        pool.queue.put(submitted)
        return submitted

    def grow(self, workers: int) -> None:
        """See `Executor`."""
        self._workers = max(workers, self._workers)
        if self._pool is not None:
            self._pool.grow(self._workers)

    def wait_for_any(self, results: Iterable[Result[Any]]) -> None:
        """See `Executor`."""
        waiting = list(results)
        pool = self._pool
        if pool is None or not waiting:
            return
        if pool.finished is None:
            pool.finished = SimpleQueue()
        watch = self._timeouts.watch()
        with contextlib.suppress(Empty):
            while True:
                pool.finished.get_nowait()  # drop items of tasks whose results are already taken
        while not any(result.done() for result in waiting):
            try:
                pool.finished.get(timeout=watch.next_look() + 1e-3)
            except Empty:
                pool.look(watch, waiting[0])

    def close(self) -> None:
        """See `Executor`."""
        self._closed = True
        if self._stop is not None:
            self._stop()
        self._pool = self._stop = None


def _work(queue: SimpleQueue[_Task | None]) -> None:
    status, thread = WorkerStatus(), threading.current_thread()
    while (task := queue.get()) is not None:
        task.run_in(thread, status)
        del task  # otherwise its batch would live until the next task comes
