"""The execution plane: processes, threads, decoding, first batches, epochs, iterators, and memory over a long run."""

import functools
import importlib.util
import itertools
import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np

import dataload
from benchmarks.harness import Case, run_cases, show
from benchmarks.peers import torch_loader
from dataload.bench import readings
from dataload.bench.data import made_data
from dataload.bench.task import Task
from dataload.bench.timing import seconds_of
from dataload.bench.workloads import busy_numbers, get_workload

LARGE = 4 << 20  # float32 values of a batch of 16 MB
ROWS = 16


@functools.cache
def ready():
    """A batch of 16 MB that costs nothing to make, so that only handing it over is timed."""
    return np.random.default_rng(0).random((16, LARGE // 16), dtype=np.float32)


def ready_batch(_samples):
    return ready()[:]  # a new view each time: pickle would send one object only once


def ready_tensor(samples):
    import torch

    return torch.from_numpy(ready_batch(samples))


def sum_values(batches):
    return round(sum(float(np.asarray(batch)[:, ::1024].sum(dtype=np.float64)) for batch in batches))


def processes(batches=100):
    """Batches of 16 MB from worker processes; the consumer reads one value in a thousand."""
    count = batches * 16
    source = dataload.RangeSource(count)

    def copy_once():
        out = np.empty((16, LARGE // 16), np.float32)
        return sum_values(np.copyto(out, ready()) or out for _ in range(batches))

    cases = [Case("one copy in this process (the limit)", copy_once)]
    with ExitStack() as opened:
        for workers, floor in ((1, None), (2, 0.7)):
            loader = opened.enter_context(
                dataload.Loader(source, batch_size=16, collate=ready_batch, num_workers=workers, executor="processes")
            )
            cases.append(Case(f"Loader, {workers} processes", partial(sum_values, loader), floor))
        try:
            from torch.utils.data import DataLoader
        except ImportError:
            print("torch is not installed: no peer")
        else:
            several = {"collate_fn": ready_tensor, "persistent_workers": True, "prefetch_factor": 2}
            for workers in (1, 2):
                peer = DataLoader(source, 16, num_workers=workers, **several)
                cases.append(Case(f"torch DataLoader, {workers} workers", partial(sum_values, peer)))
        return run_cases("16 MB batches from worker processes", cases, items=count, steps=batches, rounds=3)


def busy(sample):
    """Half a millisecond that holds the GIL."""
    return {"index": sample["index"], "value": next(busy_numbers(0, 1, 10_000))}


def scaling(count=4000):
    """A CPU-bound transform in Python: one process, two, and two threads that share one GIL."""

    def epoch(loader):
        return sum(int(batch["value"].sum()) for batch in loader)

    source, cases = dataload.RangeSource(count), []
    with ExitStack() as opened:
        for executor, workers, floor in (("processes", 1, None), ("processes", 2, 1.8), ("threads", 2, None)):
            loader = opened.enter_context(
                dataload.Loader(source, batch_size=16, transform=busy, num_workers=workers, executor=executor)
            )
            cases.append(Case(f"Loader, {workers} {executor}", partial(epoch, loader), floor))
        return run_cases("A transform of pure Python", cases, items=count, steps=count // 16, rounds=3)


def jpeg(count=2000):
    """JPEGs of 500x375 through the loader, against a bare loop of two decoding threads."""
    import simplejpeg

    data = made_data(get_workload("jpeg"), count)

    def decode(sample):
        return {"image": simplejpeg.decode_jpeg(sample["jpg"])}

    def bare():
        with ThreadPoolExecutor(2) as pool:
            files = (record["jpg"] for record in data.records)
            return sum(int(image[0, 0, 0]) for image in pool.map(simplejpeg.decode_jpeg, files))

    with dataload.Loader(data.records, batch_size=32, transform=decode, num_workers=2) as loader:

        def through_loader():
            return sum(int(batch["image"][:, 0, 0, 0].astype(np.int64).sum()) for batch in loader)

        cases = [Case("two threads, no batches (the limit)", bare), Case("Loader, 2 threads", through_loader, 0.95)]
        return run_cases("JPEG decoding, 500x375", cases, items=count, steps=count // 32, rounds=5)


def iterators(steps=30):
    """Batches of 16 rows, each from its own generator that holds the GIL for about a millisecond an item."""
    readers = [
        (f"MultiStreamLoader, {n} {executor}" if n else "MultiStreamLoader, consumer's thread", n, executor)
        for executor, n in (("processes", 1), ("processes", 2), ("threads", 2), ("threads", 0))
    ]
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: no peer")
    else:
        readers += [(f"one torch DataLoader for each of {n} groups", n, None) for n in (1, 2)]
    cases = []
    with ExitStack() as opened:
        for name, workers, executor in readers:
            options = {"open": {"records": ROWS * 500, "work": 8_000}, "executor": executor}
            settings = {"kind": "dataload", "reading": "", "path": "", "format": "generator", "order": "sequential"}
            task = Task(workload="streams", name=name, workers=workers, batch_size=ROWS, options=options, **settings)
            reading = readings.multistream(task) if executor else torch_loader.groups(task)
            opened.callback(reading.close)
            batches = map(reading.columns, reading.batches(0))

            def run(batches=batches):
                return sum(int(batch["data"].sum()) for batch in itertools.islice(batches, steps))

            cases.append(Case(name, run, 1.8 if (executor, workers) == ("processes", 2) else None))
        title = "Generators of pure Python, one for each row"
        return run_cases(title, cases, items=steps * ROWS, steps=steps, rounds=3)


def light(sample):
    """A few microseconds."""
    return {"index": sample["index"], "value": sample["index"] * 2}


def first_batch():
    """The time from the loader's construction to its first batch, and the wait where one epoch follows another."""
    rows = []
    for executor, aim in (("threads", 0.02), ("processes", 0.7)):
        settings = {"batch_size": 64, "transform": light, "num_workers": 2, "executor": executor}
        opened = partial(dataload.Loader, dataload.RangeSource(640), **settings)
        seconds, waits, boundaries = [], [], []
        for _ in range(5):
            start = time.perf_counter()
            with opened() as loader:
                next(iter(loader))
                seconds.append(time.perf_counter() - start)
        with opened() as loader:
            for epoch in range(20):
                batches = iter(loader)
                for step in range(len(loader)):
                    wait = seconds_of(partial(next, batches))
                    if epoch:
                        (waits if step else boundaries).append(wait)
                    time.sleep(0.005)  # a model that takes longer than a batch
                next(batches, None)
        first, wait, boundary = (statistics.median(times) for times in (seconds, waits, boundaries))
        rows.append({"case": executor, "seconds": first, "met": first < aim, "wait": wait, "boundary": boundary})
    heading = "Seconds to the first batch (aims: 0.02 and 0.7), for other batches, and at the boundaries of epochs"
    return show("first batch", heading, rows)


def memory(batches=100_000):
    """Resident memory after a tenth of a long run and at its end."""
    rows = []
    source = dataload.RangeSource(batches * 16)
    for executor in ("threads", "processes"):
        settings = {"batch_size": 16, "shuffle": True, "num_workers": 2, "executor": executor, "epochs": 1}
        with dataload.Loader(source, **settings) as loader:
            before = after = 0
            for step, _ in enumerate(loader):
                if step == batches // 10:
                    before = resident()
            after = resident()
        rows.append({"case": executor, "before": before, "after": after, "met": after < before + 8e6})
    return show("memory", f"Bytes of resident memory after a tenth of {batches:,} batches, and after all", rows)


def resident():
    """Bytes in memory now; getrusage would give the peak."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize()
