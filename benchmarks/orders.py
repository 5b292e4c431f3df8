"""The cost of an order, beside torch, numpy and Grain; and its effect on compressed groups and on cold files."""

import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import dataload
from benchmarks.harness import SEED, Case, made, peak_bytes, run_cases, seconds_of, show, through
from benchmarks.rates import ratios_of
from benchmarks.workloads import floats
from dataload.bench.runner import Spread
from dataload.loader.step import BLOCK_ROWS
from dataload.samplers import (
    BatchSampler,
    GlobalShuffle,
    Lanes,
    Mixture,
    PoolShuffle,
    Sequential,
    ShardSequential,
    Weighted,
)

COUNT = 1_000_000
THIRDS = (500_000, 300_000, 200_000)
ORDERS = {"in order": False, "shuffle='shards'": "shards", "shuffle='global'": "global"}


def order(sampler):
    """All of an epoch in the blocks that the loader computes."""
    blocks = [np.arange(start, min(start + BLOCK_ROWS, len(sampler))) for start in range(0, len(sampler), BLOCK_ROWS)]
    return lambda: (sampler.indices(block, epoch=0) for block in blocks)


def whole(make):
    """All of an epoch at once."""

    def epoch():
        yield make()

    return epoch


def orders():
    plain, shards = Sequential(COUNT), ShardSequential((COUNT // 100,) * 100, SEED)
    mixture = Mixture(tuple(map(Sequential, THIRDS)), THIRDS, window=1000, seed=SEED)
    rng, weights = np.random.default_rng(SEED), np.random.default_rng(0).random(COUNT)
    chances = weights / weights.sum()
    cases = [
        Case("numpy Generator.permutation (whole, in memory)", whole(lambda: rng.permutation(COUNT))),
        *torch_randperm(),
        *grain_shuffles(),
        Case("Sequential", order(plain)),
        Case("GlobalShuffle", order(GlobalShuffle(COUNT, SEED)), least=20e6),
        Case("PoolShuffle(1,024) of Sequential", order(PoolShuffle(plain, 1024, SEED)), least=5e6),
        Case("PoolShuffle(65,536) of Sequential", order(PoolShuffle(plain, 65_536, SEED)), least=5e6),
        Case("Lanes(8) of Sequential", order(Lanes(plain, 8)), least=1e9 / 30),
        Case("Mixture of three Sequential", order(mixture), least=1e9 / 30),
        Case("shards -> pool(1,024)", order(PoolShuffle(shards, 1024, SEED)), least=5e6),
        Case("shards -> lanes(8) -> pool(1,024) in each", order(Lanes(shards, 8, 1024, SEED))),
    ]
    weighted = [
        Case("numpy Generator.choice(p=), whole", whole(lambda: rng.choice(COUNT, COUNT, p=chances))),
        Case("Weighted", order(Weighted(weights, COUNT, SEED))),
    ]
    rows = run_cases(f"Orders of {COUNT:,} records, an index", cases, same=None)
    return rows + run_cases(f"Weighted orders of {COUNT:,} records, an index", weighted, same=None)


def torch_randperm():
    try:
        import torch
    except ImportError:
        return []
    return [Case("torch.randperm (whole, in memory)", whole(lambda: torch.randperm(COUNT)))]


def grain_shuffles(sample=1_000):
    """Grain computes one index a call, from Python: a sample of them is measured."""
    try:
        import grain.python as grain
        from grain._src.python.experimental.index_shuffle.python.index_shuffle_module import index_shuffle
    except ImportError:
        print("Grain is not installed: pip install grain")
        return []
    sampler = grain.IndexSampler(
        num_records=COUNT, shuffle=True, seed=SEED, num_epochs=1, shard_options=grain.NoSharding()
    )

    def bare():
        yield [index_shuffle(index, max_index=COUNT - 1, seed=SEED, rounds=4) for index in range(sample)]

    def through_the_sampler():
        yield [sampler[index] for index in range(sample)]

    return [Case("Grain index_shuffle", bare), Case("Grain IndexSampler", through_the_sampler)]


def starting(count=10**10, shard_count=10_000):
    """The time and memory of a plan over ten thousand million records before its first step."""
    lengths = (count // shard_count,) * shard_count
    plans = {
        "GlobalShuffle": lambda: GlobalShuffle(count, SEED),
        "shards -> pool(1,024)": lambda: PoolShuffle(ShardSequential(lengths, SEED), 1024, SEED),
        "shards -> lanes(64) -> pool(1,024)": lambda: Lanes(ShardSequential(lengths, SEED), 64, 1024, SEED),
    }
    rows = []
    for name, make in plans.items():

        def start(make=make):
            planner = BatchSampler(sampler=make(), batch_size=256)
            middle = planner.steps(0) // 2
            return planner.plans(range(middle, middle + BLOCK_ROWS // 256), epoch=0)

        start()
        seconds = seconds_of(start, calls=5)
        rows.append({"case": name, "seconds": seconds, "peak_bytes": peak_bytes(start)})
    heading = f"A plan over {count:,} records, and {BLOCK_ROWS:,} rows in the middle of an epoch; aims: 10 ms, 10 MB"
    return show("starting", heading, rows)


def groups():
    """The same records in each order, from groups that are compressed together; cold reads have a case of their own."""
    options = {"codec": "tensorprotos", "options": "group_size:256"}
    grouped = [made(f"group-{shard}.array_record", floats(256), 4096, **options) for shard in range(32)]
    with warnings.catch_warnings(), ExitStack() as held:
        warnings.simplefilter("ignore")  # of the groups, which are the point
        source = held.enter_context(dataload.open(grouped, codec="tensorprotos"))
        cases = []
        for name, shuffle in ORDERS.items():
            settings = {"batch_size": 256, "shuffle": shuffle, "seed": SEED, "num_workers": 1}
            cases.append(Case(name, through(held.enter_context(dataload.Loader(source, **settings)))))
        title = "32 ArrayRecord shards with group_size:256, 1 KB records, batch 256"
        return run_cases(title, cases, same=None)


SHARDS, RECORDS, BATCH = 8, 2048, 256
_COLD_ORDERS = {"sequential": False, "shards and pool": "shards", "global": "global"}
_RAW = {"codec": "tensorprotos", "options": "group_size:1,uncompressed"}
FORMATS = {
    "Syrah": ("syr", {}, {}),
    "TorchRecord": ("torchrecord", {"num_records": RECORDS}, {}),
    "LMDB": ("lmdb", {"codec": "tensorprotos"}, {"codec": "tensorprotos"}),
    "tar": ("tar", {}, {"decode": "auto"}),
    "ArrayRecord, uncompressed": ("array_record", _RAW, {"codec": "tensorprotos"}),
    "ArrayRecord, compressed": ("array_record", {"codec": "tensorprotos"}, {"codec": "tensorprotos"}),
}


def cold(rounds=3):
    """The ratio of a cold epoch, from open to its last record, to bare reads of the same places in the same order.

    Before each round the files are dropped from the page cache. The bare calls read one equal part of a file for each
    record: as many bytes as a record takes there, on one thread and without hints.
    """
    found = []
    for name, (suffix, written, options) in FORMATS.items():
        stem = name.replace(", ", "-")
        paths = [made(f"cold-{shard}-{stem}.{suffix}", floats(1024), RECORDS, **written) for shard in range(SHARDS)]
        with dataload.open(paths, **options) as source:  # writes the cached tables
            plans = {order: _plan(source, shuffle) for order, shuffle in _COLD_ORDERS.items()}
        for order, shuffle in _COLD_ORDERS.items():
            ours, bare = [], []
            for _ in range(rounds):
                bare.append(len(paths) * RECORDS / _timed(_pread, paths, plans[order]))
                ours.append(len(paths) * RECORDS / _timed(_epoch, paths, shuffle, options))
            ratio = Spread.of(ratios_of(ours, bare))
            rates = {"records_per_second": median(ours), "pread": median(bare)}
            found.append(
                {"case": f"{name}, {order}", **rates, "ratio": ratio.median, "low": ratio.low, "high": ratio.high}
            )
    return show("cold", f"Cold reads of {SHARDS} x {RECORDS:,} records of 4 KB, 1 worker, ratio to bare preads", found)


def _plan(source, shuffle):
    """The records of an epoch in the loader's order."""
    with dataload.Loader(source, batch_size=BATCH, shuffle=shuffle, seed=SEED) as loader:
        return np.concatenate([plan.indices for plan in loader.batch_sampler.plans(range(len(loader)), epoch=0)])


def drop_cached(paths):
    """Drop files, and the files of directories, from the page cache; mapped pages stay."""
    for path in paths:
        for file in filter(Path.is_file, (Path(path), *Path(path).rglob("*"))):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # pages that are not written yet cannot be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _timed(work, paths, *arguments):
    drop_cached(paths)
    begun = perf_counter()
    work(paths, *arguments)
    return perf_counter() - begun


def _pread(paths, order):
    with ExitStack() as held:
        files = []
        for path in paths:
            file = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
            descriptor = os.open(file, os.O_RDONLY)
            held.callback(os.close, descriptor)
            files.append((descriptor, os.fstat(descriptor).st_size))
        for index in order.tolist():
            shard, record = divmod(index, RECORDS)
            descriptor, size = files[shard]
            start, end = record * size // RECORDS, (record + 1) * size // RECORDS
            os.pread(descriptor, end - start, start)


def _epoch(paths, shuffle, options):
    with (
        dataload.open(paths, **options) as source,
        dataload.Loader(source, batch_size=BATCH, shuffle=shuffle, seed=SEED, num_workers=1) as loader,
    ):
        for batch in loader:
            assert len(batch["x"])
