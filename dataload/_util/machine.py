"""The CPUs and the memory that this process may use, and how many CPUs it keeps busy."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from time import process_time
from typing import NamedTuple


class _ControlGroup(NamedTuple):
    """A control group."""

    directory: Path  # may not be visible in a container
    version: int  # 1 or 2; the names of the files differ


class _MemoryNames(NamedTuple):
    """Names in a memory control group."""

    limit: str  # a file
    used: str  # a file
    # Lines of its statistics that count pages of files, which are given up before memory runs out.
    cached: tuple[str, str]


_MEMORY_NAMES = {
    1: _MemoryNames("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: _MemoryNames("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def usable_cpus() -> int:
    """Return the number of CPUs that this process is bound to, or its control groups' quota, rounded up, if less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cgroup_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def cpu_demand() -> float:
    """Return the seconds that the threads of this process have used a CPU or waited for a busy one.

    Unlike CPU time alone, this tells work from waiting for storage or for the GIL on a busy machine as well. Where
    the system does not count the waits (Linux does), it is the CPU time. Takes some 10 us per thread.
    """
    waited = 0
    with suppress(OSError, ValueError, IndexError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                waited += int(_read(f"/proc/self/task/{thread}/schedstat").split()[1])
    return process_time() + 1e-9 * waited


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 100)
    finally:
        os.close(descriptor)


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs that the control groups of this process allow, or None if they set no limit."""
    quotas: list[float] = []
    for group, version in _control_groups("cpu", root):
        with suppress(OSError, ValueError, IndexError):  # not visible, or "max"
            if version == 2:
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process can still use: the machine's, or that of its control groups if less."""
    found: list[int] = []
    with suppress(OSError, ValueError, KeyError):
        found.append(_numbers(root / "proc/meminfo")["MemAvailable:"] * 1024)
    for group, version in _control_groups("memory", root):
        names = _MEMORY_NAMES[version]
        with suppress(OSError, ValueError, KeyError):  # not visible, or no limit
            limit, used = (int((group / name).read_text()) for name in (names.limit, names.used))
            statistics = _numbers(group / "memory.stat")
            found.append(max(0, limit - used + sum(statistics[name] for name in names.cached)))
    return min(found, default=1 << 62)


def _control_groups(controller: str, root: Path) -> Iterator[_ControlGroup]:
    """Yield the groups that limit this process, each before the groups around it, whose limits apply too."""
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
            # Controllers of one hierarchy share a directory, usually with a link for each.
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
