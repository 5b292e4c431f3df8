"""What rows follow over an epoch: how long they continue, and how much only fills them up. Pure (no I/O)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from dataload.samplers.order_sample import sample_order
from dataload.samplers.quality import Multiplicity
from dataload.samplers.streams.cells import BoolArray
from dataload.samplers.streams.mixture import RowMixture
from dataload.samplers.streams.sampler import StreamSampler
from dataload.types import Int64Array

__all__ = ["Followed", "StreamPlanner", "StreamReport", "follow", "stream_report"]

StreamPlanner: TypeAlias = StreamSampler | RowMixture
"""What plans rows that continue."""


@dataclass(frozen=True, slots=True, eq=False)
class Followed:
    """What the rows of all ranks have at some consecutive steps.

    Attributes:
        stream_id: (steps, rows) int64, -1 for a row without any record.
        offset: (steps, rows) int64.
        is_first: (steps, rows, chunk) bool.
        valid: (steps, rows, chunk) bool.
        continues: (rows,) bool, False for rows that take chunks from anywhere.
    """

    stream_id: Int64Array
    offset: Int64Array
    is_first: BoolArray
    valid: BoolArray
    continues: BoolArray


def follow(planner: StreamPlanner, steps: range, *, epoch: int = 0) -> Followed:
    """Look at some steps of an epoch.

    Args:
        planner: The plan of any of the ranks.
        steps: Steps of step size 1, within [0, planner.steps(epoch)).
        epoch: 0, 1, 2, ...
    """
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
    """What rows follow over an epoch, all ranks together.

    Attributes:
        epoch: The epoch that was looked at.
        steps: Of the epoch.
        rows: Of a step.
        continuing: How many of them continue; the others take chunks from anywhere.
        chunk: Records per row and step.
        sequences: How many have records; of a `RowMixture` those of its first part.
        shortest: Records of the shortest of them.
        longest: Records of the longest.
        looked_at: Steps that the figures rest on.
        beginnings: How often a row that continues begins anew there.
        run_steps: Steps from one beginning to the next, mean of the rows that continue; None if none begins.
        run_records: Records from one to the next.
        per_batch: Different sequences that the rows of a step follow, mean.
        filler: Share of the places that hold no record.
        multiplicity: How often records come.
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
        """Whether not all steps were looked at."""
        return self.looked_at < self.steps

    def to_json(self) -> dict[str, Any]:
        """All of it for `json.dumps`, with the verdict on multiplicity."""
        multiplicity = {**asdict(self.multiplicity), "verdict": self.multiplicity.verdict}
        return {**asdict(self), "multiplicity": multiplicity, "sampled": self.sampled}


def stream_report(planner: StreamPlanner, *, epoch: int = 0) -> StreamReport:
    """What rows follow over an epoch; a long one is sampled.

    Args:
        planner: The plan of any of the ranks.
        epoch: 0, 1, 2, ...

    Raises:
        ConfigError: The epoch has no step.

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
    """(steps,) int64, how many sequences the rows of each step follow."""
    ordered = np.sort(stream_id, axis=1)
    return (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1) + 1 - (ordered[:, 0] < 0)
