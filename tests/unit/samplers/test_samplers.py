"""Promises of every order beyond the models of tests/properties/test_orders.py: sizes, memory, values, arguments."""

import tracemalloc

import numpy as np
import pytest
from orders import global_batches, order, plans_of

from dataload.samplers import BatchSampler, Mixture, PoolShuffle, Weighted
from dataload.samplers.basic import GlobalShuffle, Lanes, Repeat, Sequential, ShardSequential, Subset


def huge(n):
    """Orders of n records or more, some of them with many places."""
    share = n // 1000
    shards = (share,) * 999 + (n - 999 * share,)
    halves = GlobalShuffle(n // 2, 1), PoolShuffle(Sequential(n - n // 2), 1024, 2)
    return {
        "sequential": Sequential(n),
        "global": GlobalShuffle(n, 1),
        "shards": ShardSequential(shards, 1),
        "pool": PoolShuffle(Sequential(n), 1024, 1),
        "shards -> pool": PoolShuffle(ShardSequential(shards, 1), 65_536, 2),
        "lanes": Lanes(GlobalShuffle(n, 1), 12),
        "shards -> lanes -> pool": Lanes(ShardSequential(shards, 1), 64, 1024, 2),
        "subset by slice": Subset(GlobalShuffle(n, 1), slice(n, None, -1)),
        "subset by range": Subset(GlobalShuffle(n, 1), range(1, n, 2)),
        "repeat": Repeat(GlobalShuffle(n // 1000, 1), 1000),
        "mixture": Mixture(halves, (1, 1)),
        "endless mixture": Mixture(halves, (0.3, 0.7), stop="never"),
        "weighted": Weighted(np.arange(1, 1000), n, 1),
    }


@pytest.mark.parametrize("n", [10**10, 2**48])
@pytest.mark.parametrize("kind", huge(10**10))
def test_memory_does_not_grow_with_the_number_of_records(kind, n):
    tracemalloc.start()
    try:
        sampler = huge(n)[kind]
        length = len(sampler)
        assert length >= n // 2 - 2000
        blocks = [np.arange(start, start + 4096) for start in (0, length // 2, length - 4096)]
        found = [sampler.indices(block, epoch=1) for block in blocks]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * 10**6
    found = np.concatenate(found)
    assert found.min() >= 0
    assert found.max() < sampler.records
    if kind not in ("repeat", "endless mixture", "weighted"):
        assert len(np.unique(found)) == found.size
    # what was computed before changes nothing, nor does the way the positions are taken
    positions = np.concatenate(blocks)
    some = np.random.default_rng(0).permutation(len(positions))[:100]
    assert np.array_equal(huge(n)[kind].indices(positions[some], epoch=1), found[some])


@pytest.mark.parametrize(
    ("sampler", "index"),
    [
        (Sequential(2**48), 2**48 - 1),
        (Lanes(Sequential(2**48), 65_536), 2**48 - 1),
        (PoolShuffle(Sequential(2**48), 1, 0), 2**48 - 1),
        (Repeat(Sequential(3), 2**48 // 3), 2),
        (Subset(Sequential(2**48), slice(10, None, 3)), 2**48 - 3),
    ],
)
def test_the_last_position_of_the_largest_orders(sampler, index):
    assert sampler.indices(np.array([len(sampler) - 1]), epoch=2**40).tolist() == [index]


def test_shards_come_in_another_order_in_each_epoch():
    sampler = ShardSequential((4,) * 20, 0)
    assert len({tuple(order(sampler, epoch)) for epoch in range(10)}) == 10
    assert ShardSequential(iter([np.int64(2), 3]), 0) == ShardSequential((2, 3), 0)
    assert repr(ShardSequential((10,) * 10_000, 7)) == "ShardSequential(10000 shards, 100000 records, seed=7)"


SELECTIONS = [
    *(slice(None), slice(3, 9), slice(None, None, -1), slice(-4, None), slice(9, 2, -3), slice(15, 100)),
    *(slice(5, 5), slice(None, None, 2**62), [], [3], [11, 0, 11, -1, -12], (1, 2), range(2, 9, 3)),
    *(range(11, -1, -1), range(-3, 3), range(-1, -13, -2), range(0), np.array([5, 5, -1])),
    *(np.array([7, 1], np.uint8), np.array([])),
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=repr)
def test_a_subset_is_that_of_a_list(selection):
    for parent in (Sequential(12), GlobalShuffle(12, 1)):
        sampler = Subset(parent, selection)
        assert sampler.records == 12
        for epoch in range(3):
            items = order(parent, epoch)
            picked = items[selection] if isinstance(selection, slice) else [items[int(i)] for i in selection]
            assert order(sampler, epoch) == picked


def test_a_subset_copies_its_selection_and_keeps_a_range():
    chosen = np.array([1, 2, 3])
    sampler = Subset(Sequential(10), chosen)
    chosen[:] = 0
    assert order(sampler) == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        sampler.selection[0] = 5
    assert order(Subset(Sequential(12), iter([4, 5]))) == [4, 5]
    for start, selection in ((10, slice(10, None, 3)), (10, range(10, 2**48, 3)), (0, range(0, 2**48, 3))):
        sampler = Subset(Sequential(2**48), selection)
        assert (len(sampler), sampler.selection) == ((2**48 - start + 2) // 3, range(start, 2**48, 3))


SHARDS = ShardSequential((10, 3, 17, 0, 25, 8, 8, 30, 19), 3)  # 120 records, ten in each of 12 lanes


@pytest.mark.parametrize("pool_size", [None, 6])
@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 12])
def test_a_rank_reads_its_own_lanes_only_and_all_ranks_the_same_batches(world_size, pool_size):
    lanes = Lanes(SHARDS, 12, pool_size)
    spans = np.array(order(SHARDS, 1)).reshape(12, 10)
    for rank in range(world_size):
        planner = BatchSampler(sampler=lanes, batch_size=5, world_size=world_size, rank=rank)
        read = [index for plan in plans_of(planner, 1) for index in plan.indices.tolist()]
        assert sorted(read) == sorted(spans[rank::world_size].ravel().tolist())

    def planner(world_size, rank):
        return BatchSampler(sampler=lanes, batch_size=24 // world_size, world_size=world_size, rank=rank)

    assert global_batches(planner, world_size, 1) == global_batches(planner, 1, 1)
