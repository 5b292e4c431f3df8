"""The workers of a multi-stream loader: each owns a fixed part of the rows, and all of them make every step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dataload.errors import WorkerError
from dataload.executors import Place, Result, StartMethod, TimeoutPolicy, WorkerStatus, worker_name
from dataload.loader.fetch import StageSpan
from dataload.loader.rescue import is_for_consumer, step_error
from dataload.loader.workers import ExecutorName, make_executor
from dataload.streams.columns import Stacked, stack
from dataload.streams.order import RowPosition
from dataload.streams.rows import RowStart, RowStream, StreamPlan, Taken, describe
from dataload.types import Int64Array

BoolArray: TypeAlias = npt.NDArray[np.bool_]


class PartTask(NamedTuple):
    """A request for the next items of a worker's rows."""

    session: int  # a run of consecutive steps; a new one starts at `starts`
    epoch: int
    step: int
    starts: tuple[RowStart, ...] = ()  # empty after the first task of a session


class Rows(NamedTuple):
    """The rows of some workers at one step."""

    # (5, rows) int64: the sequence of each row's first item and the item's number within it, both -1 for a row
    # without items; then the `RowPosition` of the row after the step.
    numbers: Int64Array
    flags: BoolArray  # (2, rows, chunk) bool: where a sequence starts, and where there is an item
    seconds: npt.NDArray[np.float64]  # (rows,) float64, time taken by each row
    states: tuple[Any, ...]  # the own state of each row's stream, None if it has none

    @property
    def valid(self) -> BoolArray:
        """(rows, chunk) bool, where there is an item."""
        return self.flags[1]

    def starts(self) -> tuple[RowStart, ...]:
        """Return where each row continues after this step."""
        positions = itertools.starmap(RowPosition, self.numbers[2:].T.tolist())
        return tuple(map(RowStart, positions, self.states))

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """Return the rows of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        numbers, flags, seconds, states = zip(*parts, strict=True)
        return cls(
            np.concatenate(numbers, axis=1),
            np.concatenate(flags, axis=1),
            np.concatenate(seconds),
            tuple(itertools.chain.from_iterable(states)),
        )


class Part(NamedTuple):
    """The outcome of a `PartTask`."""

    rows: Rows | None
    stacked: Stacked  # the samples of all items, row after row
    # Empty, or the one reason why the other fields are. The consumer removes it from the list, because its traceback
    # refers to frames that refer to this part, and the two would keep each other alive.
    failures: list[WorkerError]
    spans: list[StageSpan]
    worker: str


class PartWork:
    """Makes the steps of a worker's rows, one after another. Called by one worker only.

    The rows are numbered among those of all ranks; `first` is the row of the batch that they begin at.
    """

    def __init__(self, plan: StreamPlan, first: int, rows: Sequence[int]) -> None:
        self.plan = plan
        self._first = first
        self._rows = rows
        self._session = -1
        self._streams: list[RowStream] = []

    def __reduce__(self) -> Any:
        return type(self), (self.plan, self._first, self._rows)  # without open streams

    def __call__(self, task: PartTask, status: WorkerStatus) -> Part:
        """Return the items of a step, or the error."""
        status.at(task.epoch, task.step)
        worker, begun = worker_name(), perf_counter()
        if task.session != self._session:
            self.close()
            self._session = task.session
            self._streams = [
                RowStream(self.plan, row, start, status, (self._first + i) * self.plan.order.sequences)
                for i, (row, start) in enumerate(zip(self._rows, task.starts, strict=True))
            ]
        taken: list[Taken] = []
        times = [begun]
        for i, stream in enumerate(self._streams):
            try:
                taken.append(stream.take())
            except BaseException as error:
                if is_for_consumer(error):
                    raise
                spans = [("read", begun, perf_counter())]
                return Part(None, Stacked(0), [self._error(task, i, error)], spans, worker)
            times.append(perf_counter())
        last = times[-1]
        try:
            rows = self._describe(taken, times)
            samples = [sample for each in taken for sample in each.samples]
            stacked = stack(samples) if self.plan.stacks else Stacked(len(samples), samples=samples)
        except Exception as error:
            return Part(None, Stacked(0), [self._error(task, None, error)], [("read", begun, last)], worker)
        return Part(rows, stacked, [], [("read", begun, last), ("collate", last, perf_counter())], worker)

    def _describe(self, taken: list[Taken], times: list[float]) -> Rows:
        chunk, streams = self.plan.chunk, self._streams
        flags = np.zeros((2, len(taken), chunk), np.bool_)
        if all(len(each.starts) == chunk for each in taken):
            flags[0].flat = [starts for each in taken for starts in each.starts]
            flags[1] = True
        else:
            for row, each in enumerate(taken):
                flags[0, row, : len(each.starts)] = each.starts
                flags[1, row, : len(each.starts)] = True
        numbers = [(each.sequence, each.offset, *stream.position) for each, stream in zip(taken, streams, strict=True)]
        clock = np.array(times)
        return Rows(
            # A row of memory for each number, because batches get the first two as they are.
            numbers=np.array(list(zip(*numbers, strict=True)), np.int64),
            flags=flags,
            seconds=clock[1:] - clock[:-1],
            states=tuple([stream.state() for stream in streams]),
        )

    def _error(self, task: PartTask, row: int | None, error: BaseException) -> WorkerError:
        where, indices = "", ()
        if row is not None:
            stream = self._streams[row]
            where = f" in row {self._first + row}"
            if stream.sequence >= 0:
                indices = (stream.sequence,)
                where += f", at item {stream.position[2]} of {describe(self.plan.sequences, stream.sequence)}"
        failure = step_error(task.step, task.epoch, where, error, indices)
        failure.__cause__ = error
        self.close()  # otherwise tasks already submitted would continue after the failed one
        return failure

    def close(self) -> None:
        """Close all streams, even if closing one of them fails."""
        streams, self._streams = self._streams, []
        if streams:
            with contextlib.ExitStack() as closing:
                for stream in reversed(streams):
                    closing.callback(stream.close)

    def __del__(self) -> None:
        self.close()  # in a worker process nothing else does


class StreamLocator(NamedTuple):
    """Decodes (row, sequence) from the index of a worker's status."""

    plan: StreamPlan

    def __call__(self, place: Place) -> tuple[int, str]:
        """Return the sequence that the worker is at, and its row and sequence in words; (-1, "") if unknown."""
        if place.index < 0:
            return -1, ""
        row, sequence = divmod(place.index, self.plan.order.sequences)
        return sequence, f"in row {row}, at {describe(self.plan.sequences, sequence)}"


def parts_of(rows: int, most: int) -> int:
    """Return the largest number of equal parts of `rows` that is at most `most`."""
    return next(parts for parts in range(min(rows, most), 0, -1) if rows % parts == 0)


class StreamWorkers:
    """Makes every step of all rows of this rank, numbered among those of all ranks; each worker makes its part.

    As many workers as divide the rows are used, at most `workers`; 0 stands for the consumer's thread.
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
        self.workers = parts_of(len(rows), workers) if workers else 0
        self.locator = StreamLocator(plan)
        self._settings: dict[str, Any] = {
            "name": executor,
            "workers": min(self.workers, 1),
            "window": window,
            "start_method": start_method,
            "timeouts": TimeoutPolicy(timeout, locate=self.locator),
        }
        size = len(rows) // max(self.workers, 1)
        self._plan = plan
        self._parts = [(first, rows[first : first + size]) for first in range(0, len(rows), size)]
        self._start()

    def submit(self, epoch: int, step: int, session: int, starts: tuple[RowStart, ...]) -> Result[list[Part]]:
        """Start a step in all workers; `starts` is empty unless the step is the first of the session."""
        tasks = [PartTask(session, epoch, step, starts[first : first + len(rows)]) for first, rows in self._parts]
        return _AllParts([executor.submit(task) for executor, task in zip(self._executors, tasks, strict=True)])

    def replace(self) -> None:
        """Continue with new workers: one that hung may come back, and would take items from streams of others."""
        self.close()
        self._start()

    def close(self) -> None:
        """Stop the workers, and close their streams."""
        for executor in self._executors:
            executor.close()
        for work in self._works:
            work.close()

    def _start(self) -> None:
        plan = self._plan
        copied = [("make_stream", "make_stream", plan.make_stream.function), ("sequences", "sequences", plan.sequences)]
        self._works = [PartWork(plan, *part) for part in self._parts]
        self._executors = [
            # What is copied is the same for all workers.
            make_executor(work, parts=() if number else copied, first=number, **self._settings)
            for number, work in enumerate(self._works)
        ]


class _AllParts(Result[list[Part]]):
    """The result of one step of all workers."""

    def __init__(self, results: list[Result[Part]]) -> None:
        self._results = results

    def result(self) -> list[Part]:
        return [result.result() for result in self._results]

    def done(self) -> bool:
        return all(result.done() for result in self._results)

    def cancel(self) -> None:
        for result in self._results:
            result.cancel()
