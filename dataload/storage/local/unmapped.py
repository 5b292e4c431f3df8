"""Records read from a file that is not mapped."""

import os

import numpy as np

from dataload._util.buffers import pooled_empty
from dataload.storage.core import core
from dataload.storage.errors import changed_error, file_errors, outside_error
from dataload.storage.local.reopened import Handle, ReopenedFile
from dataload.storage.ranges import merge_ranges
from dataload.types import Array, BytesArray, Int64Array

_GAP = 4096  # bytes; reading a page more is faster than another call


class UnmappedFile(ReopenedFile[Handle]):
    """A file that is read by `pread`, in few calls; see `RecordFile`. No change of the file can kill the process."""

    def __init__(self, path: str) -> None:
        super().__init__(path, Handle)

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

    def _load(self, offsets: Int64Array, lengths: Int64Array | int) -> tuple[BytesArray, Int64Array]:
        """Read ranges, at least one, into one buffer; return it and the offset of each range in it."""
        inside = (offsets >= 0) & (np.asarray(lengths) >= 0) & (offsets <= self.size) & (lengths <= self.size - offsets)
        if not inside.all():
            row = int(np.argmin(inside))
            raise outside_error(self.path, self.size, f"row {row}: a range outside the {self.size} bytes")
        runs = merge_ranges(offsets, lengths, _GAP)
        handle = self._open()
        buffer = pooled_empty((int((runs.stops - runs.starts).sum()),), np.uint8)
        at = 0
        with file_errors(self.path):
            for start, stop in zip(runs.starts.tolist(), runs.stops.tolist(), strict=True):
                self._fill(handle.descriptor, buffer[at : at + stop - start], start)
                at += stop - start
        return buffer, runs.positions

    def _fill(self, descriptor: int, target: BytesArray, offset: int) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(descriptor, [target[done:].data], offset + done)
            if not count:
                raise changed_error(self.path, self.size, os.fstat(descriptor).st_size)
            done += count
