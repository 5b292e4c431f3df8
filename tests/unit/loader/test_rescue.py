"""One step with bad records among its own, against a plain model: rows left out, replaced, or raised."""

import contextlib
import functools
import gc
import os
import signal
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataload import ConfigError, CorruptFileError, Loader, MemorySource, Pack, RangeSource, WorkerError, mix
from dataload.collate import Packing, default_collate
from dataload.errors import ClosedSourceError, MissingDependencyError
from dataload.loader import rescue
from dataload.loader.failures import ErrorPolicy, StepTrace, read_excluded
from dataload.loader.fetch import BatchLoader
from dataload.loader.step import even_shares, load_step
from dataload.samplers import BatchPlan
from dataload.sources.base import Source
from dataload.transforms import compose

LENGTH = 12


def test_examples_are_near_first():
    policy = ErrorPolicy("skip", np.array([4, 6, 7]))
    assert policy.examples(5, 100)[:7] == [5, 3, 8, 2, 9, 0, 11]


def test_steps_made_together_share_their_spans():
    shares = even_shares([("read", 1.0, 5.0), ("collate", 5.0, 7.0)], 2)
    assert shares == [[("read", 1, 3), ("collate", 3, 4)], [("read", 4, 6), ("collate", 6, 7)]]


def record(index):
    return {"index": index, "x": np.full(2, index, np.float32), "name": f"r{index}"}


class Plain:
    """Of somebody's own: one record at a time; some fail. Keeps what was read."""

    def __init__(self, bad=(), length=LENGTH):
        self.bad, self.length, self.seen = frozenset(bad), length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.seen.append(index)
        if index in self.bad:
            raise CorruptFileError("damaged", path="/data/part.bin", index=index)
        return record(index)

    def __repr__(self):
        return "Plain()"


class Batched(Plain):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Columns(Source):
    """One of ours: reads columns."""

    def __init__(self, bad=(), length=LENGTH):
        self.plain = Plain(bad, length)

    @property
    def seen(self):
        return self.plain.seen

    def __len__(self):
        return len(self.plain)

    def _read(self, indices):
        return [self.plain[index] for index in indices.tolist()]

    def fingerprint(self):
        return "0" * 32


KINDS = pytest.mark.parametrize("kind", [Plain, Batched, Columns])


def fetcher(source, action="raise", *, exclude=None, transform=None, **settings):
    given = {"fields": None, "collate": default_collate, "batch_transform": None, "seed": 0, **settings}
    policy = ErrorPolicy(action, read_excluded(exclude, source))
    loader = BatchLoader(source=source, transform=compose(transform), policy=policy, **given)
    return lambda plan, epoch, trace=None: load_step(loader, plan, epoch, trace or StepTrace())


def plan(indices, valid=None, packing=None):
    mask = None if valid is None else np.array(valid, bool)
    return BatchPlan(7, np.array(indices, np.int64), mask, packing)


def rows(batch):
    """The indices of a batch, after a look at its other fields."""
    found = batch["index"].tolist()
    assert batch["x"].tolist() == [[index, index] for index in found]
    assert batch["x"].shape == (len(found), 2)
    assert batch["x"].dtype == np.float32
    assert batch["name"] == [f"r{index}" for index in found]
    return found


def failing(*indices):
    """A transform that fails for these."""

    def check(sample):
        if sample["index"] in indices:
            raise ZeroDivisionError(f"no {sample['index']}")
        return sample

    return check


@KINDS
@given(
    indices=st.lists(st.integers(0, LENGTH - 1), max_size=8),
    unreadable=st.frozensets(st.integers(0, LENGTH - 2), max_size=6),
    untransformable=st.frozensets(st.integers(0, LENGTH - 2), max_size=4),
    excluded=st.frozensets(st.integers(0, LENGTH - 2), max_size=4),
    action=st.sampled_from(["skip", "replace"]),
    padded=st.integers(0, 8),
    transforms=st.booleans(),
)
@example(indices=[3], unreadable={3}, untransformable=(), excluded=set(), action="replace", padded=0, transforms=False)
def test_equals_the_model(kind, indices, unreadable, untransformable, excluded, action, padded, transforms):
    failing_ones = unreadable | untransformable if transforms else unreadable
    gone = failing_ones | excluded
    valid = [place < padded for place in range(len(indices))]
    step = plan(indices, valid if padded < 8 else None)
    source = kind(unreadable)
    fetch = fetcher(
        source, action, exclude=sorted(excluded), transform=failing(*untransformable) if transforms else None
    )
    trace = StepTrace()
    wanted = {index for index, is_valid in zip(indices, valid, strict=True) if is_valid or padded == 8}
    good = [index for index in indices if index not in gone]

    if action == "replace" and not good and wanted:
        with pytest.raises(WorkerError, match=r"all \d+ records of the step are bad"):
            fetch(step, 3, trace)
        return
    batch = fetch(step, 3, trace)
    found = rows(batch)
    replaced = {bad.index: bad.replaced_by for bad in trace.bad}
    assert set(replaced) == (wanted & failing_ones) - excluded
    if action == "skip":
        assert found == good
        assert set(replaced.values()) <= {None}
        kept = [is_valid for index, is_valid in zip(indices, valid, strict=True) if index not in gone]
    else:
        assert len(found) == len(indices)
        assert set(found) <= (set(good) or set(range(LENGTH)) - gone)
        mapping = dict(zip(indices, found, strict=True))  # equal indices are replaced alike
        assert found == [mapping[index] for index in indices]
        assert all(mapping[index] == index for index in good)
        assert all(mapping[index] == other for index, other in replaced.items())
        kept = valid
        again = fetcher(kind(unreadable | (failing_ones - excluded)), action, exclude=sorted(excluded))
        reverse = plan(indices[::-1], None if step.valid is None else valid[::-1])
        assert rows(again(reverse, 3)) == found[::-1]  # on whatever the record has failed, and in whichever order
    assert list(batch) == ["index", "x", "name", *(["valid"] if step.valid is not None else [])]
    if step.valid is not None:
        assert (batch["valid"].dtype, batch["valid"].tolist()) == (bool, kept)
    assert not set(source.seen) & excluded


def test_many_bad_records_at_the_front_do_not_hide_the_fields():
    source = Plain(range(9_000), 10_000)
    assert rows(fetcher(source, "skip")(plan([5]), 0)) == []
    assert len(source.seen) < 110


def test_a_bad_first_record_is_skipped_in_a_mix_whose_fields_it_would_show():
    source = mix([(Plain([0], 5), 1), (Plain([], 5), 1)])
    with Loader(source, batch_size=10, on_error="skip", max_bad=1.0) as loader:
        assert next(iter(loader))["index"].tolist().count(0) == 1


LENGTHS = np.array([2, 3, 1, 2, 4])


def raising(*indices):
    def check(sample, context):
        if context.index in indices:
            raise ValueError(context.index)
        return sample

    return check


@pytest.mark.parametrize("action", ["skip", "replace"])
def test_packed_rows_get_gaps(action):
    trace = StepTrace()
    sequences = [{"t": np.full(length, index)} for index, length in enumerate(LENGTHS)]
    fetch = fetcher(MemorySource(sequences), action, transform=raising(1), collate=Pack(pad_value=-1))
    # Two rows of six places, the first two records in the first row, others in the second.
    packing = Packing(np.array([0, 0, 1, 1]), np.array([0, 2, 0, 1]), LENGTHS[:4], (2, 6))
    batch = fetch(plan([0, 1, 2, 3], valid=[True, False], packing=packing), 0, trace)
    assert batch["t"].tolist() == [[0, 0, -1, -1, -1, -1], [2, 3, 3, -1, -1, -1]]
    assert batch["segment_ids"].tolist() == [[1, 1, 0, 0, 0, 0], [1, 2, 2, 0, 0, 0]]
    assert batch["valid"].tolist() == [True, False]
    assert [(bad.index, bad.replaced_by) for bad in trace.bad] == [(1, None)]


@pytest.mark.parametrize(
    "error", [MissingDependencyError("needs lmdb", name="lmdb"), ClosedSourceError("it is closed")], ids=repr
)
def test_a_source_that_cannot_read_at_all_is_not_a_row_of_bad_records(error):
    class Unable(Plain):
        def __getitem__(self, index):
            self.seen.append(index)
            raise error

    source, trace = Unable(), StepTrace()
    with pytest.raises(WorkerError, match=f"{type(error).__name__}: {error}") as caught:
        fetcher(source, "skip")(plan([0, 1, 2]), 0, trace)
    assert caught.value.__cause__ is error
    assert trace.bad == []
    assert len(source.seen) == 1


@KINDS
def test_the_record_that_failed_is_named(kind):
    with pytest.raises(WorkerError) as caught:
        fetcher(kind([3, 4]))(plan([5, 1, 4, 3]), 2)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "step 7 of epoch 2 failed in read on index 4: CorruptFileError: /data/part.bin, record 4: damaged"
    )
    assert lines[-1] == "  indices of the step: 5, 1, 4, 3"
    assert (caught.value.step, caught.value.epoch, caught.value.indices) == (7, 2, (5, 1, 4, 3))
    assert "in __getitem__" in caught.value.traceback_text
    assert "StageError" not in caught.value.traceback_text
    for count, shown in ((8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7, ...")):
        with pytest.raises(WorkerError) as caught:
            fetcher(kind([3]))(plan(range(count)), 0)
        assert str(caught.value).splitlines()[-1] == f"  indices of the step: {shown}"


def test_what_is_kept_of_a_bad_record():
    trace = StepTrace()
    fetch = fetcher(Plain([3]), "replace", transform=[failing(), failing(4)])
    fetch(plan([3, 5, 4]), 2, trace)
    read, transformed = trace.bad
    assert asdict(read) == {
        "epoch": 2,
        "step": 7,
        "index": 3,
        "source": "Plain()",
        "shard": "/data/part.bin",  # from the error, where the source does not tell
        "record": 3,
        "key": None,
        "stage": "read",
        "error": "CorruptFileError",
        "cause": "/data/part.bin, record 3: damaged",
        "replaced_by": 5,
    }
    assert (transformed.index, transformed.error, transformed.cause) == (4, "ZeroDivisionError", "no 4")
    assert transformed.stage == "transform 'failing.<locals>.check'"
    assert (transformed.shard, transformed.replaced_by) == (None, 5)


class Awkward(Exception):
    path = 7  # an attribute of that name that is no path

    def __str__(self):
        raise RuntimeError("no text")


def test_an_awkward_exception_has_a_text():
    def fail(sample):
        if sample["index"] == 1:
            raise error
        return sample

    error, text, trace = Awkward(), "Awkward: (no message: its __str__ raised RuntimeError)", StepTrace()
    with pytest.raises(WorkerError) as caught:
        fetcher(Plain(), transform=fail)(plan([1]), 0)
    assert f"fail' on index 1: {text}\n  source" in str(caught.value)
    assert caught.value.__cause__ is error
    fetcher(Plain(), "skip", transform=fail)(plan([0, 1]), 0, trace)
    assert f"{trace.bad[0].error}: {trace.bad[0].cause}" == text
    assert trace.bad[0].shard is None


class Shy(Plain):
    def __repr__(self):
        raise RuntimeError("no repr")


def count(samples):
    return {"count": len(samples)}


ALL_BAD = "SourceError: all 2 records of the step are bad, and only records of the same step can replace them"
NO_FIELDS = "failed in on_error: SourceError: the step has no good record, and "
LAST = "were tried in vain for the fields of an empty batch; the last: read: CorruptFileError: .*record 11: damaged"
SKIP, REPLACE = {"action": "skip"}, {"action": "replace"}
UNKNOWN = "failed in read: ConfigError: there is no field 'c'"


@pytest.mark.parametrize(
    ("source", "settings", "indices", "message"),
    [
        (MemorySource([{"a": 1}]), {}, [0, 1], "  the source has 1 records: the sampler is for another"),
        (Shy([0]), {}, [0], "\n  source: Shy without a repr\n"),
        (MemorySource([{"a": 1}, {"a": 2}]), {"fields": ("c",)}, [0], UNKNOWN),
        (Plain(range(LENGTH)), SKIP, [1], f"{NO_FIELDS}12 others {LAST}"),
        ([], SKIP, [], "; the last: the source has no others"),
        (Plain([1]), {**SKIP, "collate": count}, [1], "in collate: ConfigError: a step has no rows, .* cannot be"),
        (Plain([1, 3]), REPLACE, [1, 3, 1], f"{ALL_BAD}; the last: read: .*record 3: damaged. Use a larger batch_size"),
        (Plain(), {**REPLACE, "exclude": [1, 3]}, [1, 3, 1], f"{ALL_BAD}, all of them by exclude="),
    ],
)
def test_what_cannot_be_done_is_told(source, settings, indices, message):
    with pytest.raises(WorkerError, match=message) as caught:
        fetcher(source, **settings)(plan(indices), 2)
    assert (caught.value.step, caught.value.epoch) == (7, 2)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("action", ["raise", "skip"])
@pytest.mark.parametrize("place", ["transform", "collate", "batch_transform", "read"])
def test_what_ends_a_thread_is_the_same_error_in_the_consumers_and_a_workers(error, action, place):
    def fail(*_):
        raise error

    source = Plain()
    if place == "read":
        source = type("Ending", (Plain,), {"__getitem__": fail})()
    fetch = fetcher(source, action, **({} if place == "read" else {place: fail}))
    with pytest.raises(WorkerError) as caught:
        fetch(plan([0, 1]), 0)
    assert caught.value.__cause__ is error

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(fetch, plan([0, 1]), 0).exception()
    assert type(found) is WorkerError
    assert found.__cause__ is error
    assert type(error).__name__ in str(found)
    assert str(found) == str(caught.value)


class Ending(BaseException):
    pass


def leave(*_):
    sys.exit(5)


def leave_once(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Ending


class Handler:
    def handle(self, number, frame):
        raise Ending


@pytest.mark.parametrize(
    ("number", "handler", "error"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGTERM, leave, SystemExit),
        (signal.SIGTERM, leave_once, Ending),
        (signal.SIGTERM, Handler().handle, Ending),
        (signal.SIGTERM, functools.partial(lambda extra, number, frame: leave(), 1), SystemExit),
    ],
    ids=["ctrl-c", "args", "once", "method", "partial"],
)
@pytest.mark.parametrize("action", ["raise", "skip"])
def test_signals_end_the_consumer(number, handler, error, action):
    def transform(sample):
        os.kill(os.getpid(), number)
        return sample

    def caught_and_raised_again(sample):
        try:
            return transform(sample)
        except BaseException:
            raise

    before = signal.signal(number, handler)
    try:
        with pytest.raises(error):
            fetcher(Plain(), action, transform=transform)(plan([0, 1]), 0)
        signal.signal(number, handler)
        with pytest.raises(error):
            fetcher(Plain(), action, transform=caught_and_raised_again)(plan([0, 1]), 0)
    finally:
        signal.signal(number, before)


def test_an_ordinary_error_of_a_handler_is_a_failure_of_the_step():
    def late(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGTERM, late)
    try:
        with pytest.raises(WorkerError, match="TimeoutError"):
            fetcher(Plain(), "raise", transform=lambda _: os.kill(os.getpid(), signal.SIGTERM))(plan([0, 1]), 0)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_substitutes_share_no_memory_and_have_random_numbers_of_their_own():
    fetch = fetcher(Plain([0]), "replace", collate=list)
    first, second, third = fetch(plan([0, 5, 5]), 0)
    for sample in (first, second, third):
        assert sample["index"] == 5
        sample["x"] += 1
        assert sample["x"].tolist() == [6, 6]

    def noise(sample, context):
        return {**sample, "noise": context.generator.random()}

    whole = fetcher(Plain(), transform=noise)(plan([4, 5]), 3)
    mended = fetcher(Plain([0]), "replace", transform=noise)(plan([4, 0, 5]), 3)
    expected = dict(zip(whole["index"].tolist(), whole["noise"].tolist(), strict=True))
    assert [expected[index] for index in mended["index"].tolist()] == mended["noise"].tolist()


def test_a_failure_that_does_not_come_again_is_no_bad_record():
    class Once(Columns):
        failed = False

        def _read_columns(self, indices, fields):
            if not self.failed:
                self.failed = True
                raise OSError("try again")
            return super()._read_columns(indices, fields)

    trace = StepTrace()
    assert rows(fetcher(Once(), "skip")(plan([1, 2]), 0, trace)) == [1, 2]
    assert trace.bad == []
    with pytest.raises(WorkerError, match="failed in read: OSError: try again"):
        fetcher(Once())(plan([1, 2]), 0)


@pytest.mark.parametrize("action", ["raise", "skip", "replace"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"exclude": [2]}, {"transform": failing(0)}, {"collate": failing("x")}, {"batch_transform": failing("x")}],
    ids=lambda settings: next(iter(settings), "nothing"),
)
def test_nothing_is_left_for_the_garbage_collector(action, settings):
    gc.collect()
    gc.disable()
    try:
        source = Batched([1, 3])
        gone = weakref.ref(source)
        fetch = fetcher(source, action, **settings)
        for indices in ([0, 1, 2, 3], [1, 3], [4, 5], []):
            with contextlib.suppress(WorkerError):
                fetch(plan(indices), 0)
        del fetch, source
        assert gone() is None
    finally:
        gc.enable()


def test_actions_are_known():
    with pytest.raises(ConfigError, match="on_error is 'skipp': did you mean 'skip'") as caught:
        Loader(RangeSource(4), batch_size=2, on_error="skipp")
    assert (caught.value.key, caught.value.value) == ("on_error", "skipp")
    with pytest.raises(ConfigError, match="on_error must be 'raise', 'skip' or 'replace'; got None"):
        Loader(RangeSource(4), batch_size=2, on_error=None)


def test_a_step_without_a_good_record_takes_its_example_from_the_shard_that_it_has_read():
    """Each other shard of an object store would have to be waited for."""
    shard_records, damaged = 64, range(16 * 64 + 10, 16 * 64 + 20)
    source = Plain(damaged, 32 * shard_records)
    assert rows(fetcher(source, "skip")(plan(damaged), 0)) == []
    assert {index // shard_records for index in source.seen} == {16}
    again = Plain(damaged, 32 * shard_records)
    fetcher(again, "skip")(plan(damaged), 0)
    assert again.seen == source.seen


def test_the_search_for_an_example_has_one_deadline(monkeypatch):
    clock = [0.0]

    class Slow(Plain):
        def __getitem__(self, index):
            clock[0] += 5.0  # as long as a reader waits for a shard that nobody downloads
            return super().__getitem__(index)

    monkeypatch.setattr(rescue, "monotonic", lambda: clock[0])
    with pytest.raises(WorkerError, match=f"{NO_FIELDS}3 others were"):
        fetcher(Slow(range(10_000), 10_000), "skip")(plan([5]), 0)
    assert clock[0] <= 30


@KINDS
@given(
    rows_=st.integers(1, 4),
    chunk=st.integers(1, 3),
    unreadable=st.frozensets(st.integers(0, LENGTH - 2), max_size=8),
    untransformable=st.frozensets(st.integers(0, LENGTH - 2), max_size=4),
    excluded=st.frozensets(st.integers(0, LENGTH - 2), max_size=4),
    action=st.sampled_from(["raise", "skip", "replace"]),
    transforms=st.booleans(),
    data=st.data(),
)
def test_rows_of_streams_keep_their_places(
    kind, rows_, chunk, unreadable, untransformable, excluded, action, transforms, data
):
    places = rows_ * chunk
    indices = data.draw(st.lists(st.integers(0, LENGTH - 1), min_size=places, max_size=places))
    valid = data.draw(st.lists(st.booleans(), min_size=places, max_size=places))
    shape = (rows_,) if chunk == 1 else (rows_, chunk)
    columns = {"offset": np.arange(rows_), "is_first": np.ones(shape, bool)}
    step = BatchPlan(7, np.array(indices), np.array(valid).reshape(shape), chunk=chunk, columns=columns)
    failing_ones = (unreadable | untransformable if transforms else unreadable) - excluded
    source = kind(unreadable)
    fetch = fetcher(
        source, action, exclude=sorted(excluded), transform=failing(*untransformable) if transforms else None
    )
    trace = StepTrace()
    if action == "raise" and failing_ones & set(indices):
        with pytest.raises(WorkerError, match=r"step 7 of epoch 3 failed in (read|transform .*) on index"):
            fetch(step, 3, trace)
        return
    batch = fetch(step, 3, trace)
    gone = failing_ones | excluded
    is_good = np.array([index not in gone for index in indices])
    replaces = action == "replace" and is_good.any()
    assert batch["x"].shape == (*step.valid.shape, 2)
    found = batch["index"].ravel()
    assert np.array_equal(batch["x"], np.stack([batch["index"]] * 2, axis=-1))
    assert found[is_good].tolist() == np.array(indices)[is_good].tolist()
    assert not set(found.tolist()) & gone
    if is_good.any():
        assert set(found.tolist()) <= set(np.array(indices)[is_good].tolist())
    expected = step.valid if replaces else step.valid & is_good.reshape(step.valid.shape)
    assert np.array_equal(batch["valid"], expected)
    for name, column in step.columns.items():
        assert np.array_equal(batch[name], column)
    assert list(batch) == ["index", "x", "name", "offset", "is_first", "valid"]
    wanted = {index for index, is_valid in zip(indices, valid, strict=True) if is_valid}
    mapping = dict(zip(indices, found.tolist(), strict=True))
    reported = {bad.index: bad.replaced_by for bad in trace.bad}
    assert reported == {index: mapping[index] if replaces else None for index in wanted & failing_ones}
    assert not set(source.seen) & excluded
