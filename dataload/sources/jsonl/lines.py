"""Where the lines of a text begin. Pure (no I/O)."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dataload.storage.table_cache import CachedTable, within
from dataload.types import Array, Int64Array

_NEWLINE, _RETURN = 10, 13
_LEAST_CACHED = 50_000  # lines; finding fewer takes milliseconds


class Lines(NamedTuple):
    """The lines of a text that are not empty.

    Attributes:
        starts: (lines,) int64, offset of each in bytes.
        lengths: (lines,) int64, its bytes, without the line break.
    """

    starts: Int64Array
    lengths: Int64Array


def find_lines(blocks: Iterable[bytes]) -> Lines:
    """Return the lines of a text, which is given in blocks."""
    starts: list[Int64Array] = []
    lengths: list[Int64Array] = []
    offset, begun, last = 0, 0, b"\n"  # of the block, of its first line, and the byte before the block
    for block in blocks:
        data = np.frombuffer(last + block, np.uint8)
        ends = np.flatnonzero(data[1:] == _NEWLINE) + offset
        first = np.concatenate(([begun], ends[:-1] + 1)) if len(ends) else ends
        found = ends - first
        filled = found > 0
        # A line break of Windows. A single byte of an earlier block is the byte before this one.
        short = np.flatnonzero(found == 1)
        filled[short] = data[first[short] - offset + 1] != _RETURN
        starts.append(first[filled])
        lengths.append(found[filled])
        begun = int(ends[-1]) + 1 if len(ends) else begun
        offset, last = offset + len(block), block[-1:] or last
    if begun < offset - (last == b"\r"):
        starts.append(np.array([begun]))
        lengths.append(np.array([offset - begun]))
    if not starts:
        return Lines(np.empty(0, np.int64), np.empty(0, np.int64))
    return Lines(np.concatenate(starts), np.concatenate(lengths))


def pack(lines: Lines) -> CachedTable | None:
    """Return lines as they are kept in the cache; None if finding them again is faster."""
    starts, lengths = lines
    if len(starts) < _LEAST_CACHED:
        return None
    small = np.uint32 if int(lengths.max()) < 1 << 32 else np.uint64
    arrays: dict[str, Array] = {"lengths": lengths.astype(small)}
    if not _follow_each_other(lines):
        arrays["starts"] = starts
    return CachedTable(arrays, {"first": int(starts[0])})


def unpack(found: CachedTable, size: int) -> Lines | None:
    """Return the lines that were packed; None if they are not lines of a text of `size` bytes."""
    lengths, first = found.arrays["lengths"].astype(np.int64), int(found.extras["first"])
    kept = found.arrays.get("starts")
    if not within(lengths, size + 1) or not 0 <= first <= size:
        return None
    if kept is None:  # then one line follows the other
        ends = np.cumsum(lengths + 1) + first
        starts = np.concatenate(([first], ends[:-1]))
        return Lines(starts, lengths) if len(lengths) and int(ends[-1]) - 1 <= size else None
    starts = kept.astype(np.int64)
    fit = len(starts) == len(lengths) > 0 and int(starts[0]) >= 0 and int(starts[-1] + lengths[-1]) <= size
    rise = fit and bool((starts[1:] > starts[:-1] + lengths[:-1]).all())
    return Lines(starts, lengths) if rise else None


def _follow_each_other(lines: Lines) -> bool:
    return bool((lines.starts[1:] == lines.starts[:-1] + lines.lengths[:-1] + 1).all())
