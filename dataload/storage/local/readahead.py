"""Asking the kernel for what a step will touch, when that is not in memory yet.

Touching a map faults cold pages in one after another, each with as much of its surroundings as the kernel sees fit.
Told of all ranges first, it reads them side by side and nothing else. In memory already, the same calls would cost a
fifth of the step; so one place of the step is probed, without waiting, and what that finds decides.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from dataload.types import Int64Array

_PAGE = mmap.PAGESIZE
_WILL_NEED: int | None = getattr(mmap, "MADV_WILLNEED", None)
_DO_NOT_WAIT: int | None = getattr(os, "RWF_NOWAIT", None)


def is_cold(descriptor: int, offset: int) -> bool:
    """Whether reading the byte at `offset` would wait for the disk; False where the system cannot tell."""
    if _DO_NOT_WAIT is None or _WILL_NEED is None:
        return False
    try:
        os.preadv(descriptor, [bytearray(1)], offset, _DO_NOT_WAIT)
    except BlockingIOError:
        return True
    except OSError:  # a file system without such reads; an error that matters comes with the read itself
        return False
    return False


def will_need(mapped: mmap.mmap, offsets: Int64Array, lengths: Int64Array | int) -> None:
    """Have the kernel read these ranges, all at once and without waiting; (n,) bytes, inside the map."""
    starts = offsets // _PAGE * _PAGE
    ends = offsets + lengths
    if isinstance(lengths, int) and lengths < _PAGE:
        starts, first = np.unique(starts, return_index=True)  # several small records share a page
        ends = np.maximum(ends[first], starts + 1)
    for start, size in zip(starts.tolist(), (ends - starts).tolist(), strict=True):
        if size > 0 and _WILL_NEED is not None:
            mapped.madvise(_WILL_NEED, start, size)
