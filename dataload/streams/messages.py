"""Requests for the steps of a worker's rows, and their results, several steps in a message."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dataload.errors import WorkerError
from dataload.loader.failures import StageSpan
from dataload.loader.step import nbytes
from dataload.streams.columns import Stacked, cut, merge
from dataload.streams.rows import RowPosition, RowStart
from dataload.types import Int64Array

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Float64Array: TypeAlias = npt.NDArray[np.float64]


class RowTask(NamedTuple):
    """A request for the next steps of a worker's rows."""

    session: int  # number of a run of consecutive steps; a new one starts at `step`, with the rows at `starts`
    epoch: int
    step: int  # the first step of the session
    starts: tuple[RowStart, ...]  # empty after the first task of a session
    most: int  # maximum number of steps


class StepRows(NamedTuple):
    """The rows of some workers at one step."""

    # (5, rows) int64: sequence and offset of each row's first item (-1 without items); then its `RowPosition`
    numbers: Int64Array
    flags: BoolArray  # (2, rows, chunk) bool: `is_first` and `valid`
    seconds: Float64Array  # (rows,) float64, time taken by each row
    states: tuple[Any, ...]  # `state_dict()` of each row's stream, or None

    @property
    def valid(self) -> BoolArray:
        """Cells that have an item, (rows, chunk) bool."""
        return self.flags[1]

    def starts(self) -> tuple[RowStart, ...]:
        positions = itertools.starmap(RowPosition, self.numbers[2:].T.tolist())
        return tuple(map(RowStart, positions, self.states))

    @classmethod
    def join(cls, parts: Sequence[StepRows]) -> StepRows:
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
    """The result of one step of a worker's rows."""

    rows: StepRows | None
    stacked: Stacked  # the samples of all items, row after row
    # At most one error, in place of the other fields. The consumer removes it from the list: its traceback refers to
    # frames that refer to this object, and they would keep each other alive.
    failures: list[WorkerError]
    spans: list[StageSpan]
    worker: str


class Step(NamedTuple):
    """One step of a worker's rows."""

    numbers: list[tuple[int, ...]]  # five numbers per row, see `StepRows`
    starts: list[list[bool]]  # for each row, whether its items start a sequence
    chunk: int
    times: list[float]  # time at the start and after each row
    states: tuple[Any, ...]  # see `StepRows`
    stacked: Stacked  # the samples of all items, row after row


class RowResults(NamedTuple):
    """The result of a `RowTask`. A few arrays for all steps pickle faster than an object per step."""

    numbers: Int64Array  # (steps, 5, rows) int64, see `StepRows`
    flags: BoolArray  # (steps, 2, rows, chunk) bool
    times: Float64Array  # (steps, 1 + rows) float64, see `Step`
    states: list[tuple[Any, ...]]  # of each step
    counts: list[int]  # items of each step
    stacked: list[Stacked]  # one entry for all steps, or one per step
    failures: list[WorkerError]  # of the step after these; see `RowGroup`
    spans: list[list[StageSpan]]  # of each step, including the failed one
    worker: str
    total_seconds: float  # duration of the task

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
            # Each number is contiguous in memory, because batches use the first two without copying.
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
    """Return `is_first` and `valid`, (steps, 2, rows, chunk) bool."""
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
