"""Batches of an order, their ranks, and the steps that serve a record. Pure (no I/O)."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np

from dataload._util.settings import Least, check_count, check_settings, setting_error
from dataload.collate import Packing
from dataload.errors import ConfigError
from dataload.samplers.common import MAX_LENGTH, BoolArray, check_sampler, indices_of, records_of, set_fields
from dataload.types import Array, Int64Array, Sampler

Tail: TypeAlias = Literal["drop", "pad", "partial"]
"""The treatment of an epoch's last positions, which do not fill a batch on every rank."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The rows of one rank at one step.

    Attributes:
        step: Number of the step in the epoch.
        indices: Indices to read, int64: (rows,), (rows * chunk,) for rows of chunks, or (records,) for packed rows.
        valid: (rows,) or (rows, chunk) bool, False for filler. None if the batch has no filler.
        packing: Layout of records in packed rows. None if rows are not packed.
        chunk: Consecutive records per row. If more than 1, the batch's arrays have shape (rows, chunk, ...).
        columns: Columns that the plan adds to the batch, (rows, ...) each. If given, rows keep their positions even
            when a bad record is replaced.
    """

    step: int
    indices: Int64Array
    valid: BoolArray | None = None
    packing: Packing | None = None
    chunk: int = 1
    columns: Mapping[str, Array] | None = None

    @property
    def rows(self) -> int:
        """Rows of the batch, or its records if rows are packed."""
        return len(self.indices) // self.chunk

    @property
    def wanted(self) -> Int64Array:
        """The indices without filler."""
        return self.indices if self.valid is None or self.packing is not None else self.indices[self.valid.ravel()]

    def without(self, bad: BoolArray) -> BatchPlan:
        """Return the plan without the records marked in `bad`, (records,) bool. Packed rows keep gaps instead."""
        good = ~bad
        if self.packing is None:
            return replace(self, indices=self.indices[good], valid=None if self.valid is None else self.valid[good])
        return replace(self, indices=self.indices[good], packing=self.packing.only(good))

    def filled(self, bad: BoolArray, index: int) -> BatchPlan:
        """Return the plan with record `index` as filler for those marked in `bad`, (records,) bool."""
        shape = (self.rows,) if self.chunk == 1 else (self.rows, self.chunk)
        valid = np.ones(shape, np.bool_) if self.valid is None else self.valid
        return replace(self, indices=np.where(bad, index, self.indices), valid=valid & ~bad.reshape(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanner(ABC):
    """Base class of batch samplers: distributes a sequence of items over steps and ranks.

    Subclasses define the items: positions, whole batches, or packed rows. The sequence never depends on the ranks. A
    step takes the next ``world_size * items_per_step`` items, and rank r gets every `world_size`-th of them, starting
    with the r-th. So every rank has the same number of steps, and an epoch can continue with another number of ranks
    from any item.

    Attributes:
        world_size: Number of ranks (processes of the training job).
        rank: Rank of this process, in [0, world_size).
        tail: How to treat the items left after the last step that is full on every rank. ``"drop"`` omits them;
            ``"pad"`` repeats the last item and marks the filler in `valid`; ``"partial"`` makes the last step shorter,
            where ranks may differ by one item.
        origin: First item of step 0; the items before it were already consumed. It is not 0 if an epoch continues
            with another step size than it began with.

    Raises:
        ConfigError: A number is out of its range, or `tail` is unknown.
    """

    world_size: Annotated[int, Least(1)] = 1
    rank: Annotated[int, Least(0, below="world_size")] = 0
    tail: Tail = "partial"
    origin: Annotated[int, Least(0)] = 0

    def __post_init__(self) -> None:
        self.check_dealing()

    def check_dealing(self) -> None:
        """Raise ConfigError unless the items can be distributed with these settings."""
        check_settings(self, BatchPlanner)

    @property
    @abstractmethod
    def order(self) -> Any:
        """A value that identifies the sequence of items, independent of ranks and tail."""

    @property
    @abstractmethod
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""

    @property
    @abstractmethod
    def items_per_step(self) -> int:
        """Items per step of one rank."""

    @property
    def rows_per_step(self) -> int:
        """Approximate rows per step of one rank, by default one per item."""
        return self.items_per_step

    @abstractmethod
    def items(self, epoch: int) -> int:
        """Return the number of items in an epoch."""

    @abstractmethod
    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        """Compute the rows of this rank at consecutive steps.

        Args:
            steps: A range of steps with stride 1, within [0, steps(epoch)).
            epoch: Number of the epoch, from 0.

        Returns:
            One plan per step.
        """

    def sent(self, steps: range, *, epoch: int) -> Sequence[BatchPlan] | None:  # noqa: ARG002 - for subclasses
        """Return the plans of these steps if workers need them; None if workers compute them from their copy."""
        return None

    def first_step(self, epoch: int) -> int:  # noqa: ARG002 - for subclasses
        """Return the first step of an epoch whose rows are known, which is not 0 if the order has forgotten others."""
        return 0

    def plan(self, step: int, *, epoch: int) -> BatchPlan:
        """Compute the rows of this rank at one step; see `plans`."""
        (found,) = self.plans(range(step, step + 1), epoch=epoch)
        return found

    @property
    def step_size(self) -> int:
        """Items per step of all ranks together."""
        return self.items_per_step * self.world_size

    def steps(self, epoch: int) -> int:
        """Return the number of steps in an epoch, the same on every rank."""
        left = max(0, self.items(epoch) - self.origin)
        size = self.step_size
        return left // size if self.tail == "drop" else -(-left // size)

    def position(self, step: int, *, epoch: int) -> int:
        """Return the number of items in the epoch that come before `step`."""
        return min(self.origin + step * self.step_size, self.items(epoch))

    def with_ranks(self, **dealing: Any) -> Self:
        """Return a planner of the same items with other `world_size`, `rank`, `tail` or `origin`."""
        planner = copy.copy(self)  # keeps what was computed from the items
        set_fields(planner, **dealing)  # no other code has seen the copy
        planner.check_dealing()
        return planner

    def resume(self, position: int) -> tuple[Self, int]:
        """Return the planner and the step with which to continue an epoch after `position` items."""
        step, origin = divmod(position, self.step_size)
        return self.with_ranks(origin=origin), step

    def deal(self, steps: range, *, epoch: int) -> tuple[Int64Array, BoolArray]:
        """Return the items of this rank, (steps, items_per_step) int64, also past the end; and which exist."""
        size = self.step_size
        firsts = self.origin + np.arange(steps.start, steps.stop, dtype=np.int64) * size
        items = firsts[:, None] + np.arange(self.rank, size, self.world_size, dtype=np.int64)
        return items, items < self.items(epoch)

    def _settings(self, *omitted: str) -> Any:
        """Class and settings of a subclass, without `omitted` and the distribution over ranks: a value for `order`."""
        skipped = {"world_size", "rank", "tail", "origin", *omitted}
        named = [(f.name, getattr(self, f.name)) for f in fields(self) if f.compare and f.name not in skipped]
        return type(self).__name__, *named


class OverSampler(BatchPlanner):
    """The range of indices and the items per step of a planner with a `sampler` and a `batch_size`."""

    __slots__ = ()
    sampler: Sampler
    batch_size: int

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return records_of(self.sampler)

    @property
    def items_per_step(self) -> int:
        """Items per step of one rank, which is the batch size."""
        return self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSampler(OverSampler):
    """Batches of a fixed number of rows, in the order of a sampler.

    With ``G = batch_size * world_size``, step k covers positions [k G, (k + 1) G) of the order, and rank r gets the
    positions p with ``p % world_size == r``. The global batch of a step therefore depends on G only, not on how many
    ranks share it.

    Attributes:
        sampler: The order of the records.
        batch_size: Rows per step of one rank.

    Raises:
        ConfigError: A number is out of its range, `tail` is unknown, or the sampler's number of lanes is not a
            multiple of `world_size`.
    """

    sampler: Sampler
    batch_size: Annotated[int, Least(1)]
    sends: bool = field(default=False, init=False, repr=False, compare=False)  # whether workers have another order

    def __post_init__(self) -> None:
        # Not super(): dataclass(slots=True) creates a second class, but super() would refer to the first.
        check_sampler("sampler", self.sampler)
        check_settings(self)
        BatchPlanner.__post_init__(self)

    def check_dealing(self) -> None:
        """See `BatchPlanner.check_dealing`."""
        BatchPlanner.check_dealing(self)
        lanes = getattr(self.sampler, "lanes", self.world_size)
        if lanes % self.world_size:
            rule = f"must be a multiple of world_size, {self.world_size}, so that each rank has its own"
            raise setting_error("lanes", lanes, rule)

    @property
    def order(self) -> Sampler:
        """The sampler."""
        return self.sampler

    @property
    def global_batch_size(self) -> int:
        """Rows per step of all ranks together."""
        return self.batch_size * self.world_size

    def items(self, epoch: int) -> int:
        """Return the number of positions in the order."""
        return _length_in(self.sampler, epoch)

    def first_step(self, epoch: int) -> int:
        """See `BatchPlanner.first_step`."""
        known: Any = getattr(self.sampler, "known_from", None)
        return 0 if known is None else max(0, -(-(known(epoch) - self.origin) // self.step_size))

    def sent(self, steps: range, *, epoch: int) -> Sequence[BatchPlan] | None:
        """See `BatchPlanner.sent`."""
        return self.plans(steps, epoch=epoch) if self.sends else None

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return self.steps(0)

    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        """See `BatchPlanner.plans`."""
        positions, inside = self.deal(steps, epoch=epoch)
        if self.tail == "pad":
            indices = self._indices(np.minimum(positions, self.items(epoch) - 1), epoch)
            return [BatchPlan(step, indices[i], inside[i]) for i, step in enumerate(steps)]
        if inside.all():
            indices = self._indices(positions, epoch)
            return [BatchPlan(step, indices[i]) for i, step in enumerate(steps)]
        rows = inside.sum(axis=1)  # (steps,); positions ascend, so existing rows come first
        flat = self._indices(positions[inside], epoch)
        parts = np.split(flat, np.cumsum(rows)[:-1])
        return [BatchPlan(step, part) for step, part in zip(steps, parts, strict=True)]

    def _indices(self, positions: Int64Array, epoch: int) -> Int64Array:
        return indices_of(self.sampler, positions.ravel(), epoch).reshape(positions.shape)


def _length_in(sampler: Sampler, epoch: int) -> int:
    length_in: Any = getattr(sampler, "length_in", None)  # of mixtures, which may change
    return len(sampler) if length_in is None else length_in(epoch)


_BLOCK = 1 << 18


def positions_of(sampler: Sampler, index: int, *, epoch: int, below: int = MAX_LENGTH) -> Int64Array:
    """Return the positions under `below` of a record in an epoch, (n,) int64, ascending."""
    below = min(below, _length_in(sampler, epoch))
    compute: Any = getattr(sampler, "positions_of", None)
    if compute is not None:
        return compute(index, epoch=epoch, below=below)
    found = [np.empty(0, np.int64)]
    for start in range(0, below, _BLOCK):
        block = np.arange(start, min(start + _BLOCK, below))
        found.append(block[indices_of(sampler, block, epoch) == index])
    return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class Serving:
    """One row in which a record is served.

    Attributes:
        epoch: Number of the epoch.
        step: Number of the step in the epoch.
        rank: Rank that gets the row.
        row: Row of that rank's batch.
        offset: The record's place in a row of several records: its number in the chunk, or its first element in a
            packed row. None if a row is one record.
    """

    epoch: int
    step: int
    rank: int
    row: int
    offset: int | None = None


def servings_of(planner: BatchPlanner, index: int, *, epoch: int, steps: range | None = None) -> list[Serving]:
    """Return all rows in which an epoch serves a record, by step and rank, without padding.

    Args:
        planner: The plan of any rank.
        index: Index of the record.
        epoch: Number of the epoch.
        steps: The steps to search, by default all of the epoch.

    Raises:
        ConfigError: `index` or `epoch` is not an integer of 0 or more; `steps` is None and the mixture never ends; or
            its weights at the first of the steps are not in the state that was loaded.
    """
    check_count("index", index, least=0)
    total = planner.steps(check_count("epoch", epoch, least=0))
    if steps is None and planner.items(epoch) >= MAX_LENGTH:
        raise ConfigError(
            f"epoch {epoch} never ends (it has {total:,} steps): give the steps to search", key="steps", value=None
        )
    steps = range(total) if steps is None else range(max(0, steps.start), min(steps.stop, total))
    if isinstance(planner, BatchSampler):
        size, ranks, origin = planner.step_size, planner.world_size, planner.origin
        start, below = (min(planner.items(epoch), origin + step * size) for step in (steps.start, steps.stop))
        if steps.start and below - start <= _BLOCK:  # `positions_of` would begin at position 0
            block = np.arange(start, below)
            found = block[indices_of(planner.sampler, block, epoch) == index]
        else:
            planner.sampler.indices(np.arange(start, min(start + 1, below)), epoch=epoch)  # refuses what it forgot
            found = positions_of(planner.sampler, index, epoch=epoch, below=below)
        rows = [(*divmod(position, size),) for position in (found - origin).tolist()]
        return [Serving(epoch, step, row % ranks, row // ranks) for step, row in rows if step in steps]
    block = max(1, _BLOCK // planner.rows_per_step)
    served: list[Serving] = []
    for rank in range(planner.world_size):
        of_rank = planner.with_ranks(rank=rank)
        for start in range(steps.start, steps.stop, block):
            for plan in of_rank.plans(range(start, min(start + block, steps.stop)), epoch=epoch):
                served += [Serving(epoch, plan.step, rank, *place) for place in _places(plan, index)]
    return sorted(served, key=lambda serving: (serving.step, serving.rank, serving.row))


def _places(plan: BatchPlan, index: int) -> list[tuple[int, int | None]]:
    """Return the rows and offsets at which a plan has a record."""
    at = np.flatnonzero(plan.indices == index)
    if plan.packing is not None:
        return list(zip(plan.packing.rows[at].tolist(), plan.packing.starts[at].tolist(), strict=True))
    if plan.valid is not None:
        at = at[plan.valid.ravel()[at]]
    if plan.chunk == 1:
        return [(row, None) for row in at.tolist()]
    return [divmod(place, plan.chunk) for place in at.tolist()]
