"""Cold reads of every format in every order, beside bare ``pread`` calls of the same places in the same order.

Before each round the files are dropped from the page cache. The bare calls read one equal part of a file for each
record: as many bytes as a record takes there, in the same order, on one thread and without hints.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import dataload
from benchmarks.harness import SEED, made, show
from benchmarks.workloads import floats
from dataload.bench.runner import Spread, ratios_of

SHARDS, RECORDS, BATCH = 8, 2048, 256
ORDERS = {"sequential": False, "shards and pool": "shards", "global": "global"}
_RAW = {"codec": "tensorprotos", "options": "group_size:1,uncompressed"}
FORMATS = {
    "Syrah": ("syr", {}, {}),
    "TorchRecord": ("torchrecord", {"num_records": RECORDS}, {}),
    "LMDB": ("lmdb", {"codec": "tensorprotos"}, {"codec": "tensorprotos"}),
    "tar": ("tar", {}, {"decode": "auto"}),
    "ArrayRecord, uncompressed": ("array_record", _RAW, {"codec": "tensorprotos"}),
    "ArrayRecord, compressed": ("array_record", {"codec": "tensorprotos"}, {"codec": "tensorprotos"}),
}


def cold(rounds=3):
    """The ratio of a cold epoch, from open to its last record, to bare reads."""
    found = []
    for name, (suffix, written, options) in FORMATS.items():
        stem = name.replace(", ", "-")
        paths = [made(f"cold-{shard}-{stem}.{suffix}", floats(1024), RECORDS, **written) for shard in range(SHARDS)]
        with dataload.open(paths, **options) as source:  # writes the cached tables
            plans = {order: _plan(source, shuffle) for order, shuffle in ORDERS.items()}
        for order, shuffle in ORDERS.items():
            ours, bare = [], []
            for _ in range(rounds):
                bare.append(len(paths) * RECORDS / _timed(_pread, paths, plans[order]))
                ours.append(len(paths) * RECORDS / _timed(_epoch, paths, shuffle, options))
            ratio = Spread.of(ratios_of(ours, bare))
            rates = {"records_per_second": median(ours), "pread": median(bare)}
            found.append(
                {"case": f"{name}, {order}", **rates, "ratio": ratio.median, "low": ratio.low, "high": ratio.high}
            )
    return show("cold", f"Cold reads of {SHARDS} x {RECORDS:,} records of 4 KB, 1 worker, ratio to bare preads", found)


def _plan(source, shuffle):
    """The records of an epoch in the loader's order."""
    with dataload.Loader(source, batch_size=BATCH, shuffle=shuffle, seed=SEED) as loader:
        return np.concatenate([plan.indices for plan in loader.batch_sampler.plans(range(len(loader)), epoch=0)])


def drop_cached(paths):
    """Drop files, and the files of directories, from the page cache; mapped pages stay."""
    for path in paths:
        for file in filter(Path.is_file, (Path(path), *Path(path).rglob("*"))):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # pages that are not written yet cannot be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _timed(work, paths, *arguments):
    drop_cached(paths)
    begun = perf_counter()
    work(paths, *arguments)
    return perf_counter() - begun


def _pread(paths, order):
    with ExitStack() as held:
        files = []
        for path in paths:
            file = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
            descriptor = os.open(file, os.O_RDONLY)
            held.callback(os.close, descriptor)
            files.append((descriptor, os.fstat(descriptor).st_size))
        for index in order.tolist():
            shard, record = divmod(index, RECORDS)
            descriptor, size = files[shard]
            start, end = record * size // RECORDS, (record + 1) * size // RECORDS
            os.pread(descriptor, end - start, start)


def _epoch(paths, shuffle, options):
    with (
        dataload.open(paths, **options) as source,
        dataload.Loader(source, batch_size=BATCH, shuffle=shuffle, seed=SEED, num_workers=1) as loader,
    ):
        for batch in loader:
            assert len(batch["x"])
