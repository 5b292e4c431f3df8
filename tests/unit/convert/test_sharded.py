"""Writers of several shards."""

import errno
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain

import numpy as np
import pytest

import dataload
from dataload import ConfigError, CorruptFileError
from dataload.catalog import arrays
from dataload.catalog.manifest import Manifest
from dataload.errors import SourceError
from dataload.storage.local import atomic

RECORDS = [{"x": np.arange(i, i + 500, dtype=np.float32), "y": np.array(i)} for i in range(25)]


def names(path):
    return sorted(name for name in os.listdir(path) if not name.endswith(".idx"))


def shards_of(tmp_path, name="d.syr", records=RECORDS, **rule):
    """Write, and return for each shard the numbers of its records."""
    with dataload.create(tmp_path / name, **rule) as writer:
        writer.extend(records)
    assert writer.paths == tuple(str(tmp_path / each) for each in names(tmp_path) if each != "dataload.json")
    found = []
    for path in writer.paths:
        with dataload.open(path) as source:
            found.append([int(record["y"]) for record in source])
    return found


@pytest.mark.parametrize("name", ["d.syr", "d.tar", "d.array_record", "d.lmdb", "d.torchrecord"])
@pytest.mark.parametrize("rule", [{"shards": 3}, {"records_per_shard": 10}])
def test_records_are_divided_as_the_rule_says(tmp_path, name, rule):
    numbers = [*range(25)]
    expected = (
        [numbers[shard::3] for shard in range(3)] if "shards" in rule else [numbers[:10], numbers[10:20], numbers[20:]]
    )
    assert shards_of(tmp_path, name, **rule) == expected
    stem, suffix = name.split(".")
    assert names(tmp_path) == [*(f"{stem}-0000{i}-of-00003.{suffix}" for i in range(3)), "dataload.json"]
    with dataload.open(tmp_path) as source:  # by the manifest
        assert source.shard_lengths == tuple(map(len, expected))
        assert [int(record["y"]) for record in source] == [*chain(*expected)]
    (listed,) = Manifest.parse((tmp_path / "dataload.json").read_bytes(), "").data_sets
    assert listed.records == tuple(map(len, expected))
    assert all(listed.sha256)
    assert len(listed.contents) == 3


@pytest.mark.parametrize("name", ["d.syr", "d.tar", "d.lmdb"])
@pytest.mark.parametrize("rule", [{}, {"shards": 3}])
def test_threads_share_a_writer(tmp_path, name, rule):
    """What two wrote at the same time was mixed up, or was not there."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool, dataload.create(tmp_path / name, **rule) as writer:
            [*pool.map(writer.write, RECORDS * 20)]
    finally:
        sys.setswitchinterval(interval)
    with dataload.open(tmp_path / ("." if rule else name)) as source:
        found = [record["y"].item() for record in source if (record["x"] == RECORDS[int(record["y"])]["x"]).all()]
    assert sorted(found) == sorted([*range(25)] * 20)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no forks")
@pytest.mark.parametrize("rule", [{}, {"shards": 3}])
def test_the_end_of_a_forked_child_leaves_the_files_alone(tmp_path, rule):
    """It wrote what its parent had in the buffer, too, and left a ``with`` by deleting everything."""
    writer = dataload.create(tmp_path / "d.jsonl", **rule)
    writer.extend({"y": i} for i in range(9))
    if not (child := os.fork()):
        try:
            with suppress(SystemExit), writer:
                with pytest.raises(ConfigError, match="is of another process"):
                    writer.close()
                sys.exit()
            del writer
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with writer:
        writer.write({"y": 9})
    with dataload.open(tmp_path / ("." if rule else "d.jsonl")) as source:
        assert sorted(source.read_batch(range(len(source)))["y"].tolist()) == [*range(10)]


def test_nothing_is_kept_beside_new_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_SETTLED_SECONDS", -1)
    monkeypatch.setattr("dataload.sources.jsonl.records._LEAST_CACHED", 0)
    with dataload.create(tmp_path / "d.jsonl", shards=2) as writer:
        writer.extend({"y": i} for i in range(9))

    def kept():
        return [name for name in os.listdir(tmp_path) if name.endswith("dataload-index")]

    assert not kept()
    with dataload.open(tmp_path) as source:
        assert (len([*source]), len(kept())) == (9, 2)


@pytest.mark.parametrize("name", ["d.tar", "d.tfrecord"])
def test_a_manifest_is_that_of_convert(tmp_path, name):
    """The two ways to write the same shards."""
    from dataload.convert import convert

    convert(dataload.MemorySource(RECORDS[:20]), tmp_path / "a" / name, records_per_shard=10)
    with dataload.create(tmp_path / "b" / name, records_per_shard=10) as writer:
        writer.extend(RECORDS[:20])
    for file in os.listdir(tmp_path / "b"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    with dataload.open(tmp_path / "b") as source:
        assert source[19].keys() >= {"x", "y"}


@pytest.mark.parametrize("name", ["d.syr", "d.tar", "d.array_record", "d.lmdb", "d.torchrecord"])
def test_a_shard_ends_before_it_grows_too_large(tmp_path, name):
    found = shards_of(tmp_path, name, bytes_per_shard="20kB")
    assert [*chain(*found)] == [*range(25)]
    assert 3 <= len(found) <= 7
    assert len({*map(len, found[:-1])}) <= 2
    if name in ("d.syr", "d.tar"):
        stored = [os.path.getsize(tmp_path / each) for each in names(tmp_path) if each.startswith("d-")]
        tables = 1000 if name == "d.syr" else 1024  # of lengths; two blocks of zeros
        assert max(stored) <= 20_000 + tables
        assert stored[0] > 16_000


@pytest.mark.parametrize("name", ["d.syr", "d.array_record", "d.lmdb"])  # an index is flushed before the file, too
def test_each_file_is_flushed_once_and_their_names_together(tmp_path, monkeypatch, name):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    shards_of(tmp_path, name, records_per_shard=1)
    files = [file.stat().st_ino for file in tmp_path.rglob("*") if file.is_file()]
    assert [flushed.count(file) for file in files] == [1] * len(files)
    assert flushed[-1] == tmp_path.stat().st_ino
    assert flushed.count(flushed[-1]) <= 5


def test_no_records_make_one_empty_shard(tmp_path):
    assert shards_of(tmp_path, records=[], records_per_shard=13) == [[]]


@pytest.mark.parametrize("rule", [{"shards": 2}, {"records_per_shard": 3}])
def test_an_exception_publishes_nothing(tmp_path, rule):
    with pytest.raises(ConfigError), dataload.create(tmp_path / "d.tar", **rule) as writer:
        writer.extend([*RECORDS, b"has no fields"])
    assert os.listdir(tmp_path) == []
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not [path for path in opened if path.startswith(str(tmp_path))]
    writer = dataload.create(tmp_path / "d.tar", **rule)
    writer.extend(RECORDS)
    assert all(name.startswith(".") for name in os.listdir(tmp_path))
    del writer  # forgotten
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_a_failure_while_publishing_takes_back_what_was_published(tmp_path, monkeypatch):
    writer = dataload.create(tmp_path / "d.syr", shards=2)
    writer.extend(RECORDS)
    (tmp_path / "d-00001-of-00002.syr").write_bytes(b"somebody else")
    with pytest.raises(ConfigError, match=r"d-00001-of-00002\.syr exists: choose another name"):
        writer.close()
    assert os.listdir(tmp_path) == ["d-00001-of-00002.syr"]
    (tmp_path / "d-00001-of-00002.syr").unlink()

    rename, renamed = os.rename, []

    def fails_twice(one, other):
        renamed.append(one)
        if len(renamed) == 2:
            raise OSError(28, "no space left")
        rename(one, other)

    writer = dataload.create(tmp_path / "d.syr", shards=2)
    writer.extend(RECORDS)
    monkeypatch.setattr("dataload.convert.sharded.os.rename", fails_twice)
    with pytest.raises(SourceError, match=r"cannot write .*d\.syr: no space left"):
        writer.close()
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match=r"the writer of .*d\.syr is aborted: nothing more can be written"):
        writer.write(RECORDS[0])


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        *(
            ("d.syr", settings, ConfigError, message)
            for settings, message in [
                ({"shards": 2, "records_per_shard": 3}, "shards and records_per_shard each determine the files: pass"),
                ({"shards": 0}, "shards must be an integer >= 1, got 0"),
                ({"records_per_shard": 1.5}, "records_per_shard must be an integer >= 1, got 1.5"),
                ({"bytes_per_shard": "many"}, "bytes_per_shard must be a number of bytes such as 500GB or 64MiB, got"),
                ({"shards": 2, "compression": 3}, "the writer of format 'syrah' has no option 'compression'"),
                ({"shards": 26}, "cannot split 25 records into 26 shards: each needs at least one record"),
            ]
        ),
        ("d-{0..2}.syr", {"records_per_shard": 9}, ConfigError, "names 3 shards: leave shards and records_per_shard"),
        ("d-{shards}.syr", {"records_per_shard": 3}, ConfigError, r"would be called 'd-2\.syr': put {shard:05d} into"),
        *(
            (name, {"shards": 2}, ConfigError, "destination: expected a name in the dir")
            for name in (".d.syr", "d:d.syr")
        ),
        ("file/d.syr", {"shards": 2}, ConfigError, "file is not a directory; choose another destination"),
        ("damaged/d.syr", {"shards": 2}, CorruptFileError, "a manifest is JSON"),
    ],
)
def test_what_does_not_fit(tmp_path, name, settings, error, message):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "dataload.json").write_text("{")
    (tmp_path / "file").touch()
    with pytest.raises(error, match=message):
        shards_of(tmp_path, name, **settings)
    assert sorted(os.listdir(tmp_path)) == ["damaged", "file"]


@pytest.mark.parametrize("name", ["d.tar", "d-{0..1}.tar"])
def test_what_exists_is_only_replaced_if_asked(tmp_path, name):
    first = shards_of(tmp_path, name, shards=2)
    assert list(map(len, first)) == [13, 12]
    there = names(tmp_path)[0]
    for rule in ({"shards": 2}, {"records_per_shard": 20}):
        if rule == {"shards": 2} or name == "d.tar":
            with pytest.raises(ConfigError, match=rf"{there} exists"):
                dataload.create(tmp_path / name, **rule)
    if name == "d.tar":
        dataload.create(tmp_path / name, shards=3).abort()  # other names
    assert shards_of(tmp_path, name, RECORDS[:4], shards=2, overwrite=True, index=False) == [[0, 2], [1, 3]]
    assert not list(tmp_path.glob("*.idx"))  # those of the old archives would be trusted


def test_a_shard_that_cannot_be_completed_ends_the_writing(tmp_path):
    writer = dataload.create(tmp_path / "d.arrow", records_per_shard=1)
    writer.write({"x": object()})
    message = "(^|so nothing more can be written: ConfigError: )field 'x' cannot be stored in a table"
    for attempt in (*[lambda: writer.write({"x": 1})] * 2, writer.close):
        with pytest.raises(ConfigError, match=message):
            attempt()
    assert not os.listdir(tmp_path)


def test_a_record_that_does_not_fit_changes_nothing(tmp_path):
    with dataload.create(tmp_path / "d.syr", records_per_shard=2) as writer:
        for record in [*RECORDS[:6], None]:  # the last one would be in a shard of its own
            with pytest.raises(ConfigError, match="format 'syrah' stores fields, got a record of type bytes"):
                writer.write(b"")
            if record is not None:
                writer.write(record)
        assert len(writer) == 6
        assert repr(writer) == f"ShardedWriter('{tmp_path}/d.syr', 6 records, open)"
    with dataload.open(tmp_path) as source:
        assert [int(record["y"]) for record in source] == [*range(6)]
        assert source.shard_lengths == (2, 2, 2)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["d{shard}.syr", "d{shard}.lmdb"])
def test_shards_of_a_killed_writer_are_not_read_with_those_before(tmp_path, name, overwrite):
    """Files of equal size and ends were read as one data set, some old and some new, or without the last ones."""
    records = [RECORDS[0]] * 4 + [RECORDS[2]] * 4 + [RECORDS[0]] * 4
    if overwrite:
        shards_of(tmp_path, name, records, shards=2)
    code = f"""
import os, sys, dataload, numpy as np
from dataload.convert.sharded import ShardedWriter
place = ShardedWriter._place
manifest = {str(tmp_path / "dataload.json")!r}
renew = lambda: os.path.exists(manifest) and os.utime(manifest)  # as another process does meanwhile
ShardedWriter._place = lambda *given: (renew(), place(*given), os._exit(9))
with dataload.create({str(tmp_path / name)!r}, shards=2, overwrite={overwrite}) as writer:
    writer.extend([{{"x": np.arange(500, dtype=np.float32), "y": np.array(0)}}] * 12)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    with pytest.raises(SourceError, match=r"conversion.*\.convert\.json"):
        dataload.open(tmp_path)
    shards_of(tmp_path, name, records, shards=2, overwrite=True)
    with dataload.open(tmp_path) as source:
        assert [int(record["y"]) for record in source] == [0, 0, 2, 2, 0, 0] * 2


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt("full")])
@pytest.mark.parametrize("name", ["d.syr", "d.tar", "d.arrow", "d.jsonl"])
@pytest.mark.parametrize("bulk", [False, True])
def test_a_file_that_lacks_part_of_a_record_is_not_published(tmp_path, monkeypatch, name, bulk, error):
    """After a full disk the writer went on, and replaced a file with a damaged one."""
    (tmp_path / name).write_text("before")
    values = [np.full((2, 1 << 19), i, np.float32) for i in range(4)]
    records = [{"x": x.ravel().tolist() if name == "d.jsonl" else x} for x in values]
    writer = dataload.create(tmp_path / name, overwrite=True, **({"group_bytes": 1} if name == "d.arrow" else {}))
    writer.write(records[0])
    with monkeypatch.context() as patch:
        patch.setattr(atomic._OwnFile, "write", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises((SourceError, KeyboardInterrupt), match="full"):
            writer.extend(records[1:3]) if bulk else writer.write(records[1])
    if name == "d.syr":  # which takes it back
        writer.extend(records[len(writer) :])
        writer.close()
        with dataload.open(tmp_path / name) as source:
            np.testing.assert_equal(list(source), records)
        return
    for end in (lambda: writer.write(records[1]), writer.close):
        with pytest.raises(SourceError, match=r"interrupted writing .* cannot be completed: .*full"):
            end()
    assert (os.listdir(tmp_path), (tmp_path / name).read_text()) == ([name], "before")
