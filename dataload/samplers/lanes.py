"""An order dealt into lanes that ranks take for their own."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dataload._util.randomness import check_seed, derive_key
from dataload.samplers._checks import check_count, check_sampler, records_of
from dataload.samplers._values import divide, split_by_group
from dataload.samplers.pool import LARGEST_POOL, PoolShuffle
from dataload.samplers.sequential import Sequential
from dataload.types import Int64Array, Sampler

__all__ = ["Lanes"]

_MOST_LANES = 65_536  # each may have a pool, an object of its own


@dataclass(frozen=True, slots=True)
class Lanes:
    """The parent's order cut into equal contiguous spans that are then taken in turns.

    Position p is place ``p // lanes`` of lane ``p % lanes``; where the length is no multiple of `lanes`, the first
    lanes have one more. A rank of W takes every W-th position, so where W divides `lanes` it reads its own lanes only:
    over `ShardSequential` its own part of the shards, with the same global batches for every such W.

    Attributes:
        parent: The order to deal.
        lanes: Number of lanes, at most 65,536; a multiple of every number of ranks that shall be possible.
        pool_size: Size of a shuffle pool in each lane, which never mixes lanes; None leaves lanes as they are.
        seed: Of the pools; any integer.

    Raises:
        ConfigError: `lanes` or `pool_size` is no integer in its range, or `seed` is none.
    """

    parent: Sampler
    lanes: int
    pool_size: int | None = None
    seed: int = 0
    _pools: tuple[PoolShuffle, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_sampler("parent", self.parent)
        set_field = object.__setattr__
        set_field(self, "lanes", check_count("lanes", self.lanes, least=1, below=_MOST_LANES + 1))
        set_field(self, "seed", check_seed(self.seed))
        if self.pool_size is not None:
            set_field(self, "pool_size", check_count("pool_size", self.pool_size, least=1, below=LARGEST_POOL + 1))
            set_field(self, "_pools", tuple(self._pool(lane, self.pool_size) for lane in range(self.lanes)))

    def _pool(self, lane: int, pool_size: int) -> PoolShuffle:
        start, stop = self._starts(np.array([lane, lane + 1])).tolist()
        return PoolShuffle(Sequential(stop - start), pool_size, int(derive_key(self.seed, "lane", lane, words=1)[0]))

    def _starts(self, lanes: Int64Array) -> Int64Array:
        """First position of the parent's order in each lane."""
        quotient, remainder = divmod(len(self.parent), self.lanes)
        return lanes * quotient + np.minimum(lanes, remainder)

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def records(self) -> int:
        """Indices are below this."""
        return records_of(self.parent)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        places, lanes = divide(positions, self.lanes)
        if self._pools:
            for lane, rows in split_by_group(lanes):
                places[rows] = self._pools[lane].indices(places[rows], epoch=epoch)
        return self.parent.indices(self._starts(lanes) + places, epoch=epoch)
