import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from made_files import pack

from dataload.errors import ConfigError, CorruptFileError, SourceError, SourceNotFoundError
from dataload.sources.tar.reader import TarSource
from dataload.sources.tar.writer import TarWriter, write_index


def write(path: Path, *records, **options) -> Path:
    with TarWriter(path, **options) as writer:
        writer.extend(records)
    return path


def listing(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(info.name, tar.extractfile(info).read()) for info in tar.getmembers()]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "x.tar"


def test_members_and_index(path):
    write(path, {"__key__": "d/a", "jpg": b"abc", "cls": 3}, {"jpg": b"", "cls": 12})
    assert listing(path) == [
        ("d/a.jpg", b"abc"), ("d/a.cls", b"3"), ("00000001.jpg", b""), ("00000001.cls", b"12"),
    ]  # fmt: skip
    assert path.with_suffix(".idx").read_text() == (
        "v1.2 2\njpg 1536 3 d/a.jpg cls 2560 1 d/a.cls\njpg 3584 0 00000001.jpg cls 4096 2 00000001.cls\n"
    )
    assert path.read_bytes()[-1024:] == bytes(1024)


def test_webdataset_reads_it(path):
    import webdataset as wds

    write(path, *({"__key__": f"d/{key}", "cls": 3, "npy": np.arange(3)} for key in "ab"))
    with path.open("rb") as stream:
        files = wds.tariterators.tar_file_expander([{"url": "x", "stream": stream}])
        samples = list(wds.tariterators.group_by_keys(files))
    assert [(sample["__key__"], sample["cls"]) for sample in samples] == [("d/a", b"3"), ("d/b", b"3")]
    assert np.load(io.BytesIO(samples[1]["npy"])).tolist() == [0, 1, 2]


LAST_PART = "cannot be the key of a sample: its last part"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        *(({"__key__": key, "x": b""}, LAST_PART) for key in ("a.b", "d/a.b", "", "d/", ".a", "a\0", "d/.hidden")),
        ({"__key__": 7, "x": b""}, r"the key of a sample must be text, got 7 \(int\)"),
        ({"__key__": "a b", "x": b""}, "the key 'a b' contains white space, which DALI's index .*index=False"),
        ({"__key__": "\ud800", "x": b""}, r"the key '.*' is not valid text: surrogates not allowed"),
        ({"__key__": "0", "x": b""}, "record 1 has the same key as the one before, '0': both are one sample"),
        ({}, "record 1 has no fields: a sample without files cannot be stored"),
        ({"__key__": "a"}, "record 1 has no fields"),
        (b"abc", "format 'tar' stores fields, got a record of type bytes"),
        ({7: b""}, "field names must be text, got 7"),
        ({"": b""}, "field '' cannot be part of a file name"),
        ({"a/b": b""}, "field 'a/b' cannot be part of a file name"),
        ({"a b": 1}, "the name of field 'a b' contains white space"),
        ({"x": None}, "field 'x': a NoneType cannot be stored"),
        ({"x": np.arange(2), "x.npy": b""}, r"field 'x.npy' and another one would both be stored as 'x.npy'"),
    ],
)
def test_records_that_cannot_be_stored_leave_the_file_as_it_was(path, record, message):
    with TarWriter(path) as writer:
        writer.write({"__key__": "0", "x": b"1"})
        with pytest.raises(ConfigError, match=message):
            writer.write(record)
        writer.write({"x": b"2"})
        assert len(writer) == 2
    assert listing(path) == [("0.x", b"1"), ("00000001.x", b"2")]


def test_white_space_without_an_index(path):
    write(path, {"__key__": "a b", "my field": b"x"}, index=False)
    assert not path.with_suffix(".idx").exists()
    assert TarSource(path)[0] == {"__key__": "a b", "my field": b"x"}


@pytest.mark.parametrize("name", ["x.tar", "x.idx"])
def test_what_exists_is_not_replaced_unless_that_is_said(path, tmp_path, name):
    (tmp_path / name).write_bytes(b"old")
    with pytest.raises(ConfigError, match=rf"{name} exists: .*overwrite=True"):
        TarWriter(path)
    assert (tmp_path / name).read_bytes() == b"old"
    assert os.listdir(tmp_path) == [name]
    write(path, {"x": b"1"}, overwrite=True)
    assert TarSource(path)[0]["x"] == b"1"


def test_an_old_index_never_stands_beside_a_new_archive(path):
    write(path, {"x": b"1"}, {"x": b"2"})
    write(path, {"x": b"3"}, overwrite=True, index=False)
    assert not path.with_suffix(".idx").exists()
    assert len(TarSource(path)) == 1
    write(path, overwrite=True)
    assert not path.with_suffix(".idx").exists()


def test_an_index_that_appears_meanwhile(path):
    writer = TarWriter(path)
    writer.write({"x": b"1"})
    path.with_suffix(".idx").write_bytes(b"another's")
    with pytest.raises(ConfigError):
        writer.close()
    assert path.with_suffix(".idx").read_bytes() == b"another's"


def test_keys_by_function(path):
    write(path, {"x": b"1"}, {"x": b"2"}, key=lambda i, record: f"{record['x'].decode()}-{i}")
    assert listing(path) == [("1-0.x", b"1"), ("2-1.x", b"2")]


def test_no_samples(path):
    write(path)
    assert not path.with_suffix(".idx").exists()
    source = TarSource(path, fields=["x"])
    assert (len(source), list(source), dict(source.fields)) == (0, [], {})
    with pytest.raises(ConfigError, match=r"x.tar holds no samples, and DALI's index cannot be empty"):
        write_index(path)
    assert not path.with_suffix(".idx").exists()


class TestWriteIndex:
    def test_where_it_goes(self, path, tmp_path):
        write(path, {"x": b"1"}, index=False)
        assert write_index(str(path)) == 1
        assert path.with_suffix(".idx").read_text() == "v1.2 1\nx 512 1 00000000.x\n"
        with pytest.raises(ConfigError, match=r"x.idx exists"):
            write_index(path, overwrite=False)
        assert write_index(path, tmp_path / "other.txt") == 1
        assert (tmp_path / "other.txt").read_bytes() == path.with_suffix(".idx").read_bytes()

    def test_no_archive(self, path, tmp_path):
        with pytest.raises(SourceNotFoundError, match=r"there is no .*x.tar"):
            write_index(path)
        with pytest.raises(SourceError, match=r"cannot read .*: Is a directory"):
            write_index(tmp_path, tmp_path / "x.idx")
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        ("names", "error", "message"),
        [
            (("a.x", "b.x", "a.y"), CorruptFileError, "x.tar, byte 1024: sample 'a' continues here after others"),
            (("a.x", "a.y", "a.x"), CorruptFileError, "x.tar, byte 1024: a second 'a.x' in one sample"),
            (("a.b\tc",), ConfigError, "has white space in its name"),
            (("a b.x",), ConfigError, r"x.tar: member 'a b.x' \(data at byte 512\) has white space in its name"),
            (("a.",), ConfigError, r"x.tar: member 'a.' \(data at byte 512\) has no extension"),
        ],
    )
    def test_archives_that_lose_something(self, path, names, error, message):
        pack(path, [(name, b"") for name in names])
        path.with_suffix(".idx").write_text("old")
        with pytest.raises(error, match=message):
            write_index(path)
        assert path.with_suffix(".idx").read_text() == "old"
        assert len(os.listdir(path.parent)) == 2


def test_an_index_that_cannot_be_written_leaves_the_old_archive(path, tmp_path, monkeypatch):
    write(path, {"txt": b"old"})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    writer = TarWriter(path, overwrite=True)
    writer.write({"txt": b"new"})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dataload.sources.tar.writer.build_head", full)
    with pytest.raises(SourceError, match=r"cannot write .*x\.tar: No space left on device"):
        writer.close()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
