"""The executor protocol, the serial executor, and the state of a worker. Executors know nothing about their tasks."""

from __future__ import annotations

import mmap
import os
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

import numpy as np

from dataload._util.settings import Above, Checked, Least, setting_error
from dataload._util.threads import LONGEST_SLEEP
from dataload.types import BytesArray

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

StartMethod: TypeAlias = Literal["forkserver", "spawn", "fork"]
"""Method by which `multiprocessing` starts a worker process."""


@dataclass(frozen=True, slots=True)
class WorkerPosition:
    """The step and sample that a worker last reported; -1 if none."""

    epoch: int
    step: int
    index: int


class WorkerStatus:
    """Progress of a worker, in memory that it writes and the consumer reads: (n,) uint8 zeros, n >= `BYTES`."""

    BYTES = 40

    def __init__(self, memory: BytesArray | None = None) -> None:
        own = np.zeros(self.BYTES, np.uint8) if memory is None else memory[: self.BYTES]
        # Epoch, step and index, each plus 1 because 0 means none; tasks below the fourth word are cancelled; stage.
        self._words = own.data.cast("q")  # numpy's own items take twice as long to set

    def at(self, epoch: int, step: int, index: int = -1) -> None:
        words = self._words
        words[0], words[1], words[2] = epoch + 1, step + 1, index + 1

    def at_index(self, index: int) -> None:
        self._words[2] = index + 1

    def position(self) -> WorkerPosition:
        epoch, step, index = self._words[:3].tolist()
        return WorkerPosition(epoch - 1, step - 1, index - 1)

    def cancel(self, number: int) -> None:
        """Cancel all tasks up to and including this number."""
        self._words[3] = max(self._words[3], number + 1)

    def is_cancelled(self, number: int) -> bool:
        return number < self._words[3]

    @property
    def stage(self) -> int:
        """Start-up stage of a worker process: 0 before it runs, 1 while it loads its work, then 2."""
        return self._words[4]

    @stage.setter
    def stage(self, stage: int) -> None:
        self._words[4] = stage


class WorkerLostError(Exception):
    """A worker failed to return a result, for a `reason` such as "was killed by SIGKILL". The loader translates it."""

    def __init__(
        self, worker: str, reason: str, position: WorkerPosition, stacks: str = "", *, again: bool = False
    ) -> None:
        super().__init__(worker, reason, position, stacks)
        self.worker = worker
        self.reason = reason
        self.position = position
        self.stacks = stacks
        self.again = again  # whether another worker may succeed, because the machine failed and not the task


@dataclass(frozen=True, slots=True)
class TimeoutPolicy:
    """The times to wait for a task before warning and before giving up."""

    timeout: float | None = None  # seconds after which to give up; None waits for ever
    # Seconds until the first warning, or half of `timeout` if that is less. The interval doubles with each warning.
    warn_after: float = 60.0
    # Maps a position to the index to show and a description; by default the index is shown.
    locate: Callable[[WorkerPosition], tuple[int, str]] | None = None


_FORKED = (
    "was forked while it made a batch, by a transform for example, and both processes continued: end the child with "
    "os._exit()"
)


@cache
def _fork_mark() -> Any:
    """Return memory shared with forks of this process: the number of a process that a task forked, or 0."""
    return memoryview(mmap.mmap(-1, 8)).cast("q")


def begin_task() -> int:
    _fork_mark()  # before a task can fork
    return os.getpid()


def check_fork(pid: int, status: WorkerStatus) -> None:
    """Check that no task forked the process `pid` and continued in both: end the child, or raise a WorkerLostError."""
    here = os.getpid()
    if here == pid and _fork_mark()[0] != pid:
        return
    _fork_mark()[0] = 0 if here == pid else pid
    name = worker_name()
    if here != pid and name.startswith("dataload-"):
        os.write(2, f"{name} (process {here}) {_FORKED}\n".encode())
        os._exit(1)
    raise WorkerLostError(name, _FORKED, status.position() if here == pid else WorkerPosition(-1, -1, -1))


class StallMonitor:
    """Decides during one wait, which starts now, when to warn about a worker and when to give up on it."""

    def __init__(self, timeouts: TimeoutPolicy) -> None:
        self._timeout = timeouts.timeout
        self._locate = timeouts.locate
        self._begun = monotonic()
        self._next = timeouts.warn_after
        if self._timeout is not None:
            self._next = min(self._next, self._timeout / 2)

    def next_look(self) -> float:
        """Return the seconds to sleep, at most, before `is_due` is asked again."""
        return min(LONGEST_SLEEP, max(0.0, self._begun + self._next - monotonic()))

    def is_due(self) -> bool:
        return self.next_look() == 0

    def look(self, describe: Callable[[], tuple[str, WorkerPosition, str]]) -> None:
        """If it is due, warn of a late worker, or raise a `WorkerLostError` after the timeout; `describe` names it."""
        if not self.is_due():
            return
        waited = monotonic() - self._begun
        worker, position, stacks = describe()
        if self._timeout is not None and waited >= self._timeout:
            raise WorkerLostError(
                worker, f"has returned no batch for {waited:.1f} s (timeout={self._timeout})", position, stacks
            )
        self._next = 2 * self._next if self._timeout is None else min(2 * self._next, self._timeout)
        at = f"is at step {position.step} of epoch {position.epoch}" if position.step >= 0 else "has not started it"
        number, where = (position.index, "") if self._locate is None else self._locate(position)
        index = f", index {number}" if number >= 0 else ""
        stacks = f"{where}\n{stacks}" if where else stacks
        warnings.warn(f"no batch for {waited:.1f} s: {worker} {at}{index}\n{stacks}", RuntimeWarning, stacklevel=2)


class Result(Generic[ResultT]):
    """The result of a submitted task. This base class is for a task that runs on request."""

    __slots__ = ()

    def result(self) -> ResultT:
        """Wait for the task, and return its value or raise its exception. May be called once."""
        raise NotImplementedError

    def done(self) -> bool:
        """Return True if `result` would not wait."""
        return True

    def run(self) -> bool:
        """Run the task in this thread if no worker has started it, and return whether it was run here."""
        return False

    def cancel(self) -> None:
        """Cancel the task if it has not started."""


class Executor(ABC, Generic[TaskT, ResultT]):
    """Applies one function to many tasks."""

    start_method: StartMethod | None = None
    """How worker processes started; None before that, and if workers are not processes."""

    @abstractmethod
    def submit(self, task: TaskT, /) -> Result[ResultT]:
        """Schedule a task. Fails if the executor is closed or no worker could be started."""

    def wait_for_any(self, results: Iterable[Result[Any]], /) -> None:
        """Wait until at least one of `results` is done."""

    def use(self, workers: int, /) -> None:
        """Run tasks submitted from now on in `workers` workers; 0 is the consumer's thread."""

    def capacity(self) -> int | None:
        """Return the number of workers for which there are CPUs; None where these are the CPUs of this process."""
        return None

    def processes(self) -> list[Any]:
        """Return the running workers if they are processes."""
        return []

    def restart(self) -> None:
        """Stop all workers; the next task starts new ones with the current work."""

    def close(self) -> None:
        """Stop after the running tasks. May be called twice."""


@dataclass(slots=True)
class Deferred(Result[ResultT], Generic[TaskT, ResultT]):
    """A task that runs in the consumer's thread when its result is requested."""

    work: Callable[[TaskT, WorkerStatus], ResultT]
    task: TaskT
    status: WorkerStatus

    def result(self) -> ResultT:
        pid = begin_task()
        value = self.work(self.task, self.status)
        check_fork(pid, self.status)
        return value


class SerialExecutor(Executor[TaskT, ResultT]):
    """Runs each task in the consumer's thread when its result is requested."""

    def __init__(self, work: Callable[[TaskT, WorkerStatus], ResultT]) -> None:
        self._work = work
        self._status = WorkerStatus()

    def submit(self, task: TaskT) -> Result[ResultT]:
        return Deferred(self._work, task, self._status)


class PoolExecutor(Executor[TaskT, ResultT]):
    """Runs tasks in workers that live until `close`, until this object is dropped, or until the interpreter exits."""

    def __init__(self, start: Callable[[int], Any], workers: int) -> None:
        self._start = start
        self._workers = workers
        self._pool: Any = None
        self._stop: weakref.finalize[[], Any] | None = None
        self._closed = False

    def submit(self, task: TaskT) -> Result[ResultT]:
        pool = self._pool
        if pool is None or not pool.is_usable():
            if self._closed or not threading.main_thread().is_alive():
                raise_closed()
            if self._stop is not None:
                self._stop.detach()
            pool = self._pool = self._start(self._workers)
            self._stop = weakref.finalize(self, pool.stop)
        return pool.submit(task)

    def use(self, workers: int) -> None:
        self._workers = workers
        if self._pool is not None:
            self._pool.use(workers)

    def wait_for_any(self, results: Iterable[Result[Any]]) -> None:
        if self._pool is not None:
            self._pool.wait_for_any(list(results))

    def restart(self) -> None:
        if self._stop is not None:
            self._stop()
        self._pool = self._stop = None

    def close(self) -> None:
        self._closed = True
        self.restart()


class OwnedPool(ABC):
    """Workers of one process, used by the consumer's thread; any thread may stop them."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._stopped = False

    def is_usable(self) -> bool:
        return not self._stopped and self._pid == os.getpid()

    def check_usable(self) -> None:
        """Raise in a fork of the owner, and for a thread that waits for a closed loader."""
        check_process(self._pid)
        if self._stopped:
            raise_closed()

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Hold the lock of a pool that can be used."""
        self.check_usable()
        with self._lock:
            self.check_usable()
            yield

    def stop(self) -> None:
        if self.is_usable():
            self._stopped = True
            with self._lock:
                self.end()

    @abstractmethod
    def end(self) -> None:
        """End the workers, and drop all tasks."""


def worker_name() -> str:
    """Return the name of the calling worker: its thread's, or in a worker process the process's."""
    return threading.current_thread().name


def check_process(pid: int) -> None:
    """Raise if called in a forked child of `pid`, the process that owns the workers."""
    if pid != os.getpid():
        raise RuntimeError(
            "this iteration was started before the process was forked, and its workers belong to the parent: "
            "start another iteration here"
        )


def raise_closed() -> NoReturn:
    """Raise for a thread that waits for a batch of a closed loader, or stop a daemon at the interpreter's exit."""
    if not threading.main_thread().is_alive():
        threading.Event().wait()
    raise RuntimeError("the loader was closed while waiting for a batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet(Checked):
    """Workers on the machines of a Ray cluster: ``Loader(..., executor=Fleet(), num_workers=64)``.

    Each worker is a Ray actor that opens the source itself, by paths that its node sees or by URLs, and makes whole
    batches. A batch whose actor or node is lost is made again elsewhere. Ray that this process has initialised is used;
    otherwise it connects to a running cluster, or starts one on this machine and says so.

    Attributes:
        num_cpus: CPUs that Ray reserves for a worker.
        memory: Bytes of memory that Ray reserves for a worker; None reserves none.
        scheduling: ``"spread"`` over the nodes, or Ray's ``"default"``, which fills one node after another.
        name: Loaders with the same name, for example on several ranks, share the workers and take turns. By
            default, each loader starts its own.
        detached: Whether the workers of a named fleet stay when its last loader ends, until ``dataload fleet stop``.
        address: The cluster, as in ``ray.init``: by default the one in RAY_ADDRESS, or one that runs on this machine.
        writable: Whether batches are copied into memory of the loader's own, so that they can be written to. If not,
            their arrays are Ray's memory, which is read-only and stays in use until they are gone.
    """

    num_cpus: Annotated[float, Above(0)] = 1
    memory: Annotated[int, Least(1)] | None = None
    scheduling: Literal["spread", "default"] = "spread"
    name: str | None = None
    detached: bool = False
    address: str | None = None
    writable: bool = True

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.name is not None and (not self.name or "/" in self.name):
            raise setting_error("name", self.name, "must be text without a slash")
        if self.detached and self.name is None:
            raise setting_error("detached", self.detached, "needs a name, by which other processes find the workers")
