"""`auto` chooses shards or ranges from the order, the sizes and the budget, and refuses what neither serves."""

import bisect
import random
import re
from collections import Counter

import numpy as np
import pytest

from dataload.errors import ConfigError
from dataload.loader.pipeline import steps_ahead
from dataload.loader.state import Cursor, EpochPlanners
from dataload.samplers import BatchSampler, GlobalShuffle, PoolShuffle, Sequential, ShardSequential
from dataload.storage.remote.prefetch.plan import Reads, choose, measure, sharers_of
from dataload.storage.remote.requests import GAP
from dataload.types import StepsAhead

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


def chosen(order, *, shards, records, record_bytes, budget, world_size=1, batch_size=64, epoch_steps=None):
    """Return the mode for shards of so many records each; `order` is made of the lengths of the shards."""
    lengths = (records,) * shards
    sampler = order(lengths)
    planner = BatchSampler(sampler=sampler, batch_size=batch_size, rank=0, world_size=world_size, tail="partial")
    block = next(steps_ahead(EpochPlanners(planner), Cursor(0, 0), 1))
    sizes = np.full(shards, records * record_bytes)
    reads = measure(block, np.cumsum(lengths), np.arange(shards), sizes, record_bytes, budget)
    return choose(reads, budget).mode


def sequential(lengths):
    return Sequential(sum(lengths))


def by_shard(lengths, pool_size=None):
    order = ShardSequential(lengths, 1)
    return order if pool_size is None else PoolShuffle(order, pool_size, 1)


def pool(lengths):
    return by_shard(lengths, 2 * lengths[0])


def everything(lengths):
    return GlobalShuffle(sum(lengths), 1)


SMALL = {"shards": 100, "records": 1000, "record_bytes": 4 * KB}  # 400 MB, in one block of steps
HUGE = {"shards": 1000, "records": 30_000, "record_bytes": 4 * KB}  # 115 GB, of which a block is half a percent
MANY = {"shards": 50_000, "records": 100, "record_bytes": 4 * KB}  # 20 GB in shards of 400 KB
LARGE = {"shards": 200, "records": 250, "record_bytes": 256 * KB}  # 13 GB


CHOICES = [  # order, data, budget, mode
    *((sequential, SMALL, 40 * MB, "shards"), (by_shard, SMALL, 40 * MB, "shards"), (pool, SMALL, 40 * MB, "shards")),
    *((everything, SMALL, GB, "shards"), (everything, SMALL, 250 * MB, "shards"), (everything, SMALL, 100 * MB, None)),
    *((sequential, HUGE, GB, "shards"), (by_shard, HUGE, GB, "shards"), (pool, HUGE, GB, "shards")),
    *((pool, HUGE, 100 * GB, "shards"), (everything, HUGE, 120 * GB, "shards"), (everything, HUGE, 70 * GB, "shards")),
    *((everything, HUGE, 20 * GB, None), (everything, HUGE, GB, None), (by_shard, MANY, GB, "shards")),
    *((pool, MANY, GB, "shards"), (everything, MANY, GB, None), (by_shard, LARGE, GB, "shards")),
    *((pool, LARGE, GB, "shards"), (everything, LARGE, 20 * GB, "shards"), (everything, LARGE, 5 * GB, "ranges")),
    (everything, LARGE, 0, "ranges"),
    (sequential, SMALL, 0, "ranges"),  # neighbours are fetched together
    (everything, SMALL, 0, None),
]


@pytest.mark.parametrize(("order", "data", "budget", "expected"), CHOICES)
def test_orders_sizes_and_budgets(order, data, budget, expected):
    if expected is not None:
        assert chosen(order, **data, budget=budget) == expected
        return
    with pytest.raises(ConfigError, match="neither whole shards nor ranges of"):
        chosen(order, **data, budget=budget)


def test_the_named_pool_is_one_that_is_chosen():
    data = SMALL
    with pytest.raises(ConfigError) as found:
        chosen(everything, **data, budget=100 * MB)
    assert found.value.key == "remote.mode"
    match = re.search(
        r"records of about 4,096 bytes .* shards of [\d,]+ bytes at the same time, and the cache may take 104,857,600: "
        r".* shuffle in a pool: sampler=PoolShuffle\(ShardSequential\(source\.shard_lengths, seed\), (\d+), seed\), "
        "raise remote.budget, or set remote.mode to 'ranges' or 'shards'",
        str(found.value),
    )
    assert match is not None
    size = int(match[1])
    assert size == 6400
    assert chosen(lambda lengths: by_shard(lengths, size), **data, budget=100 * MB) == "shards"


READS = {"data_bytes": GB, "used": 1.0, "together_bytes": GB, "record_bytes": 4096, "range_bytes": 4096}


def test_without_a_cache_the_refusal_asks_for_one():
    with pytest.raises(ConfigError, match=r"fast; give a cache directory with room \(remote\.cache, remote\.budget\)"):
        choose(Reads(**READS), 0)


FITS = "the data take 1,073,741,824 bytes and fit into the budget of 1,073,741,824"
TOGETHER = "the shards that are read together take 1,0"


@pytest.mark.parametrize(
    ("changes", "budget", "mode", "reason"),
    [
        ({}, GB, "shards", FITS),
        ({"together_bytes": MB}, MB, "shards", f"{TOGETHER}48,576 bytes and fit into"),
        ({}, GB // 2, "shards", f"{TOGETHER}73,741,824 bytes, the budget is 536,870,912"),
        ({"used": 0.24, "range_bytes": 256 * KB}, GB, "ranges", r"24\.00% of the shards' bytes are read"),
        ({"used": 0.25, "range_bytes": 256 * KB}, GB, "shards", FITS),
        ({"used": 0.24, "range_bytes": 128 * KB}, GB, "shards", FITS),
        ({"used": 0.12, "range_bytes": 128 * KB}, GB, "ranges", r"12\.00% of the shards' bytes are read"),
        ({"range_bytes": 256 * KB}, GB - 1, "ranges", "not fit into 1,073,741,823 bytes, and a request is for 262,1"),
    ],
)
def test_thresholds_and_reasons(changes, budget, mode, reason):
    choice = choose(Reads(**{**READS, **changes}), budget)
    assert choice.mode == mode
    assert re.search(reason, choice.reason)


def case(seed):
    """The arguments of `measure`: an order of records of random shards, some of them local."""
    chance = random.Random(seed).random
    lengths = np.array([int(30 * chance()) for _ in range(1 + int(20 * chance()))] + [5])
    record_bytes = [1.0, 700.5, 70_000.0, 3e6][int(4 * chance())]
    sizes = np.array([int(length * record_bytes) + int(999 * chance()) for length in lengths])
    numbers = np.where([chance() < 0.9 for _ in lengths], np.arange(len(lengths)), -1)
    records, scattered = int(lengths.sum()), chance() ** 3
    rows = [int(min(records - 1, at + scattered * records * chance())) for at in range(int(records * chance()) + 1)]
    ends = np.arange(1 + int(4 * chance()), len(rows) + 9, 1 + int(9 * chance())).clip(max=len(rows))
    ends = np.unique(np.append(ends, len(rows)))
    steps = StepsAhead(0, np.array(rows), ends, len(ends) + int(30 * chance()))
    return steps, np.cumsum(lengths), numbers, sizes, record_bytes, int(sizes.sum() * chance())


def model(steps, ends, numbers, sizes, record_bytes, budget):
    """What `measure` returns, record by record."""
    component = {index: bisect.bisect_right(ends.tolist(), index) for index in steps.indices.tolist()}
    rows = [index for index in steps.indices.tolist() if numbers[component[index]] >= 0]
    shards = [int(numbers[component[index]]) for index in rows]
    epoch_rows = round(len(rows) * steps.epoch_steps / len(steps.ends))
    touched = sum(sizes[shard] for shard in {*shards})
    data_bytes = touched if epoch_rows <= len(rows) else sum(sizes)  # the steps are the whole epoch
    used = max(len(rows) * record_bytes / (touched or 1), epoch_rows * record_bytes / (data_bytes or 1))
    per_step = max(1, len(rows) // len(steps.ends))

    stretch = shards[: max(per_step, int(min(1.0, used) * budget / 4 / record_bytes))]
    together, reached = 0, 0
    for shard, count in sorted(Counter(stretch).items(), key=lambda each: (-each[1], each[0])):
        together += sizes[shard]
        reached += count
        if reached >= 0.9 * len(stretch):
            break

    requests, size = 0, max(per_step, min(32 * per_step, int((8 << 20) / record_bytes)))
    for start in range(0, len(rows), size):
        group = sorted(rows[start : start + size])
        for before, index in zip([None, *group], group, strict=False):
            near = before is not None and (index - before - 1) * record_bytes <= GAP
            requests += not (near and component[before] == component[index])
    range_bytes = round(record_bytes * len(rows) / (requests or 1))
    return (data_bytes, together, round(record_bytes), range_bytes), min(1.0, used)


def test_measures_are_those_of_a_loop_over_the_records():
    for seed in range(80):
        given = case(seed)
        reads = measure(*given)
        whole, used = model(*given)
        assert (reads.data_bytes, reads.together_bytes, reads.record_bytes, reads.range_bytes) == whole, seed
        assert (reads.used, reads.of_ranks(3).used) == pytest.approx((used, min(1.0, 3 * used))), seed
    assert [sharers_of(data_bytes, 4, 100) for data_bytes in (99, 100, 101)] == [1, 1, 4]
