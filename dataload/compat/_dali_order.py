"""The order in which DALI's readers give samples: shards, padding and endless epochs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataload._util.indexing import even_split
from dataload.errors import ConfigError
from dataload.samplers import PoolShuffle, Sequential, ShardSequential, Subset
from dataload.types import Int64Array, Sampler

__all__ = ["EpochPlan", "IndexStream"]


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The settings that decide the order of the samples.

    Attributes:
        batch_size: Samples per batch.
        num_shards: Number of shards that all samples are divided into.
        shard_id: The shard to read first.
        stick: If True, read the same shard in each epoch; otherwise move on to the next one.
        pad: If True, fill each epoch up to whole batches, as many for each shard, by repeating its last sample.
        pool_size: Samples in the pool that shuffles; None does not shuffle.
        seed: Seed of that shuffle.
        archives_seed: Seed of the order of the archives, which changes each epoch; None keeps their order.
    """

    batch_size: int
    num_shards: int
    shard_id: int
    stick: bool
    pad: bool
    pool_size: int | None
    seed: int
    archives_seed: int | None


class IndexStream:
    """An endless stream of sample indices.

    Args:
        plan: The settings.
        lengths: Number of samples in each archive.

    Raises:
        ConfigError: There are fewer samples than shards.
    """

    def __init__(self, plan: EpochPlan, lengths: tuple[int, ...]) -> None:
        self._plan = plan
        self.samples = sum(lengths)
        if self.samples < plan.num_shards:
            raise ConfigError(
                f"num_shards is {plan.num_shards}, but there are only {self.samples} samples: each shard needs one",
                key="num_shards",
                value=plan.num_shards,
            )
        # The samples of all shards, with each shard filled up to the size of the largest if the plan pads.
        self.samples_padded = -(-self.samples // plan.num_shards) * plan.num_shards if plan.pad else self.samples
        seed = plan.archives_seed
        self._all: Sampler = Sequential(self.samples) if seed is None else ShardSequential(lengths, seed)
        self._epoch = -1
        self._begin_epoch()

    def take(self, count: int) -> Int64Array:
        """Return the next `count` indices, (count,) int64."""
        parts: list[Int64Array] = []
        while count:
            if self._position == self._length:
                self._begin_epoch()
            stop = min(self._position + count, self._length)
            # Padding repeats the last sample of the order.
            positions = np.minimum(np.arange(self._position, stop), len(self._order) - 1)
            parts.append(self._order.indices(positions, epoch=self._epoch))
            count -= stop - self._position
            self._position = stop
        return np.concatenate(parts)

    def _begin_epoch(self) -> None:
        plan = self._plan
        self._epoch += 1
        self._position = 0
        shard = plan.shard_id if plan.stick else (plan.shard_id + self._epoch) % plan.num_shards
        self._order: Sampler = Subset(self._all, range(*even_split(self.samples, plan.num_shards)[shard]))
        if plan.pool_size is not None:
            self._order = PoolShuffle(self._order, plan.pool_size, plan.seed)
        self._length = len(self._order)
        if plan.pad:
            self._length = -(-self.samples_padded // (plan.num_shards * plan.batch_size)) * plan.batch_size
