"""The limits that Linux control groups set for this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
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
