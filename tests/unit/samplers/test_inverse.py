"""Where a record is served: the computed inverse of an order against a search of the order."""

import numpy as np
import pytest

from dataload.errors import ConfigError
from dataload.samplers import (
    BatchSampler,
    BucketBatchSampler,
    GlobalShuffle,
    Lanes,
    Mixture,
    PackedBatchSampler,
    PoolShuffle,
    Repeat,
    Sequential,
    ShardSequential,
    Subset,
    Weighted,
)
from dataload.samplers.batch import Serving, positions_of, servings_of
from dataload.streams import StreamSampler

SHARDS = ShardSequential((30, 0, 70, 20, 1), 3)
SAMPLERS = {
    "sequential": Sequential(50),
    "shuffle": GlobalShuffle(1500, 4),
    "small shuffle": GlobalShuffle(50, 4),
    "shards": SHARDS,
    "pool": PoolShuffle(SHARDS, 16, 1),
    "pool of one": PoolShuffle(SHARDS, 1, 1),
    "pool of all": PoolShuffle(SHARDS, 500, 1),
    "pool over repetitions": PoolShuffle(Repeat(GlobalShuffle(20, 0), 3), 7, 1),
    "lanes": Lanes(SHARDS, 5),
    "lanes with pools": Lanes(SHARDS, 6, 8, 2),
    "more lanes than records": Lanes(Sequential(3), 5, 2, 2),
    "slice": Subset(GlobalShuffle(90, 1), slice(80, 10, -3)),
    "subset": Subset(GlobalShuffle(90, 1), [5, 5, -1, 70, 2]),
    "shuffled subset": GlobalShuffle(40, 2, parent=Subset(Sequential(90), [*range(0, 80, 2)])),
    "repeat": Repeat(PoolShuffle(SHARDS, 9, 1), 3),
    "repeat of one record": Repeat(Sequential(1), 5),
    "weighted": Weighted(np.arange(30.0), 200, 0),
    "weighted once": Weighted(np.arange(30.0), 20, 0, replacement=False),
    "mixture": Mixture((GlobalShuffle(30, 0), SHARDS), (1, 3), "longest", 5),
    "mixture of any window": Mixture((GlobalShuffle(30, 0), SHARDS), (1, 3), "longest", 5, window="any"),
    "mixture of epochs": Mixture((GlobalShuffle(30, 0), SHARDS), ((1, 3), (2, 1)), "longest", 5),
    "mixture with an empty part": Mixture((Sequential(20), Sequential(0), Weighted(np.arange(9.0), 30, 0)), (1, 0, 3)),
    "schedule": Mixture((GlobalShuffle(30, 0), SHARDS), {0: (1, 0), 50: (0, 1), 90: (2, 3)}, "longest", 5, window=8),
    "schedules of epochs": Mixture(
        (Sequential(7), Mixture((SHARDS, Sequential(9)), (5, 2), "longest")),
        ({0: (1, 1), 9: (1, 0)}, (1, 9)),
        "longest",
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_positions_are_those_of_a_search(name):
    sampler = SAMPLERS[name]
    rng = np.random.default_rng(0)
    for epoch in (0, 1, 5):
        order = sampler.indices(np.arange(len(sampler)), epoch=epoch)
        for index in {0, 1, int(order.max()), int(order.max()) + 1, *rng.integers(0, order.max() + 1, 20).tolist()}:
            expected = np.flatnonzero(order == index)
            assert positions_of(sampler, index, epoch=epoch).tolist() == expected.tolist()
            below = int(rng.integers(0, len(sampler) + 1))
            found = positions_of(sampler, index, epoch=epoch, below=below)
            assert found.dtype == np.int64
            assert found.tolist() == expected[expected < below].tolist()


def test_large_orders_are_not_searched():
    records = 10**10
    shards = (10**6,) * (records // 10**6)
    for sampler in (
        GlobalShuffle(records, 1),
        PoolShuffle(ShardSequential(shards, 1), 10**5, 1),
        Lanes(ShardSequential(shards, 1), 1024, 1000),
        Subset(GlobalShuffle(records, 1), slice(0, records, 2)),
        Mixture((GlobalShuffle(records // 2, 1), Sequential(records // 2)), {0: (9, 1), 10**6: (1, 1)}, "longest"),
    ):
        for index in (0, 123_456_789, records - 1):
            found = positions_of(sampler, index, epoch=3)
            assert sampler.indices(found, epoch=3).tolist() == [index] * len(found)
            assert len(found) == 1 or isinstance(sampler, Subset)


def test_a_mixture_that_never_ends():
    planner = BatchSampler(sampler=Mixture((GlobalShuffle(1000, 1), Sequential(10)), (1, 1), "never"), batch_size=4)
    with pytest.raises(ConfigError, match=r"epoch 2 never ends \(it has [0-9,]+ steps\): give the steps to search"):
        servings_of(planner, 5, epoch=2)
    for first in (0, 10**12):  # far from the start, too
        steps = range(first, first + 1000)
        found = servings_of(planner, 5, epoch=2, steps=steps)
        assert [(serving.step, serving.row) for serving in found] == [
            (plan.step, row) for plan in planner.plans(steps, epoch=2) for row in np.flatnonzero(plan.indices == 5)
        ]
        assert len(found) in (1, 2, 3)


LENGTHS = np.random.default_rng(0).integers(1, 9, 50)
PLANNERS = {
    "positions": BatchSampler(sampler=GlobalShuffle(50, 0), batch_size=4, world_size=3, tail="pad"),
    "dropped": BatchSampler(sampler=GlobalShuffle(50, 0), batch_size=4, world_size=3, tail="drop"),
    "resumed": BatchSampler(sampler=Weighted(np.arange(50.0), 90, 0), batch_size=4, origin=6),
    "buckets": BucketBatchSampler(lengths=LENGTHS, max_tokens=20, world_size=2),
    "packed": PackedBatchSampler(
        sampler=GlobalShuffle(50, 0), lengths=LENGTHS, row_length=16, batch_size=2, world_size=2, window=20
    ),
    "streams": StreamSampler(sequence_lengths=(20, 30), rows=4, chunk=3, mode="split", seed=2, world_size=2),
    "single streams": StreamSampler(sequence_lengths=(20, 30), rows=4, mode="pack", ends="pad", seed=2, world_size=2),
}


@pytest.mark.parametrize("name", PLANNERS)
def test_servings_are_the_rows_of_the_plans(name):
    planner = PLANNERS[name]
    for epoch in range(2):
        expected = {index: [] for index in range(50)}
        for step in range(planner.steps(epoch)):
            for rank in range(planner.world_size):
                (plan,) = planner.with_ranks(rank=rank).plans(range(step, step + 1), epoch=epoch)
                valid = np.ones(len(plan.indices), np.bool_) if plan.valid is None else plan.valid.ravel()
                for i, index in enumerate(plan.indices.tolist()):
                    if plan.packing is not None:
                        place = (int(plan.packing.rows[i]), int(plan.packing.starts[i]))
                    elif not valid[i]:
                        continue
                    else:
                        place = divmod(i, plan.chunk) if plan.chunk > 1 else (i, None)
                    expected[index].append(Serving(epoch, step, rank, *place))
        for index, servings in expected.items():
            assert servings_of(planner, index, epoch=epoch) == servings
            some = [serving for serving in servings if serving.step in (2, 3)]
            assert servings_of(planner, index, epoch=epoch, steps=range(2, 4)) == some
    assert servings_of(planner, 50, epoch=0) == []
