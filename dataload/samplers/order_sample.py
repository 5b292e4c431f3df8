"""What one looks at to judge an order: runs of steps from all over an epoch, and shards to mix. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dataload._util.randomness import derive_key, hash64
from dataload.errors import ConfigError
from dataload.samplers._checks import check_count, check_lengths
from dataload.samplers.batch import BatchPlanner, BatchSampler
from dataload.types import Int64Array

__all__ = [
    "PLACES",
    "WHOLE_UP_TO",
    "Float64Array",
    "GlobalBatches",
    "OrderSample",
    "Shards",
    "displacements",
    "expected_shards",
    "sample_order",
    "shards_per_batch",
]

WHOLE_UP_TO = 2**20
"""Positions up to which an epoch is looked at as a whole."""

PLACES = 20
"""Places at which a longer one is: two in each tenth, for each costs a pool shuffle the way back to all its slots."""

Float64Array = npt.NDArray[np.float64]

_SAMPLED_ROWS = 2**18
_PARTS = 100
_SIZES = 33  # batch sizes for which an expectation is computed; those in between are interpolated
_FACTORS = 256


class GlobalBatches:
    """The batches of all ranks together.

    Args:
        planner: The plan of any of the ranks.
    """

    def __init__(self, planner: BatchPlanner) -> None:
        self._planner = planner
        # A plan of one rank, of which `world_size` steps are one of all ranks. No fillers: those are a rank's.
        tail = "drop" if planner.tail == "drop" else "partial"
        self._alone = planner.with_ranks(rank=0, world_size=1, tail=tail) if planner.world_size > 1 else planner

    def rows(self, steps: range, *, epoch: int) -> tuple[Int64Array, Int64Array]:
        """The rows of consecutive steps.

        Args:
            steps: Steps of step size 1, within [0, planner.steps(epoch)).
            epoch: 0, 1, 2, ...

        Returns:
            (rows,) int64, indices, step after step; and (steps,) int64, how many rows each step has.
        """
        planner = self._planner
        if isinstance(planner, BatchSampler):  # saves an object for each step
            bounds = planner.origin + np.arange(steps.start, steps.stop + 1) * planner.global_batch_size
            bounds = np.minimum(bounds, planner.items(epoch))
            return planner.sampler.indices(np.arange(bounds[0], bounds[-1]), epoch=epoch), np.diff(bounds)
        size = planner.step_size // self._alone.step_size
        parts = range(steps.start * size, min(steps.stop * size, self._alone.steps(epoch)))
        plans = self._alone.plans(parts, epoch=epoch)
        rows = [plan.wanted for plan in plans]
        counts = np.zeros(len(steps), np.int64)
        np.add.at(counts, np.arange(len(parts)) // size, [len(part) for part in rows])
        return np.concatenate([np.empty(0, np.int64), *rows]), counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderSample:
    """Runs of consecutive steps from all over one epoch, all ranks together; or all of its steps.

    Attributes:
        epoch: Number of the epoch.
        whole: Whether these are all its steps.
        epoch_steps: Steps of the epoch.
        length: Positions of the epoch.
        records: Indices are below this.
        steps: (batches,) int64, numbers of the steps, rising.
        batches: (rows,) int64, place in `steps` of each row's step.
        positions: (rows,) int64, estimated where batches differ in size and not all are looked at.
        indices: (rows,) int64.
    """

    epoch: int
    whole: bool
    epoch_steps: int
    length: int
    records: int
    steps: Int64Array
    batches: Int64Array
    positions: Int64Array
    indices: Int64Array


def sample_order(planner: BatchPlanner, *, epoch: int = 0) -> OrderSample:
    """Look at an epoch: at all of it up to `WHOLE_UP_TO` positions, else at 20 places, the same for each epoch.

    Args:
        planner: The plan of any of the ranks.
        epoch: 0, 1, 2, ...

    Raises:
        ConfigError: The epoch has no step.
    """
    check_count("epoch", epoch, least=0)
    total, items = planner.steps(epoch), planner.items(epoch)
    if not total:
        raise ConfigError("the order has no step: there is nothing to judge", key="sampler", value=planner.order)
    rows = planner.rows_per_step * planner.world_size
    whole = total * rows <= WHOLE_UP_TO
    runs = [range(total)] if whole else _runs(total, rows)
    length = items if isinstance(planner, BatchSampler) else planner.records
    batches = GlobalBatches(planner)
    indices, counts = zip(*(batches.rows(run, epoch=epoch) for run in runs), strict=True)
    firsts = [planner.position(run.start, epoch=epoch) * length // items for run in runs]
    sizes = np.concatenate(counts)
    return OrderSample(
        epoch=epoch,
        whole=whole,
        epoch_steps=total,
        length=sum(map(len, indices)) if whole and not isinstance(planner, BatchSampler) else length,
        records=planner.records,
        steps=np.concatenate([np.arange(run.start, run.stop) for run in runs]),
        batches=np.repeat(np.arange(len(sizes)), sizes),
        positions=np.concatenate(
            [np.arange(first, first + len(run)) for first, run in zip(firsts, indices, strict=True)]
        ),
        indices=np.concatenate(indices),
    )


def _runs(total: int, rows: int) -> list[range]:
    """Equally long runs of steps, one from each of as many equal parts of the epoch."""
    length = min(max(1, _SAMPLED_ROWS // (PLACES * rows)), max(1, total // PLACES))
    count = min(PLACES, total)
    # Not at equal distances, which may be those of shards or lanes.
    bits = hash64(derive_key(0, "order-sample", words=1)[0], np.arange(count)).tolist()
    runs: list[range] = []
    for i in range(count):
        start, stop = i * total // count, (i + 1) * total // count
        first = start + bits[i] % (stop - start - length + 1)
        runs.append(range(first, first + length))
    return runs


def displacements(sample: OrderSample) -> Float64Array:
    """(rows,) float64 in [0, 1): how far each record stands from where it stood.

    Places count as fractions, ``|index / records - position / positions|``, so that an epoch may be shorter or longer
    than the data.
    """
    return np.abs((sample.indices + 0.5) / sample.records - (sample.positions + 0.5) / sample.length)


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Consecutive parts of the index range, whose mixing is measured.

    Attributes:
        ends: (shards,) int64, the index behind the last record of each.
        files: Whether they are the data's own, and not equal parts in their place.
    """

    ends: Int64Array
    files: bool

    @classmethod
    def of(cls, records: int, shard_lengths: Sequence[int] | None = None) -> Shards:
        """The shards of the first `records` records, or 100 equal parts where there is but one shard.

        Raises:
            ConfigError: `shard_lengths` are no numbers of records.
        """
        if shard_lengths is not None:
            ends = np.minimum(np.cumsum(check_lengths("shard_lengths", shard_lengths)), records)
            ends = ends[np.diff(ends, prepend=0) > 0]
            if len(ends) > 1:
                return cls(ends, files=True)
        parts = max(1, min(_PARTS, records))
        return cls(np.arange(1, parts + 1) * records // parts, files=False)

    @property
    def lengths(self) -> Int64Array:
        """(shards,) int64, records of each."""
        return np.diff(self.ends, prepend=0)

    @property
    def noun(self) -> str:
        """What they are called."""
        return "shards" if self.files else "parts"

    def __len__(self) -> int:
        return len(self.ends)


def shards_per_batch(sample: OrderSample, shards: Shards) -> Int64Array:
    """(batches,) int64: from how many shards the rows of each batch come."""
    shard = np.searchsorted(shards.ends, sample.indices, side="right")
    occurring = np.unique(sample.batches * len(shards) + shard) // len(shards)
    return np.bincount(occurring, minlength=len(sample.steps))


def expected_shards(shards: Shards, sizes: Int64Array) -> Float64Array:
    """From how many shards batches come on average, when each is drawn from all records without replacement.

    Args:
        shards: Which shards.
        sizes: (batches,) int64, rows of each batch.

    Returns:
        (batches,) float64.
    """
    lengths, times = np.unique(shards.lengths, return_counts=True)
    known = np.unique(sizes)
    if len(known) > _SIZES:
        known = np.unique(np.geomspace(known[0], known[-1], _SIZES).round().astype(np.int64))
    found = [float((times * -np.expm1(_log_missed(lengths, int(shards.ends[-1]), size))).sum()) for size in known]
    return np.interp(sizes, known, found)


def _log_missed(lengths: Int64Array, records: int, size: int) -> Float64Array:
    """Logarithm of the probability that none of `size` records, drawn without replacement, is of a shard."""
    # The product of (1 - length / (records - i)) for i < size: factor by factor, or in so many runs of almost
    # equal ones.
    cuts = np.unique(np.linspace(0, min(size, records), _FACTORS + 1).astype(np.int64)).tolist()
    total = np.zeros(len(lengths))
    with np.errstate(divide="ignore"):  # a shard that cannot be missed
        for start, stop in pairwise(cuts):
            middle = (start + stop - 1) / 2
            total += (stop - start) * np.log1p(-np.minimum(1, lengths / (records - middle)))
    return total
