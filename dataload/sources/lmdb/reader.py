"""Plain LMDB: any keys, values that are bytes or what a codec makes of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dataload.codecs.codec import CodecLike, decode_batch, decode_records, resolve_codec
from dataload.collate import default_collate
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError, closest
from dataload.sources.base import select_fields
from dataload.sources.lmdb.environment import Environment, Transaction, open_environment
from dataload.sources.lmdb.keys import KeyOrder, build_keys
from dataload.sources.lmdb.shard import LMDBFileSource, LMDBShard
from dataload.storage.table_cache import IndexKey
from dataload.types import Batch, Codec, FieldSpec, Int64Array

__all__ = ["LMDBSource"]

_DUPSORT = 4


class LMDBSource(LMDBFileSource[Any]):
    """Records of LMDB environments, each a directory with ``data.mdb`` or a single file.

    Records are the values, as bytes or as a codec decodes them. Keys that are decimal numbers are ordered by
    number, all others as LMDB orders them; `key_order` says which.

    Args:
        paths: One environment or several. They must be finished: a writer at work is not noticed.
        fields: Names of the fields to read, with a codec that gives fields; None means all.
        codec: A name of `dataload.codecs.codec.CODEC_NAMES`, a function ``bytes -> record``, or an object
            with ``decode``. None gives bytes.
        subdatabase: Name of the database to read, in environments with several.
        cache: Keep which key stands at which index of a large environment in a hidden file, for the next time; see
            `dataload.storage.table_cache`. Keys that are the numbers from 0 need none.

    Raises:
        ConfigError: The codec is none; on first use, if the environment has several databases and
            `subdatabase` names none of them.
        CorruptFileError: On first use, when a file is truncated or damaged; in reads, when a value cannot be
            decoded.
        UnsupportedFormatError: On first use, when keys have several values.
        MissingDependencyError: On first use, when lmdb is not installed.
    """

    format_name = "lmdb"

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        codec: CodecLike = None,
        subdatabase: str | None = None,
        cache: bool = True,
    ) -> None:
        self._cache = cache
        self._codec = resolve_codec(codec)
        self._subdatabase = subdatabase
        # A user's function may keep a reference to what it was given, so it gets bytes of its own.
        self._views = isinstance(codec, str) and self._codec is not None
        super().__init__(paths, fields=fields, codec=self._codec, subdatabase=subdatabase)

    def _open_shard(self, path: str) -> LMDBShard[Any]:
        return _LMDBShard(path, self._codec, self._subdatabase, views=self._views, cache=self._cache)

    @property
    def key_order(self) -> KeyOrder:
        """How the indices of the first environment follow its keys: by ``"number"``, or by their ``"bytes"``."""
        shard = self._shard(0)
        assert isinstance(shard, _LMDBShard)
        return shard.keys.order


class _LMDBShard(LMDBShard[Any]):
    def __init__(self, path: str, codec: Codec | None, subdatabase: str | None, *, views: bool, cache: bool) -> None:
        self._environment = open_environment(path, "format 'lmdb'")
        self._codec = codec
        self._views = views
        name = _choose(self._environment, path, subdatabase)
        self._database = self._environment.database(name)
        with self._environment.reading(buffers=False) as txn:
            self._length: int = txn.stat(self._database)["entries"]
            # A writer with a writable map changes the file's time late, but the number of the transaction at once.
            options = () if name is None else (name,)
            data = self._environment.path
            key = IndexKey.of("lmdb", (data,), options, state=txn.id(), beside=path) if cache else None
            self.keys = build_keys(txn, self._database, self._length, key)
        self._fields = self.first_fields() if codec is not None else {}

    def __len__(self) -> int:
        return self._length

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return self._fields

    def stored(self, indices: Int64Array) -> list[bytes]:
        with self._environment.reading(buffers=False) as txn:
            return self._values(txn, indices)

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Any]:
        with self._environment.reading(buffers=self._views) as txn:
            records = self._decode(self._values(txn, indices), indices)
        return records if fields is None else [select_fields(record, fields) for record in records]

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        with self._environment.reading(buffers=self._views) as txn:
            values = self._values(txn, indices)
            batch = None if self._codec is None else decode_batch(self._codec, values, fields)
            if batch is not None:
                return batch
            records = self._decode(values, indices)
        if fields is not None:
            records = [select_fields(record, fields) for record in records]
        return default_collate(records)

    def key(self, index: int) -> str | None:
        with self._environment.reading(buffers=False) as txn:
            key = self.keys.key(txn, self._database, index)
        return None if key is None else key.decode(errors="backslashreplace")

    def _values(self, txn: Transaction, indices: Int64Array) -> list[Any]:
        values = self.keys.values(txn, self._database, indices)
        missing = [row for row, value in enumerate(values) if value is None]
        if missing:
            index = int(indices[missing[0]])
            key = self.keys.key(txn, self._database, index)
            found = f"key {key!r} is missing" if key is not None else "the key was there when the file was opened"
            raise CorruptFileError(
                f"{found}; the database has {self._length} records", path=self._environment.path, index=index
            )
        return values

    def _decode(self, values: list[Any], indices: Int64Array) -> list[Any]:
        if self._codec is None:
            return values
        return decode_records(self._codec, values, indices.tolist(), self._environment.path)


def _choose(environment: Environment, path: str, subdatabase: str | None) -> bytes | None:
    """The name of the database to read, None for the main one."""
    names = [found.name.decode(errors="replace") for found in environment.subdatabases]
    if subdatabase is None and names:
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        hint = "; this is a TorchRecord, which format='torchrecord' reads whole" if names[0] == "db0" else ""
        raise ConfigError(
            f"{path} holds the sub-databases {listed}: choose one with subdatabase={names[0]!r}{hint}",
            key="subdatabase",
        )
    if subdatabase is not None and subdatabase not in names:
        raise ConfigError(
            f"{path} has no sub-database {subdatabase!r}: {closest(subdatabase, names)}",
            key="subdatabase",
            value=subdatabase,
        )
    if subdatabase is None:
        name, has_duplicates = None, bool(environment.main.flags & _DUPSORT)
    else:
        chosen = environment.subdatabases[names.index(subdatabase)]
        name, has_duplicates = chosen.name, chosen.has_duplicates
    if has_duplicates:
        raise UnsupportedFormatError(
            f"{path}: keys of this database may have several values (DUPSORT), which have no index", path=path
        )
    return name
