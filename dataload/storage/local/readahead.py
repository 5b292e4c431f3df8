"""Readahead hints for mapped files that are not in the page cache.

Touching a map faults cold pages in one by one, each with surrounding pages that nobody needs. If the kernel knows all
ranges in advance, it reads only those, in parallel. For data in memory the same hints would cost a fifth of the step,
so one offset of the step is probed first, without waiting.
"""

import mmap
import os

from dataload.storage.ranges import merge_ranges
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
    """Tell the kernel to read these ranges, (n,) bytes, without waiting for them, except those outside the map."""
    if _WILL_NEED is None:
        return
    runs = merge_ranges(offsets, lengths, _PAGE)
    for start, stop in zip(runs.starts.tolist(), runs.stops.tolist(), strict=True):
        if 0 <= start < stop <= len(mapped):
            page = start // _PAGE * _PAGE
            mapped.madvise(_WILL_NEED, page, stop - page)
