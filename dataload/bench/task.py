"""One measurement: the task that a process is given, the reading that it opens, and the measuring.

`main` runs in a process that does nothing else. It reads a `Task` as JSON from standard input and writes an `Answer` as
the last line of standard output.
"""

import dataclasses
import gc
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

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


@dataclass
class Reading:
    """An open reader of a task's data, made in the process that measures it; `held` is closed at the end.

    `batches` yields the batches of the epoch with a number; `columns` returns a batch's arrays or lists of bytes by
    field, without copying. `settings` are versions, threads and buffers, shown with the figures.
    """

    settings: Mapping[str, Any]
    batches: Callable[[int], Iterator[Any]]
    columns: Callable[[Any], Mapping[str, Any]] = lambda batch: batch
    held: ExitStack = field(default_factory=ExitStack)

    def check(self, batch: Any) -> tuple[int, int, int]:
        """Return the records of a batch, their bytes and their checksum: the same small cost for all readers."""
        return check_batch(self.columns(batch))

    def close(self) -> None:
        """Drop the loader, which ends its workers, then close held resources."""
        self.batches = _refuse
        self.held.close()


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


_WHOLE_FACTOR = 20
_LEAST_WARM_UP = 0.25
"""Parts of `Task.seconds`."""


def measure(task: Task) -> Answer:
    """Open the data, warm up in the first epoch, take batches for about ``task.seconds``; return the figures."""
    begun = perf_counter()
    module, _, name = task.reading.partition(":")
    reading: Reading = getattr(importlib.import_module(module), name)(task)
    opened = perf_counter()
    try:
        return _take(task, reading, opened - begun, opened)
    finally:
        reading.close()


def _take(task: Task, reading: Reading, open_seconds: float, opened: float) -> Answer:
    batches = epochs_of(reading.batches)
    _, batch = next(batches)
    first_batch = perf_counter() - opened
    checksum = reading.check(batch)[2]
    del batch
    # The first epoch is read to its end for its checksum, unless that takes far too long.
    first = stretch(batches, reading.check, task.seconds * (_WHOLE_FACTOR if task.whole else 1), epochs=1)
    least = task.seconds * _LEAST_WARM_UP - first.seconds
    if least > 0:
        stretch(batches, reading.check, least)
    steady = stretch(batches, reading.check, task.seconds)
    return Answer(
        open_seconds=open_seconds,
        first_batch_seconds=first_batch,
        seconds=steady.seconds,
        records=steady.records,
        nbytes=steady.nbytes,
        cpu_seconds=steady.usage.user + steady.usage.system,
        peak_rss=_peak_rss(),
        cached_rss=_status(os.getpid(), "RssFile"),
        checksum=(checksum + first.checksum) % MODULUS if first.whole else None,
        settings=dict(reading.settings),
        batches=steady.batches,
        system_seconds=steady.usage.system,
        minor_faults=steady.usage.faults,
        first_touch_rate=first.records / first.seconds if first.records else None,
    )


class Usage(NamedTuple):
    """CPU seconds, and page faults without a read, of a process and all its children, ended or not."""

    user: float
    system: float
    faults: int

    def since(self, earlier: Self) -> Self:
        """Return the resources used since an earlier reading."""
        return type(self)(self.user - earlier.user, self.system - earlier.system, self.faults - earlier.faults)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Counts of some time; `whole` says whether it has ended with an epoch."""

    seconds: float
    records: int
    nbytes: int
    batches: int
    checksum: int
    whole: bool
    usage: Usage


def stretch(
    batches: Iterator[tuple[int, Any]],
    check: Callable[[Any], tuple[int, int, int]],
    seconds: float,
    epochs: float = math.inf,
) -> Stretch:
    """Take batches for some seconds, or to the end of an epoch; `check` returns records, bytes and checksum."""
    gc.collect()
    records = nbytes = steps = checksum = 0
    whole = False
    before, begun = used(), perf_counter()
    for epoch, batch in batches:
        if epoch >= epochs:
            whole = True
            break
        rows, size, found = check(batch)
        records, nbytes, steps, checksum = records + rows, nbytes + size, steps + 1, checksum + found
        if perf_counter() - begun > seconds:
            break
    return Stretch(perf_counter() - begun, records, nbytes, steps, checksum, whole, used().since(before))


def epochs_of(batches: Callable[[int], Iterable[Any]]) -> Generator[tuple[int, Any]]:
    """Yield the batches of one epoch after another, with the number of the epoch."""
    for epoch in count():
        batch = None
        for batch in batches(epoch):
            yield epoch, batch
        if batch is None:
            raise RuntimeError(f"the reading gave no batch in epoch {epoch}")


def used() -> Usage:
    """Return what this process and its children have used until now."""
    assert sys.platform != "win32", "Windows has no such figures"
    import resource

    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    user, system, faults = (
        sum(values) for values in zip(*((u.ru_utime, u.ru_stime, u.ru_minflt) for u in own), strict=True)
    )
    ticks = os.sysconf("SC_CLK_TCK")
    for pid in _descendants(os.getpid()):
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if fields:  # see proc(5): faults, user and system time, each of the process and of its ended children
            minor, of_children, in_user, in_system, *ended = map(int, (*fields[7:9], *fields[11:15]))
            user, system = user + (in_user + ended[0]) / ticks, system + (in_system + ended[1]) / ticks
            faults += minor + of_children
    return Usage(user, system, faults)


def _peak_rss() -> int | None:
    peaks = [_status(pid, "VmHWM") for pid in (os.getpid(), *_descendants(os.getpid()))]
    return sum(peak or 0 for peak in peaks) if peaks[0] is not None else None


def _descendants(pid: int) -> list[int]:
    # Each thread has its own list of the children that it started.
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in lists for child in _read(path).split()]
    return [*children, *(grandchild for child in children for grandchild in _descendants(child))]


def _status(pid: int, name: str) -> int | None:
    found = re.search(rf"^{name}:\s*(\d+) kB", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text("ascii", "replace")
    except OSError:  # another system, or a process that has ended
        return ""


def main() -> None:
    """Measure the task on standard input."""
    answer = measure(Task(**json.load(sys.stdin)))
    sys.stdout.write("\n" + json.dumps(dataclasses.asdict(answer)) + "\n")
