"""Costs against the number of records, shards and ranks. The largest sizes exist in the index plane only."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.harness import median_seconds, peak_bytes, show
from dataload._util.indexing import even_split
from dataload.api import open_source
from dataload.bench.data import write_once
from dataload.loader.loader import Loader
from dataload.samplers import BatchSampler, GlobalShuffle, PoolShuffle, Sequential, ShardSequential
from dataload.sources.memory import RangeSource
from dataload.types import Int64Array, Sampler

_BLOCK = 16_384
_SHARD_RECORDS = 65_536
_BATCH = 256


def scale(
    *,
    ordered: Sequence[int] = tuple(10**power for power in range(3, 11)),
    loaded: Sequence[int] = tuple(10**power for power in range(3, 9)),
    shards: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    ranks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    records_of_ranks: int = 10**8,
) -> list[dict[str, Any]]:
    """Measure each cost over its sizes, in about a minute; return a row of JSON for each size."""
    stored = max(shards) * 512
    planned = f"One rank's plan of a step of {_BATCH} rows, of {records_of_ranks:,} records, us"
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as name:
        opening, reading = (partial(measure, Path(name), stored) for measure in (_opening, _reading))
        for title, size, sizes, measure in (
            (f"Orders: one index, in blocks of {_BLOCK:,}, ns", "records", ordered, _order_times),
            ("Orders: peak memory to the first block, bytes", "records", ordered, _order_memory),
            (f"Loader over RangeSource, batches of {_BATCH}: one sample, ns", "records", loaded, _loading),
            (f"Syrah, {stored:,} records: time to open, ms", "shards", shards, opening),
            (f"Syrah, {stored:,} records of 64 B: one record, shuffled, ns", "shards", shards, reading),
            (planned, "ranks", ranks, partial(_planning, records_of_ranks)),
        ):
            rows += show(title, title, [{"case": f"{count:,} {size}", **measure(count)} for count in sizes])
    return rows


def _samplers(records: int) -> Mapping[str, Callable[[], Sampler]]:
    def shards() -> ShardSequential:
        parts = even_split(records, max(1, records // _SHARD_RECORDS))
        return ShardSequential(tuple(stop - start for start, stop in parts), 0)

    return {
        "sequential": lambda: Sequential(records),
        "global": lambda: GlobalShuffle(records, 0),
        "shards, pool of 1,024": lambda: PoolShuffle(shards(), 1024, 0),
    }


def _middle(records: int) -> Int64Array:
    """Return the positions of a block in the middle of an epoch."""
    return np.arange(min(_BLOCK, records)) + (records - min(_BLOCK, records)) // 2


def _order_times(records: int) -> dict[str, float]:
    """Measure a block of each order; the median leaves out the first call, which warms up."""
    positions = _middle(records)
    return {
        name: median_seconds(partial(make().indices, positions, epoch=0)) / len(positions) * 1e9
        for name, make in _samplers(records).items()
    }


def _order_memory(records: int) -> dict[str, float]:
    positions = _middle(records)
    return {
        name: float(peak_bytes(lambda make=make: make().indices(positions, epoch=0)))
        for name, make in _samplers(records).items()
    }


def _loading(records: int) -> dict[str, float]:
    """Measure the loader over records that cost nothing."""
    steps = max(1, min(records // _BATCH, 2_000))
    seconds: dict[str, float] = {}
    for name, shuffle in (("in order", False), ("shuffled", True)):
        with Loader(RangeSource(records), batch_size=_BATCH, shuffle=shuffle) as loader:
            seconds[name] = median_seconds(partial(_take, loader, steps), 3) / (steps * _BATCH) * 1e9
    return seconds


def _take(loader: Loader[Any], steps: int) -> None:
    loader.set_epoch(0)
    for _ in islice(loader, steps):
        pass


def _syrah(directory: Path, total: int, shards: int) -> list[str]:
    records = [{"x": np.zeros(16, np.float32)}] * (total // shards)
    return [write_once(directory / f"{shards}-{number}.syr", lambda: records) for number in range(shards)]


def _opening(directory: Path, total: int, shards: int) -> dict[str, float]:
    paths = _syrah(directory, total, shards)
    return {"open": median_seconds(lambda: open_source(paths).close()) * 1e3}


def _reading(directory: Path, total: int, shards: int) -> dict[str, float]:
    batches = np.split(GlobalShuffle(total, 0).indices(np.arange(total), epoch=0), total // _BATCH)
    with open_source(_syrah(directory, total, shards)) as source:
        return {"read_batch": median_seconds(lambda: [source.read_batch(rows) for rows in batches]) / total * 1e9}


def _planning(records: int, ranks: int) -> dict[str, float]:
    """Measure the plan of one rank of many."""
    steps = range(100, 100 + _BLOCK // _BATCH)
    seconds: dict[str, float] = {}
    for name, make in _samplers(records).items():
        sampler = BatchSampler(sampler=make(), batch_size=_BATCH, rank=ranks // 2, world_size=ranks, tail="pad")
        plan = partial(sampler.plans, steps, epoch=0)
        plan()
        seconds[name] = median_seconds(plan) / len(steps) * 1e6
    return seconds
