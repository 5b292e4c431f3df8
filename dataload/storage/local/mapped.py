"""A read-only memory map of a file, with gathers for every format that stores records contiguously."""

import mmap
import os
import weakref
from typing import Any

import numpy as np

from dataload.storage.errors import changed_error, file_errors, rewritten_error
from dataload.storage.local.buffers import BufferPool
from dataload.storage.local.readahead import is_cold, will_need
from dataload.types import Array, BytesArray, Int64Array

# numpy's fancy indexing holds the GIL for fewer indices than this (NPY_BEGIN_THREADS_THRESHOLDED), which makes
# reading threads take turns.
_RELEASES_GIL_FROM = 500

_STEPS_BETWEEN_PROBES = 16


class _Mapping:
    """An open file and its map, both released with the last reference to this object."""

    __slots__ = ("__weakref__", "data", "descriptor", "map", "windows")

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor).atexit = False  # threads may still be reading at exit
        size = os.fstat(self.descriptor).st_size
        # An empty file cannot be mapped. The map has its own descriptor, which it does not expose.
        self.map = mmap.mmap(self.descriptor, size, access=mmap.ACCESS_READ) if size else None
        self.data = np.frombuffer(self.map if self.map is not None else b"", np.uint8)
        self.windows: dict[tuple[int, int, int], Array] = {}


class MappedFile:
    """A memory-mapped file, and gathers that copy records out of it.

    `release` drops the map and its descriptor, and the next use maps the file again, so a process can hold more of
    these than it may open files. Reads are thread-safe: a running read keeps its map.

    Attributes:
        path: Path as given.
        size: Size in bytes when the file was opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with file_errors(path):
            self._mapping: _Mapping | None = _Mapping(path)
        self.size = len(self._mapping.data)
        self._identity = _identity(self._mapping.descriptor)
        self._buffers = BufferPool()
        self._warm_steps = 0

    @property
    def data(self) -> BytesArray:
        """The content, (size,) uint8, read-only; keeps the map alive."""
        return self._open().data

    def release(self) -> None:
        """Drop the map and its descriptor once no running read uses them."""
        self._mapping = None

    def _open(self) -> _Mapping:
        mapping = self._mapping
        if mapping is None:
            with file_errors(self.path):
                mapping = _Mapping(self.path)
            if _identity(mapping.descriptor) != self._identity:
                if len(mapping.data) != self.size:
                    raise changed_error(self.path, self.size, len(mapping.data))
                raise rewritten_error(self.path)
            self._mapping = mapping
        return mapping

    def check(self) -> None:
        """Check once per read that the file has not shrunk: touching a page that no longer exists kills the process.

        Raises:
            CorruptFileError: The file has shrunk.
        """
        mapping = self._open()  # by name: `release` in another thread must not close its descriptor meanwhile
        size = os.fstat(mapping.descriptor).st_size  # about 1 us
        if size < self.size:
            raise changed_error(self.path, self.size, size)

    def hint(self, offsets: Int64Array, lengths: Int64Array | int) -> None:
        """Ask the kernel to load cold ranges before they are read; `take`, `gather` and `copies` do so themselves."""
        if len(offsets) > 1 and self._finds_cold(int(offsets[-1])):
            self._will_need(offsets, lengths)

    def _finds_cold(self, offset: int) -> bool:
        """Return True if `offset` is not in the page cache; after a warm one, skip the next probes."""
        if self._warm_steps > 0:
            self._warm_steps -= 1  # threads may lose a count to each other, which does no harm
            return False
        mapping = self._open()
        if is_cold(mapping.descriptor, offset):
            return True
        self._warm_steps = _STEPS_BETWEEN_PROBES
        return False

    def _will_need(self, offsets: Int64Array, lengths: Int64Array | int) -> None:
        mapped = self._open().map
        if mapped is not None:
            will_need(mapped, offsets, lengths)

    def take(self, start: int, length: int, indices: Int64Array) -> Array:
        """Copy contiguous records; the fastest gather.

        Args:
            start: Byte offset of record 0.
            length: Bytes per record, at least 1.
            indices: (m,) int64, of records that lie inside the file; the caller has checked.

        Returns:
            (m, length) uint8, contiguous, owned by the caller.
        """
        if len(indices) > 1 and self._finds_cold(int(indices[-1]) * length + start):
            self._will_need(indices * length + start, length)
        rows = self.data[start : start + (self.size - start) // length * length].reshape(-1, length)
        out = self._buffers.empty((len(indices), length), np.uint8)
        # With mode="raise", numpy would buffer the output to protect `out`.
        return np.take(rows, indices, axis=0, out=out, mode="clip")

    def gather(self, offsets: Int64Array, length: int) -> Array:
        """Copy records of one length from arbitrary offsets.

        Args:
            offsets: (rows,) int64, each in [0, size - length]; the caller has checked.
            length: Bytes per record, at least 1.

        Returns:
            (rows, length) uint8, contiguous, owned by the caller.
        """
        self.hint(offsets, length)
        rows, pieces = len(offsets), _pieces(len(offsets), length)
        piece = length // pieces
        if pieces > 1:
            offsets = (offsets[:, None] + np.arange(0, length, piece)).ravel()
        return self._window(0, 1, piece)[offsets].view(np.uint8).reshape(rows, length)

    def gather_every(self, start: int, stride: int, length: int, indices: Int64Array) -> Array:
        """Copy records of one length at a constant stride, overlapping or not.

        Equal to `gather` of ``start + indices * stride``, without the arithmetic.

        Args:
            start: Byte offset of record 0.
            stride: Bytes between the starts of consecutive records, at least 1.
            length: Bytes per record, at least 1.
            indices: (rows,) int64, of records that lie inside the file; the caller has checked.

        Returns:
            (rows, length) uint8, contiguous, owned by the caller.
        """
        if _pieces(len(indices), length) > 1:
            return self.gather(indices * stride + start, length)
        if len(indices) > 1 and self._finds_cold(int(indices[-1]) * stride + start):
            self._will_need(indices * stride + start, length)
        return self._window(start, stride, length)[indices].view(np.uint8).reshape(len(indices), length)

    def _window(self, start: int, stride: int, length: int) -> Array:
        """Return a view whose items are `length` bytes each, at every `stride` bytes; they may overlap."""
        mapping = self._open()
        window = mapping.windows.get((start, stride, length))
        if window is None:
            shape, item = ((self.size - start - length) // stride + 1,), np.dtype((np.void, length))
            window = np.ndarray(shape, item, mapping.data, start, (stride,))
            if len(mapping.windows) > 64:  # records of many lengths: caching does not pay
                mapping.windows.clear()
            mapping.windows[start, stride, length] = window
        return window

    def copy(self, offset: int, length: int) -> bytes:
        """Return the bytes [offset, offset + length); the caller has checked the bounds."""
        return self.data[offset : offset + length].tobytes()

    def copies(self, offsets: Int64Array, lengths: Int64Array) -> list[bytes]:
        """Return the bytes of many ranges, (rows,) offsets and lengths; the caller has checked the bounds."""
        data = self._open().map
        if data is None:
            return [b""] * len(offsets)
        self.hint(offsets, lengths)
        # Slicing the map makes bytes directly, in half the time of slicing an array and `tobytes`.
        return [data[start:stop] for start, stop in zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True)]

    def view(self, offset: int, length: int) -> memoryview:
        """Return a read-only view of bytes [offset, offset + length), which keeps the map alive."""
        return self.data.data[offset : offset + length]

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.path}: a memory map belongs to its process and cannot be pickled")


def _identity(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ino


def _pieces(rows: int, length: int) -> int:
    """Return the number of pieces to split each record into: a small batch of long records needs more indices."""
    if rows >= _RELEASES_GIL_FROM or rows * length < 1 << 16:
        return 1
    return next((p for p in (2, 4, 8, 16) if length % p == 0 and rows * p >= _RELEASES_GIL_FROM), 1)
