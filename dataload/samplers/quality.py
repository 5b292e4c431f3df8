"""The quality of an order: how well it mixes compared with a uniform shuffle. Pure (no I/O)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

import numpy as np

from dataload.samplers.batch import BatchPlanner
from dataload.samplers.buckets import BucketBatchSampler
from dataload.samplers.common import Float64Array
from dataload.samplers.order_sample import (
    PLACES,
    OrderSample,
    ShardLayout,
    displacements,
    expected_shards,
    sample_order,
    shards_per_batch,
)
from dataload.types import Int64Array

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
        ConfigError: The epoch has no steps, or `shard_lengths` are not numbers of records.

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
