"""Shards in a random order, each read front to back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dataload._util.memo import Memo
from dataload._util.randomness import check_seed, derive_key
from dataload.samplers._checks import check_lengths
from dataload.samplers.permutation import KEY_WORDS, permute
from dataload.types import Int64Array

__all__ = ["ShardSequential"]


class _Layout(NamedTuple):
    """One epoch: shards as they are read.

    Attributes:
        ends: (shards,) int64, position behind the last record of each.
        shifts: (shards,) int64, what to add to a position in it to get the index.
    """

    ends: Int64Array
    shifts: Int64Array


@dataclass(frozen=True, slots=True, repr=False)
class ShardSequential:
    """All records, shard after shard: the shards in another order each epoch, the records within as they lie.

    What a disk or an object store reads fastest. Alone it mixes nothing: put a `PoolShuffle` behind it.

    Attributes:
        shard_lengths: Records of each shard, in index order: a source's `shard_lengths`.
        seed: Any integer.

    Raises:
        ConfigError: There is no shard, a length is negative, or `seed` is no integer.
    """

    shard_lengths: tuple[int, ...]
    seed: int
    _layouts: Memo[_Layout] = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shard_lengths", check_lengths("shard_lengths", self.shard_lengths))
        object.__setattr__(self, "seed", check_seed(self.seed))

    def __len__(self) -> int:
        return sum(self.shard_lengths)

    def __repr__(self) -> str:
        return f"ShardSequential({len(self.shard_lengths)} shards, {len(self)} records, seed={self.seed})"

    @property
    def records(self) -> int:
        """Indices are below this."""
        return len(self)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        layout = self._layouts.recall(epoch) or self._layouts.keep(epoch, self._layout(epoch))
        return positions + layout.shifts[np.searchsorted(layout.ends, positions, side="right")]

    def _layout(self, epoch: int) -> _Layout:
        lengths = np.array(self.shard_lengths, np.int64)
        firsts = np.cumsum(lengths) - lengths
        key = derive_key(self.seed, "shards", epoch, words=KEY_WORDS)
        order = permute(np.arange(len(lengths)), len(lengths), key)
        ends = np.cumsum(lengths[order])
        return _Layout(ends, firsts[order] - (ends - lengths[order]))
