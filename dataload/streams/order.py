"""Which sequences a row goes through, and in which order. Pure (no I/O)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from dataload._util.memo import Memo
from dataload._util.randomness import derive_key
from dataload.samplers.permutation import KEY_WORDS, permute
from dataload.types import Int64Array

__all__ = ["Cursor", "Mode", "RowOrder", "SequenceOrder"]

Mode: TypeAlias = Literal["independent", "split"]
"""`independent`: every row goes through all sequences, without end. `split`: each sequence is in one row, once an
epoch."""

_BLOCK = 1024


class Cursor(NamedTuple):
    """Where a row stands.

    Attributes:
        turn: Number of its pass through the sequences, in mode `split` the epoch.
        place: Place in the order of this pass.
        item: Items that the sequence there has given.
    """

    turn: int
    place: int
    item: int


@dataclass(frozen=True, slots=True)
class SequenceOrder:
    """The orders of all rows of all ranks.

    Attributes:
        sequences: Number of sequences.
        rows: Number of rows, over all ranks.
        mode: See `Mode`.
        shuffle: Whether each pass has an order of its own, in mode `independent` for each row; or all the given one.
        seed: Any integer.
    """

    sequences: int
    rows: int
    mode: Mode
    shuffle: bool
    seed: int

    def count(self, row: int) -> int:
        """Sequences of a row in one pass."""
        return self.sequences if self.mode == "independent" else len(range(row, self.sequences, self.rows))

    def find(self, row: int, turn: int, places: Int64Array) -> Int64Array:
        """Numbers of the sequences at some places of a pass.

        Args:
            row: Number of the row among those of all ranks.
            turn: Number of the pass.
            places: (n,) int64, each in [0, count(row)).

        Returns:
            (n,) int64.
        """
        address = ("split", turn) if self.mode == "split" else ("independent", turn, row)
        positions = row + places * self.rows if self.mode == "split" else places
        if not self.shuffle:
            return positions
        return permute(positions, self.sequences, derive_key(self.seed, "multistream", *address, words=KEY_WORDS))


class RowOrder:
    """The order of one row, computed in blocks, for to compute one place takes nearly as long as to compute a block.

    Args:
        order: The orders of all rows.
        row: Number of the row among those of all ranks.
    """

    def __init__(self, order: SequenceOrder, row: int) -> None:
        self._order = order
        self._row = row
        self._blocks: Memo[Int64Array] = Memo()

    def __getitem__(self, place: tuple[int, int]) -> int:
        """The sequence at (turn, place)."""
        turn, at = place
        block, within = divmod(at, _BLOCK)
        known = self._blocks.recall((turn, block))
        if known is None:
            places = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self._order.count(self._row)), dtype=np.int64)
            known = self._blocks.keep((turn, block), self._order.find(self._row, turn, places))
        return int(known[within])
