"""BucketBatchSampler: every record once, batches of one bucket, and the same ones for any ranks and any split."""

from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from orders import plans_of, rows_of

from dataload.samplers import BucketBatchSampler


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
    lengths = np.random.default_rng(0).integers(0, 60, 2000)
    planner = partial(BucketBatchSampler, lengths=lengths, max_tokens=500, group=group)

    def batches(world_size):
        ranks = [plans_of(planner(rank=rank, world_size=world_size), 2) for rank in range(world_size)]
        return [plan.indices.tolist() for step in zip(*ranks, strict=True) for plan in step if len(plan.indices)]

    assert batches(1) == batches(2) == batches(5)


def test_batches_are_those_of_earlier_versions():
    settings = {"lengths": [i * 5 % 11 for i in range(24)], "max_tokens": 20, "boundaries": (3, 6, 10), "group": 2}
    shuffled = [[10, 21, 14], [1, 23, 3], [4, 17], [6, 19], [18, 16, 20, 0, 9, 5], [22, 11, 7], [8, 13], [2, 15], [12]]
    in_order = [[0, 5, 7, 9, 11, 16], [18, 20, 22], [1, 3, 10], [12, 14, 21], [2, 4], [6, 8], [13, 15], [17, 19], [23]]
    for shuffle, expected in ((True, shuffled), (False, in_order)):
        planner = BucketBatchSampler(seed=3, shuffle=shuffle, **settings)
        assert [plan.indices.tolist() for plan in plans_of(planner, 1)] == expected
    assert planner.rows_per_step == 24 // 9
    assert BucketBatchSampler(lengths=[], max_tokens=5).rows_per_step == 1
    assert BucketBatchSampler(lengths=[2] * 3, max_tokens=9).rows_per_step == 3
    grown = BucketBatchSampler(lengths=[3, 40, 12, 12, 7], max_tokens=100).boundaries
    assert grown == (3, 4, 5, 7, 9, 12, 16, 20, 25, 32, 40)
