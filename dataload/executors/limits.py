"""What a process may have: workers at all, and open files."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import warnings
from multiprocessing import process as multiprocessing_process

from dataload.errors import ConfigError
from dataload.executors.base import StartMethod
from dataload.executors.handle import GUARD, WorkerHandle
from dataload.executors.shared_memory import Slot

__all__ = ["check_parent", "within_descriptors"]

_DESCRIPTORS_SPARED = 16


def check_parent(start_method: StartMethod) -> None:
    """See to it that this process may have workers.

    Raises:
        ConfigError: It is itself a worker, or is about to become one; or workers could not import what it runs.
    """
    current = multiprocessing.current_process()
    if getattr(current, "_inheriting", False):
        raise ConfigError(f"a worker process wants to start workers: {GUARD}", key="executor", value="processes")
    if current.daemon:
        raise ConfigError(
            f"{current.name} is a daemonic process, which may have no processes of its own: "
            "use executor='threads' there",
            key="executor",
            value="processes",
        )
    main = sys.modules["__main__"]
    path: str | None = getattr(main, "__file__", None)
    if start_method == "fork" or path is None or getattr(main, "__spec__", None) is not None:
        return
    if not os.path.exists(os.path.join(getattr(multiprocessing_process, "ORIGINAL_DIR", None) or "", path)):
        raise ConfigError(
            f"worker processes import the main module, and there is no file {path}: put the program into one, "
            "or use start_method='fork'",
            key="start_method",
            value=start_method,
        )


def within_descriptors(workers: int, slots: int) -> tuple[int, int]:
    """As many workers and slots as the limit of open files leaves room for.

    Raises:
        ConfigError: There is no room for a worker.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        free = limit - len(os.listdir("/proc/self/fd"))
    except OSError:
        free = limit - 64
    left = max(0, free - _DESCRIPTORS_SPARED)
    fitting = min(workers, left // WorkerHandle.DESCRIPTORS)
    kept = min(slots, (left - fitting * WorkerHandle.DESCRIPTORS) // Slot.DESCRIPTORS)
    if limit == resource.RLIM_INFINITY or (fitting, kept) == (workers, slots):
        return workers, slots
    needed = workers * WorkerHandle.DESCRIPTORS + slots * Slot.DESCRIPTORS + _DESCRIPTORS_SPARED
    message = (
        f"{workers} worker processes and {slots} slots of shared memory need {needed} file descriptors, and of "
        f"{limit} allowed {free} are free; raise the limit (ulimit -n)"
    )
    if not fitting:
        raise ConfigError(message, key="num_workers", value=workers)
    warnings.warn(
        f"{message}: {fitting} workers and {kept} slots are used, other batches sent through a pipe",
        RuntimeWarning,
        stacklevel=2,
    )
    return fitting, kept
