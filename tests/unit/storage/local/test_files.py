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
    with pytest.raises(SourceError, match=f"another process is writing to {path}"), storage_of(path).lock(path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with storage_of(path).lock(path):
        assert os.listdir(tmp_path) == [".a.lock"]
    assert os.listdir(tmp_path) == []
