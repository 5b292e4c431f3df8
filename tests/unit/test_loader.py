"""The loader against plain lists: order, epochs, resuming, ranks, errors, and what it leaves behind."""

import contextlib
import gc
import itertools
import json
import threading

import numpy as np
import pytest

import dataload
from dataload import (
    ClosedSourceError,
    ConfigError,
    Loader,
    MemorySource,
    RangeSource,
    StateMismatchError,
    WorkerError,
)
from dataload.samplers import GlobalShuffle, Sequential


def indices(loader):
    return [batch["index"].tolist() for batch in loader]


class Counting:
    """A source of somebody's own: only the two methods, and a count of the records that were read."""

    def __init__(self, length):
        self.length, self.reads, self.lock = length, 0, threading.Lock()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        with self.lock:
            self.reads += 1
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {"index": index, "square": np.full(3, index**2)}


WORKERS = pytest.mark.parametrize("workers", [0, 1, 3])


@WORKERS
@pytest.mark.parametrize("prefetch", [1, 4])
def test_batches_are_the_samplers_order_cut_in_pieces(workers, prefetch):
    with Loader(RangeSource(23), batch_size=5, shuffle=True, seed=9, num_workers=workers, prefetch=prefetch) as loader:
        for epoch in range(3):
            order = GlobalShuffle(23, 9).indices(np.arange(23), epoch=epoch).tolist()
            assert len(loader) == 5
            assert indices(loader) == [order[i : i + 5] for i in range(0, 23, 5)]


@WORKERS
def test_reads_each_record_once_an_epoch_and_nothing_more(workers):
    source = Counting(20)
    with Loader(source, batch_size=6, num_workers=workers) as loader:
        for batch in loader:
            assert batch["square"].tolist() == [[i**2] * 3 for i in batch["index"]]
        assert source.reads == 20


def test_a_source_with_batched_reads_is_asked_once_a_step():
    calls = []

    class Batched(Counting):
        def __getitems__(self, indices):
            calls.append(indices)
            return [self[i] for i in indices]

    list(Loader(Batched(5), batch_size=2))
    assert calls == [[0, 1], [2, 3], [4]]
    assert all(type(i) is int for i in itertools.chain(*calls))


def test_columns_are_read_without_samples_unless_something_needs_samples():
    class Columns(RangeSource):
        def _read(self, indices):
            raise AssertionError("records were made")

    assert indices(Loader(Columns(4), batch_size=2)) == [[0, 1], [2, 3]]
    assert indices(Loader(Columns(4), batch_size=2, collate={})) == [[0, 1], [2, 3]]
    with pytest.raises(WorkerError, match="records were made"):
        list(Loader(Columns(4), batch_size=2, transform=dict))


@WORKERS
def test_transforms_collate_and_batch_transform_in_turn(workers):
    with Loader(
        Counting(5),
        batch_size=2,
        num_workers=workers,
        fields=["index"],
        transform=[lambda s: s["index"] + 10, lambda x, context: (x, context.index)],
        collate=list,
        batch_transform=tuple,
    ) as loader:
        assert list(loader) == [((10, 0), (11, 1)), ((12, 2), (13, 3)), ((14, 4),)]


def test_fields_are_chosen():
    source = MemorySource([{"a": 1, "b": np.zeros(2)}, {"a": 2, "b": np.ones(2)}])
    assert [list(b) for b in Loader(source, batch_size=2, fields=["b"])] == [["b"]]
    assert [list(b) for b in Loader(source, batch_size=2, fields=["b"], transform=dict)] == [["b"]]
    with pytest.raises(WorkerError, match=r"there is no field 'c'.*Known: a, b"):
        list(Loader(source, batch_size=2, fields=["c"]))


def test_policies_for_unequal_shapes():
    source = MemorySource([{"x": np.arange(n)} for n in (1, 3)])
    with pytest.raises(WorkerError, match=r"cannot stack field 'x': row 0 is int64 \(1,\), row 1 is int64 \(3,\)"):
        list(Loader(source, batch_size=2))
    (batch,) = Loader(source, batch_size=2, collate={"x": "pad"})
    assert batch["x"].tolist() == [[0, 0, 0], [0, 1, 2]]
    assert batch["x_length"].tolist() == [1, 3]


@WORKERS
def test_resuming_at_every_step_gives_the_rest_and_reads_nothing(workers):
    def make():
        source = Counting(17)
        return source, Loader(source, batch_size=4, shuffle=True, seed=1, num_workers=workers)

    _, loader = make()
    with loader:
        epochs = [indices(loader) for _ in range(3)]
    for epoch, step in itertools.product(range(2), range(5)):
        _, before = make()
        with before:
            for _ in range(epoch):
                indices(before)
            taken = list(itertools.islice(before, step))
            assert [b["index"].tolist() for b in taken] == epochs[epoch][:step]
            state = json.loads(json.dumps(before.state_dict()))
        assert len(json.dumps(state)) < 1024
        source, after = make()
        with after:
            after.load_state_dict(state)
            assert source.reads == 0
            assert (after.epoch, after.step) == (epoch, step)
            rest = indices(after)
            assert rest == epochs[epoch][step:]
            assert indices(after) == epochs[epoch + 1]


def test_a_state_saved_after_a_resume_is_as_good():
    loader = Loader(RangeSource(10), batch_size=2, shuffle=True)
    whole = indices(loader)
    state = None
    seen = []
    while len(seen) < 5:
        loader = Loader(RangeSource(10), batch_size=2, shuffle=True, num_workers=1)
        if state is not None:
            loader.load_state_dict(state)
        with loader:
            seen.append(next(iter(loader))["index"].tolist())
            state = loader.state_dict()
    assert seen == whole
    assert (state["epoch"], state["position"]) == (1, 0)


def test_the_state_counts_what_was_received_not_what_was_prefetched():
    with Loader(RangeSource(100), batch_size=5, num_workers=2, prefetch=8) as loader:
        batches = iter(loader)
        for received in range(1, 5):
            next(batches)
            assert loader.state_dict()["position"] == 5 * received


def test_the_last_batch_ends_the_epoch():
    loader = Loader(RangeSource(4), batch_size=2)
    positions = [(loader.state_dict()["epoch"], loader.state_dict()["position"]) for _ in loader]
    assert positions == [(0, 2), (1, 0)]
    assert loader.epoch == 1


def test_after_a_break_the_next_for_is_the_next_epoch():
    loader = Loader(RangeSource(12), batch_size=3, shuffle=True)
    epochs = [indices(Loader(RangeSource(12), batch_size=3, shuffle=True))]
    for _ in loader:
        break
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 3)
    second = indices(loader)
    assert second != epochs[0]
    loader.load_state_dict(state)
    assert indices(loader) == epochs[0][1:]
    assert indices(loader) == second


def test_an_iterator_from_which_nothing_was_taken_is_no_epoch():
    loader = Loader(RangeSource(4), batch_size=2, shuffle=True, seed=3)
    iter(loader)
    assert indices(loader) == indices(Loader(RangeSource(4), batch_size=2, shuffle=True, seed=3))


def test_set_epoch():
    def make():
        return Loader(RangeSource(9), batch_size=2, shuffle=True)

    plain = make()
    epochs = [indices(plain) for _ in range(4)]
    loader = make()
    loader.set_epoch(2)
    assert indices(loader) == epochs[2]
    loader.set_epoch(3)  # what would have come anyway
    assert indices(loader) == epochs[3]
    loader.set_epoch(0)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    batches.close()
    loader.set_epoch(0)  # once more from the start
    assert indices(loader) == epochs[0]
    loader.load_state_dict(state)
    loader.set_epoch(0)  # the epoch that was restored: its position stays
    assert indices(loader) == epochs[0][1:]
    with pytest.raises(ConfigError, match="epoch must be an integer >= 0, got -1"):
        loader.set_epoch(-1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_the_global_batches(world_size):
    def batches(rank):
        loader = Loader(RangeSource(50), batch_size=12 // world_size, shuffle=True, rank=rank, world_size=world_size)
        return [(b["index"], b.get("valid", np.full(len(b["index"]), True))) for b in loader]

    whole = GlobalShuffle(50, 0).indices(np.arange(50), epoch=0).tolist()
    for step, rows in enumerate(zip(*(batches(rank) for rank in range(world_size)), strict=True)):
        real = sorted(i for index, valid in rows for i in index[valid].tolist())
        assert real == sorted(whole[12 * step : 12 * step + 12])
        if world_size > 1:
            assert {len(index) for index, _ in rows} == {12 // world_size}


@pytest.mark.parametrize("before", [(1, 4), (2, 3), (4, 1)])
@pytest.mark.parametrize("after", [(1, 5), (2, 2), (3, 2)])
def test_resuming_on_other_ranks_loses_and_repeats_nothing(before, after):
    def make(rank, world_size, batch_size):
        return Loader(
            RangeSource(41), batch_size=batch_size, shuffle=True, rank=rank, world_size=world_size, tail="pad"
        )

    def real(batch):
        return batch["index"][batch["valid"]].tolist()

    old = [make(rank, *before) for rank in range(before[0])]
    taken = [i for loader in old for batch in itertools.islice(loader, 3) for i in real(batch)]
    states = [loader.state_dict() for loader in old]
    assert all(state == states[0] for state in states)
    new = [make(rank, *after) for rank in range(after[0])]
    for loader in new:
        loader.load_state_dict(states[0])
    rest = [[real(batch) for batch in loader] for loader in new]
    assert len({len(batches) for batches in rest}) == 1
    assert sorted(taken + [i for batches in rest for rows in batches for i in rows]) == list(range(41))
    assert [len(list(loader)) for loader in new] == [len(loader) for loader in new]  # the epoch after is a whole one


def test_a_rank_without_rows_gets_an_empty_batch_of_the_same_form():
    source = MemorySource({"x": np.zeros((9, 2), np.float32), "name": list("abcdefghi")})
    loaders = [Loader(source, batch_size=2, rank=r, world_size=4, tail="partial") for r in range(4)]
    last = [list(loader)[-1] for loader in loaders]
    assert [len(batch["name"]) for batch in last] == [1, 0, 0, 0]
    assert [batch["x"].shape for batch in last] == [(1, 2), (0, 2), (0, 2), (0, 2)]
    assert last[1]["x"].dtype == np.float32


def test_padded_batches_of_samples_without_fields():
    source = MemorySource([b"a", b"b", b"c"])
    batches = list(Loader(source, batch_size=2, tail="pad"))
    assert [(b["data"], b["valid"].tolist()) for b in batches] == [
        ([b"a", b"b"], [True, True]),
        ([b"c", b"c"], [True, False]),
    ]
    clash = MemorySource([{"valid": 1}])
    with pytest.raises(WorkerError, match="adds the mask 'valid'"):
        list(Loader(clash, batch_size=2, tail="pad"))


def test_ranks_come_from_the_environment_of_torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert indices(Loader(RangeSource(4), batch_size=2)) == [[1, 3]]
    assert indices(Loader(RangeSource(4), batch_size=2, rank=0, world_size=1)) == [[0, 1], [2, 3]]


@WORKERS
def test_an_error_comes_at_its_step_after_the_good_ones(workers):
    def transform(sample):
        if sample["index"] == 7:
            raise ZeroDivisionError("seven")
        return sample

    with Loader(Counting(20), batch_size=3, num_workers=workers, prefetch=4, transform=transform) as loader:
        batches = iter(loader)
        assert [next(batches)["index"].tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(WorkerError) as caught:
            next(batches)
        error = caught.value
        assert (error.step, error.epoch, error.indices) == (2, 0, (6, 7, 8))
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert "transform '" in str(error)
        assert "on index 7" in str(error)
        assert "ZeroDivisionError: seven" in str(error)
        assert "raise ZeroDivisionError" in error.traceback_text
        assert error.worker in (
            {"MainThread"} if workers == 0 else {"MainThread", "dataload-0", "dataload-1", "dataload-2"}
        )
        # The state still stands before the step that failed.
        assert loader.state_dict()["position"] == 6


def test_a_stop_iteration_in_a_transform_is_an_error_not_an_end():
    def transform(_):
        raise StopIteration

    with pytest.raises(WorkerError, match="StopIteration"):
        list(Loader(RangeSource(3), batch_size=1, transform=transform))


def test_a_state_of_something_else_is_refused_line_by_line():
    state = Loader(RangeSource(10), batch_size=2, shuffle=True, seed=1).state_dict()
    with pytest.raises(StateMismatchError) as caught:
        Loader(RangeSource(10), batch_size=2, shuffle=True, seed=2).load_state_dict(state)
    assert len(caught.value.differences) == 1
    assert "order (the sampler or its seed)" in str(caught.value)
    with pytest.raises(StateMismatchError) as caught:
        Loader(RangeSource(11), batch_size=2, shuffle=True, seed=1).load_state_dict(state)
    assert [line.split(" ")[0] for line in caught.value.differences] == ["source", "order", "length"]
    with pytest.raises(StateMismatchError, match="version: None in the state, 1 here"):
        Loader(RangeSource(10), batch_size=2).load_state_dict({})
    with pytest.raises(StateMismatchError, match="incomplete or has foreign keys: x"):
        Loader(RangeSource(10), batch_size=2).load_state_dict({**state, "x": 1})


def test_batch_size_workers_and_ranks_are_not_in_the_state():
    one = Loader(RangeSource(100), batch_size=2, shuffle=True).state_dict()
    other = Loader(RangeSource(100), batch_size=5, shuffle=True, num_workers=2, rank=1, world_size=4).state_dict()
    assert one == other


def test_one_iteration_at_a_time():
    loader = Loader(RangeSource(10), batch_size=2)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="this iteration ended when another one was begun"):
        next(first)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="or the loader's state was set"):
        next(second)


def test_closing():
    loader = Loader(RangeSource(10), batch_size=2, num_workers=2)
    list(loader)
    assert [t.name for t in threading.enumerate() if t.name.startswith("dataload")]
    loader.close()
    loader.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("dataload")]
    with pytest.raises(ClosedSourceError, match="the loader is closed"):
        iter(loader)


@pytest.mark.parametrize("leave", ["break", "error", "forget"])
def test_leaving_early_leaves_no_thread(leave):
    def go():
        loader = Loader(RangeSource(1000), batch_size=2, num_workers=2, prefetch=4)
        for _ in loader:
            if leave == "break":
                break
            if leave == "error":
                raise KeyError
            return

    with contextlib.suppress(KeyError):
        go()
    gc.collect()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("dataload")]


def test_an_empty_source_has_no_batches():
    for tail in ("drop", "pad", "partial"):
        loader = Loader(RangeSource(0), batch_size=3, tail=tail)
        assert len(loader) == 0
        assert list(loader) == list(loader) == []


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"batch_size": 0}, ConfigError, "batch_size must be an integer >= 1, got 0"),
        ({"num_workers": -1}, ConfigError, "num_workers must be an integer >= 0, got -1"),
        ({"prefetch": 0}, ConfigError, "prefetch must be an integer >= 1, got 0"),
        ({"executor": "thread"}, ConfigError, "executor is 'thread': did you mean 'threads'"),
        ({"rank": 0}, ConfigError, "rank and world_size go together"),
        ({"rank": 2, "world_size": 2}, ConfigError, r"rank must be an integer in \[0, 2\), got 2"),
        ({"shuffle": True, "sampler": Sequential(3)}, ConfigError, "shuffle and sampler both choose the order"),
        ({"sampler": [1, 2]}, TypeError, r"a sampler has __len__ and indices\(positions, epoch=\); list has not both"),
        ({"fields": "x"}, ConfigError, "fields must be a list of names, got the text 'x'"),
        ({"collate": 3}, ConfigError, "collate is a function of a list of samples, got 3"),
        ({"collate": {"x": "padd"}}, ConfigError, "collate policy of field 'x' is 'padd': did you mean 'pad'"),
        ({"seed": 0.5}, ConfigError, "seed must be an integer, got 0.5"),
        ({"tail": "x"}, ConfigError, "tail is 'x'"),
    ],
)
def test_wrong_settings_are_named(settings, error, match):
    with pytest.raises(error, match=match):
        Loader(RangeSource(3), **{"batch_size": 1, **settings})


def test_a_source_is_checked():
    with pytest.raises(TypeError, match="a source has __len__ and __getitem__; set has not both"):
        Loader({1, 2}, batch_size=1)


def test_plain_lists_and_arrays_are_sources():
    assert [b.tolist() for b in Loader([3, 4, 5], batch_size=2)] == [[3, 4], [5]]
    assert [b.tolist() for b in Loader(np.arange(6).reshape(3, 2), batch_size=2)] == [[[0, 1], [2, 3]], [[4, 5]]]


def test_repr():
    loader = Loader(RangeSource(10), batch_size=3, rank=1, world_size=2)
    assert repr(loader) == "Loader(10 records, 3 rows a step, rank 1 of 2, epoch 0, step 0)"
    assert dataload.Loader is Loader
