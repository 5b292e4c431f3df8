"""Readahead hints for mapped files that are not in the page cache.

Touching a map faults cold pages in one by one, each with surrounding pages that nobody needs. If the kernel knows all
ranges in advance, it reads only those, in parallel. For data in memory the same hints would cost a fifth of the step,
so one offset of the step is probed first, without waiting.
"""

import mmap
import os

import numpy as np

from dataload.types import Int64Array

_PAGE = mmap.PAGESIZE
_WILL_NEED: int | None = getattr(mmap, "MADV_WILLNEED", None)
_DO_NOT_WAIT: int | None = getattr(os, "RWF_NOWAIT", None)


def is_cold(descriptor: int, offset: int) -> bool:
    """Return whether reading the byte at `offset` would wait for the disk; False if the system cannot tell."""
    if _DO_NOT_WAIT is None or _WILL_NEED is None:
        return False
    try:
        os.preadv(descriptor, [bytearray(1)], offset, _DO_NOT_WAIT)
    except BlockingIOError:
        return True
    except OSError:  # not supported by the file system; a real error recurs in the read itself
        return False
    return False


def will_need(mapped: mmap.mmap, offsets: Int64Array, lengths: Int64Array | int) -> None:
    """Tell the kernel to read these ranges, (n,) bytes inside the map, without waiting for them."""
    starts = offsets // _PAGE * _PAGE
    ends = offsets + lengths
    if isinstance(lengths, int) and lengths < _PAGE:
        starts, first = np.unique(starts, return_index=True)  # small records may share a page
        ends = np.maximum(ends[first], starts + 1)
    for start, size in zip(starts.tolist(), (ends - starts).tolist(), strict=True):
        if size > 0 and _WILL_NEED is not None:
            mapped.madvise(_WILL_NEED, start, size)
