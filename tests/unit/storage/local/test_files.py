"""Locks of local files, and small text files."""

import errno
import fcntl
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload._util.system import lock_record
from dataload.errors import SourceError, StoreError
from dataload.storage import storage_of
from dataload.storage.backend import FileStream
from dataload.storage.local import files
from dataload.storage.local.files import AppendedFile, LocalFile, append_text, read_text, versions_of
from dataload.storage.local.record_files import MappedFile, UnmappedFile

HOLD = """
import sys
from dataload.storage import storage_of
with storage_of("x").lock(sys.argv[1]):
    print(flush=True)
    input()
"""


@pytest.mark.parametrize("is_other_users", [False, True])
def test_a_lock_excludes_other_processes_and_ends_with_its_holder(tmp_path, monkeypatch, is_other_users):
    """That of another user, who was killed, could never be taken: the file may not be written to."""
    path = str(tmp_path / "a")

    def open_file(name, flags):
        if is_other_users and flags & os.O_RDWR and os.path.exists(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return os.open(name, flags, 0o644)

    monkeypatch.setattr(files, "open_file", open_file)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    who = rf"\(process {holder.pid} on {os.uname().nodename}, since .* UTC\)"
    match = rf"another process is writing to {path} {who}: wait until it has ended"
    with pytest.raises(SourceError, match=match), storage_of(path).lock(path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    (tmp_path / ".a.lock").write_bytes(b"of the holder before, which had a very long name" * 9)
    with storage_of(path).lock(path):
        assert os.listdir(tmp_path) == [".a.lock"]
        assert (tmp_path / ".a.lock").read_text().startswith(f"process {os.getpid()} on ")
        assert (tmp_path / ".a.lock").read_text().endswith(" UTC")
    assert os.listdir(tmp_path) == []


def test_a_lock_that_is_only_looked_at_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PROBE_SECONDS", 60)
    with open(tmp_path / ".a.lock", "wb") as looking:
        fcntl.flock(looking, fcntl.LOCK_EX)
        monkeypatch.setattr(files.time, "sleep", lambda _: looking.close())
        with storage_of("x").lock(str(tmp_path / "a")):
            assert looking.closed


def test_a_lock_is_not_taken_through_a_link(tmp_path):
    victim, path, lock = tmp_path / "victim", str(tmp_path / "a"), tmp_path / ".a.lock"
    victim.write_text("precious")
    for make, found in (
        (lambda: os.symlink(victim, lock), "a symbolic link"),
        (lambda: os.link(victim, lock), "something else"),
        (lambda: os.mkfifo(lock), "something else"),
    ):
        make()
        match = rf"\.a\.lock must be a lock file, but is {found}: remove it"
        with pytest.raises(SourceError, match=match), storage_of(path).lock(path):
            pass
        lock.unlink()
    assert victim.read_text() == "precious"
    lock.mkdir()
    with pytest.raises(StoreError, match=r"cannot write .*\.a\.lock: Is a directory"), storage_of(path).lock(path):
        pass


def test_the_lock_of_a_record_is_one_that_servers_know(tmp_path):
    other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with open(tmp_path / "a", "wb") as file:
        lock_record(file.fileno())
        found = subprocess.run([sys.executable, "-c", other, file.name], capture_output=True)
    assert b"BlockingIOError" in found.stderr


def test_text_is_appended(tmp_path, monkeypatch):
    path = os.fspath(tmp_path / "a")
    for text in ("漢\n", "", "b"):
        append_text(path, text)
    assert read_text(path) == "漢\nb"
    append_text(path, "c\n")
    assert read_text(path) == "漢\nb\nc\n", "a torn line is ended first"
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 5)
    with pytest.raises(OSError, match="only 2 of 7 bytes could be written"):
        append_text(f"{path}b", "1234567")


def test_short_reads_are_continued_and_the_end_is_the_end(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(content := bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, offset: pread(file, min(length, 7), offset))
    for kind in (MappedFile, UnmappedFile):
        assert kind(str(tmp_path / "a")).read(30, 70) == content[30:]
    with LocalFile(str(tmp_path / "a")) as file:
        assert [file.read(*each) for each in ((0, 100), (30, 1), (50, 20), (90, 99), (100, 5), (3, 0))] == [
            *(content, content[30:31], content[50:70], content[90:], b"", b"")
        ]


def test_what_is_appended_reaches_the_disk_now_and_then_or_is_an_error(tmp_path, monkeypatch):
    path, synced, now = tmp_path / "log", [], [100.0]
    path.touch()
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.append(now[0]), raising=False)
    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])
    file = AppendedFile(str(path))
    for now[0] in (100.5, 101.0, 101.5, 102.0, 102.5):
        file.write(b"x")
    file.close()
    assert synced == [101.5, 102.5], "a second after the last time, and at the end"
    file = AppendedFile(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda _, data: len(data) - 1)
        with pytest.raises(SourceError, match="only 2 of 3 bytes could be written"):
            file.write(b"abc")
    assert file.is_current()
    for gone in (path.unlink, path.touch):
        gone()
        assert not file.is_current()
        with pytest.raises(SourceError, match=rf"another process has taken over {path}: wait until it has ended"):
            file.write(b"x")
    file.close()
    assert path.read_bytes() == b""


@given(st.lists(st.tuples(st.sampled_from(["read", "readinto", "seek"]), st.integers(-1, 9), st.integers(0, 2))))
def test_a_stream_of_a_file_is_like_one_of_bytes(tmp_path_factory, steps):
    path = tmp_path_factory.getbasetemp() / "stream"
    path.write_bytes(b"0123456")
    with storage_of(str(path)).open(str(path)) as file:
        stream, model = FileStream(file), io.BytesIO(b"0123456")
        assert stream.seekable()
        for step, number, whence in steps:
            if step == "read":
                found, expected = stream.read(number), model.read(number)
            elif step == "readinto":
                buffers = bytearray(max(0, number)), bytearray(max(0, number))
                counts = stream.readinto(buffers[0]), model.readinto(buffers[1])
                found, expected = zip(counts, buffers, strict=True)
            else:
                offset = number - 7 * (whence == 2) if number > 0 else 0
                if whence == 1:
                    offset = min(offset, 7 - model.tell())
                found, expected = stream.seek(offset, whence), model.seek(offset, whence)
            assert (found, stream.tell()) == (expected, model.tell())


@pytest.mark.parametrize("starts", [True, False])
def test_versions_of_many_files_are_those_of_each(tmp_path, monkeypatch, starts):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    if not starts:
        monkeypatch.setattr("threading.Thread.start", refuse)
    paths = [str(tmp_path / f"{number}") for number in range(2001)]  # looked at in two threads
    for number, path in enumerate(paths):
        if number % 3:
            Path(path).write_bytes(bytes(number))
    assert versions_of(paths).tolist() == [versions_of([path])[0].tolist() for path in paths]
    assert versions_of(paths)[:4, 0].tolist() == [0, 1, 2, 0]
