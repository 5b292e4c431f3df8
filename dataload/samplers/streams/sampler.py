"""Rows that continue from batch to batch: the records of each row at each step. Pure (no I/O)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from dataload._util.caches import Memo
from dataload._util.randomness import KEY_WORDS, derive_key, hash64, permute
from dataload._util.settings import Least, check_settings, setting_error
from dataload.errors import ConfigError
from dataload.samplers.batch import BatchPlan, BatchPlanner
from dataload.samplers.common import (
    ArrayValue,
    BoolArray,
    PerRecord,
    check_record_lengths,
    check_sum,
    set_fields,
)
from dataload.samplers.streams.layout import Listed, Shuffled, balance
from dataload.types import Array, Int64Array

StreamMode: TypeAlias = Literal["split", "independent", "pack", "shuffled"]
"""The assignment of sequences to rows."""

ChunkEnd: TypeAlias = Literal["next", "pad", "drop"]
"""The treatment of a chunk at the end of a sequence."""


class Cells(NamedTuple):
    """The content of several rows at several steps."""

    indices: Int64Array  # (steps, rows, chunk), indices to read
    stream_id: Int64Array  # (steps, rows), sequence of the row's first record; -1 for a row without records
    offset: Int64Array  # (steps, rows), offset of that record in its sequence; -1 for a row without records
    is_first: BoolArray  # (steps, rows, chunk), True for a record that does not continue the row's previous one
    valid: BoolArray  # (steps, rows, chunk), False for filler


class _Run(NamedTuple):
    """One run through all sequences."""

    layout: Listed | Shuffled
    shift: int  # position in the layout at which the run begins
    skip_key: np.uint64 | None  # chooses how many records to skip before a sequence's first chunk; None skips none


class _Visit(NamedTuple):
    """Cells that belong to one run."""

    where: Any  # index of these cells in the arrays (steps, rows, units)
    run: _Run
    positions: Int64Array  # the position of each cell in the run
    begins: BoolArray  # whether its row begins there, even in the middle of a sequence
    valid: BoolArray  # False past the end


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamSampler(ArrayValue, PerRecord, BatchPlanner):
    """Batches in which row b at step t + 1 continues row b at step t, for models that carry state.

    A sequence is a run of consecutive records. Each row takes `chunk` records of its sequence per step. The batch has
    these columns in addition to its fields:

    - ``stream_id`` and ``offset``, (rows,) int64: the sequence of the row's first record, and that record's offset in
      the sequence. Both are -1 for a row without records.
    - ``is_first``, (rows,) bool, or (rows, chunk) if `chunk` > 1: True for a record that does not continue the row's
      previous record. See `dataload.streams.reset_state`.
    - ``valid``, of the same shape: False for filler.

    Rows are numbered over all ranks: rank r has every `world_size`-th row, starting with row r. So the order depends
    neither on ranks nor on workers, and an epoch can continue with another number of ranks from any step.

    Modes:

    - ``"split"``: all sequences, in a shuffled order, are concatenated and cut into one equal span per row. Each record
      comes once per epoch. A span may begin in the middle of a sequence.
    - ``"pack"``: each sequence is assigned whole to one row, the longest first, each to the emptiest row. Each record
      comes once per epoch. Rows that end before others are padded.
    - ``"independent"``: each row goes through all sequences in an order of its own, endlessly. An epoch is a number of
      steps, and the next epoch continues. (From D. MacLeod, "How to build a streaming DataLoader with PyTorch",
      Speechmatics.)
    - ``"shuffled"``: rows take chunks from anywhere and nothing continues. For comparison, and for `RowMixture`.

    Attributes:
        sequence_lengths: Records of each sequence, (sequences,), in index order. See `dataload.sequence_lengths`.
        rows: Rows per step of all ranks together, a multiple of `world_size`.
        chunk: Consecutive records per row and step.
        mode: How sequences are assigned to rows: ``"split"``, ``"pack"``, ``"independent"`` or ``"shuffled"``.
        ends: How a chunk ends at the end of a sequence: ``"next"`` continues it in the row's next sequence, ``"pad"``
            fills it up, and ``"drop"`` omits records that do not fill a chunk.
        seed: Seed of the order, any integer.
        random_start: Whether chunks begin at other records in each epoch. With ``ends="next"``, a row's order begins
            inside a sequence, whose start then comes last. With ``ends="drop"``, each sequence skips some of the
            records that would be omitted anyway at its start instead of its end.
        epoch_steps: Steps per epoch, for the endless modes. By default, an epoch of ``"independent"`` has as many
            records as the data, and in an epoch of ``"shuffled"`` each chunk comes once.

    Raises:
        ConfigError: A number is out of its range, or two settings contradict each other.
    """

    sequence_lengths: Sequence[int] | Int64Array
    rows: Annotated[int, Least(1)]
    chunk: Annotated[int, Least(1)] = 1
    mode: StreamMode = "split"
    ends: ChunkEnd = "next"
    seed: int = 0
    random_start: bool = False
    epoch_steps: Annotated[int, Least(1)] | None = None
    _units: Int64Array = field(init=False, repr=False, compare=False)
    _firsts: Int64Array = field(init=False, repr=False, compare=False)
    _total: int = field(init=False, repr=False, compare=False)
    _runs: Memo[dict[tuple[int, ...], _Run]] = field(default_factory=Memo, init=False, repr=False, compare=False)
    _packs: Memo[tuple[Listed, Int64Array]] = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = check_record_lengths(self.sequence_lengths, name="sequence_lengths", of="sequence")
        check_sum("sequence_lengths", int(lengths.sum(dtype=np.float64)))  # an integer sum might overflow
        check_settings(self)
        _check_combination(self)
        units = {"next": lengths, "pad": -(-lengths // self.chunk), "drop": lengths // self.chunk}[self.ends]
        set_fields(
            self,
            sequence_lengths=lengths,
            _units=units,
            _firsts=np.cumsum(lengths) - lengths,
            _total=int(units.sum()),
        )
        BatchPlanner.__post_init__(self)

    def check_dealing(self) -> None:
        """See `BatchPlanner.check_dealing`."""
        BatchPlanner.check_dealing(self)
        check_rows(self.rows, self.world_size, self.origin)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.order[2:])
        return f"StreamSampler({len(self.sequence_lengths)} sequences, {self.records} records, {settings})"

    @property
    def order(self) -> Any:
        """All settings except ranks and tail."""
        return self._settings()

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return int(np.asarray(self.sequence_lengths).sum())

    @property
    def items_per_step(self) -> int:
        """Rows per step of one rank."""
        return self.rows // self.world_size

    @property
    def rows_per_step(self) -> int:
        """Records per step of one rank."""
        return self.items_per_step * self.chunk

    def items(self, epoch: int) -> int:
        """Return the number of rows in all steps of an epoch."""
        return self.rows * self._steps(epoch)

    def resume(self, position: int) -> tuple[Self, int]:
        """See `BatchPlanner.resume`. Positions are multiples of `rows`, because steps cannot be divided."""
        return self.with_ranks(origin=0), position // self.rows

    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        """See `BatchPlanner.plans`."""
        rows = np.arange(self.rank, self.rows, self.world_size)
        first = self.origin // self.rows
        cells = self.cells(rows, range(first + steps.start, first + steps.stop), epoch=epoch)
        return plans_of(cells, steps)

    def cells(self, rows: Int64Array, steps: range, *, epoch: int) -> Cells:
        """Return the content of `rows`, (rows,) int64, at steps counted from the start of the epoch."""
        times = np.arange(steps.start, steps.stop, dtype=np.int64)
        shape = len(times), len(rows), self._step_units
        sequences, within, skipped = (np.zeros(shape, np.int64) for _ in range(3))
        begins, valid = np.zeros(shape, np.bool_), np.ones(shape, np.bool_)
        visit = {"independent": self._independently, "shuffled": self._anywhere}.get(self.mode, self._along_spans)
        for where, run, positions, starts, inside in visit(rows, times, epoch):
            found = run.layout.find((positions + run.shift) % self._total if run.shift else positions)
            sequences[where], within[where], begins[where], valid[where] = *found, starts, inside
            if run.skip_key is not None:
                spare = np.asarray(self.sequence_lengths)[found.sequences] % self.chunk + 1
                skipped[where] = hash64(run.skip_key, found.sequences) % spare.astype(np.uint64)
        begins |= within == 0
        if self.ends != "next":
            valid = np.repeat(valid, self.chunk, axis=2)
            begins = np.concatenate([begins, np.zeros((*shape[:2], self.chunk - 1), np.bool_)], axis=2)
            within = within * self.chunk + skipped + np.arange(self.chunk)
            lengths = np.asarray(self.sequence_lengths)[sequences]
            valid &= within < lengths
            within = np.minimum(within, lengths - 1)
        filled = valid.any(axis=2)
        return Cells(
            indices=self._firsts[sequences] + within,
            stream_id=np.where(filled, sequences[:, :, 0], -1),
            offset=np.where(filled, within[:, :, 0], -1),
            is_first=begins & valid,
            valid=valid,
        )

    @property
    def _step_units(self) -> int:
        """Units that a row takes per step."""
        return self.chunk if self.ends == "next" else 1

    @property
    def _chunks(self) -> int:
        """Chunks of the data in mode ``"shuffled"``; with ``ends="next"``, the last may be short."""
        total, unit = self._total, self._step_units
        # Endless rows have no tail, so their order does not depend on `tail`.
        drops = self.tail == "drop" and self.epoch_steps is None
        return total // unit if drops else -(-total // unit)

    def _steps(self, epoch: int) -> int:
        if not self._total:
            return 0
        if self.epoch_steps is not None:
            return self.epoch_steps
        if self.mode == "independent":
            return -(-self._total // (self.rows * self._step_units))
        if self.mode == "shuffled":
            return self._chunks // self.rows if self.tail == "drop" else -(-self._chunks // self.rows)
        spans = np.diff(self._bounds(epoch))
        drops = self.tail == "drop"
        return int(spans.min()) // self._step_units if drops else -(-int(spans.max()) // self._step_units)

    def _along_spans(self, rows: Int64Array, times: Int64Array, epoch: int) -> list[_Visit]:
        bounds = self._bounds(epoch)
        start, stop = bounds[:-1][rows, None], bounds[1:][rows, None]
        at = start + times[:, None, None] * self._step_units + np.arange(self._step_units)
        inside = at < stop
        begins = at == start
        return [_Visit(..., self._run(epoch), np.clip(at, 0, np.maximum(stop - 1, 0)), begins & inside, inside)]

    def _independently(self, rows: Int64Array, times: Int64Array, epoch: int) -> list[_Visit]:
        units = (epoch * self._steps(epoch) + times[:, None]) * self._step_units + np.arange(self._step_units)
        passes, positions = np.divmod(units, self._total)
        yes = np.ones(1, np.bool_)
        visits: list[_Visit] = []
        for number in np.unique(passes).tolist():
            step, unit = np.nonzero(passes == number)
            at = positions[step, unit]
            visits += [
                _Visit((step, column, unit), self._run(row, number), at, at == 0, yes)
                for column, row in enumerate(rows.tolist())
            ]
        return visits

    def _anywhere(self, rows: Int64Array, times: Int64Array, epoch: int) -> list[_Visit]:
        numbers = times[:, None] * self.rows + rows
        passes, exists = np.full(numbers.shape, epoch), numbers < self._chunks
        if self.epoch_steps is not None:
            passes, numbers = np.divmod(numbers + epoch * self.epoch_steps * self.rows, self._chunks)
            exists = np.ones(numbers.shape, np.bool_)
        numbers = np.minimum(numbers, self._chunks - 1)
        visits: list[_Visit] = []
        for number in np.unique(passes).tolist():
            where = passes == number
            key = derive_key(self.seed, "stream chunks", number, words=KEY_WORDS)
            starts = permute(numbers[where], self._chunks, key) * self._step_units
            at = starts[:, None] + np.arange(self._step_units)
            inside = (at < self._total) & exists[where][:, None]
            begins = np.zeros(at.shape, np.bool_)
            begins[:, 0] = True
            visits.append(_Visit(where, self._run(number), np.minimum(at, self._total - 1), begins, inside))
        return visits

    def _bounds(self, epoch: int) -> Int64Array:
        """Return the position where each row's span begins, (rows + 1,) int64."""
        if self.mode == "split":
            return np.arange(self.rows + 1, dtype=np.int64) * self._total // self.rows
        return self._packed(epoch)[1]

    def _packed(self, epoch: int) -> tuple[Listed, Int64Array]:
        """Return whole sequences row by row, and the position where each row begins, (rows + 1,) int64."""
        packed = self._packs.recall(epoch)
        if packed is None:
            order = permute(np.arange(len(self._units)), len(self._units), self._key("streams", epoch))
            by_row, bounds = balance(self._units, self.rows, order)
            layout = Listed(self._units[by_row], by_row)
            packed = self._packs.keep(epoch, (layout, np.concatenate([np.zeros(1, np.int64), layout.ends])[bounds]))
        return packed

    def _run(self, *address: int) -> _Run:
        """Return the run of an epoch, or of a row and the number of its pass."""
        runs = self._runs.recall(address[-1]) or self._runs.keep(address[-1], {})
        if (run := runs.get(address)) is None:
            layout: Listed | Shuffled
            if self.mode == "pack":
                layout = self._packed(*address)[0]
            elif self.mode == "shuffled":
                layout = Listed(self._units)
            else:
                layout = Shuffled(self._units, self._key("streams", *address))
            start = self._key("stream starts", *address)
            shift = int(start[0]) % self._total if self.random_start and self.ends == "next" and self._total else 0
            skip_key = start[0] if self.random_start and self.ends == "drop" else None
            run = runs[address] = _Run(layout, shift, skip_key)
        return run

    def _key(self, purpose: str, *address: int) -> npt.NDArray[np.uint64]:
        return derive_key(self.seed, purpose, *address, words=KEY_WORDS)


def _check_combination(sampler: StreamSampler) -> None:
    """Raise ConfigError if two settings contradict each other."""
    mode, ends, steps = sampler.mode, sampler.ends, sampler.epoch_steps
    if steps is not None and mode not in ("independent", "shuffled"):
        raise ConfigError(
            f"epoch_steps is for endless rows, but with mode={mode!r} an epoch is one pass through the data: "
            "omit it, or use mode='independent'",
            key="epoch_steps",
            value=steps,
        )
    problem = ""
    if ends == "pad":
        problem = "has no effect with ends='pad': use ends='next' or 'drop', or omit random_start"
    elif mode == "pack" and ends == "next":
        problem = "with ends='next' would cut sequences, which mode='pack' keeps whole: use ends='drop' or another mode"
    if sampler.random_start and problem:
        raise ConfigError(f"random_start {problem}", key="random_start", value=True)


def check_rows(rows: int, world_size: int, origin: int = 0) -> None:
    """Raise ConfigError unless all ranks have equally many rows and `origin` is the start of a step."""
    if rows % world_size:
        rule = f"must be a multiple of world_size, {world_size}, so that each rank has its own"
        raise setting_error("rows", rows, rule)
    if origin % rows:
        raise setting_error("origin", origin, f"must be a multiple of rows, {rows}: steps of streams cannot be divided")


def plans_of(cells: Cells, steps: range, columns: Mapping[str, Array] | None = None) -> list[BatchPlan]:
    """Return the batch plans of consecutive steps, with additional `columns`, (rows, ...) each."""
    chunk = cells.indices.shape[2]
    is_first, valid = (mask[:, :, 0] if chunk == 1 else mask for mask in (cells.is_first, cells.valid))
    plans: list[BatchPlan] = []
    for i, step in enumerate(steps):
        added = {"stream_id": cells.stream_id[i], "offset": cells.offset[i], "is_first": is_first[i], **(columns or {})}
        plans.append(BatchPlan(step, cells.indices[i].ravel(), valid[i], chunk=chunk, columns=added))
    return plans
