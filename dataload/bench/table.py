"""Results as rows of text, for tables on screen, in Markdown and in HTML. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from dataload.bench.results import Curve, FileFacts, Measurement, Spread
from dataload.bench.task import Task

__all__ = [
    "FILE_COLUMNS",
    "RATE_COLUMNS",
    "Rivals",
    "by_workload",
    "curve_table",
    "describe_task",
    "file_rows",
    "problems",
    "rate_rows",
    "rivals",
    "settings",
    "shortened",
]

RATE_COLUMNS = {
    "reader": "left",
    "format": "left",
    "order": "left",
    "workers": "right",
    "records/s": "right",
    "spread": "right",
    "MB/s": "right",
    "x limit": "right",
    "x peer": "right",
    "open ms": "right",
    "first ms": "right",
    "CPU s/GB": "right",
    "peak MB": "right",
    "of it files": "right",
}
"""Heading -> side, for `rate_rows`. "x limit" and "x peer" are the ratios to `Rivals`."""

_SHORT = ("reader", "format", "order", "workers", "records/s", "spread", "x limit", "x peer")

FILE_COLUMNS = {"format": "left", "records": "right", "MB": "right", "bytes/record": "right", "written MB/s": "right"}
"""Heading -> side, for `file_rows`."""


class Rivals(NamedTuple):
    """What the rows of one workload are compared with.

    Attributes:
        limit: The first limit that was measured.
        peer: The fastest peer that was measured.
    """

    limit: Measurement | None
    peer: Measurement | None


def rivals(measurements: Sequence[Measurement]) -> Rivals:
    """What to compare the measurements of one workload with."""
    measured = [m for m in measurements if m.answers]
    limits = [m for m in measured if m.task.kind == "limit"]
    peers = [m for m in measured if m.task.kind == "peer"]
    return Rivals(limits[0] if limits else None, max(peers, key=_rate, default=None))


def by_workload(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """The measurements of each workload, whose rows are compared with one another."""
    found: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        found.setdefault(measurement.task.workload, []).append(measurement)
    return found


def describe_task(task: Task) -> str:
    """A task in a few words: ``"dataload, syrah, global, 2 workers"``."""
    if task.kind == "limit":
        return task.name
    return f"{task.name}, {task.format}, {task.order}, {task.workers} worker{'' if task.workers == 1 else 's'}"


def problems(measurements: Sequence[Measurement]) -> list[str]:
    """A line for each measurement that failed, was not possible, or ended before its last repeat."""
    return [f"{describe_task(m.task)}: {m.error}" for m in measurements if m.error is not None]


def settings(measurements: Sequence[Measurement]) -> list[str]:
    """A line for each measurement with what its reading was set to."""
    return [
        f"{describe_task(m.task)}: {', '.join(f'{name} {value}' for name, value in m.answers[0].settings.items())}"
        for m in measurements
        if m.answers
    ]


def shortened(
    columns: Mapping[str, str], rows: Sequence[tuple[str, ...]]
) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    """The columns of `RATE_COLUMNS` that fit on a screen, without those that are empty; and the rows with them."""
    kept = [i for i, heading in enumerate(columns) if heading in _SHORT and any(row[i] for row in rows)]
    headings = list(columns)
    return {headings[i]: columns[headings[i]] for i in kept}, [tuple(row[i] for i in kept) for row in rows]


def rate_rows(measurements: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """One row for each measurement of a workload, as `RATE_COLUMNS`; for those without a rate see `problems`."""
    limit, peer = rivals(measurements)
    return [_row(measurement, limit, peer) for measurement in measurements]


def file_rows(files: Sequence[FileFacts]) -> list[tuple[str, ...]]:
    """One row for each format of a workload, as `FILE_COLUMNS`."""
    return [
        (
            file.format,
            f"{file.records:,}",
            f"{file.nbytes / 1e6:,.1f}",
            f"{file.nbytes / max(1, file.records):,.0f}",
            f"{file.nbytes / 1e6 / file.write_seconds:,.0f}" if file.write_seconds else "",
        )
        for file in files
    ]


def _row(measurement: Measurement, limit: Measurement | None, peer: Measurement | None) -> tuple[str, ...]:
    task, answers = measurement.task, measurement.answers
    head = (
        task.name,
        "" if task.kind == "limit" else task.format,
        "" if task.kind == "limit" else task.order,
        str(task.workers),
    )
    rate = measurement.records_per_second
    if rate is None:
        return (*head, "none", *[""] * (len(RATE_COLUMNS) - 5))
    nbytes = median(a.nbytes / a.seconds if a.seconds else 0.0 for a in answers)
    return (
        *head,
        f"{rate.median:,.0f}",
        f"{rate.low / rate.median:.2f}-{rate.high / rate.median:.2f}" if rate.median else "",
        f"{nbytes / 1e6:,.0f}",
        _ratio(measurement, limit),
        _ratio(measurement, peer),
        f"{median(a.open_seconds for a in answers) * 1e3:,.1f}",
        f"{median(a.first_batch_seconds for a in answers) * 1e3:,.1f}",
        f"{median(a.cpu_seconds * 1e9 / max(1, a.nbytes) for a in answers):,.2f}",
        _megabytes([a.peak_rss for a in answers]),
        _megabytes([a.cached_rss for a in answers]),
    )


def _ratio(measurement: Measurement, other: Measurement | None) -> str:
    spread: Spread | None = measurement.ratio_to(other) if other is not None else None
    return "" if spread is None else f"{spread.median:.2f}"


def _megabytes(values: list[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known) / 1e6:,.0f}" if known else ""


def _rate(measurement: Measurement) -> float:
    rate = measurement.records_per_second
    return 0.0 if rate is None else rate.median


def curve_table(curve: Curve) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    """A curve as columns and rows: one line of numbers for each size."""
    sizes = sorted({x for points in curve.lines.values() for x, _ in points})
    known = {name: dict(points) for name, points in curve.lines.items()}
    columns = {curve.x_label: "right", **{f"{name}, {curve.y_label}": "right" for name in curve.lines}}
    rows = [
        (f"{size:,.0f}", *(f"{points[size]:,.1f}" if size in points else "" for points in known.values()))
        for size in sizes
    ]
    return columns, rows
