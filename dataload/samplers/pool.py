"""The shuffle buffer of TorchRecord and DALI (`initial_fill`), with random access to any position."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, TypeAlias

import numpy as np

from dataload._util.caches import Memo
from dataload._util.randomness import KEY_WORDS, derive_key, derive_word, hash64, permute
from dataload._util.settings import Least, check_settings
from dataload.samplers.batch import positions_of
from dataload.samplers.common import OverParent, check_sampler
from dataload.types import Int64Array, Sampler

PoolSize: TypeAlias = Annotated[int, Least(1, below=2**31 + 1)]

_BLOCK = 65_536


class _Pool(NamedTuple):
    """The pool after `time` emissions."""

    time: int
    held: Int64Array  # (pool_size,), the parent position that each slot holds


@dataclass(frozen=True, slots=True)
class PoolShuffle(OverParent):
    """Another order, shuffled through a pool of fixed size.

    The pool starts with the parent's first `pool_size` positions. Each step emits a random slot and refills it with the
    parent's next position; at the end the pool is drained in random order. A record comes less than `pool_size`
    positions early. It stays in the pool for `pool_size` steps on average, with no upper bound. A pool as large as
    the parent shuffles all of it.

    The pool is computed, not run. The slot of step t is s(t), a hash of t, so step t emits what was written at the
    last earlier step with the same slot, or else the slot's initial content. Looking back over about
    ``pool_size * (ln(pool_size) + 4)`` hashes finds the contents of every slot. Any position is therefore available
    without replaying an epoch, and the pool holds positions, never samples.

    Attributes:
        parent: The order to shuffle.
        pool_size: Positions in the pool, from 1 (no shuffling) to 2^31.
        seed: Seed of the pool, any integer.

    Raises:
        ConfigError: `pool_size` is not an integer in its range, or `seed` is not an integer.
    """

    parent: Sampler
    pool_size: PoolSize
    seed: int
    _pools: Memo[_Pool] = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(self)
        check_sampler("parent", self.parent)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        return self.parent.indices(self._emitted(positions, epoch), epoch=epoch)

    def positions_of(self, index: int, *, epoch: int, below: int) -> Int64Array:
        """See `dataload.samplers.batch.positions_of`."""
        slots = self._slots(epoch)
        found = sorted(slots.emits(parent) for parent in positions_of(self.parent, index, epoch=epoch).tolist())
        return np.array([position for position in found if position < below], np.int64)

    def _slots(self, epoch: int) -> _Slots:
        key = derive_word(self.seed, "pool", epoch)
        drain_key = derive_key(self.seed, "pool-drain", epoch, words=KEY_WORDS)
        return _Slots(len(self), min(self.pool_size, len(self)), key, drain_key)

    def _emitted(self, positions: Int64Array, epoch: int) -> Int64Array:
        """Return the parent positions that are emitted at `positions`."""
        if not positions.size:
            return np.empty(0, np.int64)
        if (positions[1:] <= positions[:-1]).any():
            rising, where = np.unique(positions, return_inverse=True)
            return self._emitted(rising, epoch)[where]
        slots = self._slots(epoch)
        # Positions further apart than the look-back are computed separately.
        cuts = np.flatnonzero(np.diff(positions) > slots.reach) + 1
        return np.concatenate([self._emitted_close(part, slots, epoch) for part in np.split(positions, cuts)])

    def _emitted_close(self, times: Int64Array, slots: _Slots, epoch: int) -> Int64Array:
        first, stop = int(times[0]), int(times[-1]) + 1
        pool = self._pools.recall(epoch)
        if pool is None or not 0 <= first - pool.time <= slots.reach:
            pool = _Pool(first, slots.held_before(first))
        held = pool.held.copy()
        # Every step emits one position; steps in between have to be computed too.
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
    """The slot that each step of one epoch emits."""

    length: int
    size: int
    key: np.uint64
    drain_key: np.ndarray[tuple[int], np.dtype[np.uint64]]

    @property
    def reach(self) -> int:
        """Steps to look back; after size * (ln(size) + 4), all slots are found in 98 of 100 cases."""
        return math.ceil(self.size * (math.log(self.size) + 4))

    def at(self, start: int, stop: int) -> Int64Array:
        """Return the slots of steps [start, stop)."""
        steps = np.arange(start, stop, dtype=np.int64)
        steady = self.length - self.size  # from here on the pool drains: each slot comes once
        bits = hash64(self.key, steps[: max(0, steady - start)])
        # Scale the upper 32 bits to [0, size): cheaper than the remainder, and uniform up to 2^-32 * size.
        bits >>= np.uint64(32)
        bits *= np.uint64(self.size)
        bits >>= np.uint64(32)
        slots = bits.astype(np.int64)
        if stop <= steady:
            return slots
        return np.concatenate([slots, permute(steps[len(slots) :] - steady, self.size, self.drain_key)])

    def emits(self, position: int) -> int:
        """Return the step that emits a position of the parent."""
        step = position - self.size  # the one that puts it into the pool
        slot, start = (position, 0) if step < 0 else (int(self.at(step, step + 1)[0]), step + 1)
        while True:  # found at the latest where the pool drains
            stop = min(start + _BLOCK, self.length)
            hits = np.flatnonzero(self.at(start, stop) == slot)
            if hits.size:
                return start + int(hits[0])
            start = stop

    def held_before(self, step: int) -> Int64Array:
        """Return the parent position that each slot holds before `step`, (size,) int64."""
        held = np.full(self.size, -1, np.int64)
        while step > 0 and (unknown := held < 0).any():
            start = max(0, step - min(self.reach, max(_BLOCK, self.size)))
            found = np.full(self.size, -1, np.int64)
            # A drained slot is not refilled, but it is not emitted again either, so its value does not matter.
            np.maximum.at(found, self.at(start, step), np.arange(start, step, dtype=np.int64) + self.size)
            held[unknown] = found[unknown]
            step = start
        return np.where(held < 0, np.arange(self.size), held)

    def run(self, start: int, stop: int, held: Int64Array) -> Int64Array:
        """Return what steps [start, stop) emit, and update `held` from before the first to after the last."""
        slots = self.at(start, stop)
        if self.size <= 2**16:
            slots = slots.astype(np.uint16)  # numpy uses a radix sort, several times as fast
        order = slots.argsort(kind="stable")
        ordered = slots[order]
        written = order + (start + self.size)
        emitted = np.empty_like(written)
        # Each step emits what the previous step with the same slot wrote; the first emits what the slot held.
        emitted[order[1:]] = written[:-1]
        firsts = np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1))
        lasts = np.append(firsts[1:] - 1, len(order) - 1)
        filled = ordered[firsts]
        emitted[order[firsts]] = held[filled]
        held[filled] = written[lasts]
        return emitted
