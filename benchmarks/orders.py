"""The index plane: the cost of an order, beside torch, numpy and Grain; and its effect on compressed groups."""

import warnings
from contextlib import ExitStack

import numpy as np

import dataload
from benchmarks.harness import SEED, Case, made, peak_bytes, run_cases, seconds_of, show, through
from benchmarks.workloads import floats
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
        seconds = min(seconds_of(start) for _ in range(5))
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
