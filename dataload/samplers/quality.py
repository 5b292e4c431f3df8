"""The quality of an order: how well it mixes compared with a uniform shuffle. Pure (no I/O)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from dataload._util.indexing import distinct
from dataload._util.randomness import derive_word, hash64
from dataload._util.settings import check_count
from dataload.errors import ConfigError
from dataload.samplers.batch import BatchPlanner, BatchSampler
from dataload.samplers.buckets import BucketBatchSampler
from dataload.samplers.common import Float64Array, check_lengths, indices_of
from dataload.types import Int64Array

WHOLE_UP_TO = 2**20
"""Epochs of up to this many positions are measured completely."""

PLACES = 20
"""Number of runs sampled from a longer epoch: two per tenth, because a pool shuffle looks far back for each."""

_SAMPLED_ROWS = 2**18
_PARTS = 100
_SIZES = 33  # number of batch sizes with a computed expectation; others are interpolated
_FACTORS = 256


def global_rows(planner: BatchPlanner, steps: range, *, epoch: int) -> tuple[Int64Array, Int64Array]:
    """Return the indices of consecutive steps of all ranks together, (rows,) int64, and the rows per step."""
    if isinstance(planner, BatchSampler):  # avoids one object per step
        bounds = planner.origin + np.arange(steps.start, steps.stop + 1) * planner.global_batch_size
        bounds = np.minimum(bounds, planner.items(epoch))
        return indices_of(planner.sampler, np.arange(bounds[0], bounds[-1]), epoch), np.diff(bounds)
    # A planner of one rank makes a global step in several steps, without the padding that ranks add.
    tail = "drop" if planner.tail == "drop" else "partial"
    alone = planner.with_ranks(rank=0, world_size=1, tail=tail) if planner.world_size > 1 else planner
    size = planner.step_size // alone.step_size
    parts = range(steps.start * size, min(steps.stop * size, alone.steps(epoch)))
    rows = [plan.wanted for plan in alone.plans(parts, epoch=epoch)]
    counts = np.zeros(len(steps), np.int64)
    np.add.at(counts, np.arange(len(parts)) // size, [len(part) for part in rows])
    return np.concatenate([np.empty(0, np.int64), *rows]), counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderSample:
    """All steps of an epoch, or runs of consecutive steps, for all ranks together."""

    epoch: int
    whole: bool  # whether the sample is the complete epoch
    epoch_steps: int
    length: int  # positions in the epoch
    records: int  # upper bound (exclusive) of the indices
    steps: Int64Array  # (batches,), the steps in the sample, ascending
    batches: Int64Array  # (rows,), the offset in `steps` of each row's step
    positions: Int64Array  # (rows,), estimated if batches differ in size and only some are sampled
    indices: Int64Array  # (rows,)


def sample_order(planner: BatchPlanner, *, epoch: int = 0) -> OrderSample:
    """Return a whole epoch of up to `WHOLE_UP_TO` positions, otherwise 20 runs at the same steps in each epoch."""
    check_count("epoch", epoch, least=0)
    total, items = planner.steps(epoch), planner.items(epoch)
    if not total:
        raise ConfigError("the order has no steps to measure", key="sampler", value=planner.order)
    rows = planner.rows_per_step * planner.world_size
    whole = total * rows <= WHOLE_UP_TO
    runs = [range(total)] if whole else _runs(total, rows)
    length = items if isinstance(planner, BatchSampler) else planner.records
    indices, counts = zip(*(global_rows(planner, run, epoch=epoch) for run in runs), strict=True)
    firsts = [planner.position(run.start, epoch=epoch) * length // items for run in runs]
    sizes = np.concatenate(counts)
    positions = [np.arange(first, first + len(run)) for first, run in zip(firsts, indices, strict=True)]
    return OrderSample(
        epoch=epoch,
        whole=whole,
        epoch_steps=total,
        length=sum(map(len, indices)) if whole and not isinstance(planner, BatchSampler) else length,
        records=planner.records,
        steps=np.concatenate([np.arange(run.start, run.stop) for run in runs]),
        batches=np.repeat(np.arange(len(sizes)), sizes),
        positions=np.concatenate(positions),
        indices=np.concatenate(indices),
    )


def _runs(total: int, rows: int) -> list[range]:
    """Return runs of equal length, one from each of equal parts of the epoch."""
    length = min(max(1, _SAMPLED_ROWS // (PLACES * rows)), max(1, total // PLACES))
    count = min(PLACES, total)
    # Not equidistant, because the distance might coincide with the period of shards or lanes.
    bits = hash64(derive_word(0, "order-sample"), np.arange(count)).tolist()
    runs: list[range] = []
    for i in range(count):
        start, stop = i * total // count, (i + 1) * total // count
        first = start + bits[i] % (stop - start - length + 1)
        runs.append(range(first, first + length))
    return runs


def displacements(sample: OrderSample) -> Float64Array:
    """Return each record's distance from index order as a fraction of the data, (rows,) float64 in [0, 1)."""
    return np.abs((sample.indices + 0.5) / sample.records - (sample.positions + 0.5) / sample.length)


@dataclass(frozen=True, slots=True, eq=False)
class ShardLayout:
    """Consecutive parts of the index range whose mixing is measured."""

    ends: Int64Array  # (shards,), the index after the last record of each shard
    files: bool  # whether these are the data set's files; otherwise equal parts

    @classmethod
    def of(cls, records: int, shard_lengths: Sequence[int] | None = None) -> ShardLayout:
        """Return the shards of the first `records` records, or 100 equal parts if there is only one shard."""
        if shard_lengths is not None:
            ends = np.minimum(np.cumsum(check_lengths("shard_lengths", shard_lengths)), records)
            ends = ends[np.diff(ends, prepend=0) > 0]
            if len(ends) > 1:
                return cls(ends, files=True)
        parts = max(1, min(_PARTS, records))
        return cls(np.arange(1, parts + 1) * records // parts, files=False)

    @property
    def lengths(self) -> Int64Array:
        """Records of each shard, (shards,) int64."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)


def shards_per_batch(sample: OrderSample, shards: ShardLayout) -> Int64Array:
    """Return the number of distinct shards in each batch, (batches,) int64."""
    shard = np.searchsorted(shards.ends, sample.indices, side="right")
    occurring = distinct(sample.batches * len(shards) + shard) // len(shards)
    return np.bincount(occurring, minlength=len(sample.steps))


def expected_shards(shards: ShardLayout, sizes: Int64Array) -> Float64Array:
    """Return the expected number of shards in batches of these sizes, drawn without replacement."""
    lengths, times = np.unique(shards.lengths, return_counts=True)
    known = np.unique(sizes)
    if len(known) > _SIZES:
        known = np.unique(np.geomspace(known[0], known[-1], _SIZES).round().astype(np.int64))
    found = [float((times * -np.expm1(_log_missed(lengths, int(shards.ends[-1]), size))).sum()) for size in known]
    return np.interp(sizes, known, found)


def _log_missed(lengths: Int64Array, records: int, size: int) -> Float64Array:
    """Return the log-probability that `size` records drawn without replacement miss each shard, (shards,) float64."""
    # The product of (1 - length / (records - i)) for i < size, in at most _FACTORS runs of nearly equal factors.
    cuts = np.unique(np.linspace(0, min(size, records), _FACTORS + 1).astype(np.int64)).tolist()
    total = np.zeros(len(lengths))
    with np.errstate(divide="ignore"):  # a shard that cannot be missed
        for start, stop in pairwise(cuts):
            middle = (start + stop - 1) / 2
            total += (stop - start) * np.log1p(-np.minimum(1, lengths / (records - middle)))
    return total


_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_TOLERANCE = 0.05  # maximum relative difference that counts as equal
_SIGMAS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured number and its expectation in a uniform shuffle."""

    found: float
    ideal: float
    error: float  # standard error of `found`, estimated from 20 parts of the sample

    @property
    def ratio(self) -> float | None:
        """Found divided by ideal; None if the ideal is 0."""
        return self.found / self.ideal if self.ideal else None

    @property
    def is_ideal(self) -> bool:
        """Whether found and ideal differ by at most 5% or by no more than chance explains."""
        return abs(self.found - self.ideal) <= max(_TOLERANCE * self.ideal, _SIGMAS * self.error)

    @property
    def proviso(self) -> str:
        """A qualification for verdicts if chance alone explains more than 5%."""
        return ", within chance" if _SIGMAS * self.error > _TOLERANCE * self.ideal else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Displacement:
    """The distances of records from index order: ``|index / records - position / positions|``."""

    mean: Figure  # the ideal is 1/3
    quantiles: tuple[tuple[float, float, float], ...]  # (q, found, ideal); the ideal is 1 - sqrt(1 - q)

    @property
    def verdict(self) -> str:
        ratio = self.mean.found / self.mean.ideal
        if self.mean.is_ideal:
            return f"records move as far as in a uniform shuffle{self.mean.proviso}"
        if ratio < _TOLERANCE:
            return "records stay about where they are in index order"
        return f"records move {ratio:.2f} times as far as in a uniform shuffle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """The number of shards in a global batch."""

    shards: int
    noun: str  # "shards", or "parts" for equal parts of a single shard
    per_batch: Figure  # mean over the batches
    middle: float | None  # found / ideal in the middle fifth of the epoch; None without steps there

    @property
    def verdict(self) -> str:
        found, ideal = self.per_batch.found, self.per_batch.ideal
        if self.per_batch.is_ideal:
            return f"a batch mixes as many {self.noun} as in a uniform shuffle{self.per_batch.proviso}"
        return f"a batch mixes {found:.1f} of {self.shards:,} {self.noun}; in a uniform shuffle {ideal:.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplicity:
    """The number of times that records occur in an epoch."""

    records: int
    positions: int  # number of positions in the sample
    whole: bool  # whether the sample is the whole epoch
    repeated: int  # records that occur more than once in the sample
    never: int | None  # records that never occur; None if the sample is not the whole epoch

    @classmethod
    def of(cls, indices: Int64Array, records: int, *, whole: bool) -> Self:
        """Count the records in a sample of an epoch, or in the whole epoch; `indices` is (positions,) int64."""
        counts = np.unique(indices, return_counts=True)[1]
        repeated = int(np.count_nonzero(counts > 1))
        never = records - len(counts) if whole else None
        return cls(records=records, positions=len(indices), whole=whole, repeated=repeated, never=never)

    @property
    def verdict(self) -> str:
        if not self.whole:
            found = f"{self.repeated:,} records occur" if self.repeated else "no record occurs"
            return f"{found} twice or more in the {self.positions:,} sampled positions"
        if not self.repeated and not self.never:
            return "each record occurs once"
        return f"{self.repeated:,} records occur more than once, {self.never:,} of {self.records:,} never"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReport:
    """A measurement of how well an order mixes.

    Attributes:
        epoch: Number of the measured epoch.
        records: Upper bound (exclusive) of the indices.
        positions: Positions in the epoch.
        steps: Steps in the epoch.
        looked_at: Positions that were measured.
        sampled: Whether only a sample was measured.
        displacement: The distances of records from index order.
        mixing: The number of shards in a batch.
        multiplicity: The number of times that records occur.
        decay: Deprecated, None.
        repeats: Deprecated, None.
    """

    epoch: int
    records: int
    positions: int
    steps: int
    looked_at: int
    sampled: bool
    displacement: Displacement
    mixing: Mixing
    multiplicity: Multiplicity
    decay: None = None
    repeats: None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report for `json.dumps`, with ratios and verdicts."""
        return as_json(self)


def as_json(value: Any) -> Any:
    """Return a report for `json.dumps`, with ratios and verdicts."""
    if not is_dataclass(value):
        return value
    found = {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    return found | {name: getattr(value, name) for name in ("ratio", "verdict") if hasattr(value, name)}


def order_report(planner: BatchPlanner, *, shard_lengths: Sequence[int] | None = None, epoch: int = 0) -> OrderReport:
    """Measure how well the order of an epoch mixes.

    Args:
        planner: The planner of any rank. Batches cover all ranks together.
        shard_lengths: Records of each shard, in index order. With None or one shard, 100 equal parts are used instead.
        epoch: Number of the epoch, from 0.

    Raises:
        ConfigError: The epoch has no steps, or `shard_lengths` are not numbers of records, or fewer than the order's.

    Examples:
        >>> from dataload.samplers import BatchSampler, GlobalShuffle
        >>> order_report(BatchSampler(sampler=GlobalShuffle(10_000, seed=0), batch_size=64)).mixing.verdict
        'a batch mixes as many parts as in a uniform shuffle'
    """
    shards = ShardLayout.of(planner.records, shard_lengths)
    return judge_order(sample_order(planner, epoch=epoch), shards)


@dataclass(frozen=True, slots=True)
class BucketFiller:
    """The fraction of padding in the batches of length buckets, estimated from a sample of long epochs."""

    longest: float  # if rows are padded to the longest row of the batch
    boundary: float  # if rows are padded to the boundary of their bucket

    @classmethod
    def of(cls, planner: BucketBatchSampler, *, epoch: int) -> Self:
        """Measure the padding in the batches of one rank, without rows that only fill up a batch."""
        tail = "drop" if planner.tail == "drop" else "partial"
        sample = sample_order(planner.with_ranks(rank=0, world_size=1, tail=tail), epoch=epoch)
        lengths = np.asarray(planner.lengths)[sample.indices]
        longest = np.zeros(len(sample.steps), np.int64)
        np.maximum.at(longest, sample.batches, lengths)
        boundaries = np.array(planner.boundaries)
        rows = np.bincount(sample.batches, minlength=len(longest))
        padded = [int(rows @ width) for width in (longest, boundaries[np.searchsorted(boundaries, longest)])]
        return cls(*(1 - int(lengths.sum()) / total if total else 0.0 for total in padded))


def judge_order(sample: OrderSample, shards: ShardLayout) -> OrderReport:
    """Return the report on a sample of an epoch."""
    known, last = int(shards.ends[-1]), int(sample.indices.max(initial=0))
    if last >= known:
        raise ConfigError(f"shard_lengths add up to {known}, but the order serves record {last}", key="shard_lengths")
    return OrderReport(
        epoch=sample.epoch,
        records=sample.records,
        positions=sample.length,
        steps=sample.epoch_steps,
        looked_at=len(sample.indices),
        sampled=not sample.whole,
        displacement=_displacement(sample),
        mixing=_mixing(sample, shards),
        multiplicity=Multiplicity.of(sample.indices, sample.records, whole=sample.whole),
    )


def _displacement(sample: OrderSample) -> Displacement:
    at = (sample.positions + 0.5) / sample.length
    moved = displacements(sample)
    # Subtract the expectation at each position, between 1/4 and 1/2, which is not an error.
    error = _error(moved - (at**2 - at + 0.5), sample.batches * PLACES // len(sample.steps))
    found = np.quantile(moved, _QUANTILES).tolist()
    return Displacement(
        mean=Figure(found=float(moved.mean()), ideal=1 / 3, error=error),
        quantiles=tuple((q, value, 1 - math.sqrt(1 - q)) for q, value in zip(_QUANTILES, found, strict=True)),
    )


def _error(values: Float64Array, blocks: Int64Array) -> float:
    """Return the standard error of a mean over dependent blocks, from differences of neighbours (von Neumann, 1941)."""
    counts = np.bincount(blocks)
    present = counts > 0
    means = np.bincount(blocks, values)[present] / counts[present]
    if len(means) < 2:
        return float(values.std() / math.sqrt(len(values)))
    return float(np.sqrt(np.mean(np.diff(means) ** 2) / 2 / len(means)))


def _mixing(sample: OrderSample, shards: ShardLayout) -> Mixing:
    found = shards_per_batch(sample, shards)
    ideal = expected_shards(shards, np.bincount(sample.batches, minlength=len(sample.steps)))
    blocks = np.arange(len(found)) * PLACES // len(found)
    per_batch = Figure(found=float(found.mean()), ideal=float(ideal.mean()), error=_error(found - ideal, blocks))

    tenth = sample.steps * 10 // sample.epoch_steps
    fifth = (tenth == 4) | (tenth == 5)
    middle = float(found[fifth].sum() / ideal[fifth].sum()) if fifth.any() else None
    return Mixing(shards=len(shards), noun="shards" if shards.files else "parts", per_batch=per_batch, middle=middle)
