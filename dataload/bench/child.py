"""``python -m dataload.bench.child``: measure one task, in a process that does nothing else.

Reads a `Task` as JSON from standard input and writes an `Answer` as the last line of standard output.
"""

import dataclasses
import gc
import importlib
import json
import os
import re
import resource
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from dataload.bench.task import MODULUS, Answer, Reading, Task


def measure(task: Task) -> Answer:
    """Open the data, take batches for about ``task.seconds``, and return the figures.

    The rate leaves out the first batch, which includes the start of the workers.
    """
    if task.cold:
        drop_cached(task.path)
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
    started = perf_counter()
    _, _, checksum = reading.check(batch)
    whole = None
    del batch
    gc.collect()
    cpu = _cpu_seconds()
    begun = perf_counter()
    total = bytes_read = 0
    for epoch, batch in batches:
        if epoch and whole is None:
            whole = checksum
        rows, size, found = reading.check(batch)
        total, bytes_read = total + rows, bytes_read + size
        if not epoch:
            checksum = (checksum + found) % MODULUS
        # The first epoch is read to its end for its checksum, unless that takes far too long.
        if perf_counter() - begun > task.seconds * (20 if task.whole and not epoch else 1):
            break
    ended = perf_counter()
    return Answer(
        open_seconds=open_seconds,
        first_batch_seconds=started - opened,
        seconds=ended - begun,
        records=total,
        nbytes=bytes_read,
        cpu_seconds=_cpu_seconds() - cpu,
        peak_rss=_peak_rss(),
        cached_rss=_status(os.getpid(), "RssFile"),
        checksum=whole,
        settings=dict(reading.settings),
    )


def _epochs(reading: Reading) -> Iterator[tuple[int, Any]]:
    for epoch in count():
        batch = None
        for batch in reading.batches(epoch):
            yield epoch, batch
        if batch is None:
            raise RuntimeError(f"the reading gave no batch in epoch {epoch}")


def drop_cached(path: str) -> None:
    """Drop a file, or the files of a directory, from the page cache. Needs no rights; mapped pages stay."""
    if not path:
        return
    for file in filter(Path.is_file, (Path(path), *Path(path).rglob("*"))):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of all its children, ended or not."""
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ticks = os.sysconf("SC_CLK_TCK")
    for pid in _descendants(os.getpid()):
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        used += sum(map(int, fields[11:15])) / ticks if fields else 0.0
    return used


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
