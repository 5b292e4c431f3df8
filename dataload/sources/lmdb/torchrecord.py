"""Source of TorchRecord directories: LMDB sub-databases db0, db1, ... with TensorProtos under the numbers from 0."""

import re
from itertools import repeat
from typing import Any

import numpy as np

from dataload._util.decoding import decoding
from dataload._util.indexing import split_by_shard
from dataload._util.stacking import split_records
from dataload.codecs.tensorprotos import decode, decode_batch
from dataload.collate import default_collate
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.base import select_fields, shard_of
from dataload.sources.lmdb.environment import Environment, Transaction
from dataload.sources.lmdb.format import TORCHRECORD, TorchRecordOptions
from dataload.sources.lmdb.keys import decimal_keys
from dataload.sources.lmdb.shard import LMDBFileSource, LMDBShard
from dataload.types import Batch, Int64Array, Record


class TorchRecordSource(LMDBFileSource[Record]):
    """Records of TorchRecord directories.

    The records of db0 come first, then those of db1, and so on; see `dataload.codecs.tensorprotos` for their values.
    Fields without a name are named by position, ``"0"``, ``"1"``, ...; in the original's image data sets, ``"0"``
    contains the pixels as a flat uint8 array and ``"1"`` the label as bytes.

    Args:
        paths: One or more directories.
        fields: Names of the fields to read; None means all.
        options: See `TorchRecordOptions`.

    Raises:
        ConfigError: On first use, if the number of sub-databases is not `db_num`.
        CorruptFileError: On first use, if a file is truncated or damaged, or a sub-database is missing; in reads, if a
            record is missing or not a TensorProtos message.
        UnsupportedFormatError: On first use, if an LMDB file has no db0.
        MissingDependencyError: On first use, if lmdb is not installed.
    """

    format_name = "torchrecord"

    options_type = TorchRecordOptions

    def _open_shard(self, path: str) -> LMDBShard[Record]:
        return _TorchRecord(path, self.options.db_num)


class _TorchRecord(LMDBShard[Record]):
    def __init__(self, path: str, db_num: int | None) -> None:
        super().__init__(path, TORCHRECORD)
        environment = self.environment()
        counts = _counts(environment, path)
        if db_num is not None and db_num != len(counts):
            raise ConfigError(
                f"{path} has {len(counts)} sub-databases, but db_num is {db_num}", key="db_num", value=db_num
            )
        self._ends = np.cumsum(counts, dtype=np.int64)
        names = [b"db%d" % number for number in range(len(counts))]
        self._databases = tuple(names)
        self._widths = [self._width(environment, *part) for part in zip(names, counts, strict=True)]
        self._fields = self.first_fields()

    def _width(self, environment: Environment, name: bytes, count: int) -> int:
        """Return the number of bytes of a sub-database's keys."""
        database = environment.database(name)
        # The original pads keys to the digits of each sub-database's own count.
        with environment.reading(buffers=False) as txn:
            cursor = txn.cursor(database)
            first: bytes = cursor.key() if cursor.first() else b"0"
        if count and (not first.isdigit() or len(first) < len(str(count - 1))):
            raise CorruptFileError(
                f"the first key of sub-database {name.decode()} is {first!r}; its {count} records should have decimal "
                "keys, padded with zeros",
                path=self._file,
            )
        return len(first)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        environment = self.environment()
        with environment.reading(buffers=True) as txn:
            values = self._values(environment, txn, indices)
            with decoding():
                batch = decode_batch(values, fields)
                return self._decode(values, indices, fields) if batch is None else split_records(batch, len(indices))

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        environment = self.environment()
        with environment.reading(buffers=True) as txn:
            values = self._values(environment, txn, indices)
            with decoding():
                batch = decode_batch(values, fields)
                return default_collate(self._decode(values, indices, fields)) if batch is None else batch

    def key(self, index: int) -> str:
        number, local = shard_of(self._ends, index)
        return f"db{number}/{local:0{self._widths[number]}d}"

    def _values(self, environment: Environment, txn: Transaction, indices: Int64Array) -> list[Any]:
        if len(self._widths) == 1:
            return self._values_of(environment, txn, 0, indices)
        values: list[Any] = [None] * len(indices)
        for number, local, where in split_by_shard(self._ends, indices):
            found = self._values_of(environment, txn, number, local)
            for row, value in zip(where.tolist(), found, strict=True):
                values[row] = value
        return values

    def _values_of(self, environment: Environment, txn: Transaction, number: int, local: Int64Array) -> list[Any]:
        database = environment.database(self._databases[number])
        keys = decimal_keys(local, self._widths[number])
        values = list(map(txn.get, keys, repeat(None), repeat(database)))
        missing = [row for row, value in enumerate(values) if value is None]
        if missing:
            row = missing[0]
            first = int(self._ends[number - 1]) if number else 0
            raise CorruptFileError(
                f"key {keys[row].decode()!r} of sub-database db{number} is missing, "
                f"which has {int(self._ends[number]) - first} records",
                path=self._file,
                index=first + int(local[row]),
            )
        return values

    def _decode(self, values: list[Any], indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        records: list[Record] = []
        for value, index in zip(values, indices.tolist(), strict=True):
            try:
                record = decode(value)
            except CorruptFileError as error:
                database, _, key = self.key(index).partition("/")
                message = f"key {key} of sub-database {database}: {error}"
                raise CorruptFileError(message, path=self._file, index=index) from error
            records.append(record if fields is None else select_fields(record, fields))
        return records


def _counts(environment: Environment, path: str) -> list[int]:
    """Return the number of records in each sub-database."""
    numbered = {
        int(found.name[2:]): found
        for found in environment.subdatabases
        if re.fullmatch(rb"db(0|[1-9][0-9]{0,8})", found.name)
    }
    if not numbered:
        raise UnsupportedFormatError(
            f"{path} is an LMDB file without a sub-database db0, so it is not a TorchRecord; format='lmdb' reads it",
            path=path,
        )
    for number in range(len(numbered)):
        if number not in numbered:
            raise CorruptFileError(
                f"the sub-database db{number} is missing; the last one is db{max(numbered)}", path=environment.path
            )
        if numbered[number].has_duplicates:
            raise CorruptFileError(
                f"keys of the sub-database db{number} may have several values (DUPSORT)", path=environment.path
            )
    return [numbered[number].entries for number in range(len(numbered))]
