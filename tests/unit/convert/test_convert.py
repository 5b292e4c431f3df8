from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

import dataload
from dataload.convert import convert
from dataload.convert.blocks import BlockSize, read_ahead, size_of
from dataload.convert.manifest import Finished, Manifest, examine, is_intact, remove_temporaries
from dataload.convert.plan import Shard, destination_format, manifest_path, plan_shards, summarize_paths
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.sources.registry import get_format

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


# The plan


def plan(destination, length, shards=None, records_per_shard=None, entry=SYRAH):
    found = plan_shards(destination, entry, length, shards=shards, records_per_shard=records_per_shard)
    return [(shard.path, shard.start, shard.stop) for shard in found]


def test_one_file_of_the_very_name():
    assert plan("out/a.syr", 5) == [("out/a.syr", 0, 5)]
    assert plan("out/{odd} {0}.syr", 5) == [("out/{odd} {0}.syr", 0, 5)]
    assert plan("a.syr/", 0) == [("a.syr", 0, 0)]


def test_shards_are_split_evenly():
    assert plan("d/train.syr", 10, shards=3) == [
        ("d/train-00000-of-00003.syr", 0, 3),
        ("d/train-00001-of-00003.syr", 3, 6),
        ("d/train-00002-of-00003.syr", 6, 10),
    ]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("most", [1, 3, 8, 5000])
def test_at_most_so_many_records(length, most):
    spans = [(start, stop) for _, start, stop in plan("a.syr", length, records_per_shard=most)]
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(length))
    sizes = [stop - start for start, stop in spans]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert len(spans) == max(1, -(-length // most)), "no more shards than it needs"


@pytest.mark.parametrize(
    ("destination", "name"),
    [
        ("a.syr", "a-00000-of-00002.syr"),
        ("a.SYR", "a-00000-of-00002.SYR"),
        ("a", "a-00000-of-00002"),
        ("a.b", "a.b-00000-of-00002"),
        ("{odd}.syr", "{odd}-00000-of-00002.syr"),
        ("{shard}.syr", "0.syr"),
        ("p-{shard:03d}.syr-of-{shards}", "p-000.syr-of-2"),
    ],
)
def test_names_of_shards(destination, name):
    assert plan(destination, 5, shards=2)[0][0] == name


def test_a_pattern_without_a_number_of_shards_is_one_shard():
    assert plan("a-{shard:02d}.syr", 5) == [("a-00.syr", 0, 5)]


def test_the_directory_is_taken_as_it_is():
    assert plan("{shard}/a.syr", 2, shards=2)[1] == ("{shard}/a-00001-of-00002.syr", 1, 2)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"shards": 0}, "shards must be an integer >= 1, got 0"),
        ({"shards": True}, "shards must be an integer >= 1, got True"),
        ({"records_per_shard": -1}, "records_per_shard must be an integer >= 1, got -1"),
        ({"shards": 6}, "6 shards for 5 records: a shard holds at least one"),
        ({"shards": 2, "records_per_shard": 2}, "shards and records_per_shard both say how many files"),
        ({"shards": 2, "destination": "a-{shards}.syr"}, "2 shards would have the one name 'a-2.syr': put {shard:05d}"),
        ({"shards": 2, "destination": "{shard}-{other}"}, "'{shard}-{other}' is no pattern for names of shards"),
        ({"shards": 2, "destination": "{shard}-{0}"}, "is no pattern for names of shards"),
        ({"shards": 2, "destination": "{shard}-{"}, "is no pattern for names of shards"),
    ],
)
def test_plans_that_cannot_be(arguments, match):
    import re

    with pytest.raises(ConfigError, match=re.escape(match)):
        plan(**{"destination": "a.syr", "length": 5, **arguments})


def test_the_format_of_the_destination():
    assert destination_format("a.tar", None).name == "tar"
    assert destination_format("a.tar", "syrah").name == "syrah"
    with pytest.raises(ConfigError, match=r"the end of 'a\.x' names no format: pass format=, one of array_record, "):
        destination_format("a.x", None)


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (["a.syr"], "a.syr"),
        (["a-0.syr", "a-1.syr"], "a-{0..1}.syr"),
        (["a-8.syr", "a-9.syr", "a-10.syr"], "a-{8..10}.syr"),
        (["t2/a-00-of-02", "t2/a-01-of-02"], "t2/a-{00..01}-of-02"),
        (["1", "2"], "{1..2}"),
        (["a", "b"], "a ... b (2 files)"),
        (["a1", "a3"], "a1 ... a3 (2 files)"),
    ],
)
def test_paths_as_one_text(paths, text):
    assert summarize_paths(paths) == text
    if "..." not in text:
        from dataload._util.indexing import expand_braces

        assert expand_braces(text) == paths


def test_the_manifest_is_hidden_and_matched_by_no_pattern_of_shards():
    assert manifest_path("d/train.syr") == "d/.train.syr.convert.json"
    assert manifest_path("d/t-{shard:05d}-of-{shards}.syr") == "d/.t-N-of-N.syr.convert.json"


# Blocks


class Recorder:
    """A source that notes how it is read."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.blocks = []

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        raise AssertionError("read in blocks")

    def __getitems__(self, indices):
        self.blocks.append(indices.tolist())
        return [bytes(self.sizes[i]) for i in indices]


def test_blocks_cover_the_range_in_order():
    source = Recorder([10] * 10_000)
    found = [(first, len(records)) for first, records in read_ahead(source, 3, 10_000)]
    assert [i for block in source.blocks for i in block] == list(range(3, 10_000))
    assert [first for first, _ in found] == [block[0] for block in source.blocks]
    assert len(source.blocks) < 20, "small records are read many at a time"


def test_the_memory_of_blocks_does_not_depend_on_the_size_of_records():
    source = Recorder([1 << 20] * 200)
    for _ in read_ahead(source, 0, 200):
        pass
    assert max(map(len, source.blocks)) <= 16
    assert max(map(len, source.blocks)) > 4


def test_a_block_of_small_records_does_not_make_the_next_one_huge():
    size = BlockSize()
    size.learn([b"x"])
    assert size.records == 8
    size.learn([b""] * 8)
    assert size.records == 64
    size.learn([bytes(64 << 20)])
    assert size.records == 1
    for _ in range(10):
        size.learn([b""])
    assert size.records == 4096


def test_sizes_of_records():
    assert size_of({"a": np.zeros((2, 3)), "b": b"123", "c": "ab", "d": 1}) == 48 + 3 + 2 + 8


def test_sources_with_only_getitem_are_read():
    assert [record for _, records in read_ahead(range(3), 0, 3) for record in records] == [0, 1, 2]


def test_an_error_of_the_source_comes_out_and_the_thread_ends():
    import threading

    before = threading.active_count()

    class Bad:
        def __getitem__(self, index):
            if index == 5:
                raise CorruptFileError("bad", path="p", index=5)
            return b""

    with pytest.raises(CorruptFileError, match="p, record 5: bad"):
        list(read_ahead(Bad(), 0, 10))
    assert threading.active_count() == before


# The manifest


def manifest(**changes):
    first = Manifest.of(
        [Shard("d/a-0", 0, 2), Shard("d/a-1", 2, 5)], source="f1", records=5, format="syrah", options={"codec": "None"}
    )
    return replace(first, **changes)


def test_manifest_round_trip(tmp_path):
    path = str(tmp_path / "m")
    one = manifest().with_finished("a-0", Finished(3, "ab", 17))
    one.save(path)
    assert Manifest.load(path) == one
    assert os.listdir(tmp_path) == ["m"]
    assert Manifest.load(str(tmp_path / "none")) is None


def test_differences_are_a_line_each():
    other = manifest(source="f2", records=6, format="tar", options={"x": "1"}, shards=(("a", 0, 5),))
    assert list(manifest().differences(other)) == [
        "source: fingerprint f1 when it was begun, f2 now",
        "records: 5 when it was begun, 6 now",
        "format: syrah when it was begun, tar now",
        "codec: None when it was begun, None now".replace("None when", "None when"),
        "x: None when it was begun, 1 now",
        "shards: 2 (a-0, ...) when it was begun, 1 (a, ...) now",
    ]
    assert list(manifest().differences(manifest())) == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"version": 2}', '{"version": 1, "finished": 3, "shards": []}']
)
def test_what_is_no_manifest(tmp_path, text):
    (tmp_path / "m").write_text(text)
    with pytest.raises(
        ConfigError, match=r"m is no manifest of a conversion \(.*\): delete it, or pass overwrite=True"
    ):
        Manifest.load(str(tmp_path / "m"))


def test_a_manifest_with_a_foreign_key(tmp_path):
    manifest().save(str(tmp_path / "m"))
    table = json.loads((tmp_path / "m").read_text())
    (tmp_path / "m").write_text(json.dumps({**table, "more": 1}))
    with pytest.raises(ConfigError, match="is no manifest of a conversion"):
        Manifest.load(str(tmp_path / "m"))


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_finished_shard_is_trusted_as_long_as_it_is_what_it_was(tmp_path, kind):
    path = tmp_path / "s"
    data = path
    if kind == "directory":
        path.mkdir()
        data = path / "data.mdb"
        (path / "lock.mdb").write_bytes(b"changes")
    data.write_bytes(b"0123456789")
    finished = examine(str(path))
    assert finished.sha256 == "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882"
    assert is_intact(str(path), finished)
    os.utime(data, ns=(0, 0))
    assert is_intact(str(path), finished), "touched, but the same"
    if kind == "directory":
        (path / "lock.mdb").write_bytes(b"changed!")
        assert is_intact(str(path), finished), "opening an environment writes to its lock"
    data.write_bytes(b"0123456780")
    assert not is_intact(str(path), finished)
    data.write_bytes(b"012345678")
    assert not is_intact(str(path), finished)
    shutil.rmtree(path) if kind == "directory" else path.unlink()
    assert not is_intact(str(path), finished)


def test_temporaries_of_killed_writers_go(tmp_path):
    (tmp_path / ".a[1].syr.0123.tmp").touch()
    (tmp_path / ".a[1].syr.4567.tmp").mkdir()
    (tmp_path / ".b.syr.0123.tmp").touch()
    remove_temporaries(str(tmp_path / "a[1].syr"))
    assert os.listdir(tmp_path) == [".b.syr.0123.tmp"]


# Converting


@pytest.mark.parametrize(("count", "shards"), [(0, None), (1, 1), (10, None), (10, 3), (1000, 4)])
def test_records_come_out_as_they_went_in(tmp_path, count, shards):
    report = convert(source_of(count), tmp_path / "a.syr", shards=shards)
    assert (report.records, report.format, report.resumed, report.notes) == (count, "syrah", 0, ())
    assert report.bytes == sum(os.path.getsize(path) for path in report.paths)
    found = dataload.open(report.pattern)
    assert found.shard_lengths == tuple(np.diff([count * i // (shards or 1) for i in range((shards or 1) + 1)]))
    assert_equal_records(list(found), records_of(count))
    written = {os.path.basename(path) for path in report.paths}
    assert set(os.listdir(tmp_path)) == written | {".a.syr.convert.json"}


def test_progress_counts_records(tmp_path):
    seen = []
    convert(source_of(100), tmp_path / "a.syr", shards=2, progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 100)
    assert seen[-1] == (100, 100)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert (50, 100) in seen


def test_a_source_of_the_users_own(tmp_path):
    class Squares:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"x": np.array(index * index)}

    convert(Squares(), tmp_path / "a.syr")
    assert dataload.open(tmp_path / "a.syr").read_batch(range(4))["x"].tolist() == [0, 1, 4, 9]
    assert convert(Squares(), tmp_path / "a.syr", resume=True).resumed == 4


def test_plain_bytes_become_a_field(tmp_path):
    report = convert(dataload.MemorySource([b"one", b"two"]), tmp_path / "a.syr")
    assert report.notes == ("the records have no fields: each becomes the field 'data'",)
    assert list(dataload.open(tmp_path / "a.syr")) == [{"data": b"one"}, {"data": b"two"}]


def test_keys_of_tar_samples_are_dropped_or_kept(tmp_path):
    source = dataload.MemorySource([{"__key__": "a", "x": b"1"}])
    report = convert(source, tmp_path / "a.syr")
    assert report.notes == ("the field '__key__' of tar samples is dropped; keep_key=True keeps it",)
    assert dataload.open(tmp_path / "a.syr")[0] == {"x": b"1"}
    report = convert(source, tmp_path / "b.syr", keep_key=True)
    assert report.notes == ()
    assert dataload.open(tmp_path / "b.syr")[0] == {"__key__": "a", "x": b"1"}


def test_a_record_that_does_not_fit_is_named(tmp_path):
    source = dataload.MemorySource([{"x": 1}, {"x": 2}, {"x": 3}, {"y": 4}])
    with pytest.raises(
        ConfigError,
        match=r"record 3 of the source cannot be written to .*a-00001-of-00002\.syr: record 1 has fields 'y'; the",
    ):
        convert(source, tmp_path / "a.syr", shards=2)
    assert sorted(os.listdir(tmp_path)) == [".a.syr.convert.json", "a-00000-of-00002.syr"]


def test_a_failure_in_the_first_shard_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match="record 0 of the source cannot be written"):
        convert(dataload.MemorySource([{"x": object()}]), tmp_path / "a.syr")
    assert os.listdir(tmp_path) == []


def test_formats_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="format 'range' is only read"):
        convert(source_of(1), tmp_path / "a", format="range")


def test_options_that_the_writer_does_not_have(tmp_path):
    with pytest.raises(ConfigError, match=r"format 'syrah' has no option 'codek': Known: "):
        convert(source_of(1), tmp_path / "a.syr", writer_options={"codek": 1})


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(SourceNotFoundError, match=r"there is no directory .*none to write to"):
        convert(source_of(1), tmp_path / "none" / "a.syr")


# What is there already


def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path):
    (tmp_path / "a-00001-of-00003.syr").write_text("old")
    with pytest.raises(
        ConfigError, match=r"a-00001-of-00003\.syr exists: choose another name, or pass overwrite=True to replace it$"
    ):
        convert(source_of(3), tmp_path / "a.syr", shards=3)
    assert os.listdir(tmp_path) == ["a-00001-of-00003.syr"]
    convert(source_of(3), tmp_path / "a.syr", shards=3, overwrite=True)
    assert len(dataload.open(tmp_path / "a-*.syr")) == 3


def test_several_existing_files_are_counted(tmp_path):
    convert(source_of(3), tmp_path / "a.syr", shards=3)
    with pytest.raises(ConfigError, match=r"exists \(and 2 more\): choose another name, or pass overwrite=True"):
        convert(source_of(3), tmp_path / "a.syr", shards=3)


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


def test_resuming_what_is_finished_does_nothing(tmp_path):
    first = convert(source_of(30), tmp_path / "a.syr", shards=3)
    again = convert(source_of(30), tmp_path / "a.syr", shards=3, resume=True)
    assert again.resumed == 30
    assert (again.paths, again.bytes) == (first.paths, first.bytes)


def test_resuming_what_was_never_begun_begins(tmp_path):
    assert convert(source_of(3), tmp_path / "a.syr", resume=True).resumed == 0
    assert len(dataload.open(tmp_path / "a.syr")) == 3


def test_resuming_does_not_take_a_foreign_file_for_its_own(tmp_path):
    (tmp_path / "a.syr").write_text("mine")
    with pytest.raises(ConfigError, match=r"a\.syr exists"):
        convert(source_of(3), tmp_path / "a.syr", resume=True)
    assert (tmp_path / "a.syr").read_text() == "mine"


def test_a_shard_that_was_damaged_meanwhile_is_written_again(tmp_path):
    source = source_of(30)
    interrupted(tmp_path, source)
    shard = tmp_path / "a-00000-of-00003.syr"
    shard.write_bytes(shard.read_bytes()[:-7])
    report = convert(source, tmp_path / "a.syr", shards=3, resume=True)
    assert report.resumed == 0
    assert report.notes == (f"{shard} was not as it had been finished, and is written again",)
    assert_equal_records(list(dataload.open(report.pattern)), records_of(30))


def test_a_shard_that_was_finished_but_not_noted_is_written_again(tmp_path):
    source = source_of(30)
    interrupted(tmp_path, source)
    (tmp_path / "a-00001-of-00003.syr").write_text("killed between the rename and the manifest")
    report = convert(source, tmp_path / "a.syr", shards=3, resume=True)
    assert_equal_records(list(dataload.open(report.pattern)), records_of(30))


def test_an_interrupted_conversion_is_not_begun_anew_silently(tmp_path):
    interrupted(tmp_path, source_of(30))
    with pytest.raises(
        ConfigError,
        match=r"exists: choose another name, or pass resume=True to go on with the conversion that was interrupted, or "
        r"overwrite=True to replace it",
    ):
        convert(source_of(30), tmp_path / "a.syr", shards=3)
    report = convert(source_of(30), tmp_path / "a.syr", shards=3, overwrite=True)
    assert report.resumed == 0


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"source": source_of(30)[:29]},
            ["source: fingerprint", "records: 30 when it was begun, 29 now", "shards: 3 (a-"],
        ),
        ({"shards": 4}, ["shards: 3 (a-00000-of-00003.syr, ...) when it was begun, 4 (a-00000-of-00004.syr, ...) now"]),
        ({"keep_key": True}, ["keep_key: False when it was begun, True now"]),
    ],
)
def test_another_source_or_plan_is_refused(tmp_path, changes, lines):
    interrupted(tmp_path, source_of(30))
    arguments = {"source": source_of(30), "destination": tmp_path / "a.syr", "shards": 3, **changes}
    with pytest.raises(ConfigError, match=r"a\.syr\.convert\.json is of another conversion") as error:
        convert(**arguments, resume=True)
    _, *found = str(error.value).split("\n  ")
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True))


def make_key(index, record):
    return f"k{index}"


class Codec:
    def encode(self, record):
        return repr(sorted(record)).encode()

    def decode(self, data):
        return {"names": data}


@pytest.mark.parametrize(("suffix", "options"), [(".tar", {"key": make_key}), (".lmdb", {"codec": Codec()})])
def test_functions_and_objects_among_the_options_do_not_keep_from_resuming(tmp_path, suffix, options):
    path = tmp_path / f"a{suffix}"
    convert(source_of(3), path, writer_options=options)
    if "codec" in options:
        options = {"codec": Codec()}  # another object of the class, as in another process
    assert convert(source_of(3), path, writer_options=options, resume=True).resumed == 3
    table = json.loads((tmp_path / f".a{suffix}.convert.json").read_text())
    assert not [value for value in table["options"].values() if " at 0x" in value]


def test_resume_and_overwrite_contradict():
    with pytest.raises(ConfigError, match="resume keeps what is there, overwrite replaces it: give one of them"):
        convert(source_of(1), "a.syr", resume=True, overwrite=True)


def test_leftovers_of_a_killed_writer_go_when_resuming(tmp_path):
    source = source_of(30)
    interrupted(tmp_path, source)
    (tmp_path / ".a-00001-of-00003.syr.0123456789ab.tmp").write_text("half")
    convert(source, tmp_path / "a.syr", shards=3, resume=True)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
