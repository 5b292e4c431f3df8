"""Records that lie anywhere in a file, for codecs that decode them together."""

from typing import Any, Self

import numpy as np

from dataload._util.arrays import pooled_empty
from dataload._util.clock import reading
from dataload.codecs.layout import RecordTable
from dataload.storage import RecordFile
from dataload.storage.core import core
from dataload.storage.local.record_files import MappedFile
from dataload.types import BytesArray, BytesColumn, Int64Array


class GatheredTable(RecordTable):
    """Records of `length` bytes at `offsets`, (records,) int64; each span that a codec needs is copied once."""

    __slots__ = ("_all", "_file", "_first", "_length", "_offsets")

    def __init__(self, file: RecordFile, offsets: Int64Array, length: int) -> None:
        self._file = file
        self._offsets = offsets
        self._length = length
        self._first: memoryview | None = None
        self._all: BytesArray | None = None

    @property
    def rows(self) -> BytesArray:
        """All records, (records, length) uint8."""
        if self._all is None:
            with reading():
                self._all = self._file.gather(self._offsets, self._length)
        return self._all

    def cut(self, start: int, stop: int) -> BytesArray:
        with reading():
            return self._file.gather(self._offsets + start, stop - start)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        if self._all is None and index == 0:  # the layout of all is that of the first
            if self._first is None:
                with reading():
                    self._first = memoryview(self._file.read(int(self._offsets[0]), self._length))
            return self._first
        return super().__getitem__(index)


def gather_records(file: RecordFile, offsets: Int64Array, lengths: Int64Array) -> RecordTable | BytesColumn:
    """Return records, at least one, in one block of memory: for codecs that copy what they keep."""
    length = int(lengths[0])
    if not length or not bool((lengths == length).all()):
        return file.gather_ranges(offsets, lengths)
    # Without a map, every gather reads the file again.
    if isinstance(file, MappedFile):
        return GatheredTable(file, offsets, length)
    return RecordTable(file.gather(offsets, length))


class LoadedRecords:
    """A block of memory from which parts of records are copied, with the methods of the file that they came from."""

    def __init__(self, block: BytesArray) -> None:
        self._block = block

    @classmethod
    def of(cls, file: RecordFile, offsets: Int64Array, lengths: Int64Array) -> tuple[Self, Int64Array]:
        """Copy ranges of a file; return them and the offset of each."""
        (block,), _, starts, _ = file.gather_ranges(offsets, lengths).parts()
        return cls(block), starts

    def gather(self, offsets: Int64Array, length: int) -> BytesArray:
        out = pooled_empty((len(offsets), length), np.uint8)
        core().gather(out, self._block, 0, 1, offsets, length, -1)
        return out

    def gather_ranges(self, offsets: Int64Array, lengths: Int64Array) -> BytesColumn:
        """Return views of ranges, which are inside the block."""
        return BytesColumn([self._block], None, offsets, offsets + lengths)
