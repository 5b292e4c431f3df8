"""Sources that are wrong on purpose, each in one way: what the suite is tested on.

All of them are variants of one small honest source, `dataload.testing.lines.LineSource`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload._util.indexing import as_indices
from dataload.sources.base import Location, SliceSource
from dataload.sources.files import ShardReader
from dataload.testing.fault_columns import ClipsColumns, CountsColumnsFromOne, SharesOneBatch, SlicesColumnsOfAll
from dataload.testing.fault_handles import (
    LeaksDescriptors,
    LeavesFileOpen,
    OpensAtOnce,
    OpensWithoutLock,
    RemembersOffset,
    SharesOneOffset,
)
from dataload.testing.lines import LineFile, LineSource, line_record, parse_line
from dataload.types import Batch, Int64Array

__all__ = ["FAULTS", "Fault"]


class SortsRequests(LineSource):
    """Gives records in file order."""

    def __getitems__(self, indices: Any, /) -> list[Any]:
        return super().__getitems__(np.sort(as_indices(indices, len(self))))


class DropsDuplicates(LineSource):
    """Gives a record once, however often it is asked for."""

    def __getitems__(self, indices: Any, /) -> list[Any]:
        return super().__getitems__(list(dict.fromkeys(as_indices(indices, len(self)).tolist())))


class WrapsWrongly(LineSource):
    """Takes -1 for the last but one."""

    def __getitem__(self, index: Any, /) -> Any:
        if not isinstance(index, slice) and -len(self) < index.__index__() < 0:
            index = index.__index__() - 1
        return super().__getitem__(index)


class CachesByHash(LineSource):
    """Keeps records by the hash of the index; Python's hash of -1 is that of -2."""

    def __init__(self, paths: Any) -> None:
        super().__init__(paths)
        self._cache: dict[int, int] = {}

    def __getitem__(self, index: Any, /) -> Any:
        if isinstance(index, slice):
            return super().__getitem__(index)
        return super().__getitem__(self._cache.setdefault(hash(index), index))


class ForgetsLastRecord(LineSource):
    """Counts one record too few."""

    def __len__(self) -> int:
        return max(0, super().__len__() - 1)


class WrapsAround(LineSource):
    """Takes every index modulo the number of records."""

    def __getitem__(self, index: Any, /) -> Any:
        return super().__getitem__(index if isinstance(index, slice) else index.__index__() % len(self))


class RoundsFloats(LineSource):
    """Makes an int of whatever is asked for."""

    def __getitem__(self, index: Any, /) -> Any:
        return super().__getitem__(index if isinstance(index, slice) else int(index))


class SkipsBadIndices(LineSource):
    """Leaves out of a request what it cannot read."""

    def __getitems__(self, indices: Any, /) -> list[Any]:
        items = list(indices)
        return super().__getitems__([i for i in items if -len(self) <= i.__index__() < len(self)])


class CountsAcrossShards(LineSource):
    """Looks for the last record of a shard in the next one."""

    def _read(self, indices: Int64Array) -> list[Any]:
        ends = np.cumsum(self.shard_lengths)
        wrong = np.isin(indices, ends[:-1] - 1) & (indices + 1 < len(self))
        return super()._read(indices + wrong)


class _Buffered(LineFile):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._buffer = np.empty((3, 4), np.float32)

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[dict[str, Any]]:
        records = super().read(indices, fields)
        for record in records:
            self._buffer[...] = record["x"]
            record["x"] = self._buffer
        return records


class ReusesBuffer(LineSource):
    """Decodes every record into the same array."""

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        return _Buffered(path)


class _Frozen(LineFile):
    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[dict[str, Any]]:
        records = super().read(indices, fields)
        for record in records:
            record["x"].flags.writeable = False
        return records


class ReturnsReadOnly(LineSource):
    """Gives views that nobody may write to."""

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        return _Frozen(path)


class _Cached(LineFile):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._records = [line_record(line) for line in self.lines]

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[dict[str, Any]]:
        names = fields or ("x", "data")
        return [{name: self._records[index][name] for name in names} for index in indices.tolist()]


class HandsOutItsCache(LineSource):
    """Gives the same arrays to everybody."""

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        return _Cached(path)


class ColumnsOfFloat64(LineSource):
    """Widens the columns of a batch."""

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        batch = super()._read_columns(indices, fields)
        return {name: c.astype(np.float64) if isinstance(c, np.ndarray) else c for name, c in batch.items()}


class ReadsAfterClose(LineSource):
    """Opens its files again in silence."""

    def close(self) -> None:
        """Close, and forget that."""
        super().close()
        self._closed = False


class TakesEmptyForMissing(LineSource):
    """Takes a path where nothing is for a data set of no records."""

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        if not os.path.exists(path):
            path = os.devnull
        return _Lenient(path)


class _Lenient(LineFile):
    def __init__(self, path: str) -> None:
        with open(path, "rb") as stream:
            *lines, _ = stream.read().split(b"\n")
        self.lines = [parse_line(line, path, index) for index, line in enumerate(lines)]


class ReadsWhatIsLeft(LineSource):
    """Takes a file that was cut for a shorter one."""

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        return _Lenient(path)


class SharesOneIterator(LineSource):
    """Iterates by a place that it keeps itself."""

    def __iter__(self) -> Iterator[Any]:
        self._place = 0
        while self._place < len(self):
            self._place += 1
            yield self[self._place - 1]


class ShowsRecords(LineSource):
    """Puts its records into its repr."""

    def __repr__(self) -> str:
        return f"ShowsRecords({list(self)})"


class KeepsRecordsInPickle(LineSource):
    """Sends the whole data set to every worker."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_everything": [record["data"] for record in self]}


class FingerprintOfPlace(LineSource):
    """Identifies data by where they lie."""

    def fingerprint(self) -> str:
        """The path, in hexadecimal."""
        return self.paths[0].encode().hex()[-64:]


class FingerprintByHash(LineSource):
    """Identifies data by a number that PYTHONHASHSEED decides."""

    def fingerprint(self) -> str:
        """Differs from process to process."""
        return f"{hash(os.path.basename(self.paths[0])) & (2**64 - 1):016x}"


class FingerprintOfCount(LineSource):
    """Identifies data by how many there are."""

    def fingerprint(self) -> str:
        """The length."""
        return f"{len(self):016x}"


class SortsInRead(LineSource):
    """Gives file order under one of the two names for a request."""

    def read(self, indices: Any) -> list[Any]:
        """In file order."""
        return super().__getitems__(np.sort(as_indices(indices, len(self))))


class ReversesTwice(LineSource):
    """Gives the last record first, and goes on from the first."""

    def __reversed__(self) -> Iterator[Any]:
        yield self[-1]
        yield from self


class LocatesBlocks(LineSource):
    """Says in which pair of records one lies."""

    def _locate(self, index: int) -> Location:
        found = super()._locate(index)
        return found._replace(record=found.record // 2)


class LearnsItsOrder(LineSource):
    """Asks for another order after every read."""

    _reads = 0

    def _read(self, indices: Int64Array) -> list[Any]:
        self._reads += 1
        return super()._read(indices)

    @property
    def reads_in_order(self) -> bool:
        """Whether it was read an odd number of times."""
        return self._reads % 2 == 1


class SlicesLookAlike(LineSource):
    """Its slices have the fingerprint of the whole."""

    def __getitem__(self, index: Any, /) -> Any:
        return _Anonymous(self, range(len(self))[index]) if isinstance(index, slice) else super().__getitem__(index)


class _Anonymous(SliceSource[Any]):
    def fingerprint(self) -> str:
        """That of the whole."""
        return self._parent.fingerprint()


class EmptiesItselfOnClose(LineSource):
    """Lets a read that began before `close` find nothing."""

    _emptied = False

    def close(self) -> None:
        """Close, and forget the records."""
        self._emptied = True
        super().close()

    def _read(self, indices: Int64Array) -> list[Any]:
        len(self)
        for _ in range(20):
            time.sleep(0)  # lets the closing thread in, as a slow disk would
        if self._emptied:
            return [{"x": np.zeros((3, 4), np.float32), "data": b""} for _ in indices]
        return super()._read(indices)


@dataclass(frozen=True, slots=True)
class Fault:
    """A wrong source, and the check that must catch it."""

    source: type[Any]
    check: str


FAULTS: tuple[Fault, ...] = (
    Fault(SortsRequests, "check_request_order"),
    Fault(DropsDuplicates, "check_duplicates"),
    Fault(WrapsWrongly, "check_negative_index"),
    Fault(CachesByHash, "check_negative_index"),
    Fault(ForgetsLastRecord, "check_length"),
    Fault(WrapsAround, "check_out_of_range"),
    Fault(RoundsFloats, "check_wrong_index_types"),
    Fault(SkipsBadIndices, "check_bad_index_in_request"),
    Fault(CountsAcrossShards, "check_shards"),
    Fault(ReusesBuffer, "check_values_survive_reads"),
    Fault(ReturnsReadOnly, "check_records_belong_to_caller"),
    Fault(HandsOutItsCache, "check_records_belong_to_caller"),
    Fault(HandsOutItsCache, "check_rows_do_not_share_memory"),
    Fault(ColumnsOfFloat64, "check_columns"),
    Fault(ReadsAfterClose, "check_read_after_close"),
    Fault(TakesEmptyForMissing, "check_missing_path"),
    Fault(ReadsWhatIsLeft, "check_damaged_files"),
    Fault(ReadsWhatIsLeft, "check_corruptions"),
    Fault(SharesOneIterator, "check_iterators_are_apart"),
    Fault(ShowsRecords, "check_repr"),
    Fault(KeepsRecordsInPickle, "check_pickle_size"),
    Fault(FingerprintOfPlace, "check_fingerprint_of_moved_copy"),
    Fault(FingerprintByHash, "check_new_process"),
    Fault(FingerprintOfCount, "check_fingerprint_tells_data_apart"),
    Fault(SharesOneOffset, "check_threads"),
    Fault(RemembersOffset, "check_fork_after_read"),
    Fault(OpensAtOnce, "check_construction_opens_nothing"),
    Fault(OpensAtOnce, "check_new_process"),
    Fault(LeaksDescriptors, "check_close_releases_everything"),
    Fault(LeavesFileOpen, "check_forgotten_source"),
    Fault(OpensWithoutLock, "check_first_use_by_threads"),
    Fault(SortsInRead, "check_read"),
    Fault(ReversesTwice, "check_reversed"),
    Fault(LocatesBlocks, "check_locate"),
    Fault(LearnsItsOrder, "check_reads_in_order"),
    Fault(ClipsColumns, "check_columns_out_of_range"),
    Fault(CountsColumnsFromOne, "check_columns_of_any_request"),
    Fault(SharesOneBatch, "check_threads_reading_columns"),
    Fault(SlicesColumnsOfAll, "check_slices_are_sources"),
    Fault(SlicesLookAlike, "check_fingerprint_of_slices"),
    Fault(EmptiesItselfOnClose, "check_close_during_reads"),
)
"""Every fault, with the check named for it."""
