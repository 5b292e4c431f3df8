"""Records copied out of a read-only memory map."""

import mmap
from collections.abc import Callable

from dataload.errors import SourceError
from dataload.storage.core import core
from dataload.storage.errors import disk_error, outside_error
from dataload.storage.local.readahead import is_cold, will_need
from dataload.storage.local.reopened import Handle, ReopenedFile
from dataload.types import Array, Int64Array

_STEPS_BETWEEN_PROBES = 16


class Mapping(Handle):
    """An open file and its map."""

    __slots__ = ("map",)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        size = self.identity.size
        # An empty file cannot be mapped. The map has its own descriptor, which it does not expose.
        self.map: mmap.mmap | bytes = mmap.mmap(self.descriptor, size, access=mmap.ACCESS_READ) if size else b""


class MappedFile(ReopenedFile[Mapping]):
    """A memory-mapped file; see `RecordFile`."""

    def __init__(self, path: str, make: Callable[[str], Mapping] = Mapping) -> None:
        super().__init__(path, make)
        self._warm_steps = 0

    def copies(self, offsets: Int64Array, lengths: Int64Array) -> list[bytes]:
        mapping = self._open()
        self._hint(mapping, 0, 1, lengths, offsets)
        try:
            return core().copies(mapping.map, offsets, lengths, self._file(mapping))
        except (core().MapFault, ValueError) as error:
            raise self._error(mapping, error) from None

    def _gather(self, out: Array, start: int, stride: int, length: int, indices: Int64Array) -> None:
        mapping = self._open()
        self._hint(mapping, start, stride, length, indices)
        try:
            core().gather(out, mapping.map, start, stride, indices, length, self._file(mapping))
        except (core().MapFault, ValueError) as error:
            raise self._error(mapping, error) from None

    def _gather_ranges(self, out: Array, offsets: Int64Array, lengths: Int64Array) -> None:
        mapping = self._open()
        self._hint(mapping, 0, 1, lengths, offsets)
        try:
            core().gather_ranges(out, mapping.map, offsets, lengths, self._file(mapping))
        except (core().MapFault, ValueError) as error:
            raise self._error(mapping, error) from None

    def _file(self, mapping: Mapping) -> int | tuple[int, int]:
        return mapping.descriptor if self.may_be_written else (mapping.descriptor, mapping.changed)

    def _error(self, mapping: Mapping, error: Exception) -> SourceError:
        if isinstance(error, core().MapFault):
            return self._changed(mapping) or disk_error(self.path, int(str(error)))
        return outside_error(self.path, self.size, error)

    def _hint(self, mapping: Mapping, start: int, stride: int, lengths: Int64Array | int, indices: Int64Array) -> None:
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
