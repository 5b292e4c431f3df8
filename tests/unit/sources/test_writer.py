"""Writers: what they publish, and what they leave behind.

Those that are killed, and those of one destination, are in tests/unit/storage/local/test_parts.py.
"""

import errno
import gc
import io
import os

import numpy as np
import pytest

import dataload
from dataload.errors import ConfigError, SourceError
from dataload.sources.registry import built_in_formats
from dataload.sources.writer import Writer

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Lines(Writer):
    """A text file, one line per record."""

    finishing = discarding = None  # errors

    def _begin(self, options):
        self.stream = self._part.create()

    def _write(self, record):
        if isinstance(record, Exception):
            raise record
        self.stream.write(f"{record}\n".encode())

    def _finish(self):
        if self.finishing:
            raise self.finishing
        self._discard()

    def _discard(self):
        self.stream.close()
        if self.discarding:
            raise self.discarding


class Folder(Lines):
    """A directory, one file per record."""

    def _begin(self, options):
        os.mkdir(self.temporary)
        self.stream = io.BytesIO()

    def _write(self, record):
        with open(os.path.join(self.temporary, str(len(self))), "w") as stream:
            stream.write(f"{record}\n")


def read(path):
    return path.read_text() if path.is_file() else "".join(file.read_text() for file in sorted(path.iterdir()))


@pytest.fixture(params=[Lines, Folder])
def writer_of(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out"


def written(writer, *records):
    with writer:
        writer.extend(records)
    return writer


def test_nothing_shows_before_close(writer_of, tmp_path, monkeypatch):
    path, synced = tmp_path / "a" / "b" / "out", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    writer = writer_of(path)
    writer.extend(["a", "b"])
    assert repr(writer) == f"{writer_of.__name__}({str(path)!r}, 2 records, open)"
    [temporary] = path.parent.iterdir()
    assert temporary.name.startswith(".out.")
    assert temporary.name.endswith(".tmp")
    writer.close()
    writer.close()
    assert [path.stat().st_ino in synced, synced[-1]] == [True, path.parent.stat().st_ino], "as after a power failure"
    assert ([entry.name for entry in path.parent.iterdir()], read(path), len(writer)) == (["out"], "a\nb\n", 2)
    with pytest.raises(ConfigError, match=r"the writer of .*out is closed: nothing more can be written"):
        writer.write("a")


@pytest.mark.filterwarnings("error")
def test_leaving_by_an_exception_writes_nothing(writer_of, path, monkeypatch):
    writer = writer_of(path)
    with pytest.raises(ZeroDivisionError), writer:
        writer.write(f"{1 // 0}")
    assert list(path.parent.iterdir()) == []
    writer.abort()
    writer.close()
    forgotten = writer_of(path)
    forgotten.write("a")
    del forgotten
    gc.collect()
    assert list(path.parent.iterdir()) == []
    monkeypatch.setattr("dataload.sources.writer.contextlib", None)  # as at the interpreter's exit
    del writer
    gc.collect()  # warnings are errors


def test_what_exists_is_not_overwritten_unless_asked(writer_of, path, monkeypatch):
    monkeypatch.chdir(path.parent)
    written(writer_of("out/"), "old", "older")
    message = r"out exists: choose another name, or pass overwrite=True to replace it"
    with pytest.raises(ConfigError, match=message) as caught:
        writer_of(path)
    assert caught.value.key == "path"
    with writer_of(path, overwrite=True) as writer:
        writer.write("new")
        assert read(path) == "old\nolder\n"
    assert read(path) == "new\n"
    writer = writer_of(path.parent / "b")
    (path.parent / "b").write_text("yours")
    with pytest.raises(ConfigError, match=r"b exists"):
        writer.close()
    assert (path.parent / "b").read_text() == "yours"
    assert sorted(os.listdir(path.parent)) == ["b", "out"]


def test_a_close_that_fails_harms_nothing(writer_of, path):
    written(writer_of(path), "old")
    writer = writer_of(path, overwrite=True)
    writer.write("new")
    writer.finishing = FULL
    with pytest.raises(SourceError, match=r"cannot write .*out: No space left"):
        writer.close()
    assert read(path) == "old\n"
    assert os.listdir(path.parent) == ["out"]
    assert repr(writer).endswith("1 records, aborted)")
    with pytest.raises(ConfigError, match=r"the writer of .*out is aborted: nothing more can be written"):
        writer.write("more")


@pytest.mark.parametrize("ending", ["with", "close"])
def test_a_failing_abort_hides_no_error(writer_of, path, ending):
    """As that of a stream whose last block does not fit on the disk."""
    writer = writer_of(path)
    writer.discarding, mine = FULL, KeyError("mine")
    with pytest.raises(KeyError) as caught:  # noqa: PT012 - the end of the block is tested
        if ending == "with":
            with writer:
                raise mine
        writer.finishing = mine
        writer.close()
    assert caught.value is mine
    assert mine.__notes__ == [f"closing {writer!r} failed, too: OSError: [Errno 28] No space left on device"]
    assert list(path.parent.iterdir()) == []


def test_what_was_there_comes_back_when_the_new_one_cannot_take_its_place(writer_of, path, monkeypatch):
    monkeypatch.setattr("dataload.storage.local.atomic._libc_rename", lambda: None)
    written(writer_of(path), "old", "older")
    writer = writer_of(path, overwrite=True)
    writer.extend(["new", "newer"])
    call = "replace" if writer_of is Lines else "rename"
    rename = getattr(os, call)

    def fail_for_the_new_one(source, destination):
        if ".old" not in str(source) and str(destination) == str(path):
            raise OSError("odd")
        rename(source, destination)

    monkeypatch.setattr(os, call, fail_for_the_new_one)
    with pytest.raises(SourceError, match=r"cannot write .*out: odd"):
        writer.close()
    assert read(path) == "old\nolder\n"
    assert os.listdir(path.parent) == ["out"]


@pytest.mark.parametrize("directory", ["file", "file/a/b"])
def test_a_file_where_the_directory_would_be(writer_of, tmp_path, directory):
    (tmp_path / "file").touch()
    message = f"cannot write to the directory {tmp_path}/{directory}: {tmp_path}/file is not a directory; choose"
    writer = writer_of.__new__(writer_of)
    with pytest.raises(ConfigError, match=message):
        writer.__init__(tmp_path / directory / "out")
    assert "0 records, refused" in repr(writer)
    replacing = Folder(tmp_path / "file", overwrite=True)
    with pytest.raises(SourceError, match=r"cannot write .*file: Not a directory"):
        replacing.close()
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_named_and_leaves_nothing(path):
    with pytest.raises(SourceError, match=r"cannot write .*out: No space left on device"):
        written(Lines(path), FULL)
    assert list(path.parent.iterdir()) == []


def test_a_directory_that_cannot_be_written(writer_of, path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(SourceError, match=rf"the directory {path.parent} cannot be written to"):
        writer_of(path)


def test_a_fork_that_drops_the_writer_leaves_its_file_alone(path):
    with Lines(path) as writer:
        writer.write("x")
        child = os.fork()
        if not child:
            writer.__del__()
            os._exit(0)
        os.waitpid(child, 0)
    assert read(path) == "x\n"


WRITABLE = [entry for entry in built_in_formats() if entry.writer and entry.content != "images"]


@pytest.mark.parametrize("entry", WRITABLE, ids=lambda entry: entry.name)
def test_stored_bytes_are_counted_one_by_one_and_together(tmp_path, entry):
    records = [{"tokens": np.arange(5)} for _ in range(9)]
    with dataload.create(tmp_path / "a.x", format=entry.name) as one_by_one:
        for record in records:
            one_by_one.write(record)
    together = written(dataload.create(tmp_path / "b.x", format=entry.name), *records)
    assert one_by_one.stored_bytes == together.stored_bytes > 9 * 5


STORING_FIELDS = ["syr", "tar", "lmdb", "torchrecord", "array_record", "parquet", "arrow"]


class Tensor:
    """As those of torch and JAX."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        if self.values is None:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return np.array(self.values, dtype)


@pytest.mark.parametrize(
    ("suffix", "options", "message"),
    [
        *((each, {}, r"numpy cannot hold this Tensor \(.*BFloat16\): convert it") for each in STORING_FIELDS),
        *(("lmdb", {"codec": each}, "Tensor is not an array: .*BFloat16") for each in ("msgpack", "npz")),
    ],
)
def test_tensors_are_written_as_arrays(tmp_path, suffix, options, message):
    path = tmp_path / f"a.{suffix}"
    with pytest.raises(ConfigError, match=f"field 't': {message}"), dataload.create(path, **options) as writer:
        writer.write({"t": Tensor(None)})
    with dataload.create(path, **options) as writer:
        writer.write({"t": Tensor([1.5, 2.5])})
        writer.extend([{"t": Tensor([3.5, 4.5])}])
    assert [record["t"].tolist() for record in dataload.open(path)] == [[1.5, 2.5], [3.5, 4.5]]


@pytest.mark.parametrize("suffix", [*STORING_FIELDS, "jsonl"])
def test_values_may_be_reused_after_a_record_is_written(tmp_path, suffix):
    values = {"array": np.zeros(2), "list": [0], "struct": {"n": 0, "more": [0]}, "bytes": bytearray(1)}
    lacks = "bytes" if suffix == "jsonl" else None if suffix in ("tar", "parquet", "arrow") else "struct"
    record = {name: value for name, value in values.items() if name != lacks}
    with dataload.create(tmp_path / f"a.{suffix}") as writer:
        for i in range(3):
            values["array"][:] = values["list"][0] = values["bytes"][0] = i
            values["struct"]["n"] = values["struct"]["more"][0] = i
            writer.write(record)
    for i, found in enumerate(dataload.open(tmp_path / f"a.{suffix}")):
        assert [found["array"][0], found["list"][0]] == [i, i]
        assert found.get("bytes", bytes([i])) == bytes([i])
        struct = found.get("struct", {"n": i, "more": [i]})
        assert (struct["n"], struct["more"][0]) == (i, i)
