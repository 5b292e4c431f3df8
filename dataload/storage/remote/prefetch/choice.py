"""A loader's choice between whole shards and ranges for data at URLs. Pure (no I/O)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dataload.errors import ConfigError
from dataload.storage.remote.requests import GAP
from dataload.types import Int64Array, StepsAhead

LARGE_BYTES = 1 << 18
"""Bytes of a range from which its request costs little."""

FEW_USED = 1 / 4
"""Fraction of the shards' bytes below which large ranges are fetched; smaller ranges need a smaller fraction."""

FAR = 2
"""Shards that are read together may take this many times the budget; the rest is read by range."""

_POOL_FRACTION = 4  # of the budget, 1 in 4: a pool spans more shards than its records fill, as some wait long
_STRETCH_FRACTION = 4
_MOST_ROWS = 9 / 10  # a shard is not kept for its last records in a pool
_GROUP_BYTES, _GROUP_STEPS = 1 << 23, 32  # as the range prefetcher merges ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Measures of a loader's reads: bytes of all shards, and the fraction of them that is `used`.

    `together_bytes` is the size of the shards read at the same time, over as many records as fill a quarter of the
    budget, without the shards of the most scattered tenth. `record_bytes` and `range_bytes` are means per record and
    request.
    """

    data_bytes: int
    used: float
    together_bytes: int
    record_bytes: int
    range_bytes: int

    def of_ranks(self, ranks: int) -> Reads:
        """Return the same for all ranks of a node, which read other records of the same shards."""
        return replace(self, used=min(1.0, self.used * ranks))


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to read data, and the reason in words."""

    mode: Literal["shards", "ranges"]
    reason: str


def sharers_of(data_bytes: int, ranks: int, budget: float) -> int:
    """Return how many of a node's ranks compete for the cache; 1 if it holds all data."""
    return 1 if data_bytes <= budget else ranks


def rank_budget(limit: int, share: float, sharers: int, largest: int) -> int:
    """Return the bytes of a cache that one rank plans with: its share, or room for the largest shard."""
    return max(int(share / sharers * limit), min(limit, largest))


def measure(
    steps: StepsAhead, ends: Int64Array, numbers: Int64Array, sizes: Int64Array, record_bytes: float, budget: int
) -> Reads:
    """Measure a loader's reads from its first steps; `budget` is the bytes that the cache may take.

    `ends`, (components,) int64, are cumulative numbers of records, `numbers`, (components,) int64, their shards (-1 if
    not read through the cache). `sizes`, (shards,) int64, and the mean `record_bytes` are in bytes.
    """
    found = numbers[np.searchsorted(ends, steps.indices, side="right")]
    indices, found = steps.indices[found >= 0], found[found >= 0]
    rows, all_rows = len(found), round(len(found) * steps.epoch_steps / len(steps.ends))
    touched = int(sizes[np.unique(found)].sum())
    total = touched if rows >= all_rows else int(sizes.sum())
    used = min(1.0, max(rows * record_bytes / max(1, touched), all_rows * record_bytes / max(1, total)))
    per_step = max(1, rows // len(steps.ends))
    stretch = max(per_step, int(budget / _STRETCH_FRACTION * used / max(1.0, record_bytes)))
    shards, counts = np.unique(found[:stretch], return_counts=True)
    fullest = np.argsort(-counts, kind="stable")
    needed = int(np.searchsorted(np.cumsum(counts[fullest]), _MOST_ROWS * counts.sum())) + 1
    return Reads(
        data_bytes=total,
        used=used,
        together_bytes=int(sizes[shards[fullest[:needed]]].sum()),
        record_bytes=round(record_bytes),
        range_bytes=round(record_bytes * rows / _requests(indices, ends, record_bytes, per_step)),
    )


def _requests(indices: Int64Array, ends: Int64Array, record_bytes: float, per_step: int) -> int:
    """Estimate the number of requests for the records of steps, if neighbours are fetched together."""
    if not len(indices):
        return 1
    group = max(per_step, min(_GROUP_STEPS * per_step, int(_GROUP_BYTES / max(1.0, record_bytes))))
    length = int(ends[-1]) + 1
    keys = np.sort(np.arange(len(indices)) // group * length + indices)
    apart = np.diff(keys) > 1 + GAP / max(1.0, record_bytes)
    components = np.searchsorted(ends, keys % length, side="right")
    groups = keys // length
    return int((apart | (np.diff(components) != 0) | (np.diff(groups) != 0)).sum()) + 1


def choose(reads: Reads, budget: int) -> Choice:
    """Choose how data are read: by the first of these rules that applies, else a ConfigError.

    1. Less than a quarter of the shards' bytes is used (in proportion less for requests below 256 KiB): ranges.
    2. The data, or the shards that are read together, fit into the budget: shards.
    3. Requests are for at least 256 KiB: ranges.
    4. The data, or the shards that are read together, take less than twice the budget: shards.
    """
    together = min(reads.data_bytes, reads.together_bytes)
    if reads.used < FEW_USED * min(1.0, reads.range_bytes / LARGE_BYTES):
        return Choice("ranges", f"{reads.used:.2%} of the shards' bytes are read")
    if reads.data_bytes <= budget:
        return Choice("shards", f"the data take {reads.data_bytes:,} bytes and fit into the budget of {budget:,}")
    if together <= budget:
        reason = f"the shards that are read together take {together:,} bytes and fit into the budget of {budget:,}"
        return Choice("shards", reason)
    if reads.range_bytes >= LARGE_BYTES:
        return Choice(
            "ranges", f"the shards do not fit into {budget:,} bytes, and a request is for {reads.range_bytes:,}"
        )
    if together <= FAR * budget:
        return Choice("shards", f"the shards that are read together take {together:,} bytes, the budget is {budget:,}")
    pool = int(budget / _POOL_FRACTION / max(1, reads.record_bytes))
    shuffle = (
        f"shuffle in a pool: sampler=PoolShuffle(ShardSequential(source.shard_lengths, seed), {pool}, seed)"
        if pool
        else "give a cache directory with room (remote.cache, remote.budget)"
    )
    raise ConfigError(
        f"records of about {reads.record_bytes:,} bytes are read in an order that needs shards of {together:,} bytes "
        f"at the same time, and the cache may take {budget:,}: neither whole shards nor ranges of "
        f"{reads.range_bytes:,} bytes are fast; {shuffle}, raise remote.budget, or set remote.mode to 'ranges' or "
        "'shards' to read them anyway",
        key="remote.mode",
        value="auto",
    )
