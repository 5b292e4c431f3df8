"""Records copied out of a read-only memory map."""

import mmap
import os
import weakref

from dataload.errors import CorruptFileError
from dataload.storage.core import core
from dataload.storage.errors import changed_error, file_errors, rewritten_error
from dataload.storage.local.readahead import is_cold, will_need
from dataload.storage.records import RecordFile
from dataload.types import Array, Int64Array

_STEPS_BETWEEN_PROBES = 16


class _Mapping:
    """An open file and its map, both released with the last reference to this object."""

    __slots__ = ("__weakref__", "descriptor", "map")

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor).atexit = False  # threads may still be reading at exit
        size = os.fstat(self.descriptor).st_size
        # An empty file cannot be mapped. The map has its own descriptor, which it does not expose.
        self.map: mmap.mmap | bytes = mmap.mmap(self.descriptor, size, access=mmap.ACCESS_READ) if size else b""


class MappedFile(RecordFile):
    """A memory-mapped file; see `RecordFile`. A running read keeps its map."""

    def __init__(self, path: str) -> None:
        self.path = path
        with file_errors(path):
            self._mapping: _Mapping | None = _Mapping(path)
        self.size = len(self._mapping.map)
        self._identity = identity(self._mapping.descriptor)
        self._warm_steps = 0

    def release(self) -> None:
        """See `RecordFile`."""
        self._mapping = None

    def copies(self, offsets: Int64Array, lengths: Int64Array) -> list[bytes]:
        """See `RecordFile`."""
        mapping = self._open()
        self._hint(mapping, 0, 1, lengths, offsets)
        try:
            return core().copies(mapping.map, offsets, lengths, mapping.descriptor)
        except (core().MapFault, ValueError) as error:
            raise self._corrupt(mapping, error) from None

    def _gather(self, out: Array, start: int, stride: int, length: int, indices: Int64Array) -> None:
        mapping = self._open()
        self._hint(mapping, start, stride, length, indices)
        try:
            core().gather(out, mapping.map, start, stride, indices, length, mapping.descriptor)
        except (core().MapFault, ValueError) as error:
            raise self._corrupt(mapping, error) from None

    def _gather_ranges(self, out: Array, offsets: Int64Array, lengths: Int64Array) -> None:
        mapping = self._open()
        self._hint(mapping, 0, 1, lengths, offsets)
        try:
            core().gather_ranges(out, mapping.map, offsets, lengths, mapping.descriptor)
        except (core().MapFault, ValueError) as error:
            raise self._corrupt(mapping, error) from None

    def _open(self) -> _Mapping:
        mapping = self._mapping
        if mapping is None:
            with file_errors(self.path):
                mapping = _Mapping(self.path)
            check_identity(self.path, self._identity, identity(mapping.descriptor))
            self._mapping = mapping
        return mapping

    def _corrupt(self, mapping: _Mapping, error: Exception) -> CorruptFileError:
        if isinstance(error, core().MapFault):
            return changed_error(self.path, self.size, os.fstat(mapping.descriptor).st_size)
        return outside_error(self.path, self.size, error)

    def _hint(self, mapping: _Mapping, start: int, stride: int, lengths: Int64Array | int, indices: Int64Array) -> None:
        """Ask the kernel to load cold ranges together, before they are touched one by one.

        One offset is probed: if it is in the page cache, the next steps are not probed at all.
        """
        if len(indices) < 2:
            return
        if self._warm_steps > 0:
            self._warm_steps -= 1  # threads may lose a count to each other, which does no harm
        elif not is_cold(mapping.descriptor, start + int(indices[-1]) * stride):
            self._warm_steps = _STEPS_BETWEEN_PROBES
        elif isinstance(mapping.map, mmap.mmap):
            will_need(mapping.map, start + indices * stride, lengths)


def identity(descriptor: int) -> tuple[int, int, int]:
    """Return size, time of change and inode of an open file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ino


def check_identity(path: str, was: tuple[int, int, int], now: tuple[int, int, int]) -> None:
    """Raise a CorruptFileError if a file that is opened again is not what it was."""
    if was[0] != now[0]:
        raise changed_error(path, was[0], now[0])
    if was != now:
        raise rewritten_error(path)


def outside_error(path: str, size: int, error: object) -> CorruptFileError:
    """Return the error for a range that is not inside a file."""
    return CorruptFileError(f"the table of records points outside the file: {error}", path=path, offset=size)
