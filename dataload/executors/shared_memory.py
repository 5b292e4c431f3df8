"""Reusable slots of shared memory, in which worker processes return batches.

A slot is an unnamed file, so nothing is left when the processes that have it open end, in whatever way. Mapping new
memory for each batch would take ten times as long as writing the batch, all of it page faults.
"""

import contextlib
import errno
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataload._util.leases import BufferLeases
from dataload._util.machine import available_bytes
from dataload.types import BytesArray

Extent = tuple[int, int]
"""Offset and size in bytes of a buffer in a slot."""

_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class Slot:
    """A piece of shared memory, as seen by one process, which owns the unnamed file `descriptor`; None creates one."""

    DESCRIPTORS = 2  # one of them for the mapping

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _unnamed_file() if descriptor is None else descriptor
        self._view: BytesArray = np.empty(0, np.uint8)

    def reserve(self, size: int) -> None:
        """Allocate memory for `size` bytes; raise an `OSError` if there is not enough."""
        present = os.fstat(self.descriptor).st_size
        if present >= size:
            return
        # Round up by at most an eighth, so that slowly growing batches do not need a new mapping each time.
        step = max(_PAGE, 1 << max(0, size.bit_length() - 4))
        wanted = -(-size // step) * step
        # The system overcommits memory, and kills a process that then uses it.
        if wanted - present > (available := available_bytes()):
            raise OSError(errno.ENOMEM, f"{wanted:,} bytes are needed, {available:,} are available")
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, 0, wanted)  # writing to a hole in the file would raise SIGBUS
        else:
            os.ftruncate(self.descriptor, wanted)

    def view(self, size: int) -> BytesArray:
        """Return (n,) uint8, n >= `size`: the first bytes of the slot, which must be allocated."""
        if self._view.nbytes < size:
            mapped = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size, flags=_MAP_FLAGS)
            self._view = np.frombuffer(mapped, np.uint8)
        return self._view

    def write(self, parts: Sequence[memoryview]) -> list[Extent]:
        """Write buffers one after another; raise an `OSError`, with nothing written, if there is not enough memory."""
        extents: list[Extent] = []
        size = 0
        for part in parts:
            extents.append((size, part.nbytes))
            size += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.reserve(size)
        target = self.view(size)
        for part, (offset, length) in zip(parts, extents, strict=True):
            target[offset : offset + length] = np.frombuffer(part, np.uint8)
        return extents

    def close(self) -> None:
        """Close the descriptor. The mapping lives until nothing refers to it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor: int = -1
        self._view = np.empty(0, np.uint8)


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dataload")  # not limited by the size of /dev/shm
    with tempfile.TemporaryFile(prefix="dataload-") as stream:
        return os.dup(stream.fileno())


class Ring:
    """The slots of one executor, used in turn."""

    def __init__(self, slots: int) -> None:
        self.slots: dict[int, Slot] = {number: Slot() for number in range(slots)}
        self._free: deque[int] = deque(self.slots)
        self._most = slots
        self._leases = BufferLeases()

    def take(self) -> int | None:
        """Return the number of a free slot, or None."""
        while self._free:
            number = self._free.popleft()
            if len(self.slots) <= self._most:
                return number
            slot = self.slots.pop(number)
            with contextlib.suppress(OSError):
                os.ftruncate(slot.descriptor, 0)  # workers have it open too
            slot.close()
        return None

    def give_back(self, number: int) -> None:
        """Mark a slot as free; called by the thread that drops the last reference."""
        self._free.append(number)

    def lend(self, number: int, extents: Sequence[Extent]) -> list[Any]:
        """Return the parts written to a slot, which becomes free again when nothing refers to any of them."""
        offset, length = extents[-1]
        try:
            block = self.slots[number].view(offset + length)
        except OSError:  # out of descriptors for the mapping
            self.give_back(number)
            raise
        lent = self._leases.lend(block, lambda: self.give_back(number))
        return [lent[start : start + size] for start, size in extents]

    def missing(self, size: int) -> int:
        """Return the bytes still to be allocated for all slots to have `size` bytes."""
        return sum(max(0, size - os.fstat(slot.descriptor).st_size) for slot in self.slots.values())

    def retire(self, most: int) -> bool:
        """Use at most `most` slots from now on. Return True if that is less than before.

        Slots that are lent are removed when they come back.
        """
        before, self._most = self._most, min(self._most, most)
        return self._most < before

    def close(self) -> None:
        """Close all descriptors; batches that are still held stay valid."""
        self._free.clear()
        for slot in self.slots.values():
            slot.close()
