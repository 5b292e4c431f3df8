"""Memory for batches that is used again once nobody holds the batch.

A batch of a megabyte made in a worker thread and dropped by the consumer goes back to the operating system, and the
next one faults its pages in again: with two threads that costs as much as the copy itself.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np
import numpy.typing as npt

from dataload._util.leases import BufferLeases
from dataload.types import Array, BytesArray

_SMALLEST = 1 << 18  # malloc itself keeps what is smaller
_KEPT_BYTES = 1 << 25
_KEPT_SIZES = 4  # steps are read several at a time, and not always as many
_KEPT_BLOCKS = 4
_ALIGNMENT = 64


class BufferPool:
    """Arrays whose memory comes back to the pool when the last view of it goes; used by several threads at once.

    The memory belongs to the caller for as long as anything refers to it, so arrays are as good as fresh ones. Unused
    blocks of the sizes last asked for are kept, of each up to 32 MiB, or four if those are more.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[BytesArray]] = {}  # by size, the one first asked for first
        self._loans = BufferLeases()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """As `numpy.empty`."""
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
                with contextlib.suppress(KeyError, RuntimeError):  # another thread does the same
                    del self._free[next(iter(self._free))]
        try:
            return free.pop()
        except IndexError:
            # malloc gives what is this large 16 bytes behind a page; JAX takes without a copy what is aligned to 64.
            block = np.empty(size + _ALIGNMENT, np.uint8)
            start = -block.ctypes.data % _ALIGNMENT
            return block[start : start + size]

    def _lend(self, block: BytesArray) -> BytesArray:
        def give_back() -> None:
            free = self._free.get(block.nbytes)
            if free is not None and len(free) < max(_KEPT_BLOCKS, _KEPT_BYTES // block.nbytes):
                free.append(block)

        return self._loans.lend(block, give_back)
