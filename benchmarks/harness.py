"""Data, batches and tables that the cases share. Timing and made data are those of `dataload.bench`."""

import gc
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import dataload
from dataload.bench import workloads
from dataload.bench.data import write_once
from dataload.bench.timing import ratios_of, seconds_of
from dataload.samplers import GlobalShuffle

ROOT = Path(tempfile.gettempdir()) / "dataload-benchmarks"
VERSION = 1  # raise when the made data change
SEED = 1
ROUNDS = 7


def blobs(size):
    """Records of one field of about `size` bytes."""
    return workloads.blobs(size * 9 // 10, size * 11 // 10, 100)


def made(name, different, count, *, field=None, **options):
    """The path of a data set called `name`, whose suffix is the format, written on first use.

    `count` records repeat those of `different`; of these only the bytes of `field`, for formats that store bytes.
    """
    ROOT.mkdir(exist_ok=True)
    if shutil.disk_usage(ROOT).free < 8 << 30:
        raise SystemExit(f"the benchmarks need 8 GiB in {ROOT}; set TMPDIR to another directory")
    stored = different if field is None else [record[field] for record in different]
    return write_once(ROOT / f"v{VERSION}-{name}", lambda: workloads.repeat_records(stored, count), **options)


def batches(count, batch_size):
    """The indices of each batch of a shuffled epoch."""
    order = GlobalShuffle(count, SEED).indices(np.arange(count), epoch=0)
    return [order[start : start + batch_size] for start in range(0, count, batch_size)]


def total(loaded, check):
    """Consume batches as a training loop does, which holds one while the next is made; returns the checksum."""
    found = 0.0
    for batch in loaded:
        found += check(batch)
    return found


def consume(loaded, check):
    return round(total(loaded, check), 1)


def through_loader(source, batch_size, workers, check, **options):
    loader = dataload.Loader(source, batch_size=batch_size, shuffle=True, seed=SEED, num_workers=workers, **options)

    def run():
        loader.set_epoch(0)
        return consume(loader, check)

    return run


@dataclass(frozen=True)
class Case:
    """One function to time.

    Attributes:
        name: Name in the table.
        run: Does the work and returns a checksum of what it read.
        floor: Aim for the ratio to the first case, if any.
        least: Aim for the items per second, if any.
        items: Number of items of one run, if other than the others'; the checksum is then not compared.
    """

    name: str
    run: Callable[[], object]
    floor: float | None = None
    least: float | None = None
    items: int | None = None


def run_cases(title, cases, *, items, steps, rounds=ROUNDS):
    """Time cases in interleaved rounds; prints the rate of each and its ratio to the first, and returns rows of JSON.

    One run of a case is `items` items in `steps` batches.
    """
    checksums = [case.run() for case in cases]  # also warms up
    for case, checksum in zip(cases, checksums, strict=True):
        same = case.items is not None or checksum is None or checksum == checksums[0]
        assert same, f"{title}: {case.name} read something else than {cases[0].name}"
    rates = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            gc.collect()
            rates[case.name].append((case.items or items) / seconds_of(case.run))
    print(f"\n{title}")
    print(f"  {'':44} {'records/s':>12} {'us/batch':>9} {'ratio':>6}  {'spread':>11}  aim")
    return [
        _report(title, case, rates[case.name], ratios_of(rates[case.name], rates[cases[0].name]), items / steps)
        for case in cases
    ]


def show(title, heading, rows):
    """Print rows of figures that have no ratio; returns them with the title, as JSON."""
    print(f"\n{heading}")
    for row in rows:
        figures = [
            f"{key} {value:,.{0 if value >= 1000 else 5}f}" for key, value in row.items() if key not in ("case", "met")
        ]
        verdict = "" if row.get("met") is None else "met" if row["met"] else "NOT MET"
        print(f"  {row['case']:36}", *(f"{text:28}" for text in figures), verdict)
    return [{"title": title, **row} for row in rows]


def _report(title, case, rates, ratios, batch_size):
    rate, ratio = statistics.median(rates), statistics.median(ratios)
    aims = [f">= {case.floor}"] if case.floor is not None else []
    aims += [f">= {case.least:,.0f}/s"] if case.least is not None else []
    met = ratio >= (case.floor or 0) and rate >= (case.least or 0) if aims else None
    verdict = f"{', '.join(aims)}  {'met' if met else 'NOT MET'}" if aims else ""
    print(
        f"  {case.name:44} {rate:12,.0f} {batch_size / rate * 1e6:9.1f} {ratio:6.2f}"
        f"  {min(ratios):5.2f}-{max(ratios):5.2f}  {verdict}"
    )
    figures = {"records_per_second": rate, "ratio": ratio, "ratios": ratios, "rates": rates}
    return {"title": title, "case": case.name, **figures, "aim": case.floor or case.least, "met": met}
