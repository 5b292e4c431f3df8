"""Where a record is served: the computed inverse of an order against a search of the order."""

import numpy as np
import pytest

from dataload._util.randomness import derive_key
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
from dataload.samplers.inverse import Serving, positions_of, servings_of
from dataload.samplers.permutation import KEY_WORDS, permute, unpermute
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
    "weighted": Weighted(np.arange(30.0), 200, 0),
    "weighted once": Weighted(np.arange(30.0), 20, 0, replacement=False),
    "mixture": Mixture((GlobalShuffle(30, 0), SHARDS), (1, 3), "longest", 5),
    "mixture of epochs": Mixture((GlobalShuffle(30, 0), SHARDS), ((1, 3), (2, 1)), "longest", 5),
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


@pytest.mark.parametrize("n", [1, 2, 1000, 1025, 65_537, 2**31 + 5, 2**40 + 1, 2**48])
def test_the_inverse_of_a_permutation(n):
    for number in range(3):
        key = derive_key(7, "test", number, words=KEY_WORDS)
        positions = np.random.default_rng(n).integers(0, n, 50)
        images = permute(positions, n, key)
        assert [unpermute(image, n, key) for image in images.tolist()] == positions.tolist()


def test_large_orders_are_not_searched():
    records = 10**10
    shards = (10**6,) * (records // 10**6)
    for sampler in (
        GlobalShuffle(records, 1),
        PoolShuffle(ShardSequential(shards, 1), 10**5, 1),
        Lanes(ShardSequential(shards, 1), 1024, 1000),
        Subset(GlobalShuffle(records, 1), slice(0, records, 2)),
    ):
        for index in (0, 123_456_789, records - 1):
            found = positions_of(sampler, index, epoch=3)
            assert sampler.indices(found, epoch=3).tolist() == [index] * len(found)
            assert len(found) == 1 or isinstance(sampler, Subset)


LENGTHS = np.random.default_rng(0).integers(1, 9, 50)
PLANNERS = {
    "positions": BatchSampler(sampler=GlobalShuffle(50, 0), batch_size=4, world_size=3, tail="pad"),
    "dropped": BatchSampler(sampler=GlobalShuffle(50, 0), batch_size=4, world_size=3, tail="drop"),
    "resumed": BatchSampler(sampler=Weighted(np.arange(50.0), 90, 0), batch_size=4, origin=6),
    "buckets": BucketBatchSampler(lengths=LENGTHS, max_tokens=20, world_size=2),
    "packed": PackedBatchSampler(
        sampler=GlobalShuffle(50, 0), lengths=LENGTHS, row_length=16, batch_size=2, world_size=2
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
            assert servings_of(planner, index, epoch=epoch, steps=range(2, 4)) == [
                serving for serving in servings if serving.step in (2, 3)
            ]


def test_arguments_are_checked():
    planner = PLANNERS["positions"]
    with pytest.raises(ConfigError, match="index must be an integer >= 0"):
        servings_of(planner, -1, epoch=0)
    with pytest.raises(ConfigError, match="epoch must be an integer >= 0"):
        servings_of(planner, 0, epoch=-1)
    assert servings_of(planner, 50, epoch=0) == []
