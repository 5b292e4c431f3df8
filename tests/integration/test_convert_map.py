"""Conversions with a function: in parts, resumed, with bad records, and from the command line."""

import json
import re
import sys

import numpy as np
import pytest
from command_line import fail, ok
from converted import content

import dataload
from dataload.convert import convert
from dataload.convert.indexing import index_shards
from dataload.errors import ConfigError

COUNT = 23
SUFFIXES = [".syr", ".tar", ".lmdb", ".array_record", ".torchrecord"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Text of several lengths; records 7 and 13 are no UTF-8."""
    path = tmp_path_factory.mktemp("original") / "a.syr"
    with dataload.create(path) as writer:
        writer.extend({"n": np.array(i), "text": f"text{i:02d} " * (i % 4)} for i in range(COUNT))
    content = path.read_bytes()
    for index in (7, 13):
        content = content.replace(f"text{index:02d}".encode(), b"\xff\xff%04d" % index)
    path.write_bytes(content)
    return path


@pytest.fixture
def source(original):
    with dataload.open(original) as opened:
        yield opened


def words(sample, context):
    """Drop what has no words; 9 fails; one record for each word."""
    if sample["n"] == 9:
        raise LookupError("no label")
    if 13 <= sample["n"] < 19:
        return dataload.DROP
    noise = context.generator.random()
    return [{"n": sample["n"], "word": word, "noise": noise} for word in sample["text"].split()]


def model():
    """The numbers and words of all records that `words` makes."""
    bad_or_dropped = {7, 9, *range(13, 19)}
    return [(i, f"text{i:02d}") for i in range(COUNT) if i not in bad_or_dropped for _ in range(i % 4)]


def run(source, directory, suffix=".syr", **options):
    directory.mkdir(exist_ok=True)
    given = {"shards": 5, "map": words, "on_error": "skip", **options}
    return convert(source, directory / f"b{suffix}", **given)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_parts_write_what_one_run_writes(source, tmp_path, suffix):
    one = run(source, tmp_path / "one", suffix)
    assert (one.skipped, [bad.index for bad in one.bad_records]) == (3, [7, 9, 13])
    with dataload.open(tmp_path / "one", decode="auto") if suffix == ".tar" else dataload.open(tmp_path / "one") as it:
        assert [(int(record["n"]), record["word"]) for record in it] == model()
        lengths = it.shard_lengths
    assert 0 in lengths, "a shard of which no record is left"
    assert sum(lengths) == one.records == len(model())
    for count in (2, 5):
        parts = tmp_path / f"parts{count}"
        reports = [run(source, parts, suffix, part=(number, count)) for number in range(count, 0, -1)]
        assert sum(report.records for report in reports) == one.records
        assert sorted(bad.index for report in reports for bad in report.bad_records) == [7, 9, 13]
        merged = run(source, parts, suffix, merge=True)
        assert (merged.records, merged.resumed, merged.skipped, merged.bad_records) == (one.records,) * 2 + (3, ())
        assert content(parts) == content(tmp_path / "one")
    (before,) = json.loads((tmp_path / "one/dataload.json").read_text())["data_sets"]
    assert before["shards"]["records"] == list(lengths)
    if suffix != ".tar":  # of which the decoders would have to be given
        (after,) = index_shards(str(tmp_path / "one")).data_sets
        assert (after.records, dict(after.fields)) == (
            lengths,
            dict(dataload.open(tmp_path / "one").fields) or after.fields,
        )


class Killed(BaseException):
    pass


@pytest.mark.parametrize("suffix", [".tar", ".array_record"])
@pytest.mark.parametrize("part", [None, (1, 1)])
def test_an_interrupted_run_is_resumed(source, tmp_path, suffix, part):
    def stop(done, total):
        if done >= 14:
            raise Killed

    with pytest.raises(Killed):
        run(source, tmp_path / "a", suffix, part=part, progress=stop)
    report = run(source, tmp_path / "a", suffix, part=part, resume=part is None)
    one = run(source, tmp_path / "one", suffix)
    finished = json.loads((tmp_path / f"one/.b{suffix}.convert.json").read_text())["finished"]
    assert report.resumed == sum(shard["records"] for shard in list(finished.values())[:3])
    assert (report.records, report.skipped) == (one.records, 3)
    assert [bad.index for bad in report.bad_records] == [13], "of this run"
    if part is not None:
        run(source, tmp_path / "a", suffix, merge=True)
    assert content(tmp_path / "a") == content(tmp_path / "one")


def test_what_was_not_made_by_the_same_function_is_not_merged(source, tmp_path):
    def other(sample, context):
        return words(sample, context)

    run(source, tmp_path, part=(1, 2))
    line = r"is the journal of a different conversion\n  map: test_convert_map\.words \(sha256 \w+\) when it began, "
    line = line.replace("test_convert_map", re.escape(words.__module__))
    with pytest.raises(ConfigError, match=rf"cannot write a part without overwrite=True: .*{line}\S+\.other \(sha256"):
        run(source, tmp_path, part=(2, 2), map=other)
    run(source, tmp_path, part=(2, 2))
    for arguments in ({"map": other}, {"map": None}, {"seed": 1}):
        with pytest.raises(ConfigError, match=r"cannot merge: .* a different conversion\n  (map|seed): "):
            run(source, tmp_path, merge=True, **arguments)
    run(source, tmp_path, merge=True, max_bad=7)
    with pytest.raises(ConfigError, match=rf"cannot resume: .*{line}not set now"):
        run(source, tmp_path, map=None, resume=True)


MODULE = """
import dataload

__version__ = "1.0"

def label(sample):
    if sample["n"] == 4:
        raise LookupError("no label")
    return dataload.DROP if sample["n"] < 3 else {"label": sample["n"] * 10}
"""


def test_the_command(original, tmp_path, monkeypatch):
    (tmp_path / "labels_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = ["convert", original, "b.syr", "--shards", 2, "--map", "labels_here:label"]
    failed = fail(1, *command, "--field", "n").stderr
    assert "record 4 of the source failed in transform 'label': LookupError: no label" in failed
    assert failed.endswith("--on-error skip leaves such records out\n")
    skip = [*command, "--on-error", "skip"]
    failed = fail(1, *skip, "--max-bad", "2").stderr
    assert "bad records so far: 3 of 14 (21.43%), and max_bad allows 2; the last is index 13" in failed
    head, *told = ok(*skip, "--error-report", "bad.jsonl", "--overwrite").splitlines()
    assert head.startswith("17 records in b-{00000..00001}-of-00002.syr (")
    assert told == [
        "3 bad records skipped",
        "  read: CorruptFileError: 2",
        *cause(original),
        "  transform 'label': LookupError: 1",
        f"    [4] {original}, record 4: no label",
    ]
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 3
    assert ok(*skip, "--resume").endswith("17 records from an earlier run)\n3 bad records skipped\n")
    (entry,) = json.loads((tmp_path / "dataload.json").read_text())["data_sets"]
    assert (entry["map"]["name"], entry["map"]["version"]) == ("labels_here.label", "1.0")
    assert "no label" in entry["map"]["source"]


def cause(original):
    with dataload.open(original) as source:
        for index in (7, 13):
            with pytest.raises(dataload.CorruptFileError) as caught:
                source[index]
            yield f"    [{index}] {caught.value}"


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".parquet"])
def test_a_function_may_return_the_same_array_again(tmp_path, suffix):
    out = np.zeros(2)

    def fill(sample):
        out[:] = sample["index"]
        return {"x": out}

    convert(dataload.RangeSource(300), tmp_path / f"a{suffix}", map=fill)
    with dataload.open(tmp_path / f"a{suffix}") as written:
        assert [record["x"][0] for record in written] == [*range(300)]
