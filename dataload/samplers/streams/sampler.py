"""Rows that continue: which records each row of a batch has at each step. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from dataload._util.checks import check_choice
from dataload._util.memo import Memo
from dataload._util.randomness import check_seed, derive_key, hash64
from dataload.errors import ConfigError
from dataload.samplers import BatchPlan, BatchPlanner
from dataload.samplers._checks import check_count
from dataload.samplers._values import ArrayValue
from dataload.samplers.buckets import check_record_lengths
from dataload.samplers.permutation import KEY_WORDS, MAX_LENGTH, permute
from dataload.samplers.streams.cells import BoolArray, Cells, check_rows, plans_of
from dataload.samplers.streams.layout import Layout, Listed, Shuffled, balance
from dataload.types import Int64Array

__all__ = ["Ends", "Mode", "StreamSampler"]

Mode: TypeAlias = Literal["split", "independent", "pack", "shuffled"]
"""Which sequences a row follows."""

Ends: TypeAlias = Literal["next", "pad", "drop"]
"""What becomes of a chunk at the end of a sequence."""


class _Run(NamedTuple):
    """One pass through sequences.

    Attributes:
        layout: Their order.
        shift: Where in it the pass begins.
        skip_key: Chooses the records that are left out before the first chunk of a sequence; None leaves out none.
    """

    layout: Layout
    shift: int
    skip_key: np.uint64 | None


class _Visit(NamedTuple):
    """Cells that belong to one run.

    Attributes:
        where: Which of the arrays (steps, rows, units) these are.
        run: The run.
        places: int64, where in the run each stands.
        begins: bool, whether its row begins there, be it in the middle of a sequence.
        valid: bool, False behind the end.
    """

    where: Any
    run: _Run
    places: Int64Array
    begins: BoolArray
    valid: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamSampler(ArrayValue, BatchPlanner):
    """Batches of which row b at step t + 1 continues row b at step t: for models that carry state.

    A sequence is a run of consecutive records, of which each row takes `chunk` a step. Besides its fields the batch has

    - ``stream_id`` and ``offset``, (rows,) int64: the sequence of the row's first record, and its place there;
    - ``is_first``, (rows,) bool, or (rows, chunk) with `chunk` > 1: what does not continue what stood before it: see
      `dataload.streams.reset_state`;
    - ``valid``, of that shape: False for what only fills up the batch. A row without any record has -1 in both.

    Rows are numbered over all ranks: rank r has those that are r modulo `world_size`. So the order depends neither on
    ranks nor on workers, and an epoch can go on with other ranks from any step.

    Modes:

    - ``"split"``: all sequences in a shuffled order, one after another, are cut into as many equal spans as there are
      rows. Each record comes once an epoch. A span may begin in the middle of a sequence.
    - ``"pack"``: each sequence belongs to one row, whole; the longest are dealt first, each to the row with least. Each
      record comes once an epoch; rows that end before others are filled up.
    - ``"independent"``: each row goes through all sequences in an order of its own, over and over; an epoch is only so
      many steps, and the next one goes on. (The recipe of D. MacLeod, "How to build a streaming DataLoader with
      PyTorch", Speechmatics.)
    - ``"shuffled"``: rows take chunks from anywhere, and nothing continues: to compare with, and for `RowMixture`.

    Attributes:
        sequence_lengths: (sequences,) records of each, in index order: see `dataload.sequence_lengths`.
        rows: Rows of all ranks together, a multiple of `world_size`.
        chunk: Records per row and step.
        mode: Which sequences a row follows.
        ends: The end of a sequence: ``"next"`` lets a chunk go on in the row's next sequence; ``"pad"`` fills the last
            chunk up; ``"drop"`` leaves out what fills none.
        seed: Any integer.
        random_start: Whether chunks begin elsewhere in each epoch. With ``ends="next"`` a row's order begins somewhere
            in a sequence, of which the start then comes last; with ``"drop"`` sequences begin up to so many records
            late as are left out anyway.
        epoch_steps: Steps of an epoch of endless rows, for ``"independent"``, where by default an epoch has as many
            records as the data, and ``"shuffled"``, where by default each chunk comes once an epoch.

    Raises:
        ConfigError: A number is out of its range, or two settings contradict each other.
    """

    sequence_lengths: Sequence[int] | Int64Array
    rows: int
    chunk: int = 1
    mode: Mode = "split"
    ends: Ends = "next"
    seed: int = 0
    random_start: bool = False
    epoch_steps: int | None = None
    _units: Int64Array = field(init=False, repr=False, compare=False)
    _firsts: Int64Array = field(init=False, repr=False, compare=False)
    _total: int = field(init=False, repr=False, compare=False)
    _runs: Memo[_Run] = field(init=False, repr=False, compare=False)
    _packs: Memo[tuple[Listed, Int64Array]] = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = check_record_lengths(self.sequence_lengths, name="sequence_lengths", of="sequence")
        if lengths.sum(dtype=np.float64) > MAX_LENGTH:  # in integers such a sum may overflow
            raise ConfigError(
                f"sequence_lengths must have a sum of at most {MAX_LENGTH}", key="sequence_lengths", value=lengths
            )
        for name in ("rows", "chunk"):
            object.__setattr__(self, name, check_count(name, getattr(self, name), least=1))
        for name, kind in (("mode", Mode), ("ends", Ends)):
            check_choice(name, getattr(self, name), get_args(kind))
        _check_together(self)
        units = {"next": lengths, "pad": -(-lengths // self.chunk), "drop": lengths // self.chunk}[self.ends]
        values = {
            "sequence_lengths": lengths,
            "seed": check_seed(self.seed),
            "_units": units,
            "_firsts": np.cumsum(lengths) - lengths,
            "_total": int(units.sum()),
            "_runs": Memo(2 * self.rows if self.mode == "independent" else 2),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        BatchPlanner.__post_init__(self)

    def check_dealing(self) -> None:
        """See `BatchPlanner.check_dealing`."""
        BatchPlanner.check_dealing(self)
        check_rows(self.rows, self.world_size, self.origin)

    def __repr__(self) -> str:
        names = ("rows", "chunk", "mode", "ends", "seed", "random_start", "epoch_steps")
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"StreamSampler({len(self.sequence_lengths)} sequences, {self.records} records, {settings})"

    @property
    def order(self) -> Any:
        """All but ranks and tail."""
        names = ("sequence_lengths", "rows", "chunk", "mode", "ends", "seed", "random_start", "epoch_steps")
        return type(self).__name__, *((name, getattr(self, name)) for name in names)

    @property
    def records(self) -> int:
        """Indices are below this."""
        return int(np.asarray(self.sequence_lengths).sum())

    @property
    def items_per_step(self) -> int:
        """Rows of one rank."""
        return self.rows // self.world_size

    @property
    def rows_per_step(self) -> int:
        """Records per step of one rank."""
        return self.items_per_step * self.chunk

    def items(self, epoch: int) -> int:
        """Rows of all steps of an epoch."""
        return self.rows * self._steps(epoch)

    def resume(self, position: int) -> tuple[Self, int]:
        """See `BatchPlanner.resume`. Where it is no step that this order has, its state is of another order."""
        return self.with_ranks(origin=0), position // self.rows

    def with_epoch(self, steps: int) -> Self:
        """This order as an endless one, with epochs of so many steps.

        Raises:
            ConfigError: It has an end: see `epoch_steps`.
        """
        return replace(self, epoch_steps=steps)

    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        """See `BatchPlanner.plans`."""
        rows = np.arange(self.rank, self.rows, self.world_size)
        first = self.origin // self.rows
        cells = self.cells(rows, range(first + steps.start, first + steps.stop), epoch=epoch)
        return plans_of(cells, steps)

    def cells(self, rows: Int64Array, steps: range, *, epoch: int) -> Cells:
        """What some rows have at some steps.

        Args:
            rows: (rows,) int64, each in [0, self.rows).
            steps: Steps of the epoch, counted from its start.
            epoch: 0, 1, 2, ...
        """
        times = np.arange(steps.start, steps.stop, dtype=np.int64)
        shape = len(times), len(rows), self._step_units
        sequences, within, skipped = (np.zeros(shape, np.int64) for _ in range(3))
        begins, valid = np.zeros(shape, np.bool_), np.ones(shape, np.bool_)
        visit = {"independent": self._independently, "shuffled": self._anywhere}.get(self.mode, self._along_spans)
        for where, run, places, starts, inside in visit(rows, times, epoch):
            found = run.layout.find((places + run.shift) % self._total if run.shift else places)
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
        """Units that a row takes in a step."""
        return self.chunk if self.ends == "next" else 1

    @property
    def _chunks(self) -> int:
        """Chunks of the data, with ``"shuffled"``: where they may go on in the next sequence, the last may be short."""
        total, unit = self._total, self._step_units
        # Endless rows have no tail, and their order does not depend on what becomes of one.
        drops = self.tail == "drop" and self.epoch_steps is None
        return total // unit if drops else -(-total // unit)

    def _steps(self, epoch: int) -> int:
        """Steps of an epoch, from its start."""
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
        places = start + times[:, None, None] * self._step_units + np.arange(self._step_units)
        inside = places < stop
        begins = places == start
        return [_Visit(..., self._run(epoch), np.clip(places, 0, np.maximum(stop - 1, 0)), begins & inside, inside)]

    def _independently(self, rows: Int64Array, times: Int64Array, epoch: int) -> list[_Visit]:
        units = (epoch * self._steps(epoch) + times[:, None]) * self._step_units + np.arange(self._step_units)
        passes, places = np.divmod(units, self._total)
        yes = np.ones(1, np.bool_)
        visits: list[_Visit] = []
        for number in np.unique(passes).tolist():
            step, place = np.nonzero(passes == number)
            inside = places[step, place]
            visits += [
                _Visit((step, column, place), self._run(row, number), inside, inside == 0, yes)
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
            places = starts[:, None] + np.arange(self._step_units)
            inside = (places < self._total) & exists[where][:, None]
            begins = np.zeros(places.shape, np.bool_)
            begins[:, 0] = True
            visits.append(_Visit(where, self._run(number), np.minimum(places, self._total - 1), begins, inside))
        return visits

    def _bounds(self, epoch: int) -> Int64Array:
        """(rows + 1,) int64, the units where the rows' spans begin."""
        if self.mode == "split":
            return np.arange(self.rows + 1, dtype=np.int64) * self._total // self.rows
        return self._packed(epoch)[1]

    def _packed(self, epoch: int) -> tuple[Listed, Int64Array]:
        """Whole sequences, row after row; and (rows + 1,) int64, the units where the rows begin."""
        packed = self._packs.recall(epoch)
        if packed is None:
            order = permute(np.arange(len(self._units)), len(self._units), self._key("streams", epoch))
            by_row, bounds = balance(self._units, self.rows, order)
            layout = Listed(self._units[by_row], by_row)
            packed = self._packs.keep(epoch, (layout, np.concatenate([np.zeros(1, np.int64), layout.ends])[bounds]))
        return packed

    def _run(self, *address: int) -> _Run:
        """The pass of an epoch, or of a row and its pass."""
        run = self._runs.recall(address)
        if run is None:
            layout: Layout
            if self.mode == "pack":
                layout = self._packed(*address)[0]
            elif self.mode == "shuffled":
                layout = Listed(self._units)
            else:
                layout = Shuffled(self._units, self._key("streams", *address))
            start = self._key("stream starts", *address)
            shift = int(start[0]) % self._total if self.random_start and self.ends == "next" and self._total else 0
            skip_key = start[0] if self.random_start and self.ends == "drop" else None
            run = self._runs.keep(address, _Run(layout, shift, skip_key))
        return run

    def _key(self, purpose: str, *address: int) -> npt.NDArray[np.uint64]:
        return derive_key(self.seed, purpose, *address, words=KEY_WORDS)


def _check_together(sampler: StreamSampler) -> None:
    """See whether settings go together.

    Raises:
        ConfigError: They do not.
    """
    mode, ends = sampler.mode, sampler.ends
    if sampler.epoch_steps is not None:
        check_count("epoch_steps", sampler.epoch_steps, least=1)
        if mode not in ("independent", "shuffled"):
            raise ConfigError(
                f"epoch_steps is for rows that have no end, and with mode={mode!r} an epoch is once through the data: "
                "leave it out, or choose mode='independent'",
                key="epoch_steps",
                value=sampler.epoch_steps,
            )
    if sampler.random_start and ends == "pad":
        raise ConfigError(
            "with ends='pad' each record has its place in each epoch: choose ends='next' or 'drop', or leave "
            "random_start out",
            key="random_start",
            value=True,
        )
    if sampler.random_start and mode == "pack" and ends == "next":
        raise ConfigError(
            "random_start with ends='next' would cut sequences in two, and mode='pack' keeps them whole: choose "
            "ends='drop' or another mode",
            key="random_start",
            value=True,
        )
