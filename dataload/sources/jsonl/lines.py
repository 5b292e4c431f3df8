"""Where the lines of a text begin. Pure (no I/O)."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dataload.storage.table_cache import CachedTable, within
from dataload.types import Array, Int64Array

BLOCK = 1 << 20  # bytes to look for lines in at once
_NEWLINE, _RETURN = 10, 13
_PART_BITS = 16
_LEAST_CACHED = 50_000  # lines; finding fewer takes milliseconds


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """The lines of a text that are not empty, in two bytes each.

    `places`, (lines,) uint16, is where each begins in its part of 65,536 bytes; `firsts`, (parts + 1,) int64, is the
    number of the first line of each part.
    """

    places: Array
    firsts: Int64Array
    stop: int

    def __len__(self) -> int:
        return len(self.places)

    def spans(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return offset and bytes of lines, with their line breaks and the empty lines after them."""
        last = len(self) - 1
        starts = self._starts(indices)
        return starts, np.where(indices < last, self._starts(np.minimum(indices + 1, last)), self.stop) - starts

    def _starts(self, indices: Int64Array) -> Int64Array:
        part = np.searchsorted(self.firsts, indices, side="right") - 1
        return (part << _PART_BITS) + self.places[indices]


def find_lines(blocks: Iterable[bytes | memoryview]) -> Lines:
    """Return the lines of a text, which is given in blocks."""
    places: list[Array] = []
    counts: list[Int64Array] = [np.zeros(1, np.int64)]  # of lines by part, where there are any
    parts: list[Int64Array] = [np.zeros(1, np.int64)]

    def keep(starts: Int64Array) -> None:
        places.append((starts & (1 << _PART_BITS) - 1).astype(np.uint16))
        part, count = np.unique(starts >> _PART_BITS, return_counts=True)
        parts.append(part)
        counts.append(count)

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
        keep(first[filled])
        begun = int(ends[-1]) + 1 if len(ends) else begun
        offset, last = offset + len(block), bytes(block[-1:]) or last
    if begun < offset - (last == b"\r"):
        keep(np.array([begun]))
    by_part = np.zeros((offset >> _PART_BITS) + 1, np.int64)
    np.add.at(by_part, np.concatenate(parts), np.concatenate(counts))
    firsts = np.concatenate(([0], np.cumsum(by_part)))
    return Lines(np.concatenate(places) if places else np.empty(0, np.uint16), firsts, offset)


def pack(lines: Lines) -> CachedTable | None:
    """Return lines as they are kept in the cache; None if finding them again is faster."""
    if len(lines) < _LEAST_CACHED:
        return None
    return CachedTable({"places": lines.places, "firsts": lines.firsts}, {"stop": lines.stop})


def unpack(found: CachedTable, size: int) -> Lines | None:
    """Return the lines that were packed; None if they are not lines of a text of `size` bytes."""
    if "places" not in found.arrays:  # of an earlier version
        return None
    lines = Lines(found.arrays["places"], found.arrays["firsts"].astype(np.int64), int(found.extras["stop"]))
    firsts = lines.firsts
    fit = lines.stop == size and len(firsts) == (size >> _PART_BITS) + 2 and lines.places.dtype == np.uint16
    if not fit or int(firsts[0]) or int(firsts[-1]) != len(lines) or not within(np.diff(firsts), 1 << _PART_BITS):
        return None
    rise = lines.places[1:] > lines.places[:-1]
    rise[firsts[(firsts > 0) & (firsts < len(lines))] - 1] = True  # the first line of a part
    starts, lengths = lines.spans(np.array([0, len(lines) - 1]))
    return (
        lines
        if rise.all() and int(starts[0]) >= 0 and int((starts + lengths)[-1]) <= size and lengths[-1] > 0
        else None
    )
