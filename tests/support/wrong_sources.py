"""Sources that are wrong on purpose, each in one way, to test the conformance suite.

Most are variants of one small correct source, `line_source.LineSource`, with another method.
"""

import os
import threading
import time

import numpy as np
from line_source import LineFile, LineSource, line_record, parse_line

from dataload._util.indexing import as_indices
from dataload.sources.base import SliceSource
from dataload.types import FieldSpec

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


class _Lenient(LineFile):
    """Reads what is left of a file, or of none."""

    def __init__(self, path):
        with open(path if os.path.exists(path) else os.devnull, "rb") as stream:
            *lines, _ = stream.read().split(b"\n")
        self.lines = [parse_line(line, path, index) for index, line in enumerate(lines)]


class _Seeking(LineFile):
    """Seeks and then reads on a handle that threads share."""

    def read(self, indices, fields):
        records = []
        for self._offset in indices.tolist():
            time.sleep(0)  # lets another thread in, as a slow disk would
            records.append(line_record(self.lines[self._offset], fields))
        return records


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


def columns(change):
    """Return a `read_batch` that changes the indices."""
    return lambda self, indices, fields=None: LineSource.read_batch(self, change(self, indices), fields)


def batches(change):
    """Return a `read_batch` that changes the batch."""
    return lambda self, indices, fields=None: change(self, LineSource.read_batch(self, indices, fields))


def records(change):
    """Return a `_read` that changes each record."""
    return lambda self, indices: [{**record, **change(self, record)} for record in LineSource._read(self, indices)]


def here(self, value):
    return value if threading.current_thread() is threading.main_thread() else 0


def open_at_once(self, paths):
    LineSource.__init__(self, paths)
    LeaksDescriptors.leaked.append(os.open(self.paths[0], os.O_RDONLY))


def sort_in_place(self, indices):
    indices.sort()
    return indices


def tire(self, index):
    self._reads += 1
    return index if self._reads < 40 else 0


def name_no_length(self, index):
    if isinstance(index, int) and index >= len(self):
        raise IndexError(f"no record {index}")
    return index


def one_array(self, record):
    self._buffer[...] = record["x"]
    return {"x": self._buffer}


def from_cache(self, indices):
    found = zip(indices.tolist(), LineSource._read(self, indices), strict=True)
    return [self.__dict__.setdefault(f"record {index}", record) for index, record in found]


def one_buffer(self, batch):
    self._columns[: len(batch["x"])] = batch["x"]
    return {**batch, "x": self._columns[: len(batch["x"])]}


def clear_given(self):
    LineSource.close(self)
    for array in self._given:
        array[...] = 0


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
wrong("ReusesBuffer", "check_values_survive_reads", _buffer=np.empty((3, 4), np.float32), _read=records(one_array))
wrong("ReadsReadOnly", "check_records_belong_to_caller", _read=records(lambda _, r: r["x"].setflags(write=False) or {}))
wrong("HandsOutItsCache", "check_records_belong_to_caller", "check_rows_do_not_share_memory", _read=from_cache)
wrong("ColumnsOfFloat64", "check_columns", _read_columns=float64_columns)
wrong("ReadsAfterClose", "check_read_after_close", close=reopen)
wrong(
    *("ReadsColumnsAfterClose", "check_read_after_close"),
    read_batch=lambda self, indices, fields=None: LineSource(self.paths).read_batch(indices, fields),
)
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
wrong("SharesOneOffset", "check_threads", _open_shard=read_shards(_Seeking))
wrong("OpensAtOnce", "check_construction_opens_nothing", __init__=open_at_once)
wrong("ReadsFloat64", "check_records", _read=records(lambda self, found: {"x": found["x"].astype(np.float64)}))
wrong("Tires", "check_repeated_reads", _reads=0, __getitem__=single(tire))
wrong("GivesTuples", "check_request", __getitems__=lambda self, indices: (*LineSource.__getitems__(self, indices),))
wrong("GivesNone", "check_empty_request", __getitems__=lambda self, i: LineSource.__getitems__(self, i) or None)
wrong("GivesEmptyColumns", "check_empty_request", read_batch=batches(lambda self, batch: batch or {"data": []}))
wrong("LimitsRequests", "check_long_request", __getitems__=batch(lambda self, indices: indices[:50]))
wrong("LimitsBatches", "check_columns_of_long_request", read_batch=columns(lambda self, indices: indices[:50]))
wrong("EndsEarly", "check_iteration", __iter__=lambda self: iter([self[i] for i in range(len(self) - 1)]))
wrong("NeverEnds", "check_iteration", __iter__=lambda self: (self[i % len(self)] for i in range(10**9)))
wrong("KnowsPythonsInts", "check_index_types", __getitem__=single(lambda self, i: i if type(i) is int else 0))
wrong("TurnsRanges", "check_request_types", __getitems__=batch(lambda self, i: i[::-1] if type(i) is range else i))
wrong("SortsTheRequest", "check_request_is_not_changed", __getitems__=batch(sort_in_place))
wrong("SortsTheBatch", "check_request_is_not_changed", read_batch=columns(sort_in_place))
wrong("CutsSlices", "check_slices", __getitem__=slices(lambda self, span: SliceSource(self, span[:-1])))
wrong("TurnsSlices", "check_slices", __getitem__=slices(lambda self, span: SliceSource(self, span[::-1])))
wrong("ListsShards", "check_shard_lengths", shard_lengths=property(lambda self: [len(self)]))
wrong("LosesRecords", "check_shard_lengths", shard_lengths=property(lambda self: (len(self) - 1,)))
wrong("OwesRecords", "check_shard_lengths", shard_lengths=property(lambda self: (len(self) + 1, -1)))
wrong("HasTwo", "check_single_record", __len__=lambda self: max(2, LineSource.__len__(self)))
wrong("HasOne", "check_empty_dataset", __len__=lambda self: max(1, LineSource.__len__(self)))
wrong("CutsLongRecords", "check_record_sizes", _read=records(lambda self, found: {"data": found["data"][:65_000]}))
wrong("ReadsEmptyAsNone", "check_empty_values", _read=records(lambda self, found: {"data": found["data"] or None}))
wrong("ForgetsSigns", "check_negative_index_in_request", __getitems__=batch(lambda self, i: [*map(abs, i)]))
wrong("NamesNoLength", "check_index_error_text", __getitem__=single(name_no_length))
wrong("OrdersFields", "check_columns_of_some_fields", read_batch=batches(
    lambda self, batch: {name: batch[name] for name in ("x", "data") if name in batch}
))  # fmt: skip
wrong("MissesField", "check_fields", fields={"x": FieldSpec("float32", (3, 4))})
wrong("MistakesType", "check_fields", fields={"x": FieldSpec("float32", (3, 4)), "data": FieldSpec("str", ())})
wrong("MistakesShape", "check_fields", fields={"x": FieldSpec("float32", (3, 5)), "data": FieldSpec("bytes", ())})
wrong("KeepsBatches", "check_columns_belong_to_caller", read_batch=lambda self, indices, fields=None: (
    self.__dict__.setdefault(f"{np.asarray(indices)} {fields}", LineSource.read_batch(self, indices, fields))
))  # fmt: skip
wrong(
    *("ReusesColumns", "check_batches_survive_reads", "check_parts_of_large_batches_survive"),
    _columns=np.empty((64, 3, 4), np.float32),
    read_batch=batches(one_buffer),
)
wrong("ClearsOnClose", "check_values_survive_close", _given=[], close=clear_given, _read=records(
    lambda self, found: self._given.append(found["x"]) or {}
))  # fmt: skip
wrong("GrowsFile", "check_reading_changes_no_file", _read=records(
    lambda self, found: os.truncate(self.paths[0], os.path.getsize(self.paths[0]) + 1) or {}
))  # fmt: skip
wrong("EntersAnother", "check_context_manager", __enter__=lambda self: LineSource(self.paths))
wrong("StaysOpen", "check_context_manager", __exit__=lambda self, *error: None)
wrong("StaysOpenAfterErrors", "check_context_manager", __exit__=lambda self, *error: error[0] or self.close())
wrong("ClosesOnce", "check_close_twice", close=lambda self: 1 / 0 if self._closed else LineSource.close(self))
wrong("ReadsHere", "check_threads_at_one_index", "check_first_use_by_threads", __getitem__=single(here))
wrong("BatchesHere", "check_threads_reading_columns", read_batch=batches(here))
wrong("PicklesThree", "check_pickle", __reduce__=lambda self: (list, ([*self[:3]],)))
wrong("PicklesOthers", "check_pickle", __reduce__=lambda self: (list, ([*self[::-1]],)))
wrong("StaysAtHome", "check_fork_before_read", "check_fork_after_read", _home=os.getpid(), _read=records(
    lambda self, found: {} if os.getpid() == self._home else {"data": b"away"}
))  # fmt: skip
wrong("PicklesRecords", "check_moved_files", __reduce__=lambda self: (list, ([*self],)))
wrong("FingerprintOfReads", "check_fingerprint", _reads=0, _read=count_reads,
    fingerprint=lambda self: f"{self._reads:016x}")  # fmt: skip
wrong("FingerprintOfWords", "check_fingerprint", fingerprint=lambda self: "the same as yesterday")


@caught_by("check_close_releases_everything")
class LeaksDescriptors(LineSource):
    """Leaks a descriptor per shard; tests close those in `leaked`."""

    leaked = []  # noqa: RUF012 - shared on purpose

    def _open_shard(self, path):
        self.leaked.append(os.open(path, os.O_RDONLY))
        return LineFile(path)
