"""Index order as it is."""

from __future__ import annotations

from dataclasses import dataclass

from dataload.samplers._checks import check_length
from dataload.types import Int64Array

__all__ = ["Sequential"]


@dataclass(frozen=True, slots=True)
class Sequential:
    """Index i at position i, in every epoch.

    Attributes:
        length: Number of records.

    Raises:
        ConfigError: `length` is no number of records.
    """

    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", check_length(self.length))

    def __len__(self) -> int:
        return self.length

    @property
    def records(self) -> int:
        """Indices are below this."""
        return self.length

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:  # noqa: ARG002 - the same in each epoch
        """See `dataload.types.Sampler`."""
        return positions.copy()
