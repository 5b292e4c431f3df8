"""Source of plain LMDB environments, with any keys, and values that a codec may decode."""

from typing import Any, cast

from dataload.codecs.codec import decode_batch, decode_records, takes_views
from dataload.collate import default_collate
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError, closest
from dataload.sources.base import select_fields
from dataload.sources.lmdb.environment import Environment, Transaction
from dataload.sources.lmdb.format import LMDB, LMDBOptions
from dataload.sources.lmdb.keys import KeyOrder, build_keys
from dataload.sources.lmdb.shard import LMDBFileSource, LMDBShard
from dataload.storage.table_cache import IndexKey
from dataload.types import Batch, Codec, Int64Array


class LMDBSource(LMDBFileSource[Any]):
    """Records of LMDB environments, each a directory with ``data.mdb`` or a single file.

    Records are the values, as bytes or decoded by a codec. Keys that are decimal numbers are ordered numerically, all
    others in LMDB's order; see `key_order`.

    Args:
        paths: One or more environments. Nothing may write to them: a running writer is not detected.
        fields: Names of the fields to read, if a codec decodes to fields; None means all.
        options: See `LMDBOptions`.

    Raises:
        ConfigError: The codec is invalid; on first use, if the environment has several databases and `subdatabase` does
            not name one of them.
        CorruptFileError: On first use, if a file is truncated or damaged; in reads, if a value cannot be decoded.
        UnsupportedFormatError: On first use, if keys have several values.
        MissingDependencyError: On first use, if lmdb is not installed.
    """

    format_name = "lmdb"

    options_type = LMDBOptions

    def _open_shard(self, path: str) -> LMDBShard[Any]:
        return _LMDBShard(path, self.options)

    @property
    def key_order(self) -> KeyOrder:
        """Order of the keys in the first environment: ``"number"`` or ``"bytes"``."""
        shard = self._data_set().reader(0)
        assert isinstance(shard, _LMDBShard)
        return shard.keys.order


class _LMDBShard(LMDBShard[Any]):
    def __init__(self, path: str, options: LMDBOptions) -> None:
        super().__init__(path, LMDB)
        environment = self.environment()
        self._codec = cast("Codec | None", options.codec)
        self._views = takes_views(self._codec)
        self._name = _choose(environment, path, options.subdatabase)
        self._databases = (self._name,)
        database = environment.database(self._name)
        with environment.reading(buffers=False) as txn:
            self._length: int = txn.stat(database)["entries"]
            # A writer with a writable map updates the file's time late, but the transaction number immediately.
            names = () if self._name is None else (self._name,)
            key = IndexKey.of("lmdb", (self._file,), names, state=txn.id(), beside=path) if options.cache else None
            self.keys = build_keys(txn, database, self._length, key)
        if self._codec is not None:
            self._fields = self.first_fields()

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Any]:
        environment = self.environment()
        with environment.reading(buffers=self._views) as txn:
            return self._records(self._values(environment, txn, indices), indices, fields)

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        environment = self.environment()
        with environment.reading(buffers=self._views) as txn:
            values = self._values(environment, txn, indices)
            batch = None if self._codec is None else decode_batch(self._codec, values, fields)
            return default_collate(self._records(values, indices, fields)) if batch is None else batch

    def key(self, index: int) -> str | None:
        environment = self.environment()
        with environment.reading(buffers=False) as txn:
            key = self.keys.key(txn, environment.database(self._name), index)
        return None if key is None else key.decode(errors="backslashreplace")

    def _values(self, environment: Environment, txn: Transaction, indices: Int64Array) -> list[Any]:
        database = environment.database(self._name)
        values = self.keys.values(txn, database, indices)
        missing = [row for row, value in enumerate(values) if value is None]  # `None in` is slow for views
        if missing:
            index = int(indices[missing[0]])
            key = self.keys.key(txn, database, index)
            found = f"key {key!r} is missing" if key is not None else "the key was there when the file was opened"
            raise CorruptFileError(f"{found}; the database has {self._length} records", path=self._file, index=index)
        return values

    def _records(self, values: list[Any], indices: Int64Array, fields: tuple[str, ...] | None) -> list[Any]:
        records = values if self._codec is None else decode_records(self._codec, values, indices.tolist(), self._file)
        return records if fields is None else [select_fields(record, fields) for record in records]


def _choose(environment: Environment, path: str, subdatabase: str | None) -> bytes | None:
    """Return the name of the database to read, None for the main one."""
    names = [found.name.decode(errors="replace") for found in environment.subdatabases]
    if subdatabase is None and names:
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        hint = "; this is a TorchRecord, which format='torchrecord' reads as a whole" if names[0] == "db0" else ""
        raise ConfigError(
            f"{path} contains the sub-databases {listed}: choose one with subdatabase={names[0]!r}{hint}",
            key="subdatabase",
        )
    if subdatabase is None:
        name, has_duplicates = None, environment.main.has_duplicates
    elif subdatabase in names:
        chosen = environment.subdatabases[names.index(subdatabase)]
        name, has_duplicates = chosen.name, chosen.has_duplicates
    else:
        message = f"{path} has no sub-database {subdatabase!r}: {closest(subdatabase, names)}"
        raise ConfigError(message, key="subdatabase", value=subdatabase)
    if has_duplicates:
        raise UnsupportedFormatError(
            f"{path}: keys of this database may have several values (DUPSORT), so values have no index", path=path
        )
    return name
