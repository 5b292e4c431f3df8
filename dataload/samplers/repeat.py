"""An order several times over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataload.samplers._checks import MAX_LENGTH, check_count, check_sampler, records_of
from dataload.samplers._values import divide, split_by_group
from dataload.types import Int64Array, Sampler

__all__ = ["Repeat", "indices_without_end"]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The parent `times` times in one epoch, each time as in another epoch of its own.

    Repetition r of epoch e is the parent's epoch ``e * times + r``, so a shuffled parent is shuffled anew.

    Attributes:
        parent: The order to repeat.
        times: How often.

    Raises:
        ConfigError: `times` is no integer of 1 or more, or the order would have more than 2^48 positions.
    """

    parent: Sampler
    times: int

    def __post_init__(self) -> None:
        check_sampler("parent", self.parent)
        most = MAX_LENGTH // max(1, len(self.parent))
        object.__setattr__(self, "times", check_count("times", self.times, least=1, below=most + 1))

    def __len__(self) -> int:
        return len(self.parent) * self.times

    @property
    def records(self) -> int:
        """Indices are below this."""
        return records_of(self.parent)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        return indices_without_end(self.parent, positions, first_epoch=epoch * self.times)


def indices_without_end(sampler: Sampler, positions: Int64Array, *, first_epoch: int) -> Int64Array:
    """Indices of an order that begins anew, as its own next epoch, whenever it ends.

    Args:
        sampler: The order, not empty unless `positions` is.
        positions: (n,) int64, of any size.
        first_epoch: The sampler's epoch at position 0.

    Returns:
        (n,) int64.
    """
    if not positions.size:
        return np.empty(0, np.int64)
    length = len(sampler)
    first = int(positions.min()) // length
    if int(positions.max()) // length == first:
        places = positions - first * length if first else positions
        return sampler.indices(places, epoch=first_epoch + first)
    repetitions, places = divide(positions, length)
    for repetition, rows in split_by_group(repetitions):
        places[rows] = sampler.indices(places[rows], epoch=first_epoch + repetition)
    return places
