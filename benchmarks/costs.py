"""What does not depend on the size of records: imports, the loader's own cost, opening, and resuming."""

import os
import shutil
import subprocess
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from unittest import mock

import numpy as np

import dataload
from benchmarks.harness import (
    ROOT,
    SEED,
    VERSION,
    Case,
    aim,
    batches,
    blobs,
    loaders,
    made,
    made_tokens,
    median_seconds,
    run_cases,
    show,
)
from benchmarks.workloads import floats
from dataload.bench.task import used
from dataload.catalog.manifest import MANIFEST_NAME
from dataload.convert.indexing import index_shards
from dataload.samplers import PoolShuffle, ShardSequential
from dataload.storage.core import core

MILLION = 1 << 20


def overhead(batch_size=256):
    """The cost of a batch when reading costs nothing."""
    source = dataload.RangeSource(MILLION)
    plan = batches(MILLION, batch_size)
    title = "Loader over records that cost nothing"
    with ExitStack() as held:
        cases = [Case("source.read_batch", lambda: map(source.read_batch, plan))]
        cases += loaders(held, source, batch_size, range(3), {})
        rows = run_cases(title, cases)
    base = rows[0]["rates"]
    return rows + [
        aim(
            title,
            f"{row['case']}: us a batch more than read_batch",
            median(batch_size * 1e6 * (1 / mine - 1 / its) for mine, its in zip(row["rates"], base, strict=True)),
            most=20,
        )
        for row in rows[1:]
    ]


def opening():
    """The time to open a million records, the first time and with a cached table; and a thousand shards."""
    raw = {"field": "bin", "options": "group_size:1,uncompressed"}
    small = {"different": blobs(64), "count": MILLION}
    paths = {
        "Syrah": made(f"64-{MILLION}.syr", floats(16), MILLION),
        "TorchRecord": made(f"64-{MILLION}.torchrecord", floats(16), MILLION, num_records=MILLION),
        "LMDB": made(f"64-{MILLION}.lmdb", **small, field="bin"),
        "ArrayRecord, compressed": made(f"64-{MILLION}.array_record", **small, field="bin", options="group_size:1"),
        "ArrayRecord, uncompressed": made(f"64-{MILLION}-uncompressed.array_record", **small, **raw),
        "tar with index": made(f"64-{MILLION}.tar", **small),
        "TFRecord": made(f"64-{MILLION}.tfrecord", **small, field="bin"),
    }
    title = f"Opening {MILLION:,} records, s"
    print(f"\n{title}")
    found = []
    for name, path in paths.items():
        with mock.patch.dict(os.environ, DATALOAD_CACHE="0"):
            most = 1.0 if name == "TFRecord" else 0.1  # whose lengths are a chain
            found.append(aim(title, f"{name}, the first time", _open_seconds(path), most=most))
        found.append(aim(title, f"{name}, again", _open_seconds(path), most=0.01))
    return found


def shards(count=5000, records=8, batch_size=256):
    """Opening and indexing many shards in CPU time, which other work hardly changes; files are in memory."""
    title = f"Opening {count:,} shards, seconds of CPU"
    print(f"\n{title}")
    found = []
    formats = {  # and the seconds to index a shard: a third of what 0.2 took
        "Syrah": ("syr", floats(1024), 0.17e-3),
        "tar with index": ("tar", blobs(4096), 0.35e-3),
        "Arrow": ("arrow", floats(1024), 0.35e-3),
    }
    for name, (suffix, different, each) in formats.items():
        folder = ROOT / f"v{VERSION}-opened-{count}" / suffix
        folder.mkdir(parents=True, exist_ok=True)
        paths = made_copies(f"opened-{count}/{suffix}/", suffix, different, count, records)
        if not (folder / MANIFEST_NAME).exists():
            index_shards(str(folder))
        rows = np.random.default_rng(SEED).permutation(count * records)[:batch_size]
        for what, given, most in (("no manifest", paths, 0.15e-3 * count), ("a manifest", folder, 0.06)):
            with mock.patch.dict(os.environ, DATALOAD_CACHE="0"):
                opening, reading, memory = _in_child(_open_often, given, paths[0], rows)
            found += [
                aim(title, f"{name}, {what}: seconds to open", median(opening), most=most),
                aim(title, f"{name}, {what}: seconds for the first batch", median(reading), most=0.03),
                aim(title, f"{name}, {what}: MB of memory", memory[0], most=20),
            ]
        seconds = _in_child(_index_twice, str(folder))
        found.append(aim(title, f"{name}: seconds to index", seconds, most=each * count))
    return found


def _in_child(function, *arguments):
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        return child.submit(function, *arguments).result()


def _index_twice(folder):
    """Return the CPU seconds of the second index; the first one imports."""
    for _ in range(2):
        begun = process_time()
        index_shards(folder)
    return process_time() - begun


def _open_often(paths, one, rows):
    """Return the CPU seconds of several openings, those of their first batches, and megabytes of memory."""
    with closing(dataload.open(one)) as source:
        source.read_batch([0])  # imports
    found = []
    for _ in range(5):
        before, begun = own_memory(), process_time()
        with closing(dataload.open(paths)) as source:
            assert len(source)
            opened, memory = process_time(), own_memory()
            source.read_batch(rows)
            found.append((opened - begun, process_time() - opened, (memory - before) / 1e6))
    return [*zip(*found, strict=True)]


def own_memory():
    """Return the bytes of memory that this process shares with no other, and that are of no file."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024


def many_shards(records=40_000, batch_size=256, counts=(1, 100, 1000, 5000)):
    """The time of a batch from many files, as a multiple of that from one."""
    raw = {"field": "bin", "options": "group_size:1,uncompressed"}
    formats = {
        "Syrah": ("syr", floats(1024), {}),
        "tar": ("tar", blobs(4096), {}),
        "Arrow": ("arrow", floats(1024), {}),
        "ArrayRecord, uncompressed": ("array_record", blobs(4096), raw),
        "TFRecord": ("tfrecord", blobs(4096), {"field": "bin"}),
        "LMDB": ("lmdb", blobs(4096), {"field": "bin"}),
        "Parquet": ("parquet", floats(1024), {}),
        "tokens": ("npy", None, {}),
    }
    found = []
    for name, (suffix, different, options) in formats.items():
        title = f"{name}, 4 KB records, batch {batch_size}"
        with ExitStack() as held:
            cases = []
            for count in counts[: 3 if suffix == "lmdb" else None]:
                paths = made_copies("4k-many-", suffix, different, count, records // count, **options)
                window = {"window": 1024, "stride": 1024} if different is None else {}
                source = held.enter_context(closing(dataload.open(paths, **window)))
                plan = batches(len(source), batch_size)
                deque(map(source.read_batch, plan), maxlen=0)  # opens, maps and decodes
                cases.append(Case(f"{count:,} shards", partial(map, source.read_batch, plan)))
            rows = run_cases(title, cases, same=None)
        found += rows
        most = 2 if name == "Parquet" else 1.3
        found += [aim(title, f"{row['case']} / 1 shard", 1 / row["ratio"], most=most) for row in rows[1:]]
    return found + _decoding_by_shards(records, batch_size)


def _decoding_by_shards(records, batch_size, count=1000):
    """A batch in the order by shards, where a tenth of the decoded row groups is kept: of many files, and of one."""
    title, each = f"Parquet by shards, a tenth kept, batch {batch_size}", records // count
    paths = made_copies("4k-many-", "parquet", floats(1024), count, each)
    one = made("4k-many-groups.parquet", floats(1024), records, group_bytes=each * 4096)
    order = PoolShuffle(ShardSequential((each,) * count, SEED), 1024, SEED).indices(np.arange(records // 8), epoch=0)
    plan = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    with ExitStack() as held:
        sources = [held.enter_context(closing(dataload.open(of, cached_bytes=records * 410))) for of in (one, paths)]
        for source in sources:
            source.read_batch(plan[0])
        names = (f"1 file, {count:,} row groups", f"{count:,} files")
        cases = [Case(name, partial(map, each.read_batch, plan)) for name, each in zip(names, sources, strict=True)]
        rows = run_cases(title, cases, same=None)
    return [*rows, aim(title, f"{count:,} files / 1 file", 1 / rows[1]["ratio"], most=1.3)]


def unchanged(records=10, batch_size=256):
    """The cost of looking after each read whether the file was changed."""
    found = []
    for count, mapped in ((1, True), (1000, True), (5000, True), (1, False), (1000, False), (5000, False)):
        paths = made_copies("4k-", "syr", floats(1024), count, max(records, 5000 // count))
        with closing(dataload.open(paths, map=mapped)) as source:
            files = [reader._file for reader in source._readers()]
            plan = batches(len(source), batch_size)
            deque(map(source.read_batch, plan), maxlen=0)  # maps each file
            shared = source._data_set().directory if mapped else None
            maps = None if shared is None else {False: shared.files._maps, True: core().Maps(count)}
            for shard, path in enumerate(paths if maps else ()):  # the same pages as plain memory, without looks
                maps[True].put_memory(shard, np.memmap(path, np.uint8, "r"))

            def epoch(skips, source=source, files=files, plan=plan, shared=shared, maps=maps):
                for rows in plan:
                    if maps is not None:
                        shared.files._maps = maps[skips]
                    elif files[0].may_be_written != skips:
                        for file in files:
                            file.may_be_written = skips
                    yield source.read_batch(rows)

            title = f"4 KB records of {count:,} {'mapped' if mapped else 'unmapped'} shards, batch {batch_size}"
            without, looks = run_cases(
                title, [Case("no look", partial(epoch, True)), Case("looks", partial(epoch, False))]
            )
            found += [without, looks, aim(title, "without / with the look", 1 / looks["ratio"], most=1.05)]
    return found


def made_copies(name, suffix, different, count, records, nbytes=4096, **options):
    """The paths of `count` shards, which are copies of one; without records to repeat, of one with tokens."""
    first = f"{name}{count}-00000.{suffix}"
    if different is None:
        first = made_tokens(first, np.arange(records * nbytes // 4, dtype=np.uint32))
    else:
        first = made(first, different, records, **options)
    return [first, *(_copied(Path(first), number) for number in range(1, count))]


def _copied(first, number):
    path = first.with_stem(f"{first.stem[:-5]}{number:05}")
    if not path.exists():
        for suffix in (".idx", first.suffix):  # the data last: they say that all is there
            source = first.with_suffix(suffix)
            if source.exists():
                copy = shutil.copytree if source.is_dir() else shutil.copy  # LMDB's are directories
                copy(source, path.with_suffix(suffix))
    return str(path)


def _open_seconds(paths):
    def opened():
        with closing(dataload.open(paths)) as source:
            assert len(source)

    opened()  # imports, and warms the page cache
    return median_seconds(opened)


class Counting(dataload.RangeSource):
    """Counts the records that are read."""

    read_records = 0

    def read_batch(self, indices, fields=None):
        self.read_records += len(indices)
        return super().read_batch(indices, fields)


def resuming(records=10**9, batch_size=256):
    """From a state to the loader's first batch, over records that cost nothing, at steps all over an epoch."""
    title = f"Resuming in {records:,} records, s"
    print(f"\n{title}")
    found = []
    for name, options in {
        "in order": {},
        "global shuffle": {"shuffle": "global"},
        "shards and pool": {"shuffle": "shards"},
    }.items():
        settings = {"batch_size": batch_size, "seed": SEED, "num_workers": 0, **options}
        source = Counting(records)
        with dataload.Loader(source, **settings) as loader:
            state, steps = loader.state_dict(), len(loader)
        slowest, extra = 0.0, 0
        for step in np.linspace(1, steps - 64, 9).astype(int).tolist():
            seconds = []
            for _ in range(5):
                with dataload.Loader(source, **settings) as loader:
                    begun, before = perf_counter(), source.read_records
                    loader.load_state_dict({**state, "position": step * batch_size})
                    extra += source.read_records - before  # resuming itself reads nothing
                    next(iter(loader))
                    seconds.append(perf_counter() - begun)
            slowest = max(slowest, median(seconds))
        found.append(aim(title, f"{name}, to the first batch, slowest of 9 steps", slowest, most=0.005))
        found.append(aim(title, f"{name}, records read by resuming", extra, most=0))
    return found


_PROGRAMS = {
    "python": ["-c", "pass"],
    "numpy": ["-c", "import numpy"],
    "import dataload": ["-c", "import dataload"],
    "dataload.Loader": ["-c", "import dataload; dataload.Loader"],
    "dataload.open": ["-c", "import dataload; dataload.open"],
    "dataload --help": ["-m", "dataload", "--help"],
}


def imports():
    """Programs in interleaved rounds, with warm bytecode; what the machine does besides hardly counts as CPU time."""
    seconds = {name: [] for name in _PROGRAMS}
    for number in range(12):
        for name, arguments in _PROGRAMS.items():
            took = _cpu_seconds(arguments)
            if number:  # the first round compiles
                seconds[name].append(took)
    rows = []
    for name, values in seconds.items():
        over = {f"over {base}": median(values) - median(seconds[base]) for base in ("python", "numpy")}
        rows.append({"case": name, "seconds": median(values), **over})
    shown = show("import", "CPU seconds of a new interpreter, medians", rows)
    print()
    return [
        *shown,
        aim("import", "import dataload, seconds over python", shown[2]["over python"], most=0.02),
        aim("import", "dataload --help, seconds", shown[-1]["seconds"], most=0.25),
    ]


def _cpu_seconds(arguments):
    before = used()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return sum(used().since(before)[:2])
