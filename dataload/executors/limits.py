"""Checks of process and file-descriptor limits."""

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

_SPARE_DESCRIPTORS = 16


def check_parent(start_method: StartMethod) -> None:
    """Refuse to start workers if this process is a worker, or workers could not import its main module."""
    current = multiprocessing.current_process()
    if getattr(current, "_inheriting", False):
        raise ConfigError(f"a worker process tried to start workers: {GUARD}", key="executor", value="processes")
    if current.daemon:
        raise ConfigError(
            f"{current.name} is a daemonic process, which cannot start processes: use executor='threads' there",
            key="executor",
            value="processes",
        )
    main = sys.modules["__main__"]
    path: str | None = getattr(main, "__file__", None)
    if start_method == "fork" or path is None or getattr(main, "__spec__", None) is not None:
        return
    if not os.path.exists(os.path.join(getattr(multiprocessing_process, "ORIGINAL_DIR", None) or "", path)):
        raise ConfigError(
            f"worker processes import the main module, and the file {path} does not exist: save the program to a "
            "file, or use start_method='fork'",
            key="start_method",
            value=start_method,
        )


def within_descriptors(workers: int, slots: int) -> tuple[int, int]:
    """Return the numbers of workers and slots that the limit of open files allows, up to those requested."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        free = limit - len(os.listdir("/proc/self/fd"))
    except OSError:
        free = limit - 64
    left = max(0, free - _SPARE_DESCRIPTORS)
    fitting = min(workers, left // WorkerHandle.DESCRIPTORS)
    kept = min(slots, (left - fitting * WorkerHandle.DESCRIPTORS) // Slot.DESCRIPTORS)
    if limit == resource.RLIM_INFINITY or (fitting, kept) == (workers, slots):
        return workers, slots
    needed = workers * WorkerHandle.DESCRIPTORS + slots * Slot.DESCRIPTORS + _SPARE_DESCRIPTORS
    message = (
        f"{workers} worker processes and {slots} slots of shared memory need {needed} file descriptors, but "
        f"{free} of {limit} are free; raise the limit (ulimit -n)"
    )
    if not fitting:
        raise ConfigError(message, key="num_workers", value=workers)
    warnings.warn(
        f"{message}: using {fitting} workers and {kept} slots, and a pipe for other batches",
        RuntimeWarning,
        stacklevel=2,
    )
    return fitting, kept
