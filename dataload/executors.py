"""Where tasks run. A task is the load of one step; what it does is not known here."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Executor", "Result", "SerialExecutor", "ThreadExecutor"]

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Result(Protocol[T_co]):
    """What a submitted task becomes."""

    def result(self) -> T_co:
        """Its value, or its exception raised; waits for it. Asked for once."""
        ...

    def done(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def run(self) -> bool:
        """Do it in the calling thread, if nobody has begun it and that can be; tells whether it was done."""
        ...

    def cancel(self) -> None:
        """Do not start it, if it has not been started."""
        ...


class Executor(Protocol):
    """Runs tasks."""

    def submit(self, function: Callable[..., T], /, *arguments: Any) -> Result[T]:
        """Arrange for ``function(*arguments)``."""
        ...

    def close(self) -> None:
        """Stop, after the tasks that have begun."""
        ...


@dataclass(slots=True)
class _Deferred(Generic[T]):
    function: Callable[..., T]
    arguments: tuple[Any, ...]

    def result(self) -> T:
        return self.function(*self.arguments)

    def done(self) -> bool:
        return False

    def run(self) -> bool:
        return False

    def cancel(self) -> None:
        pass


class SerialExecutor:
    """Runs a task in the consumer's thread, when its result is asked for."""

    def submit(self, function: Callable[..., T], /, *arguments: Any) -> Result[T]:
        """See `Executor`."""
        return _Deferred(function, arguments)

    def close(self) -> None:
        """See `Executor`."""


class _Task(Generic[T]):
    """A result in the making: bare locks, for a `Future` costs 20 us a batch, a fifth of a small one."""

    __slots__ = ("_arguments", "_error", "_finished", "_function", "_unclaimed", "_value")

    def __init__(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self._value: Any = None
        self._error: BaseException | None = None
        self._unclaimed = threading.Lock()
        self._finished = threading.Lock()
        self._finished.acquire()

    def run(self) -> bool:
        if not self._unclaimed.acquire(blocking=False):
            return False
        try:
            self._value = self._function(*self._arguments)
        except BaseException as error:  # raised where the result is asked for
            self._error = error
        self._finished.release()
        return True

    def done(self) -> bool:
        return not self._finished.locked()

    def result(self) -> T:
        self._finished.acquire()
        if self._error is not None:
            # The traceback of a stored exception refers to this frame: without this the two keep each other alive.
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error
        return self._value

    def cancel(self) -> None:
        if self._unclaimed.acquire(blocking=False):
            self._error = RuntimeError("the loader was closed while a batch was waited for")
            self._finished.release()


class ThreadExecutor:
    """Runs tasks in threads that live until `close`, until nothing refers to this, or until the interpreter exits.

    Args:
        workers: Number of threads, at least 1; started with the first task.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._queue: SimpleQueue[_Task[Any] | None] | None = None
        self._stop: Callable[[], Any] | None = None
        self._pid = -1

    def submit(self, function: Callable[..., T], /, *arguments: Any) -> Result[T]:
        """See `Executor`."""
        queue = self._queue
        if queue is None or self._pid != os.getpid():  # threads do not survive a fork
            queue = self._start()
        task = _Task(function, arguments)
        queue.put(task)
        return task

    def _start(self) -> SimpleQueue[_Task[Any] | None]:
        queue: SimpleQueue[_Task[Any] | None] = SimpleQueue()
        # Daemons, because the interpreter joins other threads before it runs what would stop them.
        threads = [
            threading.Thread(target=_work, args=(queue,), name=f"dataload-{number}", daemon=True)
            for number in range(self._workers)
        ]
        for thread in threads:
            thread.start()
        self._queue, self._pid = queue, os.getpid()
        self._stop = weakref.finalize(self, _stop, queue, threads, self._pid)
        return queue

    def close(self) -> None:
        """See `Executor`."""
        if self._stop is not None:
            self._stop()
        self._queue = self._stop = None


def _work(queue: SimpleQueue[_Task[Any] | None]) -> None:
    while (task := queue.get()) is not None:
        task.run()
        del task  # else the batch lives on here until the next task comes


def _stop(queue: SimpleQueue[_Task[Any] | None], threads: list[threading.Thread], pid: int) -> None:
    if pid != os.getpid():
        return
    with contextlib.suppress(Empty):
        while (task := queue.get_nowait()) is not None:
            task.cancel()
    for _ in threads:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the last reference may go in a worker
            thread.join()
