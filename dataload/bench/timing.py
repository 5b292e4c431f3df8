"""Timing for `dataload bench` and ``python -m benchmarks``.

Machines drift. So whatever is compared is timed in interleaved rounds, and ratios are taken within each round.
"""

import statistics
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of several values: quartiles, or the lowest and highest of fewer than four."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Self:
        """Return the spread of one or more values."""
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)


def ratios_of(rates: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return rate over base rate for each round that both have finished. A reading that fails skips later rounds."""
    return [mine / its for mine, its in zip(rates, base, strict=False) if its]


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    begun = perf_counter()
    work()
    return perf_counter() - begun


def median_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of several calls."""
    return statistics.median(seconds_of(work) for _ in range(repeats))


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that Python and numpy allocate during one call."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
