"""Files that lmdb writes to while they are read: old records or an error, never a mixture."""

import lmdb
import numpy as np
import pytest
from refusals import refuses

from dataload.codecs.tensorprotos import encode
from dataload.errors import CorruptFileError, SourceError
from dataload.sources.lmdb import tree as lmdb_snapshot
from dataload.sources.lmdb.reader import LMDBSource
from dataload.sources.lmdb.torchrecord import TorchRecordSource
from dataload.storage.core import can_map
from dataload.storage.local.record_files import MappedFile, UnmappedFile

FILE = MappedFile if can_map() else UnmappedFile
RECORDS = 120
WRITTEN = "has been written to since it was opened.*: open the data set again"


class Writer:
    """Transactions that replace all records, in a main database and in a TorchRecord."""

    def __init__(self, path, kind, **options):
        self.path = str(path)
        self.environment = lmdb.open(self.path, map_size=1 << 26, max_dbs=1, sync=False, **options)
        self.torchrecord = kind is TorchRecordSource
        self.database = self.environment.open_db(b"db0" if self.torchrecord else None)
        self.commits = 0
        for _ in range(5):  # until there are free pages to use again
            self.commit()

    def commit(self):
        self.commits += 1
        with self.environment.begin(write=True, db=self.database) as txn:
            for number in range(RECORDS):
                txn.put(b"%03d" % number, self.value(number, self.commits))

    def value(self, number, commit):
        x = np.full(number % 3 * 700 + 5, commit * RECORDS + number, np.float64)
        return encode({"x": x}) if self.torchrecord else x.tobytes()

    def expected(self, indices, commit):
        return [self.value(number, commit) for number in indices]


@pytest.fixture(params=[LMDBSource, TorchRecordSource], ids=["lmdb", "torchrecord"])
def kind(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["written", "mapped"])
def writer(request, kind, tmp_path):
    writer = Writer(tmp_path / "e", kind, writemap=request.param)
    yield writer
    writer.environment.close()


def stored(source, indices):
    if isinstance(source, LMDBSource):
        return source.read(indices)
    return [encode(record) for record in source.read(indices)]


def test_one_commit_and_an_open_transaction_do_not_matter(kind, writer):
    with kind(writer.path) as source, kind(writer.path) as other:
        assert stored(source, [0, 7, 119, 7]) == writer.expected([0, 7, 119, 7], 5)
        assert len(other) == RECORDS
        writer.commit()
        with writer.environment.begin(write=True, db=writer.database) as txn:
            for number in range(RECORDS):
                txn.put(b"%03d" % number, b"?" * 3000)
            for each in (source, other):
                assert stored(each, range(RECORDS)) == writer.expected(range(RECORDS), 5)
                assert each.locate(7).key.endswith("007")
            txn.abort()
        with kind(writer.path) as new:
            assert stored(new, range(RECORDS)) == writer.expected(range(RECORDS), 6)


def test_two_commits_are_noticed(kind, writer):
    with kind(writer.path) as source:
        assert stored(source, [3]) == writer.expected([3], 5)
        writer.commit()
        writer.commit()
        refuses(source, [3, 6], WRITTEN, path=f"{writer.path}/data.mdb")
        if kind is LMDBSource:
            assert source.locate(3).key is None
    with kind(writer.path) as source:
        assert stored(source, [3]) == writer.expected([3], 7)


def test_commits_during_a_read_are_noticed(kind, writer, monkeypatch):
    """Just before the records are copied."""
    commits = []

    def after_commits(real):
        def copy(*args):
            while commits:
                commits.pop()()
            return real(*args)

        return copy

    with kind(writer.path) as source:
        assert len(source) == RECORDS
        for method in ("_gather", "_gather_ranges", "copies"):
            monkeypatch.setattr(FILE, method, after_commits(getattr(FILE, method)))
        commits[:] = [writer.commit]
        assert stored(source, [3, 6, 9, 12]) == writer.expected([3, 6, 9, 12], 5)
        for read in (source.read, source.read_batch):
            commits[:] = [writer.commit] * 3
            with pytest.raises(CorruptFileError, match=WRITTEN):
                read([3, 6, 9, 12, 4, 5])


def test_commits_while_it_is_opened(kind, writer, monkeypatch):
    """The walk starts again, and gives up if that is of no use."""
    real = FILE._gather
    commits = []

    def gather(self, *args):
        if commits:
            for _ in range(commits.pop()):
                writer.commit()
        return real(self, *args)

    monkeypatch.setattr(FILE, "_gather", gather)
    for overtaken in (1, 2, lmdb_snapshot._ATTEMPTS - 1):
        commits[:] = [3] * overtaken
        with kind(writer.path) as source:
            assert stored(source, range(RECORDS)) == writer.expected(range(RECORDS), writer.commits)
        assert not commits
    commits[:] = [1]
    with kind(writer.path) as source:  # one more commit: the older transaction is still whole
        assert stored(source, [8]) == writer.expected([8], writer.commits - 1)
    commits[:] = [2] * 99
    with pytest.raises(SourceError, match=r"was written to 5 times while it was being opened: open it when its writer"):
        len(kind(writer.path))


def test_a_file_that_grows_while_it_is_opened(kind, writer, monkeypatch):
    """The meta page that is read is newer than the size of the file, which is not truncated."""
    real, sizes = lmdb_snapshot.read_info, []

    def read_info(file):
        if not sizes:
            file.size = 3 * 4096
        sizes.append(file.size)
        return real(file)

    monkeypatch.setattr(lmdb_snapshot, "read_info", read_info)
    with kind(writer.path) as source:
        assert stored(source, [3]) == writer.expected([3], 5)
    assert len(sizes) == 2
