"""The base classes of sources and shards in LMDB environments."""

import hashlib
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from dataload._util.limits import check_lengths
from dataload.codecs.layout import RecordTable
from dataload.sources.files import FileSource
from dataload.sources.gathered import gather_records
from dataload.sources.lmdb.file import data_file
from dataload.sources.lmdb.snapshot import Snapshot
from dataload.sources.lmdb.table import Values
from dataload.sources.shards import ShardReader
from dataload.storage import RecordFile
from dataload.types import BytesColumn, FieldSpec, Int64Array

T_co = TypeVar("T_co", covariant=True)


class LMDBShard(ShardReader[T_co]):
    """One environment, whose file is closed between `release` and the next read. Values have at most `limit` bytes."""

    whole = True
    _fields: Mapping[str, FieldSpec]

    def __init__(self, snapshot: Snapshot, values: Values, limit: int) -> None:
        self._snapshot = snapshot
        snapshot.sample(values.offsets, values.lengths)
        self._values = values
        self._path = snapshot.info.path
        self._fields = {}
        self._limit = limit
        self._has_large = bool(len(values.offsets)) and int(np.max(values.lengths)) > limit

    def __len__(self) -> int:
        return len(self._values.offsets)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The fields of the first record."""
        return self._fields

    def release(self) -> None:
        """Close the file."""
        self._snapshot.file.release()

    def _offsets(self, indices: Int64Array) -> Int64Array:
        return self._values.offsets[indices]

    def _lengths(self, indices: Int64Array) -> Int64Array:
        table = self._values.lengths
        lengths = np.full(len(indices), table, np.int64) if isinstance(table, int) else table[indices].astype(np.int64)
        if self._has_large:
            check_lengths(lengths, self._limit, indices, self._path)
        return lengths

    def _copies(self, file: RecordFile, indices: Int64Array) -> list[bytes]:
        return file.copies(self._offsets(indices), self._lengths(indices))

    def _together(self, file: RecordFile, indices: Int64Array) -> RecordTable | BytesColumn:
        """Return the stored values in one block of memory, for codecs that copy what they keep."""
        return gather_records(file, self._offsets(indices), self._lengths(indices))

    def stored(self, indices: Int64Array) -> list[bytes]:
        """Return records as they are stored."""
        with self._snapshot.reading() as file:
            return self._copies(file, indices)

    def offset(self, index: int) -> int:
        return int(self._offsets(np.array([index]))[0])

    def identity(self) -> list[str]:
        """Return hashes of the first and the last record: LMDB keeps its own pages at both ends of a file."""
        ends = np.unique([0, len(self) - 1]) if len(self) else np.empty(0, np.int64)
        return [hashlib.blake2b(data, digest_size=16).hexdigest() for data in self.stored(ends)]


class LMDBFileSource(FileSource[T_co]):
    """A data set in LMDB environments, each a directory or a file; its shards are `LMDBShard`."""

    def _data_file(self, path: str) -> str:
        return data_file(path, self._remote)
