"""Requests for the steps of a worker's rows, and their results: stacked, and several steps in a message."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dataload._util.arrays import IMMUTABLE
from dataload.collate import default_collate
from dataload.collate.columns import like, map_columns
from dataload.errors import WorkerError
from dataload.loader.failures import StageSpan
from dataload.loader.step import nbytes
from dataload.sources.memory import owned
from dataload.streams.rows import RowPosition, RowStart
from dataload.types import Int64Array

BoolArray: TypeAlias = npt.NDArray[np.bool_]
_NUMBERS = (bool, int, float)


@dataclass(frozen=True, slots=True)
class Stacked:
    """The samples of a worker's rows: as columns if all have the same form, otherwise as a list."""

    count: int
    columns: Any = None  # the stacked samples, as from `default_collate`
    form: Any = None  # the common form of all samples; None if they are not stacked
    samples: Sequence[Any] = ()

    def owned(self) -> Stacked:
        """Return the samples without objects that streams may fill again; arrays of columns are copies already."""
        columns = map_columns(self.columns, lambda column, _: owned(column) if isinstance(column, list) else column)
        return Stacked(self.count, columns, self.form, [*map(owned, self.samples)])


def stack(samples: list[Any]) -> Stacked:
    """Stack samples that have the same form; leave others to `join`, which has all samples of the batch."""
    with suppress(Exception):  # raised again by `join`, for the step at fault
        form = _form(samples[0]) if samples else None
        if form is not None and all(_form(sample) == form for sample in samples):
            return Stacked(len(samples), default_collate(samples), form)
    return Stacked(len(samples), samples=samples)


def cut(stacked: Stacked, counts: Sequence[int]) -> list[Stacked]:
    """Split the samples of several steps into steps with these numbers of samples."""
    edges = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return [_part(stacked, start, stop) for start, stop in edges]


def _part(stacked: Stacked, start: int, stop: int) -> Stacked:
    if stacked.form is None:
        return Stacked(stop - start, samples=stacked.samples[start:stop])
    return Stacked(stop - start, map_columns(stacked.columns, lambda column, _: column[start:stop]), stacked.form)


def join(stacks: Sequence[Stacked], valid: BoolArray) -> Any:
    """Return `default_collate` of the samples, with blanks in the cells that are not valid, (rows * chunk,) bool."""
    given = [stack for stack in stacks if stack.count]
    first = given[0]
    if first.form is not None and all(stack.form == first.form for stack in given[1:]):
        return _join([stack.columns for stack in given], valid)
    return default_collate(spread(samples_of(given), valid))


def samples_of(stacks: Sequence[Stacked]) -> list[Any]:
    """Return the samples of all stacks, one after another."""
    return [
        sample
        for stack in stacks
        for sample in (stack.samples if stack.form is None else _unstack(stack.columns, stack.form, stack.count))
    ]


def spread(samples: list[Any], valid: BoolArray) -> list[Any]:
    """Put the samples into the valid cells and blanks into the others."""
    if valid.all():
        return samples
    rest = iter(samples)
    return [next(rest) if here else blank(samples[0]) for here in valid.tolist()]


def blank(sample: Any) -> Any:
    """Return a blank value of the same form: zeros, empty text, or None for anything else."""
    if isinstance(sample, Mapping):
        return {name: blank(value) for name, value in cast("Mapping[str, Any]", sample).items()}
    if isinstance(sample, tuple):
        return like(type(sample), [blank(value) for value in cast("tuple[Any]", sample)])
    if isinstance(sample, (*_NUMBERS, str, bytes, bytearray)):
        return type(sample)()
    if isinstance(sample, (np.ndarray, np.generic)):
        return np.zeros_like(sample)[()]
    zeros = getattr(sample, "new_zeros", None)  # a torch tensor
    return zeros(sample.shape) if callable(zeros) else None


def _form(sample: Any) -> Any:
    """Return the types, dtypes and shapes that decide how a sample is stacked."""
    if type(sample) is int and not -(1 << 63) <= sample < 1 << 63:
        return object()  # equals nothing: a column of Python ints has another dtype if one of them is this large
    if type(sample) in IMMUTABLE:
        return type(sample)
    if isinstance(sample, np.ndarray):
        return sample.dtype, sample.shape
    if isinstance(sample, (dict, Mapping)):
        return {name: _form(value) for name, value in cast("Mapping[Any, Any]", sample).items()}
    if isinstance(sample, tuple):
        return type(sample), [_form(value) for value in cast("tuple[Any, ...]", sample)]
    if isinstance(sample, np.generic):
        return sample.dtype, None
    if not isinstance(sample, type) and hasattr(sample, "__array__"):
        array = np.asarray(sample)
        return array.dtype, array.shape
    return type(sample)


def _join(columns: list[Any], valid: BoolArray) -> Any:
    first = columns[0]
    if isinstance(first, dict):
        return {name: _join([column[name] for column in columns], valid) for name in cast("dict[Any, Any]", first)}
    if isinstance(first, tuple):
        joined = [_join(list(column), valid) for column in zip(*columns, strict=True)]
        return like(type(first), joined)
    if isinstance(first, list):
        return spread([value for column in columns for value in column], valid)
    if len(first) == len(valid):
        return first
    if valid.all():
        return np.concatenate(columns)
    out = np.zeros((len(valid), *first.shape[1:]), first.dtype)
    out[valid] = np.concatenate(columns)
    return out


def _unstack(columns: Any, form: Any, count: int) -> list[Any]:
    if isinstance(columns, dict):
        named = {name: _unstack(column, form[name], count) for name, column in cast("dict[Any, Any]", columns).items()}
        return [{name: values[i] for name, values in named.items()} for i in range(count)]
    if isinstance(columns, tuple):
        given = cast("tuple[Any, ...]", columns)
        each = [_unstack(column, f, count) for column, f in zip(given, form[1], strict=True)]
        return [like(type(given), [values[i] for values in each]) for i in range(count)]
    return columns.tolist() if form in _NUMBERS else list(columns)


Float64Array: TypeAlias = npt.NDArray[np.float64]


class RowTask(NamedTuple):
    """A request for the next steps of a worker's rows."""

    session: int  # number of a run of consecutive steps; a new one starts at `step`, with the rows at `starts`
    epoch: int
    step: int  # the first step of the session
    starts: tuple[RowStart, ...]  # empty after the first task of a session
    most: int = 1  # maximum number of steps


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
    def join(cls, steps: Sequence[StepRows]) -> StepRows:
        if len(steps) == 1:
            return steps[0]
        numbers, flags, seconds, states = zip(*steps, strict=True)
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
    samples: list[Any]  # of all items, row after row


class RowResults(NamedTuple):
    """The result of a `RowTask`. A few arrays for all steps pickle faster than an object per step."""

    numbers: Int64Array  # (steps, 5, rows) int64, see `StepRows`
    flags: BoolArray  # (steps, 2, rows, chunk) bool
    times: Float64Array  # (steps, 1 + rows) float64, see `Step`
    states: list[tuple[Any, ...]]  # of each step
    counts: list[int]  # items of each step
    stacked: Stacked  # the samples of all steps
    failures: list[WorkerError]  # of the step after these; see `RowGroup`
    spans: list[list[StageSpan]]  # of each step, including the failed one
    worker: str
    total_seconds: float  # duration of the task

    @classmethod
    def of(
        cls,
        made: list[Step],
        stacked: Stacked,
        failures: list[WorkerError],
        spans: list[list[StageSpan]],
        worker: str,
        seconds: float,
    ) -> RowResults:
        return cls(
            # Each number is contiguous in memory, because batches use the first two without copying.
            np.array([list(zip(*step.numbers, strict=True)) for step in made], np.int64),
            _flags(made),
            np.array([step.times for step in made]),
            [step.states for step in made],
            [len(step.samples) for step in made],
            stacked,
            failures,
            spans,
            worker,
            seconds,
        )

    def nbytes(self) -> int:
        states = [state for states in self.states for state in states if state is not None]
        return nbytes(states) + nbytes(self.stacked.columns) + nbytes(self.stacked.samples)

    def groups(self) -> list[RowGroup]:
        rows = map(StepRows, self.numbers, self.flags, np.diff(self.times), self.states)
        good = len(self.counts)
        found = [
            RowGroup(each, samples, [], spans, self.worker)
            for each, samples, spans in zip(rows, cut(self.stacked, self.counts), self.spans[:good], strict=True)
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
