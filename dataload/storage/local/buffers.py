"""Batch memory that is reused once a batch is dropped.

If a worker thread allocates a batch of a megabyte and the consumer drops it, malloc returns the memory to the operating
system, and the next batch faults its pages in again. With two threads that costs as much as the copy itself.
"""

import contextlib
import math

import numpy as np
import numpy.typing as npt

from dataload._util.leases import BufferLeases
from dataload.types import Array, BytesArray

_SMALLEST = 1 << 18  # malloc keeps smaller blocks itself
_KEPT_BYTES = 1 << 25
_KEPT_SIZES = 4  # several steps are read at a time, not always the same number
_KEPT_BLOCKS = 4
_ALIGNMENT = 64


class BufferPool:
    """A thread-safe pool of arrays whose memory returns to the pool when the last view of it is dropped.

    Memory belongs to the caller while anything refers to it, as with newly allocated arrays. The pool keeps unused
    blocks of recently requested sizes: up to 32 MiB of each size, but at least four blocks.
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
        return self._lend(self._take(size)).view(kind).reshape(shape)

    def _take(self, size: int) -> BytesArray:
        free = self._free.get(size)
        if free is None:
            free = self._free.setdefault(size, [])
            if len(self._free) > _KEPT_SIZES:
                with contextlib.suppress(KeyError, RuntimeError):  # another thread did the same
                    del self._free[next(iter(self._free))]
        try:
            return free.pop()
        except IndexError:
            # malloc places blocks this large 16 bytes after a page; JAX avoids a copy if they are aligned to 64.
            block = np.empty(size + _ALIGNMENT, np.uint8)
            start = -block.ctypes.data % _ALIGNMENT
            return block[start : start + size]

    def _lend(self, block: BytesArray) -> BytesArray:
        def give_back() -> None:
            free = self._free.get(block.nbytes)
            if free is not None and len(free) < max(_KEPT_BLOCKS, _KEPT_BYTES // block.nbytes):
                free.append(block)

        return self._loans.lend(block, give_back)
