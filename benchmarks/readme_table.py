"""python -m benchmarks.readme_table RESULTS.json: put a run of made data with --json into README.md, in short, and
into docs/performance.md, with all settings.

``make readme-table`` does the run and this. The tables replace the text between the two markers; nothing in them is
typed by hand.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.compare import parse_results
from benchmarks.rates import RATE_COLUMNS, rate_rows, settings
from dataload.bench.runner import Measurement, Results, problems

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"
ROOT = Path(__file__).parents[1]
_ORDERS = ("sequential", "pool", "global")
_COLUMNS = {
    "reader": "reader",
    "format": "format",
    "order": "order",
    "workers": "workers",
    "records/s": "records/s",
    "spread": "spread",
    "first touch/s": "first touch",
    "faults/batch": "faults/batch",
    "x limit": "of limit",
    "x peer": "of best peer",
}
_SHORT = ("reader", "format", "order", "records/s", "x limit")
_READERS = {"dataload": "**{}**", "peer": "{}", "limit": "limit: {}", "bare loop": "bare loop: {}"}
_EXPLAINED = (
    "Each row is a reader with its best {chosen}. In each of {rounds} rounds, every reader runs in a process "
    "of its own, which reads the first epoch (first touch: mapped memory is touched for the first time) and then "
    "measures the steady state for {seconds:g} s. Rates and page faults per batch are medians of the rounds; spread is "
    "the range of the rounds over their median (the quartiles, from four rounds on). Ratios are taken within each "
    "round. The limit copies the same records from plain memory, in the same order, to new batches; a bare loop calls "
    "the library of a format without a loader."
)


def by_workload(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Return the measurements of each workload; only these are compared with one another."""
    found: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        found.setdefault(measurement.task.workload, []).append(measurement)
    return found


def best(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return this library's best reader of each format, and the best of each peer; a `global` order goes first."""
    found: dict[tuple[str, ...], Measurement] = {}
    for measurement in measurements:
        task = measurement.task
        if task.kind != "limit" and measurement.answers:
            key = (task.kind, task.name, task.format if task.kind == "dataload" else "")
            best_yet = found.get(key, measurement)
            found[key] = max(best_yet, measurement, key=lambda m: (_ORDERS.index(m.task.order), median(m.rates)))
    return sorted(found.values(), key=lambda m: median(m.rates), reverse=True)


def replace(text: str, table: str) -> str:
    """Return a text with the table between its markers."""
    parts = re.split(f"({BEGIN}|{END})", text)
    if parts[1::2] != [BEGIN, END]:
        raise ValueError(f"expected one {BEGIN}, followed by one {END}")
    return f"{parts[0]}{BEGIN}\n{table}\n{END}{parts[-1]}"


def short(results: Results) -> Iterator[str]:
    """Yield the lines of the tables with the best limit only and few columns."""
    yield from _tables(results, _SHORT)
    rounds, seconds = _rounds(results.measurements)
    yield (
        f"Each reader has its best {_chosen(results)} and a process of its own; medians of {rounds} rounds of "
        f"{seconds:g} s, on {_machine(results)}. The limit copies the same records within memory. A pool "
        "mixes less than a global order. All figures, settings and versions: "
        "[docs/performance.md](docs/performance.md#beside-peers)."
    )


def markdown(results: Results) -> Iterator[str]:
    """Yield the lines of the tables, and below them the origin of the figures."""
    yield from _tables(results, tuple(_COLUMNS))
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    memory = f", {machine['memory'] / 1e9:.0f} GB" if machine.get("memory") else ""
    rounds, seconds = _rounds(results.measurements)
    yield _EXPLAINED.format(rounds=rounds, seconds=seconds, chosen=_chosen(results)) + "\n"
    yield (
        f"{results.date[:10]}, {_cell(str(machine.get('processor')))}, {machine.get('cpus')} CPUs{memory}, "
        f"{_cell(str(machine.get('system')))}; {_cell(versions)}.\n\n```\n{results.command}\n```"
    )


def _tables(results: Results, columns: Sequence[str]) -> Iterator[str]:
    """Yield a table for each workload; below one with all columns, the settings of its readers and their search."""
    for name, measurements in by_workload(results.measurements).items():
        yield f"{_heading(name, results)}\n"
        limits = [m for m in measurements if m.task.kind == "limit" and m.answers]
        shown = best(measurements)
        above = sorted(limits, key=lambda m: median(m.rates), reverse=True)[:1] if columns is _SHORT else limits
        yield from _table(columns, measurements, limits, (*above, *shown))
        yield ""
        if columns is not _SHORT:
            yield from _folded(
                "Settings of the peers",
                [*settings([m for m in shown if m.task.kind == "peer"]), *problems(measurements)],
            )
            yield from _folded(
                "Settings that were tried, in one short measurement each",
                [f"{r['case']}: {r['records_per_second']:,.0f}/s" for r in results.rows if r["title"] == name],
            )


def _heading(name: str, results: Results) -> str:
    records = {file.workload: file.records for file in results.files}
    return f"**{_cell(name)}**{f', {records[name]:,} records' if name in records else ''}:"


def _machine(results: Results) -> str:
    machine = results.machine
    return f"{machine.get('cpus')} CPUs ({_cell(str(machine.get('processor')))}), {results.date[:10]}"


def _table(
    columns: Sequence[str],
    measurements: Sequence[Measurement],
    limits: Sequence[Measurement],
    shown: Sequence[Measurement],
) -> Iterator[str]:
    """Yield the rows of some of the measurements, which all together decide on the ratios."""
    yield f"| {' | '.join(_COLUMNS[column] for column in columns)} |"
    yield "|---|---|---|" + "---:|" * (len(columns) - 3)
    rows = dict(zip(map(id, measurements), rate_rows(measurements), strict=True))
    for measurement in shown:
        row = dict(zip(RATE_COLUMNS, rows[id(measurement)], strict=True))
        kind = measurement.task.kind
        if kind == "limit":  # only what has the reading of the first limit is a limit
            kind = "limit" if measurement.task.reading == limits[0].task.reading else "bare loop"
        row["reader"] = _READERS[kind].format(row["reader"])
        yield f"| {' | '.join(_cell(row[column]) for column in columns)} |"


def _folded(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield lines below a title that opens them; nothing without lines."""
    if lines:
        yield f"<details><summary>{title}</summary>\n"
        yield from (f"- {_cell(line)}" for line in lines)
        yield "\n</details>\n"


def _chosen(results: Results) -> str:
    return "settings in a short search" if results.rows else "number of workers"


def _rounds(measurements: Sequence[Measurement]) -> tuple[int, float]:
    return max((len(m.answers) for m in measurements), default=0), max(
        (m.task.seconds for m in measurements), default=0.0
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


MADE_DATA = str(Path(tempfile.gettempdir()) / "dataload-benchmarks")
PAGES = {"README.md": short, "docs/performance.md": markdown}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme_table", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md and docs/")
    parsed = parser.parse_args(arguments)
    try:
        text = parsed.results.read_text("utf-8").replace(MADE_DATA, "data")  # paths of this machine say nothing
        parsed.results.write_text(text, "utf-8")
        results = parse_results(json.loads(text))
        tables = {parsed.root / page: "\n".join(table(results)) for page, table in PAGES.items()}
        texts = {page: replace(page.read_text("utf-8"), table) for page, table in tables.items()}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for page, text in texts.items():
        page.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
