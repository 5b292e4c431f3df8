"""The loader of iterators, in threads and without: orders, ends, states, errors; processes are in tests/integration."""

import contextlib
import functools
import gc
import itertools
import json
import sys
import threading
import weakref
from collections import Counter, namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataload import Collate, ConfigError, Ragged, StateMismatchError, WorkerError, default_collate
from dataload.errors import SourceError
from dataload.streams import MultiStreamLoader
from dataload.streams.messages import join, stack
from dataload.streams.rows import SequenceOrder
from dataload.streams.workers import group_count

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("children", "support")]
import streams
from groups import groups_of

# The lists of D. MacLeod, "How to build a streaming DataLoader with PyTorch" (Speechmatics).
LISTS = [[12, 13, 14, 15, 16, 17], [27, 28, 29], [31, 32, 33, 34, 35, 36, 37, 38, 39], [40, 41, 42, 43]]
ROWS = {"batch_size": 2, "mode": "split", "shuffle": False}
WORKERS = pytest.mark.parametrize("workers", [0, 1, 3])


def plain(batch):
    return {name: column.tolist() if hasattr(column, "tolist") else column for name, column in batch.items()}


def take(loader, count=None, field="data"):
    """The values of a field, batch by batch."""
    return [plain(batch)[field] for batch in itertools.islice(loader, count)]


def run(make, sequences, field="data", **settings_):
    with MultiStreamLoader(make, sequences, **{**ROWS, **settings_}) as loader:
        return take(loader, field=field)


def test_ebook():
    expected = [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]
    assert run(iter, [range(12)], batch_size=1, chunk=4) == expected
    numbers = [12, 13, 14, 15, 16, 17, 27, 28, 29, 31, 32, 33]
    for workers in (0, 1, 2, 4):
        with MultiStreamLoader(iter, LISTS, batch_size=4, shuffle=False, num_workers=workers) as loader:
            assert loader  # although its length is not known
            assert take(loader, 12) == [[number] * 4 for number in numbers]


@pytest.mark.parametrize(
    ("rows", "most", "parts"), [(4, 1, 1), (4, 2, 2), (4, 3, 2), (12, 5, 4), (7, 6, 1), (7, 7, 7), (3, 64, 3)]
)
def test_ebook_as_many_workers_as_divide_the_rows(rows, most, parts):
    assert group_count(rows, most) == parts
    with MultiStreamLoader(iter, LISTS, batch_size=rows, num_workers=most) as loader:
        assert loader.num_workers == parts


def pieces(lengths, order, row, turns, chunk, ends):
    """The items of a row, step by step: lists of (sequence, offset)."""
    runs = (
        [(sequence, offset) for offset in range(lengths[sequence])]
        for turn in turns
        for place in range(order.count(row))
        for sequence in order.find(row, turn, np.array([place])).tolist()
    )
    if ends == "next":
        items = itertools.chain.from_iterable(runs)
        while piece := list(itertools.islice(items, chunk)):
            yield piece
        return
    for run in runs:
        for start in range(0, len(run), chunk):
            piece = run[start : start + chunk]
            if len(piece) == chunk or ends == "pad":
                yield piece


def model_batches(lengths, order, rows, chunk, ends, tail, turns):
    """All batches of some rows; in mode split of one epoch."""
    streams_ = [pieces(lengths, order, row, turns, chunk, ends) for row in rows]
    together = zip(*streams_, strict=False) if order.mode == "independent" else itertools.zip_longest(*streams_)
    for step in together:
        step = [piece or [] for piece in step]
        if tail == "drop" and any(not p or (ends == "next" and len(p) < chunk) for p in step):
            return
        yield model_batch(step, chunk)


def model_batch(step, chunk):
    def fold(cells):
        return cells if chunk > 1 else [row[0] for row in cells]

    padded = [[*piece, *[None] * (chunk - len(piece))] for piece in step]
    return {
        "x": fold([[0 if item is None else item[1] for item in row] for row in padded]),
        "y": fold([[[0.0 if item is None else float(item[1])] * 3 for item in row] for row in padded]),
        "word": fold([["" if item is None else f"w{item[1]}" for item in row] for row in padded]),
        "stream_id": [piece[0][0] if piece else -1 for piece in step],
        "offset": [piece[0][1] if piece else -1 for piece in step],
        "is_first": fold([[item is not None and item[1] == 0 for item in row] for row in padded]),
        "valid": fold([[item is not None for item in row] for row in padded]),
    }


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 7, 40]), min_size=1, max_size=7))
    lengths[draw(st.integers(0, len(lengths) - 1))] = 11  # some sequence fills a chunk
    case = {
        "lengths": lengths,
        "batch_size": draw(st.integers(1, 6)),
        "mode": draw(st.sampled_from(["independent", "split"])),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(-3, 3)),
        "chunk": draw(st.sampled_from([1, 2, 3, 5])),
        "ends": draw(st.sampled_from(["next", "pad", "drop"])),
        "num_workers": draw(st.integers(0, 6)),
        "world_size": draw(st.integers(1, 3)),
        "prefetch": draw(st.integers(1, 3)),
    }
    case["rank"] = draw(st.integers(0, case["world_size"] - 1))
    enough = len(lengths) >= case["batch_size"] * case["world_size"]
    case["tail"] = draw(st.sampled_from(["pad", "drop"] if enough else ["pad"])) if case["mode"] == "split" else None
    return case


def expected_of(case, epochs=2, steps=25):
    """The batches of two epochs, or the first ones without end."""
    lengths, size, world = case["lengths"], case["batch_size"], case["world_size"]
    order = SequenceOrder(len(lengths), size * world, case["mode"], case["shuffle"], case["seed"])
    rows = [row * world + case["rank"] for row in range(size)]
    arguments = lengths, order, rows, case["chunk"], case["ends"], case["tail"]
    if case["mode"] == "independent":
        return [list(itertools.islice(model_batches(*arguments, range(1000)), steps))]
    return [list(model_batches(*arguments, [epoch])) for epoch in range(epochs)]


def loader_of(case, **changes):
    settings_ = {name: value for name, value in {**case, **changes}.items() if name != "lengths"}
    return MultiStreamLoader(streams.count_up, case["lengths"], **settings_)


@settings(max_examples=30)
@given(cases(), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_batches_are_those_of_a_slow_model_also_after_a_resume_at_any_step(case, sizes, draw):
    epochs = expected_of(case)
    expected = [batch for epoch in epochs for batch in epoch]
    found = []
    with groups_of(*sizes), loader_of(case) as loader:
        states = [loader.state_dict()]
        for epoch in epochs:
            if not epoch:
                with pytest.raises(SourceError):
                    next(iter(loader))
                return
            for batch in itertools.islice(loader, None if case["mode"] == "split" else len(epoch)):
                found.append(plain(batch))
                states.append(json.loads(json.dumps(loader.state_dict())))
    assert found == expected
    step = draw.draw(st.integers(0, len(expected)))
    with groups_of(*sizes), loader_of(case, num_workers=draw.draw(st.integers(0, 6)), prefetch=2) as loader:
        loader.load_state_dict(states[step])
        assert loader.state_dict() == states[step]
        rest = []
        while len(rest) < len(expected) - step:
            rest += map(plain, itertools.islice(loader, len(expected) - step - len(rest)))
        assert rest == expected[step:]


def test_the_rank_is_asked_for_when_the_first_batch_is_wanted(monkeypatch):
    settings_ = {"batch_size": 1, "mode": "split", "shuffle": False}
    expected = [[*map(plain, MultiStreamLoader(iter, LISTS, rank=rank, world_size=2, **settings_))] for rank in (0, 1)]
    with MultiStreamLoader(iter, LISTS, **settings_) as built_first:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with MultiStreamLoader(iter, LISTS, **settings_) as loader:
            assert loader.state_dict()["world_size"] == built_first.state_dict()["world_size"] == 2
            with pytest.raises(ConfigError, match=r"the environment has WORLD_SIZE='2': RANK and WORLD_SIZE are both"):
                next(iter(loader))
            monkeypatch.setenv("RANK", "1")
            assert [*map(plain, built_first)] == [*map(plain, loader)] == expected[1]
            monkeypatch.setenv("RANK", "0")
            assert loader.state_dict()["rank"] == 1, "a rank that was used never changes"


def test_a_state_loaded_before_the_rank_is_known_is_dealt_to_the_ranks(monkeypatch):
    settings_ = {"mode": "split", "shuffle": False}
    states = []
    for rank in (0, 1):
        with MultiStreamLoader(iter, LISTS, batch_size=1, rank=rank, world_size=2, **settings_) as loader:
            next(iter(loader))
            states.append(loader.state_dict())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with MultiStreamLoader(iter, LISTS, batch_size=1, **settings_) as loader:
        loader.load_state_dict(states)
        other = MultiStreamLoader(iter, LISTS, batch_size=1, **settings_)
        other.load_state_dict(states)
        other.set_epoch(3)
        monkeypatch.setenv("RANK", "1")
        assert loader.step == 1
        assert [*map(plain, loader)] == [
            *map(plain, resumed(states[1], rank=1, world_size=2, batch_size=1, **settings_))
        ]
        batches = iter(other)
        next(batches)
        assert (other.epoch, other.state_dict()["rank"]) == (3, 1)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    with MultiStreamLoader(iter, LISTS, batch_size=1, **settings_) as alone:
        one = alone.state_dict()
        alone.load_state_dict(one)
        for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        for _ in range(2):  # an attempt that failed changes nothing
            with pytest.raises(StateMismatchError, match=r"rows \(of all ranks\): 1 in the state, 2 here"):
                next(iter(alone))


def resumed(state, **settings_):
    loader = MultiStreamLoader(iter, LISTS, **settings_)
    loader.load_state_dict(state)
    return loader


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "samples",
    [
        [1, 2, 3, 4],
        [1, 2.5, 3, 4],
        [1, 2, 3.5, 4],
        [True, False, True, True],
        [2**63, 1, 2, 3],
        [1, 2, 2**63, 3],
        ["a", "b", "", "d"],
        [b"a", None, bytearray(b"c"), [4]],
        [None, object, [3], None],
        [np.ndarray, np.generic, np.ndarray, np.float32],
        [np.float32(1), np.float32(2), np.float32(3), np.float32(4)],
        [np.zeros(2), np.ones(2), np.ones(2), np.ones(2)],
        [Pair(1, "x"), Pair(2, "y"), Pair(3, "z"), Pair(4, "")],
        [(1, {"a": 2.0}), (2, {"a": 3}), (3, {"a": 4}), (4, {"a": 5})],
        [{"a": 1, "b": "x"}, {"b": "y", "a": 2}, {"b": "z", "a": 3}, {"a": 4, "b": ""}],
        [{}, {}, {}, {}],
        [np.str_("a"), np.str_("abc"), "x", "y"],
    ],
)
def test_joined_parts_are_what_one_collate_makes(samples):
    for size in (1, 2, 4):
        parts = [stack(samples[start : start + size]) for start in range(0, 4, size)]
        assert_same(join(parts, np.ones(4, bool)), default_collate(samples))


@pytest.mark.parametrize("samples", [[b"a", 1, "c", None], [None, object, 3, 4]])
def test_joined_parts_that_differ_are_refused(samples):
    for size in (1, 2, 4):
        parts = [stack(samples[start : start + size]) for start in range(0, 4, size)]
        with pytest.raises(ConfigError, match="cannot stack the samples: row 0 is"):
            join(parts, np.ones(4, bool))


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


BLANKS = [([1, 2], 0), ([1, 2.5], 0.0), ([True, True], False), (["a", "b"], ""), ([b"a", b"b"], b"")]
BLANKS += [([None, None], None), ([np.int16(3), np.int16(4)], 0)]


@pytest.mark.parametrize(("samples", "blank"), BLANKS)
def test_blanks_are_zeros_empty_text_or_none(samples, blank):
    for size in (1, 2):
        parts = [stack(samples[start : start + size]) for start in range(0, 2, size)]
        found = join([*parts, stack([])], np.array([False, True, True, False]))
        assert list(found) == [blank, *samples, blank]
        assert type(found) is type(default_collate(samples))


def test_pad_values():
    def make(sequence, context):
        return ({"tokens": np.ones(n, int), "labels": np.ones(n, int)} for n in (1, 2))

    settings_ = {"field": "labels", "chunk": 2, "collate": {"tokens": "pad", "labels": "pad"}}
    assert run(make, ["a", "b"], pad_value={"labels": -100}, **settings_) == [[[[1, -100], [1, 1]]] * 2]
    with pytest.warns(UserWarning, match="padding fills the integer fields labels, tokens with 0") as warned:
        assert run(make, ["a", "b"], **settings_) == [[[[1, 0], [1, 1]]] * 2]
    assert len(warned) == 1


class Tensor:
    """As much of a tensor of torch as is used: the package takes seconds to import."""

    def __init__(self, values):
        self.values = np.array(values, np.float32)
        self.shape = self.values.shape

    def __array__(self, *_, **__):
        return self.values

    def new_zeros(self, shape):
        return Tensor(np.zeros(shape))


def test_tensors_are_stacked_as_arrays_or_given_to_a_collate_as_they_are():
    def gather(tensors):
        assert all(isinstance(tensor, Tensor) for tensor in tensors)
        return np.stack([tensor.values for tensor in tensors])

    lists = [[Tensor([1.0, 2.0])] * 2, [Tensor([3.0, 4.0])]]
    for settings_ in ({"num_workers": 1}, {"num_workers": 2}, {"collate": gather}):
        assert run(iter, lists, **settings_) == [[[1, 2], [3, 4]], [[1, 2], [0, 0]]]


def test_policies_and_transforms_see_the_whole_batch():
    texts = [[np.arange(n)] for n in (1, 3, 2, 0)]
    settings_ = {**ROWS, "batch_size": 4, "num_workers": 4}
    assert run(iter, texts, collate={"": "pad"}, **settings_) == [[[0, 0, 0], [0, 1, 2], [0, 1, 0], [0, 0, 0]]]
    with MultiStreamLoader(iter, texts, collate=Collate(policies={"": "ragged"}), chunk=2, **settings_) as loader:
        (batch,) = loader
    assert isinstance(batch["data"], Ragged)
    assert batch["data"].offsets.tolist() == [0, 1, 2, 5, 6, 8, 9, 9, 10]
    with MultiStreamLoader(iter, [[1], [2]], batch_transform=sorted, **ROWS) as loader:
        assert list(loader) == [["data", "is_first", "offset", "stream_id", "valid"]]


def test_the_context_gives_the_same_numbers_with_other_workers_and_after_a_resume():
    settings_ = {"batch_size": 4, "seed": 3}
    with MultiStreamLoader(streams.noisy, [3, 5, 2], **settings_) as loader:
        batches = list(map(plain, itertools.islice(loader, 7)))
        state = loader.state_dict()
        rest = list(map(plain, itertools.islice(loader, 7)))
    noise = [value for batch in batches + rest for value in batch["noise"]]
    assert len(set(noise)) == len(noise)
    assert [batch["row"] for batch in batches] == [[0, 1, 2, 3]] * 7
    assert {epoch for batch in rest for epoch in batch["epoch"]} == {0, 1}
    with MultiStreamLoader(streams.noisy, [3, 5, 2], num_workers=4, **settings_) as loader:
        loader.load_state_dict(state)
        assert list(map(plain, itertools.islice(loader, 7))) == rest


def test_in_split_another_for_is_the_next_epoch_also_after_a_break():
    settings_ = {"batch_size": 2, "mode": "split", "seed": 1}
    with MultiStreamLoader(iter, LISTS, epochs=3, **settings_) as loader:
        assert (loader.epoch, loader.step) == (0, 0)
        for batch in loader:
            first = plain(batch)
            assert (loader.epoch, loader.step) == (0, 1)
            break
        assert (loader.epoch, loader.step) == (1, 0)
        second = plain(next(iter(list(loader))))
        assert (loader.epoch, loader.step) == (2, 0)
        assert len(list(loader)) > 0
        assert list(loader) == []
        assert repr(loader) == "MultiStreamLoader(4 sequences, 2 rows, epoch 3, step 0)"
    with MultiStreamLoader(iter, LISTS, num_workers=2, **settings_) as loader:
        assert [plain(next(iter(loader))) for _ in range(2)] == [first, second]


def test_set_epoch():
    with MultiStreamLoader(iter, LISTS, batch_size=2, mode="split", epochs=4) as loader:
        epochs = [take(loader) for _ in range(4)]
        loader.set_epoch(2)
        assert take(loader) == epochs[2]
        for _ in loader:
            loader.set_epoch(1)
        assert take(loader) == epochs[1]
    with MultiStreamLoader(iter, LISTS, batch_size=2) as loader:
        loader.set_epoch(0)
        with pytest.raises(ConfigError, match="mode='independent' has no epochs"):
            loader.set_epoch(1)


def test_statistics_tell_the_slowest_row(monkeypatch):
    clock = [0]
    monkeypatch.setattr("dataload.streams.workers.perf_counter", lambda: clock[0])

    def make(n):
        for number in range(20):
            clock[0] += 2 if n == 2 else 1
            yield number

    with MultiStreamLoader(make, range(4), **{**ROWS, "batch_size": 4}) as loader:
        assert len(list(loader)) == 20
        statistics = loader.statistics()
    assert statistics.since(statistics).row_seconds.tolist() == [0, 0, 0, 0]
    assert (statistics.steps, statistics.slowest_row, statistics.row_seconds.shape) == (20, 2, (4,))
    assert str(statistics).startswith("20 batches, 80 rows, ")
    assert str(statistics).splitlines()[-2].startswith("the slowest row is 2 with")
    assert (statistics.row_seconds > 0).all()


@WORKERS
def test_a_stream_is_asked_for_its_own_state_and_makes_nothing_twice(workers):
    settings_ = {**ROWS, "num_workers": workers}
    with MultiStreamLoader(streams.Counting, [10, 6], **settings_) as loader:
        states = [json.dumps(loader.state_dict()) for _ in loader]
    assert json.loads(states[3])["streams"] == [{"next": 4}] * 2
    assert json.loads(states[7])["streams"] == [{"next": 8}, None]
    streams.Counting.made = 0
    with MultiStreamLoader(streams.Counting, [10, 6], **settings_) as loader:
        loader.load_state_dict(json.loads(states[3]))
        found = [plain(batch) for batch in loader]
    assert [batch["x"] for batch in found] == [[4, 4], [5, 5], [6, 0], [7, 0], [8, 0], [9, 0]]
    assert [batch["offset"] for batch in found] == [[4, 4], [5, 5], [6, -1], [7, -1], [8, -1], [9, -1]]
    assert streams.Counting.made == 6 + 2


SAVED = {"batch_size": 2, "seed": 4}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seed": 5}, r"seed \(the seed\): 4 in the state, 5 here"),
        ({"batch_size": 3}, r"rows \(of all ranks\): 2 in the state, 3 here"),
        ({"mode": "split"}, r"mode \(how rows .*\): independent in the state, split here"),
        ({"shuffle": False}, r"shuffle \(.*\): True in the state, False here"),
        ({"rank": 1, "world_size": 2}, r"rows \(of all ranks\): 2 in the state, 4 here"),
        ({"sequences": LISTS[:3]}, r"sequences \(their number, or their own fingerprint\): \w+ in the state, \w+ here"),
    ],
)
def test_a_state_of_something_else_is_refused(changes, match):
    with MultiStreamLoader(iter, LISTS, **SAVED) as loader:
        state = loader.state_dict()
    changes = {"sequences": LISTS, **changes}
    with MultiStreamLoader(iter, **{**SAVED, **changes}) as loader, pytest.raises(StateMismatchError, match=match):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"version": 7}, "version: 7 in the state, 1 here"),
        ({"streams": ...}, "not a state of a MultiStreamLoader: missing or unknown keys: streams"),
        ({"more": 1}, "unknown keys: more"),
        ({"step": -1}, "step in the state must be an integer >= 0 and .*, found -1"),
        ({"epoch": 1.0}, r"epoch in the state must be .*, found 1\.0"),
        ({"rows": [[0, 0]]}, "rows in the state must be a list of three integers for each row"),
        ({"rows": [[0, 0, 0]]}, "the state has 1 rows, but its batch_size is 2"),
        ({"streams": [1]}, "streams in the state must be empty or have one state for each row"),
    ],
)
def test_a_broken_state_is_refused(changes, match):
    with MultiStreamLoader(iter, LISTS, **SAVED) as loader:
        state = {name: value for name, value in {**loader.state_dict(), **changes}.items() if value is not ...}
        with pytest.raises(StateMismatchError, match=match):
            loader.load_state_dict(state)


def test_the_chunk_may_change_at_a_resume():
    def joined(loader, count):
        return np.concatenate([batch["data"] for batch in itertools.islice(loader, count)], axis=1).tolist()

    with MultiStreamLoader(iter, LISTS, batch_size=2, chunk=3) as loader:
        joined(loader, 4)
        state = loader.state_dict()
        rest = joined(loader, 4)
    with MultiStreamLoader(iter, LISTS, batch_size=2, chunk=2) as loader:
        loader.load_state_dict(state)
        assert joined(loader, 6) == rest


@contextlib.contextmanager
def ranks_of(world, mode, rows=4):
    """The loaders of all ranks."""
    make = {"independent": streams.Counting, "split": streams.count_up}[mode]
    settings_ = {"batch_size": rows // world, "world_size": world, "mode": mode, "seed": 3, "num_workers": 1}
    lengths = [7, 9, 8, 8, 7, 9, 8, 8, 7]
    with contextlib.ExitStack() as stack:
        made = [MultiStreamLoader(make, lengths, rank=rank, **settings_) for rank in range(world)]
        yield [stack.enter_context(loader) for loader in made]


def steps_of(ranks, count):
    """Steps of all ranks, with their rows as one rank has them."""
    for batches in zip(*(map(plain, itertools.islice(loader, count)) for loader in ranks), strict=True):
        yield {name: [v for some in zip(*(b[name] for b in batches), strict=True) for v in some] for name in batches[0]}


@pytest.mark.parametrize("mode", ["independent", "split"])
def test_ranks_may_change_at_a_resume(mode):
    with ranks_of(1, mode) as ranks:
        expected = list(steps_of(ranks, 14))
    found, state = [], None
    for world in (4, 2, 1, 2):
        with ranks_of(world, mode) as ranks:
            for loader in ranks if state else ():
                loader.load_state_dict(json.loads(json.dumps(state)))
                assert (loader.epoch, loader.step) == (0, len(found))
            found += steps_of(ranks, 3)
            state = [loader.state_dict() for loader in ranks][::-1]
    assert found == expected[:12]
    with ranks_of(1, mode) as (alone,), ranks_of(2, mode) as ranks:
        alone.load_state_dict(state)
        for loader in ranks:
            loader.load_state_dict(alone.state_dict())  # the state of one rank that has all rows
        assert [loader.state_dict() for loader in ranks] == state[::-1]
        assert list(steps_of([alone], 2)) == expected[12:]


def test_states_of_ranks_must_fit_together():
    with ranks_of(2, "split") as ranks, ranks_of(1, "split") as (alone,), ranks_of(1, "split", rows=2) as (smaller,):
        first, second = (loader.state_dict() for loader in ranks)
        for state, match in [
            ([first], r"needs one state from every rank; found ranks \[0\] of 2"),
            ([first, first], r"found ranks \[0, 0\] of 2"),
            ([], r"found ranks \[\]"),
            ([first, {**second, "step": 2}], r"must save at the same step\n  step \(step\): 2 in the state, 0 here"),
            ([first, {**second, "seed": 2}], r"seed \(the seed\): 2 in the state, 3 here"),
            (first, r"load a list of all ranks' states\n  batch_size .*: 2 in the state, 4 here\n  world_size"),
            (4, "the state of a MultiStreamLoader is a dict, found int"),
        ]:
            with pytest.raises(StateMismatchError, match=match):
                alone.load_state_dict(state)
        with pytest.raises(StateMismatchError, match=r"rows \(of all ranks\): 4 in the state, 2 here"):
            smaller.load_state_dict([first, second])


@WORKERS
@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_a_failing_stream_is_named_after_the_steps_before_it(workers, size):
    settings_ = {**ROWS, "batch_size": 3, "num_workers": workers}
    with groups_of(size), MultiStreamLoader(streams.break_at_3, [9, 2, 5, 4, 7], **settings_) as loader:
        for _ in range(2):
            found = []
            with pytest.raises(WorkerError) as caught:
                found += (batch["x"].tolist() for batch in loader)
            error = caught.value
            assert found == [[0, 0, 0], [1, 1, 1], [2, 0, 2], [3, 1, 3], [4, 2, 4]]
            assert (error.step, error.epoch, error.indices) == (5, 0, (4,))
            assert isinstance(error.__cause__, OSError)
            assert "in break_at_3" in error.traceback_text
            state = loader.state_dict()
            assert state["step"] == 5
            loader.load_state_dict(state)
            with pytest.raises(WorkerError, match="step 5 of epoch 0 failed in row 1"):
                next(iter(loader))
            loader.load_state_dict({**state, "step": 0, "rows": [[0, 0, 0]] * 3})


class Broken(streams.Counting):
    def state_dict(self):
        raise ValueError("no state today")


class Gone:
    """Sequences that cannot be read."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise OSError("gone")


def missing(name):
    raise FileNotFoundError(name)


LATER = {"batch_size": 3, "mode": "split", "shuffle": False}


@pytest.mark.parametrize(
    ("make", "sequences", "settings_", "message"),
    [
        (streams.break_at_3, [7], {"batch_size": 1}, "in row 0, at item 3 of sequence 0, 7: OSError: the line is dead"),
        (streams.break_at_3, [9, 2, 5, 4, 7], LATER, "in row 1, at item 3 of sequence 4, 7: OSError: the line is dead"),
        (missing, ["x" * 1000], {}, r"in row 0, at item 0 of sequence 0, 'x+ \.\.\.\(.* characters\)\.\.\. x+': File"),
        (iter, Gone(), {}, r"of sequence 0, which cannot be shown \(OSError\): OSError: gone"),
        (Broken, [3], {}, "step 0 of epoch 0 failed: ValueError: no state today"),
        (iter, LISTS, {"batch_transform": lambda b: b["no"]}, "epoch 0 failed in batch_transform: KeyError: 'no'"),
        (lambda n: [np.zeros(2 + n)], range(4), LATER, r"0 failed in collate: ConfigError.*row 1 is float64 \(3,\)"),
        (streams.count_up, [0] * 3, {}, "row 0, at item 0 of sequence .*SourceError: none of 3 sequences gave an item"),
        (streams.count_up, [1, 1], {"chunk": 2, "ends": "drop"}, "2 sequences gave 2 items, and ends='drop' drops"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_fails_in_a_step_is_told(make, sequences, settings_, message, workers):
    settings_ = {"batch_size": 2, "shuffle": False, "num_workers": workers, **settings_}
    with MultiStreamLoader(make, sequences, **settings_) as loader, pytest.raises(WorkerError, match=message) as caught:
        list(loader)
    assert len(str(caught.value).split(":")[0]) < 200


def test_a_state_that_does_not_fit_the_stream_is_an_error():
    with MultiStreamLoader(streams.Counting, [10], batch_size=1) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with MultiStreamLoader(lambda n: (i for i in range(n)), [10], batch_size=1) as loader:
        loader.load_state_dict(state)
        with pytest.raises(WorkerError, match="generator has no state_dict and load"):
            next(iter(loader))
        loader.load_state_dict({**state, "rows": [[0, 0, 12]], "streams": []})
        with pytest.raises(WorkerError, match=r"12 items of this sequence were consumed .* but now it has only 10"):
            next(iter(loader))


@pytest.mark.parametrize("name", ["stream_id", "offset", "is_first", "valid"])
def test_a_field_that_is_added_is_refused(name):
    message = f"samples have a field '{name}', a name that the loader adds to batches"
    loader = MultiStreamLoader(lambda n: [{name: n}], range(3), batch_size=1)
    with loader, pytest.raises(ConfigError, match=message) as caught:
        next(iter(loader))
    assert caught.value.key == name


@pytest.mark.parametrize(
    ("lengths", "settings_", "match"),
    [
        ([0, 0, 0], {}, "epoch 0 has no step: no sequence of these rows gave enough items"),
        ([2, 1], {"chunk": 3, "ends": "drop"}, "epoch 0 has no step: no sequence .* enough items for a step"),
        ([2, 0], {"tail": "drop"}, "a row has too few items for one, and tail='drop' ends the epoch there"),
    ],
)
def test_an_epoch_without_a_step_is_an_error_each_time(lengths, settings_, match):
    with MultiStreamLoader(streams.count_up, lengths, **ROWS, **settings_) as loader:
        for _ in range(2):
            with pytest.raises(SourceError, match=match):
                next(iter(loader))


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_an_error_behind_the_end_of_an_epoch_is_none(tail):
    """The worker goes on to the failing sequence in the same task, but the epoch ends before."""
    lengths = [9, 2, 7] if tail == "drop" else [2, 2]
    with groups_of(64):
        assert run(streams.break_at_3, lengths, "x", num_workers=2, tail=tail) == [[0, 0], [1, 1]]


COPIED = {"executor": "processes"}


@pytest.mark.parametrize(
    ("settings_", "key", "match"),
    [
        ({"make_stream": 3}, "make_stream", "make_stream must be a function of a sequence, got 3"),
        ({"sequences": "abc"}, "sequences", "sequences must be a list of arguments for make_stream, got 'abc'"),
        ({"sequences": iter(LISTS)}, "sequences", "sequences must be a list of arguments for make_stream"),
        ({"sequences": []}, "sequences", "sequences is empty, but a row needs one to follow"),
        ({"batch_size": 0}, "batch_size", "batch_size must be an integer >= 1"),
        ({"mode": "splitt"}, "mode", "mode is 'splitt': did you mean 'split'"),
        ({"ends": "stop"}, "ends", "ends is 'stop': .*choose from drop, next, pad"),
        ({"tail": "partial", "mode": "split"}, "tail", "tail is 'partial'"),
        ({"executor": "thread"}, "executor", "executor is 'thread': did you mean 'threads'"),
        ({"executor": "x"}, "executor", "executor is 'x'"),
        ({"epochs": 2}, "epochs", "epochs needs mode='split': rows of mode='independent' never end"),
        ({"tail": "pad"}, "tail", "tail needs mode='split'"),
        ({"tail": "drop", "mode": "split", "batch_size": 5}, "tail", "4 sequences do not fill 5 rows"),
        ({"chunk": 0}, "chunk", "chunk must be an integer >= 1"),
        ({"num_workers": -1}, "num_workers", "num_workers must be an integer >= 0"),
        ({"prefetch": 0}, "prefetch", "prefetch must be an integer >= 1"),
        ({"timeout": 0}, "timeout", "timeout must be a number of seconds above 0"),
        ({"collate": 3}, "collate", "collate must be a function or policies by field"),
        ({"seed": 0.5}, "seed", "seed must be an integer"),
        ({"rank": 2, "world_size": 2}, "rank", r"rank must be an integer in \[0, 2\)"),
        ({"make_stream": functools.partial(print, threading.Lock()), **COPIED}, "make_stream", "cannot be pickled"),
        ({"sequences": [threading.Lock()], **COPIED}, "sequences", "a copy of sequences, and .* cannot be pickled"),
    ],
)
def test_settings_are_checked(settings_, key, match):
    with pytest.raises(ConfigError, match=match) as caught:
        MultiStreamLoader(**{"make_stream": iter, "sequences": LISTS, "batch_size": 2, **settings_})
    assert caught.value.key == key


@WORKERS
def test_streams_are_closed_when_they_are_left_when_the_state_is_set_and_with_the_loader(workers):
    opened, closed, ended = [], [], []

    class Stream:
        def __init__(self, number):
            self.number = number
            opened.append(number)

        def __iter__(self):
            try:
                yield from range(3)
            finally:
                ended.append(self.number)

        def close(self):
            closed.append(self.number)

    with MultiStreamLoader(Stream, range(4), num_workers=workers, prefetch=1, **ROWS) as loader:
        list(loader)
        assert sorted(closed) == [0, 1, 2, 3]
        for _ in loader:
            break
        loader.load_state_dict(loader.state_dict())
        for _ in loader:
            break
    assert Counter(opened) == Counter(closed) == Counter(ended)
    assert len(opened) > 7


@pytest.mark.parametrize("fails", [False, True])
def test_a_dropped_loader_ends_its_threads_and_closes_its_generators(fails):
    closed = []

    def make(n):
        try:
            yield from itertools.count()
        finally:
            closed.append(n)

    gc.collect()
    gc.disable()
    try:
        transform = (lambda batch: batch["nothing"]) if fails else None
        loader = MultiStreamLoader(
            make, range(2), batch_size=2, num_workers=2, shuffle=False, batch_transform=transform
        )
        with contextlib.suppress(WorkerError):
            next(iter(loader))
        dead = weakref.ref(loader)
        del loader
        assert dead() is None
    finally:
        gc.enable()
    assert closed == [0, 0]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dataload")]


@pytest.mark.parametrize(("sizes", "workers"), [((1,), 2), ((16,), 2), ((16, 1), 2), ((16,), 1)])
def test_a_stuck_stream_is_warned_of_then_given_up_and_named_after_the_steps_before_it(tmp_path, sizes, workers):
    make = streams.HangAt(4, tmp_path / "mark")
    found, where, worker = [], "in row 1, at sequence 1, 4", f"dataload-{workers - 1}"
    with groups_of(*sizes), MultiStreamLoader(make, [5, 4], num_workers=workers, timeout=0.3, **ROWS) as loader:
        with (
            pytest.warns(RuntimeWarning) as warned,
            pytest.raises(WorkerError, match=f"step 2 of epoch 0 failed {where}: {worker} has returned no b") as caught,
        ):
            found += (batch["x"].tolist() for batch in loader)
        texts = [str(warning.message) for warning in warned]
        assert any(f"{worker} is at step 2 of epoch 0, index 1\n{where}\n" in text for text in texts)
        assert any("threads did not stop and are left behind" in text for text in texts)
        assert found == [[0, 0], [1, 1]]
        assert (caught.value.indices, loader.state_dict()["step"]) == ((1,), 2)
        assert "streams.py" in caught.value.traceback_text
        make.let_go()
        make.length = -1  # it hangs no more
        loader.load_state_dict(loader.state_dict())
        assert take(loader, field="x") == [[2, 2], [3, 3], [4, 0]]
    for thread in threading.enumerate():
        if thread.name.startswith("dataload"):
            thread.join(10)
