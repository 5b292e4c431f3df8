"""BatchSampler against plain lists, and what all planners share."""

import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import plans_of

from dataload import ConfigError
from dataload.samplers import BatchSampler, BucketBatchSampler, GlobalShuffle, Lanes, PackedBatchSampler, Sequential
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
def test_a_planner_is_a_value(planner):
    plans_of(planner)
    again = pickle.loads(pickle.dumps(planner))
    assert again == planner
    assert hash(again) == hash(planner)
    assert replace(planner, world_size=2) != planner
    for name in ("lengths",) if hasattr(planner, "lengths") else ():
        with pytest.raises(ValueError, match="read-only"):
            getattr(planner, name)[0] = 3
        assert replace(planner, lengths=LENGTHS[::-1]) != planner


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
