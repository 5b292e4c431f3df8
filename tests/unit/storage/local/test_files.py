"""Locks of local files, and small text files."""

import os
import signal
import subprocess
import sys

import pytest

from dataload.errors import SourceError
from dataload.storage import storage_of
from dataload.storage.local.files import append_text, read_text

HOLD = """
import sys
from dataload.storage import storage_of
with storage_of("x").lock(sys.argv[1]):
    print(flush=True)
    input()
"""


def test_a_lock_excludes_other_processes_and_ends_with_its_holder(tmp_path):
    path = str(tmp_path / "a")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    who = rf"\(process {holder.pid} on {os.uname().nodename}, since .* UTC\)"
    match = rf"another process is writing to {path} {who}: wait until it has ended"
    with pytest.raises(SourceError, match=match), storage_of(path).lock(path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with storage_of(path).lock(path):
        assert os.listdir(tmp_path) == [".a.lock"]
    assert os.listdir(tmp_path) == []


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


def test_what_a_lock_says_cannot_harm_a_terminal(tmp_path):
    path, match = str(tmp_path / "a"), r"another process is writing to .*a"
    with storage_of(path).lock(path):
        # It is empty before the holder has written to it.
        for text, who in ((b"\x1b[2J" + 1000 * b"\xff", r" \(\\x1b\[2J"), (b"", ": wait until it has ended")):
            (tmp_path / ".a.lock").write_bytes(text)
            with pytest.raises(SourceError, match=match + who), storage_of(path).lock(path):
                pass


def test_text_is_appended(tmp_path, monkeypatch):
    path = os.fspath(tmp_path / "a")
    for text in ("漢\n", "", "b"):
        append_text(path, text)
    assert read_text(path) == "漢\nb"
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 5)
    with pytest.raises(OSError, match="only 2 of 7 bytes could be written"):
        append_text(f"{path}b", "1234567")
