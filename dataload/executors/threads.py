"""Runs tasks in threads: for reading and decoding, which release the GIL."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Literal, TypeAlias, TypeVar

from dataload._util.system import usable_cpus
from dataload.errors import MachineError
from dataload.executors.base import (
    Deferred,
    PoolExecutor,
    Result,
    StallMonitor,
    TimeoutPolicy,
    WorkerLostError,
    WorkerPosition,
    WorkerStatus,
    begin_task,
    check_fork,
    check_process,
    raise_closed,
)

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_CLOSE_SECONDS, _INTERRUPTED_SECONDS = 10.0, 0.5


_Item: TypeAlias = "_Task | Literal['park'] | None"
"""A task, or what makes the thread that takes it wait until it is needed again, or end."""


class _Task(Result[Any]):
    """A submitted task. Uses bare locks, because a `Future` costs 20 us a batch, a fifth of a small one."""

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
            self._pool.interrupted = True
            raise self._errors.pop()  # Ctrl-C, at once: the consumer may never ask for this result
        return True

    def run_in(self, thread: threading.Thread, status: WorkerStatus) -> bool:
        if not self._unclaimed.acquire(blocking=False):
            return False
        self.thread, self.status = thread, status
        try:
            try:
                self._value = self._pool.work(self._task, status)
            finally:
                check_fork(self._pool.pid, status)
        except BaseException as error:  # raised where the result is requested
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
            watch = StallMonitor(self._pool.timeouts)
            try:
                while not self._finished.acquire(timeout=watch.next_look() + 1e-3):
                    self._pool.look(watch, self)
            except KeyboardInterrupt:
                self._pool.interrupted = True
                raise
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
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] # documented, despite its name
    return "".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )


class _Pool:
    """The threads of one executor in one process."""

    def __init__(
        self, work: Callable[[Any, WorkerStatus], Any], timeouts: TimeoutPolicy, first: int, size: int
    ) -> None:
        self.work = work
        self._first = first
        self.timeouts = timeouts
        self.active = 0  # workers in use; the others are parked
        self._status = WorkerStatus()  # of the consumer's thread
        self._cpus = usable_cpus()
        self.pid = begin_task()
        self.queue: SimpleQueue[_Item] = SimpleQueue()
        self._parked: SimpleQueue[None] = SimpleQueue()  # one item lets one parked thread go on
        self.finished: SimpleQueue[None] | None = None  # gets one item per finished task once `wait_for_any` is used
        self.threads: list[threading.Thread] = []
        self._hanging: set[threading.Thread] = set()
        self.interrupted = False  # by Ctrl-C, while the consumer waited
        try:
            self._grow(size)
        except MachineError:
            self.stop()
            raise

    def use(self, workers: int) -> None:
        # Parked threads cost nothing and keep their thread-local data. They park after the queued tasks.
        for _ in range(workers, self.active):
            self.queue.put("park")
        self.active = min(workers, self.active)
        try:
            self._grow(workers)
        except MachineError as error:
            warnings.warn(f"{error}; continuing with {self.active}", RuntimeWarning, stacklevel=2)

    def _grow(self, workers: int) -> None:
        for number in range(self.active, workers):
            if number < len(self.threads) - len(self._hanging):
                self._parked.put(None)
            else:
                self._start(f"dataload-{self._first + number}")
            self.active = number + 1

    def is_usable(self) -> bool:
        return self.pid == os.getpid()  # threads do not survive a fork

    def submit(self, task: Any) -> Result[Any]:
        if not self.active:
            return Deferred(self.work, task, self._status)
        submitted = _Task(self, task)
        self.queue.put(submitted)
        return submitted

    def wait_for_any(self, waiting: list[Any]) -> None:
        if self.finished is None:
            self.finished = SimpleQueue()
        watch = StallMonitor(self.timeouts)
        with contextlib.suppress(Empty):
            while True:
                self.finished.get_nowait()  # drop items of tasks whose results are already taken
        while waiting and not any(result.done() for result in waiting):
            try:
                self.finished.get(timeout=watch.next_look() + 1e-3)
            except Empty:
                self.look(watch, waiting[0])

    def _start(self, name: str) -> None:
        # Daemons, because the interpreter joins other threads before it runs finalizers.
        thread = threading.Thread(target=_work, args=(self.queue, self._parked), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            message = f"the machine starts no more than {len(self.threads)} threads for this loader: lower num_workers"
            raise MachineError(message) from error
        self.threads.append(thread)

    def lets_consumer_help(self) -> bool:
        """Return True if running a task here beats waiting for a worker."""
        # Not with a timeout, which could not stop the consumer's thread. And not if the workers leave it no
        # CPU: one more thread would compete for the GIL, and cost the workers as much as it produces.
        return self.timeouts.timeout is None and self.active < max(2, self._cpus)

    def look(self, watch: StallMonitor, task: Any) -> None:
        """Warn about the thread that runs a late task, or give up on it and replace it."""

        def describe() -> tuple[str, WorkerPosition, str]:
            position = task.status.position() if task.status is not None else WorkerPosition(-1, -1, -1)
            name = task.thread.name if task.thread is not None else "the next free thread"
            return name, position, _stacks(self.threads)

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
        if not self.is_usable():
            return
        with contextlib.suppress(Empty):
            while (task := self.queue.get_nowait()) is not None:
                if isinstance(task, _Task):
                    task.cancel()
        for _ in self.threads:
            self.queue.put(None)
            self._parked.put(None)
        # After Ctrl-C, and when the interpreter ends, threads may be waiting for a store that does not answer.
        hurry = self.interrupted or isinstance(sys.exception(), KeyboardInterrupt)
        hurry |= not threading.main_thread().is_alive()
        until = monotonic() + (_INTERRUPTED_SECONDS if hurry else _CLOSE_SECONDS)
        # The last reference may be dropped by a worker.
        others = [thread for thread in self.threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(0.0 if thread in self._hanging else max(0.0, until - monotonic()))
        if late := [] if hurry else [thread for thread in others if thread.is_alive()]:
            warnings.warn(
                f"{len(late)} of the loader's threads did not stop and are left behind:\n{_stacks(late)}",
                RuntimeWarning,
                stacklevel=2,
            )


class ThreadExecutor(PoolExecutor[TaskT, ResultT]):
    """Runs tasks in threads. `work` is called by several threads at once."""

    def __init__(
        self,
        work: Callable[[TaskT, WorkerStatus], ResultT],
        workers: int,
        *,
        timeouts: TimeoutPolicy | None = None,
        first: int = 0,
    ) -> None:
        super().__init__(partial(_Pool, work, timeouts or TimeoutPolicy(), first), workers)


def _work(queue: SimpleQueue[_Item], parked: SimpleQueue[None]) -> None:
    status, thread = WorkerStatus(), threading.current_thread()
    while (task := queue.get()) is not None:
        if isinstance(task, _Task):
            task.run_in(thread, status)
        else:
            parked.get()
        del task  # otherwise its batch would live until the next task comes
