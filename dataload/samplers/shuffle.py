"""All records in a random order, or all shards in a random order."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dataload._util.caches import Memo
from dataload._util.randomness import derive_key
from dataload._util.settings import check_settings, setting_error
from dataload.samplers.basic import Sequential
from dataload.samplers.common import (
    KEY_WORDS,
    Length,
    PerRecord,
    check_lengths,
    check_sampler,
    permute,
    records_of,
    set_fields,
    unpermute,
)
from dataload.samplers.inverse import positions_of
from dataload.types import Int64Array, Sampler


@dataclass(frozen=True, slots=True)
class GlobalShuffle:
    """Every record once per epoch, in a random order that depends only on seed and epoch.

    The order is never stored. Each index is computed from its position with a keyed permutation (see
    `dataload.samplers.common`), so any position of any epoch is available at once and memory use does not grow
    with the number of records.

    Attributes:
        length: Number of records, at most 2^48.
        seed: Seed of the shuffle, any integer.
        parent: The order to shuffle, of this length. None shuffles the indices 0 to length - 1.

    Raises:
        ConfigError: `length` is not an integer in its range or not the parent's length, or `seed` is not an integer.
    """

    length: Length
    seed: int
    parent: Sampler | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.parent is not None:
            check_sampler("parent", self.parent)
            if len(self.parent) != self.length:
                raise setting_error("length", self.length, f"must be the parent's, {len(self.parent)}")

    def __len__(self) -> int:
        return self.length

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return self.length if self.parent is None else records_of(self.parent)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        shuffled = permute(positions, self.length, derive_key(self.seed, "shuffle", epoch, words=KEY_WORDS))
        return shuffled if self.parent is None else self.parent.indices(shuffled, epoch=epoch)

    def positions_of(self, index: int, *, epoch: int, below: int) -> Int64Array:
        """See `dataload.samplers.inverse.positions_of`."""
        key = derive_key(self.seed, "shuffle", epoch, words=KEY_WORDS)
        parent = self.parent or Sequential(self.length)
        images = positions_of(parent, index, epoch=epoch).tolist()
        found = sorted(unpermute(image, self.length, key) for image in images)
        return np.array([position for position in found if position < below], np.int64)


class _ShardOrder(NamedTuple):
    """The shards of one epoch, in reading order."""

    ends: Int64Array  # the position after the last record of each shard
    shifts: Int64Array  # the difference between index and position in each shard


@dataclass(frozen=True, slots=True, repr=False)
class ShardSequential(PerRecord):
    """Shards in a random order, each read from front to back.

    This is the order that disks and object stores read fastest. On its own it mixes nothing within a shard: wrap it
    in a `PoolShuffle`.

    Attributes:
        shard_lengths: Records of each shard, in index order, as in a source's `shard_lengths`.
        seed: Seed of the shard order, any integer.

    Raises:
        ConfigError: No shard is given, a length is negative, or `seed` is not an integer.
    """

    shard_lengths: tuple[int, ...]
    seed: int
    _layouts: Memo[_ShardOrder] = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(self)
        set_fields(self, shard_lengths=check_lengths("shard_lengths", self.shard_lengths))

    def __len__(self) -> int:
        return sum(self.shard_lengths)

    def __repr__(self) -> str:
        return f"ShardSequential({len(self.shard_lengths)} shards, {len(self)} records, seed={self.seed})"

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return len(self)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        layout = self._layouts.recall(epoch) or self._layouts.keep(epoch, self._layout(epoch))
        return positions + layout.shifts[np.searchsorted(layout.ends, positions, side="right")]

    def positions_of(self, index: int, *, epoch: int, below: int) -> Int64Array:
        """See `dataload.samplers.inverse.positions_of`."""
        ends, shifts = self._layouts.recall(epoch) or self._layouts.keep(epoch, self._layout(epoch))
        found = index - shifts  # its position in each shard, if the shard had it
        starts = np.concatenate(([0], ends[:-1]))
        return found[(starts <= found) & (found < np.minimum(ends, below))]

    def _layout(self, epoch: int) -> _ShardOrder:
        lengths = np.array(self.shard_lengths, np.int64)
        firsts = np.cumsum(lengths) - lengths
        key = derive_key(self.seed, "shards", epoch, words=KEY_WORDS)
        order = permute(np.arange(len(lengths)), len(lengths), key)
        ends = np.cumsum(lengths[order])
        return _ShardOrder(ends, firsts[order] - (ends - lengths[order]))
