"""Data, cases and tables that all benchmarks share. Made data are those of `dataload.bench`."""

import importlib.util
import itertools
import math
import shutil
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np

import dataload
from benchmarks import workloads
from benchmarks.rates import ratios_of
from dataload.bench.runner import Spread
from dataload.bench.task import Stretch, epochs_of, stretch, used
from dataload.cli.output import print_table
from dataload.samplers import GlobalShuffle

ROOT = Path(tempfile.gettempdir()) / "dataload-benchmarks"
VERSION = 2  # raise when the made data change
SEED = 1
ROUNDS = 5
SECONDS = 0.4  # of a case in a round
_WARM_UP = 0.1  # of each round: an idle loader has batches ready, which nobody has paid for
_VERIFIED = 16  # steps
_NUMBERS = ("records/s", "us/batch", "ratio", "spread", "faults", "sys us")
_COLUMNS = {"case": "left", **dict.fromkeys(_NUMBERS, "right"), "aim": "left"}


def blobs(size):
    """Records of one field of about `size` bytes."""
    return workloads.blobs(size * 9 // 10, size * 11 // 10, 100)


def made(name, different, count, *, field=None, **options):
    """The path of `count` records, written on first use: those of `different`, or their bytes of `field`, repeated."""
    ROOT.mkdir(exist_ok=True)
    if shutil.disk_usage(ROOT).free < 12 << 30:
        raise SystemExit(f"the benchmarks need 12 GiB in {ROOT}; set TMPDIR to another directory")
    stored = different if field is None else [record[field] for record in different]
    path = workloads.write_once(ROOT / f"v{VERSION}-{name}", lambda: workloads.repeat_records(stored, count), **options)
    return warmed(path)


def warmed(path):
    """Read a file, or those in a directory, so that nothing is read from the disk later; return the path."""
    for file in Path(path).iterdir() if Path(path).is_dir() else [Path(path)]:
        with file.open("rb") as stream:
            while stream.read(1 << 20):
                pass
    return path


def made_tokens(name, tokens):
    """The path of a file of tokens."""
    ROOT.mkdir(exist_ok=True)
    np.save(ROOT / f"v{VERSION}-{name}", tokens)
    return str(ROOT / f"v{VERSION}-{name}")


def batches(count, batch_size):
    """The indices of each batch of a shuffled epoch, as a loader with the same seed has them."""
    order = GlobalShuffle(count, SEED).indices(np.arange(count), epoch=0)
    return [order[start : start + batch_size] for start in range(0, count, batch_size)]


def through(loader):
    """A function that returns the batches of the next epoch of a loader, first those of epoch 0."""
    loader.set_epoch(0)
    return lambda: iter(loader)


def column(batch):
    """The first column of a batch, or a batch without columns."""
    return next(iter(batch.values())) if isinstance(batch, Mapping) else batch


def rows_of(batch):
    """The rows of a batch: all that a consumer does with it, while the next one is made."""
    return len(column(batch))


def content(batch):
    """A checksum of all bytes of a batch."""
    values = column(batch)
    if isinstance(values, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(values).view(np.uint8))
    found = 0
    for value in values:
        found = zlib.crc32(value, found)
    return found


def seconds_of(work: Callable[[], object], calls: int = 1, clock: Callable[[], float] = perf_counter) -> float:
    """Return the seconds that one call takes, the least of several."""
    found: list[float] = []
    for _ in range(calls):
        begun = clock()
        work()
        found.append(clock() - begun)
    return min(found)


def cpu_seconds_of(work: Callable[[], object], calls: int = 1) -> float:
    """Return the CPU seconds of this process that one call takes, the least of several."""
    return seconds_of(work, calls, process_time)


def median_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of several calls."""
    return median(seconds_of(work) for _ in range(repeats))


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that Python and numpy allocate during one call."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@dataclass(frozen=True)
class Case:
    """One way to make batches; `floor` is the aim for its ratio to the first case, `least` that for items a second.

    The first batches of a case that is `compared` must be those of the first case.
    """

    name: str
    epoch: Callable[[], Iterable[Any]]
    floor: float | None = None
    least: float | None = None
    compared: bool = True


def run_cases(title, cases, *, rows=rows_of, same=content, rounds=ROUNDS, seconds=SECONDS):
    """Time warm cases in interleaved rounds; print and return their rows. All cases have the `same` batches."""
    if same is not None:
        _verify(title, cases, same)
    steps = [epochs_of(lambda _, case=case: case.epoch()) for case in cases]
    found: list[list[Stretch]] = [[] for _ in cases]
    for number in range(rounds + 1):
        for endless, slices in zip(steps, found, strict=True):
            measured = _measure(endless, rows, seconds if number else seconds / 2)
            if number:  # the first round warms up
                slices.append(measured)
    for endless in steps:
        endless.close()
    print(f"\n{title}")
    base = [one.records / one.seconds for one in found[0]]
    reports = [_report(title, case, slices, base) for case, slices in zip(cases, found, strict=True)]
    print_table(_COLUMNS, [line for line, _ in reports])
    return [row for _, row in reports]


def _verify(title, cases, same):
    expected = None
    for case in cases:
        if case.compared:
            batches = case.epoch()
            found = [same(batch) for batch in itertools.islice(batches, _VERIFIED)]
            expected = found if expected is None else expected
            assert found == expected, f"{title}: {case.name} read something else than {cases[0].name}"


def _measure(endless, rows, seconds):
    def check(batch):
        return rows(batch), 0, 0

    stretch(endless, check, min(_WARM_UP, seconds))
    measured = stretch(endless, check, seconds)
    wait_until_idle()
    return measured


def wait_until_idle():
    """Wait until the workers of the last case have filled their queues: the next case shall have the CPUs."""
    before = used()
    for _ in range(100):
        sleep(0.02)
        after = used()
        if sum(after.since(before)[:2]) < 0.005:
            break
        before = after


def _report(title, case, slices, base):
    rates = [one.records / one.seconds for one in slices]
    ratios = ratios_of(rates, base)
    each = [(one.records, one.usage.faults, one.usage.system, one.batches) for one in slices]
    rate, (rows, faults, system) = median(rates), (median(v[i] / v[3] for v in each) for i in range(3))
    aims = [f">= {case.floor}"] if case.floor is not None else []
    aims += [f">= {case.least:,.0f}/s"] if case.least is not None else []
    spread = Spread.of(ratios)
    met = spread.median >= (case.floor or 0) and rate >= (case.least or 0) if aims else None
    verdict = f"{', '.join(aims)}  {'met' if met else 'NOT MET'}" if aims else ""
    line = (case.name, f"{rate:,.0f}", f"{rows / rate * 1e6:.1f}", f"{spread.median:.2f}")
    line += (f"{spread.low:.2f}-{spread.high:.2f}", f"{faults:.1f}", f"{system * 1e6:.1f}", verdict)
    figures = {"records_per_second": rate, "ratio": spread.median, "ratios": ratios, "rates": rates}
    figures |= {"faults_per_batch": faults, "system_us_per_batch": system * 1e6}
    return line, {"title": title, "case": case.name, **figures, "aim": case.floor or case.least, "met": met}


def against(row, base, floor, name=None):
    """Compare two rows of a table, round by round; prints the ratio, and returns a row of JSON."""
    ratios = ratios_of(row["rates"], base["rates"])
    case = name or f"{row['case']} / {base['case']}"
    return aim(row["title"], case, median(ratios), floor, ratios=ratios)


def aim(title, case, reached, floor=None, most=None, **more):
    """Print a figure that has an aim, at least `floor` or at most `most`, and return it as a row of JSON."""
    met = reached >= floor if most is None else reached <= most
    bound = f">= {floor:g}" if most is None else f"<= {most:g}"
    print(f"  {case:64} {reached:10.4g}  {bound}  {'met' if met else 'NOT MET'}")
    return {"title": title, "case": case, "ratio": reached, "aim": floor if most is None else most, "met": met, **more}


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


def summary(rows):
    """The lines of all aims: what was reached, and whether that meets the aim."""
    for row in rows:
        if row.get("met") is not None:
            reached = row.get("ratio", row.get("seconds", math.nan))
            bound = "" if row.get("aim") is None else f"aim {row['aim']:g}"
            verdict = "met" if row["met"] else "NOT MET"
            yield f"{row['title']}: {row['case']}".ljust(110) + f" {reached:10.4g}  {bound:12} {verdict}"


def workers_named(count, name="Loader"):
    """The name of a loader in tables."""
    return f"{name}, {count or 'no'} worker{'' if count in (0, 1) else 's'}"


def loaders(held, source, batch_size, workers, floors, **options):
    """A case for each number of workers, held open by a stack."""
    for count in workers:
        settings = {"batch_size": batch_size, "shuffle": True, "seed": SEED, "num_workers": count, **options}
        loader = held.enter_context(dataload.Loader(source, **settings))
        yield Case(workers_named(count), through(loader), floors.get(count))


def torch_loaders(dataset_for, batch_size, workers=(0, 2), name="torch DataLoader"):
    """A case of torch's loader for each number of workers, with the data set of each; none without torch."""
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: no peer (pip install torch)")
        return
    from torch.utils.data import DataLoader

    for count in workers:
        several = {"num_workers": count, "persistent_workers": count > 0}
        loader = DataLoader(dataset_for(count), batch_size=batch_size, shuffle=True, **several)
        yield Case(workers_named(count, name), loader.__iter__)


def more_workers(rows):
    """Compare each number of workers with the one before; the row has the lowest ratio."""
    pairs = {}
    for fewer, more in itertools.pairwise(rows):
        pairs[f"{more['case']} / {fewer['case']}"] = ratios_of(more["rates"], fewer["rates"])
    worst = min(pairs, key=lambda pair: median(pairs[pair]))
    name = f"more workers are not slower; worst: {worst.replace('Loader, ', '')}"
    medians = {pair: median(ratios) for pair, ratios in pairs.items()}
    return aim(rows[0]["title"], name, medians[worst], 0.97, ratios=pairs[worst], pairs=medians)
