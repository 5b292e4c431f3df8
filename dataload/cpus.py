"""How many CPUs this process may use, and how many it would."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from time import process_time

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
    try:
        lines = Path(membership).read_text("ascii").splitlines()
    except (OSError, ValueError):
        return None
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += (q for group in _groups(Path(root), path) if (q := _quota(group / "cpu.max")) is not None)
        elif "cpu" in controllers.split(","):
            found += (q for group in _groups(Path(root, controllers), path) if (q := _old_quota(group)) is not None)
    return min(found, default=None)


def _groups(mount: Path, path: str) -> list[Path]:
    """The directories of a group and of those around it. In a container some may not be there to see."""
    inside = PurePosixPath(path.lstrip("/"))
    return [mount / group for group in (inside, *inside.parents)]


def _quota(file: Path) -> float | None:
    words = _words(file)
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
