"""``num_workers`` as an upper bound, and "auto": against every fixed setting, on seven workloads.

All loaders of a workload are open at once, and take turns. Adaptive ones first run alone until they have settled.
"""

import time
from contextlib import ExitStack
from functools import partial
from itertools import product
from time import perf_counter

import dataload
from benchmarks.harness import SEED, Case, against, blobs, made, run_cases
from benchmarks.workloads import floats, jpegs
from dataload._util.system import usable_cpus

AIM_AUTO, AIM_MORE = 0.9, 0.97
SETTLE = 10.0  # seconds


def busy(sample, rounds):
    """A transform that holds the GIL, for about a microsecond per 20 rounds."""
    value = 0
    for number in range(rounds):
        value += number * number
    return {"index": sample["index"], "value": value}


def decode(sample):
    import simplejpeg

    return {"image": simplejpeg.decode_jpeg(sample["jpg"])}


def rest(seconds, _):
    """A consumer that waits for a device."""
    time.sleep(seconds)


def nothing(_):
    """A consumer that only reads."""


def syrah(size, count):
    return dataload.open(made(f"{4 * size}-{count}.syr", floats(size), count))


def numbers():
    return dataload.RangeSource(1 << 24)


def photos():
    return jpegs(2000)


def values():
    return dataload.open(made("4096-100000.lmdb", blobs(4096), 100_000, field="bin"))


# A source, options of the loader, and a consumer.
WORKLOADS = {
    "copies, 4 KB": (partial(syrah, 1024, 200_000), {"batch_size": 256}, nothing),
    "copies, 64 B": (partial(syrah, 16, 1_000_000), {"batch_size": 1024}, nothing),
    "batches that cost nothing": (numbers, {"batch_size": 256}, nothing),
    "values of LMDB": (values, {"batch_size": 256}, nothing),
    "decoding": (photos, {"batch_size": 32, "transform": decode}, nothing),
    "Python": (numbers, {"batch_size": 64, "transform": partial(busy, rounds=200)}, nothing),
    "a slow consumer": (numbers, {"batch_size": 64, "transform": partial(busy, rounds=200)}, partial(rest, 0.01)),
}


def endless(loader):
    while True:
        yield from loader


def measure(name):
    """Compare "auto" with the best fixed setting, and at most N + 1 workers with at most N."""
    make, options, consumer = WORKLOADS[name]
    source, most = make(), usable_cpus() + 1

    def rows_of(batch):
        consumer(batch)
        return options["batch_size"]

    with ExitStack() as held:

        def opened(**settings):
            return held.enter_context(dataload.Loader(source, shuffle=True, seed=SEED, **options, **settings))

        loaders = {}
        for workers, prefetch in [(0, 2), *product(range(1, 2 * usable_cpus() + 1), (2, 8))]:
            loader = loaders[f"{workers} workers, prefetch {prefetch}"] = opened(num_workers=workers, prefetch=prefetch)
            loader._scaling = None  # the number is fixed
        fixed = [*loaders]
        for workers in ("auto", *range(1, most + 1)):
            loaders[workers] = opened(num_workers=workers)
        batches = {key: endless(loader) for key, loader in loaders.items()}
        for key in loaders.keys() - fixed:
            begun = perf_counter()
            while perf_counter() - begun < SETTLE:
                rows_of(next(batches[key]))
        cases = [
            Case(f"at most {key}" if isinstance(key, int) else key, partial(iter, each))
            for key, each in batches.items()
        ]
        rows = run_cases(name, cases, rows=rows_of, same=None, seconds=0.5)
        used = {key: loader.statistics().workers for key, loader in loaders.items()}
    found = dict(zip(loaders, rows, strict=True))
    best = max((found[key] for key in fixed), key=lambda row: row["records_per_second"])
    fewer = {1: found[fixed[0]], **{n + 1: found[n] for n in range(1, most)}}
    return [
        *rows,
        against(found["auto"], best, AIM_AUTO, f"auto ({used['auto']} used) / {best['case']}"),
        *(against(found[n], row, AIM_MORE, f"at most {n} ({used[n]} used) / {n - 1}") for n, row in fewer.items()),
    ]


def adaptive():
    return [row for name in WORKLOADS for row in measure(name)]
