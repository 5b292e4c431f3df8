"""The hash of a file that is still being written."""

import hashlib
import os
import threading

import pytest

from dataload._util.system import read_into_at
from dataload.convert import writing
from dataload.convert.writing import UNSETTLED_BYTES, HashAhead


@pytest.mark.parametrize("sizes", [[], [0], [5], [1 << 20, 3], [300_000] * 12])
def test_the_hash_of_a_growing_file(tmp_path, sizes):
    path = tmp_path / "a"
    with path.open("wb", buffering=0) as stream, HashAhead(str(path)) as ahead:
        for number, size in enumerate(sizes):
            stream.write(bytes([number]) * size)
        path.rename(tmp_path / "b")
        found = ahead.finish()
    data = (tmp_path / "b").read_bytes()
    assert found == (len(data), hashlib.sha256(data).hexdigest())


def test_the_end_may_change(tmp_path):
    path = tmp_path / "a"
    with path.open("wb", buffering=0) as stream, HashAhead(str(path)) as ahead:
        for _ in range(30):  # the thread looks at the file at any of these moments
            stream.write(bytes(100_000))
            stream.seek(-UNSETTLED_BYTES // 2, os.SEEK_END)
            stream.write(b"changed")
            stream.seek(0, os.SEEK_END)
        found = ahead.finish()
    assert found == (3_000_000, hashlib.sha256(path.read_bytes()).hexdigest())


def test_what_is_given_up_ends_its_thread(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1 << 22))
    with pytest.raises(KeyError), HashAhead(str(tmp_path / "a")) as ahead:
        raise KeyError
    assert ahead.finish() is None  # and the thread has ended, or the fixture of all tests complains


def test_a_file_that_becomes_shorter_than_what_was_hashed_has_no_hash(tmp_path, monkeypatch):
    has_read = threading.Event()
    monkeypatch.setattr(writing, "read_into_at", lambda *given: (read_into_at(*given), has_read.set())[0])
    (tmp_path / "a").write_bytes(bytes(1 << 22))
    with HashAhead(str(tmp_path / "a")) as ahead:
        assert has_read.wait(20)
        os.truncate(tmp_path / "a", 5)
        assert ahead.finish() is None
