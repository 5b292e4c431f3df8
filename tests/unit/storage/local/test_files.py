"""Locks of local files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dataload.errors import SourceError
from dataload.storage import storage_of

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
    with (
        pytest.raises(SourceError, match=rf"another process is writing to {path} {who}: wait until it has ended"),
        storage_of(path).lock(path),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with storage_of(path).lock(path):
        assert os.listdir(tmp_path) == [".a.lock"]
    assert os.listdir(tmp_path) == []


def test_a_lock_is_not_taken_through_a_link(tmp_path):
    victim, path = tmp_path / "victim", str(tmp_path / "a")
    victim.write_text("precious")
    for make, found in ((os.symlink, "a symbolic link"), (os.link, "something else")):
        make(victim, tmp_path / ".a.lock")
        with (
            pytest.raises(SourceError, match=rf"\.a\.lock must be a lock file, but is {found}: remove it"),
            storage_of(path).lock(path),
        ):
            pass
        (tmp_path / ".a.lock").unlink()
    os.mkfifo(tmp_path / ".a.lock")
    with pytest.raises(SourceError, match="but is something else"), storage_of(path).lock(path):
        pass
    assert victim.read_text() == "precious"


def test_what_a_lock_says_cannot_harm_a_terminal(tmp_path):
    path = str(tmp_path / "a")
    with storage_of(path).lock(path):
        (tmp_path / ".a.lock").write_bytes(b"\x1b[2J" + 1000 * b"\xff")
        with (
            pytest.raises(SourceError, match=r"another process is writing to .*a \(\\x1b\[2J"),
            storage_of(path).lock(path),
        ):
            pass
        (tmp_path / ".a.lock").write_bytes(b"")  # as it is before the holder has written to it
        with pytest.raises(SourceError, match=r"writing to .*a: wait until it has ended"), storage_of(path).lock(path):
            pass
