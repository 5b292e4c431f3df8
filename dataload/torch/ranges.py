"""The waits of a loader's consumer as ranges in profiles of training."""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.profiler import record_function

from dataload.telemetry.metrics import AnyLoader, loader_of


@contextmanager
def wait_ranges(loader: AnyLoader, name: str = "dataload.wait") -> Generator[None]:
    """Show the consumer's waits for batches in traces of torch's profiler, and with CUDA in those of Nsight Systems.

    They are ranges of ``record_function`` and NVTX, in each ``for`` that begins inside the ``with``.

    Args:
        loader: A `Loader`, `MultiStreamLoader`, `DataLoader` or `DeviceLoader`.
        name: Name of the ranges.

    Examples:
        >>> import dataload
        >>> loader = dataload.Loader(dataload.RangeSource(5), batch_size=3)
        >>> with torch.profiler.profile() as profile, wait_ranges(loader):
        ...     for batch in loader:
        ...         pass
        >>> [event.count for event in profile.key_averages() if event.key == "dataload.wait"]
        [2]
    """
    inner = loader_of(loader, "wait_ranges")
    before = inner._around  # pyright: ignore[reportPrivateUsage] # not for users: it runs at each step
    inner._around = functools.partial(_range, name)  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        inner._around = before  # pyright: ignore[reportPrivateUsage]


@contextmanager
def _range(name: str) -> Generator[None]:
    nvtx: Any = torch.cuda.nvtx if torch.cuda.is_available() else None  # without CUDA, it raises
    if nvtx is not None:
        nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if nvtx is not None:
            nvtx.range_pop()
