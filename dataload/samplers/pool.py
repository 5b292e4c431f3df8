"""The buffer pool of TorchRecord and of DALI's `initial_fill`, at any position at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dataload._util.memo import Memo
from dataload._util.randomness import check_seed, derive_key, hash64
from dataload.samplers._checks import check_count, check_sampler, records_of
from dataload.samplers.permutation import KEY_WORDS, permute
from dataload.types import Int64Array, Sampler

__all__ = ["LARGEST_POOL", "PoolShuffle"]

LARGEST_POOL = 2**31
"""Positions in a pool at most."""

_BLOCK = 65_536


class _Pool(NamedTuple):
    """The pool before position `time`.

    Attributes:
        time: How many were emitted.
        held: (pool_size,) int64, position of the parent's order that each slot holds.
    """

    time: int
    held: Int64Array


@dataclass(frozen=True, slots=True)
class PoolShuffle:
    """The parent's order, shuffled through a pool: locally random, and never far from the parent's place.

    A pool of the parent's first `pool_size` positions; at each step a random slot of it is emitted and filled with
    the next position; at the end the pool is emptied in a random order. An element comes less than `pool_size`
    positions early; how long it stays in the pool is random without a bound, and `pool_size` steps on average. A pool
    as large as the parent shuffles all of it.

    Nothing of this is run. The slot of each step t is s(t), a hash of t, so what is emitted at t is what was
    written at the last earlier step with the same slot, or the slot's first content; to find the contents of
    all slots one looks back at about pool_size * (ln pool_size + 4) hashes. So any position is reached at once, with
    nothing to store or to replay, and only positions are held, never samples.

    Attributes:
        parent: The order to shuffle.
        pool_size: Positions in the pool, 1 (no shuffling) ... 2^31.
        seed: Any integer.

    Raises:
        ConfigError: `pool_size` is no integer in this range, or `seed` is none.
    """

    parent: Sampler
    pool_size: int
    seed: int
    _pools: Memo[_Pool] = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_sampler("parent", self.parent)
        pool_size = check_count("pool_size", self.pool_size, least=1, below=LARGEST_POOL + 1)
        object.__setattr__(self, "pool_size", pool_size)
        object.__setattr__(self, "seed", check_seed(self.seed))

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def records(self) -> int:
        """Indices are below this."""
        return records_of(self.parent)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        return self.parent.indices(self._emitted(positions, epoch), epoch=epoch)

    def _emitted(self, positions: Int64Array, epoch: int) -> Int64Array:
        """Positions of the parent's order that come out at `positions`."""
        if (positions[1:] > positions[:-1]).all():
            return self._emitted_rising(positions, epoch)
        rising, where = np.unique(positions, return_inverse=True)
        return self._emitted_rising(rising, epoch)[where]

    def _emitted_rising(self, times: Int64Array, epoch: int) -> Int64Array:
        if not times.size:
            return np.empty(0, np.int64)
        slots = _Slots.of(self, epoch)
        # What lies further apart than the way back to all slots is looked at apart.
        if times[-1] - times[0] <= slots.reach:
            return self._emitted_close(times, slots, epoch)
        cuts = np.flatnonzero(np.diff(times) > slots.reach) + 1
        return np.concatenate([self._emitted_close(part, slots, epoch) for part in np.split(times, cuts)])

    def _emitted_close(self, times: Int64Array, slots: _Slots, epoch: int) -> Int64Array:
        first, stop = int(times[0]), int(times[-1]) + 1
        pool = self._pools.recall(epoch)
        if pool is None or not 0 <= first - pool.time <= slots.reach:
            pool = _Pool(first, slots.held_before(first))
        held = pool.held.copy()
        # One element is emitted at each step; those in between that nobody asked for are computed all the same.
        found = np.empty_like(times)
        for start in range(pool.time, stop, _BLOCK):
            end = min(start + _BLOCK, stop)
            emitted = slots.run(start, end, held)
            rows = slice(*np.searchsorted(times, (start, end)).tolist())
            found[rows] = emitted[times[rows] - start]
        self._pools.keep(epoch, _Pool(stop, held))
        return found


@dataclass(frozen=True, slots=True)
class _Slots:
    """Which slot is emitted at each step of one epoch."""

    length: int
    size: int
    key: np.uint64
    drain_key: np.ndarray[tuple[int], np.dtype[np.uint64]]

    @classmethod
    def of(cls, pool: PoolShuffle, epoch: int) -> _Slots:
        length = len(pool)
        return cls(
            length=length,
            size=min(pool.pool_size, length),
            key=derive_key(pool.seed, "pool", epoch, words=1)[0],
            drain_key=derive_key(pool.seed, "pool-drain", epoch, words=KEY_WORDS),
        )

    @property
    def reach(self) -> int:
        """Steps to look back for all slots: after size * (ln size + 4), in two of a hundred cases one is missing."""
        return math.ceil(self.size * (math.log(self.size) + 4))

    def at(self, start: int, stop: int) -> Int64Array:
        """Slots of the steps [start, stop)."""
        steps = np.arange(start, stop, dtype=np.int64)
        steady = self.length - self.size  # from here on nothing is refilled: each slot comes once
        bits = hash64(self.key, steps[: max(0, steady - start)])
        # The upper 32 bits scaled to [0, size): cheaper than the remainder, and as even up to 2^-32 * size.
        bits >>= np.uint64(32)
        bits *= np.uint64(self.size)
        bits >>= np.uint64(32)
        slots = bits.astype(np.int64)
        if stop <= steady:
            return slots
        return np.concatenate([slots, permute(steps[len(slots) :] - steady, self.size, self.drain_key)])

    def held_before(self, step: int) -> Int64Array:
        """(size,) int64: the position of the parent's order that each slot holds before `step`."""
        held = np.full(self.size, -1, np.int64)
        while step > 0 and (unknown := held < 0).any():
            start = max(0, step - min(self.reach, max(_BLOCK, self.size)))
            found = np.full(self.size, -1, np.int64)
            # At the drain a slot stays empty, but nothing there is asked for twice.
            np.maximum.at(found, self.at(start, step), np.arange(start, step, dtype=np.int64) + self.size)
            held[unknown] = found[unknown]
            step = start
        return np.where(held < 0, np.arange(self.size), held)

    def run(self, start: int, stop: int, held: Int64Array) -> Int64Array:
        """What is emitted at the steps [start, stop); `held` goes from before the first to after the last."""
        slots = self.at(start, stop)
        if self.size <= 2**16:
            slots = slots.astype(np.uint16)  # numpy sorts these by radix, several times as fast
        order = slots.argsort(kind="stable")
        ordered = slots[order]
        written = order + (start + self.size)
        emitted = np.empty_like(written)
        # Each emits what the one before it in the same slot has written, the first of a slot what that held.
        emitted[order[1:]] = written[:-1]
        firsts = np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1))
        lasts = np.append(firsts[1:] - 1, len(order) - 1)
        filled = ordered[firsts]
        emitted[order[firsts]] = held[filled]
        held[filled] = written[lasts]
        return emitted
