"""The machine, the versions and the command that figures belong to."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import distributions
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
    found = ((package, next(iter(distributions(name=package)), None)) for package in packages)
    return {package: distribution.version for package, distribution in found if distribution is not None}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        text = ""
    names = re.findall(r"^model name\s*: (.+)", text, re.MULTILINE)
    return names[0] if names else platform.processor() or platform.machine()
