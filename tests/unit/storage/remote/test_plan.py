"""Downloads and evictions are as few as Belady's optimum, never for what is wanted later, and end in no deadlock."""

import hashlib
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload.errors import ConfigError
from dataload.samplers import PoolShuffle, ShardSequential
from dataload.storage.remote.prefetch.plan import CachePlan, Download, Evict, Use, check_fit, step_bytes


def uses_of(steps, start=0):
    """Steps given as (epoch, shards of the rows)."""
    for step, (epoch, shards) in enumerate(steps, start):
        for shard, rows in sorted(Counter(shards).items()):
            yield Use(step, step, epoch, shard, rows)


def taken(uses, count=50):
    return [use for _, use in zip(range(count), uses, strict=False)]


def pooled(shards, records, pool, epochs, batch=16):
    order = PoolShuffle(ShardSequential((records,) * shards, 1), pool, 1)
    for epoch in range(epochs):
        found = order.indices(np.arange(len(order)), epoch=epoch) // records
        for start in range(0, len(found), batch):
            yield epoch, found[start : start + batch].tolist()


def optimum(steps, budget):
    """Downloads of Belady's algorithm for shards of one byte: on a miss the farthest next use makes room."""
    sequence = [shard for _, shards in steps for shard in sorted(set(shards))]
    following, last = [0.0] * len(sequence), {}
    for at in range(len(sequence) - 1, -1, -1):
        following[at] = last.get(sequence[at], float("inf"))
        last[sequence[at]] = at
    held, downloads = {}, 0
    for at, shard in enumerate(sequence):
        if shard not in held:
            downloads += 1
            if len(held) == budget:
                del held[max(held, key=held.__getitem__)]
        held[shard] = following[at]
    return downloads


def run(plan, steps, uses):
    """Let a consumer read all steps; return the downloads in order, and the rows read by range."""
    downloads, by_range = [], 0
    for step, (_, shards) in enumerate(steps):
        plan.receive(step)
        while True:
            if plan.wants_more():
                plan.extend(taken(uses))
                continue
            action = plan.next()
            if action is None:
                break
            if isinstance(action, Download):
                downloads.append(action.shard)
        by_range += sum(shard not in plan.resident for shard in shards)
    return downloads, by_range


@pytest.mark.parametrize("part", [0.1, 0.25, 0.5, 0.75, 1])
def test_downloads_are_as_few_as_possible(part):
    shards, records, epochs = 80, 200, 2
    steps = list(pooled(shards, records, 2 * records, epochs))
    budget = int(part * shards)
    downloads, by_range = run(CachePlan([1] * shards, budget), steps, uses_of(steps))
    assert len(downloads) <= 1.01 * optimum(steps, budget)
    assert by_range <= (0.05 if part == 0.1 else 0.002) * shards * records * epochs
    if part == 0.1:
        assert len(downloads) <= shards * epochs


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(0, 20),
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6), max_size=40),
    st.sets(st.integers(0, 7)),
    st.integers(1, 4),
)
def test_a_reader_never_waits_for_ever_and_the_budget_holds(sizes, more, steps, whole, workers):
    """Nor if the order ends, and workers that are ahead have made the plan give up what others have yet to read."""
    budget = max(sizes) + more
    steps = [(step // 10, [shard % len(sizes) for shard in shards]) for step, shards in enumerate(steps)]
    plan, uses = CachePlan(sizes, budget, whole=whole), uses_of(steps)
    for step in range(len(steps)):
        received = step - step % workers
        plan.receive(received)
        _, shards = steps[min(received + workers, len(steps)) - 1 - step % workers]  # the farthest first
        for shard in dict.fromkeys(shards):
            for _ in range(200):
                if plan.wants_more():
                    plan.extend(taken(uses, 5))
                elif shard in plan.resident or plan.is_by_range(shard):
                    break
                else:
                    plan.next([shard])
                assert sum(sizes[each] for each in plan.resident) <= budget
            else:
                pytest.fail(f"shard {shard} never comes")


def test_resident_shards_are_kept_and_failures_are_left_to_readers():
    plan = CachePlan([1, 1, 1], None, resident=[1])
    plan.extend(uses_of([(0, [0]), (0, [1]), (0, [2])]))
    assert [plan.next(), plan.next()] == [Download(0), Download(2)]
    plan.forget(0)
    assert plan.next() is None
    assert plan.is_by_range(0)
    plan.lose(1)
    assert plan.next() == Download(1)


def test_whole_shards_that_do_not_fit_together_are_refused():
    uses = [*uses_of([(0, [0, 1]), (0, [1, 2]), (0, [1, 2])])]
    assert step_bytes(uses, [10, 20, 30], [0, 1, 2]) == 50
    assert step_bytes(uses, [10, 20, 30], [0, 2]) == 30
    assert step_bytes(uses, [10, 20, 90], [0, 2]) == 90
    assert step_bytes(uses, [10, 20, 30], []) == 0
    check_fit(50, 50)
    check_fit(50, None)
    message = "shards of 50 bytes are read together, can only be read as a whole, and do not fit into the 49 bytes"
    with pytest.raises(ConfigError, match=message):
        check_fit(50, 49)


@pytest.mark.parametrize("whole", [(), range(8)])
def test_a_budget_that_shrinks_is_given_back_and_comes_again(whole):
    """What is read now is read by range where that is possible, and all else is downloaded again later."""
    steps = [(0, [step // 2, (step // 2 + 1) % 8]) for step in range(16)]
    plan, uses = CachePlan([10] * 8, 60, whole=whole), uses_of(steps)
    given_back = []

    def carry_out():
        for _ in range(100):
            if plan.wants_more():
                plan.extend(taken(uses))
            elif (action := plan.next()) is None:
                break
            elif isinstance(action, Evict):
                given_back.append(action)

    carry_out()
    assert len(plan.resident) == 6
    plan.budget = 10
    carry_out()
    assert not plan.exceeds_budget
    assert [action.shard for action in given_back[:4]] == [5, 4, 3, 2]  # the farthest first
    assert plan.is_by_range(1) == (not whole)
    plan.budget = 40
    for step, (_, shards) in enumerate(steps):
        plan.receive(step)
        carry_out()
        for shard in shards:
            for _ in range(50):
                if shard in plan.resident or plan.is_by_range(shard):
                    break
                plan.next([shard])
            else:
                pytest.fail(f"shard {shard} never comes")
        assert 10 * len(plan.resident) <= 40
    plan.forget(1 if 1 not in plan.resident else 2)  # it may be evicted when its download fails


def below(generator, count):
    """A number in [0, count); only `random` is promised to stay the same in every version of Python."""
    return int(generator.random() * count)


def decisions(seed):
    """What a plan says, call by call, for a random data set, budget and order, to readers that are ahead."""
    generator = random.Random(seed)
    sizes = [1 + below(generator, 9) for _ in range(2 + below(generator, 7))]
    budget = max(sizes) + below(generator, sum(sizes))
    shards = range(len(sizes))
    whole = [shard for shard in shards if generator.random() < 0.3]
    steps = [
        (step // 12, [(step // 3 + below(generator, 3)) % len(sizes) for _ in range(1 + below(generator, 6))])
        for step in range(40)
    ]
    plan, uses = CachePlan(sizes, budget, [below(generator, len(sizes))], whole=whole), uses_of(steps)
    for step in range(len(steps)):
        plan.receive(step)
        if step == 25:
            plan.budget = max(sizes)
        if generator.random() < 0.1 and plan.resident:
            plan.lose(max(plan.resident))
        soon = steps[min(step + below(generator, 4), len(steps) - 1)][1]
        waiting = [shard for shard in soon if shard not in plan.resident] if generator.random() < 0.7 else []
        for _ in range(12):
            if more := plan.wants_more():
                plan.extend(taken(uses, 1 + below(generator, 9)))
            action = plan.next(waiting)
            yield more, action, plan.exceeds_budget, [plan.is_by_range(shard) for shard in shards]
            if action is None:
                break
            if isinstance(action, Download) and generator.random() < 0.05:
                plan.forget(action.shard)


def test_decisions_are_those_recorded():
    """A change that decides otherwise on purpose may record them anew, if the other tests of this file pass."""
    found = hashlib.sha256()
    for seed in range(40):
        for decision in decisions(seed):
            found.update(repr(decision).encode())
    assert found.hexdigest()[:16] == "e45ec94ef1041d89"
