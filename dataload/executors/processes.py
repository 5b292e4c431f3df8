"""Runs tasks in worker processes, for transforms that hold the GIL."""

from __future__ import annotations

import contextlib
import multiprocessing
import selectors
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from dataload._util.system import available_bytes, is_single_threaded, usable_cpus
from dataload.errors import ConfigError
from dataload.executors.base import (
    OwnedPool,
    PoolExecutor,
    Result,
    StallMonitor,
    StartMethod,
    TimeoutPolicy,
    WorkerLostError,
    WorkerStatus,
)
from dataload.executors.handle import WorkerHandle, check_parent, start_fork_server, within_descriptors
from dataload.executors.serialization import put_together
from dataload.executors.transport import Message, Ring
from dataload.executors.worker import ResultMessage, TaskMessage

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_MEMORY_SHARE = 0.8
_CLOSE_SECONDS = 1.0


class ProcessExecutor(PoolExecutor[TaskT, ResultT]):
    """Runs tasks in processes, which also end when this process dies."""

    # Large arrays of a result are views of a slot of shared memory, which is reused once the last view is gone. If all
    # slots are in use, results go through a pipe. The fork server starts here, and imports the module of `work` and the
    # installed ones of `modules`. If `start_method` is None, workers are forks of this process if it has one thread as
    # they start; like others, they get a pickled copy of `work`. The server then starts here only if it has a CPU.
    # ``assign(task)`` is the number of its worker; None for the one with the fewest tasks.

    def __init__(
        self,
        work: Callable[[TaskT, WorkerStatus], ResultT],
        workers: int,
        *,
        slots: int,
        start_method: StartMethod | None = "forkserver",
        timeouts: TimeoutPolicy | None = None,
        first: int = 0,
        modules: Iterable[str] = (),
        assign: Callable[[TaskT], int | None] | None = None,
    ) -> None:
        modules = {type(work).__module__, *modules}
        forks = start_method is None and usable_cpus() <= workers + 1 and is_single_threaded()
        if start_method in (None, "forkserver") and not forks:
            start_fork_server(modules)
        settings = {"slots": slots, "start_method": start_method, "timeouts": timeouts or TimeoutPolicy()}
        super().__init__(partial(ProcessPool, work, first=first, modules=modules, assign=assign, **settings), workers)
        self._started: StartMethod | None = None

    @property
    def start_method(self) -> StartMethod | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Start method of the workers; None before they start."""
        return self._started if self._pool is None else self._pool.start_method

    def processes(self) -> list[Any]:
        """Return the running workers, in their order: with the methods of a `multiprocessing.Process`."""
        return [] if self._pool is None else self._pool.processes()

    def restart(self) -> None:
        self._started = self.start_method
        super().restart()


class _Pending(Result[Any]):
    __slots__ = ("_pool", "cancelled", "errors", "finished", "number", "slot", "value", "worker")

    def __init__(self, pool: ProcessPool, number: int, worker: WorkerHandle, slot: int | None) -> None:
        self._pool = pool
        self.number: int = number
        self.worker: WorkerHandle = worker
        self.slot: int | None = slot
        self.finished: bool = False
        self.cancelled: bool = False
        self.value: Any = None
        self.errors: list[BaseException] = []

    def result(self) -> Any:
        self._pool.wait_for_any([self])
        if self.errors:
            raise self.errors.pop()  # not from a local variable: its traceback would refer to it
        value, self.value = self.value, None
        return value

    def done(self) -> bool:
        if not self.finished:
            self._pool.receive(0)
        return self.finished

    def cancel(self) -> None:
        self._pool.cancel(self)


class ProcessPool(OwnedPool):
    """The worker processes of one executor and their tasks."""

    def __init__(
        self,
        work: Any,
        size: int,
        *,
        slots: int,
        start_method: StartMethod | None,
        timeouts: TimeoutPolicy,
        first: int,
        modules: set[str],
        assign: Callable[[Any], int | None] | None = None,
    ) -> None:
        check_parent(start_method or "forkserver")
        super().__init__()
        self._first = first
        self._assign = assign
        self._work = work
        self._modules = modules
        self._chooses = start_method is None
        self.start_method: StartMethod = start_method or ("fork" if is_single_threaded() else "forkserver")
        self._timeouts = timeouts
        self._active = size
        self.size, slots = within_descriptors(size, slots)
        self._largest = 0
        self._next = 0
        self._workers: list[WorkerHandle] = []
        self._ring = Ring(slots)
        self._selector = selectors.DefaultSelector()

    def use(self, workers: int) -> None:
        self._active = workers
        self.size = max(self.size, workers)

    def submit(self, task: Any) -> _Pending:
        with self.transaction():
            while len(self._workers) < self.size:
                self._start()
            worker = self._worker_of(task)
            slot = self._ring.take()
            pending = _Pending(self, self._next, worker, slot)
            self._next += 1
            worker.tasks[pending.number] = pending
            worker.give(TaskMessage(pending.number, task, slot), None if slot is None else self._ring.slots[slot])
            self._flush(worker)
            return pending

    def _worker_of(self, task: Any) -> WorkerHandle:
        number = None if self._assign is None else self._assign(task)
        if number is not None:
            return next(worker for worker in self._workers if worker.number == self._first + number % self.size)
        return min(self._workers[: self._active], key=lambda worker: len(worker.tasks))

    def processes(self) -> list[Any]:
        return sorted(self._workers, key=lambda worker: worker.number)

    def _start(self) -> None:
        numbers = set(range(self._first, self._first + self.size))
        number = min(numbers - {worker.number for worker in self._workers})
        if self._chooses and self.start_method == "fork" and self._next and not is_single_threaded():
            self.start_method = "forkserver"  # threads have started since
        if self._chooses and self.start_method == "forkserver":
            start_fork_server(self._modules)
        try:
            context, inherits = multiprocessing.get_context(self.start_method), False if self._chooses else None
            worker = WorkerHandle(number, context, self._work, self.start_method, self._timeouts, inherits=inherits)
        except ChildProcessError:
            # This process is a fork, and only the process that started the fork server may use it.
            self.start_method = "spawn"
            return
        except (OSError, EOFError) as error:
            message = (
                f"cannot start worker process {len(self._workers) + 1} of {self.size} ({type(error).__name__}: "
                f"{error}): raise the limits of open files (ulimit -n) and processes (ulimit -u), or use fewer workers"
            )
            if not self._workers:
                raise ConfigError(message, key="num_workers", value=self.size) from error
            self.size: int = len(self._workers)
            warnings.warn(f"{message}; continuing with {self.size}", RuntimeWarning, stacklevel=2)
            return
        self._workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def wait_for_any(self, waiting: list[Any]) -> None:
        watch = StallMonitor(self._timeouts)
        while not any(pending.finished for pending in waiting):
            self.receive(watch.next_look())
            if watch.is_due() and not any(pending.finished for pending in waiting):
                late: WorkerHandle = waiting[0].worker
                try:
                    watch.look(late.describe)
                except WorkerLostError:
                    with self.transaction():
                        late.kill()  # it would be just as late with the next task
                        self._lose(late)
                    raise

    def receive(self, seconds: float) -> None:
        self.check_usable()
        try:
            events = self._selector.select(seconds)
        except (OSError, ValueError):
            if not self._stopped:  # by another thread, in the meantime
                raise
            events = []
        with self.transaction():
            for key, _ in events:
                for message in self._messages(key.data):
                    self._finish(key.data, *message)
            if not events and seconds:
                # A child of a worker may keep the connection open.
                for worker in [worker for worker in self._workers if not worker.is_alive()]:
                    self._lose(worker)

    def _messages(self, worker: WorkerHandle) -> Generator[Message]:
        """Yield the messages of a worker; drop the worker if its connection has ended."""
        try:
            self._flush(worker)
            while (message := worker.inbox.take()) is not None:
                yield message
        except (EOFError, OSError):
            self._lose(worker)

    def _flush(self, worker: WorkerHandle) -> None:
        waits = 0 if worker.outbox.flush() else selectors.EVENT_WRITE
        key = self._selector.get_key(worker.connection)
        if key.events != selectors.EVENT_READ | waits:
            self._selector.modify(worker.connection, selectors.EVENT_READ | waits, worker)

    def _finish(self, worker: WorkerHandle, done: ResultMessage, parts: list[Any]) -> None:
        pending: _Pending = worker.tasks.pop(done.number)
        slot, pending.slot = pending.slot, None
        pending.finished = True
        if slot is not None and (pending.cancelled or not done.extents):
            self._ring.give_back(slot)
        if done.extents:
            self._fit_memory(sum(done.extents[-1]))
        if done.note and self._ring.retire(0):
            warnings.warn(f"sending batches through a pipe from now on: {done.note}", RuntimeWarning, stacklevel=2)
        if pending.cancelled:
            return
        failure, text = done.failure, done.traceback_text
        if not failure:
            try:
                lent = self._ring.lend(slot, done.extents) if slot is not None and done.extents else parts
                pending.value = put_together(lent)
            except Exception as error:
                failure = f"sent a batch that cannot be unpickled: {type(error).__name__}: {error}"
                text = traceback.format_exc()
        if failure:
            pending.errors.append(WorkerLostError(worker.name, failure, done.position or worker.position, text))

    def _fit_memory(self, size: int) -> None:
        """Retire slots that do not fit into memory, if this result is the largest so far."""
        if size <= self._largest:
            return
        self._largest = size
        needed, available = self._ring.missing(size), int(available_bytes() * _MEMORY_SHARE)
        slots = len(self._ring.slots)
        kept = slots - -(-(needed - available) // size)
        if needed > available and self._ring.retire(max(0, kept)):
            warnings.warn(
                f"{slots} batches of {size:,} bytes in flight need {needed:,} more bytes of memory, but {available:,} "
                f"are available: keeping {max(0, kept)} in shared memory and sending others through a pipe; use fewer "
                "workers, less prefetch or smaller batches",
                RuntimeWarning,
                stacklevel=2,
            )

    def _lose(self, worker: WorkerHandle) -> None:
        reason = worker.end()
        self._selector.unregister(worker.connection)
        self._workers.remove(worker)
        for pending in worker.tasks.values():
            pending.finished = True
            pending.errors.append(WorkerLostError(worker.name, reason, worker.position))
            if pending.slot is not None:
                self._ring.give_back(pending.slot)
        worker.close()

    def cancel(self, pending: _Pending) -> None:
        """Drop the result of a task; the worker skips the task if it has not started it."""
        if not self.is_usable():
            return
        pending.cancelled = True
        pending.value = None
        tasks = pending.worker.tasks
        first_wanted = next((number for number, task in tasks.items() if not task.cancelled), self._next)
        pending.worker.status.cancel(first_wanted - 1)

    def end(self) -> None:
        for worker in self._workers:
            worker.status.cancel(self._next)
            worker.dismiss()
        until = monotonic() + _CLOSE_SECONDS
        for worker in self._workers:
            worker.join(until - monotonic())
            worker.close()
        self._workers.clear()
        self._selector.close()
        self._ring.close()

    @contextlib.contextmanager
    def transaction(self) -> Generator[None]:
        with super().transaction():
            try:
                yield
            except BaseException:
                self.stop()
                raise
