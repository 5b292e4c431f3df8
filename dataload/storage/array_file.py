"""A file of arrays that can be made again, such as a table of locations, beside data or in a cache.

It is trusted only if no other user could have written it. It is read, not mapped: shortening a mapped file kills the
process.

Layout: 16 bytes of magic, the length and the CRC-32 of a header, 4 bytes each, the header as JSON, and the arrays, each
aligned to 64 bytes.
"""

import json
import os
import stat
import struct
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dataload._util.system import NO_FOLLOW, NO_WAIT, open_file, read_at, read_into_at
from dataload.errors import DataloadError
from dataload.storage.local.atomic import AtomicFile
from dataload.storage.local.folders import distrust, trusted_folder
from dataload.types import Array

INVALID = (OSError, DataloadError, ValueError, LookupError, TypeError, OverflowError, RecursionError, MemoryError)
"""The errors that a damaged or forged file may cause."""

_MAGIC = b"\x93dataload-index\n"
_HEAD = struct.Struct("<16sII")
_ALIGNMENT = 64
_LONGEST_HEADER = 1 << 24
_FIRST_BYTES = 1 << 12  # small files are read in one call
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, "bBhHiIlLqQ")}


@dataclass(frozen=True, slots=True)
class CachedTable:
    """Arrays by name, read-only if they were loaded, and other values that JSON can represent.

    A file ends with a `tail` of bytes without a checksum. It is not loaded, and stands for its path and offset then.
    """

    arrays: Mapping[str, Array]
    extras: Mapping[str, Any]
    tail: Any = b""


class Place(NamedTuple):
    """Where a file of arrays may be: beside `data`, in the same directory, or in a folder `room` of a cache."""

    directory: str
    name: str
    data: str | None = None
    room: str = ""

    @property
    def path(self) -> str:
        return os.path.join(self.directory, self.room, self.name)

    def check(self, *, create: bool) -> None:
        """Raise a ConfigError if others could have written to the folder of a cache."""
        # Beside the data, the folder does not matter: whoever may rename files in it may also replace the data.
        if self.data is None:
            trusted_folder(self.directory, *filter(None, [self.room]), create=create)


def read_key(path: str) -> str:
    """Return the key of a file of arrays, whoever wrote it; one of `INVALID` if it is not one."""
    descriptor, status = _open_warily(path)
    try:
        return str(_read_header(descriptor, status.st_size)[0]["key"])
    finally:
        os.close(descriptor)


def read_arrays(place: Place, key: str) -> CachedTable:
    """Return the arrays stored with a key; one of `INVALID` if the file is missing, damaged, or has another key."""
    path = place.path
    descriptor, status = _open_warily(path)  # a file object would cost two more calls of the system
    try:
        place.check(create=False)
        if reason := distrust(status, *(() if place.data is None else [os.stat(place.data).st_uid])):
            raise ValueError(reason)
        header, start, begun = _read_header(descriptor, status.st_size)
        if header["key"] != key:
            raise ValueError("out of date")
        spans, stop = _plan_arrays(header["arrays"], status.st_size - start)
        if stop + _aligned(header.get("tail", 0)) != status.st_size - start:
            raise ValueError("size differs from the header")
        data = np.empty(stop, np.uint8)
        begun = begun[start : start + stop]
        data[: len(begun)] = np.frombuffer(begun, np.uint8)
        left = data.data[len(begun) :]
        while len(left) and (count := read_into_at(descriptor, left, start + stop - len(left))):  # 2 GiB at a time
            left = left[count:]
    finally:
        os.close(descriptor)
    if len(left) or _checksum(data) != header["sum"]:
        raise ValueError("damaged")
    data.flags.writeable = False
    arrays = {name: data[first:last].view(dtype) for name, dtype, first, last in spans}
    return CachedTable(arrays, dict(header["extras"]), (path, start + stop))


def _open_warily(path: str) -> tuple[int, os.stat_result]:
    # Neither a link nor a wait for the writer of a pipe.
    descriptor = open_file(path, os.O_RDONLY | NO_FOLLOW | NO_WAIT)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ValueError("not a regular file")
    return descriptor, status


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


def _read_header(descriptor: int, size: int) -> tuple[dict[str, Any], int, bytes]:
    """Return the header of a file, the offset of its arrays, and the first bytes of the file."""
    begun = read_at(descriptor, _FIRST_BYTES, 0)
    magic, length, crc = _HEAD.unpack(begun[: _HEAD.size].ljust(_HEAD.size, b"\0"))
    start = _aligned(_HEAD.size + length)
    if magic != _MAGIC or length > _LONGEST_HEADER or start > size:
        raise ValueError("not a file of arrays")
    text = begun[_HEAD.size : _HEAD.size + length]
    text += read_at(descriptor, length - len(text), _HEAD.size + len(text)) if len(text) < length else b""
    if zlib.crc32(text) != crc:
        raise ValueError("damaged")
    return json.loads(text.decode()), start, begun  # decoding saves a look for the encoding


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _checksum(data: Array) -> int:
    """Return the sum of all words, which reveals flipped bits and zeros left by a crash in a tenth of a CRC's time."""
    whole = len(data) // 8 * 8
    rest = int.from_bytes(data[whole:].tobytes(), sys.byteorder)
    return (int(data[:whole].view(np.uint64).sum(dtype=np.uint64)) + rest) % 2**64


def write_arrays(place: Place, key: str, table: CachedTable) -> bool:
    """Write a file of arrays atomically, and return whether it exists."""
    try:
        place.check(create=True)
        # Readable by everyone who can read the data, and writable only by its owner: `read_arrays` would not trust it.
        mode = 0o600 | (0 if place.data is None else stat.S_IMODE(os.stat(place.data).st_mode) & 0o444)
        with AtomicFile(place.path, overwrite=True) as part:
            with part.create() as stream:
                _write(stream, key, table)
                os.chmod(part.temporary, mode)
            part.publish(durable=False)  # the checksum detects damage by a crash
    except (OSError, DataloadError):
        return False
    return True


def _write(stream: Any, key: str, table: CachedTable) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in table.arrays.items()}
    head = {
        "key": key,
        "arrays": [[name, array.dtype.str, len(array)] for name, array in arrays.items()],
        "extras": dict(table.extras),
        "tail": len(table.tail),
        "sum": sum(_checksum(array.view(np.uint8)) for array in arrays.values()) % 2**64,
    }
    text = json.dumps(head).encode()
    stream.write(_HEAD.pack(_MAGIC, len(text), zlib.crc32(text)))
    for part in (text, *(array.data for array in arrays.values()), table.tail):
        stream.write(part)
        stream.write(bytes(_aligned(stream.tell()) - stream.tell()))
