"""The board of a plan: what readers in other processes see of it, also if somebody shortens or overwrites its file."""

import errno
import os
import pickle
import tempfile

import pytest

from dataload.errors import MachineError
from dataload.storage.remote.jobs import Board, Coming, living, wait_for

URLS = ["s3://bucket/0", "s3://bucket/1", "s3://bucket/2"]
UNKNOWN, SOON, NEVER = Coming.UNKNOWN, Coming.SOON, Coming.NEVER


def sent(board):
    return pickle.loads(pickle.dumps(board))


def looks(reader, **given):
    return [reader.look(url, **given) for url in URLS]


def test_what_readers_see_and_ask_for(tmp_path):
    board = Board(str(tmp_path), URLS)
    reader = sent(board)
    board.set(0, SOON)
    board.set(2, NEVER)
    assert looks(reader) == looks(board) == [SOON, UNKNOWN, NEVER]
    assert board.take_waiting() == []
    assert looks(sent(reader), waits=True)[0] is SOON
    assert (board.take_waiting(), board.take_waiting()) == ([0], [])
    assert reader.look("s3://bucket/3") is UNKNOWN
    board.clear()
    assert looks(reader) == [UNKNOWN] * 3


def test_a_planned_shard_is_waited_for_while_its_download_advances(tmp_path, monkeypatch):
    board, (url, *_) = Board(str(tmp_path), URLS), URLS
    assert wait_for(board, url, lambda: None, object) is UNKNOWN
    board.set(0, SOON)
    found = iter([None, None, "a lease"])
    assert wait_for(board, url, lambda: next(found), object) == "a lease"
    given_up = iter([lambda: None, lambda: board.set(0, UNKNOWN)])
    assert wait_for(board, url, lambda: next(given_up)(), object) is NEVER
    monkeypatch.setattr("dataload.storage.remote.jobs._LONGEST_WAIT", 0.0)
    board.set(0, SOON)
    assert wait_for(board, url, lambda: None, lambda: None) is UNKNOWN


def test_a_shortened_or_overwritten_file(tmp_path):
    board = Board(str(tmp_path), URLS)
    reader = sent(board)
    for shard in range(3):
        board.set(shard, SOON)
    assert looks(reader) == [SOON] * 3
    (path,) = tmp_path.iterdir()
    os.truncate(path, 2)
    assert looks(reader, waits=True) == looks(board) == [SOON, UNKNOWN, UNKNOWN]
    assert board.take_waiting() == [0]
    board.set(2, NEVER)
    assert looks(reader) == [SOON, UNKNOWN, NEVER]
    data = pickle.dumps(reader)
    path.write_bytes(b"\xff" * 100)
    assert looks(reader) == [UNKNOWN] * 3
    assert board.take_waiting() == [0, 1, 2]
    path.unlink()
    assert looks(pickle.loads(data), waits=True) == [UNKNOWN] * 3


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
    assert looks(sent(board)) == [Coming.UNKNOWN, Coming.SOON, Coming.UNKNOWN]
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
