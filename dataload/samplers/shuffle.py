"""A whole order shuffled."""

from __future__ import annotations

from dataclasses import dataclass

from dataload._util.randomness import check_seed, derive_key
from dataload.errors import ConfigError
from dataload.samplers._checks import check_length, check_sampler, records_of
from dataload.samplers.permutation import KEY_WORDS, permute
from dataload.types import Int64Array, Sampler

__all__ = ["GlobalShuffle"]


@dataclass(frozen=True, slots=True)
class GlobalShuffle:
    """Each position once an epoch, in an order that depends on seed and epoch alone.

    The order is never made: a position's index is computed, so any place of any epoch is reached at once, and
    the memory does not grow with the number of records.

    Attributes:
        length: Number of records, at most 2^48.
        seed: Any integer.
        parent: The order to shuffle, of that length; None shuffles the indices 0 ... length - 1.

    Raises:
        ConfigError: `length` is no number of records or not the parent's, or `seed` is no integer.
    """

    length: int
    seed: int
    parent: Sampler | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", check_length(self.length))
        object.__setattr__(self, "seed", check_seed(self.seed))
        if self.parent is not None:
            check_sampler("parent", self.parent)
            if len(self.parent) != self.length:
                raise ConfigError(
                    f"length must be the parent's, {len(self.parent)}, got {self.length}",
                    key="length",
                    value=self.length,
                )

    def __len__(self) -> int:
        return self.length

    @property
    def records(self) -> int:
        """Indices are below this."""
        return self.length if self.parent is None else records_of(self.parent)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        shuffled = permute(positions, self.length, derive_key(self.seed, "shuffle", epoch, words=KEY_WORDS))
        return shuffled if self.parent is None else self.parent.indices(shuffled, epoch=epoch)
