"""An order divided into lanes, so that each rank reads its own part of the data."""

from dataclasses import dataclass, field

import numpy as np

from dataload._util.checks import check_count
from dataload._util.randomness import check_seed, derive_key
from dataload.samplers._common import OverParent, check_sampler, divide, set_fields, split_by_group
from dataload.samplers.basic import Sequential
from dataload.samplers.inverse import positions_of
from dataload.samplers.pool import PoolShuffle, check_pool_size
from dataload.types import Int64Array, Sampler

_MOST_LANES = 65_536  # each may have a pool, which is an object of its own


@dataclass(frozen=True, slots=True)
class Lanes(OverParent):
    """Another order, cut into equal contiguous spans ("lanes") that are interleaved.

    Position p is offset ``p // lanes`` of lane ``p % lanes``. If the length is not a multiple of `lanes`, the first
    lanes hold one position more. Rank r of W takes every W-th position, so if W divides `lanes`, each rank reads only
    its own lanes. Over `ShardSequential` that is its own part of the shards, while the global batches are the same for
    every such W.

    Attributes:
        parent: The order to divide.
        lanes: Number of lanes, at most 65,536. Use a multiple of every number of ranks you may run on.
        pool_size: Positions in a shuffle pool of each lane, which never mixes lanes. None does not shuffle lanes.
        seed: Seed of the pools, any integer.

    Raises:
        ConfigError: `lanes` or `pool_size` is not an integer in its range, or `seed` is not an integer.
    """

    parent: Sampler
    lanes: int
    pool_size: int | None = None
    seed: int = 0
    _pools: tuple[PoolShuffle, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_sampler("parent", self.parent)
        lanes = check_count("lanes", self.lanes, least=1, below=_MOST_LANES + 1)
        set_fields(self, lanes=lanes, seed=check_seed(self.seed))
        if self.pool_size is not None:
            pool_size = check_pool_size(self.pool_size)
            lengths = np.diff(self._starts(np.arange(lanes + 1))).tolist()
            seeds = [int(derive_key(self.seed, "lane", lane, words=1)[0]) for lane in range(lanes)]
            pools = [PoolShuffle(Sequential(n), pool_size, seed) for n, seed in zip(lengths, seeds, strict=True)]
            set_fields(self, pool_size=pool_size, _pools=tuple(pools))

    def _starts(self, lanes: Int64Array) -> Int64Array:
        """First parent position of each lane."""
        quotient, remainder = divmod(len(self.parent), self.lanes)
        return lanes * quotient + np.minimum(lanes, remainder)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        offsets, lanes = divide(positions, self.lanes)
        if self._pools:
            for lane, rows in split_by_group(lanes):
                offsets[rows] = self._pools[lane].indices(offsets[rows], epoch=epoch)
        return self.parent.indices(self._starts(lanes) + offsets, epoch=epoch)

    def positions_of(self, index: int, *, epoch: int, below: int) -> Int64Array:
        """See `dataload.samplers.inverse.positions_of`."""
        starts = self._starts(np.arange(self.lanes))
        found: list[int] = []
        for parent in positions_of(self.parent, index, epoch=epoch).tolist():
            lane = int(np.searchsorted(starts, parent, side="right")) - 1
            offset = parent - int(starts[lane])
            if self._pools:
                offset = int(positions_of(self._pools[lane], offset, epoch=epoch)[0])
            found.append(offset * self.lanes + lane)
        return np.array(sorted(position for position in found if position < below), np.int64)
