"""Where tasks run, and what is known of a worker. What a task is, is not known here."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, Literal, NoReturn, Protocol, TypeAlias, TypeVar

import numpy as np

from dataload.types import BytesArray

__all__ = [
    "Executor",
    "Place",
    "Result",
    "SerialExecutor",
    "StallMonitor",
    "StartMethod",
    "TimeoutPolicy",
    "WorkerLostError",
    "WorkerStatus",
    "check_process",
    "raise_closed",
    "worker_name",
]

TaskT = TypeVar("TaskT")
TaskT_contra = TypeVar("TaskT_contra", contravariant=True)
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)

StartMethod: TypeAlias = Literal["forkserver", "spawn", "fork"]
"""How worker processes come into being."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker was at when it last said so; -1 where it has not."""

    epoch: int
    step: int
    index: int


class WorkerStatus:
    """Says where a worker is: written by the worker, read by the consumer, in memory that both see.

    Args:
        memory: (n,) uint8, at least `BYTES` of them, all 0 at first; by default memory of this process.
    """

    BYTES = 40

    def __init__(self, memory: BytesArray | None = None) -> None:
        own = np.zeros(self.BYTES, np.uint8) if memory is None else memory[: self.BYTES]
        # Epoch, step and index, all plus 1, for 0 says that there is none; tasks below this are cancelled; stage.
        self._words = own.view(np.int64)

    def at(self, epoch: int, step: int, index: int = -1) -> None:
        """The worker begins with a step, or with a sample of it."""
        words = self._words
        words[0], words[1], words[2] = epoch + 1, step + 1, index + 1

    def at_index(self, index: int) -> None:
        """The worker begins with another sample of the same step."""
        self._words[2] = index + 1

    def place(self) -> Place:
        """Where the worker is."""
        epoch, step, index = self._words[:3].tolist()
        return Place(epoch - 1, step - 1, index - 1)

    def cancel(self, number: int) -> None:
        """Nobody waits for the tasks up to this number any more."""
        self._words[3] = max(int(self._words[3]), number + 1)

    def is_cancelled(self, number: int) -> bool:
        """Whether nobody waits for a task any more."""
        return number < int(self._words[3])

    @property
    def stage(self) -> int:
        """How far a worker process is with its start: 0 until it runs, 1 while it loads its work, then 2."""
        return int(self._words[4])

    @stage.setter
    def stage(self, stage: int) -> None:
        self._words[4] = stage


class WorkerLostError(Exception):
    """A worker gives no result for a task; within dataload only, where it becomes a `WorkerError`.

    Attributes:
        worker: Its name.
        reason: What became of it.
        place: Where it was.
        stacks: What its threads were at; empty if unknown.
    """

    def __init__(self, worker: str, reason: str, place: Place, stacks: str = "") -> None:
        super().__init__(worker, reason, place, stacks)
        self.worker = worker
        self.reason = reason
        self.place = place
        self.stacks = stacks


@dataclass(frozen=True, slots=True)
class TimeoutPolicy:
    """How long to wait for one task.

    Attributes:
        timeout: Seconds after which to give up; None waits on.
        warn_after: Seconds after which to say what the worker is at; then again after twice as many, and so on. Half
            of `timeout` if that is less.
    """

    timeout: float | None = None
    warn_after: float = 60.0

    def watch(self) -> StallMonitor:
        """Begin to wait."""
        return StallMonitor(self)


class StallMonitor:
    """One wait, and when to look after the worker."""

    def __init__(self, timeouts: TimeoutPolicy) -> None:
        self._timeout = timeouts.timeout
        self._begun = monotonic()
        self._next = timeouts.warn_after
        if self._timeout is not None:
            self._next = min(self._next, self._timeout / 2)

    def next_look(self) -> float:
        """Seconds until it is time to look."""
        return max(0.0, self._begun + self._next - monotonic())

    def is_due(self) -> bool:
        """Whether it is time to look."""
        return self.next_look() == 0

    def look(self, describe: Callable[[], tuple[str, Place, str]]) -> None:
        """Warn of a worker that is late.

        Args:
            describe: Gives its name, where it is, and the stacks of its threads.

        Raises:
            WorkerLostError: It is too late.
        """
        waited = monotonic() - self._begun
        worker, place, stacks = describe()
        if self._timeout is not None and waited >= self._timeout:
            raise WorkerLostError(
                worker, f"has given no batch for {waited:.1f} s (timeout={self._timeout})", place, stacks
            )
        self._next = 2 * self._next if self._timeout is None else min(2 * self._next, self._timeout)
        at = f"is at step {place.step} of epoch {place.epoch}" if place.step >= 0 else "has not begun with it"
        index = f", index {place.index}" if place.index >= 0 else ""
        warnings.warn(f"no batch for {waited:.1f} s: {worker} {at}{index}\n{stacks}", RuntimeWarning, stacklevel=2)


class Result(Protocol[ResultT_co]):
    """What a submitted task becomes."""

    def result(self) -> ResultT_co:
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


class Executor(Protocol[TaskT_contra, ResultT_co]):
    """Does the same work with one task after another."""

    def submit(self, task: TaskT_contra, /) -> Result[ResultT_co]:
        """Arrange for the work to be done with `task`."""
        ...

    def wait_for_any(self, results: Iterable[Result[Any]], /) -> None:
        """Wait until one of `results` is done."""
        ...

    def grow(self, workers: int, /) -> None:
        """Use so many workers from now on, if that is more."""
        ...

    def close(self) -> None:
        """Stop, after the tasks that have begun. May be called twice."""
        ...


@dataclass(slots=True)
class _Deferred(Generic[TaskT, ResultT]):
    work: Callable[[TaskT, WorkerStatus], ResultT]
    task: TaskT
    status: WorkerStatus

    def result(self) -> ResultT:
        return self.work(self.task, self.status)

    def done(self) -> bool:
        return True  # it will be, by whoever asks

    def run(self) -> bool:
        return False

    def cancel(self) -> None:
        pass


class SerialExecutor(Generic[TaskT, ResultT]):
    """Does the work in the consumer's thread, when its result is asked for.

    Args:
        work: What is done with a task.
    """

    def __init__(self, work: Callable[[TaskT, WorkerStatus], ResultT]) -> None:
        self._work = work
        self._heartbeat = WorkerStatus()

    def submit(self, task: TaskT) -> Result[ResultT]:
        """See `Executor`."""
        return _Deferred(self._work, task, self._heartbeat)

    def wait_for_any(self, results: Iterable[Result[Any]]) -> None:
        """See `Executor`."""

    def grow(self, workers: int) -> None:
        """See `Executor`."""

    def close(self) -> None:
        """See `Executor`."""


def worker_name() -> str:
    """The worker that calls this: the name of its thread, which in a worker process is that of the process."""
    return threading.current_thread().name


def check_process(pid: int) -> None:
    """See to it that this is still the process whose workers one waits for.

    Raises:
        RuntimeError: It is a fork of that.
    """
    if pid != os.getpid():
        raise RuntimeError(
            "this iteration was begun before the process was forked, and its workers belong to the parent: "
            "begin another iteration here"
        )


def raise_closed() -> NoReturn:
    """For a thread that wants a batch of a loader that is closed, or that nobody else has.

    Raises:
        RuntimeError: Always, but at the exit of the interpreter: only daemon threads are left then, and this one stops
            without a word.
    """
    if not threading.main_thread().is_alive():
        threading.Event().wait()
    raise RuntimeError("the loader was closed while a batch was waited for")
