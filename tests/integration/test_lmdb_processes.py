"""LMDB files under threads, processes, truncation and replacement."""

import os
import subprocess
import sys

import lmdb
import numpy as np
import pytest

from dataload.errors import CorruptFileError
from dataload.sources.lmdb.reader import LMDBSource
from dataload.sources.lmdb.torchrecord import TorchRecordSource
from dataload.sources.lmdb.writer import LMDBWriter, TorchRecordWriter

RECORDS = 300


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("lmdb") / "plain.lmdb"
    with LMDBWriter(path) as writer:
        writer.extend(value(index) for index in range(RECORDS))
    return path


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    path = tmp_path_factory.mktemp("lmdb") / "named.torchrecord"
    with TorchRecordWriter(path, db_num=3) as writer:
        writer.extend({"x": np.full(4, index, np.float32), "y": index} for index in range(RECORDS))
    return path


def value(index):
    return b"%d:" % index + bytes(index % 50)


def test_a_file_that_other_code_holds_open(plain):
    """LMDB refuses to open a file twice in a process; the source does not open it with LMDB."""
    with lmdb.open(str(plain), readonly=True, lock=False) as held, LMDBSource(plain) as source, held.begin() as txn:
        assert source[0] == value(0) == txn.get(b"%010d" % 0)


_FORK = """
import os, sys, threading
from dataload.sources.lmdb.reader import LMDBSource
from dataload.sources.lmdb.torchrecord import TorchRecordSource

def value(index):
    return b"%d:" % index + bytes(index % 50)

plain, named, large = sys.argv[1:]
first, second, third = LMDBSource(plain), TorchRecordSource(named), LMDBSource(large)
len(first), len(second), len(third)
stop = threading.Event()

def read():
    while not stop.is_set():
        third.read(range(30))

# Threads that are in the middle of reads when the process forks: they are missing in the child.
threads = [threading.Thread(target=read) for _ in range(3)]
for thread in threads:
    thread.start()
failed = 0
for round in range(4):
    child = os.fork()
    if child == 0:
        for source in (first, LMDBSource(plain)):
            assert source.read([7, 299]) == [value(7), value(299)]
            source.close()
        assert len(third[0]) == 200_000
        third.close()
        assert second.read_batch([7, 299])["y"].tolist() == [7, 299]
        grandchild = os.fork()
        if grandchild == 0:
            assert LMDBSource(plain)[3] == value(3)
            assert second[5]["y"] == 5
        else:
            assert os.waitpid(grandchild, 0)[1] == 0
        if round % 2:
            os._exit(0)
        # As a child ends that is not multiprocessing's: the interpreter takes everything apart.
        stop.set()
        sys.exit(0)
    failed += os.waitpid(child, 0)[1] != 0
stop.set()
for thread in threads:
    thread.join()
assert first[4] == value(4)
print("failed", failed)
"""


@pytest.mark.slow_suite
@pytest.mark.slow
def test_fork_while_threads_read(plain, named, tmp_path):
    """A child neither hangs nor disturbs its parent."""
    large = tmp_path / "large.lmdb"
    with LMDBWriter(large) as writer:  # long enough to be in the middle of one when the process forks
        writer.extend(bytes(200_000) for _ in range(100))
    done = subprocess.run(
        [sys.executable, "-c", _FORK, plain, named, large], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "failed 0\n", done.stderr


@pytest.mark.parametrize("kind", [LMDBSource, TorchRecordSource])
def test_every_truncation_is_an_error(kind, plain, named, tmp_path):
    whole = ((plain if kind is LMDBSource else named) / "data.mdb").read_bytes()
    for length in [*range(0, 300, 13), *range(300, len(whole), 2039), len(whole) - 1]:
        (tmp_path / "data.mdb").write_bytes(whole[:length])
        with kind(tmp_path) as source, pytest.raises(CorruptFileError) as caught:
            source[0]
        assert caught.value.path == str(tmp_path / "data.mdb")


def test_a_file_that_is_replaced_while_it_is_open(tmp_path):
    """A new file by rename is another file; the source goes on with the one it opened."""
    path, other = tmp_path / "data.lmdb", tmp_path / "other.lmdb"
    for place, count in ((path, RECORDS), (other, 5)):
        with LMDBWriter(place) as writer:
            writer.extend(value(index) for index in range(count))
    with LMDBSource(path) as source:
        assert source[0] == value(0)
        os.replace(other / "data.mdb", path / "data.mdb")
        assert source[200] == value(200)
        with LMDBSource(path) as new:
            assert len(new) == 5
        (path / "data.mdb").unlink()
        assert source[201] == value(201)
