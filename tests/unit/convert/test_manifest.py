"""Manifests beside shards: written by convert and by `dataload index`, and read by open."""

import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dataload
from dataload._util.caches import pickling_for_worker
from dataload.catalog import manifest as manifests
from dataload.catalog.facts import DataSetFacts, ShardFacts
from dataload.catalog.manifest import read_manifest, update_manifest
from dataload.convert import convert
from dataload.convert.indexing import index_shards
from dataload.errors import ConfigError, CorruptFileError, SourceError, SourceNotFoundError, WorkerError
from dataload.types import FieldSpec


def source_of(count, first=0):
    return dataload.MemorySource([{"x": np.full(3, first + i, np.int32)} for i in range(count)])


def values(source):
    return [int(record["x"][0]) for record in source]


def entries(directory):
    return read_manifest(str(directory)).data_sets


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("shards", "pattern"), [(None, "a.syr"), (3, "a-{00000..00002}-of-00003.syr")])
def test_convert_lists_what_it_wrote(tmp_path, shards, pattern):
    report = convert(source_of(10), tmp_path / "a.syr", shards=shards)
    assert report.manifest == str(tmp_path / "dataload.json")
    [entry] = entries(tmp_path)
    assert (entry.pattern, entry.format, entry.options) == (pattern, "syrah", {})
    assert entry.fields == {"x": FieldSpec("int32", (3,))}
    for shard, path in zip(entry.shards, report.paths, strict=True):
        assert os.path.join(tmp_path, shard.name) == path
        assert (shard.bytes, shard.sha256) == (os.path.getsize(path), sha256(tmp_path / shard.name))
        assert shard.records == len(dataload.open(path))
    assert values(dataload.open(tmp_path)) == list(range(10))


def test_the_codec_is_known_from_the_manifest(tmp_path):
    class Own:
        def encode(self, record):
            return bytes([int(record["x"][0])])

        def decode(self, data):
            return {"x": np.full(3, data[0])}

    convert(source_of(4), tmp_path / "a.array_record", writer_options={"codec": "npz"})
    assert entries(tmp_path)[0].options == {"codec": "npz"}
    assert values(dataload.open(tmp_path)) == [0, 1, 2, 3]
    assert isinstance(dataload.open(tmp_path, codec="raw")[0], bytes), "what the caller says comes first"
    assert values(dataload.open(tmp_path / "a.array_record")) == [0, 1, 2, 3], "the file says so, too"
    convert(source_of(4), tmp_path / "b.lmdb", writer_options={"codec": Own()})
    assert (entries(tmp_path)[1].options, entries(tmp_path)[1].fields) == ({}, {})


def test_two_conversions_into_one_directory(tmp_path):
    convert(source_of(4), tmp_path / "train.syr", shards=2)
    convert(source_of(3, 100), tmp_path / "val.syr")
    assert [entry.pattern for entry in entries(tmp_path)] == ["train-{00000..00001}-of-00002.syr", "val.syr"]
    message = "has 2 data sets: train-{00000..00001}-of-00002.syr, val.syr; open one of these patterns, or a list"
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataload.open(tmp_path)
    assert values(dataload.open(tmp_path / "train-{00000..00001}-of-00002.syr")) == [0, 1, 2, 3]
    assert values(dataload.open(f"{tmp_path}/*.syr")) == [0, 1, 2, 3, 100, 101, 102]
    convert(source_of(3), tmp_path / "b.lmdb")
    assert values(dataload.open(tmp_path, format="lmdb")) == [0, 1, 2], "a format chooses, too"


def test_the_manifest_is_written_last(tmp_path):
    def bad(sample):
        if sample["x"][0] == 7:
            raise CorruptFileError("bad")
        return sample

    with pytest.raises(WorkerError):
        convert(source_of(8), tmp_path / "a.syr", shards=4, map=bad)
    assert "dataload.json" not in os.listdir(tmp_path)
    convert(source_of(8), tmp_path / "b.syr")
    before = (tmp_path / "dataload.json").stat()
    convert(source_of(8), tmp_path / "b.syr", resume=True)
    assert (tmp_path / "dataload.json").stat().st_mtime_ns == before.st_mtime_ns, "there was nothing to write"
    (tmp_path / "dataload.json").unlink()
    convert(source_of(8), tmp_path / "b.syr", resume=True)
    assert [entry.pattern for entry in entries(tmp_path)] == ["b.syr"]


def test_a_conversion_beside_a_damaged_manifest_does_not_begin(tmp_path):
    (tmp_path / "dataload.json").write_text("{}")
    with pytest.raises(CorruptFileError, match=r"dataload\.json: not a valid manifest: version: expected 1"):
        convert(source_of(4), tmp_path / "a.syr")
    assert os.listdir(tmp_path) == ["dataload.json"]


def test_hidden_files_in_a_directory_are_not_its_content(tmp_path):
    convert(source_of(4), tmp_path / "a.lmdb")
    (tmp_path / "a.lmdb" / ".nfs0001").write_bytes(b"of the file system")
    assert convert(source_of(4), tmp_path / "a.lmdb", resume=True).resumed == 4
    assert values(dataload.open(tmp_path)) == [0, 1, 2, 3]


@pytest.fixture
def shards(tmp_path):
    convert(source_of(10), tmp_path / "a.syr", shards=2)
    return tmp_path


STALE = r"dataload\.json: the manifest is stale: {}; if the shards are right, run `dataload index --manifest .*`$"


FIRST, SECOND = (f"a-0000{number}-of-00002.syr" for number in range(2))


def grow(directory):
    with open(directory / SECOND, "ab") as stream:
        stream.write(b"x")


def remove(directory):
    for name in (FIRST, SECOND):
        (directory / name).unlink()


def miscount(directory):
    table = json.loads((directory / "dataload.json").read_bytes())
    table["data_sets"][0]["records"] = 11
    table["data_sets"][0]["shards"]["records"] = [6, 5]
    (directory / "dataload.json").write_text(json.dumps(table))


def write_other(directory):
    with dataload.create(directory / "b.lmdb") as writer:
        writer.write({"x": 1})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (grow, STALE.format(rf"{SECOND} has ([\d,]+) bytes, and ([\d,]+) in the manifest")),
        (remove, STALE.format(rf"{FIRST} is missing \(and 1 more\)")),
        (lambda path: shutil.copy(path / FIRST, path / "b.syr"), STALE.format(r"b\.syr is not in the manifest")),
        (write_other, STALE.format(r"b\.lmdb is not in the manifest")),
        (miscount, rf"dataload\.json: {FIRST} has 5 records, and 6 in the manifest: if the shards"),
        (lambda path: (path / "dataload.json").write_text("x"), r"dataload\.json: a manifest is JSON, but this is not"),
    ],
)
def test_a_manifest_that_is_stale_or_damaged(shards, change, problem):
    before = dataload.open(shards).fingerprint()
    change(shards)
    with pytest.raises(CorruptFileError, match=problem) as caught:
        dataload.open(shards)
    assert caught.value.path == str(shards / "dataload.json")
    if change is grow:
        new, old = (int(size.replace(",", "")) for size in re.search(problem, str(caught.value)).groups())
        assert (new, old) == ((shards / SECOND).stat().st_size, new - 1)
    elif change is miscount:
        index_shards(str(shards))
        assert len(dataload.open(shards)) == 10
    elif change is write_other:
        assert len(dataload.open(shards, format="syrah")) == 10
        assert len(dataload.open(shards, format="lmdb")) == 1
    elif change is not remove:
        (shards / "dataload.json").unlink()
        (shards / "b.syr").rename(shards / "b.txt") if (shards / "b.syr").exists() else None
        assert dataload.open(shards).fingerprint() == before


@pytest.mark.parametrize("name", ["of_a_package", "range"])
def test_data_do_not_choose_a_package(shards, name):
    path = shards / "dataload.json"
    path.write_text(path.read_text().replace('"format":"syrah"', f'"format":"{name}"'))
    message = rf"the manifest says that a-.* has the format '{name}', not 'syrah': pass format= to choose one"
    with pytest.raises(ConfigError, match=message):
        dataload.open(shards)


def test_directories_that_disagree(tmp_path):
    for name, codec in (("a", "npz"), ("b", "msgpack"), ("c", "npz")):
        (tmp_path / name).mkdir()
        convert(source_of(2), tmp_path / name / "x.lmdb", writer_options={"codec": codec})
    for other in (tmp_path / "c", tmp_path / "c" / "x.lmdb"):
        assert values(dataload.open([tmp_path / "a", other])) == [0, 1, 0, 1]
    message = "the manifests of the directories give different options, {'codec': 'npz'} and {'codec': 'msgpack'}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataload.open([tmp_path / "a", tmp_path / "b"])


@pytest.fixture
def listed(tmp_path):
    """A directory whose manifest is newer than its shards."""
    (tmp_path / "d").mkdir()
    convert(source_of(12), tmp_path / "d/a.syr", shards=4)
    for number, path in enumerate(sorted((tmp_path / "d").glob("a-*"))):
        os.utime(path, ns=(10**18 + number, 10**18 + number))
    return tmp_path / "d"


def opened_files(act):
    """Return the names of the shards that `act` opens."""
    opened, active = set(), True

    def hook(event, arguments):
        if active and event == "open" and str(arguments[0]).endswith(".syr"):
            opened.add(os.path.basename(arguments[0]))

    sys.addaudithook(hook)
    act()
    active = False
    return opened


def spoil(path, place=25, *, times=True):
    """Change a byte of a record, but not the size of its file, and if so told not its time."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[place] ^= 255
    path.write_bytes(data)
    if times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_only_the_first_shard_is_opened_at_once(listed):
    sources = []
    assert opened_files(lambda: sources.append(dataload.open(listed))) == {"a-00000-of-00004.syr"}
    (source,) = sources
    assert source.shard_lengths == (3, 3, 3, 3)
    assert opened_files(source.fingerprint) == set(), "the manifest has all that it needs"
    assert opened_files(lambda: source[11]) == {"a-00003-of-00004.syr"}
    with dataload.open(listed, check=True) as checked:
        assert checked.fingerprint() == source.fingerprint()


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("place", [0, 25])  # of the header, and of a value, which only the manifest can tell
def test_damage_of_old_shards_shows_at_first_use_unless_all_are_checked(listed, check, place):
    spoil(listed / "a-00002-of-00004.syr", place)
    if check:
        with pytest.raises(CorruptFileError, match="a-00002-of-00004"):
            dataload.open(listed, check=True)
    else:
        with dataload.open(listed) as source:
            assert source[5]["x"][0] == 5
            with pytest.raises(CorruptFileError, match="a-00002-of-00004"):
                source[6]


def test_shards_newer_than_the_manifest_are_compared_at_once(listed):
    """A conversion that overwrites shards with others of equal size is such a case: its readers would get both."""
    path = listed / "a-00002-of-00004.syr"
    shutil.copy(path, listed / "new")
    os.replace(listed / "new", path)
    with dataload.open(listed) as source:
        assert source[6]["x"][0] == 6, "a copy has the same content"
    spoil(path, times=False)
    match = r"dataload\.json: the manifest is stale: a-00002-of-00004\.syr has another content than in the manifest; if"
    with pytest.raises(CorruptFileError, match=match):
        dataload.open(listed)
    index_shards(str(listed))
    with dataload.open(listed) as source:
        assert len(source) == 12


def test_shards_of_an_unfinished_overwrite_are_not_listed(listed):
    with pytest.raises(WorkerError, match="record 8 of the source failed"):
        convert(source_of(12), listed / "a.syr", shards=4, overwrite=True, map=fail_later)
    with pytest.raises(
        SourceNotFoundError, match=r"has the shards of an unfinished conversion \(\.a\.syr\.convert\.json\)"
    ):
        index_shards(str(listed))
    with pytest.raises(ConfigError, match=r"a conversion to a-.* has not ended \(\.a\.syr\.convert\.json\): finish"):
        dataload.create(listed, append=True)
    convert(source_of(12), listed / "a.syr", shards=4, overwrite=True)
    index_shards(str(listed))
    with dataload.create(listed, append=True) as writer:
        writer.write({"x": np.zeros(3, np.int32)})


def fail_later(record):
    return {"x": record["x"] // int(record["x"][0] != 8)}


def test_a_shard_of_equal_size_and_time_is_compared_with_its_mark(listed):
    spoil(listed / "a-00002-of-00004.syr")
    with dataload.open(listed) as source:
        match = r"a-00002-of-00004\.syr has another content than in the manifest: if the shards are right, run"
        with pytest.raises(CorruptFileError, match=match) as caught:
            source[6]
    assert caught.value.path == str(listed / "dataload.json")


def test_a_shard_that_is_replaced_after_opening_is_named_at_its_first_read(listed):
    with dataload.open(listed) as source:
        shutil.copy(listed / "a-00000-of-00004.syr", listed / "new")
        os.replace(listed / "new", listed / "a-00002-of-00004.syr")
        assert source[5]["x"][0] == 5
        with pytest.raises(CorruptFileError, match=r"a-00002-of-00004\.syr: the file has been rewritten since"):
            source[6]
        with pickling_for_worker():
            worker = pickle.loads(pickle.dumps(source))
        with worker, pytest.raises(CorruptFileError, match=r"a-00002-of-00004\.syr: the file has been rewritten since"):
            worker[6]
        with pickle.loads(pickle.dumps(source)) as elsewhere:
            assert elsewhere[6]["x"][0] == 0, "another process takes what is there"


def unlisted(directory, count=10, name="a.syr", **options):
    convert(source_of(count), directory / name, **options)
    expected = entries(directory)
    (directory / "dataload.json").unlink()
    return expected


class Engine:
    """Runs the parts one after the other in this thread, in the opposite order."""

    parts = None

    def default_parts(self, shards):
        return shards - 1

    def run(self, task, count, advance):
        done, results = {}, {}
        for number in range(count, 0, -1):

            def progress(units, _, number=number):
                done[number] = units
                advance(sum(done.values()))

            results[number] = task(part=(number, count), progress=progress)
        return [results[number] for number in sorted(results)]


@pytest.mark.parametrize("engine", [None, Engine()])
def test_options_become_part_of_it(tmp_path, engine):
    expected = unlisted(tmp_path, name="a.array_record", shards=3, writer_options={"codec": "npz"})
    calls = []
    options = {"codec": "npz", "cache": False}
    pattern = str(tmp_path / "*.array_record")
    report = index_shards(pattern, options=options, engine=engine, progress=lambda *each: calls.append(each))
    assert (entries(tmp_path)[0].options, entries(tmp_path)[0].shards) == ({"codec": "npz"}, expected[0].shards)
    assert (report.resumed, [calls[0], calls[-1]]) == (0, [(0, 3), (3, 3)])
    before = entries(tmp_path)
    index_shards(str(tmp_path), engine=engine)
    assert entries(tmp_path) == before, "renewing keeps them"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".dataload")] == []
    with pytest.raises(ConfigError, match=r"the option codec=.* cannot be stored in a manifest: pass it to open"):
        index_shards(str(tmp_path), options={"codec": len}, engine=engine)


def test_data_sets_keep_their_entries(tmp_path):
    unlisted(tmp_path, name="train.syr", shards=2)
    unlisted(tmp_path, name="val.syr")
    index_shards(str(tmp_path / "train-*.syr"))
    index_shards(str(tmp_path / "val.syr"))
    assert [entry.pattern for entry in entries(tmp_path)] == ["train-{00000..00001}-of-00002.syr", "val.syr"]
    before = entries(tmp_path)
    assert index_shards(str(tmp_path)).data_sets == before
    (tmp_path / "val.syr").rename(tmp_path / "test.syr")
    with pytest.raises(ConfigError, match=r"test\.syr is in none of the 2 data sets of .*: index a pattern"):
        index_shards(str(tmp_path))
    (tmp_path / "test.syr").unlink()
    assert index_shards(str(tmp_path)).data_sets == entries(tmp_path) == before[:1], "the other is gone"


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (("a-08.jsonl", "a-09.jsonl", "a-10.jsonl"), "a-{08..10}.jsonl"),
        (("a-1-of-2.jsonl", "a-2-of-2.jsonl"), "a-{1..2}-of-2.jsonl"),
        (("a-20260101.jsonl", "a-20261128235959.jsonl"), "*.jsonl"),  # times, with billions of numbers in between
        (("a-{1..2}-1.jsonl", "a-{1..2}-2.jsonl"), "*.jsonl"),
    ],
)
def test_the_pattern_of_names(tmp_path, names, pattern):
    for name in names:
        (tmp_path / name).write_text('{"x": 1}\n')
    assert [each.pattern for each in index_shards(str(tmp_path)).data_sets] == [pattern]


def test_an_interrupted_run_resumes(tmp_path):
    expected = unlisted(tmp_path, shards=6)

    def stop_after_three(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_shards(str(tmp_path), progress=stop_after_three)
    assert "dataload.json" not in os.listdir(tmp_path)
    noted = len((tmp_path / ".dataload.json.index.log").read_text().splitlines()) - 1
    assert noted >= 3
    with open(tmp_path / ".dataload.json.index.log", "a") as stream:
        stream.write('[]\n["a", "b", 1, 2, 3, 4]\n{"a')  # the process was killed while it wrote
    for path in tmp_path.glob("*.syr"):
        os.utime(path, ns=(1, 1))  # touched, but the same
    report = index_shards(str(tmp_path))
    assert (report.data_sets, report.resumed) == (expected, noted)
    assert ".dataload.json.index.log" not in os.listdir(tmp_path)


def test_a_run_with_other_options_that_fails_keeps_what_is_noted(tmp_path):
    unlisted(tmp_path, name="a.array_record", shards=3)

    def stop(done, _):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_shards(str(tmp_path), progress=stop)
    shard = min(tmp_path.glob("a-*"))
    data = shard.read_bytes()
    shard.write_bytes(data[:50])
    with pytest.raises(CorruptFileError):
        index_shards(str(tmp_path), options={"codec": "npz"})
    shard.write_bytes(data)
    assert index_shards(str(tmp_path)).resumed >= 1


def test_the_manifest_tells_shards_of_other_suffixes(tmp_path):
    (tmp_path / "a.dat").write_text('{"x": 1}\n')
    shutil.copy(tmp_path / "a.dat", tmp_path / "b.dat")
    index_shards(str(tmp_path / "*.dat"), format="jsonl")
    (tmp_path / "b.dat").unlink()
    assert [(each.names, each.format) for each in index_shards(str(tmp_path)).data_sets] == [(("a.dat",), "jsonl")]
    with pytest.raises(SourceNotFoundError, match="no files with a suffix of format 'csv'"):
        index_shards(str(tmp_path), format="csv")


def test_what_cannot_be_indexed(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        unlisted(tmp_path / name, shards=2)
    several = str(tmp_path / "{a,b}" / FIRST)
    with pytest.raises(ConfigError, match=r"a manifest lists the shards of one directory, got shards of .*a, .*b"):
        index_shards(several)
    (tmp_path / "a" / SECOND).write_bytes(b"GS\0 damaged")
    with pytest.raises(CorruptFileError) as caught:
        index_shards(str(tmp_path / "a"))
    assert caught.value.path == str(tmp_path / "a" / SECOND)
    assert "dataload.json" not in os.listdir(tmp_path / "a")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.syr").write_bytes(b"GS\0 damaged")
    with pytest.raises(CorruptFileError):
        index_shards(str(tmp_path / "c"))
    assert os.listdir(tmp_path / "c") == ["a.syr"]
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "b" / ".dataload.json.index.log").symlink_to("../victim")
    index_shards(str(tmp_path / "b"))
    assert (tmp_path / "victim").read_text() == "precious", "nothing is written through a link"


def test_two_at_once(tmp_path):
    unlisted(tmp_path, shards=2)
    refused = []

    def start_another(done, total):
        if not done:
            with pytest.raises(SourceError, match="another process is writing to"):
                index_shards(str(tmp_path))
            refused.append(total)

    index_shards(str(tmp_path), progress=start_another)
    assert refused == [2]


def test_updates_at_once_are_all_kept(tmp_path):
    names = [f"s{number}.syr" for number in range(12)]
    made = [DataSetFacts.of(name, "syrah", [ShardFacts(name, 1, 1)]) for name in names]
    with ThreadPoolExecutor(len(made)) as threads:
        list(threads.map(lambda entry: update_manifest(str(tmp_path), [entry]), made))
    assert {entry.pattern for entry in entries(tmp_path)} == {*names}
    assert os.listdir(tmp_path) == ["dataload.json"]


@pytest.mark.parametrize("conflicts", [0, 3, None])
def test_writers_that_take_no_notice_of_the_lock(tmp_path, monkeypatch, conflicts):
    storage, tries = manifests.storage_of(""), []

    class Contended:
        def __getattr__(self, name):
            return getattr(storage, name)

        def replace(self, *arguments):
            tries.append(arguments)
            if conflicts is None or len(tries) <= conflicts:
                raise FileExistsError
            return storage.replace(*arguments)

    monkeypatch.setattr(manifests, "storage_of", lambda *_: Contended())
    added = [DataSetFacts.of("a.syr", "syrah", [ShardFacts("a.syr", 1, 1)])]
    if conflicts is None:
        monkeypatch.setattr(manifests.time, "monotonic", itertools.count(0, 4).__next__)
        with pytest.raises(SourceError, match=r"other processes have been writing .*\.json for 10 seconds: try again"):
            update_manifest(str(tmp_path), added)
    else:
        update_manifest(str(tmp_path), added)
        assert (list(entries(tmp_path)), len(tries)) == (added, conflicts + 1)


def test_folders_and_files_in_turn_are_described_as_they_lie(tmp_path):
    for number in range(4):
        with dataload.create(tmp_path / f"{number}.lmdb") as writer:
            writer.extend([bytes([number]) * 10] * (number + 1))
        if number in (1, 2):
            (tmp_path / f"{number}.lmdb" / "data.mdb").rename(tmp_path / f"{number}.mdb")
            shutil.rmtree(tmp_path / f"{number}.lmdb")
    (facts,) = index_shards(str(tmp_path)).data_sets
    files = [tmp_path / "0.lmdb/data.mdb", tmp_path / "1.mdb", tmp_path / "2.mdb", tmp_path / "3.lmdb/data.mdb"]
    assert facts.names == ("0.lmdb", "1.mdb", "2.mdb", "3.lmdb")
    assert facts.records == (1, 2, 3, 4)
    assert facts.bytes == tuple(file.stat().st_size for file in files)
    assert facts.sha256 == tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    assert [*dataload.open(tmp_path)] == [bytes([number]) * 10 for number in range(4) for _ in range(number + 1)]
