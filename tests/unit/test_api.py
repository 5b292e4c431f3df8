"""dataload.open and dataload.create: how paths, patterns and formats are understood, and what is said otherwise."""

import os

import numpy as np
import pytest
from written import written

import dataload
from dataload import ConfigError, CorruptFileError
from dataload.errors import SourceNotFoundError, UnsupportedFormatError


def write(path, values, **options):
    written(path, [{"x": np.array([value])} for value in values], **options)
    return str(path)


def values(source):
    return [int(record["x"][0]) for record in source]


def test_shards_are_opened_by_ranges_patterns_and_directories(tmp_path):
    for number in range(12):
        write(tmp_path / f"train-{number:03}.syr", [2 * number, 2 * number + 1])
    assert values(dataload.open(f"{tmp_path}/train-{{002..004}}.syr")) == [4, 5, 6, 7, 8, 9]
    assert values(dataload.open(f"{tmp_path}/train-{{011..010}}.syr")) == [22, 23, 20, 21]
    assert values(dataload.open(f"{tmp_path}/train-{{000,007}}.syr")) == [0, 1, 14, 15]
    assert len(dataload.open(f"{tmp_path}/{{train}}-{{000..011}}.syr".replace("{train}", "train"))) == 24
    (tmp_path / ".train-999.syr").write_bytes(b"hidden: somebody's temporary")
    (tmp_path / "notes.txt").write_text("not a shard")
    assert values(dataload.open(f"{tmp_path}/train-00*.syr")) == list(range(20))
    assert values(dataload.open(tmp_path)) == list(range(24))
    assert dataload.open(tmp_path).shard_lengths == (2,) * 12


def test_slices_of_array_records(tmp_path):
    path = written(f"{tmp_path}/a.array_record", [b"%d" % i for i in range(6)])
    assert list(dataload.open(f"{path}[2:4]")) == [b"2", b"3"]
    assert list(dataload.open([f"{path}[4:6]", f"{path}[0:1]"])) == [b"4", b"5", b"0"]


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write("~/data/a.syr", [1, 2])
    assert values(dataload.open("syrah:~/data/a.syr")) == [1, 2]
    assert values(dataload.open(tmp_path / "data" / "a.syr")) == [1, 2]


def test_sources_that_are_no_files():
    assert dataload.open("range:4").read_batch([3, 0])["index"].tolist() == [3, 0]
    assert dataload.open(3, format="range")[2] == {"index": 2}
    assert dataload.open([{"x": 1}], format="memory")[0] == {"x": 1}
    with pytest.raises(TypeError, match=r"a path must be text or a path object, got 3 \(int\)"):
        dataload.open([3])


def test_lmdb_environments_are_told_apart_by_content(tmp_path):
    pytest.importorskip("lmdb")
    write(tmp_path / "one.bin", [1], format="torchrecord")
    written(tmp_path / "two.bin", [b"raw"], format="lmdb")
    assert type(dataload.open(tmp_path / "one.bin")).__name__ == "TorchRecordSource"
    assert type(dataload.open(tmp_path / "two.bin")).__name__ == "LMDBSource"
    assert dataload.open(tmp_path / "two.bin" / "data.mdb")[0] == b"raw"


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("missing.syr", r"there is no .*missing\.syr: the directory .* exists, but has no entry of that name"),
        ("no/such/dir/x.tar", r"there is no .*x\.tar: the directory .* exists"),
        ("missing", "there is no .*missing"),
        ("*.syr", r"nothing matches the pattern .*\*\.syr"),
        ("train-{0..2}.syr", r"there is no .*train-0\.syr"),
        ("", "has no files with a suffix of a known format"),
    ],
)
def test_nothing_there(tmp_path, path, match):
    with pytest.raises(SourceNotFoundError, match=match):
        dataload.open(os.path.join(tmp_path, path))


def test_a_shard_of_another_number_is_no_similar_name(tmp_path):
    write(tmp_path / "a-00003.syr", [1])
    with pytest.raises(SourceNotFoundError, match=r"did you mean 'a-00003.syr' in it\?"):
        dataload.open(tmp_path / "b-00003.syr")
    with pytest.raises(SourceNotFoundError, match="has no entry of that name"):
        dataload.open(tmp_path / "a-00004.syr")


def test_the_name_with_which_shards_were_created(tmp_path):
    path = written(tmp_path / "a (1).syr", [{"x": np.int64(i)} for i in range(2)], records_per_shard=1)
    with pytest.raises(SourceNotFoundError) as caught:
        dataload.open(path)
    pattern = str(tmp_path / "a (1)-*.syr")
    assert str(caught.value).endswith(f"has shards that begin with this name: pass {pattern!r}, or the directory")
    assert len(dataload.open(pattern)) == len(dataload.open(tmp_path)) == 2


UNKNOWN = r"is not in a known format: byte 0 has {}; array_record, .*syrah, .*tokens.* are detected"


@pytest.mark.parametrize(
    ("name", "content", "error", "match"),
    [
        ("data.bin", b"hello world", UnsupportedFormatError, UNKNOWN.format("b'hello wo'")),
        ("data.bin", b"", UnsupportedFormatError, "the file is empty"),
        ("data.bin", b"\x1f\x8b\x08rest", UnsupportedFormatError, "has the magic bytes of gzip: decompress it first"),
        ("data.bin", b"\x28\xb5\x2f\xfdrest", UnsupportedFormatError, "zstd"),
        ("data.bin", bytes(1024), UnsupportedFormatError, "not in a known format"),
        (
            "x.syr",
            b"not syrah at all, but long enough",
            CorruptFileError,
            r"x\.syr, byte 0: expected the magic bytes b'GS', found b'no'",
        ),
    ],
)
def test_content_in_no_known_format(tmp_path, name, content, error, match):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(error, match=match) as caught:
        dataload.open(path)
    assert caught.value.path == str(path)


MIXED = r"the files of a data set have one format, got .*a\.syr \(syrah\), .*b\.tar \(tar\)"


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: dataload.open("a.syr", format="sirah"), r"there is no format 'sirah': did you mean 'syrah'"),
        (lambda: dataload.open("sirah:x"), r"there is no format 'sirah'"),
        (lambda: dataload.open("a.syr", shape={}), "format 'syrah' has no option 'shape': did you mean 'shapes'"),
        (lambda: dataload.open("a.syr", fields=["y"]), r"has no field 'y': choose from x"),
        (lambda: dataload.open([]), "no path was given"),
        (lambda: dataload.open("**/*.syr"), r"\*\*/\*\.syr: \*\* is not supported: write \* for each level of folders"),
        (lambda: dataload.open(["a.syr", "b.tar"]), MIXED),
        (lambda: dataload.open("range:x"), r"format 'range' takes the number of records \(range:1000\), got 'x'"),
        (lambda: dataload.open("memory:x"), "format 'memory' takes data, not a path"),
        (lambda: dataload.create("x.unknown"), r"the suffix of '.*x\.unknown' does not name a format: pass format="),
        (
            lambda: dataload.create("x", format="range"),
            "format 'range' is read-only; choose one that can be .*: syrah,",
        ),
        (lambda: dataload.create("a.syr"), r"a\.syr exists"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, call, match):
    monkeypatch.chdir(tmp_path)
    write("a.syr", [1])
    write("b.tar", [1])
    with pytest.raises(ConfigError, match=match):
        call()
    assert values(dataload.open(".", format="syrah")) == [1]
    write("a.syr", [2], overwrite=True)
    assert values(dataload.open("a.syr")) == [2]


def test_a_table_or_a_set_is_not_a_path():
    with pytest.raises(TypeError, match="open takes paths, got a dict: pass it to a Loader as it is"):
        dataload.open({"x": [1]})
    with pytest.raises(TypeError, match="a set of paths has another order in each process"):
        dataload.open({"a.tar", "b.tar"})
