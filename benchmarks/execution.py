"""The execution plane: processes, threads, iterators, first batches, epochs, and memory over a long run."""

import functools
import importlib.util
import resource
import statistics
import time
from contextlib import ExitStack
from functools import partial
from itertools import chain

import numpy as np

import dataload
from benchmarks.harness import Case, run_cases, seconds_of, show, through
from benchmarks.workloads import busy_numbers
from dataload._util.indexing import even_split
from dataload.streams import MultiStreamLoader

LARGE = 4 << 20  # float32 values of a batch of 16 MB
ROWS = 16


@functools.cache
def ready():
    """A batch of 16 MB that costs nothing to make, so that only handing it over is timed."""
    return np.random.default_rng(0).random((16, LARGE // 16), dtype=np.float32)


def ready_batch(_samples):
    return ready()[:]  # a new view each time: pickle would send one object only once


def touched(batch):
    """The rows of a batch, of which the consumer reads one value in a thousand."""
    return 16 if np.asarray(batch)[:, ::1024].sum(dtype=np.float64) else 0


def processes(batches=1000):
    """Batches of 16 MB from worker processes."""
    source = dataload.RangeSource(batches * 16)
    out = np.empty((16, LARGE // 16), np.float32)

    def copy_once():
        for _ in range(batches):
            np.copyto(out, ready())
            yield out

    cases = [Case("one copy in this process (the limit)", copy_once)]
    with ExitStack() as opened:
        for workers, floor in ((1, None), (2, 0.7)):
            loader = opened.enter_context(
                dataload.Loader(source, batch_size=16, collate=ready_batch, num_workers=workers, executor="processes")
            )
            cases.append(Case(f"Loader, {workers} processes", through(loader), floor))
        title = "16 MB batches from worker processes"
        return run_cases(title, cases, same=None, rows=touched, seconds=0.8)


def busy(sample):
    """Half a millisecond that holds the GIL."""
    return {"index": sample["index"], "value": next(busy_numbers(0, 1, 10_000))}


def scaling(count=40_000):
    """A CPU-bound transform in Python: one process, two, and two threads that share one GIL."""
    source, cases = dataload.RangeSource(count), []
    with ExitStack() as opened:
        for executor, workers, floor in (("processes", 1, None), ("processes", 2, 1.8), ("threads", 2, None)):
            loader = opened.enter_context(
                dataload.Loader(source, batch_size=16, transform=busy, num_workers=workers, executor=executor)
            )
            cases.append(Case(f"Loader, {workers} {executor}", through(loader), floor))
        return run_cases("A transform of pure Python", cases, same=None, seconds=1.5)


def iterators(count=50_000):
    """Batches of 16 rows, each from its own generator that holds the GIL for about a millisecond an item."""
    numbers = partial(busy_numbers, count=count, work=8_000)
    settings = {"batch_size": ROWS, "mode": "split", "shuffle": False}
    cases = []
    with ExitStack() as opened:
        for name, workers in (("1 process", 1), ("2 processes", 2), ("2 threads", 2), ("consumer's thread", 0)):
            executor, floor = "processes" if "process" in name else "threads", 1.8 if name == "2 processes" else None
            made = MultiStreamLoader(numbers, range(ROWS), num_workers=workers, executor=executor, **settings)
            cases.append(Case(f"MultiStreamLoader, {name}", partial(iter, opened.enter_context(made)), floor))
        if importlib.util.find_spec("torch") is None:
            print("torch is not installed: no peer (pip install torch)")
        else:
            named = [(f"one torch DataLoader for each of {groups} groups", groups) for groups in (1, 2)]
            cases += [Case(name, partial(_joined, _loaders_of_groups(numbers, groups))) for name, groups in named]
        title = "Generators of pure Python, one for each row"
        return run_cases(title, cases, rows=lambda _: ROWS, seconds=1.5)


def _loaders_of_groups(numbers, groups):
    """A torch DataLoader, with a worker, for each group of rows that follow iterators."""
    # https://medium.com/speechmatics/how-to-build-a-streaming-dataloader-with-pytorch-a66dd891d9dd
    from torch.utils.data import DataLoader, IterableDataset

    class Group(IterableDataset):
        def __init__(self, start, stop):
            self._rows = range(start, stop)

        def __iter__(self):
            return zip(*map(numbers, self._rows), strict=True)

    several = {"batch_size": None, "num_workers": 1, "persistent_workers": True}
    return [DataLoader(Group(*span), **several) for span in even_split(ROWS, groups)]


def _joined(loaders):
    return (np.fromiter(chain.from_iterable(parts), np.int64) for parts in zip(*loaders, strict=True))


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


def memory(batches=50_000):
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
