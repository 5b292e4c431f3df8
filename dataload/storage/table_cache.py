"""A cache of tables that are slow to build: the locations of an archive's samples, the keys of a database.

The cache file has a hidden name beside the data, or is in the user's cache directory if the data's directory is not
writable. Tables of data at URLs are in the cache of the node. A file that is damaged or does not match the data is
ignored and replaced, as is one that somebody other than this user, root and the owner of the data could have written;
one that cannot be written is skipped. The file is read, not mapped, because whoever shortens a mapped file kills the
process. The environment variable ``DATALOAD_CACHE=0`` disables the cache.

Layout: 16 bytes of magic, the length and the CRC-32 of a header, 4 bytes each, the header as JSON, and the arrays, each
aligned to 64 bytes.
"""

import hashlib
import json
import os
import stat
import struct
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np

from dataload.errors import DataloadError, SourceError
from dataload.storage.backend import storage_of
from dataload.storage.local.atomic import AtomicFile
from dataload.storage.local.folders import distrust, trusted_folder, user_directory
from dataload.storage.paths import is_url
from dataload.storage.remote.settings import Remote, node_directory
from dataload.types import Array

T = TypeVar("T")

_MAGIC = b"\x93dataload-index\n"
_HEAD = struct.Struct("<16sII")
_VERSION = 1
_ALIGNMENT = 64
_LONGEST_HEADER = 1 << 24
_SETTLED_SECONDS = 2.0  # resolution of the coarsest file system clock: a later change may keep the same time
_SUFFIX = ".dataload-index"
_INVALID = (OSError, DataloadError, ValueError, LookupError, TypeError, OverflowError, RecursionError, MemoryError)
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, "bBhHiIlLqQ")}


@dataclass(frozen=True, slots=True)
class IndexKey:
    """Everything that a table was built from; the table is valid while all of it is unchanged.

    Paths and inodes are not part of the key, so copies that preserve times keep their table. The table is kept beside
    `path`, or in `directory` if the data are not on this machine. `files` has the size in bytes and the time of change
    in ns of each file, the data file first. `options` and `state` (other evidence that the files are unchanged) are
    compared by repr.
    """

    kind: str
    path: str
    files: tuple[tuple[int, int], ...]
    options: tuple[Any, ...]
    state: Any
    directory: str | None = None

    @classmethod
    def of(
        cls,
        kind: str,
        paths: tuple[str, ...],
        options: tuple[Any, ...] = (),
        *,
        state: Any = None,
        beside: str | None = None,
        remote: Remote | None = None,
    ) -> Self | None:
        """Return the key of files, the data file first, before they are read; None if the cache is disabled."""
        if os.environ.get("DATALOAD_CACHE") == "0":
            return None
        # Of a file elsewhere, the version takes the place of the time.
        files = tuple(storage_of(path, remote).identity(path)[:2] for path in paths)
        path = beside or paths[0]
        return cls(kind, path, files, options, state, _remote_directory(remote) if is_url(path) else None)

    @property
    def text(self) -> str:
        """The key as text, without `path`."""
        return repr((_VERSION, sys.byteorder, self.kind, self.files, self.options, self.state))

    def cache_paths(self) -> tuple[str, ...]:
        """Return the possible paths of the table, the preferred one first; they depend on the options."""
        if is_url(self.path):
            name = _short(f"{self.path} {self.options!r}") + _SUFFIX
            return () if self.directory is None else (os.path.join(self.directory, name),)
        directory, name = os.path.split(os.path.abspath(self.path))
        suffix = (f".{_short(repr(self.options))}" if self.options else "") + _SUFFIX
        beside = os.path.join(directory, f".{name}{suffix}")
        own = user_directory()
        if own is None:
            return (beside,)
        return beside, os.path.join(own, _short(os.path.join(directory, name)) + suffix)


@dataclass(frozen=True, slots=True)
class CachedTable:
    """A table in the cache: arrays by name, read-only if they were loaded, and other values that JSON can represent."""

    arrays: Mapping[str, Array]
    extras: Mapping[str, Any]


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _remote_directory(remote: Remote | None) -> str | None:
    directory = node_directory(remote)
    return None if directory is None else os.path.join(directory, "tables")


def load_cached(key: IndexKey) -> CachedTable | None:
    """Return the table stored under `key`, or None if it is missing, damaged or out of date."""
    for path in key.cache_paths():
        with suppress(*_INVALID):
            return _load(path, key)
    return None


def recall(key: IndexKey | None, unpack: Callable[[CachedTable], T | None]) -> T | None:
    """Return what `unpack` makes of the table stored under `key`; None if there is none, or it is not valid."""
    # The cache may have been tampered with, so whatever `unpack` raises means that the table is not valid.
    found = None if key is None else load_cached(key)
    with suppress(*_INVALID):
        return None if found is None else unpack(found)
    return None


def remember(
    key: IndexKey | None,
    unpack: Callable[[CachedTable], T | None],
    build: Callable[[], T],
    pack: Callable[[T], CachedTable | None],
) -> T:
    """Return a table from the cache, or else build it and store what `pack` returns; None if that is not worth it."""
    table = recall(key, unpack)
    if table is None:
        table = build()
        packed = None if key is None else pack(table)
        if key is not None and packed is not None:
            store_cached(key, packed)
    return table


def _load(path: str, key: IndexKey) -> CachedTable:
    with open(path, "rb", buffering=0, opener=_open_warily) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        folder = os.path.dirname(path)
        if is_url(key.path):
            trusted_folder(*os.path.split(folder), create=False)
        elif folder != os.path.dirname(os.path.abspath(key.path)):
            trusted_folder(folder, create=False)
        # Beside the data, the folder does not matter: whoever may rename files in it may also replace the data.
        owners = () if is_url(key.path) else (os.stat(key.path).st_uid,)
        if reason := distrust(status, *owners):
            raise ValueError(reason)
        header, start = _read_header(stream.fileno(), status.st_size)
        if header["key"] != key.text:
            raise ValueError("out of date")
        spans, stop = _plan_arrays(header["arrays"], status.st_size - start)
        if stop != status.st_size - start:
            raise ValueError("size differs from the header")
        stream.seek(start)
        data = np.fromfile(stream, np.uint8, stop)
    if len(data) < stop or _checksum(data) != header["sum"]:
        raise ValueError("damaged")
    data.flags.writeable = False
    arrays = {name: data[first:last].view(dtype) for name, dtype, first, last in spans}
    return CachedTable(arrays, dict(header["extras"]))


def _open_warily(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # neither a link nor a wait for the writer of a pipe


def _plan_arrays(declared: Any, most: int) -> tuple[list[tuple[str, np.dtype[Any], int, int]], int]:
    """Return name, dtype, start and end of each array that a header declares, and the end of the last, padded."""
    spans: list[tuple[str, np.dtype[Any], int, int]] = []
    start = 0
    for name, text, count in declared:
        dtype = _DTYPES[text]
        if type(count) is not int or not 0 <= count <= most:
            raise ValueError("invalid number of items")
        stop = start + count * dtype.itemsize
        spans.append((name, dtype, start, stop))
        start = _aligned(stop)
    return spans, start


def _read_header(descriptor: int, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a cache file and the offset of its arrays."""
    magic, length, crc = _HEAD.unpack(os.pread(descriptor, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))
    start = _aligned(_HEAD.size + length)
    if magic != _MAGIC or length > _LONGEST_HEADER or start > size:
        raise ValueError("not a cache file")
    text = os.pread(descriptor, length, _HEAD.size)
    if zlib.crc32(text) != crc:
        raise ValueError("damaged")
    return json.loads(text), start


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _checksum(data: Array) -> int:
    """Return the sum of all words, which reveals flipped bits and zeros left by a crash in a tenth of a CRC's time."""
    whole = len(data) // 8 * 8
    rest = int.from_bytes(data[whole:].tobytes(), sys.byteorder)
    return (int(data[:whole].view(np.uint64).sum(dtype=np.uint64)) + rest) % 2**64


def store_cached(key: IndexKey, table: CachedTable) -> None:
    """Store a table, if one of its paths is writable."""
    # Files that have just changed may change again within the same tick of the file system's clock.
    if max(changed for _, changed in key.files) > time.time_ns() - int(_SETTLED_SECONDS * 1e9):
        return
    try:
        if is_url(key.path):
            for path in key.cache_paths():
                trusted_folder(*os.path.split(os.path.dirname(path)))
                _store(path, key, table, 0o600)
            return
        beside, *others = key.cache_paths()
        # Readable by everyone who can read the data, and writable by nobody else: `_load` would not believe it.
        mode = stat.S_IMODE(os.stat(key.path).st_mode) & 0o444 | 0o600
        if _store(beside, key, table, mode):
            return
        for path in others:
            trusted_folder(os.path.dirname(path))
            _store(path, key, table, 0o600)
    except (OSError, DataloadError):
        return


def _store(path: str, key: IndexKey, table: CachedTable, mode: int) -> bool:
    """Write the cache file atomically, and return whether it exists."""
    try:
        with AtomicFile(path, overwrite=True) as part:
            with part.create() as stream:
                _write(stream, key, table)
                os.fchmod(stream.fileno(), mode)
            with suppress(*_INVALID):
                _load(path, key)
                return True  # another process was first
            part.publish(durable=False)  # the checksum detects damage by a crash
    except (OSError, SourceError):
        return False
    return True


def _write(stream: Any, key: IndexKey, table: CachedTable) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in table.arrays.items()}
    head = {
        "key": key.text,
        "arrays": [[name, array.dtype.str, len(array)] for name, array in arrays.items()],
        "extras": dict(table.extras),
        "sum": sum(_checksum(array.view(np.uint8)) for array in arrays.values()) % 2**64,
    }
    text = json.dumps(head).encode()
    stream.write(_HEAD.pack(_MAGIC, len(text), zlib.crc32(text)))
    for part in (text, *(array.data for array in arrays.values())):
        stream.write(part)
        stream.write(bytes(_aligned(stream.tell()) - stream.tell()))


def within(numbers: Array, stop: int) -> bool:
    """Return whether all numbers of a loaded array are in [0, stop)."""
    return not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < stop)
