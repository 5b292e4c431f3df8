"""The loader against plain lists: order, epochs, resuming, ranks, errors, and what it leaves behind."""

import contextlib
import copy
import gc
import itertools
import os
import pickle
import re
import signal
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest

import dataload
from dataload import ConfigError, Loader, MemorySource, Ragged, RangeSource, StateMismatchError, WorkerError
from dataload.errors import ClosedSourceError
from dataload.loader.scaling import Scaling
from dataload.samplers import BucketBatchSampler, GlobalShuffle, PackedBatchSampler, Sequential

WORKERS = pytest.mark.parametrize("workers", [0, 1, 3])
ORDER = pytest.mark.parametrize("in_order", [True, False])
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
FORKED = {"executor": "fork"}  # processes that start fast and take any transform
CREWS = pytest.mark.parametrize("crew", [{}, {"num_workers": 2}, {"num_workers": 2, **FORKED}], ids=str)


def indices(loader):
    return [batch["index"].tolist() for batch in loader]


def loader_threads():
    return {thread.ident for thread in threading.enumerate() if thread.name.startswith("dataload")}


def eventually(condition):
    """Wait until something holds that other threads bring about."""
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.001)


@pytest.fixture
def no_collector():
    """What dies in such a test does so with its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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


def test_a_rank_without_rows_gets_an_empty_batch_of_the_same_form():
    source = MemorySource({"x": np.zeros((9, 2), np.float32), "name": list("abcdefghi")})
    loaders = [Loader(source, batch_size=2, rank=r, world_size=4, tail="partial") for r in range(4)]
    last = [list(loader)[-1] for loader in loaders]
    assert [len(batch["name"]) for batch in last] == [1, 0, 0, 0]
    assert [batch["x"].shape for batch in last] == [(1, 2), (0, 2), (0, 2), (0, 2)]
    assert last[1]["x"].dtype == np.float32


def test_plain_lists_and_arrays_are_sources():
    assert [b.tolist() for b in Loader([3, 4, 5], batch_size=2)] == [[3, 4], [5]]
    assert [b.tolist() for b in Loader(np.arange(6).reshape(3, 2), batch_size=2)] == [[[0, 1], [2, 3]], [[4, 5]]]


@pytest.mark.parametrize("settings", [{"transform": dict}, {"fields": ["seg.png"]}, {}])
def test_names_that_may_exist_are_not_refused(settings):
    """Transforms may add fields, a field may be nested, and its name may have dots."""
    source = MemorySource([{"seg.png": {"x": np.zeros(2)}, "other": {"y": 1}}])
    policy = "added" if "transform" in settings else "seg.png.x"
    batch = next(iter(Loader(source, batch_size=1, collate={policy: "ragged"}, **settings)))
    assert isinstance(batch["seg.png"]["x"], np.ndarray if "transform" in settings else Ragged)


def test_repr():
    loader = Loader(RangeSource(10), batch_size=3, rank=1, world_size=2)
    assert repr(loader) == "Loader(10 records, 3 rows per step, rank 1 of 2, epoch 0, step 0)"


TOKENS = [{"tokens": np.arange(1 + i % 2), "labels": np.arange(1 + i % 2)} for i in range(8)]
BOTH = {"tokens": "pad", "labels": "pad"}
PADS = {"source": MemorySource(TOKENS), "collate": BOTH}
PAD_VALUE = "pad_value goes with collate={name: 'pad'} or with packing: leave it out, or give it to Collate"
BUCKETS = BucketBatchSampler(lengths=[1, 1, 1], batch_size=1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"source": {1, 2}}, "set has no __getitem__; a source needs __len__ and __getitem__"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"num_workers": -1}, "num_workers must be an integer >= 0 or 'auto', got -1"),
        ({"num_workers": "many"}, "num_workers must be an integer >= 0 or 'auto', got 'many'"),
        ({"prefetch": 0}, "prefetch must be an integer >= 1, got 0"),
        ({"epochs": -1}, "epochs must be an integer >= 0, got -1"),
        ({"executor": "thread"}, "executor is 'thread': did you mean 'threads'"),
        ({"rank": 0}, "rank and world_size go together"),
        ({"rank": 2, "world_size": 2}, r"rank must be an integer in \[0, 2\), got 2"),
        ({"shuffle": True, "sampler": Sequential(3)}, "shuffle and sampler both choose the order"),
        ({"sampler": [1, 2]}, r"a sampler needs __len__ and indices\(positions, epoch=\); list does not"),
        ({"fields": "x"}, "fields must be a list of names, got the text 'x'"),
        ({"collate": 3}, "collate must be a function or policies by field .*, got 3"),
        ({"collate": {"x": "padd"}}, "collate policy of field 'x' is 'padd': did you mean 'pad'"),
        ({"seed": 0.5}, "seed must be an integer, got 0.5"),
        ({"tail": "x"}, "tail is 'x'"),
        ({"sampler": BUCKETS}, "BucketBatchSampler chooses the order and the batches: leave batch_size out"),
        ({"sampler": Sequential(3), "batch_size": None}, "give batch_size, global_batch_size or a sampler"),
        ({"fields": ["idnex"]}, r"RangeSource\(3, .* has no field 'idnex': did you mean 'index'"),
        ({"source": MemorySource(TOKENS), "fields": ["c"]}, r"no field 'c'.*choose from labels, tokens"),
        ({"collate": {"indx": "pad"}}, "names the field 'indx', which the samples do not have: did you mean 'index'"),
        (
            {"source": MemorySource(TOKENS), "fields": ["labels"], "collate": {"tokens": "pad"}},
            "names the field 'tokens', which the samples do not have",
        ),
        ({"pad_value": 0}, PAD_VALUE),
        ({**PADS, "collate": dataload.Collate(BOTH), "pad_value": 0}, PAD_VALUE),
        ({**PADS, "pad_value": {"lables": 1}}, "pad_value names 'lables', which is not a padded .* mean 'labels'"),
        ({**PADS, "collate": {}, "pad_value": {"tokens": 0}}, r"names 'tokens', which is not a .* there is none"),
    ],
)
def test_wrong_settings_are_named(settings, match):
    with pytest.raises((ConfigError, TypeError), match=match):
        Loader(**{"source": RangeSource(3), "batch_size": 1, **settings})


def stops(_):
    raise StopIteration


def forgets(sample):
    sample["index"] += 1


SMALL = [{"labels": np.zeros(n, np.uint8)} for n in (1, 2)]
PAD_SMALL = {"batch_size": 2, "collate": {"labels": "pad"}, "pad_value": {"labels": -100}}


@pytest.mark.parametrize(
    ("source", "settings", "match"),
    [
        ([{"a": 1}], {"fields": ["c"]}, r"no field 'c'.*choose from a"),
        ([np.zeros(1), np.zeros(3)], {"batch_size": 2}, r"stack .*row 0 is float64 \(1,\), row 1 is float64 \(3,\)"),
        ([{"valid": 1}], {"tail": "pad"}, "adds the mask 'valid'"),
        (RangeSource(3), {"transform": stops}, "StopIteration"),
        (RangeSource(3), {"transform": [dict, forgets]}, "index 0: ConfigError: transform '.*forgets' returned None"),
        (RangeSource(3), {"transform": lambda _: dataload.DROP}, "'.*<lambda>' returned dataload.DROP instead"),
        (SMALL, PAD_SMALL, "pad_value of field 'labels' is -100, but its dtype uint8 holds 0 to 255"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_fails_in_a_step_is_named(source, settings, match, workers):
    loader = Loader(source, **{"batch_size": 1, "num_workers": workers, **settings})
    with loader, pytest.raises(WorkerError, match=match):
        next(iter(loader))


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_is_not_copied(take):
    message = "a Loader cannot be copied or pickled: build it in the process that iterates, "
    with pytest.raises(TypeError, match=message):
        take(Loader(RangeSource(4), batch_size=2))


@WORKERS
def test_a_loop_within_a_loop_is_an_error_of_the_outer_one(workers):
    seen = []
    with Loader(RangeSource(6), batch_size=2, num_workers=workers) as loader:
        with pytest.raises(RuntimeError, match="for two at a time build two loaders"):
            seen.extend(rows for outer in loader for rows in [outer["index"].tolist(), *indices(loader)])
        assert seen == [[0, 1], [0, 1], [2, 3], [4, 5]]
        assert (loader.epoch, loader.step) == (2, 0)
        next(begun := iter(loader))
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(RuntimeError, match=r"ended when another one was started \(or the loader's state was set\)"):
            next(begun)


def test_an_interrupt_while_a_batch_is_handed_over_leaves_the_state_before_it(monkeypatch):
    with Loader(RangeSource(20), batch_size=2, num_workers=1) as loader:
        next(batches := iter(loader))
        monkeypatch.setattr(Scaling, "look", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert (loader.state_dict()["position"], loader.step) == (2, 0)


def test_an_iteration_begins_with_its_first_batch():
    loader = Loader(RangeSource(12), batch_size=3, shuffle=True)
    expected = indices(Loader(RangeSource(12), batch_size=3, shuffle=True))
    state = loader.state_dict()
    early, other = iter(loader), iter(loader)
    first = next(other)["index"].tolist()
    loader.load_state_dict(state)
    assert [first, next(early)["index"].tolist()] == [expected[0]] * 2
    loader.load_state_dict(loader.state_dict())
    iter(loader)  # takes nothing of what was restored
    assert indices(loader) == expected[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_closed_loader_says_so(workers):
    loader = Loader(RangeSource(10), batch_size=2, num_workers=workers)
    begun, fresh = iter(loader), iter(loader)
    next(begun)
    state = loader.state_dict()
    assert bool(loader_threads()) == bool(workers)
    loader.close()
    loader.close()
    assert not loader_threads()
    for use in (lambda: next(begun), lambda: next(fresh), lambda: iter(loader)):
        with pytest.raises(ClosedSourceError, match="the loader is closed: build another one to iterate"):
            use()
    assert loader.state_dict() == state
    whole = Loader(RangeSource(2), batch_size=2)
    iterator = iter(whole)
    next(iterator)
    whole.close()
    assert next(iterator, "all was given") == "all was given"


@pytest.mark.parametrize("workers", [0, 2])
def test_another_thread_closes_a_loader_that_waits_but_does_not_change_it(workers, tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def transform(sample):
        return begun.set() or (go_on.wait(10) and sample)

    source, log = dataload.mix([(RangeSource(10), 1)]), tmp_path / "changes.jsonl"
    loader = Loader(source, batch_size=2, num_workers=workers, transform=transform, changes=log)
    state, begin = loader.state_dict(), iter(loader)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(list, loader)
        begun.wait(10)
        lines, change = (
            log.read_text(),
            "is waiting for a batch: load a state, change weights or begin another iteration",
        )
        for call, given in ((loader.change_weights, [1]), (loader.load_changes, log), (loader.load_state_dict, state)):
            with pytest.raises(RuntimeError, match=change):
                call(given)
        with pytest.raises(RuntimeError, match=change):
            next(begin)
        assert log.read_text() == lines
        threading.Timer(0.1, go_on.set).start()
        loader.close()
        with pytest.raises((ClosedSourceError, RuntimeError), match=r"the loader (is|was) closed"):
            waiting.result()
    assert not loader_threads()


@ORDER
@pytest.mark.parametrize("leave", ["break", "error", "forget", "end", "worker error"])
def test_leaving_a_loader_behind_leaves_no_thread_and_no_source(leave, in_order, no_collector):
    def transform(sample):
        if leave == "worker error" and sample["index"] == 30:
            raise ZeroDivisionError
        return sample

    def go():
        source = Counting(60)
        sources.append(weakref.ref(source))
        settings = {"num_workers": 2, "prefetch": 4, "transform": transform, "in_order": in_order, "epochs": 1}
        for _ in Loader(source, batch_size=2, **settings):
            if leave == "break":
                break
            if leave == "error":
                raise KeyError
            if leave == "forget":
                return

    sources = []
    with contextlib.suppress(KeyError, WorkerError):
        go()
    assert not loader_threads()
    assert [source() for source in sources] == [None]


def with_process(sample):
    return {**sample, "process": os.getpid()}


@forks
@pytest.mark.parametrize("leave", ["break", "end", "forget"])
def test_leaving_a_loader_behind_leaves_no_process(leave, no_collector):
    loader = Loader(RangeSource(20), batch_size=2, num_workers=1, transform=with_process, **FORKED)
    for batch in loader:
        process = batch["process"][0]
        if leave != "end":
            break
    if leave == "forget":
        loader = None
    else:
        del loader
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@forks
def test_a_fork_between_two_epochs_iterates_too():
    begun, go_on = threading.Event(), threading.Event()

    class Waits(Sequential):
        def indices(self, positions, *, epoch):
            return super().indices(positions if not epoch or begun.set() or go_on.wait(20) else None, epoch=epoch)

    with Loader(RangeSource(20), batch_size=2, num_workers=2, sampler=Waits(20)) as loader:
        expected = indices(loader)
        assert begun.wait(20)  # a thread computes the next epoch
        if not (child := os.fork()):
            with contextlib.suppress(Exception):
                signal.alarm(20)
                go_on.set()
                os._exit(indices(loader) != expected)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        go_on.set()


class Managed(list):
    """Like a data set of Hugging Face: leaving it, or closing it, destroys it."""

    def __enter__(self):
        raise AssertionError("a loader entered its source")

    def __exit__(self, *_):
        self.clear()

    close = __exit__


class File(Counting):
    """A source as Grain's protocol has it, which can be read only inside `with`."""

    file = None

    def __enter__(self):
        self.file = True
        return self

    def __exit__(self, *_):
        self.file = None

    def __getitem__(self, index):
        if self.file is None:
            raise TypeError("'NoneType' object is not subscriptable")
        return super().__getitem__(index)


@forks
@CREWS
def test_a_loader_neither_enters_nor_closes_its_source(crew, no_collector):
    source = Managed(range(6))
    with Loader(source, batch_size=2, **crew) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
        assert loader.batch(0, 1).tolist() == [2, 3]
    loader = Loader(source, batch_size=2, **crew)
    next(iter(loader))
    del loader
    assert source == [*range(6)]


def test_a_source_that_was_not_entered_fails_with_what_to_do():
    never = "File is a context manager, which dataload never enters: if it must be entered, read inside its `with`"
    for on_error in ("raise", "skip"):
        loader = Loader(File(6), batch_size=2, on_error=on_error)
        with loader, pytest.raises(WorkerError, match=f"{re.escape(never)}$"):
            next(iter(loader))
    with pytest.raises(TypeError) as refused:
        dataload.concat([File(6)])[0]
    assert refused.value.__notes__ == [never]

    class Unsized(File):
        def __len__(self):
            return len(self.file)

    with pytest.raises(TypeError) as refused:
        Loader(Unsized(6), batch_size=2)
    assert refused.value.__notes__ == [never.replace("File", "Unsized")]
    with File(6) as source, Loader(dataload.concat([source])[:4], batch_size=2) as loader:
        assert indices(loader) == [[0, 1], [2, 3]]
    assert source.file is None


@pytest.mark.parametrize("crew", [{}, {"num_workers": 2}], ids=str)
def test_a_loader_warns_once_of_padding_without_a_value(crew):
    order = {"sampler": PackedBatchSampler(sampler=Sequential(8), lengths=[1, 2] * 4, row_length=4, batch_size=1)}
    for settings in ({"collate": BOTH, "batch_size": 2}, order):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with Loader(TOKENS, **settings, **crew) as loader:
                for _ in range(2):
                    list(loader)
                loader.batch(0, 1)
        texts = [str(each.message)[:67] for each in warned]
        assert texts == ["padding fills the integer fields labels, tokens with 0, which a los"]
        assert warned[0].filename == __file__


class Reversed:
    """A sampler with the default repr."""

    def __init__(self, length, start=0):
        self.length, self.start, self.cache = length, start, {}

    def __len__(self):
        return self.length

    def indices(self, positions, *, epoch):
        self.cache[epoch] = positions
        return (self.start - 1 - positions) % self.length


def reverse(start=0):
    return Loader(RangeSource(6), batch_size=2, sampler=Reversed(6, start))


def test_a_sampler_without_a_repr_resumes_in_another_process():
    loader = reverse()
    assert next(iter(loader))["index"].tolist() == [5, 4]
    state = loader.state_dict()
    again = reverse()
    again.load_state_dict(state)
    assert indices(again) == [[3, 2], [1, 0]]
    with pytest.raises(StateMismatchError, match="order"):
        reverse(start=1).load_state_dict(state)
    old = {**state, "order": "address"}
    with pytest.raises(StateMismatchError, match=r"by which dataload 0\.1 identified it.*: if the order is the same,"):
        reverse().load_state_dict(old)


def test_a_state_of_something_else_is_refused_line_by_line():
    def load(state, length=10, **settings):
        with pytest.raises(StateMismatchError) as caught:
            Loader(RangeSource(length), batch_size=2, **settings).load_state_dict(state)
        return caught.value

    state = Loader(RangeSource(10), batch_size=2, shuffle=True, seed=1).state_dict()
    shown = "GlobalShuffle(length=10, seed=1) in the state, GlobalShuffle(length=10, seed=2) here"
    assert load(state, shuffle=True, seed=2).differences == (f"order (the sampler or its seed): {shown}",)
    differences = load(state, 11, shuffle=True, seed=1).differences
    assert [line.split(" ")[0] for line in differences] == ["source", "order", "length"]
    whole = load({"model": 1, "loader": state})
    assert "a state of a Loader, but a dict with the keys model, loader\n  version: None in the state" in str(whole)
    assert "missing or unknown keys: x" in str(load({**state, "x": 1}))


@ORDER
def test_restoring_takes_the_same_work_at_any_position(in_order):
    """Of the order no more is computed than the block of the step, and nothing is read."""
    length = 10**12
    asked = []

    class Asked(Sequential):
        def indices(self, positions, *, epoch):
            asked.append(len(positions))
            return super().indices(positions, epoch=epoch)

    class Huge:
        def __len__(self):
            return length

        def __getitem__(self, index):
            reads.append(index)
            return {"index": index}

    for position in (0, 4 * 10**5, 10**12 - 8):
        reads = []
        asked.clear()
        loader = Loader(Huge(), batch_size=4, sampler=Asked(length), in_order=in_order)
        loader.load_state_dict({**loader.state_dict(), "position": position})
        assert reads == asked == []
        assert next(iter(loader))["index"].tolist() == reads == list(range(position, position + 4))
        assert sum(asked) <= 1 << 14


def test_a_failed_step_is_tried_again_from_a_state_and_is_not_skipped():
    fails = [True]

    def transform(sample):
        if fails[0] and sample["index"] == 0:
            raise OSError("the disk is away")
        return sample

    with Loader(RangeSource(6), batch_size=2, num_workers=2, transform=transform) as loader:
        for _ in range(2):  # nothing was received, so it is this epoch that comes again
            with pytest.raises(WorkerError, match="the disk is away"):
                list(loader)
            assert (loader.epoch, loader.step) == (0, 0)
        fails[0] = False
        assert indices(loader) == [[0, 1], [2, 3], [4, 5]]


def unordered(workers=2, **settings):
    settings = {"batch_size": 2, "shuffle": True, "seed": 4, "num_workers": workers, "in_order": False, **settings}
    return Loader(Counting(22), **settings)


def test_a_slow_batch_keeps_no_other_waiting():
    others = threading.Event()
    first, *rest = indices(unordered(0))

    def transform(sample):
        if sample["index"] == first[0]:
            assert others.wait(20)
        return sample

    with unordered(transform=transform) as loader:
        batches = iter(loader)
        assert sorted(next(batches)["index"].tolist() for _ in range(10)) == sorted(rest)
        assert loader.step == 10
        state = loader.state_dict()
        assert (state["position"], state["missing"]) == (22, [0])
        others.set()
        assert next(batches)["index"].tolist() == first
        assert next(batches, None) is None
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


def test_an_unordered_state_with_gaps_is_of_one_step_size():
    steps = indices(unordered(0))
    loader = unordered(0)
    state = {**loader.state_dict(), "position": 12, "missing": [4, 8], "step_size": 2}
    loader.load_state_dict(state)
    assert indices(loader) == [steps[2], steps[4], *steps[6:]]
    for other in ({"batch_size": 4}, {"rank": 0, "world_size": 2}):
        with pytest.raises(StateMismatchError, match=r"step_size .rows of all ranks per .*: 2 in the state, 4 here"):
            unordered(0, **other).load_state_dict(state)
    loader = unordered(0, batch_size=4)
    loader.load_state_dict({**state, "missing": [], "step_size": 0})  # without gaps any other goes on
    assert [len(step) for step in indices(loader)] == [4, 4, 2]


@forks
def test_processes_outlive_epochs():
    settings = {"num_workers": 2, "transform": with_process, **FORKED}
    with Loader(RangeSource(40), batch_size=2, **settings) as loader:
        processes = {i for _ in range(3) for batch in loader for i in batch["process"].tolist()}
    assert len(processes) == 2
    assert os.getpid() not in processes


@ORDER
def test_workers_outlive_epochs_and_breaks(in_order):
    with Loader(RangeSource(40), batch_size=2, num_workers=3, in_order=in_order) as loader:
        next(iter(loader))
        workers = loader_threads()
        assert len(workers) == 3
        for _ in range(3):
            list(loader)
            next(iter(loader))
            loader.load_state_dict(loader.state_dict())
            loader.set_epoch(7)
            assert loader_threads() == workers


@ORDER
def test_the_next_epoch_is_begun_before_its_loop(in_order):
    source = Counting(12)
    with Loader(source, batch_size=2, num_workers=2, in_order=in_order) as loader:
        assert sorted(indices(loader)) == indices(Loader(RangeSource(12), batch_size=2))
        eventually(lambda: source.reads > 12)


@ORDER
@WORKERS
def test_each_record_is_read_once_an_epoch_and_none_behind_the_last(workers, in_order):
    source = Counting(12)
    with Loader(source, batch_size=2, num_workers=workers, prefetch=8, epochs=2, in_order=in_order) as loader:
        for _ in range(2):
            served = [(i, square) for b in loader for i, square in zip(b["index"], b["square"].tolist(), strict=True)]
            assert sorted(served) == [(i, [i**2] * 3) for i in range(12)]
        assert [len(list(loader)) for _ in range(2)] == [0, 0]
        assert (loader.epoch, loader.step) == (2, 0)
        loader.set_epoch(1)
        assert len(list(loader)) == 6
        loader.set_epoch(5)
        assert list(loader) == []
    assert source.reads == 3 * 12


def test_no_epochs_are_none():
    loader = Loader(Counting(3), batch_size=1, epochs=0)
    assert list(loader) == []
    assert (loader.epoch, loader.source.reads) == (0, 0)
    with pytest.raises(ConfigError, match="epoch must be an integer >= 0, got -1"):
        loader.set_epoch(-1)


def test_progress_within_and_between_loops():
    loader = Loader(RangeSource(5), batch_size=2, epochs=3)
    assert str(loader.progress()) == "epoch 0 of 3, step 0 of 3, 0 rows/s"
    within = []
    for _ in loader:
        progress = loader.progress()
        within.append((progress.epoch, progress.step, progress.steps, loader.epoch, loader.step, len(loader)))
    assert within == [(0, 1, 3, 0, 1, 3), (0, 2, 3, 0, 2, 3), (0, 3, 3, 0, 3, 3)]
    progress = loader.progress()
    assert (progress.epoch, progress.step, progress.epochs) == (1, 0, 3)
    assert progress.rows_per_second > 0
    next(iter(loader))
    assert str(loader.progress()).startswith("epoch 2 of 3, step 0 of 3, ")
    loader.load_state_dict(loader.state_dict())
    assert str(loader.progress()).startswith("epoch 1 of 3, step 1 of 3, ")
    assert str(Loader(RangeSource(5), batch_size=2).progress()).startswith("epoch 0, step 0 of 3")


def packed(tail, batch_size=2, **settings):
    lengths = [1 + i * 7 % 11 for i in range(24)]
    source = MemorySource([{"tokens": np.full(n, i)} for i, n in enumerate(lengths)])
    layout = {"lengths": lengths, "row_length": 14, "batch_size": batch_size, "window": 6}
    planner = PackedBatchSampler(sampler=GlobalShuffle(24, 5), **layout)
    return Loader(source, sampler=planner, tail=tail, **settings)


PACKED_ROWS = [12, 13, 13, 13, 13, 14, 14, 13, 13, 15, 14, 13]  # of the first epochs


@WORKERS
@pytest.mark.parametrize(("tail", "size"), [("drop", 2), ("partial", 2), ("drop", 14)])
@pytest.mark.filterwarnings("ignore:.* has no batches:UserWarning")
def test_the_length_is_exact_in_each_epoch_also_if_it_has_no_step(workers, tail, size):
    expected = [rows // size if tail == "drop" else -(-rows // size) for rows in PACKED_ROWS]
    assert len(set(expected)) > 1, "the example does not show what it should"
    with packed(tail, size, num_workers=workers) as loader:
        for epoch, steps in enumerate(expected):
            assert (loader.epoch, len(loader)) == (epoch, steps)
            assert [len(loader) for _ in loader] == [steps] * steps
        loader.set_epoch(0)
        assert [len(list(loader)) for _ in range(8)] == expected[:8]


@pytest.mark.filterwarnings("ignore:.* has no batches:UserWarning")
def test_an_empty_source_counts_epochs_too():
    loader = Loader(RangeSource(0), batch_size=3, num_workers=1)
    for epoch in range(3):
        assert (loader.epoch, len(loader), list(loader)) == (epoch, 0, [])
    state = loader.state_dict()
    assert (state["epoch"], state["position"], state["length"]) == (3, 0, 0)
    loader.load_state_dict(state)
    assert str(loader.progress()) == "epoch 3, step 0 of 0, 0 rows/s"


class Large:
    """A source of batches of 64 KiB, which counts those that were begun."""

    def __init__(self):
        self.begun, self.lock = 0, threading.Lock()

    def __len__(self):
        return 400

    def __getitems__(self, indices):
        with self.lock:
            self.begun += 1
        return [{"x": np.zeros(1 << 15, np.uint8)} for _ in indices]

    def __getitem__(self, index):
        raise NotImplementedError


@ORDER
@pytest.mark.parametrize(("batches", "most"), [(0.5, 1), (3, 3), (5, 5)])
def test_bytes_bound_what_is_in_flight(batches, most, in_order):
    source, limit = Large(), int(batches * (1 << 16)) + 1000
    settings = {"num_workers": 4, "prefetch": 4, "prefetch_bytes": limit, "in_order": in_order}
    with Loader(source, batch_size=2, **settings) as loader:
        for received, _ in enumerate(itertools.islice(loader, 30), start=1):
            if received % 10 == 0:
                eventually(lambda: source.begun - received >= max(1, most - 1))  # noqa: B023 - called at once
            assert source.begun - received <= max(1, most)


@pytest.mark.parametrize("workers", [0, 2])
@ORDER
def test_a_batch_is_not_kept_by_the_loader(workers, in_order, no_collector):
    settings = {"num_workers": workers, "prefetch": 3, "in_order": in_order}
    with Loader(MemorySource({"x": np.zeros((40, 3))}), batch_size=2, **settings) as loader:
        batches = iter(loader)
        for _ in range(15):
            array = weakref.ref(next(batches)["x"])
            assert array() is None
