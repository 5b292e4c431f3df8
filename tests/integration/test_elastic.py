"""A state saved anywhere on some ranks continues on others, whatever the order."""

import itertools
import json

import numpy as np
import pytest

from dataload import Loader, MemorySource, RangeSource, WorkerError
from dataload.samplers import (
    BucketBatchSampler,
    GlobalShuffle,
    Lanes,
    Mixture,
    PackedBatchSampler,
    PoolShuffle,
    Repeat,
    ShardSequential,
    Subset,
    Weighted,
)

SHARDS = (31, 0, 17, 50, 9, 13)
LENGTH = sum(SHARDS)

ORDERS = {
    "global": GlobalShuffle(LENGTH, 1),
    "pool": PoolShuffle(ShardSequential(SHARDS, 1), 16, 1),
    "lanes": Lanes(ShardSequential(SHARDS, 1), 12, pool_size=4, seed=1),
    "subset": Subset(GlobalShuffle(LENGTH, 1), slice(5, None, 2)),
    "repeat": Repeat(GlobalShuffle(LENGTH // 3, 1), 3),
    "weighted": Weighted(np.arange(LENGTH), 100, 1),
    "mixture": Mixture((GlobalShuffle(50, 1), GlobalShuffle(70, 2)), (1, 2), stop="longest"),
}


def served(loaders, steps=None):
    """The global batches of several ranks, side by side: rows in the order of the ranks, those that are valid."""
    batches = []
    iterators = [iter(loader) for loader in loaders]
    for _ in itertools.count() if steps is None else range(steps):
        parts = [next(iterator, None) for iterator in iterators]
        if all(part is None for part in parts):
            break
        assert not any(part is None for part in parts), "ranks have different numbers of steps"
        batches.append(sorted(i for part in parts for i in part["index"][part.get("valid", slice(None))].tolist()))
    return batches


def loaders(name, batch_size, world_size, **settings):
    return [
        Loader(
            RangeSource(LENGTH),
            batch_size=batch_size,
            sampler=ORDERS[name],
            seed=1,
            rank=rank,
            world_size=world_size,
            **settings,
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("before", "after"), [((3, 4), (3, 4)), ((3, 4), (6, 2)), ((3, 4), (1, 12)), ((4, 1), (1, 4))])
def test_the_same_global_batches_on_other_ranks(name, before, after):
    batch_size, world_size = before
    whole = served(loaders(name, batch_size, world_size))
    assert len(whole) >= 5
    for step in (0, 1, 4, len(whole) - 1):
        first = loaders(name, batch_size, world_size)
        assert served(first, step) == whole[:step]
        states = {json.dumps(loader.state_dict()) for loader in first}
        assert len(states) == 1, "ranks save different states"
        then = loaders(name, *after, num_workers=1)
        for loader in then:
            loader.load_state_dict(json.loads(*states))
        assert served(then) == whole[step:]
        for loader in then:
            loader.close()


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("before", "after", "last"), [((3, 4), (5, 2), (2, 3)), ((2, 1), (7, 1), (1, 6))])
def test_nothing_is_lost_or_repeated_with_other_batches(name, before, after, last):
    expected = sorted(i for batch in served(loaders(name, 10, 1)) for i in batch)
    found, state = [], None
    for ranks, steps in ((before, 3), (after, 2), (last, None)):
        running = loaders(name, *ranks)
        if state is not None:
            for loader in running:
                loader.load_state_dict(state)
        found += [i for batch in served(running, steps) for i in batch]
        state = running[-1].state_dict()
    assert sorted(found) == expected
    assert (state["epoch"], state["position"]) == (1, 0)


@pytest.mark.parametrize("size", [{"global_batch_size": 12}, {"batch_size": 3}], ids=["kept", "not kept"])
def test_the_global_batch_is_kept_on_other_ranks_if_asked(size):
    found, state = [], None
    for world_size, steps in ((4, 3), (2, 2), (3, None)):
        running = [
            Loader(RangeSource(LENGTH), **size, shuffle=True, seed=1, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        if state is not None:
            for loader in running:
                loader.load_state_dict(state)
        found += served(running, steps)
        state = running[-1].state_dict()
    sizes = [len(batch) for batch in found]
    assert sizes == ([12] * 10 if "global_batch_size" in size else [12] * 3 + [6] * 2 + [9] * 8)
    assert sorted(i for batch in found for i in batch) == list(range(LENGTH))


TOKENS = [{"tokens": np.full(1 + i * 7 % 23, i, np.int32)} for i in range(120)]
LENGTHS = [len(record["tokens"]) for record in TOKENS]


@pytest.mark.parametrize("tail", ["pad", "partial"])
def test_packed_rows_continue_on_other_ranks(tail):
    planner = PackedBatchSampler(sampler=GlobalShuffle(120, 5), lengths=LENGTHS, row_length=32, batch_size=2, window=32)

    def run(world_size, steps, state):
        """Rows by global number, and the state afterwards."""
        rows = []
        running = [
            Loader(MemorySource(TOKENS), batch_sampler=planner, tail=tail, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for loader in running:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in running]
        for _ in range(steps if steps is not None else len(running[0]) - running[0].step):
            parts = [next(iterator) for iterator in iterators]
            for row in range(2):  # row b of rank r is number b * world_size + r of the step
                rows += [
                    (part["tokens"][row].tolist(), part["segment_ids"][row].tolist())
                    for part in parts
                    if row < len(part["tokens"]) and part.get("valid", [True] * 2)[row]
                ]
        return rows, running[0].state_dict()

    whole, _ = run(1, None, None)
    first, state = run(3, 2, None)
    second, state = run(1, 3, state)
    third, state = run(4, None, state)
    assert [*first, *second, *third] == whole
    assert (state["epoch"], state["position"]) == (1, 0)
    served = sorted({token for tokens, segments in whole for token, s in zip(tokens, segments, strict=True) if s})
    assert served == list(range(120))


def test_bucketed_batches_run_in_the_loader_and_resume():
    planner = BucketBatchSampler(lengths=LENGTHS, max_tokens=64, seed=2)
    settings = {"batch_sampler": planner, "collate": {"tokens": "pad"}}
    with Loader(MemorySource(TOKENS), num_workers=2, **settings) as loader:
        whole = [batch["tokens"].tolist() for batch in loader]
        assert all(np.array(batch).size <= 64 for batch in whole)
    with Loader(MemorySource(TOKENS), **settings) as loader:
        for _, _ in zip(range(5), loader, strict=False):
            pass
        state = loader.state_dict()
    assert state["position"] == 5
    with Loader(MemorySource(TOKENS), num_workers=1, **settings) as loader:
        loader.load_state_dict(state)
        assert [batch["tokens"].tolist() for batch in loader] == whole[5:]


def test_lengths_that_are_stale_are_named():
    planner = PackedBatchSampler(sampler=GlobalShuffle(120, 5), lengths=[3] * 120, row_length=32, batch_size=2)
    with pytest.raises(WorkerError, match=r"ConfigError: cannot pack field 'tokens': .*compute the lengths again"):
        next(iter(Loader(MemorySource(TOKENS), batch_sampler=planner)))
