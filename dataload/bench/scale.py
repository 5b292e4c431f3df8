"""Costs against the number of records, shards and ranks. The largest sizes exist in the index plane only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dataload._util.indexing import even_split
from dataload.api import create, open_source
from dataload.bench.results import Curve
from dataload.bench.timing import median_seconds, peak_bytes
from dataload.loader.loader import Loader
from dataload.samplers import BatchSampler, GlobalShuffle, PoolShuffle, Sequential, ShardSequential
from dataload.sources.range import RangeSource
from dataload.types import Sampler

_BLOCK = 16_384
_SHARD_RECORDS = 65_536
_BATCH = 256


def measure_scale(
    directory: Path,
    *,
    ordered: Sequence[int] = tuple(10**power for power in range(3, 11)),
    loaded: Sequence[int] = tuple(10**power for power in range(3, 9)),
    shards: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    ranks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    records_of_ranks: int = 10**8,
) -> tuple[Curve, ...]:
    """Measure all curves, in about a minute.

    Args:
        directory: Directory for small files.
        ordered: Numbers of records for orders.
        loaded: Numbers of records for loaders.
        shards: Numbers of files.
        ranks: Numbers of ranks.
        records_of_ranks: Number of records that the ranks share.
    """
    return *_orders(ordered), _loader(loaded), *_shards(shards, directory), _ranks(ranks, records_of_ranks)


class _Lines(defaultdict[str, list[tuple[float, float]]]):
    """The lines of a curve while it is measured."""

    def __init__(self) -> None:
        super().__init__(list)

    def curve(self, title: str, x_label: str, y_label: str) -> Curve:
        return Curve(title, x_label, y_label, {name: tuple(points) for name, points in self.items()})


def _samplers(records: int) -> Mapping[str, Callable[[], Sampler]]:
    def shards() -> ShardSequential:
        parts = even_split(records, max(1, records // _SHARD_RECORDS))
        return ShardSequential(tuple(stop - start for start, stop in parts), 0)

    return {
        "sequential": lambda: Sequential(records),
        "global": lambda: GlobalShuffle(records, 0),
        "shards, pool of 1,024": lambda: PoolShuffle(shards(), 1024, 0),
    }


def _orders(sizes: Sequence[int]) -> tuple[Curve, Curve]:
    """Measure nanoseconds and bytes of orders, for a block in the middle of the epoch."""
    times, memory = _Lines(), _Lines()
    for records in sizes:
        positions = np.arange(min(_BLOCK, records)) + (records - min(_BLOCK, records)) // 2
        for name, make in _samplers(records).items():
            compute = partial(make().indices, positions, epoch=0)
            compute()
            times[name].append((records, median_seconds(compute) / len(positions) * 1e9))
            peak = peak_bytes(lambda make=make, positions=positions: make().indices(positions, epoch=0))
            memory[name].append((records, float(peak)))
    size = "records of the data"
    return (
        times.curve(f"Orders: one index, in blocks of {_BLOCK:,}", size, "ns"),
        memory.curve("Orders: peak memory to the first block", size, "bytes"),
    )


def _loader(sizes: Sequence[int]) -> Curve:
    """Measure one sample through the loader, over records that cost nothing."""
    lines = _Lines()
    for records in sizes:
        steps = max(1, min(records // _BATCH, 2_000))
        for name, shuffle in (("in order", False), ("shuffled", True)):
            made: Loader[Any] = Loader(RangeSource(records), batch_size=_BATCH, shuffle=shuffle)
            with made:
                seconds = median_seconds(partial(_take, made, steps), 3)
            lines[name].append((records, seconds / (steps * _BATCH) * 1e9))
    return lines.curve(f"Loader over RangeSource, batches of {_BATCH}: one sample", "records of the data", "ns")


def _take(loader: Loader[Any], steps: int) -> None:
    loader.set_epoch(0)
    for _ in islice(loader, steps):
        pass


def _shards(numbers: Sequence[int], directory: Path) -> tuple[Curve, Curve]:
    """Measure opening Syrah files, and reading from them."""
    opening, reading = _Lines(), _Lines()
    record = {"x": np.zeros(16, np.float32)}
    total = max(numbers) * 512
    batches = np.split(GlobalShuffle(total, 0).indices(np.arange(total), epoch=0), total // _BATCH)
    for shards in numbers:
        paths = [str(directory / f"{shards}-{number}.syr") for number in range(shards)]
        for path in paths:
            with create(path) as writer:
                writer.extend(record for _ in range(total // shards))
        opening["open"].append((shards, median_seconds(lambda paths=paths: open_source(paths).close()) * 1e3))
        with open_source(paths) as source:
            seconds = median_seconds(lambda source=source: [source.read_batch(rows) for rows in batches])
            reading["read_batch"].append((shards, seconds / total * 1e9))
    return (
        opening.curve(f"Syrah, {total:,} records: time to open", "shards", "ms"),
        reading.curve(f"Syrah, {total:,} records of 64 B: one record, shuffled", "shards", "ns"),
    )


def _ranks(numbers: Sequence[int], records: int) -> Curve:
    """Measure the plan of one rank of many."""
    lines = _Lines()
    steps = range(100, 100 + _BLOCK // _BATCH)
    for ranks in numbers:
        for name, make in _samplers(records).items():
            sampler = BatchSampler(sampler=make(), batch_size=_BATCH, rank=ranks // 2, world_size=ranks, tail="pad")
            plan = partial(sampler.plans, steps, epoch=0)
            plan()
            lines[name].append((ranks, median_seconds(plan) / len(steps) * 1e6))
    return lines.curve(f"One rank's plan of a step of {_BATCH} rows, of {records:,} records", "ranks", "us")
