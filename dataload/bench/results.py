"""The results of a run, as values that go to JSON and back. Pure (no I/O)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dataload.bench.task import Answer, Task
from dataload.bench.timing import Spread, ratios_of

RESULTS_VERSION = 2
_READABLE = (1, 2)  # 1 had no warm-up


@dataclass(frozen=True, slots=True)
class Measurement:
    """A task and the answers of the repeats that succeeded; `error` says why there are none, or fewer."""

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
    """Size and cost of a data set in one format; `write_seconds` is None for generators, which have no file."""

    workload: str
    format: str
    records: int
    nbytes: int
    write_seconds: float | None


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost against a size, each with its unit in its label. `lines` maps names to points (x, y)."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[tuple[float, float], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A run of ``dataload bench``, of ``python -m benchmarks`` or of ``python -m benchmarks.instructions``.

    `date` is ISO 8601 in UTC. `rows` are cases of ``benchmarks/``, with ``title``, ``case`` and their figures.
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
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the results in what `to_json` returned; raise a ValueError for anything else or an unknown version."""
        found = values.get("version")
        if found not in _READABLE:
            known = " or ".join(map(str, _READABLE))
            raise ValueError(f"expected results of dataload bench, version {known}, got version {found!r}")
        from pydantic import TypeAdapter  # takes 60 ms to import

        return TypeAdapter(cls).validate_python(values)
