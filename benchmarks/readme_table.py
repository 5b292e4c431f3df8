"""python -m benchmarks.readme_table RESULTS.json: put the table of a run into README.md.

What stands there between the two markers is replaced; nothing in it is typed by hand. RESULTS.json is what
`dataload bench --json` has written.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dataload.bench.results import Measurement, Results
from dataload.bench.table import by_workload, rivals

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"
README = Path(__file__).parents[1] / "README.md"
_ORDERS = ("global", "pool", "sequential")


def best(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Of this library the best of each format, of others the best of each; the fastest first.

    Shuffled readings are compared with shuffled ones: a reader stands with another order only if it has no `global`.
    """
    found: dict[tuple[str, ...], Measurement] = {}
    for measurement in measurements:
        task = measurement.task
        if task.kind != "limit" and measurement.answers:
            key = (task.kind, task.name, task.format if task.kind == "dataload" else "")
            found[key] = max(found.get(key, measurement), measurement, key=_merit)
    return sorted(found.values(), key=_rate, reverse=True)


def markdown(results: Results) -> str:
    """The tables, and below them where the figures come from."""
    return "\n".join(_lines(results))


def replace(text: str, table: str) -> str:
    """A text with the table between its markers.

    Raises:
        ValueError: It has not each marker once, in their order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected one {BEGIN} and behind it one {END}")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n{table}\n{text[text.index(END) :]}"


def _lines(results: Results) -> Iterator[str]:
    records = {file.workload: file.records for file in results.files}
    for name, measurements in by_workload(results.measurements).items():
        limit, peer = rivals(measurements)
        count = f", {records[name]:,} records" if name in records else ""
        yield f"**{_cell(name)}**{count}:"
        yield ""
        yield "| reader | format | order | workers | records/s | of limit | of best peer |"
        yield "|---|---|---|---:|---:|---:|---:|"
        for measurement in measurements:
            if measurement.task.kind == "limit" and measurement.answers:
                yield _row(measurement, limit, peer)
        for measurement in best(measurements):
            yield _row(measurement, limit, peer)
        yield ""
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    memory = f", {machine['memory'] / 1e9:.0f} GB" if machine.get("memory") else ""
    yield (
        f"{results.date[:10]}, {_cell(str(machine.get('processor')))}, {machine.get('cpus')} CPUs{memory}, "
        f"{_cell(str(machine.get('system')))}; {_cell(versions)}. Ratios are taken within each round; the limit is the "
        "first row."
    )
    yield ""
    yield f"```\n{results.command}\n```"


def _row(measurement: Measurement, limit: Measurement | None, peer: Measurement | None) -> str:
    task = measurement.task
    of_limit, of_peer = (measurement.ratio_to(other) if other is not None else None for other in (limit, peer))
    bare = task.kind == "limit"
    cells = (
        f"limit: {task.name}" if bare else f"**{task.name}**" if task.kind == "dataload" else task.name,
        "" if bare else task.format,
        "" if bare else task.order,
        str(task.workers),
        f"{_rate(measurement):,.0f}",
        "" if of_limit is None else f"{of_limit.median:.2f}",
        "" if of_peer is None else f"{of_peer.median:.2f}",
    )
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _rate(measurement: Measurement) -> float:
    return measurement.records_per_second.median


def _merit(measurement: Measurement) -> tuple[int, float]:
    order = measurement.task.order
    return -_ORDERS.index(order) if order in _ORDERS else -len(_ORDERS), _rate(measurement)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme_table", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--readme", type=Path, default=README, help="the file with the markers (README.md)")
    parsed = parser.parse_args(arguments)
    try:
        results = Results.from_json(json.loads(parsed.results.read_text("utf-8")))
        text = replace(parsed.readme.read_text("utf-8"), markdown(results))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    parsed.readme.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
