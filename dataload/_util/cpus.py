"""How many CPUs this process may use, and how many it keeps busy."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from time import process_time

from dataload._util.cgroups import cgroup_quota


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
