"""Records read from a file that is not mapped."""

import os
import weakref

import numpy as np

from dataload._util.buffers import pooled_empty
from dataload.storage.core import core
from dataload.storage.errors import changed_error, file_errors
from dataload.storage.local.mapped import check_identity, identity, outside_error
from dataload.storage.ranges import merge_ranges
from dataload.storage.records import RecordFile
from dataload.types import Array, BytesArray, Int64Array

_GAP = 4096  # bytes; reading a page more is faster than another call


class _Descriptor:
    """An open file, closed with the last reference to this object."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number).atexit = False  # threads may still be reading at exit


class UnmappedFile(RecordFile):
    """A file that is read by `pread`, in few calls; see `RecordFile`. No change of the file can kill the process."""

    def __init__(self, path: str) -> None:
        self.path = path
        with file_errors(path):
            self._descriptor: _Descriptor | None = _Descriptor(path)
        self._identity = identity(self._descriptor.number)
        self.size = self._identity[0]

    def release(self) -> None:
        """See `RecordFile`."""
        self._descriptor = None

    def copies(self, offsets: Int64Array, lengths: Int64Array) -> list[bytes]:
        """See `RecordFile`."""
        if not len(offsets):
            return []
        data, positions = self._load(offsets, lengths)
        return core().copies(data, positions, lengths, -1)

    def _gather(self, out: Array, start: int, stride: int, length: int, indices: Int64Array) -> None:
        if len(indices):
            data, positions = self._load(start + indices * stride, length)
            core().gather(out, data, 0, 1, positions, length, -1)

    def _gather_ranges(self, out: Array, offsets: Int64Array, lengths: Int64Array) -> None:
        if len(offsets):
            data, positions = self._load(offsets, lengths)
            core().gather_ranges(out, data, positions, lengths, -1)

    def _open(self) -> _Descriptor:
        descriptor = self._descriptor
        if descriptor is None:
            with file_errors(self.path):
                descriptor = _Descriptor(self.path)
            check_identity(self.path, self._identity, identity(descriptor.number))
            self._descriptor = descriptor
        return descriptor

    def _load(self, offsets: Int64Array, lengths: Int64Array | int) -> tuple[BytesArray, Int64Array]:
        """Read ranges, at least one, into one buffer; return it and the offset of each range in it."""
        inside = (offsets >= 0) & (np.asarray(lengths) >= 0) & (offsets <= self.size) & (lengths <= self.size - offsets)
        if not inside.all():
            row = int(np.argmin(inside))
            raise outside_error(self.path, self.size, f"row {row}: a range outside the {self.size} bytes")
        runs = merge_ranges(offsets, lengths, _GAP)
        descriptor = self._open()
        buffer = pooled_empty((int((runs.stops - runs.starts).sum()),), np.uint8)
        at = 0
        with file_errors(self.path):
            for start, stop in zip(runs.starts.tolist(), runs.stops.tolist(), strict=True):
                self._fill(descriptor.number, buffer[at : at + stop - start], start)
                at += stop - start
        return buffer, runs.positions

    def _fill(self, descriptor: int, target: BytesArray, offset: int) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(descriptor, [target[done:].data], offset + done)
            if not count:
                raise changed_error(self.path, self.size, os.fstat(descriptor).st_size)
            done += count
