"""Batch memory that is reused once a batch is dropped.

If a worker thread allocates a batch of a megabyte and the consumer drops it, malloc returns the memory to the operating
system, and the next batch faults its pages in again. With two threads that costs as much as the copy itself.
"""

import math

import numpy as np
import numpy.typing as npt

from dataload._util.leases import BufferLeases
from dataload.types import Array, BytesArray

_SMALLEST = 1 << 18  # malloc keeps smaller blocks itself
_KEPT_BYTES = 1 << 27
_KEPT_BLOCKS = 2  # of a size, however large
_SIZES_PER_OCTAVE = 8  # arenas of bytes differ in length from batch to batch
_ALIGNMENT = 64


class BufferPool:
    """A thread-safe pool of arrays whose memory returns to the pool when the last view of it is dropped.

    Memory belongs to the caller while anything refers to it, as with newly allocated arrays. The pool keeps unused
    blocks of recently requested sizes: up to 128 MiB in all, but at least two blocks of the size last returned. Sizes
    are rounded up by at most an eighth.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[BytesArray]] = {}  # by size, in order of first request
        self._loans = BufferLeases()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialized array, like `numpy.empty`."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size < _SMALLEST:
            return np.empty(shape, kind)
        return self._lend(self._take(_rounded(size)))[:size].view(kind).reshape(shape)

    def _take(self, size: int) -> BytesArray:
        free = self._free.get(size)
        if free is None:
            free = self._free.setdefault(size, [])
        try:
            return free.pop()
        except IndexError:
            # Freed at once, as a batch would be. glibc returns free memory to the system above twice the largest block
            # that it has seen freed. Without this, the samples that transforms make would fault their pages in again.
            np.empty(size, np.uint8)
            # malloc places blocks this large 16 bytes after a page; JAX avoids a copy if they are aligned to 64.
            block = np.empty(size + _ALIGNMENT, np.uint8)
            start = -block.ctypes.data % _ALIGNMENT
            return block[start : start + size]

    def _lend(self, block: BytesArray) -> BytesArray:
        def give_back() -> None:
            # The garbage collector may call this at any point in any thread, so it takes no lock.
            self._free.setdefault(block.nbytes, []).append(block)
            self._trim(block.nbytes)

        return self._loans.lend(block, give_back)

    def _trim(self, returned: int) -> None:
        """Drop blocks beyond the limit, those of sizes first requested long ago first."""
        free = list(self._free.items())
        excess = sum(size * len(blocks) for size, blocks in free) - _KEPT_BYTES
        for size, blocks in free:
            if excess <= 0:
                return
            if size != returned:
                excess -= size * len(blocks)
                self._free.pop(size, None)
        blocks = self._free.get(returned, [])
        while excess > 0 and len(blocks) > _KEPT_BLOCKS:
            blocks.pop()
            excess -= returned


def _rounded(size: int) -> int:
    """Return `size` rounded up to one of a few sizes."""
    step = 1 << max(0, size.bit_length() - _SIZES_PER_OCTAVE.bit_length())
    return -(-size // step) * step


_pool = BufferPool()
"""The pool of this process, as malloc's is: what one source or collation returns, any other may use."""

pooled_empty = _pool.empty
"""Return an uninitialized array like `numpy.empty`, of memory that is reused once nothing refers to it."""
