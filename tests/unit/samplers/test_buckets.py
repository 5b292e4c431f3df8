"""BucketBatchSampler: every record once, batches of one bucket, and the same ones for any ranks and any split."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload import ConfigError
from dataload.samplers import BucketBatchSampler


def all_plans(planner, epoch=0):
    return planner.plans(range(planner.steps(epoch)), epoch=epoch)


def rows(plan):
    """Indices that count."""
    return plan.indices.tolist() if plan.valid is None else plan.indices[plan.valid].tolist()


def lengths_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 60, count)


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
    ranks = [
        BucketBatchSampler(
            lengths=lengths,
            max_tokens=max_tokens,
            boundaries=boundaries,
            group=group,
            shuffle=shuffle,
            tail=tail,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    limits = ranks[0].boundaries
    assert len({planner.steps(epoch) for planner in ranks}) == 1
    served = []
    for planner in ranks:
        for plan in all_plans(planner, epoch):
            batch = rows(plan)
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
    lengths = lengths_of(2000)

    def batches(world_size):
        per_rank = [
            all_plans(
                BucketBatchSampler(lengths=lengths, max_tokens=500, group=group, rank=rank, world_size=world_size), 2
            )
            for rank in range(world_size)
        ]
        return [plan.indices.tolist() for step in zip(*per_rank, strict=True) for plan in step if len(plan.indices)]

    assert batches(1) == batches(2) == batches(5)


def test_ranks_are_in_one_bucket_at_a_step_when_the_group_is_a_multiple_of_them():
    lengths = lengths_of(5000)
    planners = [
        BucketBatchSampler(lengths=lengths, max_tokens=300, group=8, rank=rank, world_size=4) for rank in range(4)
    ]
    limits = np.array(planners[0].boundaries)
    buckets = [
        {int(np.searchsorted(limits, lengths[plan.indices[0]])) for plan in step if len(plan.indices)}
        for step in zip(*map(all_plans, planners), strict=True)
    ]
    same = [len(found) == 1 for found in buckets]
    # Of each bucket at most 7 batches are outside of a group of 8.
    assert all(same[: len(same) - 7 * len(limits) // 4 - 1])
    assert sum(same) > 0.8 * len(same)


def test_any_split_of_steps_gives_the_same_and_epochs_differ():
    planner = BucketBatchSampler(lengths=lengths_of(3000), max_tokens=400, tail="pad", world_size=3, rank=1)
    whole = all_plans(planner)
    for plan in whole[::7]:
        (alone,) = planner.plans(range(plan.step, plan.step + 1), epoch=0)
        assert alone.step == plan.step
        assert np.array_equal(alone.indices, plan.indices)
        assert np.array_equal(alone.valid, plan.valid)
    other = all_plans(planner, 1)
    assert [plan.indices.tolist() for plan in whole] != [plan.indices.tolist() for plan in other]
    assert {frozenset(rows(plan)) for plan in whole}.isdisjoint(
        {frozenset(rows(plan)) for plan in other if len(rows(plan)) > 9}
    )


def test_without_shuffling_records_come_by_bucket_and_index():
    planner = BucketBatchSampler(lengths=[5, 1, 5, 1, 9, 1], batch_size=2, boundaries=(1, 5, 9), shuffle=False)
    assert [plan.indices.tolist() for plan in all_plans(planner)] == [[1, 3], [5], [0, 2], [4]]


def test_records_and_batches_are_mixed_evenly():
    # 40 buckets of 50 records: where a record's batch comes in the epoch is uniform, by chi-square over 300 epochs.
    lengths = np.repeat(np.arange(1, 41), 50)
    planner = BucketBatchSampler(lengths=lengths, batch_size=10, boundaries=tuple(range(1, 41)))
    assert len(planner) == 200
    counts = np.zeros(20)
    mates = np.zeros(50)
    for epoch in range(300):
        plans = all_plans(planner, epoch)
        (step,) = [plan.step for plan in plans if 7 in plan.indices]
        counts[step * 20 // 200] += 1
        mates[plans[step].indices] += 1
    assert counts.sum() == 300
    assert ((counts - 15) ** 2 / 15).sum() < 19 + 4 * np.sqrt(38)
    mates = np.delete(mates, 7)  # each of the other 49 shares a batch in 9 of 49 epochs
    expected = 300 * 9 / 49
    assert ((mates - expected) ** 2 / expected).sum() < 48 + 4 * np.sqrt(96)


def test_the_default_boundaries_waste_little():
    lengths = np.random.default_rng(0).lognormal(5, 0.7, 20_000).astype(np.int64) + 1
    planner = BucketBatchSampler(lengths=lengths, max_tokens=4 * int(lengths.max()))
    padded = sum(int(lengths[plan.indices].max()) * len(plan.indices) for plan in all_plans(planner))
    assert padded < 1.25 * lengths.sum()
    assert len(planner.boundaries) < 40


def test_resume_on_other_ranks_loses_and_repeats_nothing():
    lengths = lengths_of(700)
    before = BucketBatchSampler(lengths=lengths, max_tokens=200, world_size=3)
    position = before.position(11, epoch=4)
    assert position == 33
    served = [
        index
        for rank in range(3)
        for plan in BucketBatchSampler(lengths=lengths, max_tokens=200, world_size=3, rank=rank).plans(
            range(11), epoch=4
        )
        for index in plan.indices.tolist()
    ]
    for rank in range(2):
        after, step = BucketBatchSampler(lengths=lengths, max_tokens=200, world_size=2, rank=rank).resume(position)
        for plan in after.plans(range(step, after.steps(4)), epoch=4):
            served += plan.indices.tolist()
    assert sorted(served) == list(range(700))


def test_it_is_a_value():
    one, same, other = (BucketBatchSampler(lengths=lengths_of(50, s), max_tokens=100) for s in (0, 0, 1))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(ValueError, match="read-only"):
        one.lengths[0] = 3


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_tokens": 9, "batch_size": 2}, "give either max_tokens or batch_size, got 9 and 2"),
        ({}, "give either max_tokens or batch_size, got None and None"),
        ({"max_tokens": 4}, "max_tokens must be at least 5, the boundary of the longest bucket that has"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"batch_size": 1, "group": 0}, "group must be an integer >= 1, got 0"),
        ({"batch_size": 1, "boundaries": (3, 3, 9)}, r"boundaries must ascend, got \(3, 3, 9\)"),
        ({"batch_size": 1, "boundaries": (3,)}, r"boundaries must reach the longest record, 5; got \(3,\)"),
        ({"batch_size": 1, "boundaries": ()}, r"boundaries must hold at least one length, got \(\)"),
        ({"batch_size": 1, "boundaries": 5}, "boundaries must hold at least one length, got 5"),
        ({"batch_size": 1, "boundaries": (1.5, 9)}, r"boundaries\[0\] must be an integer >= 0, got 1.5"),
        ({"batch_size": 1, "seed": "x"}, "seed must be an integer, got 'x'"),
        ({"batch_size": 1, "rank": 1}, r"rank must be an integer in \[0, 1\), got 1"),
        ({"batch_size": 1, "lengths": [1, -2]}, "lengths must be 0 or more, got -2 for record 1"),
        ({"batch_size": 1, "lengths": [0.5]}, "lengths must be integers, one per record"),
        ({"batch_size": 1, "lengths": [[1]]}, "lengths must be integers, one per record"),
        ({"batch_size": 1, "lengths": [[1], 2]}, "lengths must be integers, one per record"),
    ],
)
def test_wrong_settings_are_named(settings, match):
    with pytest.raises(ConfigError, match=match):
        BucketBatchSampler(**{"lengths": [5, 1, 3], **settings})
