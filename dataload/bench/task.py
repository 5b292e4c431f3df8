"""One measurement: the task that a process is given, the reading that it opens, and its answer. Pure (no I/O)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from dataload.errors import ConfigError
from dataload.types import Array, BytesColumn

Order: TypeAlias = Literal["global", "pool", "sequential"]
"""All records shuffled; shuffled shards behind a shuffle pool; the order in the file."""

Kind: TypeAlias = Literal["limit", "dataload", "peer"]
"""The subject of a measurement: the limit of the machine, this library, or another loader."""


MODULUS = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One measurement of the reader called `name`."""

    workload: str
    kind: Kind
    name: str
    reading: str  # ``"module:function"`` that makes its `Reading`
    path: str
    format: str
    order: Order
    workers: int  # threads or processes beside the consumer's thread
    batch_size: int
    seed: int = 0
    seconds: float = 2.0  # of the steady state; the warm-up takes at most as long
    whole: bool = True  # read the first epoch to its end for its checksum
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Reading:
    """An open reader of a task's data, made in the process that measures it; `held` is closed at the end.

    `batches` yields the batches of the epoch with a number; `columns` returns a batch's arrays or lists of bytes by
    field, without copying. `settings` are versions, threads and buffers, shown with the figures.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        batches: Callable[[int], Iterator[Any]],
        columns: Callable[[Any], Mapping[str, Any]] = lambda batch: batch,
        held: ExitStack | None = None,
    ) -> None:
        self.settings = settings
        self.batches = batches
        self.columns = columns
        self._held = held or ExitStack()

    def check(self, batch: Any) -> tuple[int, int, int]:
        """Return the records of a batch, their bytes and their checksum: the same small cost for all readers."""
        return check_batch(self.columns(batch))

    def close(self) -> None:
        """Drop the loader, which ends its workers, then close held resources."""
        self.batches: Callable[[int], Iterator[Any]] = _refuse
        self._held.close()


def _refuse(_: int) -> Iterator[Any]:
    raise ConfigError("this reading is closed: open another one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The figures of one process; figures of memory are None if unknown.

    `seconds` is time in the steady state, after the first epoch (or after `Task.seconds` of it). `records`, `nbytes`,
    `batches`, `cpu_seconds` (with children), `system_seconds` (the kernel's part of it) and `minor_faults` (that read
    nothing from a disk, with workers) are of this time. Resident bytes include workers. `checksum` is that of the first
    epoch, None unless it was read to its end; `first_touch_rate` is records per second after its first batch.
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
    batches: int
    system_seconds: float
    minor_faults: int
    first_touch_rate: float | None

    @property
    def records_per_second(self) -> float:
        """Rate in the steady state."""
        return self.records / self.seconds if self.seconds > 0 else 0.0


# A checksum shows that two readers read the same records, in any order and any batches.


def check_batch(batch: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the records of a batch, their bytes, and the sum of their checksums modulo 2^64."""
    # Only the first item and the size of each field count, which costs every reader the same little.
    rows = nbytes = total = 0
    for value in batch.values():
        if isinstance(value, np.ndarray) and value.dtype != object:
            column = cast("Array", value)
            rows, nbytes, total = len(column), nbytes + column.nbytes, total + _check_column(column)
        else:
            # The views of a column that makes `bytes` only on request cost no copy.
            items = list(value.views()) if isinstance(value, BytesColumn) else cast("Sequence[Any]", value)
            rows, nbytes = len(items), nbytes + sum(map(_size, items))
            total += sum(map(_check_value, items))
    return rows, nbytes, total % MODULUS


def check_record(record: Mapping[str, Any]) -> int:
    """Return the checksum of one record."""
    return sum(map(_check_value, record.values())) % MODULUS


def _check_column(column: Array) -> int:
    """Return the sum of `_check_value` over the rows of an array."""
    if not column.size:
        return 0
    first = np.ascontiguousarray(column.reshape(len(column), -1)[:, 0])
    return int(first.view(np.uint8).sum(dtype=np.uint64)) + column.nbytes


def _check_value(value: Any) -> int:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return len(value) + (value[0] if len(value) else 0)
    if isinstance(value, str):
        return len(value) + (ord(value[0]) if value else 0)
    array = np.asarray(value)
    return int(array.ravel()[:1].view(np.uint8).sum()) + array.nbytes if array.size else 0


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (bytes, bytearray, memoryview, str)) else int(np.asarray(value).nbytes)
