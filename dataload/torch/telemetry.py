"""The statistics of all ranks on one of them, and the consumer's waits as ranges in profiles of training."""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.autograd.profiler import record_function

from dataload.errors import DataloadError
from dataload.loader.statistics import WAITS, Statistics
from dataload.telemetry import AnyLoader, loader_of
from dataload.torch.ranks import gather


@dataclass(frozen=True, slots=True, repr=False)
class RankStatistics:
    """The work of the loaders of all ranks; `print` shows a table.

    Attributes:
        ranks: The statistics of each process of the job, by its number.
    """

    ranks: dict[int, Statistics]

    @property
    def slowest(self) -> int | None:
        """The process that waits longest for a batch; None if none waits 5% of its time."""
        waiting = {rank: _wait(found) for rank, found in self.ranks.items() if found.wait_share >= WAITS}
        return max(waiting, key=waiting.__getitem__, default=None)

    @property
    def verdict(self) -> str:
        """One line that names the slowest rank and its reason."""
        slowest = self.slowest
        if slowest is None:
            return "no rank waits for data"
        found = self.ranks[slowest]
        return f"rank {slowest} is the slowest, with {1e3 * _wait(found):,.1f} ms a batch; {found.verdict}"

    def __str__(self) -> str:
        lines = [f"{'rank':>6} {'batches':>9} {'rows/s':>10} {'waits':>6} {'ms/batch':>9} {'ready':>6}  work in"]
        for rank, found in sorted(self.ranks.items()):
            lines.append(
                f"{rank:>6} {found.steps:>9,} {found.rows_per_second:>10,.0f} {found.wait_share:>6.0%} "
                f"{1e3 * _wait(found):>9,.1f} {found.depth:>6.1f}  {found.where}"
            )
        return "\n".join([*lines, self.verdict])

    def __repr__(self) -> str:
        return f"RankStatistics({len(self.ranks)} ranks; {self.verdict})"


def _wait(found: Statistics) -> float:
    """Return the seconds that a consumer waits for a batch other than the first."""
    return (found.wait_seconds - found.first_wait_seconds) / max(1, found.steps)


def statistics(loader: AnyLoader, *, since: Statistics | None = None, group: Any = None) -> RankStatistics | None:
    """Return the statistics of all ranks on rank 0, and None on others. All ranks must call it, at the same point.

    It tells which rank makes the others wait. The timeout of the process group applies.

    Args:
        loader: The loader of this process.
        since: Earlier ``loader.statistics()`` of this process; by default the table covers the time since the loader
            was built.
        group: A process group or `DeviceMesh`, by default all processes. Its first process gets the table.

    Raises:
        DataloadError: Another process has ended, or does not call this function.

    Examples:
        >>> import dataload
        >>> loader = dataload.Loader(dataload.RangeSource(5), batch_size=3)
        >>> [len(batch["index"]) for batch in loader]
        [3, 2]
        >>> statistics(loader).ranks[0].rows
        5
    """
    found = loader_of(loader, "statistics").statistics()
    found = found if since is None else found.since(since)
    if not (distributed.is_available() and distributed.is_initialized()):
        return RankStatistics({0: found})
    rank = distributed.get_rank()
    try:
        ranks = dict(gather((rank, found), group))
    except RuntimeError as error:
        raise DataloadError(
            f"the statistics of all ranks could not be gathered: a process has ended, or does not call this ({error})"
        ) from error
    return RankStatistics(ranks) if rank == min(ranks) else None


@contextmanager
def wait_ranges(loader: AnyLoader, name: str = "dataload.wait") -> Generator[None]:
    """Mark waits for batches in traces of torch's profiler and, with CUDA, of Nsight Systems.

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
