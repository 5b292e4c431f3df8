"""All records in a random order."""

from __future__ import annotations

from dataclasses import dataclass

from dataload.randomness import check_seed, derive_key
from dataload.samplers._checks import check_length
from dataload.samplers.permutation import KEY_WORDS, permute
from dataload.types import Int64Array

__all__ = ["GlobalShuffle"]


@dataclass(frozen=True, slots=True)
class GlobalShuffle:
    """Each index once an epoch, in an order that depends on seed and epoch alone.

    The order is never made: a position's index is computed, so any place of any epoch is reached at once, and
    the memory does not grow with the number of records.

    Attributes:
        length: Number of records, at most 2^48.
        seed: Any integer.
    """

    length: int
    seed: int

    def __post_init__(self) -> None:
        check_length(self.length)
        object.__setattr__(self, "seed", check_seed(self.seed))

    def __len__(self) -> int:
        return self.length

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        return permute(positions, self.length, derive_key(self.seed, "shuffle", epoch, words=KEY_WORDS))
