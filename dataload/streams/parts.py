"""What one worker does at a step: the next items of the rows that it owns."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dataload.errors import WorkerError, message_of, traceback_of
from dataload.executors import WorkerStatus, worker_name
from dataload.loader.rescue import is_for_consumer
from dataload.streams.columns import Stacked, stack
from dataload.streams.order import Cursor
from dataload.streams.rows import Item, RowStart, RowStream, StreamPlan, describe
from dataload.types import Int64Array

__all__ = ["Part", "PartTask", "PartWork", "Rows"]

BoolArray: TypeAlias = npt.NDArray[np.bool_]


class PartTask(NamedTuple):
    """The next items of a worker's rows.

    Attributes:
        session: Number of the run of consecutive steps that this belongs to; another one begins anew.
        epoch: Number of the epoch.
        step: Number of the step.
        starts: Where the rows begin, with the first task of a session.
    """

    session: int
    epoch: int
    step: int
    starts: tuple[RowStart, ...] = ()


class Rows(NamedTuple):
    """Rows of some workers at one step.

    Attributes:
        stream_id: (rows,) int64, the sequence of each row's first item; -1 where it has none.
        offset: (rows,) int64, number of that item within the sequence; -1 where it has none.
        is_first: (rows, chunk) bool, where a sequence begins.
        valid: (rows, chunk) bool, where there is an item.
        cursors: (rows, 3) int64, where each row stands behind the step; see `Cursor`.
        seconds: (rows,) float64, what each row took.
        states: What each row's stream says of itself, None where it does not.
    """

    stream_id: Int64Array
    offset: Int64Array
    is_first: BoolArray
    valid: BoolArray
    cursors: Int64Array
    seconds: npt.NDArray[np.float64]
    states: tuple[Any, ...]

    def start(self, row: int) -> RowStart:
        """Where a row goes on behind this step."""
        turn, place, item = self.cursors[row].tolist()
        return RowStart(Cursor(turn, place, item), self.states[row])

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            stream_id=np.concatenate([part.stream_id for part in parts]),
            offset=np.concatenate([part.offset for part in parts]),
            is_first=np.concatenate([part.is_first for part in parts]),
            valid=np.concatenate([part.valid for part in parts]),
            cursors=np.concatenate([part.cursors for part in parts]),
            seconds=np.concatenate([part.seconds for part in parts]),
            states=tuple(state for part in parts for state in part.states),
        )


class Part(NamedTuple):
    """What became of a task.

    Attributes:
        rows: What is known of the rows; None if one failed.
        stacked: The samples of all items, row after row.
        failures: Why there is none of this: one, which the consumer takes out. Its traceback refers to frames that
            refer to this, and the two would keep each other.
    """

    rows: Rows | None
    stacked: Stacked
    failures: list[WorkerError]


class PartWork:
    """Takes the steps of its rows, one after another; called by one worker only.

    Args:
        plan: What is to be done.
        first: Row of the batch where its rows begin.
        rows: Its rows, by their numbers among those of all ranks.
    """

    def __init__(self, plan: StreamPlan, first: int, rows: Sequence[int]) -> None:
        self.plan = plan
        self._first = first
        self._rows = rows
        self._session = -1
        self._streams: list[RowStream] = []

    def __reduce__(self) -> Any:
        return type(self), (self.plan, self._first, self._rows)  # what it has open stays here

    def __call__(self, task: PartTask, status: WorkerStatus) -> Part:
        """The items of a step, or the error."""
        status.at(task.epoch, task.step)
        if task.session != self._session:
            self.close()
            self._session = task.session
            self._streams = [
                RowStream(self.plan, row, start, _Note(status, self._first + place, self.plan.order.sequences))
                for place, (row, start) in enumerate(zip(self._rows, task.starts, strict=True))
            ]
        taken: list[list[Item]] = []
        seconds = np.zeros(len(self._rows))
        for place, stream in enumerate(self._streams):
            begun = perf_counter()
            try:
                taken.append(stream.take())
            except BaseException as error:
                if is_for_consumer(error):
                    raise
                return Part(None, Stacked(0), [self._error(task, place, error)])
            seconds[place] = perf_counter() - begun
        try:
            return self._part(taken, seconds)
        except Exception as error:
            return Part(None, Stacked(0), [self._error(task, None, error)])

    def _part(self, taken: list[list[Item]], seconds: npt.NDArray[np.float64]) -> Part:
        blanks = [[False] * (self.plan.chunk - len(items)) for items in taken]
        rows = Rows(
            stream_id=np.array([items[0].sequence if items else -1 for items in taken], np.int64),
            offset=np.array([items[0].offset if items else -1 for items in taken], np.int64),
            is_first=np.array(
                [[not item.offset for item in items] + rest for items, rest in zip(taken, blanks, strict=True)],
                np.bool_,
            ),
            valid=np.array([[True] * len(items) + rest for items, rest in zip(taken, blanks, strict=True)], np.bool_),
            cursors=np.array([stream.cursor for stream in self._streams], np.int64),
            seconds=seconds,
            states=tuple([stream.state() for stream in self._streams]),
        )
        samples = [item.sample for items in taken for item in items]
        stacked = stack(samples) if self.plan.stacks else Stacked(len(samples), samples=samples)
        return Part(rows, stacked, [])

    def _error(self, task: PartTask, place: int | None, error: BaseException) -> WorkerError:
        where, indices = "", ()
        if place is not None:
            stream = self._streams[place]
            where = f" in row {self._first + place}"
            if stream.sequence >= 0:
                indices = (stream.sequence,)
                where += f", at item {stream.cursor.item} of {describe(self.plan.sequences, stream.sequence)}"
        message = f"step {task.step} of epoch {task.epoch} failed{where}: {message_of(error)}"
        made = WorkerError(
            message,
            step=task.step,
            epoch=task.epoch,
            indices=indices,
            worker=worker_name(),
            traceback_text=traceback_of(error),
        )
        made.__cause__ = error
        self.close()  # tasks that are on their way would go on behind it
        return made

    def close(self) -> None:
        """Close the streams, all of them whatever one raises."""
        streams, self._streams = self._streams, []
        if streams:
            with contextlib.ExitStack() as closing:
                for stream in reversed(streams):
                    closing.callback(stream.close)

    def __del__(self) -> None:
        self.close()  # in a worker process nothing else does


class _Note:
    """Writes down which row is at which sequence, as one number; see `crew.StreamLocator`."""

    def __init__(self, status: WorkerStatus, row: int, sequences: int) -> None:
        self._heartbeat = status
        self._first = row * sequences

    def __call__(self, sequence: int) -> None:
        self._heartbeat.at_index(self._first + sequence)
