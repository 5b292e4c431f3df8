"""Filters and splits, compared with list comprehensions."""

import functools
import itertools
import math
import os
import pickle
import re
import shutil
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from written import written

import dataload
from dataload import ConfigError, MemorySource, RangeSource
from dataload._util import interactive
from dataload.errors import SourceError
from dataload.sources.views import select as selecting
from dataload.testing import check_source
from dataload.types import StepsAhead

SHARE = "the share of a split must be a number between 0 and 1, got"


@pytest.mark.parametrize("suffix", ["array_record", "parquet", "jsonl", "tar"])
def test_a_file_without_records_decides_nothing(tmp_path, suffix):
    paths = [written(tmp_path / f"{n}.{suffix}", [{"x": i} for i in range(n)]) for n in (0, 3)]
    source = dataload.open(paths)
    assert source.fields["x"].shape == ()
    assert [int(record["x"]) for record in source.filter(dataload.field("x") != 1)] == [0, 2]


def is_even(record):
    return record["index"] % 2 == 0


def has_label(label, record):
    return bool(record["label"] == label)


def ends_its_process(record):
    os._exit(1)


class Unsendable(Exception):
    def __init__(self, number, *, reason):  # pickle calls it without the reason
        super().__init__(number)


def raises_one_that_does_not_travel(record):
    if record["index"] == 7:
        raise Unsendable(7, reason="odd")
    return True


def raises_own_error(record):
    if record["index"] == 7:
        raise LookupError("7 is not known")
    return True


def in_process(predicate, workers=1):
    return RangeSource(9).filter(predicate, num_workers=workers, executor="processes")


def indices_of(records):
    return [record["index"] for record in records]


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"num_workers": 3}, {"fields": ["x"]}, {}])
def test_a_filter_is_a_list_comprehension(settings):
    source = MemorySource([{"x": i * i % 11, "y": f"{i}"} for i in range(300)])
    seen = []
    found = source.filter(lambda record: record["x"] > 5, progress=lambda *done: seen.append(done), **settings)
    expected = [record for record in source if record["x"] > 5]
    assert [each for each in check_source(found, expected) if each.status == "failed"] == []
    assert seen[-1] == (300, 300)
    assert seen == sorted(seen)
    assert repr(found) == f"SelectionSource(MemorySource(300 records), {len(expected)} records)"


def test_a_filter_in_processes():
    least, lock = 5, threading.Lock()
    assert indices_of(in_process(lambda record: record["index"] > least, workers=2)) == [6, 7, 8]
    for predicate, error, message in (
        (lambda record: lock is not None, ConfigError, r"processes need a copy of the predicate, .* '_thread.lock'"),
        (ends_its_process, SourceError, r"filter failed for the records 0 to 8: dataload-0 .* exited with code 1"),
    ):
        with pytest.raises(error, match=message):
            in_process(predicate)


@pytest.mark.parametrize(
    ("raises", "expected"),
    [(raises_own_error, "LookupError: 7 is not known"), (raises_one_that_does_not_travel, "Unsendable: 7")],
)
def test_an_error_of_a_predicate_names_the_record(raises, expected):
    with pytest.raises((LookupError, SourceError)) as caught:
        in_process(raises)
    assert f"{type(caught.value).__name__}: {caught.value}".endswith(expected)
    notes = "\n".join(caught.value.__notes__)
    for part in ("for record 7", "The original traceback, in dataload-0:", f"in {raises.__name__}"):
        assert part in notes
    with pytest.raises(ZeroDivisionError) as caught:
        RangeSource(900).filter(lambda record: 1 / (record["index"] - 700) > 0)
    assert caught.value.__notes__ == ["raised by the predicate of filter, for record 700"]


@pytest.mark.parametrize(("record", "here"), [({"x": np.float32(0)}, True), ({"x": np.zeros(2)}, False)])
def test_threads_are_asked_where_they_can_help(record, here):
    asked = set()

    def ask(_):
        asked.add(threading.current_thread())
        return True

    assert len(MemorySource([record] * 200).filter(ask, fields=["x"])) == 200
    assert (asked == {threading.current_thread()}) == here


def test_a_filter_asks_only_for_its_fields():
    class Narrow(RangeSource):
        def _read_columns(self, indices, fields):
            assert fields == ("index",)
            return super()._read_columns(indices, fields)

        def _read(self, indices):
            raise AssertionError

        def read_ahead(self, steps, fields, *, here, share=1.0):
            return [block.indices.tolist() for block in steps]

    found = Narrow(100).filter(is_even, fields=["index"])
    assert len(found) == 50
    assert found.read_ahead([StepsAhead(0, np.array([3, 0]), np.array([2]), 1)], None, here=True) == [[6, 0]]
    ragged = MemorySource([{"x": np.zeros(i), "y": 0} for i in range(9)])
    assert len(ragged.filter(lambda record: [*record] == ["x"] and len(record["x"]) > 4, fields=["x"])) == 4
    tuples = MemorySource([{"x": (i, 0)} for i in range(9)])
    assert tuples.filter(lambda record: record["x"][0] > 4, fields=["x"]).indices.tolist() == [5, 6, 7, 8]
    with pytest.raises(ConfigError, match="'x' has several in a record"):
        tuples.filter(dataload.field("x") == 1)


@pytest.mark.parametrize(
    ("act", "settings", "message"),
    [
        (lambda record: 2 * (record["index"] == 7), {}, "returned 2 for record 7, expected True or False"),
        (lambda record: float(record["index"] < 3), {}, "returned 1.0 for record 0, expected True or False"),
        (lambda record: None, {}, "returned None for record 0, expected True or False: does the predicate end without"),
        (lambda record: np.array([True]), {}, "the predicate of filter returned array([ True]) for record 0, expected"),
        (3, {}, "of a record or a condition, such as dataload.field('label') == 3; got 3"),
        (is_even, {"fields": ["indx"]}, "RangeSource(9, start=0, step=1) has no field 'indx': did you mean 'index'?"),
        (is_even, {"fields": "index"}, "fields must be a list of names, got the text 'index'"),
        (is_even, {"executor": "process"}, "executor is 'process': did you mean 'processes'?"),
        (is_even, {"num_workers": -1}, "num_workers must be an integer >= 0, got -1"),
        *((share, {}, SHARE) for share in (0, 1, -0.5, True, "0.9", math.nan)),
        (0.5, {"seed": 0.5}, "seed must be an integer, got 0.5"),
    ],
)
def test_filters_and_splits_that_do_not_work(act, settings, message):
    does = RangeSource(9).split if message == SHARE or "seed" in settings else RangeSource(9).filter
    with pytest.raises(ConfigError, match=re.escape(message)):
        does(act, **settings)


@pytest.fixture
def write(tmp_path):
    """Write files as a while ago, so that results are kept beside them, and return their source."""

    def write(count=200, times=(1e9, 1e9)):
        for shard, time in enumerate(times):
            path = tmp_path / f"{shard}.syr"
            written(path, [{"x": np.arange(i, i + 2), "label": i % 7} for i in range(shard, count, 2)], overwrite=True)
            os.utime(path, (time, time))
        return dataload.open(tmp_path)

    return write


def test_a_result_is_kept_beside_the_data(tmp_path, write):
    def with_label(label):
        return lambda record: bool(record["label"] == label)

    def is_computed(source, predicate):
        asked = []
        source.filter(predicate, progress=lambda *done: asked.append(done))
        return asked != []

    source = write()
    found = source.filter(with_label(3))
    assert [record["label"] for record in found] == [3] * sum(record["label"] == 3 for record in source)
    assert len(list(tmp_path.glob(".dataload.filter-*.arrays"))) == 1
    for again in (source, dataload.open(tmp_path)):  # that in another process, say
        assert not is_computed(again, with_label(3))
    assert source.filter(with_label(3)).fingerprint() == found.fingerprint()
    assert is_computed(source, with_label(4))
    assert is_computed(source, lambda record: bool(record["label"] == 3))  # other code
    assert is_computed(source[:-1], with_label(3))
    assert not is_computed(source[:-1], with_label(3))
    assert not is_computed(source, with_label(3))
    shutil.copytree(tmp_path, more := tmp_path / "more", ignore=shutil.ignore_patterns(".*"))
    assert is_computed(dataload.concat([source, dataload.open(more)]), with_label(3))
    assert {path.name for path in more.iterdir()} == {"0.syr", "1.syr"}  # it is beside the first file
    os.utime(tmp_path / "1.syr", (1e9 + 1, 1e9 + 1))
    assert is_computed(dataload.open(tmp_path), with_label(3))
    assert is_computed(write(180, (1e9, 1e9 + 1)), with_label(3))


def test_a_result_is_of_the_code_that_decodes_the_records(tmp_path):
    written(tmp_path / "a.lmdb", [bytes([i]) for i in range(20)])
    os.utime(tmp_path / "a.lmdb" / "data.mdb", (1e9, 1e9))
    parts = []
    for sign in (1, -1):
        source = dataload.open(tmp_path / "a.lmdb", codec=lambda data, sign=sign: {"x": sign * data[0]})
        assert source[1:].filter(lambda record: record["x"] > 17).indices.tolist() == [17, 18][: sign + 1]
        parts.append(source.split({"a": 0.5, "b": 0.5}, group="x")["a"].indices.tolist())
    assert parts[0] != parts[1]


def test_a_kept_result_that_does_not_fit_is_not_used(write, monkeypatch):
    source = write()
    predicate = functools.partial(lambda most, record: bool(record["label"] < most), 3)
    monkeypatch.setattr(selecting.Filter, "__call__", lambda self, start, stop: np.array([stop + 200, 5]))
    source.filter(predicate)
    monkeypatch.undo()
    assert [record["label"] for record in source.filter(predicate)] == [r["label"] for r in source if r["label"] < 3]


def test_what_cannot_be_kept_is_said(write, caplog, monkeypatch):
    model = types.SimpleNamespace(limit=3, changes=iter(x for x in ()))
    source = write()
    assert len(source.filter(lambda record: record["label"][()] > model.limit)) > 0
    reason = "it uses an object of 'generator', which may change without notice"
    assert caplog.messages == [f"the result of filter is not kept, and will be computed again: {reason}"]
    caplog.clear()
    RangeSource(3).filter(lambda record: model is not None)  # in no file
    monkeypatch.setenv("DATALOAD_CACHE", "0")
    source.filter(lambda record: True)
    assert caplog.messages == []
    monkeypatch.delenv("DATALOAD_CACHE")
    os.utime(source.paths[1])
    dataload.open(source.paths).filter(lambda record: False)
    assert "or the data have just been written" in caplog.messages[0]


def test_the_sixteen_results_that_were_used_last_are_kept(tmp_path, write):
    source = write(20)

    def ask(label):
        asked = []
        source.filter(functools.partial(has_label, label), progress=lambda *done: asked.append(done))
        return asked != []

    def kept():
        return [*tmp_path.glob(".dataload.filter-*")]

    for label in range(16):
        assert ask(label)
        for path in kept():  # as a day ago, and in this order
            os.utime(path, ns=(path.stat().st_mtime_ns - 10**14,) * 2)
    assert len(kept()) == 16
    assert not ask(0)
    assert ask(16)
    assert len(kept()) == 16
    assert [ask(0), ask(16), ask(2)] == [False] * 3
    assert ask(1)
    with ThreadPoolExecutor(4) as writers:
        assert all(writers.map(ask, range(20, 60)))
    assert len(kept()) == 16


def test_results_of_data_at_urls_are_kept_while_the_objects_are_the_same(tmp_path, object_server, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    written(tmp_path / "x.syr", [{"x": np.full(10_000, i), "label": i % 7} for i in range(9)])
    data = (tmp_path / "x.syr").read_bytes()
    bucket, options = object_server.bucket(), object_server.storage_options()
    object_server.put(bucket, "x.syr", data)

    def ask(**remote):
        asked = []
        with dataload.open(f"s3://{bucket}/x.syr", storage_options=options, remote=remote) as source:
            source.filter(functools.partial(has_label, 3), progress=lambda *done: asked.append(done))
        return asked != []

    assert [ask(), ask()] == [True, False]
    assert len([*(tmp_path / "home" / "dataload" / "tables").iterdir()]) == 1
    assert [ask(cache=tmp_path / "cache"), ask(cache=tmp_path / "cache")] == [True, False]
    place = len(data) // 2  # the fingerprint sees the ends
    object_server.put(bucket, "x.syr", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    assert ask()
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    assert [ask(), ask()] == [True, True]


@pytest.mark.parametrize("seconds", [3, 0.1])
def test_progress_is_shown_on_a_terminal(monkeypatch, capsys, seconds):
    monkeypatch.setattr(interactive, "perf_counter", itertools.count(100, seconds).__next__)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    RangeSource(100).filter(is_even)
    shown = "\r64 of 100 records are filtered\r100 of 100 records are filtered\n"
    assert capsys.readouterr().err == (shown if seconds > 2 else "")


@given(count=st.integers(0, 400), more=st.integers(0, 200), share=st.floats(0.05, 0.95), seed=st.integers(0, 99))
def test_a_split_keeps_the_side_of_each_record(count, more, share, seed):
    first, second = map(indices_of, RangeSource(count).split(share, seed=seed))
    assert sorted(first + second) == [*range(count)]
    later = map(indices_of, RangeSource(count + more).split(share, seed=seed))
    assert [[i for i in side if i < count] for side in later] == [first, second]


def test_a_split_is_a_source():
    source = dataload.sources.ConcatSource([RangeSource(3000, step=2), RangeSource(7000)])
    sides = source.split(0.8, seed=3)
    assert abs(len(sides[0]) - 6800) < 200
    for side in sides:
        assert sum(side.shard_lengths) == len(side)
        assert len(side.shard_lengths) == 2
        pickled = pickle.dumps(side)
        assert len(pickled) < 1000  # not the indices
        assert pickle.loads(pickled).fingerprint() == side.fingerprint()
        assert [each for each in check_source(side, sample=20) if each.status == "failed"] == []
    assert source.split(np.float64(0.8), seed=np.int64(3))[0].fingerprint() == sides[0].fingerprint()
    assert len({sides[0].fingerprint(), sides[1].fingerprint(), source.split(0.8)[0].fingerprint()}) == 3
    assert RangeSource(0).split(0.5)[0].shard_lengths == (0,)
    first, second = RangeSource(99).split(0.5)
    assert second.locate(0).record == min({*range(99)} - {*indices_of(first)})
