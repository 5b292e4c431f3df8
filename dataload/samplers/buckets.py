"""Batches of records of similar length."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np

from dataload._util.randomness import KEY_WORDS, derive_key, permute
from dataload._util.settings import Least, as_tuple, check_count, check_settings, setting_error
from dataload.errors import ConfigError
from dataload.samplers.batch import BatchPlan, BatchPlanner
from dataload.samplers.common import (
    ArrayValue,
    PerRecord,
    check_record_lengths,
    divide,
    set_fields,
    split_by_group,
)
from dataload.types import Int64Array

_GROWTH = 1.25


class _Buckets(NamedTuple):
    """Records grouped by length; all but `members` have one entry per bucket."""

    members: Int64Array  # (records,), indices bucket by bucket, ascending within a bucket
    firsts: Int64Array  # offset of the bucket in `members`
    counts: Int64Array  # records
    rows: Int64Array  # rows of a full batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketBatchSampler(ArrayValue, PerRecord, BatchPlanner):
    """Batches of records of similar length: little padding and few distinct shapes.

    Records are divided into buckets by length. All rows of a batch come from one bucket, and their number is fixed:
    `batch_size`, or as many as `max_tokens` allows when each row is padded to the bucket's boundary. So every epoch has
    the same number of batches, known in advance, and any batch can be computed directly. Records are shuffled within
    their bucket, and the batches of all buckets are mixed.

    Each step gives one batch to each rank. The batches do not depend on the number of ranks.

    Attributes:
        lengths: Length of each record, (records,), in index order. Stored as int64.
        max_tokens: Upper limit for rows times padded length of a batch. Give either this or `batch_size`.
        batch_size: Rows of a batch. Give either this or `max_tokens`.
        boundaries: Upper length limits of the buckets, ascending: a bucket holds the records longer than the previous
            boundary, up to and including its own. The last must reach the longest record. None uses boundaries that
            grow by a quarter from the shortest record to the longest.
        shuffle: Whether to shuffle. If False, buckets come in order of length and records in index order, as suits an
            evaluation.
        seed: Seed of the shuffle, any integer.
        group: Number of consecutive batches from one bucket. If it is a multiple of the number of ranks, all ranks get
            the same shape at each step, except for a few steps at the end of the epoch.
        tail: How to treat the batches left when all ranks have had equally many, and the records left in a bucket;
            see `BatchPlanner`.

    Raises:
        ConfigError: Neither or both of `max_tokens` and `batch_size` are given, a length is negative, the longest
            record does not fit in a batch or bucket, boundaries do not ascend, or a number is out of its range.
    """

    lengths: Sequence[int] | Int64Array
    max_tokens: Annotated[int, Least(1)] | None = None
    batch_size: Annotated[int, Least(1)] | None = None
    boundaries: tuple[int, ...] | None = None
    shuffle: bool = True
    seed: int = 0
    group: Annotated[int, Least(1)] = 1
    _buckets: _Buckets = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(self)
        BatchPlanner.__post_init__(self)
        lengths = check_record_lengths(self.lengths)
        set_fields(self, lengths=lengths)
        if (self.max_tokens is None) == (self.batch_size is None):
            raise ConfigError(
                f"give either max_tokens or batch_size, got {self.max_tokens!r} and {self.batch_size!r}",
                key="max_tokens",
                value=self.max_tokens,
            )
        boundaries = _boundaries(self.boundaries, lengths)
        set_fields(self, boundaries=boundaries, _buckets=self._divide(lengths, np.array(boundaries, np.int64)))

    def _divide(self, lengths: Int64Array, boundaries: Int64Array) -> _Buckets:
        bucket = np.searchsorted(boundaries, lengths, side="left")
        counts = np.bincount(bucket, minlength=len(boundaries))
        if self.max_tokens is None:
            rows = np.full(len(boundaries), self.batch_size, np.int64)
        else:
            too_long = boundaries[(counts > 0) & (boundaries > self.max_tokens)]
            if too_long.size:
                rule = f"must be at least {too_long[-1]}, the boundary of the longest bucket that has records"
                raise setting_error("max_tokens", self.max_tokens, rule)
            rows = np.maximum(1, self.max_tokens // np.maximum(1, boundaries))
        return _Buckets(np.argsort(bucket, kind="stable"), np.cumsum(counts) - counts, counts, rows)

    def _batches(self) -> Int64Array:
        """Number of batches per bucket, (buckets,) int64."""
        counts, rows = self._buckets.counts, self._buckets.rows
        return counts // rows if self.tail == "drop" else -(-counts // rows)

    @property
    def order(self) -> Any:
        """All settings except the ranks."""
        return self._settings()

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return len(self.lengths)

    @property
    def items_per_step(self) -> int:
        """Batches per step of one rank, which is 1."""
        return 1

    @property
    def rows_per_step(self) -> int:
        """Mean rows of a batch."""
        return max(1, self.records // max(1, int(self._batches().sum())))

    def items(self, epoch: int) -> int:  # noqa: ARG002 - the same in each epoch
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
        """Return the bucket of each batch of the epoch, and the batch's number in its bucket."""
        batches = self._batches()
        groups = batches // self.group
        left = batches - groups * self.group  # per bucket, after its full groups; these batches come last
        whole = int(groups.sum()) * self.group
        bucket, batch = np.empty_like(numbers), np.empty_like(numbers)

        grouped = numbers < whole
        group, within = divide(numbers[grouped], self.group)
        group = self._mix(group, int(groups.sum()), "bucket-groups", epoch)
        bucket[grouped], nth = _find_run(groups, group)
        batch[grouped] = nth * self.group + within

        rest = self._mix(numbers[~grouped] - whole, int(left.sum()), "bucket-rest", epoch)
        bucket[~grouped], nth = _find_run(left, rest)
        batch[~grouped] = (groups * self.group)[bucket[~grouped]] + nth
        return bucket, batch

    def _mix(self, numbers: Int64Array, length: int, purpose: str, epoch: int, *address: int) -> Int64Array:
        if not self.shuffle:
            return numbers
        return permute(numbers, length, derive_key(self.seed, purpose, epoch, *address, words=KEY_WORDS))

    def _rows(self, bucket: int, batches: Int64Array, epoch: int) -> tuple[Int64Array, Any]:
        """Return the indices of batches of one bucket, (batches, rows), and which of them exist."""
        b = self._buckets
        count, rows = int(b.counts[bucket]), int(b.rows[bucket])
        members = batches[:, None] * rows + np.arange(rows)
        valid = members < count
        members = self._mix(np.minimum(members, count - 1).ravel(), count, "bucket-records", epoch, bucket)
        return b.members[b.firsts[bucket] + members].reshape(valid.shape), valid


def _find_run(counts: Int64Array, numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the run of each number, for consecutive runs of `counts` numbers, and its offset in that run."""
    ends = np.cumsum(counts)
    run = np.searchsorted(ends, numbers, side="right")
    return run, numbers - (ends - counts)[run]


def _boundaries(given: Any, lengths: Int64Array) -> tuple[int, ...]:
    """Return the boundaries given, or boundaries that grow by a quarter from the shortest length to the longest."""
    longest = int(lengths.max(initial=0))
    if given is None:
        found, shortest = [max(1, longest)], int(lengths.min(initial=longest))
        while found[-1] > max(1, shortest):
            found.append(min(found[-1] - 1, int(found[-1] / _GROWTH)))
        return tuple(reversed(found))
    checked = tuple(check_count(f"boundaries[{i}]", value, least=0) for i, value in enumerate(as_tuple(given)))
    if not checked:
        raise setting_error("boundaries", given, "must hold at least one length")
    if any(b <= a for a, b in pairwise(checked)):
        raise setting_error("boundaries", checked, "must ascend")
    if checked[-1] < longest:
        raise setting_error("boundaries", checked, f"must reach the longest record, {longest}")
    return checked
