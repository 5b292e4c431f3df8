"""The workers of a multi-stream loader: each owns a fixed part of the rows, and all are asked for every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from dataload._util.checks import check_choice
from dataload.errors import ConfigError
from dataload.executors import (
    Executor,
    Place,
    Result,
    SerialExecutor,
    StartMethod,
    ThreadExecutor,
    TimeoutPolicy,
    WorkerLostError,
)
from dataload.executors.base import StallMonitor
from dataload.executors.serialization import check_pickle
from dataload.loader.workers import ExecutorName
from dataload.streams.parts import Part, PartTask, PartWork
from dataload.streams.rows import RowStart, StreamPlan, describe

__all__ = ["StreamLocator", "StreamWorkers", "parts_of"]

_SLOTS_BEYOND_WINDOW = 3  # the batch that the consumer has, the one before it, and one that is on its way


def parts_of(rows: int, most: int) -> int:
    """The largest number of equal parts of `rows`, `most` at most."""
    return next(parts for parts in range(min(rows, most), 0, -1) if rows % parts == 0)


@dataclass(frozen=True, slots=True)
class StreamLocator:
    """Tells row and sequence from the one number that a worker writes down of both.

    Attributes:
        plan: Knows the sequences.
    """

    plan: StreamPlan

    def row(self, place: Place) -> int:
        """The row that a worker is at, of the batch; -1 if it has not said."""
        return place.index // self.plan.order.sequences if place.index >= 0 else -1

    def sequence(self, place: Place) -> int:
        """The sequence that it is at; -1 if it has not said."""
        return place.index % self.plan.order.sequences if place.index >= 0 else -1

    def text(self, place: Place) -> str:
        """Both in words."""
        if place.index < 0:
            return ""
        return f"in row {self.row(place)}, at {describe(self.plan.sequences, self.sequence(place))}"


@dataclass(frozen=True, slots=True)
class _StreamTimeoutPolicy(TimeoutPolicy):
    """Says which stream it is that keeps a step.

    Attributes:
        naming: Knows it.
    """

    naming: StreamLocator | None = None

    def watch(self) -> StallMonitor:
        """See `TimeoutPolicy`."""
        return _StreamStallMonitor(self, self.naming)


class _StreamStallMonitor(StallMonitor):
    def __init__(self, timeouts: TimeoutPolicy, naming: StreamLocator | None) -> None:
        super().__init__(timeouts)
        self._naming = naming

    def look(self, describe: Callable[[], tuple[str, Place, str]]) -> None:
        """See `StallMonitor`."""
        naming, (worker, place, stacks) = self._naming, describe()
        assert naming is not None, "made with one"
        named = Place(place.epoch, place.step, naming.sequence(place))
        try:
            super().look(lambda: (worker, named, f"{naming.text(place)}\n{stacks}"))
        except WorkerLostError as lost:
            lost.place, lost.stacks = place, stacks
            raise


class StreamWorkers:
    """Makes every step of all rows, each worker its part.

    Args:
        plan: What is to be done.
        rows: The rows of this rank, by their numbers among those of all.
        workers: Workers at most; 0 for the consumer's thread.
        executor: Where they work.
        start_method: Of processes.
        window: Steps ahead.
        timeout: Seconds after which a step that does not come is an error.

    Raises:
        ConfigError: There is no such executor or way to start one, or something cannot be pickled for processes.
    """

    def __init__(
        self,
        plan: StreamPlan,
        rows: Sequence[int],
        workers: int,
        *,
        executor: ExecutorName,
        start_method: StartMethod,
        window: int,
        timeout: float | None,
    ) -> None:
        for key, value, kind in (("executor", executor, ExecutorName), ("start_method", start_method, StartMethod)):
            check_choice(key, value, get_args(kind))
        if workers and executor == "processes" and start_method != "fork":
            _check_pickles(plan)
        self.workers = parts_of(len(rows), workers) if workers else 0
        self.naming = StreamLocator(plan)
        self._patience = _StreamTimeoutPolicy(timeout=timeout, naming=self.naming)
        self._executor: ExecutorName = executor
        self._start_method: StartMethod = start_method
        self._slots = window + _SLOTS_BEYOND_WINDOW
        size = len(rows) // max(self.workers, 1)
        self._plan = plan
        self._parts = [(first, rows[first : first + size]) for first in range(0, len(rows), size)]
        self._begin()

    def submit(self, epoch: int, step: int, session: int, starts: tuple[RowStart, ...]) -> Result[list[Part]]:
        """Ask all workers for a step.

        Args:
            epoch: Number of the epoch.
            step: Number of the step.
            session: See `PartTask`.
            starts: Where the rows begin, if this is the first step of the session; else empty.
        """
        results: list[Result[Part]] = []
        for executor, (first, rows) in zip(self._executors, self._parts, strict=True):
            task = PartTask(session, epoch, step, starts[first : first + len(rows)])
            results.append(executor.submit(task))
        return _AllParts(results)

    def replace(self) -> None:
        """Go on with other workers: one that hung may come back, and would take from streams that others have."""
        self.close()
        self._begin()

    def close(self) -> None:
        """Stop the workers, and close their streams."""
        for executor in self._executors:
            executor.close()
        for work in self._works:
            work.close()

    def _begin(self) -> None:
        self._works = [PartWork(self._plan, *part) for part in self._parts]
        self._executors = [self._make(work) for work in self._works]

    def _make(self, work: PartWork) -> Executor[PartTask, Part]:
        if not self.workers:
            return SerialExecutor(work)
        if self._executor == "threads":
            return ThreadExecutor(work, 1, timeouts=self._patience)
        from dataload.executors.processes import ProcessExecutor  # `multiprocessing` takes long to import

        return ProcessExecutor(work, 1, slots=self._slots, start_method=self._start_method, timeouts=self._patience)


class _AllParts:
    """One step of all workers."""

    def __init__(self, results: list[Result[Part]]) -> None:
        self._results = results

    def result(self) -> list[Part]:
        return [result.result() for result in self._results]

    def done(self) -> bool:
        return all(result.done() for result in self._results)

    def run(self) -> bool:
        return False  # a stream stays in its worker

    def cancel(self) -> None:
        for result in self._results:
            result.cancel()


def _check_pickles(plan: StreamPlan) -> None:
    parts = [("make_stream", "make_stream", plan.make_stream.function), ("sequences", "the sequences", plan.sequences)]
    for key, name, part in parts:
        try:
            check_pickle(part)
        except Exception as error:
            raise ConfigError(
                f"worker processes need a copy of {name}, which cannot be pickled ({type(error).__name__}: {error}); "
                "define it at the top of a module, use executor='threads', or start_method='fork'",
                key=key,
                value=part,
            ) from error
