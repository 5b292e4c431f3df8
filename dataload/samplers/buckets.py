"""Batches of records of about one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dataload._util.randomness import check_seed, derive_key
from dataload.errors import ConfigError
from dataload.samplers._checks import check_count
from dataload.samplers._values import ArrayValue, divide, split_by_group
from dataload.samplers.batch import BatchPlan, BatchPlanner
from dataload.samplers.permutation import KEY_WORDS, permute
from dataload.types import Int64Array

__all__ = ["BucketBatchSampler", "check_record_lengths"]

_GROWTH = 1.25


class _Buckets(NamedTuple):
    """Records by length.

    Attributes:
        members: (records,) int64, indices bucket after bucket, rising within one.
        firsts: (buckets,) int64, where each begins in `members`.
        counts: (buckets,) int64, records of each.
        rows: (buckets,) int64, rows of a full batch of each.
    """

    members: Int64Array
    firsts: Int64Array
    counts: Int64Array
    rows: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketBatchSampler(ArrayValue, BatchPlanner):
    """All records in a random order, in batches of about one length: little padding, and few different shapes.

    Records are parted into buckets by length. A batch is of one bucket and has a fixed number of rows: `batch_size`, or
    as many as `max_tokens` allows when each is padded to the longest that the bucket may hold. So the batches of an
    epoch can be counted before any order is chosen, each epoch has as many, and any of them is found at once.
    Records are shuffled within their bucket, and the batches of all buckets are mixed.

    A step is one batch for each rank. The batches do not depend on the number of ranks.

    Attributes:
        lengths: (records,) length of each record, in index order. Kept as int64.
        max_tokens: Rows times longest length of a batch, at most; or None.
        batch_size: Rows of a batch; or None. One of the two is given.
        boundaries: Rising; a bucket holds the records longer than the boundary before it, up to its own. The
            last is not below the longest record. None takes steps of a quarter from the shortest to the longest.
        shuffle: False serves buckets and records in order of length and index, as for an evaluation.
        seed: Any integer.
        group: So many batches of one bucket come one after the other. With a multiple of the number of ranks, all
            ranks have the same shape at the same step, but for a few steps at the end of the epoch.
        tail: For the batches that are left when each rank has had as many, and for the records that are left in a
            bucket: see `BatchPlanner`.

    Raises:
        ConfigError: Not one of `max_tokens` and `batch_size` is given, a length is negative, the longest record fits
            in no batch or bucket, boundaries do not rise, or a number is out of its range.
    """

    lengths: Sequence[int] | Int64Array
    max_tokens: int | None = None
    batch_size: int | None = None
    boundaries: tuple[int, ...] | None = None
    shuffle: bool = True
    seed: int = 0
    group: int = 1
    _buckets: _Buckets = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        BatchPlanner.__post_init__(self)
        set_field = object.__setattr__
        lengths = check_record_lengths(self.lengths)
        set_field(self, "lengths", lengths)
        set_field(self, "seed", check_seed(self.seed))
        check_count("group", self.group, least=1)
        if (self.max_tokens is None) == (self.batch_size is None):
            raise ConfigError(
                f"give either max_tokens or batch_size, got {self.max_tokens!r} and {self.batch_size!r}",
                key="max_tokens",
                value=self.max_tokens,
            )
        longest = int(lengths.max(initial=0))
        if self.boundaries is None:
            set_field(self, "boundaries", _boundaries(int(lengths.min(initial=longest)), longest))
        set_field(self, "boundaries", _check_boundaries(self.boundaries, longest))
        set_field(self, "_buckets", self._part(lengths, np.array(self.boundaries, np.int64)))

    def _part(self, lengths: Int64Array, boundaries: Int64Array) -> _Buckets:
        bucket = np.searchsorted(boundaries, lengths, side="left")
        counts = np.bincount(bucket, minlength=len(boundaries))
        if self.max_tokens is None:
            rows = np.full(len(boundaries), check_count("batch_size", self.batch_size, least=1), np.int64)
        else:
            budget = check_count("max_tokens", self.max_tokens, least=1)
            too_long = boundaries[(counts > 0) & (boundaries > budget)]
            if too_long.size:
                raise ConfigError(
                    f"max_tokens must be at least {too_long[-1]}, the boundary of the longest bucket with records, "
                    f"got {budget}",
                    key="max_tokens",
                    value=budget,
                )
            rows = np.maximum(1, budget // np.maximum(1, boundaries))
        return _Buckets(
            members=np.argsort(bucket, kind="stable"),
            firsts=np.cumsum(counts) - counts,
            counts=counts,
            rows=rows,
        )

    def _batches(self) -> Int64Array:
        """(buckets,) int64, batches of each."""
        counts, rows = self._buckets.counts, self._buckets.rows
        return counts // rows if self.tail == "drop" else -(-counts // rows)

    @property
    def order(self) -> Any:
        """All but ranks."""
        return type(self).__name__, *(
            (name, getattr(self, name))
            for name in ("lengths", "max_tokens", "batch_size", "boundaries", "shuffle", "seed", "group")
        )

    @property
    def records(self) -> int:
        """Indices are below this."""
        return len(self.lengths)

    @property
    def items_per_step(self) -> int:
        """Batches per step of one rank: one."""
        return 1

    @property
    def rows_per_step(self) -> int:
        """Mean rows of a batch."""
        return max(1, self.records // max(1, int(self._batches().sum())))

    def items(self, epoch: int) -> int:  # noqa: ARG002 - as many in each epoch
        """Batches of an epoch."""
        return int(self._batches().sum())

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return self.steps(0)

    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        """See `BatchPlanner.plans`."""
        items, inside = self.deal(steps, epoch=epoch)
        numbers, exists = items[:, 0], inside[:, 0]
        numbers = np.minimum(numbers, self.items(epoch) - 1) if self.tail == "pad" else numbers[exists]
        bucket, batch = self._locate(numbers, epoch)
        plans = [BatchPlan(step, np.empty(0, np.int64)) for step in steps]
        for b, chosen in split_by_group(bucket):
            for i, rows, valid in zip(chosen.tolist(), *self._rows(b, batch[chosen], epoch), strict=True):
                if self.tail == "pad":
                    plans[i] = BatchPlan(steps[i], rows, valid & exists[i])
                else:
                    plans[i] = BatchPlan(steps[i], rows[valid])
        return plans

    def _locate(self, numbers: Int64Array, epoch: int) -> tuple[Int64Array, Int64Array]:
        """Bucket of each batch of the epoch, and its number within the bucket."""
        batches = self._batches()
        groups = batches // self.group
        left = batches - groups * self.group  # of each bucket, behind its full groups: they come last
        whole = int(groups.sum()) * self.group
        bucket, batch = np.empty_like(numbers), np.empty_like(numbers)

        grouped = numbers < whole
        group, place = divide(numbers[grouped], self.group)
        group = self._mix(group, int(groups.sum()), "bucket-groups", epoch)
        bucket[grouped], nth = _run(groups, group)
        batch[grouped] = nth * self.group + place

        rest = self._mix(numbers[~grouped] - whole, int(left.sum()), "bucket-rest", epoch)
        bucket[~grouped], nth = _run(left, rest)
        batch[~grouped] = (groups * self.group)[bucket[~grouped]] + nth
        return bucket, batch

    def _mix(self, numbers: Int64Array, length: int, purpose: str, epoch: int, *address: int) -> Int64Array:
        if not self.shuffle:
            return numbers
        return permute(numbers, length, derive_key(self.seed, purpose, epoch, *address, words=KEY_WORDS))

    def _rows(self, bucket: int, batches: Int64Array, epoch: int) -> tuple[Int64Array, Any]:
        """Indices of several batches of a bucket, (batches, rows), and which of them exist."""
        b = self._buckets
        count, rows = int(b.counts[bucket]), int(b.rows[bucket])
        places = batches[:, None] * rows + np.arange(rows)
        valid = places < count
        places = self._mix(np.minimum(places, count - 1).ravel(), count, "bucket-records", epoch, bucket)
        return b.members[b.firsts[bucket] + places].reshape(valid.shape), valid


def _run(counts: Int64Array, numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Which run each number falls into when runs of `counts` numbers follow one another, and its place there."""
    ends = np.cumsum(counts)
    run = np.searchsorted(ends, numbers, side="right")
    return run, numbers - (ends - counts)[run]


def check_record_lengths(lengths: Any, *, name: str = "lengths", of: str = "record") -> Int64Array:
    """`lengths` as a read-only int64 array, one for each record, or whatever they are `of`.

    Raises:
        ConfigError: They are no integers of 0 or more.
    """
    try:
        given = np.asarray(lengths)
        checked = given.astype(np.int64) if given.dtype.kind in "iu" or not given.size else None
    except (TypeError, ValueError, OverflowError):
        checked = None
    if checked is None or checked.ndim != 1:
        raise ConfigError(f"{name} must be integers, one for each {of}", key=name, value=lengths)
    if checked.size and checked.min() < 0:
        place = int(np.argmin(checked))
        raise ConfigError(
            f"{name} must be 0 or more, got {checked[place]} for {of} {place}",
            key=name,
            value=int(checked[place]),
        )
    checked.setflags(write=False)
    return checked


def _boundaries(shortest: int, longest: int) -> tuple[int, ...]:
    """Steps of a quarter from the shortest to the longest."""
    boundaries = [max(1, longest)]
    while boundaries[-1] > max(1, shortest):
        boundaries.append(min(boundaries[-1] - 1, int(boundaries[-1] / _GROWTH)))
    return tuple(reversed(boundaries))


def _check_boundaries(boundaries: Any, longest: int) -> tuple[int, ...]:
    try:
        given = tuple(boundaries)
    except TypeError:
        given = ()
    if not given:
        raise ConfigError(
            f"boundaries must be one length or more, got {boundaries!r}", key="boundaries", value=boundaries
        )
    checked = tuple(check_count(f"boundaries[{i}]", value, least=0) for i, value in enumerate(given))
    if any(b <= a for a, b in pairwise(checked)):
        raise ConfigError(f"boundaries must rise, got {checked}", key="boundaries", value=checked)
    if checked[-1] < longest:
        raise ConfigError(
            f"boundaries must reach the longest record, {longest}, got {checked[-1]} as the last",
            key="boundaries",
            value=checked,
        )
    return checked
