import errno
import gc
import os

import numpy as np
import pytest

import dataload
from dataload.errors import ConfigError, SourceError
from dataload.sources.registry import built_in_formats
from dataload.sources.writer import Writer, require_fields
from dataload.storage.local import parts


class Lines(Writer):
    """A text file, one line per record."""

    def _begin(self, options):
        self.stream = self._part.create()

    def _write(self, record):
        if record is None:
            raise ConfigError("no None")
        self.stream.write(f"{record}\n".encode())

    def _finish(self):
        self.stream.close()

    def _discard(self):
        self.stream.close()


class Folder(Writer):
    """A directory, one file per record."""

    def _begin(self, options):
        os.mkdir(self._part.temporary)

    def _write(self, record):
        with open(os.path.join(self._part.temporary, str(len(self))), "w") as stream:
            stream.write(str(record))

    def _finish(self):
        pass


def read(path):
    return path.read_text() if path.is_file() else "".join(f"{file.read_text()}\n" for file in sorted(path.iterdir()))


@pytest.fixture(params=[Lines, Folder])
def writer_of(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out"


def test_nothing_shows_before_close(writer_of, tmp_path):
    path = tmp_path / "a" / "b" / "out"
    writer = writer_of(path)
    writer.extend(["a", "b"])
    assert repr(writer) == f"{writer_of.__name__}({str(path)!r}, 2 records, open)"
    [temporary] = path.parent.iterdir()
    assert temporary.name.startswith(".out.")
    assert temporary.name.endswith(".tmp")
    writer.close()
    writer.close()
    assert ([entry.name for entry in path.parent.iterdir()], read(path), len(writer)) == (["out"], "a\nb\n", 2)
    with pytest.raises(ConfigError, match=r"the writer of .*out is closed: nothing more can be written"):
        writer.write("a")


def test_a_record_that_is_refused_is_not_counted(path):
    with Lines(path) as writer:
        writer.write("a")
        with pytest.raises(ConfigError):
            writer.write(None)
        writer.write("b")
        assert len(writer) == 2
    assert read(path) == "a\nb\n"


@pytest.mark.filterwarnings("error")
def test_leaving_by_an_exception_writes_nothing(writer_of, path):
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


def test_what_exists_is_not_overwritten_unless_asked(writer_of, path, monkeypatch):
    monkeypatch.chdir(path.parent)
    with writer_of("out/") as writer:
        writer.extend(["old", "older"])
    message = r"out exists: choose another name, or pass overwrite=True to replace it"
    with pytest.raises(ConfigError, match=message) as caught:
        writer_of(path)
    assert caught.value.key == "path"
    with writer_of(path, overwrite=True) as writer:
        writer.write("new")
        assert read(path) == "old\nolder\n"
    assert read(path) == "new\n"
    assert os.listdir(path.parent) == ["out"]
    writer = writer_of(path.parent / "b")
    writer.write("mine")
    (path.parent / "b").write_text("yours")
    with pytest.raises(ConfigError, match=r"b exists"):
        writer.close()
    assert (path.parent / "b").read_text() == "yours"
    assert sorted(os.listdir(path.parent)) == ["b", "out"]


@pytest.mark.parametrize("failing", ["_finish", "_replace"])
def test_a_close_that_fails_harms_nothing(writer_of, path, monkeypatch, failing):
    with writer_of(path) as writer:
        writer.write("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    writer = writer_of(path, overwrite=True)
    writer.write("new")
    if failing == "_finish":
        monkeypatch.setattr(writer, failing, fail)
    else:
        monkeypatch.setattr(parts, failing, fail)
    with pytest.raises(SourceError, match=r"cannot write .*out: No space left"):
        writer.close()
    assert read(path) == "old\n"
    assert len(list(path.parent.iterdir())) == 1
    with pytest.raises(ConfigError, match=r"the writer of .*out is aborted: nothing more can be written"):
        writer.write("more")


@pytest.mark.parametrize("ending", ["with", "close"])
def test_a_failing_abort_hides_no_error(writer_of, path, monkeypatch, ending):
    """As that of a stream whose last block does not fit on the disk."""
    writer = writer_of(path)
    discard = writer._discard

    def fail(*_):
        discard()
        raise OSError(28, "No space left on device")

    def refuse():
        raise KeyError("mine")

    monkeypatch.setattr(writer, "_discard", fail)
    with pytest.raises(KeyError, match="mine") as caught:  # noqa: PT012 - the end of the block is tested
        if ending == "with":
            with writer:
                refuse()
        else:
            monkeypatch.setattr(writer, "_finish", refuse)
            writer.close()
    assert caught.value.__notes__ == [f"closing {writer!r} failed, too: OSError: [Errno 28] No space left on device"]
    assert list(path.parent.iterdir()) == []


def test_a_directory_comes_back_when_the_new_one_cannot_take_its_place(path, monkeypatch):
    monkeypatch.setattr(parts, "_libc_rename", lambda: None)
    with Folder(path) as writer:
        writer.extend(["old", "older"])
    writer = Folder(path, overwrite=True)
    writer.extend(["new", "newer"])
    rename = os.rename

    def fail_for_the_new_one(source, destination):
        if ".old" not in str(source) and str(destination) == str(path):
            raise OSError("odd")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail_for_the_new_one)
    with pytest.raises(SourceError, match=r"cannot write .*out: odd"):
        writer.close()
    assert read(path) == "old\nolder\n"
    assert len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("directory", ["file", "file/a/b"])
def test_a_file_where_the_directory_would_be(writer_of, tmp_path, directory):
    (tmp_path / "file").touch()
    message = f"cannot write to the directory {tmp_path}/{directory}: {tmp_path}/file is no directory; choose another"
    writer = writer_of.__new__(writer_of)
    with pytest.raises(ConfigError, match=message):
        writer.__init__(tmp_path / directory / "out")
    assert "0 records, refused" in repr(writer)
    replacing = Folder(tmp_path / "file", overwrite=True)
    with pytest.raises(SourceError, match=r"cannot write .*file: Not a directory"):
        replacing.close()
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_named_and_leaves_nothing(path):
    class Full(Lines):
        def _write(self, record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SourceError, match=r"cannot write .*out: No space left on device"), Full(path) as writer:
        writer.write("a")
    assert list(path.parent.iterdir()) == []
    assert repr(writer).endswith("0 records, aborted)")


def test_a_directory_that_cannot_be_written(writer_of, path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(SourceError, match=rf"the directory {path.parent} cannot be written to"):
        writer_of(path)


def test_require_fields():
    assert require_fields({"x": 1}, "syrah") == {"x": 1}
    with pytest.raises(ConfigError, match="format 'syrah' stores fields, got a record of type bytes"):
        require_fields(b"abc", "syrah")
    with pytest.raises(ConfigError, match=r"field names must be text, got 3 \(int\)"):
        require_fields({3: 1}, "syrah")


def test_a_fork_that_drops_the_writer_leaves_its_file_alone(tmp_path):
    writer = Lines(tmp_path / "a.txt")
    writer.write("x")
    child = os.fork()
    if not child:
        writer.__del__()
        os._exit(0)
    os.waitpid(child, 0)
    writer.close()
    assert (tmp_path / "a.txt").read_text() == "x\n"


@pytest.mark.parametrize("entry", [entry for entry in built_in_formats() if entry.writer], ids=lambda entry: entry.name)
def test_stored_bytes_are_counted_one_by_one_and_together(tmp_path, entry):
    records = [{"tokens": np.arange(5)} for _ in range(9)]
    counted = []
    for name, together in (("a", False), ("b", True)):
        with dataload.create(tmp_path / f"{name}.x", format=entry.name) as writer:
            if together:
                writer.extend(records)
            else:
                for record in records:
                    writer.write(record)
            counted.append(writer.stored_bytes)
    assert counted[0] == counted[1] > 9 * 5
