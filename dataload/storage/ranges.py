"""Byte ranges: planning of reads. Pure."""

from dataclasses import dataclass

import numpy as np

from dataload.types import Int64Array


@dataclass(frozen=True, slots=True)
class Runs:
    """Ranges of a file merged into runs, to be read one after another into one buffer.

    `starts` and `stops`, (runs,) int64, ascend in the file; `positions`, (ranges,) int64, are offsets in the buffer.
    """

    starts: Int64Array
    stops: Int64Array
    positions: Int64Array


def merge_ranges(offsets: Int64Array, lengths: Int64Array | int, gap: int) -> Runs:
    """Merge ranges, (n,) int64 in bytes, n > 0, in any order, that overlap or are at most `gap` bytes apart."""
    order = np.argsort(offsets, kind="stable")
    starts = offsets[order]
    ends = np.maximum.accumulate((offsets + lengths)[order])
    first = np.concatenate(([True], starts[1:] > ends[:-1] + gap))
    heads = np.flatnonzero(first)
    run_starts, run_stops = starts[heads], ends[np.append(heads[1:], len(starts)) - 1]
    # From an offset in the file to one in the buffer.
    shifts = run_starts - np.concatenate(([0], np.cumsum(run_stops - run_starts)[:-1]))
    positions = np.empty(len(offsets), np.int64)
    positions[order] = starts - shifts[np.cumsum(first) - 1]
    return Runs(run_starts, run_stops, positions)
