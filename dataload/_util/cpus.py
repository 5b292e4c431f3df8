"""How many CPUs this process may use, and how many it would."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from time import process_time

from dataload._util.cgroups import control_groups

__all__ = ["cgroup_quota", "cpu_demand", "usable_cpus"]


def usable_cpus() -> int:
    """CPUs that this process may use: those it is bound to, and no more than its control groups' quota, rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cgroup_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def cgroup_quota(membership: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float | None:
    """CPUs that the control groups of this process allow it; None where they do not limit it.

    A group's limit counts for all groups inside, so that the smallest on the way up is it.

    Args:
        membership: The file that names the groups, of both versions.
        root: Where they are mounted.
    """
    groups = control_groups("cpu", membership=Path(membership), root=Path(root))
    quotas = (_quota(group) if version == 2 else _old_quota(group) for group, version in groups)
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    words = _words(group / "cpu.max")
    return None if len(words) != 2 or words[0] == "max" else int(words[0]) / int(words[1])


def _old_quota(group: Path) -> float | None:
    quota, period = _words(group / "cpu.cfs_quota_us"), _words(group / "cpu.cfs_period_us")
    return None if not quota or not period or int(quota[0]) <= 0 else int(quota[0]) / int(period[0])


def _words(file: Path) -> list[str]:
    try:
        return file.read_text("ascii").split()
    except OSError:
        return []


def cpu_demand() -> float:
    """Seconds that the threads of this process computed so far, or waited for a CPU that others had.

    So it tells work from waiting for storage or for the GIL on a busy machine, too. Where the system does not tell
    how long threads waited (Linux does), it is what they computed. Takes some 10 us a thread.
    """
    waited = 0
    with suppress(OSError, ValueError, IndexError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                waited += int(_read(f"/proc/self/task/{thread}/schedstat").split()[1])
    return process_time() + 1e-9 * waited


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 100)
    finally:
        os.close(descriptor)
