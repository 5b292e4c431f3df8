"""Lanes against lists that are cut and taken in turns."""

import itertools

import numpy as np
import pytest

from dataload.samplers import BatchSampler, GlobalShuffle, Lanes, Sequential, ShardSequential


def order(sampler, epoch=0):
    return sampler.indices(np.arange(len(sampler)), epoch=epoch).tolist()


def cut(items, lanes):
    """Equal spans, the first ones longer by one where it does not come out even."""
    items, spans = list(items), []
    for left in range(lanes, 0, -1):
        size = -(-len(items) // left)
        spans.append(items[:size])
        items = items[size:]
    return spans


def in_turns(spans):
    return [item for turn in itertools.zip_longest(*spans) for item in turn if item is not None]


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 7, 12, 64, 65_536])
@pytest.mark.parametrize("length", [0, 1, 2, 11, 12, 13, 96, 101])
def test_lanes_are_spans_taken_in_turns(length, lanes):
    parent = GlobalShuffle(length, 5)
    assert order(Lanes(parent, lanes), 2) == in_turns(cut(order(parent, 2), lanes))


def test_lanes_are_shuffled_each_in_its_own_way():
    found = np.array(order(Lanes(Sequential(4 * 500), 4, 50, seed=1))).reshape(500, 4) - np.arange(4) * 500
    for one, other in itertools.combinations(found.T, 2):
        assert (one == other).mean() < 0.1


LANES = 12
SHARDS = (10, 3, 17, 0, 25, 8, 8, 30, 19)  # 120 records, ten in each lane


@pytest.mark.parametrize("pool_size", [None, 6])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_a_rank_reads_its_own_lanes_only(world_size, pool_size):
    parent = ShardSequential(SHARDS, 3)
    spans = cut(order(parent, 1), LANES)
    for rank in range(world_size):
        batches = BatchSampler(sampler=Lanes(parent, LANES, pool_size), batch_size=5, world_size=world_size, rank=rank)
        read = [index for plan in batches.plans(range(len(batches)), epoch=1) for index in plan.indices.tolist()]
        assert sorted(read) == sorted(itertools.chain(*spans[rank::world_size]))


def test_the_global_batches_are_the_same_for_every_number_of_ranks():
    def global_batches(world_size):
        sampler = Lanes(ShardSequential(SHARDS, 3), LANES, 6)
        size = 24 // world_size
        ranks = [
            BatchSampler(sampler=sampler, batch_size=size, world_size=world_size, rank=rank)
            for rank in range(world_size)
        ]
        plans = zip(*(rank.plans(range(len(rank)), epoch=1) for rank in ranks), strict=True)
        return [sorted(index for plan in step for index in plan.indices.tolist()) for step in plans]

    assert all(global_batches(world_size) == global_batches(1) for world_size in (2, 3, 4, 6, 12))
