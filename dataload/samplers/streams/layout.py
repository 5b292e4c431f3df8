"""Sequences one after another, in some order, and what stands at which place. Pure (no I/O).

A place counts *units*: records, where a chunk may go on in the next sequence, and whole chunks where it may not.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataload._util.memo import Memo
from dataload.samplers.permutation import permute
from dataload.types import Int64Array

__all__ = ["Found", "Layout", "Listed", "Shuffled", "balance"]

_SLOTS = 64
_FIRST_SLOTS = 32 * _SLOTS


class Found(NamedTuple):
    """What stands at some places.

    Attributes:
        sequences: int64, numbers of sequences.
        within: int64, units of the sequence before the place.
    """

    sequences: Int64Array
    within: Int64Array


class Layout(Protocol):
    """Sequences one after another."""

    def find(self, places: Int64Array) -> Found:
        """What stands at `places`, each below the units of all: of any shape, which the results have, too."""
        ...


@dataclass(frozen=True, eq=False)
class Listed:
    """Sequences in an order that is written down.

    Attributes:
        units: (n,) int64, units of each sequence in this order.
        sequences: (n,) int64, which they are; None for their own order.
    """

    units: Int64Array
    sequences: Int64Array | None = None

    @cached_property
    def ends(self) -> Int64Array:
        """(n,) int64, the place behind each."""
        return np.cumsum(self.units)

    def find(self, places: Int64Array) -> Found:
        """See `Layout`."""
        slots = np.searchsorted(self.ends, places, side="right")
        within = places - (self.ends[slots] - self.units[slots])
        return Found(slots if self.sequences is None else self.sequences[slots], within)


@dataclass(frozen=True, eq=False)
class Shuffled:
    """Sequences in an order that is computed; only where every 64th stands is kept.

    So an order costs one byte for eight sequences, and each row can have one of its own.

    Attributes:
        units: (n,) int64, units of each sequence by its number.
        key: (2,) uint64 of the order.
    """

    units: Int64Array
    key: npt.NDArray[np.uint64]

    _ends: Memo[Int64Array] = field(default_factory=lambda: Memo(1), init=False, repr=False)
    _blocks: Memo[tuple[Int64Array, Int64Array]] = field(default_factory=lambda: Memo(1), init=False, repr=False)

    def find(self, places: Int64Array) -> Found:
        """See `Layout`."""
        block_ends = self._block_ends(int(places.max(initial=-1)))
        needed = np.unique(np.searchsorted(block_ends, places.ravel(), side="right"))
        # Who comes back soon comes back for the same blocks.
        known = self._blocks.recall(needed.tobytes())
        ends, sequences = known or self._blocks.keep(needed.tobytes(), self._slots_of(needed, block_ends))
        at = np.searchsorted(ends, places, side="right")
        found = sequences[at]
        return Found(found, places - (ends[at] - self.units[found]))

    def _slots_of(self, blocks: Int64Array, block_ends: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The place behind each slot of some blocks, which rises over them as over all, and the slots' sequences."""
        slots = blocks[:, None] * _SLOTS + np.arange(_SLOTS)
        sequences = self._sequences(np.minimum(slots, len(self.units) - 1).ravel())
        units = np.where(slots.ravel() < len(self.units), self.units[sequences], 0)
        sums = np.cumsum(units.reshape(slots.shape), axis=1)
        return (sums + (block_ends[blocks] - sums[:, -1])[:, None]).ravel(), sequences

    def _block_ends(self, last: int) -> Int64Array:
        """(blocks,) int64, the place behind each block; of all up to the one that `last` is in, at least.

        A row seldom comes far into an order of its own, and to go through all of many sequences for each row takes
        long.
        """
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
    """Give whole sequences to rows, about equally much to each: the longest first, each to the row with least.

    Graham, "Bounds on Multiprocessing Timing Anomalies" (1969): no row has more than 4/3 of the least possible.

    Args:
        units: (n,) int64, units of each sequence.
        rows: Number of rows.
        order: (n,) int64, a permutation: in it come the sequences of a row, and equally long ones are taken.

    Returns:
        (n,) int64, the sequences row after row; and (rows + 1,) int64, where the rows begin among them.
    """
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
