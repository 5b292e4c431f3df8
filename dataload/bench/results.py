"""The results of a run, as values that go to JSON and back. Pure (no I/O)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dataload.bench.task import Answer, Task
from dataload.bench.timing import Spread, ratios_of

RESULTS_VERSION = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """A task and the answers of its repeats.

    Attributes:
        task: The task.
        answers: One for each repeat that succeeded, in order.
        error: Why there are none, or fewer: not installed, failed, or read other records than the rest.
    """

    task: Task
    answers: tuple[Answer, ...]
    error: str | None = None

    @property
    def rates(self) -> list[float]:
        """Records per second of each repeat."""
        return [answer.records_per_second for answer in self.answers]

    @property
    def records_per_second(self) -> Spread | None:
        """Spread of the rates; None without an answer."""
        return Spread.of(self.rates) if self.answers else None

    def ratio_to(self, other: Measurement | None) -> Spread | None:
        """Return the spread of the ratios to another's rates; None where no round has both."""
        ratios = ratios_of(self.rates, other.rates) if other is not None else []
        return Spread.of(ratios) if ratios else None


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A data set written in one format.

    Attributes:
        workload: Name of the workload.
        format: Name of the format.
        records: Number of records.
        nbytes: Size of the files.
        write_seconds: Time to write them; None for generators, which have no file.
    """

    workload: str
    format: str
    records: int
    nbytes: int
    write_seconds: float | None


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost against a size.

    Attributes:
        title: What is measured, and how.
        x_label: What grows, with its unit.
        y_label: What it costs, with its unit.
        lines: Name -> points (x, y).
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[tuple[float, float], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A run of ``dataload bench``, of ``python -m benchmarks`` or of ``python -m benchmarks.instructions``.

    Attributes:
        date: When it began, ISO 8601, UTC.
        machine: System, processor, number of CPUs, memory in bytes.
        versions: Versions of Python and of packages.
        command: The command as it was typed.
        files: The data sets.
        measurements: In the order of the tables.
        curves: Costs against size, if asked for.
        rows: Regression cases of ``benchmarks/``: each has a ``title``, a ``case`` and its figures.
        version: Version of this structure.
    """

    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    command: str
    files: tuple[FileFacts, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    curves: tuple[Curve, ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()
    version: int = RESULTS_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the results as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the results that `to_json` gave.

        Raises:
            ValueError: The values are something else, or of another version.
        """
        if values.get("version") != RESULTS_VERSION:
            raise ValueError(
                f"expected results of dataload bench, version {RESULTS_VERSION}, got version {values.get('version')!r}"
            )
        parts: dict[str, Any] = {
            "files": tuple(FileFacts(**item) for item in values.get("files", ())),
            "measurements": tuple(
                Measurement(Task(**item["task"]), tuple(Answer(**answer) for answer in item["answers"]), item["error"])
                for item in values.get("measurements", ())
            ),
            "curves": tuple(map(_curve, values.get("curves", ()))),
            "rows": tuple(values.get("rows", ())),
        }
        return cls(**{**values, **parts})


def _curve(values: Mapping[str, Any]) -> Curve:
    lines = {name: tuple((x, y) for x, y in points) for name, points in values["lines"].items()}
    return Curve(values["title"], values["x_label"], values["y_label"], lines)
