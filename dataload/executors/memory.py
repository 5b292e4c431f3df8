"""How much memory is left."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from dataload._util.cgroups import control_groups

__all__ = ["available_bytes"]


class _Names(NamedTuple):
    """What files and lines of a control group are called.

    Attributes:
        limit: The file with its limit.
        used: The file with what it uses.
        cached: Lines of its statistics with what it would give up before it runs out: pages of files.
    """

    limit: str
    used: str
    cached: tuple[str, str]


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_VERSION_2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could still use: the machine's, or that of its control groups if that is less.

    Args:
        root: Where /proc and /sys are looked for.
    """
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        found.append(_numbers(root / "proc/meminfo")["MemAvailable:"] * 1024)
    groups = control_groups("memory", membership=root / "proc/self/cgroup", root=root / "sys/fs/cgroup")
    for group, version in groups:
        names = _VERSION_2 if version == 2 else _VERSION_1
        with contextlib.suppress(OSError, ValueError, KeyError):  # it cannot be seen, or has no limit
            limit, used = (int((group / name).read_text()) for name in (names.limit, names.used))
            statistics = _numbers(group / "memory.stat")
            found.append(max(0, limit - used + sum(statistics[name] for name in names.cached)))
    return min(found, default=1 << 62)


def _numbers(path: Path) -> dict[str, int]:
    with path.open() as stream:
        return {words[0]: int(words[1]) for words in map(str.split, stream)}
