"""Sources that are wrong on purpose, each in one way, to test the conformance suite.

Most are variants of one small correct source, `line_source.LineSource`, with another method.
"""

import io
import os
import threading
import time

import numpy as np
from line_source import LineFile, LineSource, line_record, parse_line

from dataload._util.indexing import as_indices, check_index
from dataload.catalog.facts import select_fields
from dataload.collate import default_collate
from dataload.errors import ClosedSourceError
from dataload.sources.base import SliceSource

FAULTS = []
"""Every fault: a wrong source, and the name of the check that must catch it."""


def caught_by(*checks):
    def mark(source):
        FAULTS.extend((source, check) for check in checks)
        return source

    return mark


def wrong(name, *checks, **members):
    """Define a variant of the correct source that these checks must catch."""
    globals()[name] = caught_by(*checks)(type(name, (LineSource,), {"__module__": __name__, **members}))


def single(change):
    """Return a `__getitem__` that changes an index, but no slice."""

    def get(self, index):
        return LineSource.__getitem__(self, index if isinstance(index, slice) else change(self, index))

    return get


def batch(change):
    """Return a `__getitems__` that changes the indices."""
    return lambda self, indices: LineSource.__getitems__(self, change(self, indices))


def sort(self, indices):
    return np.sort(as_indices(indices, len(self)))


def off_by_one(self, index):
    number = index.__index__()
    return number - 1 if -len(self) < number < 0 else index


def in_range(self, indices):
    return [i for i in indices if -len(self) <= i.__index__() < len(self)]


def read_shards(kind):
    return lambda self, path: kind(path)


class _Buffered(LineFile):
    def __init__(self, path):
        super().__init__(path)
        self._buffer = np.empty((3, 4), np.float32)

    def read(self, indices, fields):
        records = super().read(indices, fields)
        for record in records:
            self._buffer[...] = record["x"]
            record["x"] = self._buffer
        return records


class _Frozen(LineFile):
    def read(self, indices, fields):
        records = super().read(indices, fields)
        for record in records:
            record["x"].flags.writeable = False
        return records


class _Cached(LineFile):
    def __init__(self, path):
        super().__init__(path)
        self._records = [line_record(line) for line in self.lines]

    def read(self, indices, fields):
        names = fields or ("x", "data")
        return [{name: self._records[index][name] for name in names} for index in indices.tolist()]


class _Lenient(LineFile):
    """Reads what is left of a file, or of none."""

    def __init__(self, path):
        with open(path if os.path.exists(path) else os.devnull, "rb") as stream:
            *lines, _ = stream.read().split(b"\n")
        self.lines = [parse_line(line, path, index) for index, line in enumerate(lines)]


class _Anonymous(SliceSource):
    def fingerprint(self):
        return self._parent.fingerprint()


class _Misplaced(SliceSource):
    def _read_columns(self, indices, fields):
        return self._parent._read_columns(indices, fields)


def slices(kind):

    def get(self, index):
        return kind(self, range(len(self))[index]) if isinstance(index, slice) else LineSource.__getitem__(self, index)

    return get


def across_shards(self, indices):
    """Look for the last record of a shard in the next one."""
    ends = np.cumsum(self.shard_lengths)
    return LineSource._read(self, indices + (np.isin(indices, ends[:-1] - 1) & (indices + 1 < len(self))))


def float64_columns(self, indices, fields):
    found = LineSource._read_columns(self, indices, fields)
    return {name: c.astype(np.float64) if isinstance(c, np.ndarray) else c for name, c in found.items()}


def reopen(self):
    LineSource.close(self)
    self._closed = False


def one_iterator(self):
    self._place = 0
    while self._place < len(self):
        self._place += 1
        yield self[self._place - 1]


def last_then_all(self):
    yield self[-1]
    yield from self


def locate_pairs(self, index):
    found = LineSource._locate(self, index)
    return found._replace(record=found.record // 2)


def count_reads(self, indices):
    self._reads += 1
    return LineSource._read(self, indices)


def read_of_index(self, index, _cache={}):  # noqa: B006
    """Look up indices by their hash: in Python, -1 and -2 have the same."""
    if isinstance(index, slice):
        return LineSource.__getitem__(self, index)
    return LineSource.__getitem__(self, _cache.setdefault((id(self), hash(index)), index))


def clip(self, indices, fields=None):
    rows = np.asarray(list(indices))
    if rows.dtype.kind not in "iu":
        raise TypeError(f"not indices: {rows}")
    return LineSource.read_batch(self, np.where(rows < 0, rows, np.minimum(rows, len(self) - 1)), fields)


def columns_from_one(self, indices, fields=None):
    """Treat -1 as the second to last index."""
    rows = as_indices(indices, len(self)) if not isinstance(indices, (list, np.ndarray)) else np.asarray(indices)
    if rows.dtype.kind == "i":
        rows = np.where((rows < 0) & (rows > -len(self)), rows - 1, rows)
    return LineSource.read_batch(self, rows if rows.size else [], fields)


def empty_on_close(self):
    self._emptied = True
    time.sleep(0.1)  # other threads read meanwhile
    LineSource.close(self)


def read_emptied(self, indices):
    len(self)
    time.sleep(0.001)  # lets the closing thread in, as a slow disk would
    if self._emptied:
        return [{"x": np.zeros((3, 4), np.float32), "data": b""} for _ in indices]
    return LineSource._read(self, indices)


def leave_open(self, path):
    open(path, "rb").read(1)  # noqa: SIM115 - the fault
    return LineFile(path)


def state_with_records(self):
    return {**LineSource.__getstate__(self), "_everything": [record["data"] for record in self]}


def hash_of_name(self):
    return f"{hash(os.path.basename(self.paths[0])) & (2**64 - 1):016x}"


wrong("SortsRequests", "check_request_order", __getitems__=batch(sort))
wrong("DropsDuplicates", "check_duplicates", __getitems__=batch(
    lambda self, indices: list(dict.fromkeys(as_indices(indices, len(self)).tolist()))
))  # fmt: skip
wrong("WrapsWrongly", "check_negative_index", __getitem__=single(off_by_one))
wrong("CachesByHash", "check_negative_index", __getitem__=read_of_index)
wrong("ForgetsLastRecord", "check_length", __len__=lambda self: max(0, LineSource.__len__(self) - 1))
wrong("WrapsAround", "check_out_of_range", __getitem__=single(lambda self, index: index.__index__() % len(self)))
wrong("RoundsFloats", "check_wrong_index_types", __getitem__=single(lambda self, index: int(index)))
wrong("SkipsBadIndices", "check_bad_index_in_request", __getitems__=batch(in_range))
wrong("CountsAcrossShards", "check_shards", _read=across_shards)
wrong("ReusesBuffer", "check_values_survive_reads", _open_shard=read_shards(_Buffered))
wrong("ReturnsReadOnly", "check_records_belong_to_caller", _open_shard=read_shards(_Frozen))
wrong(
    *("HandsOutItsCache", "check_records_belong_to_caller", "check_rows_do_not_share_memory"),
    _open_shard=read_shards(_Cached),
)
wrong("ColumnsOfFloat64", "check_columns", _read_columns=float64_columns)
wrong("ReadsAfterClose", "check_read_after_close", close=reopen)
wrong("TakesEmptyForMissing", "check_missing_path", _open_shard=read_shards(_Lenient))
wrong("ReadsWhatIsLeft", "check_damaged_files", "check_corruptions", _open_shard=read_shards(_Lenient))
wrong("SharesOneIterator", "check_iterators_are_apart", __iter__=one_iterator)
wrong("ShowsRecords", "check_repr", __repr__=lambda self: f"ShowsRecords({list(self)})")
wrong("KeepsRecordsInPickle", "check_pickle_size", __getstate__=state_with_records)
wrong(
    *("FingerprintOfPlace", "check_fingerprint_of_moved_copy"),
    fingerprint=lambda self: self.paths[0].encode().hex()[-64:],
)
wrong("FingerprintByHash", "check_new_process", fingerprint=hash_of_name)
wrong("FingerprintOfCount", "check_fingerprint_tells_data_apart", fingerprint=lambda self: f"{len(self):016x}")
wrong("SortsInRead", "check_read", read=lambda self, indices: LineSource.__getitems__(self, sort(self, indices)))
wrong("ReversesTwice", "check_reversed", __reversed__=last_then_all)
wrong("LocatesBlocks", "check_locate", _locate=locate_pairs)
wrong(
    *("LearnsItsOrder", "check_reads_in_order"),
    _reads=0,
    _read=count_reads,
    reads_in_order=property(lambda self: self._reads % 2 == 1),
)
wrong("SlicesLookAlike", "check_fingerprint_of_slices", __getitem__=slices(_Anonymous))
wrong("EmptiesItselfOnClose", "check_close_during_reads", _emptied=False, close=empty_on_close, _read=read_emptied)
wrong("ClipsColumns", "check_columns_out_of_range", read_batch=clip)
wrong("CountsColumnsFromOne", "check_columns_of_any_request", read_batch=columns_from_one)
wrong("SlicesColumnsOfAll", "check_slices_are_sources", __getitem__=slices(_Misplaced))
wrong("LeavesFileOpen", "check_forgotten_source", _open_shard=leave_open)


@caught_by("check_threads_reading_columns")
class SharesOneBatch(LineSource):
    """Collects every batch in the same list."""

    def __init__(self, paths):
        super().__init__(paths)
        self._rows = []

    def _read_columns(self, indices, fields):
        self._rows.clear()
        for index in indices.tolist():
            self._rows += super()._read(np.array([index]))
            time.sleep(0)  # lets another thread in, as a slow disk would
        records = self._rows[: len(indices)]
        return default_collate(records if fields is None else [select_fields(r, fields) for r in records])


@caught_by("check_threads")
class SharesOneOffset:
    """Seeks and then reads on one shared handle, which is opened on first use.

    Not built on `LineSource`, whose base class prevents this.
    """

    def __init__(self, path):
        self._path = os.fspath(path)
        self._stream = None
        self._spans = []
        self._closed = False
        self._opening = threading.Lock()

    def _open(self):
        with self._opening:
            if self._closed:
                raise ClosedSourceError("closed")
            if self._stream is None:
                with open(self._path, "rb") as stream:
                    lines = stream.read().split(b"\n")[:-1]
                ends = np.cumsum([len(line) + 1 for line in lines], dtype=np.int64).tolist()
                self._spans = [(e - len(s) - 1, len(s)) for e, s in zip(ends, lines, strict=True)]
                self._stream = io.FileIO(self._path)
            return self._stream

    def __len__(self):
        self._open()
        return len(self._spans)

    def __getitem__(self, index):
        stream = self._open()
        number = check_index(index, len(self))
        self._go_to(stream, number)
        return line_record(bytes.fromhex(stream.read(self._spans[number][1]).decode()))

    def _go_to(self, stream, number):
        stream.seek(self._spans[number][0])
        time.sleep(0)  # lets another thread in, as a slow disk would

    def close(self):
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    def __getstate__(self):
        return {"_path": self._path}

    def __setstate__(self, state):
        self.__init__(state["_path"])

    def __repr__(self):
        return f"{type(self).__name__}({os.path.basename(self._path)!r})"


@caught_by("check_fork_after_read")
class RemembersOffset(SharesOneOffset):
    """Seeks only if its own record of the offset says so; a forked child may have moved the offset."""

    _place = -1

    def _go_to(self, stream, number):
        if self._place != number:
            stream.seek(self._spans[number][0])
        elif number:
            stream.read(1)  # the end of the line before
        self._place = number + 1


@caught_by("check_construction_opens_nothing", "check_new_process")
class OpensAtOnce(LineSource):
    """Opens a descriptor in its constructor and pickles the number."""

    def __init__(self, paths):
        super().__init__(paths)
        self._handle = os.open(self.paths[0], os.O_RDONLY) if os.path.exists(self.paths[0]) else -1

    def _open_shard(self, path):
        os.fstat(self._handle)
        return LineFile(path)

    def close(self):
        super().close()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


@caught_by("check_close_releases_everything")
class LeaksDescriptors(LineSource):
    """Leaks a descriptor per shard; tests close those in `leaked`."""

    leaked = []  # noqa: RUF012 - shared on purpose

    def _open_shard(self, path):
        self.leaked.append(os.open(path, os.O_RDONLY))
        return LineFile(path)


@caught_by("check_first_use_by_threads")
class OpensWithoutLock(LineSource):
    """Marks itself as open before it is."""

    def __init__(self, paths):
        super().__init__(paths)
        self._ready = False
        self._lines = []

    def __getitem__(self, index, /):
        if not self._ready:
            self._ready = True
            with open(self.paths[0], "rb") as stream:
                lines = stream.read().split(b"\n")[:-1]
            for line in lines:
                time.sleep(0)
                self._lines.append(bytes.fromhex(line.decode()))
        return super().__getitem__(index) if isinstance(index, slice) else line_record(self._lines[index])
