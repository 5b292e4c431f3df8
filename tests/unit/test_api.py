"""dataload.open and dataload.create: how paths, patterns and formats are understood, and what is said otherwise."""

import os

import numpy as np
import pytest

import dataload
from dataload import ConfigError, CorruptFileError, SourceNotFoundError, UnsupportedFormatError


def write(path, values, **options):
    with dataload.create(path, **options) as writer:
        writer.extend({"x": np.array([value])} for value in values)
    return str(path)


def values(source):
    return [int(record["x"][0]) for record in source]


@pytest.fixture
def shards(tmp_path):
    for number in range(12):
        write(tmp_path / f"train-{number:03}.syr", [2 * number, 2 * number + 1])
    return tmp_path


def test_one_path_as_text_or_object(tmp_path):
    path = write(tmp_path / "a.syr", [1, 2])
    assert values(dataload.open(path)) == values(dataload.open(tmp_path / "a.syr")) == [1, 2]


def test_brace_ranges(shards):
    assert values(dataload.open(f"{shards}/train-{{002..004}}.syr")) == [4, 5, 6, 7, 8, 9]
    assert values(dataload.open(f"{shards}/train-{{011..010}}.syr")) == [22, 23, 20, 21]
    assert values(dataload.open(f"{shards}/train-{{000,007}}.syr")) == [0, 1, 14, 15]
    assert len(dataload.open(f"{shards}/{{train}}-{{000..011}}.syr".replace("{train}", "train"))) == 24


def test_globs_and_directories_are_taken_by_name(shards):
    (shards / ".train-999.syr").write_bytes(b"hidden: somebody's temporary")
    (shards / "notes.txt").write_text("not a shard")
    assert values(dataload.open(f"{shards}/train-00*.syr")) == list(range(20))
    assert values(dataload.open(shards)) == list(range(24))
    assert dataload.open(shards).shard_lengths == (2,) * 12


def test_lists_keep_their_order_and_may_hold_patterns(shards):
    source = dataload.open([f"{shards}/train-003.syr", f"{shards}/train-00[01].syr"])
    assert values(source) == [6, 7, 0, 1, 2, 3]


def test_a_name_with_pattern_characters_that_exists_is_that_file(tmp_path):
    write(tmp_path / "a.syr", [5])
    path = (tmp_path / "a.syr").rename(tmp_path / "a[1]{2..3}.syr")
    assert values(dataload.open(path)) == [5]


def test_slices_of_array_records(tmp_path):
    pytest.importorskip("array_record")
    with dataload.create(tmp_path / "a.array_record") as writer:
        writer.extend(b"%d" % i for i in range(6))
    assert list(dataload.open(f"{tmp_path}/a.array_record[2:4]")) == [b"2", b"3"]
    assert list(dataload.open([f"{tmp_path}/a.array_record[4:6]", f"{tmp_path}/a.array_record[0:1]"])) == [
        b"4",
        b"5",
        b"0",
    ]


def test_format_by_content_prefix_and_argument(tmp_path):
    path = write(tmp_path / "odd.bin", [3], format="syrah")
    assert values(dataload.open(path)) == [3]
    assert values(dataload.open(f"syrah:{path}")) == [3]
    assert values(dataload.open(path, format="syrah")) == [3]
    other = write(f"syrah:{tmp_path / 'other.bin'}", [4])
    assert other.endswith("other.bin")
    assert values(dataload.open(tmp_path / "other.bin")) == [4]


def test_sources_that_are_no_files():
    assert dataload.open("range:4").read_batch([3, 0])["index"].tolist() == [3, 0]
    assert dataload.open(3, format="range")[2] == {"index": 2}
    assert dataload.open([{"x": 1}], format="memory")[0] == {"x": 1}
    with pytest.raises(ConfigError, match=r"format 'range' takes the number of records \(range:1000\), got 'x'"):
        dataload.open("range:x")
    with pytest.raises(ConfigError, match="format 'memory' takes data, not a path"):
        dataload.open("memory:x")


def test_lmdb_environments_are_told_apart_by_content(tmp_path):
    pytest.importorskip("lmdb")
    write(tmp_path / "one.bin", [1], format="torchrecord")
    with dataload.create(tmp_path / "two.bin", format="lmdb") as writer:
        writer.write(b"raw")
    assert type(dataload.open(tmp_path / "one.bin")).__name__ == "TorchRecordSource"
    assert type(dataload.open(tmp_path / "two.bin")).__name__ == "LMDBSource"
    assert dataload.open(tmp_path / "two.bin" / "data.mdb")[0] == b"raw"


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("missing.syr", r"there is no .*missing\.syr: the directory .* exists, nothing of that name is in it"),
        ("no/such/dir/x.tar", r"there is no .*x\.tar: the directory .* exists"),
        ("missing", "there is no .*missing"),
        ("*.syr", r"nothing matches the pattern .*\*\.syr"),
        ("train-{0..2}.syr", r"there is no .*train-0\.syr"),
        ("", "has no files with a suffix of a known format"),
    ],
)
def test_nothing_there(tmp_path, path, match):
    with pytest.raises(SourceNotFoundError, match=match) as caught:
        dataload.open(os.path.join(tmp_path, path))
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (
            b"hello world",
            r"is not in a known format: byte 0 has b'hello wo'; array_record, .*syrah, .*tokens.* are detected",
        ),
        (b"", "the file is empty"),
        (b"\x1f\x8b\x08rest", "byte 0 has the magic bytes of gzip: decompress it first"),
        (b"\x28\xb5\x2f\xfdrest", "zstd"),
        (bytes(1024), "not in a known format"),
    ],
)
def test_content_in_no_known_format(tmp_path, content, match):
    path = tmp_path / "data.bin"
    path.write_bytes(content)
    with pytest.raises(UnsupportedFormatError, match=match) as caught:
        dataload.open(path)
    assert caught.value.path == str(path)


def test_a_suffix_that_promises_something_else(tmp_path):
    path = tmp_path / "x.syr"
    path.write_bytes(b"not syrah at all, but long enough")
    with pytest.raises(CorruptFileError, match=r"x\.syr, byte 0: expected the magic bytes b'GS', found b'no'"):
        dataload.open(path)


def test_formats_are_not_mixed(tmp_path):
    write(tmp_path / "a.syr", [1])
    write(tmp_path / "b.tar", [1])
    with pytest.raises(
        ConfigError, match=r"the files of a data set have one format, got .*a\.syr \(syrah\), .*b\.tar \(tar\)"
    ):
        dataload.open([tmp_path / "a.syr", tmp_path / "b.tar"])
    assert len(dataload.open(tmp_path, format="syrah")) == 1


def test_unknown_formats_and_options(tmp_path):
    path = write(tmp_path / "a.syr", [1])
    with pytest.raises(ConfigError, match=r"there is no format 'sirah': did you mean 'syrah'"):
        dataload.open(path, format="sirah")
    with pytest.raises(ConfigError, match=r"there is no format 'sirah'"):
        dataload.open("sirah:x")
    with pytest.raises(ConfigError, match=r"format 'syrah' has no option 'shape': did you mean 'shapes'"):
        dataload.open(path, shape={})
    with pytest.raises(ConfigError, match=r"has no field 'y': Known: x"):
        dataload.open(path, fields=["y"])
    with pytest.raises(ConfigError, match="no path was given"):
        dataload.open([])
    with pytest.raises(TypeError, match=r"paths are text, path objects or a list of these, got 3 \(int\)"):
        dataload.open([3])


def test_create_refuses(tmp_path):
    with pytest.raises(ConfigError, match=r"the suffix of '.*x\.unknown' does not name a format: pass format="):
        dataload.create(tmp_path / "x.unknown")
    with pytest.raises(ConfigError, match="format 'range' is read-only; choose one that can be written: syrah,"):
        dataload.create(tmp_path / "x", format="range")
    path = write(tmp_path / "a.syr", [1])
    with pytest.raises(ConfigError, match=r"a\.syr exists: choose another name, or pass overwrite=True"):
        dataload.create(path)
    write(path, [2], overwrite=True)
    assert values(dataload.open(path)) == [2]


def test_from_config(tmp_path):
    write(tmp_path / "train.syr", range(10))
    (tmp_path / "train.toml").write_text('[source]\npath = "train.syr"\n[loader]\nbatch_size = 4\nshuffle = true\n')
    with dataload.from_config(tmp_path / "train.toml", overrides=["loader.batch_size=5"]) as loader:
        batches = [batch["x"][:, 0].tolist() for batch in loader]
    assert [len(batch) for batch in batches] == [5, 5]
    assert sorted(value for batch in batches for value in batch) == list(range(10))
