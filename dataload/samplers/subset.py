"""Some positions of an order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from dataload._util.indexing import as_indices, check_index
from dataload.errors import ConfigError
from dataload.samplers._checks import check_sampler, records_of
from dataload.samplers._values import ArrayValue
from dataload.types import Int64Array, Sampler

__all__ = ["Subset"]


@dataclass(frozen=True, slots=True, eq=False)
class Subset(ArrayValue):
    """The parent's order at chosen positions.

    Over `Sequential` these are the records of that number, the same in each epoch; over a shuffle they are whatever
    the epoch puts there. To shuffle chosen records, wrap: ``GlobalShuffle(len(subset), seed, parent=subset)``.

    Attributes:
        parent: The order to choose from.
        selection: Positions of it: a slice, or integers in any order, duplicates allowed, negative ones counted from
            the end. Kept as a range, where it is a slice or one without negative numbers, or else as (n,) int64.

    Raises:
        ConfigError: `selection` is neither, or a position is outside of the parent.
    """

    parent: Sampler
    selection: slice | range | Sequence[int] | Int64Array

    def __post_init__(self) -> None:
        check_sampler("parent", self.parent)
        length = len(self.parent)
        try:
            chosen = _chosen(self.selection, length)
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"selection must be a slice or integers in [-{length}, {length}): {error}",
                key="selection",
                value=self.selection,
            ) from error
        object.__setattr__(self, "selection", chosen)

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def records(self) -> int:
        """Indices are below this."""
        return records_of(self.parent)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        chosen = self._positions
        if isinstance(chosen, range):
            return self.parent.indices(positions * chosen.step + chosen.start, epoch=epoch)
        return self.parent.indices(chosen[positions], epoch=epoch)

    @property
    def _positions(self) -> range | Int64Array:
        """What `__post_init__` has made of `selection`."""
        return cast("range | Int64Array", self.selection)


def _chosen(selection: Any, length: int) -> range | Int64Array:
    if isinstance(selection, slice):
        return range(*selection.indices(length))
    if isinstance(selection, range) and selection and min(ends := (selection[0], selection[-1])) >= 0:
        for end in ends:
            check_index(end, length)
        return selection
    chosen = np.array(as_indices(selection, length))  # a copy: the caller's array may change
    chosen.setflags(write=False)
    return chosen
