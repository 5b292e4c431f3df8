"""The choice between whole shards and ranges, and which shards to download and to evict. Pure (no I/O)."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

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
    """Measure a loader's reads from its first steps; `budget` is the bytes that the cache may take."""
    # `ends`, (components,) int64, are cumulative numbers of records, `numbers`, (components,) int64, their shards (-1
    # if not read through the cache). `sizes`, (shards,) int64, and the mean `record_bytes` are in bytes.
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


_FEW = 4  # under pressure, a shard is not kept or fetched again for its last quarter
_MOST_USES = 1 << 18  # planned ahead, at about 200 bytes each


class Use(NamedTuple):
    """A shard: the steps `first` to `last`, counted over all epochs, read `rows` of its records in one epoch."""

    first: int
    last: int
    epoch: int
    shard: int
    rows: int


@dataclass(frozen=True, slots=True)
class Download:
    """Download a shard; there is room for it."""

    shard: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Delete a shard; if `by_range`, the rest of the epoch reads it by range; if `unread`, its download was wasted."""

    shard: int
    by_range: bool
    unread: bool = False


def step_bytes(uses: Sequence[Use], sizes: Sequence[int], whole: Iterable[int]) -> int:
    """Return the median bytes of the shards of a step that must be read whole, at least the largest of them."""
    whole = frozenset(whole)
    needed: Counter[int] = Counter()
    for first, shard in {(use.first, use.shard) for use in uses if use.shard in whole}:
        needed[first] += sizes[shard]
    median = sorted(needed.values())[len(needed) // 2] if needed else 0
    return max(median, *(sizes[shard] for shard in whole), 0)


def check_fit(need: int, budget: int | None) -> None:
    """Raise a ConfigError if the shards of a step that must be read whole do not fit into the budget."""
    if budget is not None and need > budget:
        raise ConfigError(
            f"shards of {need:,} bytes are read together, can only be read as a whole, and do not fit into the "
            f"{budget:,} bytes that remote.budget allows: raise the budget, shuffle in a pool of fewer shards, or "
            "convert the data to a format that is read by range, such as tar",
            key="remote.budget",
            value=budget,
        )


class CachePlan:
    """The downloads, in order of first use, and evictions of one consumer; `sizes` and `budget` in bytes."""

    # The shard whose next use is farthest is evicted, unless the new one is needed even later. If the budget is smaller
    # than the span of a pool, a shard with less than a quarter of its records left in the epoch is evicted and its rest
    # read by range, so that each shard is downloaded once per epoch.

    def __init__(
        self, sizes: Sequence[int], budget: int | None, resident: Iterable[int] = (), *, whole: Iterable[int] = ()
    ) -> None:
        self._sizes = sizes
        self.budget: float = math.inf if budget is None else budget
        self._whole = frozenset(whole)
        self.resident: set[int] = set(resident)
        self._used = sum(sizes[shard] for shard in self.resident)
        self._position = 0  # steps that were received
        self._epoch = 0  # of the position
        self._ahead: deque[Use] = deque()  # uses with possibly missing shards
        self._current: deque[Use] = deque()  # all unfinished uses
        self._uses: dict[int, deque[Use]] = {}  # the same by shard
        self._planned: Counter[tuple[int, int]] = Counter()  # rows of a shard in an epoch
        self._left: Counter[tuple[int, int]] = Counter()  # rows not received yet
        self._fetched: dict[int, int] = {}  # the epoch for which a shard was made resident
        self._unread: set[int] = set()  # downloaded, but not used yet
        self._by_range: dict[int, int] = {}  # the epoch in which a shard is read by range
        self._ended = False

    def extend(self, uses: Iterable[Use]) -> None:
        """Add the next uses, in the order of their steps; none at the end of the order."""
        self._ended = True
        for use in uses:
            self._uses.setdefault(use.shard, deque()).append(use)
            self._planned[use.shard, use.epoch] += use.rows
            self._left[use.shard, use.epoch] += use.rows
            self._ahead.append(use)
            self._current.append(use)
            self._ended = False

    def wants_more(self) -> bool:
        if self._ended or len(self._current) >= _MOST_USES:
            return False
        wanted = self._next_missing()
        if wanted is None:
            return len(self.resident) < len(self._sizes)
        if self._has_room(wanted.shard) or self._ahead[-1].epoch > wanted.epoch + 1:
            return False
        return sum(self._next_use(shard, wanted.first) == math.inf for shard in self.resident) > 1

    def receive(self, steps: int) -> None:
        self._position = steps
        while self._current and self._current[0].last < steps:
            self._end(self._current.popleft())

    def next(self, waiting: Collection[int] = ()) -> Download | Evict | None:
        """Return the next action, which then counts as done, or None to wait. Readers wait for `waiting` shards."""
        if self.exceeds_budget:
            return self._give_back()
        urgent = not self.resident.issuperset(waiting)
        if urgent:
            self._resume(waiting)
        wanted = self._next_missing()
        if wanted is None:
            return None
        shard = wanted.shard
        if self._fetched.get(shard) == wanted.epoch and self._is_nearly_read(shard):
            return self._skip(wanted)
        if not self._has_room(shard):
            return self._make_room(wanted, urgent=urgent)
        self._ahead.popleft()
        self.resident.add(shard)
        self._used += self._sizes[shard]
        self._by_range.pop(shard, None)
        self._fetched[shard] = wanted.epoch
        self._unread.add(shard)
        return Download(shard)

    def lose(self, shard: int) -> None:
        self._remove(shard)
        if self._next_use(shard) < math.inf:
            self._ahead.appendleft(self._uses[shard][0])

    def _resume(self, waiting: Collection[int]) -> None:
        """Go back to a use planned before its shard was evicted for a later step."""
        missing = (shard for shard in waiting if shard not in self.resident and self._uses.get(shard))
        use = min((self._uses[shard][0] for shard in missing), default=None)
        if use is not None and not (self._ahead and self._ahead[0].first <= use.first):
            self._ahead.appendleft(use)

    def is_by_range(self, shard: int) -> bool:
        return shard in self._by_range

    def forget(self, shard: int) -> None:
        """Note that a shard could not be downloaded; it is not planned again in this epoch."""
        if shard in self.resident:
            self._remove(shard)
        self._by_range[shard] = self._fetched[shard]

    @property
    def exceeds_budget(self) -> bool:
        return bool(self.resident) and self._used > self.budget

    def _give_back(self) -> Evict:
        victim = max(self.resident, key=lambda shard: (self._next_use(shard), shard))
        unread, by_range = (
            victim in self._unread,
            victim not in self._whole and self._next_use(victim) <= self._position,
        )
        self.lose(victim)
        if by_range:
            self._by_range[victim] = self._uses[victim][0].epoch
        return Evict(victim, by_range, unread)

    def _skip(self, wanted: Use) -> Evict:
        self._by_range[wanted.shard] = wanted.epoch
        return Evict(wanted.shard, by_range=True)

    def _next_missing(self) -> Use | None:
        while self._ahead:
            use = self._ahead[0]
            if use.shard in self.resident:
                self._fetched[use.shard] = use.epoch
            elif self._by_range.get(use.shard) != use.epoch and use.last >= self._position:
                return use
            self._ahead.popleft()
        return None

    def _has_room(self, shard: int) -> bool:
        return self._used + self._sizes[shard] <= self.budget

    def _make_room(self, wanted: Use, *, urgent: bool) -> Evict | None:
        if not self.resident:
            return None if wanted.shard in self._whole else self._skip(wanted)
        # Belady's choice at that step, even if that shard is still read until then.
        at = wanted.first
        later = {shard: self._next_use(shard, at) for shard in self.resident}
        idle = [shard for shard in self.resident if self._next_use(shard) > at]
        farthest = max(later.values())
        victim = max(idle, key=lambda shard: (later[shard], shard), default=None)
        by_range = False
        if victim is None or later[victim] < farthest:
            # Still, keep one shard on its way while others are read.
            if not urgent and any(
                self._next_use(shard) > self._position and self._rest(shard) == 1 for shard in self.resident
            ):
                return None
            last = max(later, key=later.__getitem__)
            if victim is not None and self._is_nearly_read(last):
                victim, by_range = last, True  # reading its few records is cheaper than downloading the other again
                self._by_range[victim] = self._uses[victim][0].epoch
            elif victim is None and wanted.shard in self._whole:
                victim = last
            elif victim is None:
                victim = min(self.resident, key=self._rest)
                by_range = self._is_nearly_read(victim)
                if not by_range:
                    return self._skip(wanted) if urgent else None
                self._by_range[victim] = self._uses[victim][0].epoch
        unread = victim in self._unread
        self._remove(victim)
        return Evict(victim, by_range, unread)

    def _remove(self, shard: int) -> None:
        self.resident.remove(shard)
        self._unread.discard(shard)
        self._used -= self._sizes[shard]

    def _next_use(self, shard: int, after: int = -1) -> float:
        """Return the first step after `after` that reads a shard, or has not been received."""
        return next((use.first for use in self._uses.get(shard, ()) if use.first > after), math.inf)

    def _end(self, use: Use) -> None:
        self._uses[use.shard].popleft()
        self._unread.discard(use.shard)
        self._left[use.shard, use.epoch] -= use.rows
        if use.epoch > self._epoch:
            self._epoch = use.epoch
            for counter in (self._planned, self._left):
                for key in [key for key in counter if key[1] < use.epoch]:
                    del counter[key]

    def _rest(self, shard: int) -> float:
        """Return the fraction of a shard's rows still to be read in the epoch of its next use."""
        uses = self._uses.get(shard)
        key = shard, uses[0].epoch if uses else -1
        return self._left[key] / self._planned[key] if uses else 0

    def _is_nearly_read(self, shard: int) -> bool:
        return shard not in self._whole and self._rest(shard) < 1 / _FEW
