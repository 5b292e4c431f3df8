import json
import os
import re
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import dataload
from dataload.catalog.evidence import describe_files, files_of, find_shard, is_same
from dataload.catalog.facts import Evidence, ShardFacts
from dataload.convert import convert
from dataload.convert.blocks import read_ahead, read_records
from dataload.convert.ledger import Journal, JournalFile
from dataload.convert.plan import Target
from dataload.errors import ConfigError, CorruptFileError, SourceError
from dataload.sources.registry import get_format
from dataload.storage import Remote

SYRAH = get_format("syrah")


def records_of(count):
    return [{"x": np.arange(i, i + 3.0), "y": np.array(i), "name": f"n{i}"} for i in range(count)]


def source_of(count):
    return dataload.MemorySource(records_of(count))


def assert_equal_records(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def plan(destination, length, shards=None, records_per_shard=None, entry=SYRAH):
    found = Target.of(destination, entry.name).plan(length, shards=shards, records_per_shard=records_per_shard)
    return [(shard.path, shard.start, shard.stop) for shard in found]


@pytest.mark.parametrize(
    ("destination", "shards", "name"),
    [
        ("a.syr", 2, "a-00000-of-00002.syr"),
        ("a.SYR", 2, "a-00000-of-00002.SYR"),
        ("a.b", 2, "a.b-00000-of-00002"),
        ("{odd}.syr", 2, "{odd}-00000-of-00002.syr"),
        ("{shard}/a.syr", 2, "{shard}/a-00000-of-00002.syr"),
        ("p-{shard:03d}.syr-of-{shards}", 2, "p-000.syr-of-2"),
        ("a-{shard:02d}.syr", None, "a-00.syr"),
        ("out/{odd} {0}.syr/", None, "out/{odd} {0}.syr"),
    ],
)
def test_names_of_shards(destination, shards, name):
    assert plan(destination, 5, shards=shards)[0] == (name, 0, 5 // (shards or 1))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"shards": 0}, "shards must be an integer >= 1, got 0"),
        ({"records_per_shard": -1}, "records_per_shard must be an integer >= 1, got -1"),
        ({"records_per_shard": 0}, "records_per_shard must be an integer >= 1, got 0"),
        ({"shards": 6}, "cannot split 5 records into 6 shards: each needs at least one record"),
        ({"shards": 2, "records_per_shard": 2}, "shards and records_per_shard both determine the number of files"),
        ({"shards": 2, "destination": "a-{shards}.syr"}, "all 2 shards would be called 'a-2.syr': put {shard:05d}"),
        *(
            ({"shards": 2, "destination": name}, f"{name!r} is not a valid pattern for shard names")
            for name in ("{shard}-{other}", "{shard}-{0}", "{shard}-{")
        ),
    ],
)
def test_plans_that_cannot_be(arguments, match):
    with pytest.raises(ConfigError, match=re.escape(match)):
        plan(**{"destination": "a.syr", "length": 5, **arguments})


class Recorder:
    """A source that notes how it is read; a record is bad."""

    def __init__(self, count, size, bad=None):
        self.count, self.size, self.bad = count, size, bad
        self.blocks = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        raise AssertionError("read in blocks")

    def __getitems__(self, indices):
        self.blocks.append([*indices])
        if self.bad in indices:
            raise CorruptFileError("bad", path="p", index=self.bad)
        return [bytes(self.size)] * len(indices)


@pytest.mark.parametrize(
    ("count", "size", "lengths"),
    [
        (10_000, 10, [1, 8, 64, 512, 4096, 4096, 1223]),
        (150, 1 << 20, [1, *[8] * 18, 5]),
        (9, 4 << 20, [1, 2, 2, 2, 2]),
        *((3, size, [1, 1, 1]) for size in ((4 << 20) + 1, 8 << 20, 9 << 20)),
        (10, 0, [1, 8, 1]),
    ],
)
def test_blocks_cover_the_range_in_order_and_have_at_most_eight_mib(count, size, lengths):
    source = Recorder(count, size)
    found = [(first, len(records)) for first, records in read_ahead(partial(read_records, source), 3, 3 + count)]
    assert [i for block in source.blocks for i in block] == list(range(3, 3 + count))
    assert found == [(block[0], len(block)) for block in source.blocks]
    assert [*map(len, source.blocks)] == lengths


def journal(**changes):
    shards = (("a-0", 0, 2), ("a-1", 2, 5))
    first = Journal(source="f1", records=5, format="syrah", options={"codec": "None"}, shards=shards)
    return replace(first, **changes)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 1000])
@pytest.mark.parametrize("most", [1, 3, 5000])
def test_shards_cover_the_records_evenly(length, most):
    spans = [(start, stop) for _, start, stop in plan("a.syr", length, records_per_shard=most)]
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(length))
    sizes = [stop - start for start, stop in spans]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert len(spans) == max(1, -(-length // most)), "no more shards than it needs"


def test_a_journal_of_version_0_1_loads(tmp_path):
    path = tmp_path / "m"
    path.write_text(
        '{"source": "f1", "records": 5, "format": "syrah", "options": {"codec": "None"}, "shards": [["a-0", 0, 2], '
        '["a-1", 2, 5]], "finished": {"a-0": {"bytes": 3, "sha256": "ab", "mtime_ns": 17}}, "version": 1}'
    )
    expected = journal(finished={"a-0": ShardFacts("a-0", 3, 2, "ab", evidence=Evidence(17))})
    assert JournalFile(str(path)).load() == expected
    JournalFile(str(path)).save(expected)
    assert JournalFile(str(path)).load() == expected
    assert "skipped" not in path.read_text(), "as version 0.1 expects"
    mapped = journal(finished={"a-0": ShardFacts("a-0", 3, 0, "ab", evidence=Evidence(17), skipped=2)}, counted=True)
    JournalFile(str(path)).save(mapped)
    assert JournalFile(str(path)).load() == mapped
    assert os.listdir(tmp_path) == ["m"]


def test_differences_are_a_line_each():
    other = journal(source="f2", records=6, format="tar", options={"x": "1"}, shards=(("a", 0, 5),))
    assert list(journal().differences(other)) == [
        "source: f1 when it began, f2 now",
        "records: 5 when it began, 6 now",
        "format: syrah when it began, tar now",
        "codec: None when it began, not set now",
        "x: not set when it began, 1 now",
        "shards: 2 (a-0, ...) when it began, 1 (a, ...) now",
    ]
    assert list(journal().differences(journal())) == []


FINISHED = {"bytes": 3, "sha256": "ab", "mtime_ns": 17}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        *((text, ".*") for text in ("", "[]", "{}", "null", "[" * 100_000, '{"version": 2}')),
        ('{"version": 1, "finished": 3, "shards": []}', ".*"),
        ('{"version": 1, "finished": {}, "shards": [], "foreign": 1}', ".*"),
        ('{"version": 1, "finished": {}, "shards": [["a", 0, Infinity]]}', ".*"),
        ({"options": []}, "its options are not a table"),
        ({"parts": -1}, "parts is -1"),
        ({"part": "1"}, "part is '1'"),
        ({"finished": {"b": FINISHED}}, "it has no shard 'b', and yet says that it is finished"),
        ({"finished": {"a-0": {**FINISHED, "bytes": "3"}}}, "the size of the shard 'a-0' is '3'"),
        ({"finished": {"a-0": {**FINISHED, "records": -1}}}, "the number of records of the shard 'a-0' is -1"),
        ({"finished": {"a-0": {**FINISHED, "skipped": None}}}, "the number skipped of the shard 'a-0' is None"),
    ],
)
def test_what_is_not_a_journal(tmp_path, content, problem):
    (tmp_path / "m").write_text(
        content if isinstance(content, str) else json.dumps({**json.loads(journal().to_bytes()), **content})
    )
    told = rf"m is not a conversion journal \({problem}\): delete it, or pass overwrite=True"
    with pytest.raises(ConfigError, match=told):
        JournalFile(str(tmp_path / "m")).load()


def test_a_journal_is_not_written_through_a_link_or_to_a_directory(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "m").symlink_to(victim)
    (tmp_path / "m.tmp").symlink_to(victim)
    JournalFile(str(tmp_path / "m")).save(journal())
    assert victim.read_text() == "precious"
    assert JournalFile(str(tmp_path / "m")).load() == journal()
    (tmp_path / "d").mkdir()
    with pytest.raises(SourceError, match=r"cannot read .*d: Is a directory"):
        JournalFile(str(tmp_path / "d")).load()
    with pytest.raises(SourceError, match=r"cannot write .*d: Is a directory"):
        JournalFile(str(tmp_path / "d")).save(journal())


def test_a_journal_that_another_run_has_replaced_stays():
    pytest.importorskip("obstore")
    ours, theirs = (JournalFile("memory://journals/j", Remote.of(None, None)) for _ in range(2))
    ours.save(journal())
    theirs.load()
    theirs.save(journal(records=6))
    assert not ours.offer(journal())
    ours.remove()
    assert theirs.load() == journal(records=6)
    theirs.remove()
    assert theirs.load() is None


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_finished_shard_is_trusted_as_long_as_it_is_what_it_was(tmp_path, kind):
    path = tmp_path / "s"
    data = path
    if kind == "directory":
        path.mkdir()
        data = path / "data.mdb"
        (path / "lock.mdb").write_bytes(b"changes")
    data.write_bytes(b"0123456789")
    finished = describe_files("s", files_of(str(path)), 0)
    assert finished.sha256 == "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882"
    assert is_same(finished, str(path))
    os.utime(data, ns=(0, 0))
    assert is_same(finished, str(path)), "touched, but the same"
    if kind == "directory":
        (path / "lock.mdb").write_bytes(b"changed!")
        assert is_same(finished, str(path)), "opening an environment writes to its lock"
    data.write_bytes(b"0123456780")
    assert not is_same(finished, str(path))
    data.write_bytes(b"012345678")
    assert not is_same(finished, str(path))
    shutil.rmtree(path) if kind == "directory" else path.unlink()
    assert not is_same(finished, str(path))


@pytest.mark.parametrize(("count", "shards"), [(0, None), (1, 1), (10, None), (10, 3), (1000, 4)])
def test_records_come_out_as_they_went_in(tmp_path, count, shards):
    report = convert(source_of(count), tmp_path / "a.syr", shards=shards)
    assert (report.records, report.format, report.resumed, report.notes) == (count, "syrah", 0, ())
    assert report.bytes == sum(os.path.getsize(path) for path in report.paths)
    found = dataload.open(report.pattern)
    assert found.shard_lengths == tuple(np.diff([count * i // (shards or 1) for i in range((shards or 1) + 1)]))
    assert_equal_records(list(found), records_of(count))
    written = {os.path.basename(path) for path in report.paths}
    assert set(os.listdir(tmp_path)) == written | {".a.syr.convert.json", "dataload.json"}


@pytest.mark.parametrize(
    ("records", "shards", "text", "left"),
    [
        ([{"x": object()}], 1, "cannot write record 0 of the source", []),
        (
            [{"x": 1}, {"x": 2}, {"x": 3}, {"y": 4}],
            2,
            r"cannot write record 3 of the source to .*a-00001-of-00002\.syr: record 1 has the fields 'y'",
            [".a.syr.convert.json", ".a.syr.convert.log", "a-00000-of-00002.syr"],
        ),
    ],
)
def test_a_record_that_does_not_fit_is_named(tmp_path, records, shards, text, left):
    with pytest.raises(ConfigError, match=text):
        convert(dataload.MemorySource(records), tmp_path / "a.syr", shards=shards)
    assert sorted(os.listdir(tmp_path)) == left


@pytest.mark.parametrize(("shards", "name"), [(3, "a-00001-of-00003.syr"), (None, "a.syr")])
@pytest.mark.parametrize("resume", [False, True])
def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path, shards, name, resume):
    (tmp_path / name).write_text("old")
    with pytest.raises(ConfigError, match=rf"{name} exists"):
        convert(source_of(3), tmp_path / "a.syr", shards=shards, resume=resume)
    assert (os.listdir(tmp_path), (tmp_path / name).read_text()) == ([name], "old")
    convert(source_of(3), tmp_path / "a.syr", shards=shards, overwrite=True)
    assert len(dataload.open(tmp_path / "a*.syr")) == 3


class Stop(Exception):
    pass


def stop_at(limit):
    def progress(done, total):
        if done >= limit:
            raise Stop

    return progress


def interrupted(tmp_path, source, **options):
    """A conversion to three shards of ten records, of which one is finished."""
    with pytest.raises(Stop):
        convert(source, tmp_path / "a.syr", shards=3, progress=stop_at(15), **options)
    assert sorted(n for n in os.listdir(tmp_path) if n.startswith("a")) == ["a-00000-of-00003.syr"]


def test_resuming_writes_only_what_is_missing(tmp_path):
    source = source_of(30)
    interrupted(tmp_path, source)
    before = os.stat(tmp_path / "a-00000-of-00003.syr")
    seen = []
    report = convert(source, tmp_path / "a.syr", shards=3, resume=True, progress=lambda *p: seen.append(p))
    assert report.resumed == 10
    assert seen[0] == (10, 30)
    after = os.stat(tmp_path / "a-00000-of-00003.syr")
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert_equal_records(list(dataload.open(report.pattern)), records_of(30))


def test_a_shard_that_was_damaged_or_not_noted_is_written_again(tmp_path):
    source = source_of(30)
    interrupted(tmp_path, source)
    shard = tmp_path / "a-00000-of-00003.syr"
    shard.write_bytes(shard.read_bytes()[:-7])
    (tmp_path / "a-00001-of-00003.syr").write_text("killed between the rename and the journal")
    (tmp_path / ".a-00001-of-00003.syr.0123456789ab.tmp").write_text("half")
    report = convert(source, tmp_path / "a.syr", shards=3, resume=True)
    assert report.resumed == 0
    assert report.notes == (f"{shard} has changed since it was finished and was written again",)
    assert_equal_records(list(dataload.open(report.pattern)), records_of(30))


WRITES = rf"another process is writing to .*a\.syr.* \(process {os.getpid()} on .+, since 2\d+-.* UTC\): wait until it"


def test_a_second_conversion_to_the_same_destination_is_refused(tmp_path):
    refused = []

    def start_another(done, total):
        if done == total:
            with pytest.raises(SourceError, match=WRITES):
                convert(source_of(5), tmp_path / "a.syr", overwrite=True)
            refused.append(done)

    convert(source_of(9), tmp_path / "a.syr", progress=start_another)
    assert refused
    assert len(dataload.open(tmp_path / "a.syr")) == 9
    convert(source_of(5), tmp_path / "a.syr", overwrite=True)  # the first one has ended
    assert sorted(os.listdir(tmp_path)) == [".a.syr.convert.json", "a.syr", "dataload.json"]
    (tmp_path / ".a.syr.convert.json").write_text("damaged")
    with pytest.raises(ConfigError, match="is not a conversion journal"):
        convert(source_of(5), tmp_path / "a.syr", resume=True)
    assert convert(source_of(5), tmp_path / "a.syr", overwrite=True).records == 5
    with pytest.raises(ConfigError, match="resume keeps existing files, overwrite replaces them: pass only one"):
        convert(source_of(1), "a.syr", resume=True, overwrite=True)


@pytest.mark.parametrize("name", ["a.parquet", "a.lmdb"])
def test_shards_are_not_made_from_those_that_they_replace(tmp_path, name):
    convert(source_of(90), tmp_path / name, shards=3)
    (tmp_path / "link").symlink_to(tmp_path)
    with dataload.open(tmp_path / "link") as source:
        for part in (source, source[40:]):
            with pytest.raises(ConfigError, match=r"a-00000-of-00003.* is a file of the source"):
                convert(part, tmp_path / name, shards=3, overwrite=True)
        path = tmp_path / f"a-00000-of-00003{name[1:]}"
        assert convert(source, path, overwrite=True).records == 90  # one file is replaced at the end
    with dataload.open(path) as source:
        assert_equal_records(source, records_of(90))


def test_a_look_at_a_local_shard_finds_size_and_time(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    found = find_shard(str(tmp_path / "x"))
    assert (found.bytes, found.evidence.mtime_ns) == (3, os.stat(tmp_path / "x").st_mtime_ns)


def test_keys_are_made_fit_for_tar(tmp_path):
    records = [{"__key__": key, "cls": b"1"} for key in ("a b", "c.d/e.f", "g\th\0")]
    convert(dataload.MemorySource(records), tmp_path / "a.tar")
    with dataload.open(tmp_path / "a.tar") as source:
        assert [record["__key__"] for record in source] == ["a_b", "c.d/e_f", "g_h_"]
