"""BatchSampler against plain lists."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload import ConfigError
from dataload.samplers import (
    BatchSampler,
    BucketBatchSampler,
    GlobalShuffle,
    Lanes,
    PackedBatchSampler,
    Sequential,
)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: BatchSampler(sampler=Sequential(4), batch_size=0), "batch_size must be an integer >= 1, got 0"),
        (lambda: BatchSampler(sampler=Sequential(4), batch_size=True), "batch_size must be an integer >= 1, got True"),
        (lambda: BatchSampler(sampler=Sequential(4), batch_size=1, world_size=0), "world_size must be an integer >= 1"),
        (
            lambda: BatchSampler(sampler=Sequential(4), batch_size=1, world_size=2, rank=2),
            r"rank must be an integer in \[0, 2\), got 2",
        ),
        (lambda: BatchSampler(sampler=Sequential(4), batch_size=1, rank=-1), r"rank must be an integer in \[0, 1\)"),
        (lambda: BatchSampler(sampler=Sequential(4), batch_size=1, origin=-1), "origin must be an integer >= 0"),
        (
            lambda: BatchSampler(sampler=Sequential(4), batch_size=1, tail="dorp"),
            "tail is 'dorp': did you mean 'drop'",
        ),
        (
            lambda: BatchSampler(sampler=Lanes(Sequential(40), 6), batch_size=1, world_size=4),
            "lanes must be a multiple of world_size, 4, so that each rank has its own; got 6",
        ),
    ],
)
def test_wrong_settings_are_named(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


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


@pytest.mark.parametrize("tail", ["drop", "pad", "partial"])
def test_the_global_batches_do_not_depend_on_the_number_of_ranks(tail):
    def global_batches(world_size):
        per_rank = []
        for rank in range(world_size):
            batches = BatchSampler(
                sampler=GlobalShuffle(103, 1), batch_size=12 // world_size, world_size=world_size, rank=rank, tail=tail
            )
            per_rank.append(batches.plans(range(len(batches)), epoch=3))
        steps = []
        for plans in zip(*per_rank, strict=True):
            rows = [
                (i, v)
                for p in plans
                for i, v in zip(p.indices, p.valid if p.valid is not None else [True] * 99, strict=False)
            ]
            steps.append(sorted(rows))
        return steps

    assert global_batches(1) == global_batches(2) == global_batches(3) == global_batches(4)


def test_position_counts_what_is_consumed():
    batches = BatchSampler(sampler=Sequential(10), batch_size=2, world_size=2)
    assert [batches.position(step, epoch=0) for step in range(len(batches) + 1)] == [0, 4, 8, 10]


@pytest.mark.parametrize(
    "planner",
    [
        BatchSampler(sampler=GlobalShuffle(1000, 1), batch_size=4),
        BucketBatchSampler(lengths=np.arange(1000) % 50, max_tokens=200, seed=1),
        PackedBatchSampler(sampler=GlobalShuffle(1000, 1), lengths=np.arange(1000) % 50, row_length=64, batch_size=3),
    ],
)
@pytest.mark.parametrize("tail", ["drop", "pad", "partial"])
def test_dealt_otherwise_is_as_if_made_so(planner, tail):
    dealing = {"world_size": 3, "rank": 1, "tail": tail, "origin": 2}
    planner.steps(0)  # what it computes for itself must not decide what the other gives
    found, expected = planner.with_ranks(**dealing), replace(planner, **dealing)
    assert found == expected
    assert found.steps(0) == expected.steps(0)
    steps = range(expected.steps(0))
    for one, other in zip(found.plans(steps, epoch=0), expected.plans(steps, epoch=0), strict=True):
        assert np.array_equal(one.indices, other.indices)
        assert np.array_equal(one.valid, other.valid) if tail == "pad" else one.valid is other.valid is None
    assert (planner.world_size, planner.tail, planner.origin) == (1, "partial", 0)
    with pytest.raises(ConfigError, match=r"rank must be an integer in \[0, 3\), got 3"):
        planner.with_ranks(world_size=3, rank=3)


def test_lanes_are_dealt_to_ranks_that_divide_them():
    planner = BatchSampler(sampler=Lanes(Sequential(100), 4), batch_size=2)
    assert planner.with_ranks(world_size=2, rank=1).rank == 1
    with pytest.raises(ConfigError, match="lanes must be a multiple of world_size, 3"):
        planner.with_ranks(world_size=3)


def test_what_was_computed_of_the_items_is_kept():
    buckets = BucketBatchSampler(lengths=np.arange(1000) % 50, max_tokens=200)
    assert buckets.with_ranks(origin=5)._buckets is buckets._buckets
    packed = PackedBatchSampler(sampler=Sequential(100), lengths=[3] * 100, row_length=8, batch_size=1)
    assert packed.with_ranks(origin=5)._ends is packed._ends
