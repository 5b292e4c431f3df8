"""The machine, the versions and the command that figures belong to."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dataload._util.cpus import usable_cpus

_PACKAGES = ("dataload", "numpy", "lmdb", "array-record", "pymongo", "protobuf", "simplejpeg", "torch")


def describe_run(command: str) -> dict[str, Any]:
    """Return the fields of `Results` that describe the run: date, machine, versions and command."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": _processor(),
            "cpus": usable_cpus(),
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        },
        "versions": {"python": platform.python_version(), **versions(*_PACKAGES)},
        "command": command,
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
