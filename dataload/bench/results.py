"""What a run of the benchmark found, as values that go to JSON and back. Pure (no I/O)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dataload.bench.task import Answer, Task

__all__ = ["RESULTS_VERSION", "Curve", "FileFacts", "Measurement", "Results", "Spread"]

RESULTS_VERSION = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """Several values of one quantity.

    Attributes:
        median: The one in the middle.
        low: The first quartile, of few values the lowest.
        high: The third quartile, of few values the highest.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Self:
        """The spread of one value or more."""
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A task and what its repeats gave.

    Attributes:
        task: What was measured.
        answers: One for each repeat that ended well, in their order.
        error: Why there is none, or fewer: not installed, failed, or read something else than the others.
    """

    task: Task
    answers: tuple[Answer, ...]
    error: str | None = None

    @property
    def records_per_second(self) -> Spread | None:
        """Rate of the repeats; None where there is none."""
        return Spread.of([answer.records_per_second for answer in self.answers]) if self.answers else None

    def ratios_to(self, other: Measurement) -> list[float]:
        """Its rate over another's in each round that both ended well: machines drift, and rounds are interleaved."""
        pairs = zip(self.answers, other.answers, strict=False)  # what failed in a round is in none after it
        return [mine.records_per_second / its.records_per_second for mine, its in pairs if its.records_per_second]

    def ratio_to(self, other: Measurement) -> Spread | None:
        """The spread of `ratios_to`; None where no round has both."""
        ratios = self.ratios_to(other)
        return Spread.of(ratios) if ratios else None


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A data set written in one format.

    Attributes:
        workload: Which data.
        format: The format.
        records: Number of records.
        nbytes: Bytes of its files.
        write_seconds: To write it; None where it was there already.
    """

    workload: str
    format: str
    records: int
    nbytes: int
    write_seconds: float | None


@dataclass(frozen=True, slots=True)
class Curve:
    """How a cost grows.

    Attributes:
        title: What is measured, and how.
        x_label: What grows, with its unit.
        y_label: What it costs, with its unit.
        lines: By name, points (x, y).
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[tuple[float, float], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A run.

    Attributes:
        date: Of its begin, ISO 8601, UTC.
        machine: System, processor, number of CPUs, memory.
        versions: Of Python and packages.
        command: As it was typed.
        files: The data sets.
        measurements: In the order of the tables.
        curves: Costs against size, if asked for.
        version: Of this form.
    """

    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    command: str
    files: tuple[FileFacts, ...]
    measurements: tuple[Measurement, ...]
    curves: tuple[Curve, ...] = ()
    version: int = RESULTS_VERSION

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave.

        Raises:
            ValueError: It is no such thing, or of another version.
        """
        if values.get("version") != RESULTS_VERSION:
            raise ValueError(
                f"expected results of dataload bench, version {RESULTS_VERSION}, got version {values.get('version')!r}"
            )
        measurements = [
            Measurement(Task.from_json(item["task"]), tuple(map(Answer.from_json, item["answers"])), item["error"])
            for item in values["measurements"]
        ]
        parts: dict[str, Any] = {
            "files": tuple(FileFacts(**item) for item in values["files"]),
            "measurements": tuple(measurements),
            "curves": tuple(_curve(item) for item in values["curves"]),
        }
        return cls(**{**values, **parts})


def _curve(values: Mapping[str, Any]) -> Curve:
    lines = {name: tuple((x, y) for x, y in points) for name, points in values["lines"].items()}
    return Curve(values["title"], values["x_label"], values["y_label"], lines)
