"""The files that dataload keeps beside data and in caches: list them and who holds them, and remove them.

Tables and filters are files of arrays that can be made again. Such a file is trusted only if no other user could have
written it. It is read, not mapped: shortening a mapped file kills the process.

Layout: 16 bytes of magic, the length and the CRC-32 of a header, 4 bytes each, the header as JSON, and the arrays, each
aligned to 64 bytes.
"""

import glob
import hashlib
import json
import os
import platform
import re
import stat
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dataload._util.system import IS_POSIX, LOCK_EX, LOCK_NB, NO_FOLLOW, NO_WAIT, open_file, read_at, read_into_at
from dataload.errors import DataloadError, SourceNotFoundError, printable
from dataload.storage.backend import storage_of
from dataload.storage.errors import file_errors
from dataload.storage.local.atomic import AtomicFile, remove_leftovers
from dataload.storage.local.files import lock_file, read_text
from dataload.storage.local.folders import distrust, trusted_folder, user_directory
from dataload.storage.paths import base_name, is_url, join
from dataload.storage.remote.jobs import describe_claim, lock, opened
from dataload.storage.remote.settings import Remote
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
    """The place of a file of arrays: beside the file `data`, or in the folder `room` of a cache."""

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
        begun = begun[start:][:stop]
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


UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{8}-[0-9a-f]+\.tmp")
"""The name of the folder of an `AtomicFile`, and the name of the file in it."""

_PLACES = "places"
_LONGEST_HOLDER = 300


class Kept(NamedTuple):
    """A file or folder that dataload keeps; if `holder`, a process, is "", it may be deleted by the command `removal`.

    `name` names the data to which it belongs, `used` the time of its last use in seconds since 1970, None at URLs.
    """

    path: str
    bytes: int
    used: float | None = None
    holder: str = ""
    kind: str = ""
    name: str = ""
    removal: str = "prune"  # or "all", or "never"


def list_kept(
    directory: str, wanted: Callable[[str], Any] = bool, remote: Remote | None = None, *, living: bool = False
) -> list[Kept]:
    """Return the files and folders whose names are `wanted`, at a URL only hidden ones; none of a missing directory.

    Locks and folders of writers are held as long as a process lives, `living` files as well.
    """
    found: list[Kept] = []
    if is_url(directory):
        storage = storage_of(directory, remote)
        for path in storage.glob(join(glob.escape(directory), ".*")):
            with suppress(SourceNotFoundError):  # some stores list folders that are empty
                if wanted(base_name(path)):
                    found.append(Kept(path, storage.size(path), holder=_claimed_by(path, remote)))
        return found
    with suppress(SourceNotFoundError), file_errors(directory), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, SourceNotFoundError):
                if wanted(entry.name) and not entry.is_symlink():
                    status = entry.stat()
                    size = storage_of(entry.path).size(entry.path) if entry.is_dir() else status.st_size
                    held = living or entry.name.endswith(".lock") or UNFINISHED.fullmatch(entry.name)
                    found.append(Kept(entry.path, size, status.st_mtime, _holder(entry.path) if held else ""))
    return sorted(found)


def _holder(path: str) -> str:
    """Return who holds the lock of a file or folder, "" if it is free."""
    with opened(path) as descriptor:
        if descriptor is None or lock(descriptor, LOCK_EX | LOCK_NB):
            return ""
    with suppress(OSError, ValueError):
        told = read_text(path, _LONGEST_HOLDER) if path.endswith(".lock") else describe_claim(path)
        return printable(told, _LONGEST_HOLDER, kept="") or "a process"
    return "a process"


def _claimed_by(path: str, remote: Remote | None) -> str:
    """Return who writes the log of a job at a URL, unless that was a process of this machine that has ended."""
    with suppress(DataloadError, ValueError, LookupError, TypeError, OverflowError, ProcessLookupError):
        claim: Any = json.loads((storage_of(path, remote).load(join(path, "claim")) or (b"", None))[0])
        with suppress(PermissionError):
            if IS_POSIX and claim["host"] == platform.node():
                os.kill(int(claim["pid"]), 0)
        return printable(f"process {claim['pid']} on {claim['host']}", _LONGEST_HOLDER, kept="")
    return ""


def remove_kept(kept: Kept, remote: Remote | None = None) -> bool:
    """Delete a file, or the folder of a writer or the lock of a process that has ended; return whether it is gone."""
    directory, name = os.path.split(kept.path)
    with suppress(OSError, DataloadError):
        if is_url(kept.path):
            storage_of(kept.path, remote).remove(kept.path)
            return True
        if unfinished := UNFINISHED.fullmatch(name):
            remove_leftovers(os.path.join(directory, unfinished[1]))
        elif name.endswith(".lock"):
            with lock_file(kept.path, kept.path):
                pass
        elif not kept.holder:
            os.unlink(kept.path)
    return not is_url(kept.path) and not os.path.lexists(kept.path)


def touch(path: str) -> None:
    """Note that a file is used now, if this user may."""
    with suppress(OSError):
        os.utime(path)


def note_place(directory: str) -> None:
    """Note in the user's cache that files are kept in a directory, for `noted_places`."""
    root = None if os.environ.get("DATALOAD_CACHE") == "0" else user_directory()
    with suppress(OSError, DataloadError):
        if root is not None:
            name = hashlib.blake2b(os.fsencode(directory), digest_size=10).hexdigest()
            with open(os.path.join(trusted_folder(root, _PLACES), name), "xb") as file:
                file.write(os.fsencode(directory))


def noted_places() -> list[str]:
    """Return the directories that were noted and exist."""
    root = user_directory()
    with suppress(OSError, DataloadError):
        noted = [] if root is None else list_kept(trusted_folder(root, _PLACES, create=False))
        return sorted(filter(os.path.isdir, (os.fsdecode(storage_of(each.path).read(each.path)) for each in noted)))
    return []
