"""Tables that are slow to make, kept in a file: where the samples of an archive lie, which key stands where.

The file lies beside the data under a hidden name, or in the user's cache directory where nobody may write beside
the data. It is mapped, so that processes share its memory. One that does not fit the data, or is damaged, is
ignored and written anew; one that cannot be written is done without. The environment variable ``DATALOAD_CACHE=0``
turns all of it off.

What it holds: 16 bytes of magic, the length and the CRC-32 of a header, 4 bytes each, the header as JSON, and the
arrays, each from a multiple of 64 bytes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dataload.types import Array

_MAGIC = b"\x93dataload-index\n"
_HEAD = struct.Struct("<16sII")
_VERSION = 1
_ALIGNMENT = 64
_LONGEST_HEADER = 1 << 24
_SETTLED_SECONDS = 2.0  # the coarsest clock of a file system: a later change may leave such a time as it is
_SUFFIX = ".dataload-index"
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, "bBhHiIlLqQ")}


@dataclass(frozen=True, slots=True)
class IndexKey:
    """What a table was made from: it is used as long as all of this is the same.

    The places of the files are no part of it, nor their inodes: copies that keep their times take the table along.

    Attributes:
        kind: What sort of table, for example ``"tar"``.
        path: Beside what the table lies: the data file, or its directory where that is the data set.
        files: Size and time of change, in bytes and nanoseconds, of every file concerned; the data file's first.
        options: What else decides the table; its repr counts.
        state: What else tells that the files are as they were; its repr counts.
    """

    kind: str
    path: str
    files: tuple[tuple[int, int], ...]
    options: tuple[Any, ...]
    state: Any

    @classmethod
    def of(
        cls,
        kind: str,
        paths: tuple[str, ...],
        options: tuple[Any, ...] = (),
        *,
        state: Any = None,
        beside: str | None = None,
    ) -> Self | None:
        """The key of files as they are now, to be made before they are read; None if caching is turned off.

        Args:
            kind: See above, as are `options` and `state`.
            paths: The files concerned, the data file first.
            options: What else decides the table.
            state: What else tells that the files are as they were.
            beside: See `path`; by default the data file.
        """
        if os.environ.get("DATALOAD_CACHE") == "0":
            return None
        found = [os.stat(path) for path in paths]
        files = tuple((status.st_size, status.st_mtime_ns) for status in found)
        return cls(kind, beside or paths[0], files, options, state)

    @property
    def text(self) -> str:
        """All of it but the place, the version of the file included."""
        return repr((_VERSION, sys.byteorder, self.kind, self.files, self.options, self.state))

    def places(self) -> tuple[str, ...]:
        """Where the table may lie, the best place first. Tables of other options lie side by side."""
        directory, name = os.path.split(os.path.abspath(self.path))
        suffix = (f".{_short(repr(self.options))}" if self.options else "") + _SUFFIX
        beside = os.path.join(directory, f".{name}{suffix}")
        own = _user_directory()
        if own is None:
            return (beside,)
        return beside, os.path.join(own, _short(os.path.join(directory, name)) + suffix)


@dataclass(frozen=True, slots=True)
class CachedTable:
    """What a file of the cache holds.

    Attributes:
        arrays: By name; read-only, and mapped if they were loaded.
        extras: What else belongs to the table, as JSON holds it.
    """

    arrays: Mapping[str, Array]
    extras: Mapping[str, Any]


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _user_directory() -> str | None:
    """The user's cache directory, made or not; None where there is no home."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(chosen):  # the specification has relative ones ignored
        chosen = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return os.path.join(chosen, "dataload") if os.path.isabs(chosen) else None


def load_cached(key: IndexKey) -> CachedTable | None:
    """The table that was stored under `key`; None if there is none, or it is damaged or out of date."""
    for place in key.places():
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return _load(place, key.text)
    return None


def _load(path: str, wanted: str) -> CachedTable:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("no file")
        header, start = _read_header(descriptor, status.st_size)
        if header["key"] != wanted:
            raise ValueError("out of date")
        data = np.frombuffer(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(descriptor)
    if _checksum(data[start:]) != header["sum"]:
        raise ValueError("damaged")
    arrays: dict[str, Array] = {}
    for name, text, count in header["arrays"]:
        dtype = _DTYPES[text]
        if type(count) is not int or not 0 <= count <= len(data):
            raise ValueError("no number of items")
        stop = start + count * dtype.itemsize
        arrays[name] = data[start:stop].view(dtype)
        start = _aligned(stop)
    if start != len(data):
        raise ValueError("shorter or longer than its header says")
    return CachedTable(arrays, dict(header["extras"]))


def _read_header(descriptor: int, size: int) -> tuple[dict[str, Any], int]:
    """The header of a file of the cache, and where its arrays start."""
    magic, length, crc = _HEAD.unpack(os.pread(descriptor, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))
    start = _aligned(_HEAD.size + length)
    if magic != _MAGIC or length > _LONGEST_HEADER or start > size:
        raise ValueError("no file of the cache")
    text = os.pread(descriptor, length, _HEAD.size)
    if zlib.crc32(text) != crc:
        raise ValueError("damaged")
    return json.loads(text), start


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _checksum(data: Array) -> int:
    """The sum of all words: tells zeros left by a crash and flipped bits, in a tenth of the time of a CRC."""
    whole = len(data) // 8 * 8
    rest = int.from_bytes(data[whole:].tobytes(), sys.byteorder)
    return (int(data[:whole].view(np.uint64).sum(dtype=np.uint64)) + rest) % 2**64


def store_cached(key: IndexKey, table: CachedTable) -> None:
    """Keep a table for the next time, if there is a place for it.

    Files that changed only just now may change again within the same tick of the file system's clock, so nothing is
    kept of them yet.
    """
    if max(changed for _, changed in key.files) > time.time_ns() - int(_SETTLED_SECONDS * 1e9):
        return
    beside, *others = key.places()
    try:
        mode = stat.S_IMODE(os.stat(key.path).st_mode) & 0o666 | 0o600
        if _store(beside, key, table, mode):
            return
        for place in others:
            os.makedirs(os.path.dirname(place), 0o700, exist_ok=True)
            _store(place, key, table, 0o600)
    except OSError:
        return


def _store(path: str, key: IndexKey, table: CachedTable, mode: int) -> bool:
    """Write the file, whole or not at all; returns whether it is there."""
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=f"{_SUFFIX}.tmp", dir=os.path.dirname(path))
        with open(descriptor, "wb") as stream:
            _write(stream, key, table)
            os.fchmod(descriptor, mode)  # whoever may read the data may read this
        with suppress(OSError, ValueError, KeyError, TypeError):
            _load(path, key.text)
            return True  # another process was first; it may have mapped its file, so that stays
        os.replace(temporary, path)  # without fsync: the checksum tells what a crash made of it
        temporary = None
    except OSError:
        return False
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
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
    """Whether all numbers of a loaded array are in [0, stop)."""
    return not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < stop)
