"""The work of a multi-stream loader, also by row."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dataload.loader.statistics import Statistics


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MultiStreamStatistics(Statistics):
    """The work of a multi-stream loader since it was built. Its rows are rows of batches.

    Attributes:
        row_seconds: (rows,) float64, time taken by the streams of each row.
    """

    row_seconds: npt.NDArray[np.float64]

    @property
    def slowest_row(self) -> int:
        """The row whose streams took the longest."""
        return int(self.row_seconds.argmax())

    @classmethod
    def of(cls, statistics: Statistics, row_seconds: npt.NDArray[np.float64]) -> Self:
        """Return statistics with the times of rows."""
        fields = {f.name: getattr(statistics, f.name) for f in dataclasses.fields(Statistics)}
        return cls(**fields, row_seconds=row_seconds)

    def since(self, earlier: Self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride] # of one loader
        return self.of(Statistics.since(self, earlier), self.row_seconds - earlier.row_seconds)

    def to_json(self) -> dict[str, Any]:
        return {**Statistics.to_json(self), "row_seconds": self.row_seconds.tolist()}

    def __str__(self) -> str:
        row, *lines = self.slowest_row, *Statistics.__str__(self).splitlines()
        slowest = f"the slowest row is {row} with {self.row_seconds[row]:.2f} s, the mean is"
        lines.insert(-1, f"{slowest} {self.row_seconds.mean():.2f} s")
        return "\n".join(lines)
