"""A report on streams: the time that rows continue, and the filler in batches. Pure (no I/O)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from dataload.samplers._common import BoolArray
from dataload.samplers.order_sample import sample_order
from dataload.samplers.quality import Multiplicity
from dataload.samplers.streams.mixture import RowMixture
from dataload.samplers.streams.sampler import StreamSampler
from dataload.types import Int64Array

StreamPlanner: TypeAlias = StreamSampler | RowMixture
"""A batch sampler whose rows continue."""


@dataclass(frozen=True, slots=True, eq=False)
class Followed:
    """The content of the rows of all ranks at consecutive steps; see `Cells`."""

    stream_id: Int64Array
    offset: Int64Array
    is_first: BoolArray
    valid: BoolArray
    continues: BoolArray  # (rows,), False for rows of shuffled chunks


def follow(planner: StreamPlanner, steps: range, *, epoch: int = 0) -> Followed:
    """Return the content of all rows at consecutive steps of an epoch."""
    parts = _parts(planner)
    plans = planner.with_ranks(rank=0, world_size=1).plans(steps, epoch=epoch)
    columns = [plan.columns or {} for plan in plans]
    shape = len(steps), sum(part.rows for part in parts), parts[0].chunk
    return Followed(
        stream_id=np.array([column["stream_id"] for column in columns], np.int64).reshape(shape[:2]),
        offset=np.array([column["offset"] for column in columns], np.int64).reshape(shape[:2]),
        is_first=np.array([column["is_first"] for column in columns], np.bool_).reshape(shape),
        valid=np.array([plan.valid for plan in plans], np.bool_).reshape(shape),
        continues=np.repeat([part.mode != "shuffled" for part in parts], [part.rows for part in parts]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """A measurement of how rows follow sequences over an epoch, all ranks together.

    Attributes:
        epoch: Number of the epoch.
        steps: Steps in the epoch.
        rows: Rows per step.
        continuing: Rows per step that continue; the others hold shuffled chunks.
        chunk: Records per row and step.
        sequences: Sequences with records. For a `RowMixture`, those of its first part.
        shortest: Records of the shortest of these.
        longest: Records of the longest of these.
        looked_at: Steps that were measured.
        beginnings: Number of times a continuing row starts anew in these steps.
        run_steps: Mean steps from one start of a continuing row to the next. None without a start.
        run_records: Mean records from one start to the next. None without a start.
        per_batch: Mean number of different sequences in a step.
        filler: Fraction of the cells that hold no record.
        multiplicity: The number of times that records come.
    """

    epoch: int
    steps: int
    rows: int
    continuing: int
    chunk: int
    sequences: int
    shortest: int
    longest: int
    looked_at: int
    beginnings: int
    run_steps: float | None
    run_records: float | None
    per_batch: float
    filler: float
    multiplicity: Multiplicity

    @property
    def sampled(self) -> bool:
        """Whether only a sample of the steps was measured."""
        return self.looked_at < self.steps

    def to_json(self) -> dict[str, Any]:
        """Return the report for `json.dumps`, with the verdict on multiplicity."""
        multiplicity = {**asdict(self.multiplicity), "verdict": self.multiplicity.verdict}
        return {**asdict(self), "multiplicity": multiplicity, "sampled": self.sampled}


def stream_report(planner: StreamPlanner, *, epoch: int = 0) -> StreamReport:
    """Measure how rows follow sequences over an epoch, or over a sample of a long one.

    Args:
        planner: The planner of any rank.
        epoch: Number of the epoch, from 0.

    Raises:
        ConfigError: The epoch has no steps.

    Example:
        >>> from dataload.streams import StreamSampler
        >>> report = stream_report(StreamSampler(sequence_lengths=[6, 2, 4], rows=2, mode="pack"))
        >>> report.beginnings, report.run_steps, report.filler
        (3, 4.0, 0.0)
    """
    sample = sample_order(planner, epoch=epoch)
    runs = np.split(sample.steps, np.flatnonzero(np.diff(sample.steps) > 1) + 1)
    looks = [follow(planner, range(int(run[0]), int(run[-1]) + 1), epoch=epoch) for run in runs]
    stream_id = np.concatenate([look.stream_id for look in looks])
    valid = np.concatenate([look.valid for look in looks])
    continues = looks[0].continues
    beginnings = sum(int(np.count_nonzero(look.is_first[:, continues])) for look in looks)
    visited = int(np.count_nonzero(valid[:, continues].any(axis=2)))
    records = int(np.count_nonzero(valid[:, continues]))
    first = _parts(planner)[0]
    lengths = np.asarray(first.sequence_lengths)
    lengths = lengths[lengths > 0]
    return StreamReport(
        epoch=epoch,
        steps=sample.epoch_steps,
        rows=len(continues),
        continuing=int(continues.sum()),
        chunk=first.chunk,
        sequences=len(lengths),
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        looked_at=len(stream_id),
        beginnings=beginnings,
        run_steps=visited / beginnings if beginnings else None,
        run_records=records / beginnings if beginnings else None,
        per_batch=float(_distinct(stream_id).mean()),
        filler=float(1 - valid.mean()),
        multiplicity=Multiplicity.of(sample.indices, planner.records, whole=sample.whole),
    )


def _parts(planner: StreamPlanner) -> tuple[StreamSampler, ...]:
    return planner.parts if isinstance(planner, RowMixture) else (planner,)


def _distinct(stream_id: Int64Array) -> Int64Array:
    """Return the number of different sequences in each step, (steps,) int64."""
    ordered = np.sort(stream_id, axis=1)
    return (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1) + 1 - (ordered[:, 0] < 0)
