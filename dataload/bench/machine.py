"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from dataload._util.cpus import usable_cpus
from dataload.bench.peers.reading import versions

__all__ = ["describe_machine", "describe_versions"]

_PACKAGES = ("dataload", "numpy", "lmdb", "array-record", "pymongo", "protobuf", "simplejpeg", "torch")


def describe_machine() -> dict[str, Any]:
    """System, processor, CPUs that this process may use, bytes of memory."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cpus": usable_cpus(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
    }


def describe_versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Of Python and of those packages that are installed."""
    return {"python": platform.python_version(), **versions(*packages)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
