"""Mixtures of 2 to 5,000 sources: the cost of an index, how closely weights are followed, and the rate of a loader."""

import json
import os
import subprocess
import sys
import time
from functools import partial

import numpy as np

import dataload
from benchmarks.harness import cpu_seconds_of, seconds_of, show
from benchmarks.peers import blends
from dataload.samplers import GlobalShuffle, Mixture, Sequential

COUNTS = (2, 100, 5000)
BLOCK, BLOCKS, CHECKED = 16_384, 12, 60_000


def mixture(count, shuffles, **limits):
    parts = [GlobalShuffle(10**6 + n, n) if shuffles else Sequential(10**6 + n) for n in range(count)]
    return Mixture(parts, blends.weights_of(count), "never", **limits)


def cost(order):
    """Nanoseconds of CPU an index, in blocks as a loader computes them, after the first two."""
    blocks = [np.arange(start, start + BLOCK) for start in range(0, BLOCKS * BLOCK, BLOCK)]
    seconds = [cpu_seconds_of(partial(order.indices, block, epoch=0)) for block in blocks]
    return 1e9 * np.mean(seconds[2:]) / BLOCK


def costs(name, build, far):
    """The time to build a mixture and to look far ahead, and the cost of an index."""
    begun = time.perf_counter()
    order = build()
    built = time.perf_counter() - begun
    seconds = seconds_of(lambda: order.indices(np.array([far(order)]), epoch=0))
    return {"case": name, "ns_an_index": cost(order), "built_seconds": built, "far_seconds": seconds}


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


def changes(count, number):
    """What a state and a change of weights cost, and what a resumed run waits for, after so many changes."""
    parts = {f"s{n}": dataload.MemorySource({"x": np.full(40, n)}) for n in range(count)}
    mixed = dataload.mix(parts, dict.fromkeys(parts, 1.0), stop="never")
    loader, again = (dataload.Loader(mixed, batch_size=256, shuffle="global") for _ in range(2))
    batches, rng = iter(loader), np.random.default_rng(0)
    next(batches)
    plain, changing, remaking = len(json.dumps(loader.state_dict())), [], []
    for _ in range(number):
        changing.append(cpu_seconds_of(lambda: loader.change_weights(rng.random(count).tolist())))
        remaking.append(cpu_seconds_of(lambda: next(batches)))
    state = json.loads(json.dumps(loader.state_dict()))
    again.state_dict()  # fingerprints, which any state needs
    return {
        "case": f"{count:,} sources, {number:,} changes",
        "state_bytes": plain,
        "bytes_a_source_and_change": (len(json.dumps(state)) - plain) / count / len(state["changes"]),
        "change_ms": 1e3 * np.median(changing),
        "remaking_ms": 1e3 * np.median(remaking),
        "resume_ms": 1e3 * cpu_seconds_of(lambda: again.load_state_dict(state)),
    }


def mixtures():
    rows = []
    for count in COUNTS:
        for shuffles in (False, True):
            name = f"{count:,} sources, {'global shuffles' if shuffles else 'in order'}"
            rows.append(costs(name, partial(mixture, count, shuffles), lambda _: 10**12))
    for count in COUNTS:
        build = partial(mixture, count, False, max_epochs=4)
        rows.append(costs(f"{count:,} sources with limits", build, lambda order: len(order) // 2))
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
