"""The board of a plan: what readers in other processes see of it, also if somebody shortens or overwrites its file."""

import errno
import os
import pickle
import tempfile

import pytest

from dataload.errors import MachineError
from dataload.storage.local.living import living
from dataload.storage.remote.board import Board, Coming

URLS = ["s3://bucket/0", "s3://bucket/1", "s3://bucket/2"]


def looks(reader, **given):
    return [reader.look(url, **given) for url in URLS]


def test_what_readers_see_and_ask_for(tmp_path):
    board = Board(str(tmp_path), URLS)
    reader = pickle.loads(pickle.dumps(board))
    board.set(0, Coming.SOON)
    board.set(2, Coming.NEVER)
    assert looks(reader) == looks(board) == [Coming.SOON, Coming.UNKNOWN, Coming.NEVER]
    assert board.take_waiting() == []
    assert looks(pickle.loads(pickle.dumps(reader)), waits=True)[0] is Coming.SOON
    assert (board.take_waiting(), board.take_waiting()) == ([0], [])
    assert reader.look("s3://bucket/3") is Coming.UNKNOWN
    board.clear()
    assert looks(reader) == [Coming.UNKNOWN] * 3


def test_a_shortened_or_overwritten_file(tmp_path):
    board = Board(str(tmp_path), URLS)
    reader = pickle.loads(pickle.dumps(board))
    for shard in range(3):
        board.set(shard, Coming.SOON)
    assert looks(reader) == [Coming.SOON] * 3
    (path,) = tmp_path.iterdir()
    os.truncate(path, 2)
    assert looks(reader, waits=True) == looks(board) == [Coming.SOON, Coming.UNKNOWN, Coming.UNKNOWN]
    assert board.take_waiting() == [0]
    board.set(2, Coming.NEVER)
    assert looks(reader) == [Coming.SOON, Coming.UNKNOWN, Coming.NEVER]
    path.write_bytes(b"\xff" * 100)
    assert looks(reader) == [Coming.UNKNOWN] * 3
    assert board.take_waiting() == [0, 1, 2]


def test_a_file_that_is_gone(tmp_path):
    board = Board(str(tmp_path), URLS)
    data = pickle.dumps(board)
    del board
    reader = pickle.loads(data)
    for path in tmp_path.iterdir():
        path.unlink()
    assert looks(reader, waits=True) == [Coming.UNKNOWN] * 3


def test_boards_that_are_made_at_once_do_not_delete_each_other(tmp_path, monkeypatch):
    """Another process may look for files of dead ones between the creation of a file and its lock."""
    real, deleted = tempfile.mkstemp, []

    def mkstemp(**given):
        descriptor, path = real(**given)
        if len(deleted) < 2:
            deleted.append(path)
            assert living(str(tmp_path)) == []
        return descriptor, path

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    board = Board(str(tmp_path), URLS)
    assert len(deleted) == 2
    board.set(1, Coming.SOON)
    assert looks(pickle.loads(pickle.dumps(board))) == [Coming.UNKNOWN, Coming.SOON, Coming.UNKNOWN]
    (tmp_path / "of a dead process").touch()
    other = Board(str(tmp_path), URLS)
    assert len(living(str(tmp_path))) == len([*tmp_path.iterdir()]) == 2
    del board, other
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_said_to_be_one(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    with pytest.raises(MachineError, match=r"cannot write .*plan-\w+: No space left on device; [\d,]+ bytes are free"):
        Board(str(tmp_path), URLS)
    assert before == (len(os.listdir("/proc/self/fd")) if before else 0)
