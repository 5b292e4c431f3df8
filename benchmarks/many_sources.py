"""Thousands of sources in files: opening them, their first epoch, and a loader over them beside one source."""

import gc
from collections import deque
from contextlib import ExitStack, closing
from time import process_time

import dataload
from benchmarks.costs import made_copies, own_memory
from benchmarks.harness import SEED, Case, aim, blobs, cpu_seconds_of, run_cases, through
from benchmarks.workloads import floats

SIZE = 1024
FORMATS = {
    "Syrah": ("syr", floats(SIZE // 4), {}, 0.7),
    "tar": ("tar", blobs(SIZE), {}, 0.7),
    "Parquet": ("parquet", floats(SIZE // 4), {}, 0.5),
    "LMDB": ("lmdb", blobs(SIZE), {"field": "bin"}, 0.7),
    "tokens": ("npy", None, {}, 0.7),
}


def many_sources(records=200_000, batch_size=256, counts=(1500, 5000)):
    """Sources in a mix of equal weights and one after another; records are in memory."""
    found = []
    for name, (suffix, different, options, floor) in FORMATS.items():
        for count in (1000,) if suffix == "lmdb" else counts:
            each = records // count
            paths = made_copies(f"source-{each}-", suffix, different, count, each, SIZE, **options)
            (one,) = made_copies(f"source-{each * count}-", suffix, different, 1, each * count, SIZE, **options)
            title = f"{count:,} sources, {name}, records of {SIZE} bytes, batch {batch_size}"
            found += _measured(title, one, paths, batch_size, floor)
    return found


def _measured(title, one, paths, batch_size, floor):
    window = {"window": SIZE // 4, "stride": SIZE // 4} if one.endswith(".npy") else {}
    with ExitStack() as held:

        def opened(path):
            return held.enter_context(closing(dataload.open(path, **window)))

        def epoch(source):
            settings = {"shuffle": "global", "seed": SEED, "num_workers": 0}
            return through(held.enter_context(dataload.Loader(source, batch_size=batch_size, **settings)))

        alone = epoch(opened(one))
        deque(alone(), maxlen=0)  # imports
        gc.collect()
        memory, begun = own_memory(), process_time()
        sources = [*map(opened, paths)]
        seconds, memory = process_time() - begun, (own_memory() - memory) / 1e6
        cases = [Case("one source", alone)]
        mixed = epoch(dataload.mix([(source, 1.0) for source in sources]))
        begun = process_time()
        batches = mixed()
        next(batches)
        first = process_time() - begun
        deque(batches, maxlen=0)
        whole = process_time() - begun
        joined = epoch(dataload.concat(sources))
        deque(joined(), maxlen=0)  # which opens and maps each file, as the first epoch of the mix did
        cases += [Case("mix", mixed, floor, compared=False), Case("concat", joined, floor, compared=False)]
        again = cpu_seconds_of(lambda: deque(mixed(), maxlen=0))
        rows = run_cases(title, cases, same=None)
    rows += [aim(title, "CPU seconds to open", seconds, most=0.6e-3 * len(paths))]
    rows += [aim(title, "MB of memory to open", memory, most=0.08 * len(paths))]
    return [
        *rows,
        {"title": title, "case": "CPU seconds of the first batch", "seconds": first},
        {"title": title, "case": "CPU seconds of the first epoch, and of the second", "seconds": whole, "again": again},
    ]
