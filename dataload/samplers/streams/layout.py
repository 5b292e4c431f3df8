"""Sequences laid out one after another, in some order. Pure (no I/O).

Positions and lengths count *units*: records if a chunk may continue in the next sequence, otherwise whole chunks.
"""

import heapq
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataload._util.caches import Memo
from dataload._util.randomness import permute
from dataload.types import Int64Array

_SLOTS = 64
_FIRST_SLOTS = 32 * _SLOTS


class Found(NamedTuple):
    """The content of some positions, in arrays of their shape."""

    sequences: Int64Array
    within: Int64Array  # offsets in these sequences, in units


@dataclass(frozen=True, eq=False)
class Listed:
    """Sequences in an explicit order."""

    units: Int64Array  # (n,), units of each sequence, in this order
    sequences: Int64Array | None = None  # (n,), their numbers; None if they are in order of number

    @cached_property
    def ends(self) -> Int64Array:
        """Position after each sequence, (n,) int64."""
        return np.cumsum(self.units)

    def find(self, positions: Int64Array) -> Found:
        """Return the sequences at `positions`, int64 of any shape, each in [0, sum of units)."""
        slots = np.searchsorted(self.ends, positions, side="right")
        within = positions - (self.ends[slots] - self.units[slots])
        return Found(slots if self.sequences is None else self.sequences[slots], within)


@dataclass(frozen=True, eq=False)
class Shuffled:
    """Sequences in a shuffled order; only the position of every 64th is stored: one byte per eight sequences."""

    units: Int64Array  # (n,), units of each sequence, by number
    key: npt.NDArray[np.uint64]
    _ends: Memo[Int64Array] = field(default_factory=lambda: Memo(1), init=False, repr=False)
    _blocks: Memo[tuple[Int64Array, Int64Array]] = field(default_factory=lambda: Memo(1), init=False, repr=False)

    def find(self, positions: Int64Array) -> Found:
        block_ends = self._block_ends(int(positions.max(initial=-1)))
        needed = np.unique(np.searchsorted(block_ends, positions.ravel(), side="right"))
        # Consecutive calls usually need the same blocks.
        known = self._blocks.recall(needed.tobytes())
        ends, sequences = known or self._blocks.keep(needed.tobytes(), self._slots_of(needed, block_ends))
        at = np.searchsorted(ends, positions, side="right")
        found = sequences[at]
        return Found(found, positions - (ends[at] - self.units[found]))

    def _slots_of(self, blocks: Int64Array, block_ends: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the position after each slot of some blocks, ascending, and the sequences in these slots."""
        slots = blocks[:, None] * _SLOTS + np.arange(_SLOTS)
        sequences = self._sequences(np.minimum(slots, len(self.units) - 1).ravel())
        units = np.where(slots.ravel() < len(self.units), self.units[sequences], 0)
        sums = np.cumsum(units.reshape(slots.shape), axis=1)
        return (sums + (block_ends[blocks] - sums[:, -1])[:, None]).ravel(), sequences

    def _block_ends(self, last: int) -> Int64Array:
        """Return the position after each block, (blocks,) int64, at least up to the block that holds `last`."""
        # A row seldom gets far into its own order, and computing all of it for each row would take long.
        ends = self._ends.recall(None)
        ends = np.zeros(0, np.int64) if ends is None else ends
        count = len(self.units)
        while len(ends) * _SLOTS < count and (not ends.size or ends[-1] <= last):
            first = len(ends) * _SLOTS
            units = self.units[self._sequences(np.arange(first, min(2 * first + _FIRST_SLOTS, count)))]
            sums = np.cumsum(np.add.reduceat(units, np.arange(0, len(units), _SLOTS)))
            ends = self._ends.keep(None, np.concatenate([ends, sums + (ends[-1] if ends.size else 0)]))
        return ends

    def _sequences(self, slots: Int64Array) -> Int64Array:
        return permute(slots, len(self.units), self.key)


def balance(units: Int64Array, rows: int, order: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Assign whole sequences to rows of similar total length: the longest first, each to the emptiest row."""
    # No row gets more than 4/3 of the least possible (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    # `order`, a permutation, is the order of the sequences in a row, and of assignment if equally long. Returns the
    # sequences row by row, (n,) int64, and the offset of each row among them, (rows + 1,) int64.
    row_of = np.empty(len(units), np.int64)
    loads = [(0, row) for row in range(rows)]
    longest_first = order[np.argsort(-units[order], kind="stable")]
    for sequence, size in zip(longest_first.tolist(), units[longest_first].tolist(), strict=True):
        load, row = loads[0]
        heapq.heapreplace(loads, (load + size, row))
        row_of[sequence] = row
    by_row = order[np.argsort(row_of[order], kind="stable")]
    bounds = np.searchsorted(row_of[by_row], np.arange(rows + 1))
    return by_row, bounds.astype(np.int64)
