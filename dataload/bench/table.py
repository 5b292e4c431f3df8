"""Results as rows of text, for tables on screen and in Markdown. Pure (no I/O)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from statistics import median
from typing import TypeAlias

from dataload.bench.runner import FileFacts, Measurement, Spread
from dataload.bench.task import Task

Table: TypeAlias = tuple[dict[str, str], list[tuple[str, ...]]]
"""Heading -> ``"left"`` or ``"right"``; and the rows."""

_TEXTS = ("reader", "format", "order")
_RATES = ("workers", "records/s", "spread", "MB/s", "x limit", "x peer")
_PER_BATCH = ("first touch/s", "faults/batch", "sys us/batch")
_COSTS = ("open ms", "first ms", "CPU s/GB", "peak MB", "mapped MB")
RATE_COLUMNS = {name: "left" if name in _TEXTS else "right" for name in _TEXTS + _RATES + _PER_BATCH + _COSTS}
"""Heading -> side, for `rate_rows`.

"records/s" and all figures per batch are those of the steady state, "first touch/s" is the rate of the first epoch.
"x limit" and "x peer" are ratios to `limit_of` and to the best of `baselines`.
"""

_SHORT = ("reader", "format", "order", "workers", "records/s", "spread", "x limit", "x peer", *_PER_BATCH)

FILE_COLUMNS = {"format": "left", "records": "right", "MB": "right", "bytes/record": "right", "write MB/s": "right"}
"""Heading -> side, for `file_rows`."""


def baselines(measurements: Sequence[Measurement]) -> tuple[Measurement | None, Measurement | None]:
    """Return the first limit of a workload with figures, and its fastest peer."""
    limits = [m for m in measurements if m.task.kind == "limit" and m.answers]
    peers = [m for m in measurements if m.task.kind == "peer" and m.answers]
    return next(iter(limits), None), max(peers, key=lambda m: median(m.rates), default=None)


def limit_of(measurement: Measurement, measurements: Sequence[Measurement]) -> Measurement | None:
    """Return the limit that a row is compared with: the first one of its order, else the first one."""
    limits = [m for m in measurements if m.task.kind == "limit" and m.answers]
    return next((m for m in limits if m.task.order == measurement.task.order), next(iter(limits), None))


def by_workload(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Return the measurements of each workload; only these are compared with one another."""
    found: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        found.setdefault(measurement.task.workload, []).append(measurement)
    return found


def describe_task(task: Task) -> str:
    """Return a task in a few words: ``"dataload, syrah, global, 2 workers"``."""
    if task.kind == "limit":
        return task.name
    return f"{task.name}, {task.format}, {task.order}, {task.workers} worker{'' if task.workers == 1 else 's'}"


def rates(measurements: Sequence[Measurement]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Return workload -> reading -> median, low and high rate, of those that have an answer."""
    return {
        name: {describe_task(m.task): astuple(Spread.of(m.rates)) for m in found}
        for name, found in by_workload([m for m in measurements if m.answers]).items()
    }


def problems(measurements: Sequence[Measurement]) -> list[str]:
    """Return a line for each measurement that failed, was impossible, or ended before its last repeat."""
    return [f"{describe_task(m.task)}: {m.error}" for m in measurements if m.error is not None]


def settings(measurements: Sequence[Measurement]) -> list[str]:
    """Return a line with the settings of each reading."""
    return [
        f"{describe_task(m.task)}: {', '.join(f'{name} {value}' for name, value in m.answers[0].settings.items())}"
        for m in measurements
        if m.answers
    ]


def rate_rows(measurements: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """Return one row for each measurement of a workload, as `RATE_COLUMNS`; `problems` explains missing rates."""
    _, peer = baselines(measurements)
    return [_row(measurement, (limit_of(measurement, measurements), peer)) for measurement in measurements]


def shortened(columns: Mapping[str, str], rows: Sequence[tuple[str, ...]]) -> Table:
    """Return the columns of `RATE_COLUMNS` that fit on a screen and are not empty, with their rows."""
    headings = list(columns)
    kept = [i for i, heading in enumerate(headings) if heading in _SHORT and any(row[i] for row in rows)]
    return {headings[i]: columns[headings[i]] for i in kept}, [tuple(row[i] for i in kept) for row in rows]


def file_rows(files: Sequence[FileFacts]) -> list[tuple[str, ...]]:
    """Return one row for each format of a workload, as `FILE_COLUMNS`."""
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


def _row(measurement: Measurement, compared: Sequence[Measurement | None]) -> tuple[str, ...]:
    task, answers = measurement.task, measurement.answers
    of_data = ("", "") if task.kind == "limit" else (task.format, task.order)
    head = (task.name, *of_data, str(task.workers))
    rate = measurement.records_per_second
    if rate is None:
        return (*head, "none", *[""] * (len(RATE_COLUMNS) - 5))
    ratios = [measurement.ratio_to(other) for other in compared]
    return (
        *head,
        f"{rate.median:,.0f}",
        f"{rate.low / rate.median:.2f}-{rate.high / rate.median:.2f}" if rate.median and len(answers) > 1 else "",
        f"{median(a.nbytes / a.seconds if a.seconds else 0.0 for a in answers) / 1e6:,.0f}",
        *("" if ratio is None else f"{ratio.median:.2f}" for ratio in ratios),
        _number(a.first_touch_rate for a in answers),
        _number(a.minor_faults / a.batches for a in answers if a.batches and a.minor_faults is not None),
        _number(a.system_seconds / a.batches * 1e6 for a in answers if a.batches and a.system_seconds is not None),
        f"{median(a.open_seconds for a in answers) * 1e3:,.1f}",
        f"{median(a.first_batch_seconds for a in answers) * 1e3:,.1f}",
        f"{median(a.cpu_seconds * 1e9 / max(1, a.nbytes) for a in answers):,.2f}",
        _megabytes(a.peak_rss for a in answers),
        _megabytes(a.cached_rss for a in answers),
    )


def _megabytes(values: Iterable[int | None]) -> str:
    return _number(None if value is None else value / 1e6 for value in values)


def _number(values: Iterable[float | None]) -> str:
    """Return the median of the known values, with a digit after the point where it is below 10."""
    known = [value for value in values if value is not None]
    return "" if not known else f"{median(known):,.{1 if 0 < median(known) < 9.95 else 0}f}"
