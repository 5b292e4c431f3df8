"""BatchSampler against plain lists, what all planners share, and inverse orders against a search of the order."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import plans_of

from dataload.errors import ConfigError
from dataload.samplers import BatchSampler, BucketBatchSampler, Mixture, PackedBatchSampler, PoolShuffle, Weighted
from dataload.samplers.basic import GlobalShuffle, Lanes, Repeat, Sequential, ShardSequential, Subset
from dataload.samplers.batch import Serving, positions_of, servings_of
from dataload.streams import RowMixture, StreamSampler


def model(length, batch_size, world_size, rank, tail, origin):
    """Rows of a rank per step, as a plain loop over positions."""
    steps = []
    start, size = origin, batch_size * world_size
    while start < length:
        chunk = list(range(start, min(start + size, length)))
        if len(chunk) < size and tail == "drop":
            break
        mine = [p for i, p in enumerate(chunk) if i % world_size == rank]
        if tail == "pad":
            steps.append([(p, True) for p in mine] + [(length - 1, False)] * (batch_size - len(mine)))
        else:
            steps.append([(p, True) for p in mine])
        start += size
    return steps


@given(
    length=st.integers(0, 60),
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 5),
    tail=st.sampled_from(["drop", "pad", "partial"]),
    origin=st.integers(0, 8),
    data=st.data(),
)
def test_batches_are_those_of_the_plain_model(length, batch_size, world_size, tail, origin, data):
    counts = set()
    for rank in range(world_size):
        batches = BatchSampler(
            sampler=Sequential(length),
            batch_size=batch_size,
            world_size=world_size,
            rank=rank,
            tail=tail,
            origin=origin,
        )
        expected = model(length, batch_size, world_size, rank, tail, origin)
        counts.add(len(batches))
        assert len(batches) == len(expected)
        start = data.draw(st.integers(0, len(batches)))
        plans = [*batches.plans(range(start), epoch=0), *batches.plans(range(start, len(batches)), epoch=0)]
        assert [plan.step for plan in plans] == list(range(len(expected)))
        for plan, rows in zip(plans, expected, strict=True):
            valid = [True] * len(plan.indices) if plan.valid is None else plan.valid.tolist()
            assert list(zip(plan.indices.tolist(), valid, strict=True)) == rows
        assert (tail == "pad") == all(plan.valid is not None for plan in plans) or not plans
    assert len(counts) == 1, "ranks have different numbers of steps"


LENGTHS = np.arange(1000) % 50
PLANNERS = [
    BatchSampler(sampler=GlobalShuffle(1000, 1), batch_size=4),
    BucketBatchSampler(lengths=LENGTHS, max_tokens=200, seed=1),
    PackedBatchSampler(sampler=GlobalShuffle(1000, 1), lengths=LENGTHS, row_length=64, batch_size=3),
]
each = pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: type(planner).__name__)


@each
@pytest.mark.parametrize("cut", [0, 3])
def test_a_job_that_goes_on_with_other_ranks_serves_each_item_once(planner, cut):
    before = planner.with_ranks(world_size=2)
    position = before.position(cut, epoch=4)
    assert position == cut * before.step_size
    served = [plan for rank in range(2) for plan in before.with_ranks(rank=rank).plans(range(cut), epoch=4)]
    for rank in range(3):
        after, step = planner.with_ranks(world_size=3, rank=rank).resume(position)
        assert (after.origin, step) == (position % after.step_size, position // after.step_size)
        served += after.plans(range(step, after.steps(4)), epoch=4)
    assert sorted(itertools.chain(*(plan.indices.tolist() for plan in served))) == list(range(1000))


def streams(mode):
    return StreamSampler(sequence_lengths=(60, 20, 40), rows=4, chunk=2, mode=mode)


@pytest.mark.parametrize("returned", [np.zeros(5), [1], None])
def test_a_sampler_of_ones_own_returns_an_index_for_each_position(returned):
    own = type("Own", (), {"__len__": lambda _: 5, "indices": lambda _, positions, epoch: [*positions]})
    assert positions_of(own(), 3, epoch=0).tolist() == [3]
    own.indices = lambda *_, epoch: returned
    with pytest.raises(ConfigError, match=r"^Own.indices must return an integer for each of 5 positions, got "):
        BatchSampler(sampler=own(), batch_size=5).plans(range(1), epoch=0)


@pytest.mark.parametrize(
    "planner",
    [*PLANNERS, streams("split"), streams("shuffled"), RowMixture(parts=(streams("pack"), streams("shuffled")))],
)
def test_an_origin_skips_the_steps_before_it(planner):
    whole, moved = planner.steps(1), planner.with_ranks(origin=3 * planner.step_size)
    assert moved.steps(1) == whole - 3
    assert [moved.position(step, epoch=1) for step in (0, 2)] == [3 * planner.step_size, 5 * planner.step_size]
    for found, expected in zip(moved.plans(range(2), epoch=1), planner.plans(range(3, 5), epoch=1), strict=True):
        assert found.step == expected.step - 3
        assert found.indices.tolist() == expected.indices.tolist()


@each
@pytest.mark.parametrize("tail", ["drop", "pad", "partial"])
def test_dealt_otherwise_is_as_if_made_so(planner, tail):
    dealing = {"world_size": 3, "rank": 1, "tail": tail, "origin": 2}
    planner.steps(0)  # what it computes for itself must not decide what the other gives
    found, expected = planner.with_ranks(**dealing), replace(planner, **dealing)
    assert found == expected
    assert found.steps(0) == expected.steps(0)
    assert planner.with_ranks(tail=tail, origin=2000).steps(0) == 0
    for one, other in zip(plans_of(found), plans_of(expected), strict=True):
        assert np.array_equal(one.indices, other.indices)
        assert np.array_equal(one.valid, other.valid) if tail == "pad" else one.valid is other.valid is None
    assert (planner.world_size, planner.tail, planner.origin) == (1, "partial", 0)
    with pytest.raises(ConfigError):
        planner.with_ranks(world_size=3, rank=3)


def test_lanes_are_dealt_to_ranks_that_divide_them():
    planner = BatchSampler(sampler=Lanes(Sequential(100), 4), batch_size=2)
    assert planner.with_ranks(world_size=2, rank=1).rank == 1
    with pytest.raises(ConfigError):
        planner.with_ranks(world_size=3)
    assert [planner.position(step, epoch=0) for step in (0, 1, 49, 50)] == [0, 2, 98, 100]


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
        Mixture((GlobalShuffle(records // 2, 1), Sequential(records // 2)), (2, 1), "never", max_epochs=1),
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


LENGTHS_INVERSE = np.random.default_rng(0).integers(1, 9, 50)
PLANNERS_INVERSE = {
    "positions": BatchSampler(sampler=GlobalShuffle(50, 0), batch_size=4, world_size=3, tail="pad"),
    "dropped": BatchSampler(sampler=GlobalShuffle(50, 0), batch_size=4, world_size=3, tail="drop"),
    "resumed": BatchSampler(sampler=Weighted(np.arange(50.0), 90, 0), batch_size=4, origin=6),
    "buckets": BucketBatchSampler(lengths=LENGTHS_INVERSE, max_tokens=20, world_size=2),
    "packed": PackedBatchSampler(
        sampler=GlobalShuffle(50, 0), lengths=LENGTHS_INVERSE, row_length=16, batch_size=2, world_size=2, window=20
    ),
    "streams": StreamSampler(sequence_lengths=(20, 30), rows=4, chunk=3, mode="split", seed=2, world_size=2),
    "single streams": StreamSampler(sequence_lengths=(20, 30), rows=4, mode="pack", ends="pad", seed=2, world_size=2),
}


@pytest.mark.parametrize("name", PLANNERS_INVERSE)
def test_servings_are_the_rows_of_the_plans(name):
    planner = PLANNERS_INVERSE[name]
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
            some = [serving for serving in servings if serving.step < 2]
            assert servings_of(planner, index, epoch=epoch, steps=range(-3, 2)) == some
    assert servings_of(planner, 50, epoch=0) == []
