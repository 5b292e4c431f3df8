"""python benchmarks/compare.py OLD.json NEW.json: what became faster or slower between two runs.

The files are both from `dataload bench --json`, or both from `python -m benchmarks.instructions --json`.

**Rates.** What is compared is not records/s but the ratio to the limit of the same run, taken within each round: on a
slower machine, or in a slow hour, the limit is slower too, and that is no regression. On a machine of another kind (of
more cores, of faster memory) the ratio itself may be another, so compare runs of one machine where you can. How much
the limit itself moved stands above each table.

**Verdicts.** The repeats of both runs are compared by Mann and Whitney's rank sum, whose distribution is counted out,
not approximated. "slower" says: more than `--threshold` slower, and chance would show that in at most one of a hundred
such rows; "faster" likewise; "no difference" says: as surely, less than the threshold either way. Everything else is
"not clear". The threshold also stands for what the repeats of one run cannot know, for it is the same in all of them:
how the files lie on the disk, who else uses the machine that day. From three repeats each nothing can be said so
surely, since even the clearest order comes by chance in one of twenty cases: run with `--repeats 5` or more.

**Instructions** repeat to a fraction of a percent, so one count each is enough, and the threshold alone decides.

Exit status: 1 if a reading of this library is slower, or fails where it did not; 2 if the files cannot be compared.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataload.bench.results import Measurement, Results
from dataload.bench.table import by_workload, describe_task
from dataload.errors import printable

CHANCE = 0.01
_COUNTED_OUT = 200_000
_DRAWN = 50_000


class Row(NamedTuple):
    """One line of the comparison.

    Attributes:
        name: What was measured.
        old: The ratio to the limit, or the instructions; None where there is none.
        new: The same of the other run.
        change: How many times as fast it became; None where one is missing.
        verdict: In words.
        bad: Whether the exit status says so.
    """

    name: str
    old: float | None
    new: float | None
    change: float | None
    verdict: str
    bad: bool = False


class Table(NamedTuple):
    """The rows of one workload.

    Attributes:
        title: The workload, and what the limit did.
        rows: One for each measurement of either run.
    """

    title: str
    rows: list[Row]


def chance_of_lower(lower: Sequence[float], higher: Sequence[float]) -> float:
    """How often chance alone would rank the first values as low among all, or lower: Mann and Whitney, one-sided.

    All ways to choose them are counted out, up to 200,000; of more, so many drawn with a fixed seed. Equal values share
    their rank.
    """
    values = np.concatenate([lower, higher])
    ordered = np.sort(values)
    ranks = (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right") + 1) / 2
    found = ranks[: len(lower)].sum()
    ways = math.comb(len(values), len(lower))
    if ways <= _COUNTED_OUT:
        chosen = np.array(list(combinations(range(len(values)), len(lower))))
    else:
        rng = np.random.default_rng(0)
        chosen = rng.permuted(np.tile(np.arange(len(values)), (_DRAWN, 1)), axis=1)[:, : len(lower)]
    return float(np.mean(ranks[chosen].sum(axis=1) <= found))


def verdict_of(old: Sequence[float], new: Sequence[float], threshold: float) -> str:
    """What two sets of ratios to the limit say, see above."""
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


def compare_rates(old: Results, new: Results, threshold: float) -> list[Table]:
    """One table for each workload of both runs; measurements that only one run has are rows, too."""
    found = by_workload(old.measurements), by_workload(new.measurements)
    return [
        _compare_workload(name, old, new, found[0][name], found[1][name], threshold)
        for name in found[0]
        if name in found[1]
    ]


def _compare_workload(
    name: str, old: Results, new: Results, before: list[Measurement], after: list[Measurement], threshold: float
) -> Table:
    befores, afters = ({_identity(run, m): m for m in found} for run, found in ((old, before), (new, after)))
    limit = _common_limit(befores, afters)
    if limit is None:
        title = f"{name}: no limit in common, so these are records/s, which another machine changes"
        bases = None, None
    else:
        bases = befores[limit], afters[limit]
        rates = [base.records_per_second.median for base in bases]
        title = f"{name}: {bases[0].task.name} {rates[0]:,.0f} -> {rates[1]:,.0f} records/s, x{_over(*rates) or 0:.2f}"
    rows = [
        _compare_one(befores.get(key), afters.get(key), bases, threshold)
        for key in {**befores, **afters}
        if key != limit
    ]
    return Table(title, rows)


def _identity(run: Results, measurement: Measurement) -> str:
    """What must be the same in both runs for two measurements to be of the same thing."""
    task = measurement.task
    records = [f.records for f in run.files if (f.workload, f.format) == (task.workload, task.format)]
    # Limits are of the data and not of a format, and take the first that was written.
    parts = [task.kind, task.name, task.workers, task.batch_size, task.cold, records]
    if task.kind != "limit":
        parts += [task.format, task.order, task.options]
    return json.dumps(parts, sort_keys=True, default=str)


def _common_limit(befores: dict[str, Measurement], afters: dict[str, Measurement]) -> str | None:
    both = (key for key in befores if key in afters and befores[key].task.kind == "limit")
    return next((key for key in both if befores[key].answers and afters[key].answers), None)


def _compare_one(
    before: Measurement | None, after: Measurement | None, bases: Sequence[Measurement | None], threshold: float
) -> Row:
    name = describe_task((before or after).task)
    old, new = (_values(m, base) for m, base in zip((before, after), bases, strict=True))
    middles = [float(np.median(found)) if found else None for found in (old, new)]
    if before is None or after is None:
        return Row(name, *middles, None, f"only in the {'new' if before is None else 'old'} run")
    ours = before.task.kind == "dataload"
    if not new:
        return Row(name, *middles, None, f"fails: {after.error}", bad=ours and bool(old))
    if not old:
        return Row(name, *middles, None, f"failed: {before.error}")
    verdict = verdict_of(old, new, threshold)
    return Row(name, *middles, _over(*middles), verdict, bad=ours and verdict == "slower")


def _values(measurement: Measurement | None, base: Measurement | None) -> list[float]:
    """The ratio to the limit in each round, or where there is no limit the rates."""
    if measurement is None:
        return []
    return [a.records_per_second for a in measurement.answers] if base is None else measurement.ratios_to(base)


def _over(old: float, new: float) -> float | None:
    return new / old if old else None


def compare_counts(old: dict[str, Any], new: dict[str, Any], threshold: float) -> list[Table]:
    """Instructions of two runs, whose change is old over new: more instructions are slower."""
    both = (old["versions"], new["versions"])
    differing = [
        f"{name} {both[0].get(name)} -> {both[1].get(name)}" for name in both[0] | both[1] if _differ(name, *both)
    ]
    title = f"instructions, counted by {old['counter']} and {new['counter']}"
    if differing:
        title += f"; versions differ, and counts with them: {', '.join(differing)}"
    rows = []
    for name in {**old["counts"], **new["counts"]}:
        before, after = old["counts"].get(name), new["counts"].get(name)
        if before is None or after is None:
            rows.append(Row(name, before, after, None, f"only in the {'new' if before is None else 'old'} run"))
            continue
        change = before / after
        slower, faster = change < 1 - threshold, change > 1 / (1 - threshold)
        verdict = "slower" if slower else "faster" if faster else "no difference"
        rows.append(Row(name, before, after, change, verdict, bad=slower))
    return [Table(title, rows)]


def _differ(name: str, old: dict[str, str], new: dict[str, str]) -> bool:
    return name in ("python", "numpy") and old.get(name) != new.get(name)


def compare(old: dict[str, Any], new: dict[str, Any], threshold: float) -> list[Table]:
    """What two files hold, compared.

    Raises:
        ValueError: They are of different kinds, of another version, or have no workload in common.
    """
    kinds = [values.get("kind", "rates") for values in (old, new)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"expected two files of one kind, got {kinds[0]} and {kinds[1]}")
    if kinds[0] == "instructions":
        return compare_counts(old, new, threshold)
    tables = compare_rates(Results.from_json(old), Results.from_json(new), threshold)
    if not tables:
        raise ValueError("the two runs have no workload in common")
    return tables


def lines_of(tables: list[Table]) -> Iterator[str]:
    """The tables as text."""
    for table in tables:
        names = [printable(row.name, None, kept="") for row in table.rows]
        width = max(map(len, names), default=0)
        yield printable(table.title, None, kept="")
        yield f"  {'':{width}} {'old':>12} {'new':>12} {'new/old':>8}  verdict"
        for row, name in zip(table.rows, names, strict=True):
            change = "" if row.change is None else f"{row.change:.3f}"
            verdict = printable(row.verdict, kept="")
            yield f"  {name:{width}} {_number(row.old):>12} {_number(row.new):>12} {change:>8}  {verdict}"
        yield ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 100 else f"{value:,.0f}"


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
        old, new = (json.loads(path.read_text("utf-8")) for path in (parsed.old, parsed.new))
        tables = compare(old, new, parsed.threshold)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        parser.error(f"{parsed.old} and {parsed.new} cannot be compared: {error!r}")
    print("\n".join(lines_of(tables)))
    bad = [row.name for table in tables for row in table.rows if row.bad]
    print(f"slower, or failing: {'; '.join(bad)}" if bad else "nothing of this library is surely slower")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
