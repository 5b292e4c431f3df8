"""Writers of LMDB environments: values, and TorchRecord."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

from dataload._util.indexing import even_split
from dataload.codecs.tensorprotos import encode
from dataload.errors import ConfigError, MachineError
from dataload.sources.format import Format
from dataload.sources.lmdb import DATA_FILE, LMDB, TORCHRECORD, LMDBWriterOptions, TorchRecordWriterOptions
from dataload.sources.lmdb.file import RECORDED_OFFSET
from dataload.sources.options import build_recorded
from dataload.sources.writer import Writer, choose_codec, codec_name, encode_bytes, require_fields
from dataload.storage.errors import free_space

MAX_KEY_BYTES = 511
_MAX_VALUE_BYTES = 2**32 - 1

_FIRST_MAP_BYTES = 1 << 24
_BATCH_BYTES = 1 << 24  # of records kept in memory until they are written in one transaction
_BATCH_RECORDS = 1 << 15


def values_fit(values: Sequence[bytes]) -> bool:
    """Return whether LMDB can hold all of these values."""
    return max(map(len, values)) <= _MAX_VALUE_BYTES


def check_value(value: bytes) -> bytes:
    """Return a value, or raise ConfigError if LMDB cannot hold it."""
    if len(value) > _MAX_VALUE_BYTES:
        raise ConfigError(f"an LMDB value has at most {_MAX_VALUE_BYTES} bytes, got {len(value)}")
    return value


class NewEnvironment:
    """Writes records to a new directory; nothing is durable before that is published."""

    # If a transaction fills the map, it is lost. Therefore its records are kept until it is committed, and are
    # otherwise written again to a map of twice the size.

    def __init__(self, path: str, entry: Format, subdatabases: int | None = None) -> None:
        self._lmdb = entry.require("lmdb")
        self._path = path
        self._map_bytes = _FIRST_MAP_BYTES
        self._pending: list[tuple[bytes, bytes]] = []
        self._pending_bytes = 0
        try:
            self._environment = self._lmdb.open(
                path,
                map_size=self._map_bytes,
                max_dbs=subdatabases or 0,
                lock=False,  # no other process uses the directory, and a lock file would stay in it
                sync=False,  # publishing flushes once
            )
            self._databases: list[Any] = [
                self._environment.open_db(b"db%d" % number) for number in range(subdatabases or 0)
            ] or [self._environment.open_db(None)]
        except self._lmdb.Error as error:
            raise self._disk_error(error) from error
        self._target = 0
        self._append = True

    def put(self, key: bytes, value: bytes, *, database: int = 0, append: bool) -> None:
        """Add a record; with `append`, keys must ascend. A repeated key is refused when records are written."""
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise ConfigError(f"LMDB keys have 1 to {MAX_KEY_BYTES} bytes, got {len(key)}: {key[:40]!r}", key="keys")
        check_value(value)
        full = self._pending_bytes >= _BATCH_BYTES or len(self._pending) >= _BATCH_RECORDS
        if full or (database, append) != (self._target, self._append):
            self.flush()
            self._target, self._append = database, append
        self._pending.append((key, value))
        self._pending_bytes += len(key) + len(value)

    def put_all(self, keys: Sequence[bytes], values: Sequence[bytes], *, database: int = 0) -> None:
        """Do what `put` of each record with `append` does, in the same transactions, for keys of one length."""
        ends = [0, *accumulate(map(len(keys[0]).__add__, map(len, values)))]
        checked = values_fit(values)
        start = 0
        while start < len(keys):
            self.put(keys[start], values[start], database=database, append=True)  # begins a transaction if needed
            start += 1
            stop = start
            if checked:  # as many as still belong to the transaction
                fitting = bisect_left(ends, ends[start] + _BATCH_BYTES - self._pending_bytes, start)
                stop = max(start, min(fitting, start + _BATCH_RECORDS - len(self._pending), len(keys)))
            self._pending.extend(zip(keys[start:stop], values[start:stop], strict=True))
            self._pending_bytes += ends[stop] - ends[start]
            start = stop

    def flush(self) -> None:
        """Write pending records in one transaction, growing the map as needed."""
        while self._pending:
            try:
                self._write()
            except self._lmdb.MapFullError:
                # To know it before would save work, and change bytes that LMDB leaves from one page in the next.
                self._map_bytes *= 2
                self._environment.set_mapsize(self._map_bytes)
            except self._lmdb.Error as error:
                raise self._disk_error(error) from error
            else:
                self._pending.clear()
                self._pending_bytes = 0

    def _write(self) -> None:
        database = self._databases[self._target]
        with self._environment.begin(write=True, db=database) as txn:
            consumed, added = txn.cursor(database).putmulti(self._pending, overwrite=False, append=self._append)
            if added != len(self._pending) or consumed != added:
                raise ConfigError(f"two records have the key {self._repeated(txn)!r}", key="keys")

    def _repeated(self, txn: Any) -> bytes:
        """Return a pending key that already exists or is pending twice."""
        seen: set[bytes] = set()
        txn.abort()
        with self._environment.begin(db=self._databases[self._target]) as before:
            for key, _ in self._pending:
                if key in seen or before.get(key) is not None:
                    return key
                seen.add(key)
        raise AssertionError("LMDB refused a key that was not there")

    def finish(self) -> None:
        """Write all records; publishing flushes the file to the disk."""
        self.flush()
        self.close()

    def _disk_error(self, error: Exception) -> MachineError:
        """Return the error for one of LMDB's, which calls a full disk an input/output error."""
        needed = f"the records of the next transaction take {self._pending_bytes:,} bytes"
        advice = "if that is too little, delete something, or choose another disk"
        message = f"cannot write {self._path}: {error}; {needed}, and {free_space(self._path)}: {advice}"
        return MachineError(message, path=self._path)

    def close(self) -> None:
        """Release the files. May be called twice."""
        self._pending.clear()
        self._environment.close()


class LMDBWriter(Writer):
    """Writes one LMDB directory with ``data.mdb``, which says by which built-in codec it is read, and no lock file.

    Keys are 0, 1, ..., padded with zeros to 10 digits, so that LMDB's order is the writing order. With custom `keys`,
    a reader finds the records in key order.

    A key that occurs twice is an error, which `close` raises at the latest; the directory is then discarded. Options:
    `LMDBWriterOptions`.
    """

    options_type: ClassVar[Any] = LMDBWriterOptions

    def _begin(self, options: LMDBWriterOptions) -> None:
        self._codec: Any = options.codec
        self._keys = options.keys
        self._environment = NewEnvironment(self._part.temporary, LMDB)

    def _write(self, record: Any) -> None:
        codec = self._codec if len(self) else choose_codec(self._codec, record)
        value = encode_bytes(record, codec, "lmdb")
        if self._keys is None:
            key = b"%010d" % len(self)
        else:
            key = self._keys(len(self), record)
            key = key.encode() if isinstance(key, str) else bytes(key)
        self._environment.put(key, value, append=self._keys is None)
        self._codec = codec
        self.stored_bytes += len(value)

    def _write_all(self, records: Sequence[Any]) -> None:
        if not len(self):  # the first record may choose the codec
            super()._write_all(records[:1])
            records = records[1:]
        if self._keys is not None:
            super()._write_all(records)
        elif self._codec is None and set(map(type, records)) == {bytes} and values_fit(records):
            self._put_all(records)
            self._count += len(records)
        else:
            # A value that LMDB cannot hold is refused here, so that those before it are written and counted.
            self._write_encoded(
                records, lambda record: check_value(encode_bytes(record, self._codec, "lmdb")), self._put_all
            )

    def _put_all(self, values: Sequence[bytes]) -> None:
        keys = [b"%010d" % number for number in range(len(self), len(self) + len(values))]
        self._environment.put_all(keys, values)
        self.stored_bytes += sum(map(len, values))

    def _finish(self) -> None:
        self._environment.finish()
        if (name := codec_name(self._codec)) is not None:
            self._part.patch(RECORDED_OFFSET, build_recorded({"codec": name}), DATA_FILE)

    def _discard(self) -> None:
        self._environment.close()


_SPOOL_BYTES = 1 << 26


class TorchRecordWriter(Writer):
    """Writes one TorchRecord directory, with records split evenly over sub-databases db0, db1, ... in writing order.

    Values are arrays with dtypes that TensorProtos support, numbers, text or bytes. Fields may differ between records.

    Implementation note: the original pads keys to the digits of the number of records, and splits the records evenly
    over the sub-databases, so a record's key and sub-database are unknown before the last record. Records are therefore
    spooled, up to 64 MiB in memory, then in an unnamed file beside the destination, and `close` writes them to LMDB.
    That writes everything twice; `num_records` avoids it.

    Options: `TorchRecordWriterOptions`.
    """

    options_type: ClassVar[Any] = TorchRecordWriterOptions

    def _begin(self, options: TorchRecordWriterOptions) -> None:
        self._expected = options.num_records
        self._spool = self._part.spool(_SPOOL_BYTES) if options.num_records is None else None
        self._lengths = array("q")  # of the values in the spool
        self._environment = NewEnvironment(self._part.temporary, TORCHRECORD, options.db_num)
        self._db_num = options.db_num
        self._place(options.num_records or 0)

    def _place(self, total: int) -> None:
        """Prepare to put `records` records in all; keys have one width, as the original's reader expects."""
        self._spans = even_split(total, self._db_num)
        self._key = b"%%0%dd" % len(str(max(stop - start for start, stop in self._spans)))
        self._database = self._placed = 0

    def _write(self, record: Any) -> None:
        self._check_room(1)
        self._add([_encode(record)])

    def _write_all(self, records: Sequence[Any]) -> None:
        fitting = records if self._expected is None else records[: self._expected - len(self)]
        self._write_encoded(fitting, _encode, self._add)
        self._check_room(len(records) - len(fitting))

    def _check_room(self, records: int) -> None:
        if self._expected is not None and len(self) + records > self._expected:
            message = f"num_records is {self._expected}, but there are more records"
            raise ConfigError(message, key="num_records", value=self._expected)

    def _add(self, values: Sequence[bytes]) -> None:
        self.stored_bytes += sum(map(len, values))
        if self._spool is None:
            self._put_all(values)
        else:
            self._spool.writelines(values)
            self._lengths.extend(map(len, values))

    def _put_all(self, values: Sequence[bytes]) -> None:
        while values:
            start, stop = self._spans[self._database]
            if self._placed == stop:
                self._database += 1
                continue
            some, values = values[: stop - self._placed], values[stop - self._placed :]
            keys = [self._key % number for number in range(self._placed - start, self._placed - start + len(some))]
            self._environment.put_all(keys, some, database=self._database)
            self._placed += len(some)

    def _finish(self) -> None:
        if self._spool is not None:
            self._place(len(self))
            self._spool.seek(0)
            for length in self._lengths:
                self._put_all([self._spool.read(length)])
            self._spool.close()
        elif len(self) != self._expected:
            message = f"num_records is {self._expected}, but {len(self)} records were written"
            raise ConfigError(message, key="num_records", value=self._expected)
        self._environment.finish()

    def _discard(self) -> None:
        if self._spool is not None:
            self._spool.close()
        self._environment.close()


def _encode(record: Any) -> bytes:
    return check_value(encode(require_fields(record, "torchrecord")))
