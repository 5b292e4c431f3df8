"""python benchmarks/compare.py OLD.json NEW.json: what became faster or slower between two runs.

The files are both from `dataload bench` or from `python -m benchmarks`, with `--json`.

**Rates** are compared as ratios to the limit (the first case) of the same run, taken within each round: where the
machine is slower, the limit is slower, too. The title of each table shows how the limit moved. A machine of another
kind may change the ratio itself, so compare runs of one machine where you can.

**Verdicts.** The repeats of both runs are compared by the Mann-Whitney rank sum, with its exact distribution. "slower"
means: more than `--threshold` slower, and chance would show that in at most one of a hundred such rows; "faster"
likewise; "no difference" means: as surely, less than the threshold either way. Anything else is "not clear". The
threshold also covers what the repeats of one run share: where the files lie on the disk, and who else uses the machine.
Fewer than five repeats cannot be that sure: use `--repeats 5` or more.

Exit status: 1 if a reader of this library is slower, or newly fails; 2 if the files cannot be compared.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from pydantic import TypeAdapter

from benchmarks.rates import ratios_of
from dataload.bench.runner import RESULTS_VERSION, Measurement, Results, describe_task
from dataload.cli.output import print_table
from dataload.errors import printable

CHANCE = 0.01


class Entry(NamedTuple):
    """One thing that a run measured: rates, ratios to the limit (`relative`), or a cost, where lower is better."""

    name: str
    values: Sequence[float]
    ours: bool  # its regressions count
    error: str | None = None
    cost: bool = False
    relative: bool = False
    rate: float | None = None  # of a limit: records/s


def chance_of_lower(lower: Sequence[float], higher: Sequence[float]) -> float:
    """Return how often chance alone ranks the first values as low among all, or lower (one-sided); ties share ranks."""
    values = np.concatenate([lower, higher])
    ordered = np.sort(values)
    ranks = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right") + 1  # doubled
    # ways[n, s]: the number of ways to choose n values whose ranks have the sum s
    ways = np.zeros((len(lower) + 1, ranks.sum() + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank]
    return float(ways[-1, : ranks[: len(lower)].sum() + 1].sum() / ways[-1].sum())


def verdict_of(old: Sequence[float], new: Sequence[float], threshold: float) -> str:
    """Return the verdict on two sets of values of which higher ones are better."""
    if 1 / math.comb(len(old) + len(new), len(old)) > CHANCE:
        return "too few repeats to say"
    lower, upper = np.array(old) * (1 - threshold), np.array(old) / (1 - threshold)
    if chance_of_lower(new, lower) <= CHANCE:
        return "slower"
    if chance_of_lower(upper, new) <= CHANCE:
        return "faster"
    if chance_of_lower(lower, new) <= CHANCE and chance_of_lower(new, upper) <= CHANCE:
        return "no difference"
    return "not clear"


Rows: TypeAlias = list[tuple[tuple[str, ...], bool]]
"""The cells of each line of a table, and whether it is bad: a reader of this library is slower, or newly fails."""

_COLUMNS = {"": "left", "old": "right", "new": "right", "new/old": "right", "verdict": "left"}


def compare(old: Results, new: Results, threshold: float) -> list[tuple[str, Rows]]:
    """Return a table for each workload, and for each table of cases, that both runs have: its title and its rows."""
    before, after = _entries(old), _entries(new)
    sections = [_section(title, before[title], after[title], threshold) for title in before if title in after]
    if not sections:
        raise ValueError("the two runs have no workload in common")
    return sections


def _entries(run: Results) -> dict[str, dict[str, Entry]]:
    found: dict[str, dict[str, Entry]] = {}
    for row in run.rows:
        cases = found.setdefault(row["title"], {})
        cases[row["case"]] = _case(row, first=not cases)
    for m in run.measurements:
        rate = median(m.rates) if m.task.kind == "limit" and m.answers else None
        entry = Entry(describe_task(m.task), m.rates, m.task.kind == "dataload", m.error, rate=rate)
        found.setdefault(m.task.workload, {})[_identity(run, m)] = entry
    return found


def _case(row: Mapping[str, Any], *, first: bool) -> Entry:
    name, ours = row["case"], row.get("aim") is not None
    if "seconds" in row:
        return Entry(f"{name}, ms", [row["seconds"] * 1e3], ours, cost=True, relative=True)
    values = row.get("ratios") or [row[key] for key in ("ratio",) if key in row]
    return Entry(name, values, ours, relative=True, rate=row.get("records_per_second") if first and values else None)


def _identity(run: Results, measurement: Measurement) -> str:
    """Return what must be the same in both runs for two measurements to be of the same thing."""
    task = measurement.task
    records = [f.records for f in run.files if (f.workload, f.format) == (task.workload, task.format)]
    # Limits are of the data and not of a format, and take the first that was written.
    parts = [task.kind, task.name, task.workers, task.batch_size, records]
    if task.kind != "limit":
        parts += [task.format, task.order, task.options]
    return json.dumps(parts, sort_keys=True, default=str)


def _section(title: str, old: Mapping[str, Entry], new: Mapping[str, Entry], threshold: float) -> tuple[str, Rows]:
    """Compare rates by their ratios to the first limit that both runs have."""
    limits = ((key, e.rate, new[key].rate) for key, e in old.items() if e.rate is not None and key in new)
    limit, before, after = next((each for each in limits if each[2] is not None), (None, 0.0, 0.0))
    if limit is not None:
        times = after / before if before else 0
        title += f": {old[limit].name} {before:,.0f} -> {after:,.0f} records/s, x{times:.2f}"
        old, new = (_to_limit(run, limit) for run in (old, new))
    elif not all(entry.relative for entry in old.values()):
        title += ": no limit in common, so these are records/s, which another machine changes"
    return title, [_row(old.get(key), new.get(key), threshold) for key in {**old, **new}]


def _to_limit(run: Mapping[str, Entry], limit: str) -> dict[str, Entry]:
    base = run[limit].values
    entries = {key: entry for key, entry in run.items() if entry.relative or key != limit}
    return {k: e if e.relative else e._replace(values=ratios_of(e.values, base)) for k, e in entries.items()}


def _row(before: Entry | None, after: Entry | None, threshold: float) -> tuple[tuple[str, ...], bool]:
    found = [median(entry.values) if entry and entry.values else None for entry in (before, after)]
    change, bad = "", False
    if before is None or after is None:
        verdict = f"only in the {'new' if before is None else 'old'} run"
    elif None in found:
        bad = before.ours and found[1] is None and found[0] is not None
        verdict = f"fails: {after.error}" if found[1] is None else f"failed: {before.error}"
    else:
        old, new = found[::-1] if before.cost else found
        change = f"{new / old:.3f}" if old and new else ""
        verdict = verdict_of(before.values, after.values, threshold)
        bad = before.ours and verdict == "slower"
    texts = ("" if value is None else f"{value:.3f}" if value < 100 else f"{value:,.0f}" for value in found)
    return ((before or after).name, *texts, change, verdict), bad


def parse_results(values: Mapping[str, Any]) -> Results:
    """Return the results that one of the commands has written; raise a ValueError for an unknown version."""
    if (found := values.get("version")) != RESULTS_VERSION:
        raise ValueError(f"expected results of dataload bench, version {RESULTS_VERSION}, got version {found!r}")
    return TypeAdapter(Results).validate_python(values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.05, help="changes below this do not matter (0.05)")
    parsed = parser.parse_args(arguments)
    if not 0 <= parsed.threshold < 1:
        parser.error(f"--threshold must be at least 0 and less than 1, got {parsed.threshold}")
    try:
        old, new = (parse_results(json.loads(path.read_text("utf-8"))) for path in (parsed.old, parsed.new))
        tables = compare(old, new, parsed.threshold)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        parser.error(f"{parsed.old} and {parsed.new} cannot be compared: {error!r}")
    for title, rows in tables:
        print(printable(title, None, kept=""))
        print_table(_COLUMNS, [cells for cells, _ in rows])
        print()
    bad = [cells[0] for _, rows in tables for cells, is_bad in rows if is_bad]
    print(f"slower, or failing: {'; '.join(bad)}" if bad else "no reader of this library is clearly slower")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
