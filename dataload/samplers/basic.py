"""Index order, random order of records or shards, a selection, an order several times over, and one in lanes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, cast

import numpy as np

from dataload._util.caches import Memo
from dataload._util.indexing import as_indices, check_index
from dataload._util.randomness import KEY_WORDS, derive_key, derive_word, permute, unpermute
from dataload._util.settings import Checked, Least, check_count, check_settings, setting_error
from dataload.errors import ConfigError
from dataload.samplers.batch import positions_of
from dataload.samplers.common import (
    MAX_LENGTH,
    ArrayValue,
    Length,
    OverParent,
    PerRecord,
    check_lengths,
    check_sampler,
    divide,
    records_of,
    set_fields,
    split_by_group,
)
from dataload.samplers.pool import PoolShuffle, PoolSize
from dataload.types import Int64Array, Sampler

_MOST_LANES = 65_536  # a lane with a pool takes an object


@dataclass(frozen=True, slots=True)
class Sequential(Checked):
    """Records in index order, the same in every epoch.

    Attributes:
        length: Number of records, at most 2^48.

    Raises:
        ConfigError: `length` is not an integer in its range.
    """

    length: Length

    def __len__(self) -> int:
        return self.length

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return self.length

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:  # noqa: ARG002 - the same in each epoch
        """See `dataload.types.Sampler`."""
        return positions.copy()

    def positions_of(self, index: int, *, epoch: int, below: int) -> Int64Array:  # noqa: ARG002 - the same in each epoch
        """See `dataload.samplers.batch.positions_of`."""
        return np.array([index] if index < min(self.length, below) else [], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Subset(ArrayValue, OverParent):
    """Selected positions of another order.

    Over `Sequential`, these are the records with those indices, the same in every epoch. Over a shuffle, they are
    whatever records the epoch puts there. To shuffle selected records, wrap the subset:
    ``GlobalShuffle(len(subset), seed, parent=subset)``.

    Attributes:
        parent: The order to select from.
        selection: Positions of the parent: a slice, or integers in any order. Duplicates are allowed, and negative
            integers count from the end. Stored as a range if it is a slice or a range without negative positions,
            otherwise as (n,) int64.

    Raises:
        ConfigError: `selection` is not a slice or integers, or a position is out of range.
    """

    parent: Sampler
    selection: slice | range | Sequence[int] | Int64Array

    def __post_init__(self) -> None:
        check_sampler("parent", self.parent)
        length = len(self.parent)
        try:
            chosen = _select(self.selection, length)
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"selection must be a slice or integers in [-{length}, {length}): {error}",
                key="selection",
                value=self.selection,
            ) from error
        set_fields(self, selection=chosen)

    def __len__(self) -> int:
        return len(cast("range | Int64Array", self.selection))

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        chosen = cast("range | Int64Array", self.selection)  # see `__post_init__`
        if isinstance(chosen, range):
            return self.parent.indices(positions * chosen.step + chosen.start, epoch=epoch)
        return self.parent.indices(chosen[positions], epoch=epoch)

    def positions_of(self, index: int, *, epoch: int, below: int) -> Int64Array:
        """See `dataload.samplers.batch.positions_of`."""
        chosen = cast("range | Int64Array", self.selection)
        parents = positions_of(self.parent, index, epoch=epoch)
        if isinstance(chosen, range):
            found = np.array(sorted(chosen.index(parent) for parent in parents.tolist() if parent in chosen), np.int64)
        else:
            found = np.flatnonzero(np.isin(chosen, parents))
        return found[found < below]


def _select(selection: Any, length: int) -> range | Int64Array:
    if isinstance(selection, slice):
        return range(*selection.indices(length))
    if isinstance(selection, range) and selection and min(ends := (selection[0], selection[-1])) >= 0:
        for end in ends:
            check_index(end, length)
        return selection
    chosen = np.array(as_indices(selection, length))  # a copy: the caller's array may change
    chosen.setflags(write=False)
    return chosen


@dataclass(frozen=True, slots=True)
class Repeat(OverParent):
    """Another order several times in one epoch, shuffled again each time if it is a shuffle.

    Repetition r of epoch e is the parent's epoch ``e * times + r``.

    Attributes:
        parent: The order to repeat.
        times: How many times to repeat it.

    Raises:
        ConfigError: `times` is not an integer of 1 or more, or the order would have more than 2^48 positions.
    """

    parent: Sampler
    times: Annotated[int, Least(1)]

    def __post_init__(self) -> None:
        check_sampler("parent", self.parent)
        most = MAX_LENGTH // max(1, len(self.parent))
        set_fields(self, times=check_count("times", self.times, least=1, below=most + 1))

    def __len__(self) -> int:
        return len(self.parent) * self.times

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        return indices_without_end(self.parent, positions, first_epoch=epoch * self.times)

    def positions_of(self, index: int, *, epoch: int, below: int) -> Int64Array:
        """See `dataload.samplers.batch.positions_of`."""
        return positions_without_end(self.parent, index, first_epoch=epoch * self.times, below=min(below, len(self)))


def indices_without_end(sampler: Sampler, positions: Int64Array, *, first_epoch: int) -> Int64Array:
    """Return the indices at any positions, for an order that starts its next epoch whenever it ends."""
    if not positions.size:
        return np.empty(0, np.int64)
    length = len(sampler)
    first = int(positions.min()) // length
    if int(positions.max()) // length == first:
        within = positions - first * length if first else positions
        return sampler.indices(within, epoch=first_epoch + first)
    repetitions, within = divide(positions, length)
    for repetition, rows in split_by_group(repetitions):
        within[rows] = sampler.indices(within[rows], epoch=first_epoch + repetition)
    return within


def positions_without_end(sampler: Sampler, index: int, *, first_epoch: int, below: int) -> Int64Array:
    """Return the positions below `below` of an index, for an order that starts its next epoch whenever it ends."""
    length = len(sampler)
    found = [
        positions_of(sampler, index, epoch=first_epoch + number, below=below - number * length) + number * length
        for number in range(-(-below // max(1, length)))
    ]
    return np.concatenate([np.empty(0, np.int64), *found])


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
    lanes: Annotated[int, Least(1, below=_MOST_LANES + 1)]
    pool_size: PoolSize | None = None
    seed: int = 0
    _pools: tuple[PoolShuffle, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(self)
        check_sampler("parent", self.parent)
        if self.pool_size is not None:
            lengths = np.diff(self._starts(np.arange(self.lanes + 1))).tolist()
            seeds = [int(derive_word(self.seed, "lane", lane)) for lane in range(self.lanes)]
            pools = [PoolShuffle(Sequential(n), self.pool_size, seed) for n, seed in zip(lengths, seeds, strict=True)]
            set_fields(self, _pools=tuple(pools))

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
        """See `dataload.samplers.batch.positions_of`."""
        starts = self._starts(np.arange(self.lanes))
        found: list[int] = []
        for parent in positions_of(self.parent, index, epoch=epoch).tolist():
            lane = int(np.searchsorted(starts, parent, side="right")) - 1
            offset = parent - int(starts[lane])
            if self._pools:
                offset = int(positions_of(self._pools[lane], offset, epoch=epoch)[0])
            found.append(offset * self.lanes + lane)
        return np.array(sorted(position for position in found if position < below), np.int64)


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
        """See `dataload.samplers.batch.positions_of`."""
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
        """See `dataload.samplers.batch.positions_of`."""
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
