"""The mixing quality of shuffle pools, computed from their distribution without running them. Pure (no I/O)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dataload._util.randomness import KEY_WORDS, check_seed, derive_key, permute
from dataload._util.settings import check_count, setting_error
from dataload.samplers.basic import ShardSequential
from dataload.samplers.common import check_lengths
from dataload.samplers.quality import ShardLayout, expected_shards
from dataload.samplers.weighted import uniform
from dataload.types import Int64Array

_EPOCHS = 16
_ROWS = 2**16
_MOST_BATCHES, _FEWEST_BATCHES = 4096, 16
_PRECISION = 256


def pool_size_for(shard_lengths: Sequence[int], batch_size: int, quality: float, seed: int = 0) -> int | None:
    """Return the smallest pool size, to about 1%, that mixes the shards of a batch to a given quality.

    The order is ``PoolShuffle(ShardSequential(shard_lengths, seed), pool_size, seed)``, in the middle of the epoch.

    Args:
        shard_lengths: Records of each shard, in index order.
        batch_size: Rows of a batch, all ranks together.
        quality: Number of shards in a batch as a fraction of the number in a uniform shuffle, above 0 and below 1.
        seed: Any integer.

    Returns:
        Positions in the pool. None if only a pool of all records reaches the quality.

    Raises:
        ConfigError: `quality` or `batch_size` is out of range, or `shard_lengths` is empty.

    Examples:
        >>> pool_size_for((1_000,) * 100, batch_size=64, quality=0.5)
        9248
    """
    given: Any = quality
    if not (isinstance(given, (int, float)) and 0 < given < 1):
        raise setting_error("quality", quality, "must be a number above 0 and below 1")
    trial = PoolTrial(shard_lengths, batch_size, seed)
    largest = trial.records - 1
    low, high = 0, 1
    while high <= largest and trial.mixing(high) < quality:
        low, high = high, 2 * high
    if high > largest:
        if largest < 1 or trial.mixing(largest) < quality:
            return None
        high = largest
    while high - low > max(1, high // _PRECISION):
        middle = (low + high) // 2
        low, high = (low, middle) if trial.mixing(middle) >= quality else (middle, high)
    return high


class PoolTrial:
    """Batches for comparing pool sizes with the same random numbers, so that a larger pool is never worse."""

    def __init__(self, shard_lengths: Sequence[int], batch_size: int, seed: int = 0) -> None:
        lengths = check_lengths("shard_lengths", shard_lengths)
        self.records: int = check_count("the sum of shard_lengths", sum(lengths), least=1)
        rows = min(check_count("batch_size", batch_size, least=1), self.records)
        batches = min(max(_ROWS // rows, _FEWEST_BATCHES), _MOST_BATCHES)
        keys = derive_key(check_seed(seed), "pool-size", words=2)
        cells = np.arange(batches * rows)
        # One order per epoch, because an order caches only two epochs.
        self._orders = tuple(ShardSequential(lengths, seed) for _ in range(_EPOCHS))
        self._shards = ShardLayout(np.cumsum(lengths), files=True)
        self._ideal = float(expected_shards(self._shards, np.array([rows]))[0])
        # The first position of each batch, in the middle fifth of the epoch.
        first, last = self.records * 2 // 5, max(self.records * 2 // 5, self.records * 3 // 5 - rows)
        starts = first + ((last - first) * (np.arange(batches) + 0.5) / batches).astype(np.int64)
        self._starts: Int64Array = np.minimum(starts, self.records - rows)
        # (batches, rows), in (0, 1): which slot each row comes from, and how long ago the slot was written.
        self._slots = uniform(keys[0], cells).reshape(batches, rows)
        self._waits = uniform(keys[1], cells).reshape(batches, rows)

    def mixing(self, pool_size: int) -> float:
        """Return the mean number of shards in a batch as a fraction of the number in a uniform shuffle."""
        positions = self._emitted(min(pool_size, self.records))
        shard = np.empty_like(positions)
        for epoch, order in enumerate(self._orders):
            part = positions[epoch::_EPOCHS]
            indices = order.indices(part.ravel(), epoch=epoch).reshape(part.shape)
            shard[epoch::_EPOCHS] = np.searchsorted(self._shards.ends, indices, side="right")
        shard.sort(axis=1)
        found = 1 + np.count_nonzero(np.diff(shard, axis=1), axis=1)
        return float(found.mean()) / self._ideal

    def _emitted(self, size: int) -> Int64Array:
        """Return the parent positions in each batch, (batches, rows) int64, from their exact distribution."""
        # Going back from the batch, each step writes to a random slot. So the times at which the batch's slots were
        # last written are sums of geometric waiting times: until any slot is hit, then any of the rest, and so on.
        steady = self.records - size  # from here on the pool drains: each slot comes once
        drains = self._starts >= steady
        slots = (self._slots * size).astype(np.int64)
        slots[drains] = self._drained(int(np.count_nonzero(drains)), size)

        times = self._starts[:, None] + np.arange(slots.shape[1])
        order = np.argsort(slots, axis=1, kind="stable")
        again = np.diff(np.take_along_axis(slots, order, 1), axis=1, prepend=-1) == 0
        is_new = np.empty_like(again)
        np.put_along_axis(is_new, order, ~again, 1)
        left = np.cumsum(is_new[:, ::-1], axis=1)[:, ::-1]  # slots of the batch that are not yet found
        with np.errstate(divide="ignore"):  # log1p(-1): if all slots are wanted, the first step hits one
            waits = 1 + np.floor(np.log(self._waits) / np.log1p(-left / size))
        back = np.cumsum(np.where(is_new, waits, 0), axis=1)
        written = np.minimum(self._starts, steady)[:, None] - back
        # The slot's number does not affect its content, so slots are not permuted. A slot that was never written still
        # holds its initial content.
        emitted = np.where(written >= 0, written.astype(np.int64) + size, slots)
        # A slot's second value in a batch was written when the batch emitted the first.
        before = np.take_along_axis(times, order, 1)[:, :-1] + size
        second = np.take_along_axis(emitted, order, 1)
        second[:, 1:] = np.where(again[:, 1:], before, second[:, 1:])
        np.put_along_axis(emitted, order, second, 1)
        # The batch in which draining begins is treated like earlier ones, and might look too far ahead.
        return np.minimum(emitted, self.records - 1)

    def _drained(self, batches: int, size: int) -> Int64Array:
        """Return slots of batches while the pool drains, (batches, rows) int64, distinct within a batch."""
        rows = self._slots.shape[1]
        at_once = size // rows
        parts = [np.empty(0, np.int64)]
        for first in range(0, batches, max(1, at_once)):
            key = derive_key(self._orders[0].seed, "pool-size-drain", first, words=KEY_WORDS)
            parts.append(permute(np.arange(min(at_once, batches - first) * rows), size, key))
        return np.concatenate(parts).reshape(batches, rows)
