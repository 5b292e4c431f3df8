"""From an order to batches: which rows each rank has at each step. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError, closest
from dataload.samplers._checks import check_count
from dataload.types import Int64Array, Sampler

__all__ = ["BatchPlan", "BatchSampler", "Tail"]

Tail: TypeAlias = Literal["drop", "pad", "partial"]
"""What becomes of positions that fill no batch on every rank."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The rows of one rank at one step.

    Attributes:
        step: Number of the step within the epoch.
        indices: (rows,) int64, what to read.
        valid: (rows,) bool, False for rows that only fill up the batch; None where no row can be.
    """

    step: int
    indices: Int64Array
    valid: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSampler:
    """Deals an order to steps and ranks.

    With G = batch_size * world_size, step k covers the positions [origin + k G, origin + (k + 1) G), and rank r
    has those of them that are r modulo `world_size`. So the global batch of a step does not depend on the number of
    ranks, and every rank has the same number of steps.

    Attributes:
        sampler: The order.
        batch_size: Rows per step of one rank.
        world_size: Number of ranks.
        rank: This one, in [0, world_size).
        tail: What becomes of the positions behind the last full global batch. `drop` leaves them out; `pad` repeats
            the last index and marks these rows in `valid`; `partial` makes the last step shorter, by one row more on
            some ranks than on others.
        origin: First position of step 0. Not 0 when an epoch goes on with another global batch size than it began
            with; positions below it have been consumed.

    Raises:
        ConfigError: A number is out of its range, or there is no such tail.
    """

    sampler: Sampler
    batch_size: int
    world_size: int = 1
    rank: int = 0
    tail: Tail = "partial"
    origin: int = 0

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size, least=1)
        check_count("world_size", self.world_size, least=1)
        check_count("rank", self.rank, least=0, below=self.world_size)
        check_count("origin", self.origin, least=0)
        if self.tail not in get_args(Tail):
            raise ConfigError(
                f"tail is {self.tail!r}: {closest(self.tail, get_args(Tail))}", key="tail", value=self.tail
            )

    @property
    def global_batch_size(self) -> int:
        """Rows per step of all ranks together."""
        return self.batch_size * self.world_size

    @property
    def steps(self) -> int:
        """Steps per epoch, the same on every rank."""
        left = max(0, len(self.sampler) - self.origin)
        return left // self.global_batch_size if self.tail == "drop" else -(-left // self.global_batch_size)

    def __len__(self) -> int:
        return self.steps

    def position(self, step: int) -> int:
        """Positions of the epoch that are consumed before `step`."""
        return min(self.origin + step * self.global_batch_size, len(self.sampler))

    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        """The rows of this rank at several consecutive steps, computed together.

        Args:
            steps: Steps of step size 1, within [0, len).
            epoch: 0, 1, 2, ...

        Returns:
            One plan per step.
        """
        # (steps, rows): rank r has every world_size-th position of each global batch
        firsts = self.origin + np.arange(steps.start, steps.stop, dtype=np.int64) * self.global_batch_size
        positions = firsts[:, None] + np.arange(self.rank, self.global_batch_size, self.world_size, dtype=np.int64)
        inside = positions < len(self.sampler)
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
