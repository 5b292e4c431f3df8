"""Sources that are wrong on purpose, each in one way, to test the conformance suite.

Most are variants of one small correct source, `line_source.LineSource`.
"""

from __future__ import annotations

import io
import os
import threading
import time

import numpy as np
from line_source import LineFile, LineSource, line_record, parse_line

from dataload._util.indexing import as_indices, check_index
from dataload.collate import default_collate
from dataload.errors import ClosedSourceError
from dataload.sources.base import SliceSource, select_fields

FAULTS = []
"""Every fault: a wrong source, and the name of the check that must catch it."""


def caught_by(*checks):
    def mark(source):
        FAULTS.extend((source, check) for check in checks)
        return source

    return mark


@caught_by("check_request_order")
class SortsRequests(LineSource):
    """Returns records in file order."""

    def __getitems__(self, indices, /):
        return super().__getitems__(np.sort(as_indices(indices, len(self))))


@caught_by("check_duplicates")
class DropsDuplicates(LineSource):
    """Returns a record once, however often it is requested."""

    def __getitems__(self, indices, /):
        return super().__getitems__(list(dict.fromkeys(as_indices(indices, len(self)).tolist())))


@caught_by("check_negative_index")
class WrapsWrongly(LineSource):
    """Treats -1 as the second to last index."""

    def __getitem__(self, index, /):
        if not isinstance(index, slice) and -len(self) < index.__index__() < 0:
            index = index.__index__() - 1
        return super().__getitem__(index)


@caught_by("check_negative_index")
class CachesByHash(LineSource):
    """Caches by hash of the index; in Python, -1 and -2 have the same hash."""

    def __init__(self, paths):
        super().__init__(paths)
        self._cache = {}

    def __getitem__(self, index, /):
        if isinstance(index, slice):
            return super().__getitem__(index)
        return super().__getitem__(self._cache.setdefault(hash(index), index))


@caught_by("check_length")
class ForgetsLastRecord(LineSource):
    """Counts one record too few."""

    def __len__(self):
        return max(0, super().__len__() - 1)


@caught_by("check_out_of_range")
class WrapsAround(LineSource):
    """Takes every index modulo the number of records."""

    def __getitem__(self, index, /):
        return super().__getitem__(index if isinstance(index, slice) else index.__index__() % len(self))


@caught_by("check_wrong_index_types")
class RoundsFloats(LineSource):
    """Converts every index to int."""

    def __getitem__(self, index, /):
        return super().__getitem__(index if isinstance(index, slice) else int(index))


@caught_by("check_bad_index_in_request")
class SkipsBadIndices(LineSource):
    """Omits bad indices from a request."""

    def __getitems__(self, indices, /):
        items = list(indices)
        return super().__getitems__([i for i in items if -len(self) <= i.__index__() < len(self)])


@caught_by("check_shards")
class CountsAcrossShards(LineSource):
    """Looks for the last record of a shard in the next one."""

    def _read(self, indices):
        ends = np.cumsum(self.shard_lengths)
        wrong = np.isin(indices, ends[:-1] - 1) & (indices + 1 < len(self))
        return super()._read(indices + wrong)


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


@caught_by("check_values_survive_reads")
class ReusesBuffer(LineSource):
    """Decodes every record into the same array."""

    def _open_shard(self, path):
        return _Buffered(path)


class _Frozen(LineFile):
    def read(self, indices, fields):
        records = super().read(indices, fields)
        for record in records:
            record["x"].flags.writeable = False
        return records


@caught_by("check_records_belong_to_caller")
class ReturnsReadOnly(LineSource):
    """Returns read-only views."""

    def _open_shard(self, path):
        return _Frozen(path)


class _Cached(LineFile):
    def __init__(self, path):
        super().__init__(path)
        self._records = [line_record(line) for line in self.lines]

    def read(self, indices, fields):
        names = fields or ("x", "data")
        return [{name: self._records[index][name] for name in names} for index in indices.tolist()]


@caught_by("check_records_belong_to_caller", "check_rows_do_not_share_memory")
class HandsOutItsCache(LineSource):
    """Returns the same arrays to every caller."""

    def _open_shard(self, path):
        return _Cached(path)


@caught_by("check_columns")
class ColumnsOfFloat64(LineSource):
    """Widens the columns of a batch."""

    def _read_columns(self, indices, fields):
        batch = super()._read_columns(indices, fields)
        return {name: c.astype(np.float64) if isinstance(c, np.ndarray) else c for name, c in batch.items()}


@caught_by("check_read_after_close")
class ReadsAfterClose(LineSource):
    """Silently reopens its files."""

    def close(self):
        super().close()
        self._closed = False


@caught_by("check_missing_path")
class TakesEmptyForMissing(LineSource):
    """Treats a missing path as an empty data set."""

    def _open_shard(self, path):
        if not os.path.exists(path):
            path = os.devnull
        return _Lenient(path)


class _Lenient(LineFile):
    def __init__(self, path):
        with open(path, "rb") as stream:
            *lines, _ = stream.read().split(b"\n")
        self.lines = [parse_line(line, path, index) for index, line in enumerate(lines)]


@caught_by("check_damaged_files", "check_corruptions")
class ReadsWhatIsLeft(LineSource):
    """Reads what is left of a truncated file."""

    def _open_shard(self, path):
        return _Lenient(path)


@caught_by("check_iterators_are_apart")
class SharesOneIterator(LineSource):
    """Keeps the position of iteration in the source."""

    def __iter__(self):
        self._place = 0
        while self._place < len(self):
            self._place += 1
            yield self[self._place - 1]


@caught_by("check_repr")
class ShowsRecords(LineSource):
    """Puts its records into its repr."""

    def __repr__(self):
        return f"ShowsRecords({list(self)})"


@caught_by("check_pickle_size")
class KeepsRecordsInPickle(LineSource):
    """Sends the whole data set to every worker."""

    def __getstate__(self):
        return {**super().__getstate__(), "_everything": [record["data"] for record in self]}


@caught_by("check_fingerprint_of_moved_copy")
class FingerprintOfPlace(LineSource):
    """Identifies data by path."""

    def fingerprint(self):
        return self.paths[0].encode().hex()[-64:]


@caught_by("check_new_process")
class FingerprintByHash(LineSource):
    """Identifies data by a hash that depends on PYTHONHASHSEED."""

    def fingerprint(self):
        return f"{hash(os.path.basename(self.paths[0])) & (2**64 - 1):016x}"


@caught_by("check_fingerprint_tells_data_apart")
class FingerprintOfCount(LineSource):
    """Identifies data by the number of records."""

    def fingerprint(self):
        return f"{len(self):016x}"


@caught_by("check_read")
class SortsInRead(LineSource):
    """Returns file order from `read`, but not from `__getitems__`."""

    def read(self, indices):
        return super().__getitems__(np.sort(as_indices(indices, len(self))))


@caught_by("check_reversed")
class ReversesTwice(LineSource):
    """Yields the last record, then all from the first."""

    def __reversed__(self):
        yield self[-1]
        yield from self


@caught_by("check_locate")
class LocatesBlocks(LineSource):
    """Locates pairs of records instead of records."""

    def _locate(self, index):
        found = super()._locate(index)
        return found._replace(record=found.record // 2)


@caught_by("check_reads_in_order")
class LearnsItsOrder(LineSource):
    """Changes `reads_in_order` with every read."""

    _reads = 0

    def _read(self, indices):
        self._reads += 1
        return super()._read(indices)

    @property
    def reads_in_order(self):
        return self._reads % 2 == 1


@caught_by("check_fingerprint_of_slices")
class SlicesLookAlike(LineSource):
    """Gives slices the fingerprint of the whole."""

    def __getitem__(self, index, /):
        return _Anonymous(self, range(len(self))[index]) if isinstance(index, slice) else super().__getitem__(index)


class _Anonymous(SliceSource):
    def fingerprint(self):
        return self._parent.fingerprint()


@caught_by("check_close_during_reads")
class EmptiesItselfOnClose(LineSource):
    """Returns empty records if it is closed during a read."""

    _emptied = False

    def close(self):
        self._emptied = True
        time.sleep(0.1)  # other threads read meanwhile
        super().close()

    def _read(self, indices):
        len(self)
        time.sleep(0.001)  # lets the closing thread in, as a slow disk would
        if self._emptied:
            return [{"x": np.zeros((3, 4), np.float32), "data": b""} for _ in indices]
        return super()._read(indices)


@caught_by("check_columns_out_of_range")
class ClipsColumns(LineSource):
    """Clips indices in batches of columns, as `np.take` does in its fast paths."""

    def read_batch(self, indices, fields=None):
        rows = np.asarray(list(indices))
        if rows.dtype.kind not in "iu":
            raise TypeError(f"not indices: {rows}")
        return super().read_batch(np.where(rows < 0, rows, np.minimum(rows, len(self) - 1)), fields)


@caught_by("check_columns_of_any_request")
class CountsColumnsFromOne(LineSource):
    """Treats -1 as the second to last index, in batches of columns."""

    def read_batch(self, indices, fields=None):
        rows = as_indices(indices, len(self)) if not isinstance(indices, (list, np.ndarray)) else np.asarray(indices)
        if rows.dtype.kind == "i":
            rows = np.where((rows < 0) & (rows > -len(self)), rows - 1, rows)
        return super().read_batch(rows if rows.size else [], fields)


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


@caught_by("check_slices_are_sources")
class SlicesColumnsOfAll(LineSource):
    """Reads batches of a slice from the whole."""

    def __getitem__(self, index, /):
        return _Misplaced(self, range(len(self))[index]) if isinstance(index, slice) else super().__getitem__(index)


class _Misplaced(SliceSource):
    def _read_columns(self, indices, fields):
        return self._parent._read_columns(indices, fields)


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
        offset, size = self._spans[check_index(index, len(self))]
        self._go_to(stream, offset)
        return line_record(bytes.fromhex(stream.read(size).decode()))

    def _go_to(self, stream, offset):
        stream.seek(offset)
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

    def __getitem__(self, index):
        stream = self._open()
        number = check_index(index, len(self))
        if self._place != number:
            stream.seek(self._spans[number][0])
        self._place = number + 1
        return line_record(bytes.fromhex(stream.read(self._spans[number][1] + 1).decode()))


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


@caught_by("check_forgotten_source")
class LeavesFileOpen(LineSource):
    """Leaves a file for the garbage collector to close."""

    def _open_shard(self, path):
        open(path, "rb").read(1)  # noqa: SIM115 - the fault
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
