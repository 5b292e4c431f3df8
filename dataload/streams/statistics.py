"""Which rows a multi-stream loader has waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MultiStreamStatistics"]


@dataclass(frozen=True, slots=True, eq=False)
class MultiStreamStatistics:
    """Where the time went since the loader was made.

    Attributes:
        steps: Batches that the consumer received.
        wait_seconds: What it waited for them.
        row_seconds: (rows,) float64, what the streams of each row took for these.
    """

    steps: int
    wait_seconds: float
    row_seconds: npt.NDArray[np.float64]

    @property
    def slowest_row(self) -> int:
        """The row whose streams took the longest."""
        return int(self.row_seconds.argmax())

    def __str__(self) -> str:
        row = self.slowest_row
        return (
            f"{self.steps} steps, {self.wait_seconds:.2f} s waited for them; the slowest is row {row} with "
            f"{self.row_seconds[row]:.2f} s, the mean of all rows is {self.row_seconds.mean():.2f} s"
        )
