"""How costs grow with records, shards and ranks. The largest sizes exist in the index plane only."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from dataload._util.indexing import even_split
from dataload.api import create, open_source
from dataload.bench.results import Curve
from dataload.loader.loader import Loader
from dataload.samplers import BatchSampler, GlobalShuffle, PoolShuffle, Sequential, ShardSequential
from dataload.sources.range import RangeSource
from dataload.types import Sampler

__all__ = ["Sizes", "measure_scale"]

_BLOCK = 16_384
_SHARD_RECORDS = 65_536
_BATCH = 256
_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured: the points of the curves.

    Attributes:
        ordered: Records of orders.
        loaded: Records of loaders.
        shards: Numbers of files.
        ranks: Numbers of ranks.
        records_of_ranks: Records that they share.
    """

    ordered: tuple[int, ...] = tuple(10**power for power in range(3, 11))
    loaded: tuple[int, ...] = tuple(10**power for power in range(3, 9))
    shards: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    ranks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    records_of_ranks: int = 10**8


def measure_scale(directory: Path, sizes: Sizes | None = None) -> tuple[Curve, ...]:
    """All curves, in about a minute.

    Args:
        directory: For the small files of one of them.
        sizes: None for those by default.
    """
    sizes = sizes or Sizes()
    return (
        *_orders(sizes.ordered),
        _loader(sizes.loaded),
        *_shards(sizes.shards, directory),
        _ranks(sizes.ranks, sizes.records_of_ranks),
    )


def _orders_of(records: int) -> dict[str, Callable[[], Sampler]]:
    def shards() -> ShardSequential:
        parts = even_split(records, max(1, records // _SHARD_RECORDS))
        return ShardSequential(tuple(stop - start for start, stop in parts), 0)

    return {
        "sequential": lambda: Sequential(records),
        "global": lambda: GlobalShuffle(records, 0),
        "shards, pool of 1,024": lambda: PoolShuffle(shards(), 1024, 0),
    }


def _orders(sizes: tuple[int, ...]) -> tuple[Curve, Curve]:
    """Nanoseconds and bytes of orders, of a block in the middle of the epoch."""
    times: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, list[tuple[float, float]]] = {}
    for records in sizes:
        positions = np.arange(min(_BLOCK, records)) + (records - min(_BLOCK, records)) // 2
        for name, make in _orders_of(records).items():
            order = make()
            order.indices(positions, epoch=0)
            seconds = _seconds(lambda order=order, positions=positions: order.indices(positions, epoch=0))
            times.setdefault(name, []).append((records, seconds / len(positions) * 1e9))
            peak = _peak(lambda make=make, positions=positions: make().indices(positions, epoch=0))
            memory.setdefault(name, []).append((records, peak))
    size = "records of the data"
    return (
        _curve(f"Orders: one index, in blocks of {_BLOCK:,}", size, "ns", times),
        _curve("Orders: most memory, from making the order to the first block", size, "bytes", memory),
    )


def _loader(sizes: tuple[int, ...]) -> Curve:
    """A sample through the loader over records that cost nothing."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for records in sizes:
        steps = max(1, min(records // _BATCH, 2_000))
        for shuffle in ("in order", "shuffled"):
            made: Loader[Any] = Loader(RangeSource(records), batch_size=_BATCH, shuffle=shuffle == "shuffled")
            with made:
                seconds = _seconds(partial(_take, made, steps), repeats=3)
            lines.setdefault(shuffle, []).append((records, seconds / (steps * _BATCH) * 1e9))
    return _curve(f"Loader over RangeSource, batches of {_BATCH}: one sample", "records of the data", "ns", lines)


def _shards(numbers: tuple[int, ...], directory: Path) -> tuple[Curve, Curve]:
    """To open Syrah files, and to read from them."""
    opening: list[tuple[float, float]] = []
    reading: list[tuple[float, float]] = []
    record = {"x": np.zeros(16, np.float32)}
    total = max(numbers) * 512
    for shards in numbers:
        paths = [str(directory / f"{shards}-{number}.syr") for number in range(shards)]
        for path in paths:
            with create(path) as writer:
                writer.extend(record for _ in range(total // shards))
        opening.append((shards, _seconds(lambda paths=paths: open_source(paths).close()) * 1e3))
        with open_source(paths) as source:
            order = GlobalShuffle(total, 0)
            batches = np.split(order.indices(np.arange(total), epoch=0), total // _BATCH)
            seconds = _seconds(lambda source=source, batches=batches: [source.read_batch(rows) for rows in batches])
            reading.append((shards, seconds / total * 1e9))
    return (
        _curve(f"Syrah, {total:,} records: to open", "shards", "ms", {"open": opening}),
        _curve(f"Syrah, {total:,} records of 64 B: one record, shuffled", "shards", "ns", {"read_batch": reading}),
    )


def _ranks(numbers: tuple[int, ...], records: int) -> Curve:
    """What one of many ranks pays for its plan."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for ranks in numbers:
        for name, make in _orders_of(records).items():
            plan = BatchSampler(sampler=make(), batch_size=_BATCH, rank=ranks // 2, world_size=ranks, tail="pad")
            steps = range(100, 100 + _BLOCK // _BATCH)
            plan.plans(steps, epoch=0)
            seconds = _seconds(lambda plan=plan, steps=steps: plan.plans(steps, epoch=0))
            lines.setdefault(name, []).append((ranks, seconds / len(steps) * 1e6))
    return _curve(f"One rank's plan of a step of {_BATCH} rows, of {records:,} records", "ranks", "us", lines)


def _take(loader: Loader[Any], steps: int) -> None:
    loader.set_epoch(0)
    for _ in islice(loader, steps):
        pass


def _seconds(work: Callable[[], object], repeats: int = _REPEATS) -> float:
    found: list[float] = []
    for _ in range(repeats):
        begun = perf_counter()
        work()
        found.append(perf_counter() - begun)
    return median(found)


def _peak(work: Callable[[], object]) -> float:
    tracemalloc.start()
    try:
        work()
        return float(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def _curve(title: str, x_label: str, y_label: str, lines: dict[str, list[tuple[float, float]]]) -> Curve:
    points: Iterable[tuple[str, tuple[tuple[float, float], ...]]] = ((n, tuple(line)) for n, line in lines.items())
    return Curve(title, x_label, y_label, dict(points))
