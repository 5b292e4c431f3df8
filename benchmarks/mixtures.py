"""Mixtures of 2 to 5,000 sources: the cost of an index, how closely weights are followed, and the rate of a loader."""

import json
import os
import subprocess
import sys
import time
from functools import cache

import numpy as np

import dataload
from benchmarks.harness import show
from benchmarks.peers import blends
from dataload.samplers import GlobalShuffle, Mixture, Sequential

COUNTS = (2, 100, 5000)
BLOCK, BLOCKS, CHECKED = 16_384, 12, 60_000


@cache
def mixture(count, shuffles, window=None):
    parts = [GlobalShuffle(10**6 + n, n) if shuffles else Sequential(10**6 + n) for n in range(count)]
    return Mixture(parts, blends.weights_of(count), "never", window=window)


def cost(order):
    """Nanoseconds of CPU an index, in blocks as a loader computes them, after the first two."""
    seconds = []
    for block in range(BLOCKS):
        positions = np.arange(block * BLOCK, (block + 1) * BLOCK)
        begun = time.process_time()
        order.indices(positions, epoch=0)
        seconds.append(time.process_time() - begun)
    return 1e9 * np.mean(seconds[2:]) / BLOCK


def ours(count):
    """Batches of a loader over a mix, as numbers of sources; see `blends.measured`."""
    sizes = enumerate(blends.sizes_of(count, CHECKED))
    parts = {f"s{n}": dataload.MemorySource({"x": np.full(size, n)}) for n, size in sizes}
    yield
    weights = dict(zip(parts, blends.weights_of(count).tolist(), strict=True))
    mixed = dataload.mix(parts, weights, stop="never", with_source=True)
    for batch in dataload.Loader(mixed, batch_size=blends.BATCH, shuffle="global"):
        yield batch["source"]


def beside(count):
    """Our loader and others, with the same weights."""
    yield {"case": f"{count:,} sources, dataload", **blends.measured(ours(count), count, CHECKED)}
    blend = os.environ.get("BLEND_PYTHON", sys.executable)
    for name in blends.NAMES:
        python = os.environ.get("STREAMING_PYTHON", blend) if name == "Stream" else blend
        command = [python, blends.__file__, name, str(count), str(CHECKED)]
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if made.returncode:
            print(f"{name} is left out: {(made.stderr.splitlines() or ['it failed'])[-1]}")
        else:
            yield {"case": f"{count:,} sources, {name}", **json.loads(made.stdout.splitlines()[-1])}


def seconds_of(act):
    begun = time.process_time()
    act()
    return time.process_time() - begun


def changes(count, number):
    """What a state and a change of weights cost, and what a resumed run waits for, after so many changes."""
    parts = {f"s{n}": dataload.MemorySource({"x": np.full(40, n)}) for n in range(count)}
    mixed = dataload.mix(parts, dict.fromkeys(parts, 1.0), stop="never")
    loader, again = (dataload.Loader(mixed, batch_size=256, shuffle="global") for _ in range(2))
    batches, rng = iter(loader), np.random.default_rng(0)
    next(batches)
    plain, changing, remaking = len(json.dumps(loader.state_dict())), [], []
    for _ in range(number):
        changing.append(seconds_of(lambda: loader.change_weights(rng.random(count).tolist())))
        remaking.append(seconds_of(lambda: next(batches)))
    state = json.loads(json.dumps(loader.state_dict()))
    again.state_dict()  # fingerprints, which any state needs
    return {
        "case": f"{count:,} sources, {number:,} changes",
        "state_bytes": plain,
        "bytes_a_source_and_change": (len(json.dumps(state)) - plain) / count / len(state["changes"]),
        "change_ms": 1e3 * np.median(changing),
        "remaking_ms": 1e3 * np.median(remaking),
        "resume_ms": 1e3 * seconds_of(lambda: again.load_state_dict(state)),
    }


def mixtures():
    rows = []
    for count in COUNTS:
        for shuffles in (False, True):
            begun = time.perf_counter()
            order = mixture(count, shuffles)
            built, begun = time.perf_counter() - begun, time.perf_counter()
            order.indices(np.array([10**12]), epoch=0)
            far = time.perf_counter() - begun
            name = f"{count:,} sources, {'global shuffles' if shuffles else 'in order'}"
            rows.append({"case": name, "ns_an_index": cost(order), "built_seconds": built, "far_seconds": far})
    for count in COUNTS:
        parts, begun = [Sequential(10**6 + n) for n in range(count)], time.perf_counter()
        limited = Mixture(parts, blends.weights_of(count), "never", max_epochs=4)
        built, begun = time.perf_counter() - begun, time.perf_counter()
        limited.indices(np.array([len(limited) // 2]), epoch=0)
        far = time.perf_counter() - begun
        rows.append(
            {
                "case": f"{count:,} sources with limits",
                "ns_an_index": cost(limited),
                "built_seconds": built,
                "far_seconds": far,
            }
        )
    found = show("mixtures", "Mixture, weights 1/rank^1.2: aims 60 ns with 2 sources, 100 ns with more", rows)
    rows = [changes(count, number) for count, number in ((100, 1000), (5000, 100))]
    found += show(
        "mixture-changes", "Changes of weights: under 1,024 bytes without, 32 a source and change, 20 ms", rows
    )
    rows = []
    for count in (10, 100, 1000):
        rows += beside(count)
    title = f"{CHECKED:,} records beside others: CPU seconds to the first, records a CPU second, deviation in any 1,000"
    found += show("mixture-peers", title, rows)
    rows = []
    for count in (1, 1500, 5000):
        parts = np.array_split(np.arange(1_500_000), count)
        sources = [(dataload.MemorySource({"x": part, "y": part * 0.5}), 1.0) for part in parts]
        loader = dataload.Loader(dataload.mix(sources), batch_size=256, shuffle="global", epochs=1)
        batches, begun = iter(loader), time.perf_counter()
        next(batches)
        first, begun = time.perf_counter() - begun, time.perf_counter()
        read = sum(len(batch["x"]) for _, batch in zip(range(3000), batches, strict=False))
        rate = read / (time.perf_counter() - begun)
        rows.append({"case": f"{count:,} sources in memory", "rows_per_second": rate, "first_seconds": first})
    return found + show("mixture-loader", "A loader over the same records in so many sources", rows)
