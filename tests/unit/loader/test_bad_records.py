"""Budgets, reports and exclude lists, by themselves."""

import json
import multiprocessing
import os
import re
import shutil

import numpy as np
import pytest

from dataload import ConfigError, Loader, RangeSource, WorkerError
from dataload.loader.failures import BadRecord, Budget, append_report, read_excluded
from dataload.sources.shards import Location


def bad(index=3, step=2, **changes):
    place = {"source": "S()", "shard": "/data/a.tar", "record": index, "key": f"key{index}"}
    failure = {"stage": "read", "error": "CorruptFileError", "cause": "damaged", "replaced_by": None}
    return BadRecord(**{"epoch": 1, "step": step, "index": index, **place, **failure, **changes})


def spend(budget, *found, read=None):
    """Give a step of `read` records, by default the bad ones, to a budget."""
    epoch, step = (found[-1].epoch, found[-1].step) if found else (1, 5)
    budget.spend(len(found) if read is None else read, found, epoch=epoch, step=step, worker="dataload-1")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_budget_counts_exactly_and_raises_where_it_is_exceeded(tmp_path):
    path = tmp_path / "bad.jsonl"
    with pytest.raises(WorkerError, match=r"bad records so far: 1 of 1 \(100.00%\), and max_bad allows 0"):
        spend(Budget(0, None), bad())
    budget = Budget(3, path)
    spend(budget, bad(1), bad(2), read=4)
    spend(budget, bad(3), read=4)
    assert budget.spent == 3
    with pytest.raises(
        WorkerError,
        match=r"step 5 of epoch 1 failed: bad records so far: 5 of 10 \(50.00%\), and max_bad allows 3; the last is "
        "index 9, in read: CorruptFileError: damaged",
    ) as caught:
        spend(budget, bad(8, 5), bad(9, 5))
    error = caught.value
    assert (error.step, error.epoch, error.indices, error.worker) == (5, 1, (8, 9), "dataload-1")
    assert [line["index"] for line in lines(path)] == [1, 2, 3, 8, 9]


def test_a_share_is_looked_at_once_a_thousand_records_are_read():
    budget = Budget(0.01, None)
    spend(budget, *map(bad, range(11)), read=999)
    message = (
        r"^step 5 of epoch 1 failed: bad records so far: 11 of 1000 \(1.10%\), and max_bad allows 0\.01; the last is "
        "index 10, in read: CorruptFileError: damaged$"
    )
    with pytest.raises(WorkerError, match=message):  # although this record is good
        spend(budget, read=1)
    spend(budget, read=100)  # one percent exactly is allowed
    spend(budget, bad(12), read=100)
    with pytest.raises(WorkerError, match=r"13 of 1201 \(1\.08%\)"):
        spend(budget, bad(13))
    budget.start()
    spend(budget, *map(bad, range(10)), read=1000)


@pytest.mark.parametrize("wrong", [True, False, -1, 0.0, 1.5, -0.5, float("nan"), "1", None, np.float32(2)])
def test_limits_that_are_none(wrong):
    message = "max_bad must be an integer >= 0 or a share of the records above 0 and at most 1, got "
    with pytest.raises(ConfigError, match=message):
        Loader(RangeSource(3), batch_size=1, max_bad=wrong)


def test_the_report_is_made_at_once_and_added_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spend(Budget(9, "bad.jsonl"), bad(1))
    budget = Budget(9, "bad.jsonl")
    assert len(lines(tmp_path / "bad.jsonl")) == 1
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    spend(budget, bad(2))
    assert [line["index"] for line in lines(tmp_path / "bad.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing/bad.jsonl", "No such file or directory"),
        (".", "Is a directory"),
        (7, "expected str, bytes or os.PathLike object, not int"),
        ("a\0b", ""),  # Python says why, not always in the same words
    ],
)
def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, path, reason):
    monkeypatch.chdir(tmp_path)
    message = re.escape(f"error_report must be the path of a file that can be written to, got {path!r}: {reason}")
    with pytest.raises(ConfigError, match=message) as caught:
        Budget(1, path)
    assert (caught.value.key, caught.value.value) == ("error_report", path)
    assert os.listdir(tmp_path) == []


def test_a_report_that_can_be_written_no_more_is_a_warning_and_the_count_goes_on(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    budget = Budget(1, folder / "bad.jsonl")
    shutil.rmtree(folder)
    message = "error_report: 1 bad records of step 2 of epoch 1 are missing from .*bad.jsonl: .*No such file"
    with pytest.warns(RuntimeWarning, match=message):
        spend(budget, bad())
    assert budget.spent == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_several_processes_share_a_report(tmp_path):
    path = tmp_path / "bad.jsonl"

    def write(rank):
        for step in range(200):
            append_report(os.fspath(path), [bad(rank, step, record=i, cause="x" * 300) for i in range(3)])

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=write, args=[rank]) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(50)
        assert rank.exitcode == 0
        rank.close()
    found = [(line["index"], line["step"], line["record"]) for line in lines(path)]
    expected = [(rank, step, i) for rank in range(2) for step in range(200) for i in range(3)]
    assert sorted(found) == expected
    for rank in range(2):
        assert [entry for entry in found if entry[0] == rank] == [entry for entry in expected if entry[0] == rank]


@pytest.mark.parametrize(
    "exclude", [[3, 1, 3], (1, 3), {1, 3}, np.array([3, 1]), np.array([1, 3], np.uint64), iter([3, 1]), range(1, 4, 2)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_indices_to_exclude(exclude):
    found = read_excluded(exclude, range(5))
    assert found.tolist() == [1, 3]
    assert found.dtype == np.int64


@pytest.mark.parametrize(
    ("exclude", "shown"),
    [
        ([1, 5], "5"),
        ([-1], "-1"),
        ([2**70], str(2**70)),
        ([1.0, 2], r"1\.0"),
        ([True, False, True, True, False], "True, False, True, ..."),
        (np.array([True, False]), r"np\.True_, np\.False_|True, False"),
        (["1"], "'1'"),
        ([[1], [2, 3]], r"\[1\], \[2, 3\]"),
        (np.zeros((2, 2), int), r"array\(\[0, 0\]\), array\(\[0, 0\]\)"),
        (3, "3"),
        (b"abc", "b'abc'"),
    ],
)
def test_wrong_indices_are_refused(exclude, shown):
    with pytest.raises(
        ConfigError, match=rf"exclude must be indices in \[0, 5\) or the path .* got ({shown})$"
    ) as caught:
        read_excluded(exclude, range(5))
    assert caught.value.key == "exclude"


def test_something_or_nothing_may_be_excluded_but_some_record_must_be_left():
    for nothing in (None, [], np.empty(0, np.int64), ()):
        assert read_excluded(nothing, range(5)) is None
    assert read_excluded([0, 1], range(3)).tolist() == [0, 1]
    with pytest.raises(ConfigError, match="exclude names all 3 records of the source: none is left"):
        read_excluded([0, 1, 2], range(3))


class Moved(list):
    """A source whose file was moved."""

    def locate(self, index):
        return Location("/moved/a.tar", index, f"key{index}")


MOVED = Moved(range(5))


def test_a_full_disk_leaves_half_a_line_and_the_report_stays_of_use(tmp_path, monkeypatch):
    path = tmp_path / "bad.jsonl"
    budget = Budget(9, path)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: len(data) // 2]))
        with pytest.warns(
            RuntimeWarning, match=r"error_report: 1 bad records of step 2 .* only \d+ of \d+ bytes could"
        ):
            spend(budget, bad(1))
    message = rf"^exclude: {path} has incomplete lines, as a full disk leaves them, .* not excluded: 1$"
    with pytest.warns(RuntimeWarning, match=message):
        assert read_excluded(path, MOVED) is None
    spend(budget, bad(4))
    spend(Budget(9, path), bad(2))
    with pytest.warns(RuntimeWarning, match=message):
        assert read_excluded(path, MOVED).tolist() == [2, 4]


def test_a_report_is_an_exclude_list(tmp_path):
    path = tmp_path / "bad.jsonl"
    append_report(os.fspath(path), [bad(4), bad(1), bad(4, step=9)])
    with path.open("a") as stream:
        stream.write("\n")
    assert read_excluded(path, MOVED).tolist() == [1, 4]
    path.write_text("")
    assert read_excluded(os.fspath(path), MOVED) is None
    path.write_text('{"index": 2}\n')  # by hand
    assert read_excluded(path, MOVED).tolist() == [2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"index": 1}\n{"index": 2', r", line 2: Expecting ',' delimiter"),
        (b'{"index": 1}\n\n{"step": 2}\n', r", line 3 has index None, and the source has 5 records"),
        (b'{"index": 5}', ", line 1 has index 5, and the source has 5 records"),
        (b'{"index": -1}', ", line 1 has index -1,"),
        (b'{"index": 1.0}', r", line 1 has index 1\.0,"),
        (b'{"index": true}', ", line 1 has index True,"),
        (b"[1]", ", line 1 has index None,"),
        (b"1", ", line 1 has index None,"),
        (b"\xff\xfe\x00", " cannot be read: 'utf-8' codec can't decode"),
        (None, " cannot be read: No such file or directory"),
    ],
)
def test_wrong_reports_are_refused(tmp_path, text, reason):
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_bytes(text)
    message = f"exclude must be an error report, JSON with an 'index' in each line; {path}{reason}"
    with pytest.raises(ConfigError, match=message) as caught:
        read_excluded(path, range(5))
    assert (caught.value.key, caught.value.value) == ("exclude", os.fspath(path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shard": "/data/b.tar"}, "record 3 is in '/data/b.tar' there, in '/moved/a.tar' here"),
        ({"record": 4}, "record 3 is record 4 there, 3 here"),
        ({"key": "other"}, "record 3 is key 'other' there, 'key3' here"),
    ],
)
def test_a_report_of_other_data_is_refused(tmp_path, changes, reason):
    path = tmp_path / "bad.jsonl"
    append_report(os.fspath(path), [bad(1), bad(3, **changes)])
    with pytest.raises(ConfigError, match=f"line 2 is about other data: {reason}"):
        read_excluded(path, MOVED)
