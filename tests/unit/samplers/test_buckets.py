"""BucketBatchSampler: every record once, batches of one bucket, and the same ones for any ranks and any split."""

from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from orders import plans_of, rows_of

from dataload.samplers import BucketBatchSampler


def lengths_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 60, count)


@example(
    lengths=[*range(40)], max_tokens=40, boundaries=(20, 40), group=3, world_size=2, tail="pad", shuffle=True, epoch=1
)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    max_tokens=st.integers(40, 200),
    boundaries=st.none() | st.sets(st.integers(1, 39), max_size=4).map(lambda found: (*sorted(found), 40)),
    group=st.integers(1, 4),
    world_size=st.integers(1, 4),
    tail=st.sampled_from(["drop", "pad", "partial"]),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_the_contract(lengths, max_tokens, boundaries, group, world_size, tail, shuffle, epoch):
    settings = {"max_tokens": max_tokens, "boundaries": boundaries, "group": group, "shuffle": shuffle, "tail": tail}
    planner = partial(BucketBatchSampler, lengths=lengths, world_size=world_size, **settings)
    ranks = [planner(rank=rank) for rank in range(world_size)]
    limits = ranks[0].boundaries
    assert len({planner.steps(epoch) for planner in ranks}) == 1
    served = []
    for planner in ranks:
        for plan in plans_of(planner, epoch):
            batch = rows_of(plan)
            assert (plan.valid is not None) == (tail == "pad")
            if not len(plan.indices):
                assert tail == "partial"
                continue
            longest = max(lengths[i] for i in plan.indices.tolist())
            (bucket,) = {sum(limit < lengths[i] for limit in limits) for i in plan.indices.tolist()}
            full = max(1, max_tokens // limits[bucket])
            assert len(plan.indices) == full or (tail == "partial" and len(plan.indices) < full)
            assert longest * len(plan.indices) <= max_tokens
            served += batch
    assert len(served) == len(set(served))
    if tail != "drop":
        assert sorted(served) == list(range(len(lengths)))
    else:  # at most a batch of each bucket is short, and at most a step has not enough batches
        most = sum(max_tokens // limit for limit in limits) + (world_size - 1) * max_tokens
        assert len(lengths) - len(served) <= most


@pytest.mark.parametrize("group", [1, 3, 8])
def test_batches_do_not_depend_on_the_ranks(group):
    planner = partial(BucketBatchSampler, lengths=lengths_of(2000), max_tokens=500, group=group)

    def batches(world_size):
        ranks = [plans_of(planner(rank=rank, world_size=world_size), 2) for rank in range(world_size)]
        return [plan.indices.tolist() for step in zip(*ranks, strict=True) for plan in step if len(plan.indices)]

    assert batches(1) == batches(2) == batches(5)


def test_ranks_are_in_one_bucket_at_a_step_when_the_group_is_a_multiple_of_them():
    lengths = lengths_of(5000)
    planners = [
        BucketBatchSampler(lengths=lengths, max_tokens=300, group=8, rank=rank, world_size=4) for rank in range(4)
    ]
    limits = np.array(planners[0].boundaries)
    buckets = [
        {int(np.searchsorted(limits, lengths[plan.indices[0]])) for plan in step if len(plan.indices)}
        for step in zip(*map(plans_of, planners), strict=True)
    ]
    same = [len(found) == 1 for found in buckets]
    # Of each bucket at most 7 batches are outside of a group of 8.
    assert all(same[: len(same) - 7 * len(limits) // 4 - 1])
    assert sum(same) > 0.8 * len(same)


def test_any_split_of_steps_gives_the_same_and_epochs_differ():
    planner = BucketBatchSampler(lengths=lengths_of(3000), max_tokens=400, tail="pad", world_size=3, rank=1)
    whole, other = plans_of(planner), plans_of(planner, 1)
    for plan in whole[::7]:
        (alone,) = planner.plans(range(plan.step, plan.step + 1), epoch=0)
        assert alone.step == plan.step
        assert np.array_equal(alone.indices, plan.indices)
        assert np.array_equal(alone.valid, plan.valid)
    assert [rows_of(plan) for plan in whole] != [rows_of(plan) for plan in other]
    large = {frozenset(rows_of(plan)) for plan in other if len(rows_of(plan)) > 9}
    assert large.isdisjoint(frozenset(rows_of(plan)) for plan in whole)


def test_without_shuffling_records_come_by_bucket_and_index():
    planner = BucketBatchSampler(lengths=[5, 1, 5, 1, 9, 1], batch_size=2, boundaries=(1, 5, 9), shuffle=False)
    assert [plan.indices.tolist() for plan in plans_of(planner)] == [[1, 3], [5], [0, 2], [4]]
    assert planner.rows_per_step == 1
    assert BucketBatchSampler(lengths=[1, 1], batch_size=2).rows_per_step == 2
    assert BucketBatchSampler(lengths=np.zeros(0, int), batch_size=2).rows_per_step == 1


def test_the_default_boundaries_waste_little():
    lengths = np.random.default_rng(0).lognormal(5, 0.7, 20_000).astype(np.int64) + 1
    planner = BucketBatchSampler(lengths=lengths, max_tokens=4 * int(lengths.max()))
    padded = sum(int(lengths[plan.indices].max()) * len(plan.indices) for plan in plans_of(planner))
    assert padded < 1.25 * lengths.sum()
    assert len(planner.boundaries) < 40
