"""``python -m dataload.bench.child``: measure one task, in a process that does nothing else.

Reads a `Task` as JSON from standard input and writes an `Answer` as the last line of standard output.
"""

import dataclasses
import gc
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Self

from dataload.bench.task import MODULUS, Answer, Reading, Task

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
    batches = _epochs(reading)
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


def _epochs(reading: Reading) -> Iterator[tuple[int, Any]]:
    for epoch in count():
        batch = None
        for batch in reading.batches(epoch):
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


if __name__ == "__main__":
    main()
