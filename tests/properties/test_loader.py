"""The loader as a state machine against plain lists: whatever is done to it, the batches are those of the order."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataload import Loader, MemorySource, RangeSource
from dataload._util.randomness import generator
from dataload.errors import ClosedSourceError
from dataload.samplers import GlobalShuffle, Lanes, Mixture, PackedBatchSampler, PoolShuffle, ShardSequential
from dataload.samplers.buckets import BucketBatchSampler

SEED = 7
SHARDS = (9, 0, 17, 5, 10)
LENGTH = sum(SHARDS)
LENGTHS = [1 + i * 7 % 11 for i in range(LENGTH)]
TOKENS = MemorySource([{"tokens": np.full(n, i, np.int32)} for i, n in enumerate(LENGTHS)])
RANGE = RangeSource(LENGTH)

SAMPLERS = {
    "global": GlobalShuffle(LENGTH, SEED),
    "pool": PoolShuffle(ShardSequential(SHARDS, SEED), 16, SEED),
    "lanes": Lanes(ShardSequential(SHARDS, SEED), 12, pool_size=4, seed=SEED),
    "mixture": Mixture((GlobalShuffle(20, 1), GlobalShuffle(LENGTH - 20, 2)), (1, 2), stop="longest"),
}
PACKING = PackedBatchSampler(sampler=SAMPLERS["global"], lengths=LENGTHS, row_length=14, batch_size=1, window=8)
BUCKETS = BucketBatchSampler(lengths=LENGTHS, max_tokens=24, seed=SEED)
KINDS = [*SAMPLERS, "packing", "buckets"]

WORLDS = st.sampled_from([1, 2, 3])
BATCH_SIZES = st.integers(1, 6)
SPEEDS = st.fixed_dictionaries(
    {
        "num_workers": st.integers(0, 3),
        "prefetch": st.integers(1, 4),
        "prefetch_bytes": st.sampled_from([1, 200, 1 << 30]),
    }
)


class Processes:
    """Rare, for each takes a while to start."""

    left = 2

    @classmethod
    def instead_of(cls, speed):
        if not cls.left or not speed["num_workers"]:
            return speed
        cls.left -= 1
        return {**speed, "num_workers": 2, "executor": "processes"}


def draw(sample, context):
    return {**sample, "drawn": int(context.generator.integers(1 << 30))}


@cache
def drawn(epoch, index):
    return int(generator(SEED, "transform", epoch, index).integers(1 << 30))


@cache
def items_of(kind, tail, epoch):
    """What an epoch deals out, one after another: tuples of records that stay together."""
    if kind in SAMPLERS:
        sampler = SAMPLERS[kind]
        return [(i,) for i in sampler.indices(np.arange(len(sampler)), epoch=epoch).tolist()]
    # One item a step, and no other rank.
    planner = PACKING if kind == "packing" else replace(BUCKETS, tail=tail)
    single = replace(planner, tail="drop") if kind == "packing" else planner
    plans = single.plans(range(single.steps(epoch)), epoch=epoch)
    return [tuple(plan.indices[slice(None) if plan.valid is None else plan.valid].tolist()) for plan in plans]


def records_in(kind, batch):
    valid = batch.get("valid")
    if kind in SAMPLERS:
        rows = batch["index"] if valid is None else batch["index"][valid]
        return [(i,) for i in rows.tolist()]
    if kind == "packing":
        rows = zip(batch["tokens"], batch["segment_ids"], [True] * 99 if valid is None else valid, strict=False)
        return [tuple(dict.fromkeys(tokens[segments > 0].tolist())) for tokens, segments, real in rows if real]
    rows = batch["tokens"] if valid is None else batch["tokens"][valid]
    return [tuple(rows[:, 0].tolist())] if len(rows) else []


class Model:
    """Where a training job stands: an epoch, and how many of its items have been received."""

    def __init__(self, kind, tail):
        self.kind, self.tail = kind, tail
        self.epoch = self.position = 0
        self.origin = 0  # where the steps of this epoch are counted from
        self.under_way = False
        self.upcoming = None
        self.done = False  # whether the `for` that is under way has had all of its epoch

    def items(self, epoch):
        return items_of(self.kind, self.tail, epoch)

    def steps(self, epoch, origin, size):
        left = len(self.items(epoch)) - origin
        return left // size if self.tail == "drop" else -(-left // size)

    def start(self):
        """Epoch and position of the next `for`."""
        if self.upcoming is not None:
            return self.upcoming
        return (self.epoch + 1, 0) if self.position > 0 else (self.epoch, 0)

    def go_to(self, epoch, position):
        self.epoch, self.position, self.origin = epoch, position, 0

    def begin(self, size):
        restored = self.upcoming == (self.epoch, self.position)
        if not restored:
            self.go_to(*self.start())
        self.upcoming, self.under_way = None, True
        self.serving = self.epoch
        self.length = self.steps(self.epoch, self.origin, size)
        self.done = not self.has_more(size)
        if self.done:
            self.go_to(self.epoch + 1, 0)

    def has_more(self, size):
        left = len(self.items(self.epoch)) - self.position
        return left >= size if self.tail == "drop" else left > 0

    def next(self, size):
        found = self.items(self.epoch)[self.position : self.position + size]
        self.position += len(found)
        self.done = not self.has_more(size)
        if self.done:
            self.go_to(self.epoch + 1, 0)
            if self.upcoming is not None:
                self.go_to(*self.upcoming)
        return found

    def end(self):
        if self.under_way and self.upcoming is not None:
            self.go_to(*self.upcoming)
        self.under_way = False

    def restore(self, epoch, position, size):
        self.epoch, self.position, self.origin = epoch, position, position % size
        self.upcoming, self.under_way = (epoch, position), False

    def set_epoch(self, epoch):
        if epoch != self.start()[0]:
            self.upcoming = (epoch, 0)
            if not self.under_way:
                self.go_to(epoch, 0)


class LoaderMachine(RuleBasedStateMachine):
    """All ranks of one job, side by side."""

    def __init__(self):
        super().__init__()
        self.loaders, self.iterators, self.saved = [], None, []

    @initialize(
        kind=st.sampled_from(KINDS),
        tail=st.sampled_from(["drop", "pad", "partial"]),
        world=WORLDS,
        batch_size=BATCH_SIZES,
        speed=SPEEDS,
    )
    def begin(self, kind, tail, world, batch_size, speed):
        self.kind, self.tail, self.model = kind, tail, Model(kind, tail)
        self.build(world, batch_size, speed)
        self.saved = [(loader_state(self.loaders), 0, 0)]

    def build(self, world, batch_size, speed):
        for loader in self.loaders:
            loader.close()
        self.iterators = None
        per_rank = 1 if self.kind == "buckets" else batch_size
        self.world, self.batch_size, self.speed = world, batch_size, speed
        self.size = world * per_rank
        common = {"seed": SEED, "tail": self.tail, "world_size": world, **speed}
        if self.kind in SAMPLERS:
            source = RANGE
            common |= {"sampler": SAMPLERS[self.kind], "batch_size": batch_size}
            if "executor" not in speed:
                common["transform"] = draw
        elif self.kind == "packing":
            source = TOKENS
            common["sampler"] = replace(PACKING, batch_size=batch_size)
        else:
            source = TOKENS
            common |= {"sampler": BUCKETS, "collate": {"tokens": "pad"}}
        self.loaders = [Loader(source, rank=rank, **common) for rank in range(world)]

    @rule(times=st.integers(1, 6))
    def take(self, times):
        """Some batches, and what comes after the last of an epoch."""
        for _ in range(times):
            if self.iterators is None:
                self.iterators = [iter(loader) for loader in self.loaders]
                self.model.begin(self.size)
            if self.model.done:
                for iterator in self.iterators:
                    with pytest.raises(StopIteration):
                        next(iterator)
                self.iterators = None
                self.model.end()
                return
            epoch, expected = self.model.epoch, self.model.next(self.size)
            for rank, iterator in enumerate(self.iterators):
                batch = next(iterator)
                assert records_in(self.kind, batch) == expected[rank :: self.world]
                if "drawn" in batch:
                    assert batch["drawn"].tolist() == [drawn(epoch, i) for i in batch["index"].tolist()]

    @rule()
    def take_the_rest(self):
        self.take(1)
        while self.iterators is not None:
            self.take(1)

    @rule()
    def save(self):
        self.saved.append((loader_state(self.loaders), self.model.epoch, self.model.position))

    @rule(data=st.data(), world=WORLDS, batch_size=BATCH_SIZES, speed=SPEEDS, rare=st.integers(0, 9))
    def restore_elsewhere(self, data, world, batch_size, speed, rare):
        self.build(world, batch_size, Processes.instead_of(speed) if rare == 0 else speed)
        self.load(data.draw(st.sampled_from(self.saved)))

    @rule(data=st.data())
    def restore_here(self, data):
        iterators, begun = self.iterators, self.iterators is not None and not self.model.done
        self.load(data.draw(st.sampled_from(self.saved)))
        if begun:
            for iterator in iterators:
                with pytest.raises(RuntimeError, match="or the loader's state was set"):
                    next(iterator)

    def load(self, saved):
        state, epoch, position = saved
        for loader in self.loaders:
            loader.load_state_dict(json.loads(state))
        self.iterators = None
        self.model.restore(epoch, position, self.size)

    @rule(speed=SPEEDS)
    def change_workers(self, speed):
        saved = loader_state(self.loaders), self.model.epoch, self.model.position
        self.build(self.world, self.batch_size, speed)
        self.load(saved)

    @precondition(lambda self: self.iterators is not None)
    @rule()
    def leave(self):
        """A `break`."""
        for iterator in self.iterators:
            iterator.close()
        self.iterators = None
        self.model.end()

    @rule(epoch=st.integers(0, 4))
    def set_epoch(self, epoch):
        for loader in self.loaders:
            loader.set_epoch(epoch)
        self.model.set_epoch(epoch)

    @rule()
    def close(self):
        """And go on in another process, as it were."""
        saved = loader_state(self.loaders), self.model.epoch, self.model.position
        for loader in self.loaders:
            loader.close()
            with pytest.raises(ClosedSourceError, match="the loader is closed"):
                iter(loader)
        self.build(self.world, self.batch_size, self.speed)
        self.load(saved)

    @invariant()
    def they_say_where_they_are(self):
        for loader in self.loaders:
            model, progress = self.model, loader.progress()
            assert (progress.epoch, progress.step, progress.steps) == (loader.epoch, loader.step, len(loader))
            if not model.under_way:
                epoch, position = model.start()
                assert loader.epoch == epoch
                origin = model.origin if (epoch, position) == (model.epoch, model.position) else 0
                assert loader.step == -(-(position - origin) // self.size)
                assert len(loader) == model.steps(epoch, origin, self.size)
            else:
                assert loader.epoch == model.serving
                assert len(loader) == model.length
                if model.done:
                    assert loader.step in (len(loader), -(-(model.position - model.origin) // self.size))
                else:
                    assert loader.step == -(-(model.position - model.origin) // self.size)

    def teardown(self):
        for loader in self.loaders:
            loader.close()
        self.iterators = None


def loader_state(loaders):
    """The state, which is the same on every rank, as text."""
    states = {json.dumps(loader.state_dict()) for loader in loaders}
    assert len(states) == 1
    (state,) = states
    assert len(state) < 1024
    return state


LoaderMachine.TestCase.settings = settings(stateful_step_count=30)
TestLoaderMachine = LoaderMachine.TestCase
