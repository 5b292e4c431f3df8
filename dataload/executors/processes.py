"""Tasks in worker processes, for transforms that hold the GIL."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import selectors
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable
from multiprocessing import forkserver
from time import monotonic
from typing import Any, Generic, TypeVar

from dataload.errors import ConfigError
from dataload.executors.base import (
    Result,
    StartMethod,
    TimeoutPolicy,
    WorkerLostError,
    WorkerStatus,
    check_process,
    raise_closed,
)
from dataload.executors.channel import Message
from dataload.executors.handle import WorkerHandle
from dataload.executors.limits import check_parent, within_descriptors
from dataload.executors.memory import available_bytes
from dataload.executors.serialization import put_together
from dataload.executors.shared_memory import Ring
from dataload.executors.worker import ResultMessage, TaskMessage

__all__ = ["ProcessExecutor"]

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_SHARE_OF_MEMORY = 0.8
_GOODBYE_SECONDS = 1.0
_LOOK_SECONDS = 0.5
_PRELOAD = ("dataload.executors.worker", "threadpoolctl")


class ProcessExecutor(Generic[TaskT, ResultT]):
    """Runs tasks in processes that live until `close`, until nothing refers to this, or until either side dies.

    Results come back in shared memory: the large arrays of a result are views of a slot that is used again when the
    last view of it is gone, so what is kept is never overwritten. (A fork of this process does not count as keeping
    it.) When all slots are held, results are sent through a pipe.

    Args:
        work: What is done with a task; pickled once for each worker, unless they are forked.
        workers: Number of processes, at least 1; started with the first task, and anew with the next task after one
            was lost.
        slots: Number of slots; as many as tasks may be in flight and results be held.
        start_method: See `StartMethod`. `fork` copies the process as it is, threads and locks too.
        timeouts: When to warn and to give up on a task.
    """

    def __init__(
        self,
        work: Callable[[TaskT, WorkerStatus], ResultT],
        workers: int,
        *,
        slots: int,
        start_method: StartMethod = "forkserver",
        timeouts: TimeoutPolicy | None = None,
    ) -> None:
        self._work = work
        self._workers = workers
        self._slots = slots
        self._start_method: StartMethod = start_method
        self._patience = timeouts or TimeoutPolicy()
        self._crew: ProcessPool | None = None
        self._stop: weakref.finalize[[], Any] | None = None
        self._closed = False

    def submit(self, task: TaskT) -> Result[ResultT]:
        """See `Executor`.

        Raises:
            ConfigError: No worker can be started.
            RuntimeError: The executor is closed.
        """
        crew = self._crew
        if crew is None or not crew.is_usable():
            if self._closed or not threading.main_thread().is_alive():
                raise_closed()
            if self._stop is not None:
                self._stop.detach()
            crew = self._crew = ProcessPool(self._work, self._workers, self._slots, self._start_method, self._patience)
            self._stop = weakref.finalize(self, crew.stop)
        return crew.submit(task)

    def grow(self, workers: int) -> None:
        """Use so many processes from now on, if that is more."""
        self._workers = max(workers, self._workers)
        if self._crew is not None:
            self._crew.size = self._workers

    def wait_for_any(self, results: Iterable[Result[Any]]) -> None:
        """See `Executor`."""
        if self._crew is not None:
            self._crew.wait_for_any(list(results))

    def close(self) -> None:
        """See `Executor`."""
        self._closed = True
        if self._stop is not None:
            self._stop()
        self._crew = self._stop = None


class _Pending:
    """A task that a worker has."""

    __slots__ = ("_crew", "cancelled", "error", "finished", "number", "slot", "value", "worker")

    def __init__(self, crew: ProcessPool, number: int, worker: WorkerHandle, slot: int | None) -> None:
        self._crew = crew
        self.number = number
        self.worker = worker
        self.slot = slot
        self.finished = self.cancelled = False
        self.value: Any = None
        self.error: BaseException | None = None

    def result(self) -> Any:
        self._crew.wait_for_any([self])
        value, self.value = self.value, None
        if self.error is None:
            return value
        # Its traceback refers to this frame: without this the two keep each other alive.
        error, self.error = self.error, None
        try:
            raise error
        finally:
            del error

    def done(self) -> bool:
        if not self.finished:
            self._crew.receive(0)
        return self.finished

    def run(self) -> bool:
        return False  # the consumer's process is there to consume

    def cancel(self) -> None:
        self._crew.cancel(self)


class ProcessPool:
    """The workers of one executor and what they are at.

    Used by the consumer's thread, and stopped by any. What interrupts it amid its books ends it: the next task begins
    with another crew.
    """

    def __init__(self, work: Any, size: int, slots: int, start_method: StartMethod, timeouts: TimeoutPolicy) -> None:
        check_parent(start_method)
        self.size = size
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._stopped = False
        self._work = work
        self._start_method: StartMethod = start_method
        self._patience = timeouts
        if start_method == "forkserver":
            # A server that is running already keeps what it has.
            known: list[str] = getattr(getattr(forkserver, "_forkserver", None), "_preload_modules", ["__main__"])
            forkserver.set_forkserver_preload([*known, *(name for name in _PRELOAD if name not in known)])
        self.size, slots = within_descriptors(size, slots)
        self._largest = 0
        self._next = 0
        self._workers: list[WorkerHandle] = []
        self._ring = Ring(slots)
        self._selector = selectors.DefaultSelector()

    def is_usable(self) -> bool:
        """Whether it takes tasks, of this process."""
        return not self._stopped and self._pid == os.getpid()

    def submit(self, task: Any) -> _Pending:
        with self._whole():
            while len(self._workers) < self.size:
                self._start()
            worker = min(self._workers, key=lambda worker: len(worker.tasks))
            slot = self._ring.take()
            pending = _Pending(self, self._next, worker, slot)
            self._next += 1
            worker.tasks[pending.number] = pending
            worker.give(TaskMessage(pending.number, task, slot), None if slot is None else self._ring.slots[slot])
            self._flush(worker)
            return pending

    def _start(self) -> None:
        number = min(set(range(self.size)) - {worker.number for worker in self._workers})
        try:
            context = multiprocessing.get_context(self._start_method)
            worker = WorkerHandle(number, context, self._work, self._start_method)
        except ChildProcessError:
            # This is a fork of the process that has started the fork server, which lets only that one use it.
            self._start_method = "spawn"
            return
        except (OSError, EOFError) as error:
            message = (
                f"cannot start worker process {len(self._workers) + 1} of {self.size} ({type(error).__name__}: "
                f"{error}): raise the limits of open files (ulimit -n) and processes (ulimit -u), or use fewer workers"
            )
            if not self._workers:
                raise ConfigError(message, key="num_workers", value=self.size) from error
            self.size = len(self._workers)
            warnings.warn(f"{message}; goes on with {self.size}", RuntimeWarning, stacklevel=2)
            return
        self._workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def wait_for_any(self, waiting: list[Any]) -> None:
        """Until one of these tasks is finished, or timeouts is."""
        watch = self._patience.watch()
        while not any(pending.finished for pending in waiting):
            self.receive(watch.next_look())
            if watch.is_due() and not any(pending.finished for pending in waiting):
                late: WorkerHandle = waiting[0].worker
                try:
                    watch.look(late.describe)
                except WorkerLostError:
                    with self._whole():
                        late.kill()  # it would be as late with the next task
                        self._lose(late)
                    raise

    def receive(self, seconds: float) -> None:
        """Take what workers have sent, waiting for it so long at most."""
        check_process(self._pid)
        if self._stopped:
            raise_closed()
        try:
            events = self._selector.select(min(seconds, _LOOK_SECONDS))
        except (OSError, ValueError):
            if not self._stopped:  # meanwhile, by another thread
                raise
            events = []
        with self._whole():
            for key, _ in events:
                for message in self._messages(key.data):
                    self._take(key.data, *message)
            if not events and seconds:
                # A child of a worker may keep its connection open.
                for worker in [worker for worker in self._workers if not worker.is_alive()]:
                    self._lose(worker)

    def _messages(self, worker: WorkerHandle) -> Generator[Message]:
        """What has come from a worker; loses it if that ends with its end."""
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

    def _take(self, worker: WorkerHandle, done: ResultMessage, parts: list[Any]) -> None:
        pending: _Pending = worker.tasks.pop(done.number)
        slot, pending.slot = pending.slot, None
        pending.finished = True
        if slot is not None and (pending.cancelled or not done.extents):
            self._ring.give_back(slot)
        if done.extents:
            self._fit_memory(sum(done.extents[-1]))
        if done.note and self._ring.retire(0):
            warnings.warn(f"batches are sent through a pipe from now on: {done.note}", RuntimeWarning, stacklevel=2)
        if pending.cancelled:
            return
        failure, text = done.failure, done.traceback_text
        if not failure:
            try:
                lent = self._ring.lend(slot, done.extents) if slot is not None and done.extents else parts
                pending.value = put_together(lent)
            except Exception as error:
                failure = f"sent a batch that cannot be taken: {type(error).__name__}: {error}"
                text = traceback.format_exc()
        if failure:
            pending.error = WorkerLostError(worker.name, failure, done.place or worker.place, text)

    def _fit_memory(self, size: int) -> None:
        """Use no more slots than there is memory for, now that one has become larger than all before."""
        if size <= self._largest:
            return
        self._largest = size
        needed, available = self._ring.missing(size), int(available_bytes() * _SHARE_OF_MEMORY)
        slots = len(self._ring.slots)
        kept = slots - -(-(needed - available) // size)
        if needed > available and self._ring.retire(max(0, kept)):
            warnings.warn(
                f"{slots} batches of {size:,} bytes in flight need {needed:,} more bytes of memory, and {available:,} "
                f"may be used: {max(0, kept)} are kept in shared memory, others sent through a pipe; use fewer "
                "workers, less prefetch or smaller batches",
                RuntimeWarning,
                stacklevel=2,
            )

    def _lose(self, worker: WorkerHandle) -> None:
        """A worker is gone, and its tasks fail."""
        reason = worker.end()
        self._selector.unregister(worker.connection)
        self._workers.remove(worker)
        for pending in worker.tasks.values():
            pending.finished = True
            pending.error = WorkerLostError(worker.name, reason, worker.place)
            if pending.slot is not None:
                self._ring.give_back(pending.slot)
        worker.close()

    def cancel(self, pending: _Pending) -> None:
        """The result will not be asked for; the worker leaves the task out if it has not begun."""
        if not self.is_usable():
            return
        pending.cancelled = True
        pending.value = None
        tasks = pending.worker.tasks
        first_wanted = next((number for number, task in tasks.items() if not task.cancelled), self._next)
        pending.worker.status.cancel(first_wanted - 1)

    def stop(self) -> None:
        """End all processes: kindly, then not."""
        if not self.is_usable():
            return
        self._stopped = True
        with self._lock:
            for worker in self._workers:
                worker.status.cancel(self._next)
                worker.dismiss()
            until = monotonic() + _GOODBYE_SECONDS
            for worker in self._workers:
                worker.join(until - monotonic())
                worker.close()
            self._workers.clear()
            self._selector.close()
            self._ring.close()

    @contextlib.contextmanager
    def _whole(self) -> Generator[None]:
        check_process(self._pid)
        with self._lock:
            if self._stopped:
                raise_closed()
            try:
                yield
            except BaseException:
                self.stop()
                raise
