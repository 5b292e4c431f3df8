"""Data sets that lie in files: shards opened lazily in the process that reads them, pickled without handles."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from dataload._util.checks import check_fields
from dataload._util.fingerprint import digest
from dataload._util.indexing import split_by_shard
from dataload.collate import default_collate, scatter_columns
from dataload.errors import ClosedSourceError, ConfigError, CorruptFileError, closest
from dataload.sources.base import Location, Source, shard_of, spec_of
from dataload.storage.errors import file_errors
from dataload.types import Batch, FieldSpec, Int64Array

__all__ = ["FileSource", "ShardReader"]

T_co = TypeVar("T_co", covariant=True)


class ShardReader(ABC, Generic[T_co]):
    """One opened file (or directory) of a data set, in one process.

    Reads are thread-safe. Dropping the last reference releases the file, as `close` does; so a reader that
    another thread still uses can be forgotten at any time.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of records."""

    @abstractmethod
    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[T_co]:
        """Records at `indices`, (rows,) int64 in [0, len), in that order.

        Args:
            indices: Local to this shard; at least one.
            fields: Names known to exist in `fields`, where that is not empty; None means all.
        """

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        """Columns; override where that can be done without making records first."""
        return default_collate(self.read(indices, fields))

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """All fields of this shard, in file order; empty if records are plain bytes."""
        return {}

    def first_fields(self) -> Mapping[str, FieldSpec]:
        """What the first record holds; nothing if its records are bytes, or there is none."""
        if not len(self):
            return {}
        try:
            record: Any = self.read(np.zeros(1, np.int64), None)[0]
        except CorruptFileError:  # raised when it is read: the other records may be good
            return {}
        return {name: spec_of(value) for name, value in record.items()} if isinstance(record, Mapping) else {}

    def key(self, index: int) -> str | None:  # noqa: ARG002 - for formats that have keys
        """The name of a record, found without reading it; None where records have none."""
        return None

    def identity(self) -> Any:
        """What tells the content apart where size and ends of the file do not; its repr counts."""
        return None

    def close(self) -> None:
        """Release the file now."""


@dataclass(slots=True)
class _Opened(Generic[T_co]):
    """What one process holds of a data set."""

    pid: int
    ends: Int64Array  # (shards,) cumulative records
    fields: Mapping[str, FieldSpec]
    readers: OrderedDict[int, ShardReader[T_co]]
    limit: int
    lock: threading.Lock = field(default_factory=threading.Lock)


class FileSource(Source[T_co]):
    """A data set in one file or several of one format, each a shard.

    Constructing opens nothing; the first use does, in each process. Options that decide what is read are
    passed to `super().__init__` by name, so that repr and fingerprint show them.

    Args:
        paths: The files, in index order.
        fields: Names of the fields to read, in that order; None means all.
        options: The backend's own options, as the user gave them.
    """

    format_name: str

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        self._paths = tuple(os.fspath(path) for path in several)
        if not self._paths:
            raise ConfigError("a source needs at least one path, got an empty list", key="paths", value=paths)
        self._selected = check_fields(fields)
        self._options = {name: value for name, value in options.items() if value is not None}
        self._opened: _Opened[T_co] | None = None
        self._locks: dict[int, threading.Lock] = {}
        self._closed = False
        self._fingerprint: str | None = None

    @abstractmethod
    def _open_shard(self, path: str) -> ShardReader[T_co]:
        """Open one file. `OSError` may pass: it is translated."""

    def _data_file(self, path: str) -> str:
        """The file whose size and ends identify the shard at `path`."""
        return path

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, in index order."""
        return self._paths

    def __len__(self) -> int:
        return int(self._state().ends[-1])

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The selected fields of the first shard, or all of them."""
        known = self._state().fields
        return known if self._selected is None else {name: known[name] for name in self._selected if name in known}

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Records per file."""
        return tuple(np.diff(self._state().ends, prepend=0).tolist())

    def _locate(self, index: int) -> Location:
        opened = self._state()
        shard, record = shard_of(opened.ends, index)
        key = None
        with suppress(Exception):  # what is asked for is often a record of a damaged file
            key = self._reader(opened, shard).key(record)
        return Location(self._paths[shard], record, key)

    def _state(self) -> _Opened[T_co]:
        pid = os.getpid()
        opened = self._opened
        if opened is not None and opened.pid == pid:
            return opened
        # Each process has a lock of its own: a thread of the parent may have held the parent's at the moment of
        # the fork, and would never release it here. What the parent opened is left alone, not closed: it is its.
        with self._locks.setdefault(pid, threading.Lock()):
            opened = self._opened
            if opened is None or opened.pid != pid:
                if self._closed:
                    raise ClosedSourceError(f"{self!r} is closed: open it again to read", path=self._paths[0])
                self._opened = opened = self._open()
            return opened

    def _open(self) -> _Opened[T_co]:
        lengths: list[int] = []
        readers: OrderedDict[int, ShardReader[T_co]] = OrderedDict()
        limit = _open_files_limit()
        known: Mapping[str, FieldSpec] = {}
        for shard, path in enumerate(self._paths):
            reader = self._open_reader(path)
            if len(reader):
                self._check_fields(reader.fields, path)
            # An empty file may not know the fields it would have had.
            if shard == 0 or (len(reader) and not any(lengths)):
                known = reader.fields
            lengths.append(len(reader))
            if len(readers) < limit:
                readers[shard] = reader
        return _Opened(os.getpid(), np.cumsum(lengths, dtype=np.int64), known, readers, limit)

    def _open_reader(self, path: str) -> ShardReader[T_co]:
        with file_errors(path):
            return self._open_shard(path)

    def _check_fields(self, known: Mapping[str, FieldSpec], path: str) -> None:
        for name in self._selected or ():
            if known and name not in known:
                raise ConfigError(f"{path} has no field {name!r}: {closest(name, known)}", key="fields", value=name)

    def _reader(self, opened: _Opened[T_co], shard: int) -> ShardReader[T_co]:
        reader = opened.readers.get(shard)
        if reader is not None and len(self._paths) <= opened.limit:
            return reader
        with opened.lock:  # more shards than descriptors: keep the ones used last
            reader = opened.readers.get(shard)
            if reader is None:
                reader = self._open_reader(self._paths[shard])
                opened.readers[shard] = reader
            opened.readers.move_to_end(shard)
            while len(opened.readers) > opened.limit:
                opened.readers.popitem(last=False)
            return reader

    def _read(self, indices: Int64Array) -> list[T_co]:
        opened = self._state()
        if len(opened.ends) == 1:
            return self._reader(opened, 0).read(indices, self._selected)
        records: list[Any] = [None] * len(indices)
        for shard, local, where in split_by_shard(opened.ends, indices):
            found = self._reader(opened, shard).read(local, self._selected)
            for row, record in zip(where.tolist(), found, strict=True):
                records[row] = record
        return records

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        opened = self._state()
        chosen = self._choose(fields, opened)
        if len(opened.ends) == 1:
            return self._reader(opened, 0).read_batch(indices, chosen)
        if not opened.fields:  # plain bytes: no columns to put together
            return super()._read_columns(indices, chosen)
        pieces = (
            (where, self._reader(opened, shard).read_batch(local, chosen))
            for shard, local, where in split_by_shard(opened.ends, indices)
        )
        return scatter_columns(pieces, len(indices))

    def _choose(self, fields: tuple[str, ...] | None, opened: _Opened[T_co]) -> tuple[str, ...] | None:
        if fields is None:
            return self._selected
        known = opened.fields if self._selected is None else dict.fromkeys(self._selected)
        for name in fields:
            if known and name not in known:
                raise ConfigError(f"{self!r} has no field {name!r}: {closest(name, known)}", key="fields", value=name)
        return fields

    def fingerprint(self) -> str:
        """See `Source.fingerprint`: names, sizes, counts, both ends of each file, and what its reader adds."""
        if self._fingerprint is None:
            shards = [
                (
                    os.path.basename(os.path.normpath(path)),
                    *_ends_of_file(self._data_file(path)),
                    count,
                    self._reader(self._state(), shard).identity(),
                )
                for shard, (path, count) in enumerate(zip(self._paths, self.shard_lengths, strict=True))
            ]
            options = sorted((name, _describe(value)) for name, value in self._options.items())
            self._fingerprint = digest(self.format_name, shards, self._selected, options)
        return self._fingerprint

    def close(self) -> None:
        """Release files; reading afterwards raises `ClosedSourceError`. May be called twice."""
        opened, self._opened, self._closed = self._opened, None, True
        if opened is not None and opened.pid == os.getpid():
            opened.readers.clear()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_opened"], state["_locks"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._opened = None
        self._locks = {}

    def __repr__(self) -> str:
        first = self._paths[0] if len(self._paths[0]) < 80 else f"...{self._paths[0][-77:]}"
        parts = [repr(first)]
        if len(self._paths) > 1:
            parts.append(f"{len(self._paths)} shards")
        if self._selected is not None:
            parts.append(f"{len(self._selected)} fields")
        parts += [f"{name}={_describe(value)[:24]}" for name, value in self._options.items()]
        return f"{type(self).__name__}({', '.join(parts)})"[:199]


def _open_files_limit() -> int:
    """How many shards to keep open: at two descriptors each, half of what the process may open is the user's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**30 if soft == resource.RLIM_INFINITY else max(8, soft // 4)


_ENDS_BYTES = 4096


def _ends_of_file(path: str) -> tuple[int, str]:
    """Size of a file, and a hash of its first and last 4 KiB: a rewritten file of equal size differs there."""
    with file_errors(path), open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        ends = os.pread(stream.fileno(), _ENDS_BYTES, 0)
        ends += os.pread(stream.fileno(), _ENDS_BYTES, max(0, size - _ENDS_BYTES))
    return size, hashlib.blake2b(ends, digest_size=8).hexdigest()


def _describe(value: Any) -> str:
    """Text of an option that is the same in every process: a function's name, not its address."""
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, Mapping):
        return repr({name: _describe(item) for name, item in value.items()})
    return repr(value)
