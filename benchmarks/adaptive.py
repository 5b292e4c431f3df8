"""``num_workers`` as an upper bound, and "auto": against every fixed setting, on seven workloads.

All loaders of a workload are open at once, and take turns of a few tenths of a second. Adaptive ones first run alone
until they have settled.
"""

import statistics
import time
from contextlib import ExitStack
from functools import partial

import dataload
from benchmarks.harness import SEED, blobs, made, show, wait_until_idle
from benchmarks.rates import ratios_of
from benchmarks.workloads import floats, jpegs
from dataload._util.system import usable_cpus

AIM_AUTO, AIM_MORE = 0.9, 0.97


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


class Reader:
    """A loader that is read in slices of time."""

    def __init__(self, opened, source, options, consumer, *, fixed=False, **settings):
        self.loader = opened.enter_context(dataload.Loader(source, shuffle=True, seed=SEED, **options, **settings))
        if fixed:
            self.loader._scaling = None
        self._consumer = consumer
        self._batches = self._endless()

    def _endless(self):
        while True:
            yield from self.loader

    def rate(self, seconds):
        """Batches per second, without those that were ready before."""
        for _ in range(self.loader._in_flight() + 1):
            next(self._batches)
        begun, steps = time.perf_counter(), 0
        while (now := time.perf_counter()) - begun < seconds or steps < 8:
            self._consumer(next(self._batches))
            steps += 1
        wait_until_idle()
        return steps / (now - begun)


def measure(name, settle, slice_seconds, rounds):
    """Print how "auto" compares with the best fixed setting, and N + 1 workers with N. Returns rows of JSON."""
    make, options, consumer = WORKLOADS[name]
    most = usable_cpus() + 1
    with ExitStack() as opened:
        read = partial(Reader, opened, make(), options, consumer)
        fixed = {
            (workers, prefetch): read(fixed=True, num_workers=workers, prefetch=prefetch)
            for workers in range(2 * usable_cpus() + 1)
            for prefetch in ((2, 8) if workers else (2,))
        }
        adaptive = {workers: read(num_workers=workers) for workers in ("auto", *range(1, most + 1))}
        for reader in adaptive.values():
            reader.rate(settle)
        readers = {**fixed, **adaptive}
        rates = {key: [] for key in readers}
        for _ in range(rounds):
            for key, reader in readers.items():
                rates[key].append(reader.rate(slice_seconds))
        used = {key: reader.loader.statistics().workers for key, reader in adaptive.items()}
    best = max(fixed, key=lambda key: statistics.median(rates[key]))
    rates[0] = rates[0, 2]
    rows = [
        row(f"auto ({used['auto']} used) / {best[0]}, prefetch {best[1]}", rates["auto"], rates[best], AIM_AUTO),
        *(row(f"at most {n} ({used[n]} used) / {n - 1}", rates[n], rates[n - 1], AIM_MORE) for n in range(1, most + 1)),
    ]
    figures = ", ".join(f"{w}x{p} {statistics.median(rates[w, p]):.0f}" for w, p in fixed)
    return show(name, f"{name}: batches/s with fixed workers x prefetch: {figures}", rows)


def row(case, mine, its, aim):
    ratios = ratios_of(mine, its)
    ratio = statistics.median(ratios)
    return {"case": case, "ratio": ratio, "least": min(ratios), "most": max(ratios), "met": ratio >= aim}


def adaptive(settle=10.0, slice_seconds=0.5, rounds=5):
    return [row for name in WORKLOADS for row in measure(name, settle, slice_seconds, rounds)]
