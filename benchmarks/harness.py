"""Data, batches and tables that the cases share. Timing and made data are those of `dataload.bench`."""

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
from dataload.bench.timing import ratios_of, time_rounds
from dataload.samplers import GlobalShuffle

ROOT = Path(tempfile.gettempdir()) / "dataload-benchmarks"
VERSION = 1  # raise when the made data change
SEED = 1
ROUNDS = 7


def floats(size):
    """Records of one field of `size` float32 values."""
    return workloads.floats(size)


def blobs(size):
    """Records of one field of about `size` bytes."""
    return workloads.blobs(size * 9 // 10, size * 11 // 10, 100)


def made(name, make, count, *, field=None, **options):
    """The path of a data set called `name`, written on first use.

    Args:
        name: The name; its suffix chooses the format.
        make: Returns the records, given their number.
        count: Number of records.
        field: The field to write as bare bytes, for formats that store bytes.
        options: Options of the writer.
    """
    ROOT.mkdir(exist_ok=True)
    if shutil.disk_usage(ROOT).free < 8 << 30:
        raise SystemExit(f"the benchmarks need 8 GiB in {ROOT}; set TMPDIR to another directory")

    def records():
        return make(count) if field is None else (record[field] for record in make(count))

    return write_once(ROOT / f"v{VERSION}-{name}", records, **options)


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

    def met(self, ratio, rate):
        """Whether the case reaches its aims; None if it has none."""
        if self.floor is None and self.least is None:
            return None
        return ratio >= (self.floor or 0) and rate >= (self.least or 0)

    def verdict(self, ratio, rate):
        """The aims in words."""
        aims = [f">= {self.floor}"] if self.floor is not None else []
        aims += [f">= {self.least:,.0f}/s"] if self.least is not None else []
        return f"{', '.join(aims)}  {'met' if self.met(ratio, rate) else 'NOT MET'}" if aims else ""


def run_cases(title, cases, *, items, steps, rounds=ROUNDS):
    """Time cases in interleaved rounds; prints the rate of each and its ratio to the first, and returns rows of JSON.

    Args:
        title: Title of the table.
        cases: The cases; the first is the limit, or another base.
        items: Number of items of one run.
        steps: Number of batches of one run.
        rounds: Number of rounds.
    """
    checksums = [case.run() for case in cases]  # also warms up
    for case, checksum in zip(cases[1:], checksums[1:], strict=True):
        same = case.items is not None or checksum is None or checksum == checksums[0]
        assert same, f"{title}: {case.name} read something else than {cases[0].name}"
    seconds = time_rounds({case.name: case.run for case in cases}, rounds)
    rates = {case.name: [(case.items or items) / took for took in seconds[case.name]] for case in cases}
    rows = []
    print(f"\n{title}")
    print(f"  {'':44} {'records/s':>12} {'us/batch':>9} {'ratio':>6}  {'spread':>11}  aim")
    for case in cases:
        ratios = ratios_of(rates[case.name], rates[cases[0].name])
        rate, ratio = statistics.median(rates[case.name]), statistics.median(ratios)
        print(
            f"  {case.name:44} {rate:12,.0f} {items / rate / steps * 1e6:9.1f} {ratio:6.2f}"
            f"  {min(ratios):5.2f}-{max(ratios):5.2f}  {case.verdict(ratio, rate)}"
        )
        aims = {"aim": case.floor or case.least, "met": case.met(ratio, rate)}
        figures = {"records_per_second": rate, "ratio": ratio, "ratios": ratios, "rates": rates[case.name]}
        rows.append({"title": title, "case": case.name, **figures, **aims})
    return rows
