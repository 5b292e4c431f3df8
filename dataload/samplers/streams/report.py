"""A report on streams: the time that rows continue, and the filler in batches. Pure (no I/O)."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from dataload.samplers.common import BoolArray
from dataload.samplers.quality import Multiplicity, as_json, sample_order
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
    """A measurement of how rows follow sequences over an epoch, all ranks together."""

    epoch: int
    steps: int  # in the epoch
    rows: int  # per step
    continuing: int  # rows per step that continue; the others hold shuffled chunks
    chunk: int  # records per row and step
    sequences: int  # with records; of the first part of a `RowMixture`
    shortest: int  # records of the shortest of these
    longest: int  # records of the longest of these
    looked_at: int  # steps that were measured
    beginnings: int  # number of times that a continuing row starts a sequence in these steps
    run_steps: float | None  # mean steps from one start of a continuing row to the next; None without a start
    run_records: float | None  # mean records from one start to the next; None without a start
    per_batch: float  # mean number of different sequences in a step
    filler: float  # fraction of the cells that hold no record
    multiplicity: Multiplicity

    @property
    def sampled(self) -> bool:
        """Whether only a sample of the steps was measured."""
        return self.looked_at < self.steps

    def to_json(self) -> dict[str, Any]:
        """Return the report for `json.dumps`, with the verdict on multiplicity."""
        return {**as_json(self), "sampled": self.sampled}


def stream_report(planner: StreamPlanner, *, epoch: int = 0) -> StreamReport:
    """Measure how rows follow sequences over an epoch, or over a sample of a long one.

    Examples:
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
    ordered = np.sort(stream_id, axis=1)
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1) + 1 - (ordered[:, 0] < 0)
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
        per_batch=float(distinct.mean()),
        filler=float(1 - valid.mean()),
        multiplicity=Multiplicity.of(sample.indices, planner.records, whole=sample.whole),
    )


def _parts(planner: StreamPlanner) -> tuple[StreamSampler, ...]:
    return planner.parts if isinstance(planner, RowMixture) else (planner,)
