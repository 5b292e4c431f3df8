"""The steps of a worker's rows: requests for them, and their outcomes, in groups of several steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dataload.errors import WorkerError
from dataload.loader.fetch import StageSpan
from dataload.loader.step import nbytes
from dataload.streams.columns import Stacked, cut, merge
from dataload.streams.rows import RowPosition, RowStart
from dataload.types import Int64Array

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Float64Array: TypeAlias = npt.NDArray[np.float64]


class RowTask(NamedTuple):
    """A request for the next steps of a worker's rows."""

    session: int  # a run of consecutive steps; a new one starts at `step`, with the rows at `starts`
    epoch: int
    step: int  # the first step of the session
    starts: tuple[RowStart, ...]  # empty after the first task of a session
    most: int  # steps to make at most


class StepRows(NamedTuple):
    """The rows of some workers at one step."""

    # (5, rows) int64: the sequence of each row's first item and the item's number within it, both -1 for a row
    # without items; then the `RowPosition` of the row after the step.
    numbers: Int64Array
    flags: BoolArray  # (2, rows, chunk) bool: where a sequence starts, and where there is an item
    seconds: Float64Array  # (rows,) float64, time taken by each row
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
    def join(cls, parts: Sequence[StepRows]) -> StepRows:
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


class RowGroup(NamedTuple):
    """The outcome of one step of a worker's rows."""

    rows: StepRows | None
    stacked: Stacked  # the samples of all items, row after row
    # Empty, or the one reason why the other fields are. The consumer removes it from the list, because its traceback
    # refers to frames that refer to this part, and the two would keep each other alive.
    failures: list[WorkerError]
    spans: list[StageSpan]
    worker: str


class Step(NamedTuple):
    """One step of a worker's rows, as it is made."""

    numbers: list[tuple[int, ...]]  # five of each row, see `StepRows`
    starts: list[list[bool]]  # for each row, whether its items start a sequence
    chunk: int
    times: list[float]  # when the step began, and when each row had its items
    states: tuple[Any, ...]  # see `StepRows`
    stacked: Stacked  # the samples of all items, row after row


class RowResults(NamedTuple):
    """The outcome of a `RowTask`: consecutive steps, in few arrays of all of them, which is a faster message."""

    numbers: Int64Array  # (steps, 5, rows) int64, see `StepRows`
    flags: BoolArray  # (steps, 2, rows, chunk) bool
    times: Float64Array  # (steps, 1 + rows) float64, see `Step`
    states: list[tuple[Any, ...]]  # of each step
    counts: list[int]  # items of each step
    stacked: list[Stacked]  # the samples of all steps together, or of each step
    failures: list[WorkerError]  # of the step after these; see `RowGroup`
    spans: list[list[StageSpan]]  # of each step, that of the failed step included
    worker: str
    total_seconds: float  # time that the task took

    @classmethod
    def of(
        cls,
        made: list[Step],
        failures: list[WorkerError],
        spans: list[list[StageSpan]],
        worker: str,
        seconds: float,
    ) -> RowResults:
        stacked = [step.stacked for step in made]
        return cls(
            # A row of memory for each number, because batches get the first two as they are.
            np.array([list(zip(*step.numbers, strict=True)) for step in made], np.int64),
            _flags(made),
            np.array([step.times for step in made]),
            [step.states for step in made],
            [each.count for each in stacked],
            merge(stacked),
            failures,
            spans,
            worker,
            seconds,
        )

    def nbytes(self) -> int:
        states = [state for states in self.states for state in states if state is not None]
        return nbytes(states) + sum(nbytes(each.columns) + nbytes(each.samples) for each in self.stacked)

    def parts(self) -> list[RowGroup]:
        stacked, good = self.stacked, len(self.counts)
        if len(stacked) < good:
            stacked = cut(stacked[0], self.counts)
        rows = map(StepRows, self.numbers, self.flags, np.diff(self.times), self.states)
        found = [
            RowGroup(each, samples, [], spans, self.worker)
            for each, samples, spans in zip(rows, stacked, self.spans[:good], strict=True)
        ]
        return found + [RowGroup(None, Stacked(0), self.failures, spans, self.worker) for spans in self.spans[good:]]


def _flags(made: list[Step]) -> BoolArray:
    """Return the flags of steps, (steps, 2, rows, chunk)."""
    if not made:
        return np.zeros((0, 2, 0, 0), np.bool_)
    chunk, rows = made[0].chunk, len(made[0].starts)
    flags = np.zeros((len(made), 2, rows, chunk), np.bool_)
    if all(len(each) == chunk for step in made for each in step.starts):
        flags[:, 0] = [step.starts for step in made]
        flags[:, 1] = True
        return flags
    for index, step in enumerate(made):
        for row, starts in enumerate(step.starts):
            flags[index, 0, row, : len(starts)] = starts
            flags[index, 1, row, : len(starts)] = True
    return flags
