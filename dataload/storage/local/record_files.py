"""Local files of records: mapped, or read by `pread`."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from dataload._util.arrays import pooled_empty
from dataload._util.system import NO_WAIT, open_file, open_files_limit, read_at, read_into_at
from dataload.errors import ChangedFileError, SourceError
from dataload.storage.core import core
from dataload.storage.errors import (
    changed_error,
    disk_error,
    file_errors,
    outside_error,
    overwritten_error,
    rewritten_error,
)
from dataload.storage.record_file import MergedReads, RecordFile, Runs, loaded_files, merge_ranges
from dataload.types import Array, BytesArray, Int64Array

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file with the flags of `os.open`, without blocking, and return its descriptor."""
    return _open_regular(path, flags)[0]


def _open_regular(path: str | os.PathLike[str], flags: int) -> tuple[int, os.stat_result]:
    with contextlib.suppress(FileNotFoundError):  # opening may create it
        _check_regular(path, os.stat(path))
    descriptor = open_file(path, flags | NO_WAIT)
    try:
        status = os.fstat(descriptor)
        _check_regular(path, status)  # it may have been replaced since
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, status


def _check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, and only regular files are opened", path)


_MOST_LOADED = 1 << 16  # bytes; copying them takes less time than two more reads
_PAGE = mmap.PAGESIZE
_WILL_NEED: int | None = getattr(mmap, "MADV_WILLNEED", None)
_DO_NOT_WAIT: int | None = getattr(os, "RWF_NOWAIT", None)


def is_cold(descriptor: int, offset: int) -> bool:
    """Return whether reading the byte at `offset` would wait for the disk; False if unknown."""
    if sys.platform == "win32" or _DO_NOT_WAIT is None or _WILL_NEED is None:
        return False
    try:
        os.preadv(descriptor, [bytearray(1)], offset, _DO_NOT_WAIT)
    except BlockingIOError:
        return True
    except OSError:  # not supported by the file system; a real error recurs in the read itself
        return False
    return False


def will_need(mapped: mmap.mmap, offsets: Int64Array, lengths: Int64Array | int) -> None:
    """Ask the kernel to read ranges, (n,) int64 bytes, ahead, skipping those outside the map."""
    if sys.platform == "win32" or _WILL_NEED is None:
        return
    runs = merge_ranges(offsets, lengths, _PAGE)
    for start, stop in zip(runs.starts.tolist(), runs.stops.tolist(), strict=True):
        if 0 <= start < stop <= len(mapped):
            page = start // _PAGE * _PAGE
            mapped.madvise(_WILL_NEED, page, stop - page)


class FileIdentity(NamedTuple):
    """Version of a file: size in bytes, time of the last change in ns, and (device, inode), if it is a local file."""

    size: int
    changed: int
    file: tuple[int, int] = (0, 0)

    @classmethod
    def at(cls, path: str) -> FileIdentity:
        """Return the version of the file at a local path, or raise an OSError."""
        return cls.of(os.stat(path))

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))


class Handle:
    """An open file and its version, closed with the last reference (`changed` in ns)."""

    __slots__ = ("__weakref__", "changed", "descriptor", "identity")

    def __init__(self, path: str) -> None:
        self.descriptor: int = -1
        self.descriptor, status = _open_regular(path, os.O_RDONLY)
        self.identity: FileIdentity = FileIdentity.of(status)
        self.changed: int = self.identity.changed

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.descriptor >= 0:
            close(self.descriptor)


HandleT = TypeVar("HandleT", bound=Handle)


class ReopenedFile(RecordFile, Generic[HandleT]):
    """A local file that `make` opens by its path. A running read keeps its handle."""

    def __init__(self, path: str, make: Callable[[str], HandleT]) -> None:
        self.path = path
        self._make = make
        self._handle: HandleT | None = None
        with file_errors(path):
            handle = make(path)
        self.identity: FileIdentity = handle.identity
        self._keep(handle)
        self.size: int = self.identity.size
        self._loaded: bytes | None = None

    def release(self) -> None:
        self._handle = None

    def _unload(self) -> None:
        self._loaded = None

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def is_deleted(self) -> bool:
        """Return whether the file is open here but has been unlinked."""
        handle = self._handle
        with file_errors(self.path):
            return handle is not None and os.fstat(handle.descriptor).st_nlink == 0

    def is_written(self) -> bool:
        handle = self._open()
        with file_errors(self.path):
            return os.fstat(handle.descriptor).st_mtime_ns != handle.changed

    def _changed(self, handle: HandleT) -> ChangedFileError | None:
        """Return the error, after a read, if the file was changed since it was opened; else None."""
        with file_errors(self.path):
            now = os.fstat(handle.descriptor)
        if now.st_size < self.size:
            return changed_error(self.path, self.size, now.st_size)
        if now.st_mtime_ns == handle.changed or self.may_be_written:
            return None
        return overwritten_error(self.path, handle.changed, now.st_mtime_ns)

    def read(self, offset: int, length: int) -> bytes:
        """See `RecordFile.read`; without a map, whose page faults cost more than a call."""
        if min(offset, length, self.size - offset - length) < 0:
            raise outside_error(self.path, self.size, f"bytes {offset} to {offset + length}")
        if (data := self._loaded) is None and self.size <= _MOST_LOADED and (loaded := loaded_files()) is not None:
            data = self._loaded = self._read(0, self.size)
            loaded.append(self._unload)
        return self._read(offset, length) if data is None else data[offset : offset + length]

    def _read(self, offset: int, length: int) -> bytes:
        handle = self._open()
        with file_errors(self.path):
            data = read_at(handle.descriptor, length, offset)
        if (error := self._changed(handle)) or len(data) < length:
            raise error or changed_error(self.path, self.size, offset + len(data))
        return data

    def _open(self) -> HandleT:
        handle = self._handle
        if handle is None:
            with file_errors(self.path):
                handle = self._make(self.path)
            if handle.identity.size != self.size:
                raise changed_error(self.path, self.size, handle.identity.size)
            if handle.identity != self.identity:
                raise rewritten_error(self.path)
            self._keep(handle)
        return handle

    def _keep(self, handle: HandleT) -> None:
        """Keep a file open, unless half of the files that may be open are: the system gives the lowest free number."""
        if self._make not in (Handle, Mapping) or handle.descriptor < open_files_limit() // 2:  # copies may be deleted
            self._handle = handle


STEPS_BETWEEN_PROBES = 16


class UnmappedFile(ReopenedFile[HandleT], MergedReads):
    """A file read by `pread`, in few calls. A change of the file cannot kill the process."""

    gap = 4096  # reading a page more is faster than another call

    def __init__(self, path: str, make: Callable[[str], HandleT] = Handle) -> None:
        super().__init__(path, make)

    def _fill(self, buffer: BytesArray, runs: Runs) -> None:
        handle = self._open()
        at = 0
        with file_errors(self.path):
            for start, stop in zip(runs.starts.tolist(), runs.stops.tolist(), strict=True):
                self._read_into(handle.descriptor, buffer[at : at + stop - start], start)
                at += stop - start
        if error := self._changed(handle):
            raise error

    def _read_into(self, descriptor: int, target: BytesArray, offset: int) -> None:
        done = 0
        while done < len(target):
            count = read_into_at(descriptor, target[done:].data, offset + done)
            if not count:
                raise changed_error(self.path, self.size, os.fstat(descriptor).st_size)
            done += count


class Mapping(Handle):
    """An open file and its map."""

    __slots__ = ("_map",)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._map: mmap.mmap | bytes | None = None

    def map(self) -> mmap.mmap | bytes | None:
        """Return the map, which is made on first use; None if the system refuses, or the file has shrunk."""
        if self._map is None:
            size = self.identity.size
            with contextlib.suppress(OSError, ValueError):
                # An empty file cannot be mapped. The map has its own descriptor, which it does not expose.
                self._map = mmap.mmap(self.descriptor, size, access=mmap.ACCESS_READ) if size else b""
        return self._map


class MappedFile(UnmappedFile[Mapping]):
    """A memory-mapped file; where the system refuses to map it, it is read by `pread`."""

    def __init__(self, path: str, make: Callable[[str], Mapping] = Mapping) -> None:
        super().__init__(path, make)
        self._warm_steps = 0

    def copies(self, offsets: Int64Array, lengths: Int64Array) -> list[bytes]:
        if self._open().map() is None:
            return super().copies(offsets, lengths)
        return self._call(core().copies, (), 0, 1, lengths, offsets, (offsets, lengths))

    def _gather(self, out: Array, start: int, stride: int, length: int, indices: Int64Array) -> None:
        if self._open().map() is None:
            super()._gather(out, start, stride, length, indices)
        else:
            self._call(core().gather, (out,), start, stride, length, indices, (start, stride, indices, length))

    def gather_columns(self, offsets: Int64Array, starts: Int64Array, length: int) -> Array:
        """See `RecordFile`: columns are copied one after another, without the offset of each value."""
        mapping, count = self._open(), len(starts)
        if mapping.map() is None or not count or self._is_cold(mapping, int(starts[-1] + offsets[-1])):
            return super().gather_columns(offsets, starts, length)
        out = pooled_empty((count, len(offsets), length), np.uint8)
        sizes, targets = np.full(count, length), np.arange(count) * (len(offsets) * length)
        after = offsets, int(starts.max()) + length, starts, sizes, targets, None, None
        self._call(core().cut, (out,), 0, 1, length, offsets[:0], after)
        return out

    def _gather_ranges(self, out: Array, offsets: Int64Array, lengths: Int64Array) -> None:
        if self._open().map() is None:
            super()._gather_ranges(out, offsets, lengths)
        else:
            self._call(core().gather_ranges, (out,), 0, 1, lengths, offsets, (offsets, lengths))

    def _cut(self, offsets: Int64Array, length: int, out: BytesArray, *fields: Any) -> int:
        if self._open().map() is None:
            return super()._cut(offsets, length, out, *fields)
        return self._call(core().cut, (out,), 0, 1, length, offsets, (offsets, length, *fields))

    def _call(
        self,
        function: Callable[..., Any],
        before: tuple[Any, ...],
        start: int,
        stride: int,
        lengths: Int64Array | int,
        indices: Int64Array,
        after: tuple[Any, ...],
    ) -> Any:
        """Call a function of the core with the map between these arguments, and the file after them."""
        mapping = self._open()
        self._hint(mapping, start, stride, lengths, indices)
        try:
            return function(*before, mapping.map(), *after, self._file(mapping))
        except (core().MapFault, ValueError) as error:
            raise self._error(mapping, error) from None

    @property
    def is_plain(self) -> bool:
        """Whether the file is at its path, and not a copy of an object that may be deleted."""
        return self._make is Mapping

    def moved(self, path: str, identity: FileIdentity) -> Self:
        """Return another file, which is not open."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), path=path, identity=identity, size=identity.size, _handle=None, _loaded=None)
        return other

    def map_for(self, maps: Any, shard: int) -> None:
        """Map the file again as a shard of `maps`, the core's, and close it, unless others may write to it."""
        mapping = self._open()
        path = self.path if os.path.isabs(self.path) else os.path.abspath(self.path)
        maps.put(shard, mapping.descriptor, os.fsencode(path), self.size, mapping.changed)
        if not self.may_be_written:
            self.release()

    def error_at(self, offset: int) -> SourceError:
        """Return the error for a map that failed at `offset`, given that the file is not open."""
        if self.may_be_written:
            return SourceError("the file was written to: its reader knows whether that matters", path=self.path)
        try:
            now = FileIdentity.at(self.path)
        except OSError:
            now = self.identity
        if now.file == self.identity.file and now.size < self.size:
            return changed_error(self.path, self.size, now.size)
        if now.file == self.identity.file and now.changed != self.identity.changed:
            return overwritten_error(self.path, self.identity.changed, now.changed)
        return disk_error(self.path, offset)

    def _file(self, mapping: Mapping) -> int | tuple[int, int]:
        return mapping.descriptor if self.may_be_written else (mapping.descriptor, mapping.changed)

    def _error(self, mapping: Mapping, error: Exception) -> SourceError:
        if isinstance(error, core().MapFault):
            return self._changed(mapping) or disk_error(self.path, int(str(error)))
        return outside_error(self.path, self.size, error)

    def _hint(self, mapping: Mapping, start: int, stride: int, lengths: Int64Array | int, indices: Int64Array) -> None:
        """Ask the kernel to load cold ranges together."""
        if len(indices) < 2 or not self._is_cold(mapping, start + int(indices[-1]) * stride):
            return
        if isinstance(mapped := mapping.map(), mmap.mmap):
            will_need(mapped, start + indices * stride, lengths)

    def _is_cold(self, mapping: Mapping, offset: int) -> bool:
        """Return whether an offset has to be read from the disk; after one that has not, some steps are not probed."""
        if self._warm_steps > 0:
            self._warm_steps -= 1  # threads may lose a count to each other, which does no harm
            return False
        cold = is_cold(mapping.descriptor, offset)
        self._warm_steps = 0 if cold else STEPS_BETWEEN_PROBES
        return cold
