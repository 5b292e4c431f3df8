"""In which order DALI's readers give samples: shards, padding, and epochs without an end."""

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
    """What decides which sample comes when.

    Attributes:
        batch_size: Samples of a batch.
        num_shards: Shards that all samples are cut into.
        shard_id: The one that is read first.
        stick: It is read again in each epoch; otherwise the next one follows.
        pad: An epoch is filled up to whole batches, as many in each shard, by its last sample.
        pool_size: Samples in the pool that they are drawn from; None does not shuffle.
        seed: Of that shuffle.
        archives_seed: Of the order of the archives, which changes each epoch; None leaves it.
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
    """The indices of the samples, without an end.

    Args:
        plan: See there.
        lengths: Samples of each archive.

    Raises:
        ConfigError: There are fewer samples than shards.
    """

    def __init__(self, plan: EpochPlan, lengths: tuple[int, ...]) -> None:
        self._plan = plan
        self._samples = sum(lengths)
        if self._samples < plan.num_shards:
            raise ConfigError(
                f"num_shards is {plan.num_shards}, and there are {self._samples} samples: each shard needs one",
                key="num_shards",
                value=plan.num_shards,
            )
        seed = plan.archives_seed
        self._all: Sampler = Sequential(self._samples) if seed is None else ShardSequential(lengths, seed)
        self._epoch = -1
        self._position = 0
        self._order: Sampler = Sequential(0)
        self._length = 0
        self._begin_epoch()

    def take(self, count: int) -> Int64Array:
        """The next `count` indices, (count,) int64."""
        parts: list[Int64Array] = []
        while count:
            if self._position == self._length:
                self._begin_epoch()
            stop = min(self._position + count, self._length)
            # Behind the last sample of the order it is repeated: the padding.
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
        self._order = Subset(self._all, range(*even_split(self._samples, plan.num_shards)[shard]))
        if plan.pool_size is not None:
            self._order = PoolShuffle(self._order, plan.pool_size, plan.seed)
        self._length = len(self._order)
        if plan.pad:
            batches = -(-self.samples_padded // (plan.num_shards * plan.batch_size))
            self._length = batches * plan.batch_size

    @property
    def samples(self) -> int:
        """Of all shards together."""
        return self._samples

    @property
    def samples_padded(self) -> int:
        """The same with shards filled up to the size of the largest, where the plan pads."""
        shards = self._plan.num_shards
        return -(-self._samples // shards) * shards if self._plan.pad else self._samples
