"""The CPUs, memory and threads of this process, and the CPUs that it keeps busy."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from time import process_time
from typing import NamedTuple

from dataload._util.system import usable_cores


class _ControlGroup(NamedTuple):
    directory: Path  # may be invisible in a container
    version: int  # 1 or 2; they differ in file names


class _MemoryNames(NamedTuple):
    """Names in a memory control group."""

    limit: str  # a file
    used: str  # a file
    # Counters of file pages, which the system frees before memory runs out.
    cached: tuple[str, str]


_MEMORY_NAMES = {
    1: _MemoryNames("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: _MemoryNames("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def usable_cpus() -> int:
    """Return the CPUs that this process may use: its affinity, or its control groups' quota if smaller, rounded up."""
    count = usable_cores()
    quota = cgroup_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def cpu_demand() -> float:
    """Return seconds that this process's threads used a CPU or (on Linux) waited for one; takes 10 us a thread."""
    waited = 0
    with suppress(OSError, ValueError, IndexError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                waited += int(_read(f"/proc/self/task/{thread}/schedstat").split()[1])
    return process_time() + 1e-9 * waited


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 100)
    finally:
        os.close(descriptor)


def is_single_threaded() -> bool:
    """Return whether a fork is safe: this process has one thread. Threads of OpenBLAS do not count.

    OpenBLAS ends its threads before a fork and starts others later. Without `/proc` the answer is False.
    """
    with suppress(OSError):
        threads = len(os.listdir("/proc/self/task"))
        return threads == 1 or (threading.active_count() == 1 and threads <= 1 + _threads_of_openblas())
    return False


def _threads_of_openblas() -> int:
    """Return the threads that the libraries of numpy and scipy keep beside this process's own."""
    found = 0
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in paths:
        with suppress(OSError):  # it was replaced
            library = ctypes.CDLL(path)
            for before, after in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
                count = getattr(library, f"{before}openblas_get_num_threads{after}", None)
                # 1 means its own threads. OpenMP's threads do not survive a fork.
                if count is not None and getattr(library, f"{before}openblas_get_parallel{after}")() == 1:
                    found += count() - 1
                    break
    return found


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process's control groups, or None without a limit."""
    quotas: list[float] = []
    for group, version in _control_groups("cpu", root):
        with suppress(OSError, ValueError, IndexError):  # invisible, or "max"
            if version == 2:
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory still available to this process: the machine's or its control groups', if less."""
    found: list[int] = []
    with suppress(OSError, ValueError, KeyError):
        found.append(_numbers(root / "proc/meminfo")["MemAvailable:"] * 1024)
    for group, version in _control_groups("memory", root):
        names = _MEMORY_NAMES[version]
        with suppress(OSError, ValueError, KeyError):  # invisible, or no limit
            limit, used = (int((group / name).read_text()) for name in (names.limit, names.used))
            statistics = _numbers(group / "memory.stat")
            found.append(max(0, limit - used + sum(statistics[name] for name in names.cached)))
    return min(found, default=1 << 62)


def _control_groups(controller: str, root: Path) -> Iterator[_ControlGroup]:
    """Yield the control groups that limit this process, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_bytes().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = os.fsdecode(line).split(":", 2)
        if not controllers:
            mount, version = mounts, 2
        elif controller in controllers.split(","):
            # The controllers of a hierarchy share a directory, usually linked under each name.
            shared = mounts / controllers
            mount, version = shared if shared.is_dir() else mounts / controller, 1
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            yield _ControlGroup(mount / group, version)


def _numbers(path: Path) -> dict[str, int]:
    with path.open() as stream:
        return {words[0]: int(words[1]) for words in map(str.split, stream)}
