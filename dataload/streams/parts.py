"""The work of one worker at one step: the next items of the rows that it owns."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dataload.errors import WorkerError, message_of, traceback_of
from dataload.executors import WorkerStatus, worker_name
from dataload.loader.rescue import is_for_consumer
from dataload.streams.columns import Stacked, stack
from dataload.streams.order import RowPosition
from dataload.streams.rows import RowStart, RowStream, StreamPlan, Taken, describe
from dataload.types import Int64Array

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Span: TypeAlias = tuple[str, float, float]
"""A stage, and its begin and end in seconds of `time.perf_counter`."""


class PartTask(NamedTuple):
    """A request for the next items of a worker's rows.

    Attributes:
        session: Number of the run of consecutive steps that the task belongs to. A new session starts at `starts`.
        epoch: Number of the epoch.
        step: Number of the step.
        starts: Where the rows start, with the first task of a session; else empty.
    """

    session: int
    epoch: int
    step: int
    starts: tuple[RowStart, ...] = ()


class Rows(NamedTuple):
    """The rows of some workers at one step.

    Attributes:
        numbers: (5, rows) int64: the sequence of each row's first item and the item's number within it, both -1 for a
            row without items; then the `RowPosition` of the row after the step.
        flags: (2, rows, chunk) bool: where a sequence starts, and where there is an item.
        seconds: (rows,) float64, time taken by each row.
        states: The own state of each row's stream, None if it has none.
    """

    numbers: Int64Array
    flags: BoolArray
    seconds: npt.NDArray[np.float64]
    states: tuple[Any, ...]

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
    """The outcome of a `PartTask`.

    Attributes:
        rows: The rows; None if one failed.
        stacked: The samples of all items, row after row.
        failures: Empty, or the one reason why the other fields are. The consumer removes it from the list, because
            its traceback refers to frames that refer to this part, and the two would keep each other alive.
        spans: The stages of the work.
        worker: Name of the worker.
    """

    rows: Rows | None
    stacked: Stacked
    failures: list[WorkerError]
    spans: list[Span]
    worker: str


class PartWork:
    """Makes the steps of a worker's rows, one after another. Called by one worker only.

    Args:
        plan: The work of all rows.
        first: First row of the batch that belongs to this worker.
        rows: Its rows, numbered among those of all ranks.
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
        failure = WorkerError(
            f"step {task.step} of epoch {task.epoch} failed{where}: {message_of(error)}",
            step=task.step,
            epoch=task.epoch,
            indices=indices,
            worker=worker_name(),
            traceback_text=traceback_of(error),
        )
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
