"""A new LMDB environment that grows while it is written."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from dataload.errors import ConfigError, MachineError
from dataload.sources.format import Format
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
    """Writes records to a new directory; nothing is durable before `finish`.

    If a transaction fills the map, it is lost. Therefore its records are kept until it is committed, and are otherwise
    written again to a map of twice the size. `subdatabases` counts db0, db1, ...; None is the main one only.
    """

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
                lock=False,  # nobody else uses the directory, and a lock file would stay in it
                sync=False,  # `finish` syncs once
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
            consumed, added = txn.cursor(database).putmulti(
                self._pending, dupdata=False, overwrite=False, append=self._append
            )
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
        """Write all records and sync to disk."""
        self.flush()
        try:
            self._environment.sync(True)
        except self._lmdb.Error as error:
            raise self._disk_error(error) from error
        self.close()

    def _disk_error(self, error: Exception) -> MachineError:
        """Return the error for one of LMDB's, which calls a full disk an input/output error."""
        needed = f"the records of the next transaction take {self._pending_bytes:,} bytes"
        message = f"cannot write {self._path}: {error}; {needed}, and {free_space(self._path)}"
        return MachineError(message, path=self._path)

    def close(self) -> None:
        """Release the files. May be called twice."""
        self._pending.clear()
        self._environment.close()
