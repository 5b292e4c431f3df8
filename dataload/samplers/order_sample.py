"""Samples of an order for measuring its quality: runs of steps from the whole epoch. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dataload._util.randomness import derive_key, hash64
from dataload._util.settings import check_count
from dataload.errors import ConfigError
from dataload.samplers.batch import BatchPlanner, BatchSampler
from dataload.samplers.common import Float64Array, check_lengths
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
        return planner.sampler.indices(np.arange(bounds[0], bounds[-1]), epoch=epoch), np.diff(bounds)
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
    bits = hash64(derive_key(0, "order-sample", words=1)[0], np.arange(count)).tolist()
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
    occurring = np.unique(sample.batches * len(shards) + shard) // len(shards)
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
