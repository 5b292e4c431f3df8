"""The index plane: the cost of an order, beside those of torch, numpy and Grain, and its effect on reading."""

import warnings
from functools import partial

import numpy as np

import dataload
from benchmarks.harness import SEED, Case, made, run_cases, show
from dataload.bench.child import drop_cached
from dataload.bench.timing import peak_bytes, seconds_of
from dataload.bench.workloads import floats
from dataload.loader.order import BLOCK_ROWS
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
    """All of an epoch in the blocks that the loader computes; the sum of a permutation is the same for each."""
    blocks = [np.arange(start, min(start + BLOCK_ROWS, len(sampler))) for start in range(0, len(sampler), BLOCK_ROWS)]

    def run():
        return sum(int(sampler.indices(block, epoch=0).sum()) for block in blocks)

    return run


def orders():
    plain, shards = Sequential(COUNT), ShardSequential((COUNT // 100,) * 100, SEED)
    mixture = Mixture(tuple(map(Sequential, THIRDS)), THIRDS, window=1000, seed=SEED)
    rng, weights = np.random.default_rng(SEED), np.random.default_rng(0).random(COUNT)
    chances = weights / weights.sum()
    cases = [
        Case("numpy Generator.permutation (whole, in memory)", lambda: int(rng.permutation(COUNT).sum())),
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
        Case("numpy Generator.choice(p=), whole", lambda: rng.choice(COUNT, COUNT, p=chances).sum() and None),
        Case("Weighted", lambda: order(Weighted(weights, COUNT, SEED))() and None),
    ]
    size = {"items": COUNT, "steps": COUNT // 256}
    rows = run_cases(f"Orders of {COUNT:,} records, an index", cases, **size)
    return rows + run_cases(f"Weighted orders of {COUNT:,} records, an index", weighted, **size)


def torch_randperm():
    try:
        import torch
    except ImportError:
        return []
    return [Case("torch.randperm (whole, in memory)", lambda: int(torch.randperm(COUNT).sum()))]


def grain_shuffles(sample=20_000):
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
        for index in range(sample):
            index_shuffle(index, max_index=COUNT - 1, seed=SEED, rounds=4)

    def through_the_sampler():
        for index in range(sample):
            sampler[index]

    cases = {"Grain index_shuffle": bare, "Grain IndexSampler": through_the_sampler}
    return [Case(name, run, items=sample) for name, run in cases.items()]


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
        seconds = min(seconds_of(start) for _ in range(5))
        rows.append({"case": name, "seconds": seconds, "peak_bytes": peak_bytes(start)})
    heading = f"A plan over {count:,} records, and {BLOCK_ROWS:,} rows in the middle of an epoch; aims: 10 ms, 10 MB"
    return show("starting", heading, rows)


def reading(shard_count=16, shard_records=16_384, size=1024, few=2560):
    """The same records in each order: from a cold cache, and from groups that are compressed together."""
    names = [f"order-{shard}-{size}-{shard_records}.syr" for shard in range(shard_count)]
    paths = [made(name, floats(size), shard_records) for name in names]
    count = shard_count * shard_records
    title = f"Cold reads of {shard_count} Syrah shards, {4 * size} B records, batch 256"
    cases = [Case(name, partial(cold_epoch, paths, shuffle)) for name, shuffle in ORDERS.items()]
    cold = run_cases(title, cases, items=count, steps=count // 256, rounds=3)
    options = {"codec": "tensorprotos", "options": "group_size:256"}
    grouped = [made(f"group-{shard}.array_record", floats(256), 4096, **options) for shard in range(32)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the groups, which are the point
        source = dataload.open(grouped, codec="tensorprotos")

    def steps(shuffle):
        for _, _ in zip(range(few // 256), loader(source, shuffle), strict=False):
            pass

    title = "Warm reads of 32 ArrayRecord shards with group_size:256, 1 KB records, batch 256"
    cases = [Case(name, partial(steps, shuffle), items=few) for name, shuffle in ORDERS.items()]
    return cold + run_cases(title, cases, items=few, steps=few // 256, rounds=3)


def cold_epoch(paths, shuffle):
    for path in paths:
        drop_cached(path)
    with dataload.open(paths) as source:
        return round(sum(float(batch["x"][:, 0].sum(dtype=np.float64)) for batch in loader(source, shuffle)), 1)


def loader(source, shuffle):
    return dataload.Loader(source, batch_size=256, shuffle=shuffle, seed=SEED, num_workers=1)
