"""From an order to batches: which rows each rank has at each step. Pure (no I/O)."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from dataload._util.checks import check_choice
from dataload.collate import Packing
from dataload.errors import ConfigError
from dataload.samplers._checks import check_count, check_sampler, records_of
from dataload.types import Array, Int64Array, Sampler

__all__ = ["BatchPlan", "BatchPlanner", "BatchSampler", "Tail"]

Tail: TypeAlias = Literal["drop", "pad", "partial"]
"""What becomes of positions that fill no batch on every rank."""

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The rows of one rank at one step.

    Attributes:
        step: Number of the step within the epoch.
        indices: (rows,) int64, what to read; (records,) where rows are packed; (rows * chunk,) where they have chunks.
        valid: (rows,) bool, or (rows, chunk), False for what only fills up the batch; None where nothing can.
        packing: How records are packed into rows; None where none are.
        chunk: Consecutive records of a row. With more than one the batch's arrays are (rows, chunk, ...).
        columns: What the plan itself adds to the batch, by name, (rows, ...) each. Rows then keep their places
            whatever becomes of a record.
    """

    step: int
    indices: Int64Array
    valid: BoolArray | None = None
    packing: Packing | None = None
    chunk: int = 1
    columns: Mapping[str, Array] | None = None

    @property
    def rows(self) -> int:
        """Rows of the batch; records, where they are packed."""
        return len(self.indices) // self.chunk

    @property
    def wanted(self) -> Int64Array:
        """The indices without those that only fill up the batch."""
        return self.indices if self.valid is None or self.packing is not None else self.indices[self.valid.ravel()]

    def without(self, bad: BoolArray) -> BatchPlan:
        """The plan without some of its records, (records,) bool. Packed rows keep their number and get gaps."""
        good = ~bad
        if self.packing is None:
            return replace(self, indices=self.indices[good], valid=None if self.valid is None else self.valid[good])
        rows, starts, lengths, shape = self.packing
        return replace(
            self, indices=self.indices[good], packing=Packing(rows[good], starts[good], lengths[good], shape)
        )

    def filled(self, bad: BoolArray, index: int) -> BatchPlan:
        """The plan with another record in the place of some, (records,) bool, that only fills up the batch."""
        shape = (self.rows,) if self.chunk == 1 else (self.rows, self.chunk)
        valid = np.ones(shape, np.bool_) if self.valid is None else self.valid
        return replace(self, indices=np.where(bad, index, self.indices), valid=valid & ~bad.reshape(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanner(ABC):
    """Deals a sequence of items to steps and ranks.

    What the items are (positions, whole batches, packed rows) is for subclasses to say; they do not depend on the
    ranks. A step takes the next ``world_size * items_per_step`` of them, and rank r those that are r modulo
    `world_size`. So every rank has the same number of steps, and an epoch can go on with other ranks from any item.

    Attributes:
        world_size: Number of ranks.
        rank: This one, in [0, world_size).
        tail: What becomes of the items behind the last step that is full on every rank. `drop` leaves them out; `pad`
            repeats the last and marks what is too much in `valid`; `partial` makes the last step shorter, by one item
            more on some ranks than on others.
        origin: First item of step 0. Not 0 when an epoch goes on with steps of another size than it began with;
            items below it have been consumed.

    Raises:
        ConfigError: A number is out of its range, or there is no such tail.
    """

    world_size: int = 1
    rank: int = 0
    tail: Tail = "partial"
    origin: int = 0

    def __post_init__(self) -> None:
        self.check_dealing()

    def check_dealing(self) -> None:
        """See whether the items can be dealt like that.

        Raises:
            ConfigError: They cannot.
        """
        check_count("world_size", self.world_size, least=1)
        check_count("rank", self.rank, least=0, below=self.world_size)
        check_count("origin", self.origin, least=0)
        check_choice("tail", self.tail, get_args(Tail))

    @property
    @abstractmethod
    def order(self) -> Any:
        """A value that tells the sequence of items from any other, whatever the ranks and the tail."""

    @property
    @abstractmethod
    def records(self) -> int:
        """Indices are below this."""

    @property
    @abstractmethod
    def items_per_step(self) -> int:
        """Items per step of one rank."""

    @property
    @abstractmethod
    def rows_per_step(self) -> int:
        """Rows per step of one rank, about."""

    @abstractmethod
    def items(self, epoch: int) -> int:
        """Length of the sequence."""

    @abstractmethod
    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        """The rows of this rank at several consecutive steps, computed together.

        Args:
            steps: Steps of step size 1, within [0, steps(epoch)).
            epoch: 0, 1, 2, ...

        Returns:
            One plan per step.
        """

    @property
    def step_size(self) -> int:
        """Items per step of all ranks together."""
        return self.items_per_step * self.world_size

    def steps(self, epoch: int) -> int:
        """Steps of an epoch, the same on every rank."""
        left = max(0, self.items(epoch) - self.origin)
        size = self.step_size
        return left // size if self.tail == "drop" else -(-left // size)

    def position(self, step: int, *, epoch: int) -> int:
        """Items of the epoch that are consumed before `step`."""
        return min(self.origin + step * self.step_size, self.items(epoch))

    def with_ranks(self, **dealing: Any) -> Self:
        """The same items, dealt otherwise: whatever was computed of them (buckets, numbers of rows) is kept.

        Args:
            dealing: `world_size`, `rank`, `tail`, `origin`: those that shall be others.

        Raises:
            ConfigError: See `check_dealing`.
        """
        planner = copy.copy(self)
        for name, value in dealing.items():
            object.__setattr__(planner, name, value)  # of a copy that nobody else has seen yet
        planner.check_dealing()
        return planner

    def resume(self, position: int) -> tuple[Self, int]:
        """This planner for an epoch of which `position` items are consumed, and the step to go on with."""
        step, origin = divmod(position, self.step_size)
        return self.with_ranks(origin=origin), step

    def deal(self, steps: range, *, epoch: int) -> tuple[Int64Array, BoolArray]:
        """The items of this rank at `steps`.

        Returns:
            (steps, items_per_step) int64, those behind the end as if there were more; and which of them exist, bool.
        """
        size = self.step_size
        firsts = self.origin + np.arange(steps.start, steps.stop, dtype=np.int64) * size
        items = firsts[:, None] + np.arange(self.rank, size, self.world_size, dtype=np.int64)
        return items, items < self.items(epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSampler(BatchPlanner):
    """Batches of as many rows each, in the order of a sampler.

    With G = batch_size * world_size, step k covers the positions [k G, (k + 1) G) of the order, and rank r has those
    of them that are r modulo `world_size`: the global batch of a step does not depend on the number of ranks.

    Attributes:
        sampler: The order.
        batch_size: Rows per step of one rank.

    Raises:
        ConfigError: A number is out of its range, there is no such tail, or the sampler has lanes, and not as many
            for each rank.
    """

    sampler: Sampler
    batch_size: int

    def __post_init__(self) -> None:
        # not super(): a dataclass with slots is made anew, and the cell that super() looks into is of the first
        check_sampler("sampler", self.sampler)
        check_count("batch_size", self.batch_size, least=1)
        BatchPlanner.__post_init__(self)

    def check_dealing(self) -> None:
        """See `BatchPlanner.check_dealing`."""
        BatchPlanner.check_dealing(self)
        lanes = getattr(self.sampler, "lanes", self.world_size)
        if lanes % self.world_size:
            raise ConfigError(
                f"lanes must be a multiple of world_size, {self.world_size}, so that each rank has its own; "
                f"got {lanes}",
                key="lanes",
                value=lanes,
            )

    @property
    def order(self) -> Sampler:
        """The sampler."""
        return self.sampler

    @property
    def records(self) -> int:
        """Indices are below this."""
        return records_of(self.sampler)

    @property
    def items_per_step(self) -> int:
        """Positions per step of one rank: the batch size."""
        return self.batch_size

    @property
    def rows_per_step(self) -> int:
        """The batch size."""
        return self.batch_size

    @property
    def global_batch_size(self) -> int:
        """Rows per step of all ranks together."""
        return self.batch_size * self.world_size

    def items(self, epoch: int) -> int:  # noqa: ARG002 - a sampler's length is the same in each epoch
        """Positions of the order."""
        return len(self.sampler)

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return self.steps(0)

    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        """See `BatchPlanner.plans`."""
        positions, inside = self.deal(steps, epoch=epoch)
        if self.tail == "pad":
            indices = self._indices(np.minimum(positions, len(self.sampler) - 1), epoch)
            return [BatchPlan(step, indices[i], inside[i]) for i, step in enumerate(steps)]
        if inside.all():
            indices = self._indices(positions, epoch)
            return [BatchPlan(step, indices[i]) for i, step in enumerate(steps)]
        rows = inside.sum(axis=1)  # (steps,); positions rise, so the rows inside come first
        flat = self._indices(positions[inside], epoch)
        parts = np.split(flat, np.cumsum(rows)[:-1])
        return [BatchPlan(step, part) for step, part in zip(steps, parts, strict=True)]

    def _indices(self, positions: Int64Array, epoch: int) -> Int64Array:
        return self.sampler.indices(positions.ravel(), epoch=epoch).reshape(positions.shape)
