"""Memory for batches that is used again once nobody holds the batch.

A batch of a megabyte made in a worker thread and dropped by the consumer goes back to the operating system, and the
next one faults its pages in again: with two threads that costs as much as the copy itself.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dataload.loans import Loans
from dataload.types import Array, BytesArray

__all__ = ["BufferPool"]

_SMALLEST = 1 << 18  # malloc itself keeps what is smaller
_KEPT_BYTES = 1 << 26
_KEPT_BLOCKS = 4
_ALIGNMENT = 64


class BufferPool:
    """Arrays whose memory comes back to the pool when the last view of it goes; used by several threads at once.

    The memory belongs to the caller for as long as anything refers to it, so arrays are as good as fresh ones. Unused
    blocks of the size last asked for are kept, up to 64 MiB of them, or four if those are more.
    """

    def __init__(self) -> None:
        self._size = 0
        self._free: list[BytesArray] = []
        self._loans = Loans()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """As `numpy.empty`."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size < _SMALLEST:
            return np.empty(shape, kind)
        if size != self._size:
            self._size, self._free = size, []
        return self._lend(self._take(size)).view(kind).reshape(shape)

    def _take(self, size: int) -> BytesArray:
        free = self._free
        while free:
            try:
                block = free.pop()
            except IndexError:  # another thread was faster
                break
            if block.nbytes == size:
                return block
        # malloc gives what is this large 16 bytes behind a page, and JAX takes without a copy what is aligned to 64.
        block = np.empty(size + _ALIGNMENT, np.uint8)
        start = -block.ctypes.data % _ALIGNMENT
        return block[start : start + size]

    def _lend(self, block: BytesArray) -> BytesArray:
        def give_back() -> None:
            if block.nbytes == self._size and len(self._free) < max(_KEPT_BLOCKS, _KEPT_BYTES // self._size):
                self._free.append(block)

        return self._loans.lend(block, give_back)
