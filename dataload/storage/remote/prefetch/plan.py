"""Which shards to download and to evict, given the order in which they will be read. Pure (no I/O)."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dataload.errors import ConfigError

_FEW = 4  # if the budget is short, a shard is not kept or fetched again for the last quarter of its records
_MOST_USES = 1 << 18  # planned ahead, at about 200 bytes each


class Use(NamedTuple):
    """A shard that some steps read.

    Attributes:
        first: The first of these steps, counted over all epochs.
        last: The last of them.
        epoch: Their epoch.
        shard: The shard.
        rows: Number of records that they read.
    """

    first: int
    last: int
    epoch: int
    shard: int
    rows: int


@dataclass(frozen=True, slots=True)
class Download:
    """Download a shard, for which there is room."""

    shard: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Delete a shard, if it is there; with `by_range`, the rest of the epoch reads its remaining records by range.

    `unread` says that nothing has been read of its last download.
    """

    shard: int
    by_range: bool
    unread: bool = False


def step_bytes(uses: Sequence[Use], sizes: Sequence[int], whole: Iterable[int]) -> int:
    """Return the bytes of the shards of most steps, and of the largest one, that cannot be read by range."""
    whole = frozenset(whole)
    needed: Counter[int] = Counter()
    for first, shard in {(use.first, use.shard) for use in uses if use.shard in whole}:
        needed[first] += sizes[shard]
    median = sorted(needed.values())[len(needed) // 2] if needed else 0
    return max(median, *(sizes[shard] for shard in whole), 0)


def check_fit(need: int, budget: int | None) -> None:
    """Check that the shards that cannot be read by range, and that are read together, fit into the budget.

    Raises:
        ConfigError: For most steps they do not fit, so that they would be downloaded again and again.
    """
    if budget is not None and need > budget:
        raise ConfigError(
            f"shards of {need:,} bytes are read together, can only be read as a whole, and do not fit into the "
            f"{budget:,} bytes that remote.budget allows: raise the budget, shuffle in a pool of fewer shards, or "
            "convert the data to a format that is read by range, such as tar",
            key="remote.budget",
            value=budget,
        )


class CachePlan:
    """The downloads and evictions of one consumer.

    Shards are downloaded in the order of their first use. The shard whose next use is farthest is evicted, but never
    for a shard that is wanted later than itself. If the budget is smaller than what a pool spans, a shard of which
    fewer than a quarter of the records are left in the epoch makes room instead; these are then read by range, so
    that each shard is downloaded once in an epoch.

    Args:
        sizes: Bytes of each shard.
        budget: Most bytes of all shards that are resident; None means no limit.
        resident: Shards that are there already.
        whole: Shards that cannot be read by range.

    Attributes:
        budget: The same, infinite for no limit. It may change at any time.
    """

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
        self._ahead: deque[Use] = deque()  # uses whose shards may be missing
        self._current: deque[Use] = deque()  # all uses that are not over
        self._uses: dict[int, deque[Use]] = {}  # the same by shard
        self._planned: Counter[tuple[int, int]] = Counter()  # rows of a shard in an epoch
        self._left: Counter[tuple[int, int]] = Counter()  # rows of those that were not received
        self._fetched: dict[int, int] = {}  # the epoch for which a shard was made resident
        self._unread: set[int] = set()  # downloaded, and nothing of them was received
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
        """Return whether more uses are needed for the next decision."""
        if self._ended or len(self._current) >= _MOST_USES:
            return False
        wanted = self._next_missing()
        if wanted is None:
            return len(self.resident) < len(self._sizes)
        if self._has_room(wanted.shard) or self._ahead[-1].epoch > wanted.epoch + 1:
            return False
        return sum(self._next_use(shard, wanted.first) == math.inf for shard in self.resident) > 1

    def receive(self, steps: int) -> None:
        """Say how many steps the consumer has received."""
        self._position = steps
        while self._current and self._current[0].last < steps:
            self._end(self._current.popleft())

    def next(self, waiting: Collection[int] = ()) -> Download | Evict | None:
        """Return what to do next, which then counts as done; None means to wait for the consumer.

        Args:
            waiting: Shards that readers wait for. While one of them is not resident, no other one is kept for later.
        """
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
        """Say that a resident shard was evicted by somebody else."""
        self._remove(shard)
        if self._next_use(shard) < math.inf:
            self._ahead.appendleft(self._uses[shard][0])

    def _resume(self, waiting: Collection[int]) -> None:
        """Go back to a use that was planned before the shard made room for that of a later step."""
        missing = (shard for shard in waiting if shard not in self.resident and self._uses.get(shard))
        use = min((self._uses[shard][0] for shard in missing), default=None)
        if use is not None and not (self._ahead and self._ahead[0].first <= use.first):
            self._ahead.appendleft(use)

    def is_by_range(self, shard: int) -> bool:
        """Return whether a shard is read by range until its next download."""
        return shard in self._by_range

    def forget(self, shard: int) -> None:
        """Say that a shard could not be downloaded; nothing more is planned for it in this epoch."""
        if shard in self.resident:
            self._remove(shard)
        self._by_range[shard] = self._fetched[shard]

    @property
    def exceeds_budget(self) -> bool:
        """True while more is resident than the budget allows, because that has shrunk."""
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
        # As Belady's algorithm would at that step, even if its choice is still being read until then.
        at = wanted.first
        later = {shard: self._next_use(shard, at) for shard in self.resident}
        idle = [shard for shard in self.resident if self._next_use(shard) > at]
        farthest = max(later.values())
        victim = max(idle, key=lambda shard: (later[shard], shard), default=None)
        by_range = False
        if victim is None or later[victim] < farthest:
            # Still, one shard should be on its way while others are read.
            if not urgent and any(map(self._is_untouched, self.resident)):
                return None
            last = max(later, key=later.__getitem__)
            if victim is not None and self._is_nearly_read(last):
                victim, by_range = last, True  # its few records are less than the other's next download
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
        """Return the part of a shard's rows that is still to be read, in the epoch of its next use."""
        uses = self._uses.get(shard)
        key = shard, uses[0].epoch if uses else -1
        return self._left[key] / self._planned[key] if uses else 0

    def _is_untouched(self, shard: int) -> bool:
        return self._next_use(shard) > self._position and self._rest(shard) == 1

    def _is_nearly_read(self, shard: int) -> bool:
        return shard not in self._whole and self._rest(shard) < 1 / _FEW
