"""One measurement: what a process of its own is told to do, and what it answers. Pure (no I/O)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeAlias

__all__ = ["Answer", "Kind", "Order", "Reading", "Task"]

Order: TypeAlias = Literal["global", "pool", "sequential"]
"""All records shuffled; shards shuffled behind a pool; as they lie."""

Kind: TypeAlias = Literal["limit", "dataload", "peer"]
"""What a measurement is of: the machine, this library, or another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one process measures.

    Attributes:
        workload: Name of the workload, see `dataload.bench.workloads`.
        kind: What it is of.
        name: Who reads: ``"Loader"``, ``"np.take"``, ``"Grain"``.
        reading: ``"module:function"``, a function of this task that gives a `Reading`.
        path: The data, in `format`.
        format: Name of the format.
        order: The order.
        workers: Threads or processes beside the consumer's thread.
        batch_size: Records per batch.
        seed: Of the order.
        seconds: Batches are taken for about as long.
        whole: Whether the first epoch is read to its end, even if it takes longer, for its checksum.
        cold: Whether to drop the files from the page cache first.
        options: Of the reading; shown with the figures.
    """

    workload: str
    kind: Kind
    name: str
    reading: str
    path: str
    format: str
    order: Order
    workers: int
    batch_size: int
    seed: int = 0
    seconds: float = 2.0
    whole: bool = True
    cold: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave."""
        return cls(**values)


class Reading(Protocol):
    """Reads the data of a task: made by ``Task.reading``, in the process that measures."""

    settings: Mapping[str, Any]
    """What was set, to be shown with the figures: versions, threads, buffers."""

    def batches(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch. Opening counts apart: it is what making the reading costs."""
        ...

    def check(self, batch: Any) -> tuple[int, int, int]:
        """Records of a batch, their bytes, and the sum of their checksums modulo 2^64 (see `workloads`).

        Runs inside the measured time, on every batch, so it is cheap and the same work for all readings.
        """
        ...

    def close(self) -> None:
        """Let go of files and workers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one process measured.

    Attributes:
        open_seconds: To make the reading.
        first_batch_seconds: From then to the first batch.
        seconds: From the first batch to the last.
        records: Records after the first batch.
        nbytes: Bytes of these.
        cpu_seconds: CPU time of this process and its children meanwhile, user and system.
        peak_rss: Most resident bytes, workers included; None where the system does not tell.
        cached_rss: Of the resident bytes at the end, those of mapped files; None where the system does not tell.
        checksum: Sum over the records of the first epoch, where that was read as a whole; else None.
        settings: Of the reading.
    """

    open_seconds: float
    first_batch_seconds: float
    seconds: float
    records: int
    nbytes: int
    cpu_seconds: float
    peak_rss: int | None
    cached_rss: int | None
    checksum: int | None
    settings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave."""
        return cls(**values)

    @property
    def records_per_second(self) -> float:
        """Rate behind the first batch."""
        return self.records / self.seconds if self.seconds > 0 else 0.0
