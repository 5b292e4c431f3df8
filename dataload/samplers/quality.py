"""The quality of an order: how well it mixes compared with a uniform shuffle. Pure (no I/O)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

import numpy as np

from dataload.samplers._common import BoolArray, Float64Array
from dataload.samplers.batch import BatchPlanner
from dataload.samplers.buckets import BucketBatchSampler
from dataload.samplers.order_sample import (
    PLACES,
    OrderSample,
    Shards,
    displacements,
    expected_shards,
    sample_order,
    shards_per_batch,
)
from dataload.types import Int64Array

_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_TOLERANCE = 0.05  # relative difference that counts as none
_SIGMAS = 3
_FEW_PAIRS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured number, and its expectation in a uniform shuffle."""

    found: float
    ideal: float
    error: float  # standard error of `found`, estimated from 20 parts of the sample

    @property
    def ratio(self) -> float | None:
        """Found divided by ideal; None if the ideal is 0."""
        return self.found / self.ideal if self.ideal else None

    @property
    def is_ideal(self) -> bool:
        """Whether found and ideal differ by at most 5%, or by no more than chance explains."""
        return abs(self.found - self.ideal) <= max(_TOLERANCE * self.ideal, _SIGMAS * self.error)

    @property
    def proviso(self) -> str:
        """A qualification for verdicts, if chance alone explains more than 5%."""
        return ", within chance" if _SIGMAS * self.error > _TOLERANCE * self.ideal else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Displacement:
    """The distances of records from index order: ``|index / records - position / positions|``."""

    mean: Figure  # the ideal is 1/3
    quantiles: tuple[tuple[float, float, float], ...]  # (q, found, ideal); the ideal is 1 - sqrt(1 - q)

    @property
    def verdict(self) -> str:
        """The finding in words."""
        ratio = self.mean.found / self.mean.ideal
        if self.mean.is_ideal:
            return f"records move as far as in a uniform shuffle{self.mean.proviso}"
        if ratio < _TOLERANCE:
            return "records stay about where they are in index order"
        return f"records move {ratio:.2f} times as far as in a uniform shuffle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """The number of shards that the rows of a global batch come from."""

    shards: int
    noun: str  # "shards", or "parts" if equal parts of one shard take their place
    per_batch: Figure  # mean over the batches
    middle: float | None  # ratio of found to ideal in the middle fifth of the epoch; None if that has no steps

    @property
    def verdict(self) -> str:
        """The finding in words."""
        found, ideal = self.per_batch.found, self.per_batch.ideal
        if self.per_batch.is_ideal:
            return f"a batch mixes as many {self.noun} as in a uniform shuffle{self.per_batch.proviso}"
        return f"a batch mixes {found:.1f} of {self.shards:,} {self.noun}; in a uniform shuffle {ideal:.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """The change of the mixing over the epoch; ratios are None for parts without steps."""

    tenths: tuple[float | None, ...]  # ratio of found to ideal in each tenth, relative to the whole epoch
    error: float  # standard error of each tenth, estimated from 20 parts of the sample
    last_to_middle: float | None  # ratio of the last tenth to the middle fifth

    @property
    def verdict(self) -> str:
        """The finding in words."""
        known = [tenth for tenth in self.tenths if tenth is not None]
        if len(known) < len(self.tenths) or self.last_to_middle is None:
            return "the epoch is too short to tell"
        tolerance = max(_TOLERANCE, _SIGMAS * self.error)
        if all(abs(tenth - 1) <= tolerance for tenth in known):
            return "mixing is the same from the start of the epoch to its end"
        if known[-1] == min(known) and self.last_to_middle < 1 - tolerance:
            return f"mixing decays: at the end it is {self.last_to_middle:.2f} of that in the middle"
        return f"mixing differs over the epoch: from {min(known):.2f} to {max(known):.2f} of its mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Pairs of records that share a batch in one epoch and again in the next.

    `pairs` counts those of which both are in the sample of the next epoch. If a record comes more than once, its first
    occurrence counts. `again` is the fraction that share a batch again, or None without pairs. The ideal is that of
    any two records of the sample: (G - 1) / (n - 1) for all n records in batches of G.
    """

    pairs: int
    again: Figure | None

    @property
    def verdict(self) -> str:
        """The finding in words."""
        if self.again is None or self.again.ratio is None:
            return "no pair was seen in both epochs"
        if self.again.is_ideal:
            few = self.pairs * self.again.ideal < _FEW_PAIRS
            seldom = f"pairs meet again as seldom as in a uniform shuffle{self.again.proviso}"
            return "too few pairs to tell" if few else seldom
        if self.again.found > 0.5:
            return f"batches stay the same: {self.again.found:.0%} of the pairs meet again"
        return f"pairs meet again {self.again.ratio:.3g} times as often as in a uniform shuffle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplicity:
    """The number of times that records come in an epoch."""

    records: int
    positions: int  # positions in the sample
    whole: bool  # whether the sample is the whole epoch
    repeated: int  # records that come more than once in the sample
    never: int | None  # records that never come; None if the sample is not the whole epoch

    @classmethod
    def of(cls, indices: Int64Array, records: int, *, whole: bool) -> Self:
        """Count records in a sample of (positions,) int64 indices, which may be the whole epoch."""
        counts = np.unique(indices, return_counts=True)[1]
        repeated = int(np.count_nonzero(counts > 1))
        never = records - len(counts) if whole else None
        return cls(records=records, positions=len(indices), whole=whole, repeated=repeated, never=never)

    @property
    def verdict(self) -> str:
        """The finding in words."""
        if not self.whole:
            found = f"{self.repeated:,} records come" if self.repeated else "no record comes"
            return f"{found} twice or more among the {self.positions:,} positions sampled"
        if not self.repeated and not self.never:
            return "each record comes once"
        return f"{self.repeated:,} records come more than once, {self.never:,} of {self.records:,} do not come"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReport:
    """A measurement of how well an order mixes.

    Attributes:
        epoch: Number of the measured epoch; `repeats` also uses the next one.
        records: Upper bound (exclusive) of the indices.
        positions: Positions in the epoch.
        steps: Steps in the epoch.
        looked_at: Positions that were measured.
        sampled: Whether only a sample was measured.
        displacement: The distances that records move.
        mixing: The number of shards that batches come from.
        decay: The change of the mixing over the epoch.
        repeats: Pairs that meet again in the next epoch.
        multiplicity: The number of times that records come.
    """

    epoch: int
    records: int
    positions: int
    steps: int
    looked_at: int
    sampled: bool
    displacement: Displacement
    mixing: Mixing
    decay: Decay
    repeats: Repeats
    multiplicity: Multiplicity

    def to_json(self) -> dict[str, Any]:
        """Return the report for `json.dumps`, with ratios and verdicts."""
        return as_json(self)


def as_json(value: Any) -> Any:
    """Return a report for `json.dumps`, with the ratios and verdicts of its parts."""
    if not is_dataclass(value):
        return value
    found = {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    return found | {name: getattr(value, name) for name in ("ratio", "verdict") if hasattr(value, name)}


def order_report(planner: BatchPlanner, *, shard_lengths: Sequence[int] | None = None, epoch: int = 0) -> OrderReport:
    """Measure how well the order of an epoch mixes.

    Args:
        planner: The planner of any rank. Batches are those of all ranks together.
        shard_lengths: Records of each shard, in index order. With None or one shard, 100 equal parts take their place.
        epoch: Number of the epoch, from 0.

    Raises:
        ConfigError: The epoch has no steps, or `shard_lengths` are not numbers of records.

    Examples:
        >>> from dataload.samplers import BatchSampler, GlobalShuffle
        >>> order_report(BatchSampler(sampler=GlobalShuffle(10_000, seed=0), batch_size=64)).mixing.verdict
        'a batch mixes as many parts as in a uniform shuffle'
    """
    shards = Shards.of(planner.records, shard_lengths)
    return judge_order(sample_order(planner, epoch=epoch), sample_order(planner, epoch=epoch + 1), shards)


@dataclass(frozen=True, slots=True)
class BucketFiller:
    """The share of filler in the batches of length buckets, estimated from a sample of long epochs."""

    longest: float  # if the rows of a batch are padded to the longest of them
    boundary: float  # if they are padded to the boundary of their bucket

    @classmethod
    def of(cls, planner: BucketBatchSampler, *, epoch: int) -> Self:
        """Measure the filler of the batches of one rank each; without rows that only fill up a batch."""
        tail = "drop" if planner.tail == "drop" else "partial"
        sample = sample_order(planner.with_ranks(rank=0, world_size=1, tail=tail), epoch=epoch)
        lengths = np.asarray(planner.lengths)[sample.indices]
        longest = np.zeros(len(sample.steps), np.int64)
        np.maximum.at(longest, sample.batches, lengths)
        boundaries = np.array(planner.boundaries)
        rows = np.bincount(sample.batches, minlength=len(longest))
        padded = [int(rows @ width) for width in (longest, boundaries[np.searchsorted(boundaries, longest)])]
        return cls(*(1 - int(lengths.sum()) / total if total else 0.0 for total in padded))


def judge_order(sample: OrderSample, following: OrderSample, shards: Shards) -> OrderReport:
    """Return the report on samples of an epoch and of the following one."""
    mixing, decay = _mixing(sample, shards)
    return OrderReport(
        epoch=sample.epoch,
        records=sample.records,
        positions=sample.length,
        steps=sample.epoch_steps,
        looked_at=len(sample.indices),
        sampled=not sample.whole,
        displacement=_displacement(sample),
        mixing=mixing,
        decay=decay,
        repeats=_repeats(sample, following),
        multiplicity=Multiplicity.of(sample.indices, sample.records, whole=sample.whole),
    )


def _displacement(sample: OrderSample) -> Displacement:
    at = (sample.positions + 0.5) / sample.length
    moved = displacements(sample)
    # The expectation depends on the position, between 1/4 and 1/2, which is not an error.
    error = _error(moved - (at**2 - at + 0.5), sample.batches * PLACES // len(sample.steps))
    found = np.quantile(moved, _QUANTILES).tolist()
    return Displacement(
        mean=Figure(found=float(moved.mean()), ideal=1 / 3, error=error),
        quantiles=tuple((q, value, 1 - math.sqrt(1 - q)) for q, value in zip(_QUANTILES, found, strict=True)),
    )


def _error(values: Float64Array, blocks: Int64Array) -> float:
    """Return the standard error of the mean of values that are dependent within blocks.

    It is estimated from differences of neighbouring blocks, so that a steady change over the epoch does not count as
    an error (von Neumann et al., "The mean square successive difference", 1941).
    """
    counts = np.bincount(blocks)
    present = counts > 0
    means = np.bincount(blocks, values)[present] / counts[present]
    if len(means) < 2:
        return float(values.std() / math.sqrt(len(values)))
    return float(np.sqrt(np.mean(np.diff(means) ** 2) / 2 / len(means)))


def _mixing(sample: OrderSample, shards: Shards) -> tuple[Mixing, Decay]:
    found = shards_per_batch(sample, shards)
    ideal = expected_shards(shards, np.bincount(sample.batches, minlength=len(sample.steps)))
    blocks = np.arange(len(found)) * PLACES // len(found)
    per_batch = Figure(found=float(found.mean()), ideal=float(ideal.mean()), error=_error(found - ideal, blocks))

    overall = float(found.sum() / ideal.sum())
    tenth = sample.steps * 10 // sample.epoch_steps

    def ratio(of: BoolArray) -> float | None:
        return float(found[of].sum() / ideal[of].sum()) if of.any() else None

    ratios = [ratio(tenth == t) for t in range(10)]
    middle = ratio((tenth == 4) | (tenth == 5))
    decay = Decay(
        tenths=tuple(None if value is None else value / overall for value in ratios),
        error=_error(found / ideal, blocks) / overall * math.sqrt(10),
        last_to_middle=None if ratios[-1] is None or middle is None else ratios[-1] / middle,
    )
    noun = "shards" if shards.files else "parts"
    return Mixing(shards=len(shards), noun=noun, per_batch=per_batch, middle=middle), decay


def _repeats(sample: OrderSample, following: OrderSample) -> Repeats:
    records, first = np.unique(sample.indices, return_index=True)
    next_records, next_first = np.unique(following.indices, return_index=True)
    _, here, there = np.intersect1d(records, next_records, assume_unique=True, return_indices=True)
    batch = sample.batches[first[here]]
    next_batch = following.batches[next_first]
    pairs = _pairs(batch)
    if not pairs:
        return Repeats(pairs=0, again=None)
    again = _pairs(batch * len(following.steps) + next_batch[there])
    ideal = _pairs(next_batch) / math.comb(len(next_batch), 2)
    return Repeats(
        pairs=pairs,
        again=Figure(found=again / pairs, ideal=ideal, error=math.sqrt(max(1, pairs * ideal)) / pairs),
    )


def _pairs(groups: Int64Array) -> int:
    """Return the number of pairs of elements in the same group."""
    counts = np.unique(groups, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())
