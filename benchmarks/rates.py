"""Tables of many readers: rates beside the limit of the machine and the fastest peer, and what they cost."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import median

from dataload.bench import runner
from dataload.bench.runner import FileFacts, Measurement, Spread, describe_task, number
from dataload.bench.task import Task
from dataload.cli.output import ProgressBar, print_line, print_table, print_warning

_TEXTS = ("reader", "format", "order")
_RATES = (
    "workers",
    "records/s",
    "spread",
    "MB/s",
    "x limit",
    "x peer",
    "first touch/s",
    "faults/batch",
    "sys us/batch",
)
_COSTS = ("open ms", "first ms", "CPU s/GB", "peak MB", "mapped MB")
RATE_COLUMNS = {name: "left" if name in _TEXTS else "right" for name in _TEXTS + _RATES + _COSTS}
"""Heading -> side, for `rate_rows`. "x limit" and "x peer" are ratios to `limit_of` and to `best_peer`."""


def best_peer(measurements: Sequence[Measurement]) -> Measurement | None:
    """Return the fastest peer of a workload, if any has figures."""
    peers = [m for m in measurements if m.task.kind == "peer" and m.answers]
    return max(peers, key=lambda m: median(m.rates), default=None)


def limit_of(measurement: Measurement, measurements: Sequence[Measurement]) -> Measurement | None:
    """Return the limit that a row is compared with: the first one of its order, else the first one."""
    limits = [m for m in measurements if m.task.kind == "limit" and m.answers]
    return next((m for m in limits if m.task.order == measurement.task.order), next(iter(limits), None))


def ratios_of(rates: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return rate over base rate for each round that both have finished. A reading that fails skips later rounds."""
    return [mine / its for mine, its in zip(rates, base, strict=False) if its]


def settings(measurements: Sequence[Measurement]) -> list[str]:
    """Return a line with the settings of each reading."""
    return [
        f"{describe_task(m.task)}: {', '.join(f'{name} {value}' for name, value in m.answers[0].settings.items())}"
        for m in measurements
        if m.answers
    ]


def rate_rows(measurements: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """Return one row for each measurement of a workload, as `RATE_COLUMNS`."""
    peer = best_peer(measurements)
    cells = [_cells(each, limit_of(each, measurements), peer) for each in measurements]
    return [tuple(each.get(name, "") for name in RATE_COLUMNS) for each in cells]


def _cells(measurement: Measurement, limit: Measurement | None, peer: Measurement | None) -> dict[str, str]:
    answers, found = measurement.answers, runner.rate_cells(measurement)
    if measurement.task.kind == "limit":
        found |= {"format": "", "order": ""}
    if not answers:
        return found
    return found | {
        "MB/s": f"{median(a.nbytes / a.seconds if a.seconds else 0.0 for a in answers) / 1e6:,.0f}",
        "x limit": _ratio(measurement, limit),
        "x peer": _ratio(measurement, peer),
        "open ms": f"{median(a.open_seconds for a in answers) * 1e3:,.1f}",
        "first ms": f"{median(a.first_batch_seconds for a in answers) * 1e3:,.1f}",
        "CPU s/GB": f"{median(a.cpu_seconds * 1e9 / max(1, a.nbytes) for a in answers):,.2f}",
        "peak MB": _megabytes(a.peak_rss for a in answers),
        "mapped MB": _megabytes(a.cached_rss for a in answers),
    }


def _ratio(measurement: Measurement, other: Measurement | None) -> str:
    ratios = ratios_of(measurement.rates, other.rates) if other is not None else []
    return f"{Spread.of(ratios).median:.2f}" if ratios else ""


def _megabytes(values: Iterable[int | None]) -> str:
    return number(None if value is None else value / 1e6 for value in values)


def measure_tasks(
    title: str,
    tasks: Sequence[Task],
    missing: Sequence[Measurement],
    repeats: int,
    interpreters: Mapping[str, str],
    *,
    files: Sequence[FileFacts] = (),
) -> list[Measurement]:
    """Measure tasks and print them as one table, which ends with `missing`; return all."""
    run = partial(runner.run_task, interpreters=interpreters)
    with ProgressBar(f"measuring {title}") as bar:
        measured = runner.measure_all(tasks, repeats, run=run, progress=lambda done: bar(done, len(tasks) * repeats))
    found = [*runner.agreeing(measured), *missing]
    print_line(title, "bold")
    if files:
        print_table(runner.FILE_COLUMNS, runner.file_rows(files))
        print_line()
    print_table(RATE_COLUMNS, rate_rows(found))
    for problem in runner.problems(found):
        print_warning(problem)
    for line in settings(found):
        print_line(line)
    print_line()
    return found
