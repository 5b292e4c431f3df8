"""Memory that two processes see: slots for batches that worker processes hand over, used again and again.

A slot is a file without a name: nothing of it is left when the processes that have it open are gone, however they
went. Mapping fresh memory for each batch would cost ten times what writing the batch does, all of it page faults.
"""

from __future__ import annotations

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
from dataload.executors.memory import available_bytes
from dataload.types import BytesArray

__all__ = ["Extent", "Ring", "Slot"]

Extent = tuple[int, int]
"""Offset and size of a buffer in a slot, in bytes."""

_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class Slot:
    """One piece of shared memory, as one process sees it. Takes two descriptors, of which the mapping has one.

    Args:
        descriptor: An open file without a name, which this takes over; None makes one.
    """

    DESCRIPTORS = 2

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _unnamed_file() if descriptor is None else descriptor
        self._view: BytesArray = np.empty(0, np.uint8)

    def reserve(self, size: int) -> None:
        """Make room for `size` bytes.

        Raises:
            OSError: There is not so much memory.
        """
        present = os.fstat(self.descriptor).st_size
        if present >= size:
            return
        # An eighth more at most, so that batches that grow little by little do not need another mapping each time.
        step = max(_PAGE, 1 << max(0, size.bit_length() - 4))
        wanted = -(-size // step) * step
        # The system promises memory that is not there, and kills who then uses it.
        if wanted - present > (available := available_bytes()):
            raise OSError(errno.ENOMEM, f"{wanted:,} bytes are needed, {available:,} are available")
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, 0, wanted)  # a hole in the file would be a SIGBUS at the first write
        else:
            os.ftruncate(self.descriptor, wanted)

    def view(self, size: int) -> BytesArray:
        """At least the first `size` bytes, which exist: (n,) uint8."""
        if self._view.nbytes < size:
            mapped = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size, flags=_MAP_FLAGS)
            self._view = np.frombuffer(mapped, np.uint8)
        return self._view

    def write(self, parts: Sequence[memoryview]) -> list[Extent]:
        """Put buffers into it, one after another.

        Raises:
            OSError: There is not enough memory; nothing was written.
        """
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
        """Give the descriptor back. What is mapped stays until nobody refers to it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self._view = np.empty(0, np.uint8)


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dataload")  # counts as memory of its processes, whatever the size of /dev/shm
    with tempfile.TemporaryFile(prefix="dataload-") as stream:
        return os.dup(stream.fileno())


class Ring:
    """The slots of one executor, lent in turn.

    Args:
        slots: How many.
    """

    def __init__(self, slots: int) -> None:
        self.slots: dict[int, Slot] = {number: Slot() for number in range(slots)}
        self._free: deque[int] = deque(self.slots)
        self._most = slots
        self._loans = BufferLeases()

    def take(self) -> int | None:
        """Number of a slot that nobody uses, or None."""
        while self._free:
            number = self._free.popleft()
            if len(self.slots) <= self._most:
                return number
            slot = self.slots.pop(number)
            with contextlib.suppress(OSError):
                os.ftruncate(slot.descriptor, 0)  # workers have it open, too
            slot.close()
        return None

    def give_back(self, number: int) -> None:
        """The slot may be used again; called from whichever thread the last reference goes in."""
        self._free.append(number)

    def lend(self, number: int, extents: Sequence[Extent]) -> list[Any]:
        """The parts that were written to a slot, which comes back when nothing refers to any of them."""
        offset, length = extents[-1]
        try:
            block = self.slots[number].view(offset + length)
        except OSError:  # no descriptor is left for the mapping
            self.give_back(number)
            raise
        lent = self._loans.lend(block, lambda: self.give_back(number))
        return [lent[start : start + size] for start, size in extents]

    def missing(self, size: int) -> int:
        """Bytes that are not there yet, of slots of `size` bytes each."""
        return sum(max(0, size - os.fstat(slot.descriptor).st_size) for slot in self.slots.values())

    def retire(self, most: int) -> bool:
        """Use no more than `most` slots from now on, and tell whether that is less than before.

        Those that are lent go when they come back.
        """
        before, self._most = self._most, min(self._most, most)
        return self._most < before

    def close(self) -> None:
        """Give all descriptors back; batches that are still held stay valid."""
        self._free.clear()
        for slot in self.slots.values():
            slot.close()
