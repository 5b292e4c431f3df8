"""The order of the sequences of each row. Pure (no I/O)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from dataload._util.memo import Memo
from dataload._util.randomness import derive_key
from dataload.samplers.permutation import KEY_WORDS, permute
from dataload.types import Int64Array

SequenceMode: TypeAlias = Literal["independent", "split"]
"""`independent`: each row goes through all sequences, again and again. `split`: each sequence belongs to one row, once
per epoch."""

_BLOCK = 1024


class RowPosition(NamedTuple):
    """The position of a row in its sequences."""

    epoch: int  # number of the row's pass through its sequences; in mode `split` the loader's epoch
    position: int  # position in the order of this pass
    offset: int  # items taken from the sequence at this position


@dataclass(frozen=True, slots=True)
class SequenceOrder:
    """The orders of all rows of all ranks."""

    sequences: int
    rows: int  # over all ranks
    mode: SequenceMode  # see `SequenceMode`
    # whether each pass has another order, in mode `independent` for each row; else all have the given one
    shuffle: bool
    seed: int

    def count(self, row: int) -> int:
        """Return the number of sequences in one pass of a row."""
        return self.sequences if self.mode == "independent" else len(range(row, self.sequences, self.rows))

    def find(self, row: int, epoch: int, positions: Int64Array) -> Int64Array:
        """Return the sequences, (n,) int64, at (n,) positions of a pass of a row; rows of all ranks are numbered."""
        address = ("split", epoch) if self.mode == "split" else ("independent", epoch, row)
        positions = row + positions * self.rows if self.mode == "split" else positions
        if not self.shuffle:
            return positions
        return permute(positions, self.sequences, derive_key(self.seed, "multistream", *address, words=KEY_WORDS))


class RowOrder:
    """The order of one row, computed in blocks: a single position takes nearly as long as a block."""

    def __init__(self, order: SequenceOrder, row: int) -> None:
        self._order = order
        self._row = row
        self._blocks: Memo[Int64Array] = Memo()

    def __getitem__(self, at: tuple[int, int]) -> int:
        """Return the sequence at (epoch, position)."""
        epoch, position = at
        block, within = divmod(position, _BLOCK)
        known = self._blocks.recall((epoch, block))
        if known is None:
            stop = min((block + 1) * _BLOCK, self._order.count(self._row))
            positions = np.arange(block * _BLOCK, stop, dtype=np.int64)
            known = self._blocks.keep((epoch, block), self._order.find(self._row, epoch, positions))
        return int(known[within])
