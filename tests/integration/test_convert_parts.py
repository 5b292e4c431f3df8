"""Conversions in parts: in any order, again, at once, killed; and what is not merged."""

import os
import re
import shutil

import numpy as np
import pytest
from converted import content
from written import written

import dataload
from dataload.convert import convert
from dataload.errors import ConfigError, SourceError, SourceNotFoundError

COUNT = 23
NO_LOG = r"parts 2/3 have not run, or have not finished: run them, again if need be"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "a.syr"
    return written(path, [{"x": np.arange(i, i + 9.0), "n": np.array(i), "name": f"n{i}"} for i in range(COUNT)])


@pytest.fixture
def source(original):
    with dataload.open(original) as opened:
        yield opened


def one_run(source, directory, name="b.syr", shards=5):
    directory.mkdir()
    convert(source, directory / name, shards=shards)
    return content(directory)


def run_parts(source, directory, order, count=3, name="b.syr", **options):
    directory.mkdir(exist_ok=True)
    return [convert(source, directory / name, shards=5, part=(number, count), **options) for number in order]


def merge(source, directory, name="b.syr", **options):
    return convert(source, directory / name, **{"shards": 5, "merge": True, **options})


def log(directory, number, count=3):
    return directory / f".b.syr.convert.{number}-of-{count}.log"


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_in_any_order_write_what_one_run_writes(source, tmp_path, order):
    reports = run_parts(source, tmp_path / "parts", order)
    by_number = dict(zip(order, reports, strict=True))
    assert [len(by_number[number].paths) for number in (1, 2, 3)] == [1, 2, 2]
    assert sum(report.records for report in reports) == COUNT
    assert {report.manifest for report in reports} == {None}
    assert not (tmp_path / "parts/dataload.json").exists()
    merged = merge(source, tmp_path / "parts")
    assert content(tmp_path / "parts") == one_run(source, tmp_path / "one")
    assert merged.paths == tuple(path for number in (1, 2, 3) for path in by_number[number].paths)
    assert (merged.records, merged.resumed) == (COUNT, COUNT)
    assert merged.bytes == sum(report.bytes for report in reports)


def test_an_interrupted_part_is_not_said_to_need_resume(source, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run_parts(source, tmp_path / "parts", [2], progress=stop)
    assert not hasattr(caught.value, "__notes__")
    assert run_parts(source, tmp_path / "parts", [2])[0].records > 0


@pytest.mark.parametrize("function", ["update_manifest", "ConversionLedger.clear"])
def test_a_merge_that_was_killed_is_repeated(source, tmp_path, monkeypatch, function):
    run_parts(source, tmp_path / "parts", [1, 2, 3])

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"dataload.convert.{function}", stop)
        with pytest.raises(KeyboardInterrupt):
            merge(source, tmp_path / "parts")
    log(tmp_path / "parts", 1).unlink()
    assert [report.resumed for report in run_parts(source, tmp_path / "parts", [1])] == [4]
    merge(source, tmp_path / "parts")
    assert content(tmp_path / "parts") == one_run(source, tmp_path / "one")


def test_the_second_of_two_runs_of_a_part_is_refused(source, tmp_path):
    refused = []

    def start_another(done, total):
        with pytest.raises(SourceError, match=r"another process is writing to .*2-of-3\.log \(process "):
            run_parts(source, tmp_path, [2], overwrite=bool(refused))
        refused.append(done)
        run_parts(source, tmp_path, [1])

    run_parts(source, tmp_path, [2], progress=start_another)
    assert refused[-1] == 9
    run_parts(source, tmp_path, [3])
    merge(source, tmp_path)


@pytest.mark.parametrize(("cut", "resumed"), [(-1, 5), (-200, 5), (-400, 0), (20, 0), (0, 0), (None, 0)])
def test_a_torn_log_or_none(source, tmp_path, cut, resumed):
    run_parts(source, tmp_path / "parts", [1, 2, 3])
    path = log(tmp_path / "parts", 2)
    data = path.read_bytes()
    path.unlink()
    if cut is not None:
        path.write_bytes(data[:cut])
    with pytest.raises(ConfigError, match=NO_LOG):
        merge(source, tmp_path / "parts")
    (report,) = run_parts(source, tmp_path / "parts", [2])
    assert report.resumed == resumed
    assert [note for note in report.notes if re.match(r"1 damaged line of .*2-of-3\.log did not", note)] or not cut
    assert merge(source, tmp_path / "parts").records == COUNT
    assert content(tmp_path / "parts") == one_run(source, tmp_path / "one")


@pytest.fixture
def changed(original, tmp_path_factory):
    """A source of as many records, of which one differs."""
    path = tmp_path_factory.mktemp("changed") / "a.syr"
    with dataload.open(original) as opened, dataload.create(path) as writer:
        for record in opened:
            writer.write({**record, "n": np.array(-1)} if record["n"] == 20 else record)
    with dataload.open(path) as opened:
        yield opened


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"part": (1, 2)}, "parts: 3 when it began, 2 now"),
        (
            {"shards": 4},
            r"shards: 5 \(b-00000-of-00005\.syr, \.\.\.\) when it began, 4 \(b-00000-of-00004\.syr, \.\.\.",
        ),
        ({"keep_key": True}, "keep_key: False when it began, True now"),
        ({"part": None, "resume": True}, "parts: 3 when it began, none now"),
    ],
)
def test_two_plans_for_one_destination(source, tmp_path, arguments, line):
    run_parts(source, tmp_path, [2])
    before = content(tmp_path)
    with pytest.raises(ConfigError, match=rf"is the journal of a different conversion\n  {line}"):
        convert(source, tmp_path / "b.syr", **{"shards": 5, "part": (1, 3), **arguments})
    assert content(tmp_path) == before


def test_a_shard_that_has_changed_is_not_merged(source, tmp_path):
    run_parts(source, tmp_path, [1, 2, 3])
    shard = tmp_path / "b-00003-of-00005.syr"
    data = shard.read_bytes()
    changed = r"b-00003-of-00005\.syr is missing, or has changed since it was finished: "
    for spoil in (shard.unlink, lambda: shard.write_bytes(data[:-1]), lambda: shard.write_bytes(data[:-1] + b"?")):
        spoil()
        with pytest.raises(ConfigError, match=changed + "run its part again$"):
            merge(source, tmp_path)
        assert not (tmp_path / "dataload.json").exists()
        (report,) = run_parts(source, tmp_path, [3])
        assert (report.resumed, len(report.notes)) == (5, 1)
        assert shard.read_bytes() == data
    merge(source, tmp_path)
    shard.write_bytes(data[:-1])
    for again in (merge, lambda *place: run_parts(*place, [3])):
        with pytest.raises(ConfigError, match=changed + r"the parts are merged, so pass resume=True without a part"):
            again(source, tmp_path)
    convert(source, tmp_path / "b.syr", shards=5, resume=True)
    assert shard.read_bytes() == data


def test_a_part_does_not_replace_the_files_of_others(source, tmp_path):
    (tmp_path / "b-00004-of-00005.syr").write_text("mine")
    with pytest.raises(ConfigError, match=r"b-00004-of-00005\.syr exists"):
        run_parts(source, tmp_path, [1])
    assert os.listdir(tmp_path) == ["b-00004-of-00005.syr"]


def test_one_run_does_not_take_over_parts(source, tmp_path):
    run_parts(source, tmp_path, [1])
    with pytest.raises(
        ConfigError, match="an unfinished conversion in 3 parts: run the parts that are missing and me"
    ) as found:
        convert(source, tmp_path / "b.syr", shards=5)
    assert found.value.key == "part"
    convert(source, tmp_path / "b.syr", shards=5, overwrite=True)
    assert merge(source, tmp_path).records == COUNT, "there is nothing left to merge"


@pytest.mark.parametrize("again", [{}, {"part": (1, 2)}])
def test_overwriting_parts_leaves_nothing_of_them(source, tmp_path, again):
    run_parts(source, tmp_path, [1, 2])
    target, expected = tmp_path / "b.syr", one_run(source, tmp_path / "one")
    convert(source, target, shards=5, overwrite=True, **again)
    if again:
        convert(source, target, shards=5, part=(2, 2), overwrite=True)
        merge(source, tmp_path)
    shutil.rmtree(tmp_path / "one")
    assert content(tmp_path) == expected


class Failing:
    """A source whose records cannot be read from some index on."""

    def __init__(self, source, first=0):
        self.source, self.first = source, first

    def __len__(self):
        return len(self.source)

    def fingerprint(self):
        return self.source.fingerprint()

    def __getitem__(self, index):
        if index >= self.first:
            raise OSError("the server is away")
        return self.source[index]


def test_a_run_that_resumes_and_fails_at_once_keeps_the_plan(source, tmp_path):
    target = tmp_path / "b.syr"
    with pytest.raises(OSError, match="away"):
        convert(Failing(source, 8), target, shards=5)
    (tmp_path / ".b.syr.convert.log").unlink()  # as after a crash before the first line
    with pytest.raises(OSError, match="away"):
        convert(Failing(source, 1), target, shards=5, resume=True)
    assert convert(source, target, shards=5, resume=True).records == COUNT


def test_a_run_that_was_taken_over_leaves_the_log_to_the_other(source, tmp_path):
    """As on file systems whose locks end at the machine."""
    path = tmp_path / ".b.syr.convert.log"

    class TakenOver(Failing):
        def __getitem__(self, index):
            if path.exists():
                os.replace(path, tmp_path / "gone")
                path.write_bytes(b"of another")
            return super().__getitem__(index)

    with pytest.raises(OSError, match="away"):
        convert(TakenOver(source, 1), tmp_path / "b.syr", shards=5)
    assert path.read_bytes() == b"of another"
    assert (tmp_path / ".b.syr.convert.json").exists()


def test_what_cannot_be_merged(source, tmp_path):
    with pytest.raises(SourceNotFoundError, match=r"there is no .*b\.syr\.convert\.json: run the parts before you me"):
        merge(source, tmp_path)

    def stop(done, total):
        if done > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "b.syr", shards=5, progress=stop)
    with pytest.raises(ConfigError, match=r"is the journal of a conversion without parts: pass resume=True to finish"):
        merge(source, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"part": (0, 3)}, "the part must be an integer >= 1, got 0"),
        ({"part": (4, 3)}, "there is no part 4 of 3: parts are counted from 1"),
        ({"part": (1, 0)}, "the number of parts must be an integer >= 1, got 0"),
        ({"part": (1, 6)}, "cannot split 5 shards into 6 parts: ask for fewer parts"),
        ({"part": (1, 2), "merge": True}, "merge writes no shards: pass it without part, resume and overwrite"),
        ({"merge": True, "overwrite": True}, "merge writes no shards"),
        ({"merge": True, "resume": True}, "merge writes no shards"),
    ],
)
def test_arguments_that_make_no_sense(source, tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        convert(source, tmp_path / "b.syr", shards=5, **arguments)
    assert os.listdir(tmp_path) == []
