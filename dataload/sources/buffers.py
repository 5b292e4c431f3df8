"""Memory for batches that is used again once nobody holds the batch.

A batch of a megabyte made in a worker thread and dropped by the consumer goes back to the operating system, and the
next one faults its pages in again: with two threads that costs as much as the copy itself.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from dataload.types import Array, BytesArray

__all__ = ["BufferPool"]

_SMALLEST = 1 << 18  # malloc itself keeps what is smaller
_KEPT_BYTES = 1 << 26
_KEPT_BLOCKS = 4


class BufferPool:
    """Arrays whose memory comes back to the pool when the last view of it goes; used by several threads at once.

    The memory belongs to the caller for as long as anything refers to it, so arrays are as good as fresh ones. Unused
    blocks of the size last asked for are kept, up to 64 MiB of them, or four if those are more.
    """

    def __init__(self) -> None:
        self._size = 0
        self._free: list[BytesArray] = []
        self._lent: dict[int, weakref.ref[Any]] = {}

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
        return np.empty(size, np.uint8)

    def _lend(self, block: BytesArray) -> BytesArray:
        lent = np.frombuffer(block.data, np.uint8)
        # numpy puts a memoryview of its own between the two, and every view keeps `lent`, hence that memoryview.
        # A callback on `lent` itself would come too early: views of an array keep its base, not the array.
        handle = lent.base
        key = id(handle)

        def give_back(_: weakref.ref[Any]) -> None:
            self._lent.pop(key, None)
            if block.nbytes == self._size and len(self._free) < max(_KEPT_BLOCKS, _KEPT_BYTES // self._size):
                self._free.append(block)

        self._lent[key] = weakref.ref(handle, give_back)
        return lent
