"""The execution plane: processes, threads, decoding, first batches, epochs, and memory over a long run."""

import functools
import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import dataload
from benchmarks.timing import Case, compare

LARGE = 4 << 20  # float32 values of a batch of 16 MB
JPEGS = 2000


@functools.cache
def ready():
    """A batch of 16 MB that costs nothing to make, so that handing it over is all there is to time."""
    return np.random.default_rng(0).random((16, LARGE // 16), dtype=np.float32)


def ready_batch(_samples):
    return ready()[:]  # a view of its own: of one object, pickle would send what belongs together only once


def ready_tensor(_samples):
    import torch

    return torch.from_numpy(ready()[:])


def processes(batches=100):
    """Batches of 16 MB from worker processes, of which the consumer reads one value in a thousand."""
    count = batches * 16
    source = dataload.RangeSource(count)

    def copy_once():
        out = np.empty((16, LARGE // 16), np.float32)
        total = 0.0
        for _ in range(batches):
            np.copyto(out, ready())
            total += float(out[:, ::1024].sum(dtype=np.float64))
        return round(total)

    cases = [Case("one copy in this process (the limit)", copy_once)]
    loaders = []
    for workers in (1, 2):
        loader = dataload.Loader(source, batch_size=16, collate=ready_batch, num_workers=workers, executor="processes")
        loaders.append(loader)
        floor = 0.7 if workers == 2 else None
        cases.append(Case(f"Loader, {workers} processes", lambda loader=loader: consume(loader), floor=floor))
    try:
        from torch.utils.data import DataLoader
    except ImportError:
        print("torch is not installed: no peer")
    else:
        for workers in (1, 2):
            peer = DataLoader(
                source, 16, collate_fn=ready_tensor, num_workers=workers, persistent_workers=True, prefetch_factor=2
            )
            cases.append(Case(f"torch DataLoader, {workers} workers", lambda peer=peer: consume(peer)))
    rows = compare("16 MB batches from worker processes", cases, items=count, steps=batches, rounds=3)
    for loader in loaders:
        loader.close()
    return rows


def consume(batches):
    return round(sum(float(np.asarray(batch)[:, ::1024].sum(dtype=np.float64)) for batch in batches))


def busy(sample):
    """Half a millisecond that holds the GIL."""
    value = 0
    for number in range(10_000):
        value = (value * 31 + number) & 0xFFFF
    return {"index": sample["index"], "value": value}


def scaling(count=4000):
    """A CPU-bound transform in Python: one process, two, and two threads that share one GIL."""

    def epoch(loader):
        return sum(int(batch["value"].sum()) for batch in loader)

    def bare():
        return sum(busy({"index": index})["value"] for index in range(count))

    cases = [Case("no loader", bare)]
    loaders = []
    for executor, workers in (("processes", 1), ("processes", 2), ("threads", 2)):
        loader = dataload.Loader(
            dataload.RangeSource(count), batch_size=16, transform=busy, num_workers=workers, executor=executor
        )
        loaders.append(loader)
        floor = 1.8 if (executor, workers) == ("processes", 2) else None
        cases.append(Case(f"Loader, {workers} {executor}", lambda loader=loader: epoch(loader), floor=floor))
    rows = compare("A transform of pure Python", cases[1:], items=count, steps=count // 16, rounds=3)
    for loader in loaders:
        loader.close()
    return rows


def jpeg(count=JPEGS):
    """JPEGs of 500x375 through the loader, against a bare loop of two decoding threads."""
    import simplejpeg

    rng = np.random.default_rng(0)
    smooth = rng.integers(0, 255, (16, 12, 16, 3)).astype(np.float32).repeat(32, 1).repeat(32, 2)[:, :375, :500]
    images = [simplejpeg.encode_jpeg(np.ascontiguousarray(image.astype(np.uint8)), quality=90) for image in smooth]
    records = [{"jpg": images[index % 16]} for index in range(count)]

    def bare():
        with ThreadPoolExecutor(2) as pool:
            return sum(int(image[0, 0, 0]) for image in pool.map(simplejpeg.decode_jpeg, (r["jpg"] for r in records)))

    def decode(sample):
        return {"image": simplejpeg.decode_jpeg(sample["jpg"])}

    loader = dataload.Loader(records, batch_size=32, transform=decode, num_workers=2)

    def through_loader():
        return sum(int(batch["image"][:, 0, 0, 0].astype(np.int64).sum()) for batch in loader)

    rows = compare(
        "JPEG decoding, 500x375",
        [Case("two threads, no batches (the limit)", bare), Case("Loader, 2 threads", through_loader, floor=0.95)],
        items=count,
        steps=count // 32,
        rounds=5,
    )
    loader.close()
    return rows


def light(sample):
    """A few microseconds."""
    return {"index": sample["index"], "value": sample["index"] * 2}


def first_batch():
    """From the loader's construction to its first batch; and the wait at the boundary of epochs."""
    rows = []
    print("\nTime to the first batch, and the wait for the first batch of later epochs against that for others")
    source = dataload.RangeSource(640)
    for executor, aim in (("threads", 0.02), ("processes", 0.7)):
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            with dataload.Loader(source, batch_size=64, transform=light, num_workers=2, executor=executor) as loader:
                next(iter(loader))
                seconds.append(time.perf_counter() - start)
        with dataload.Loader(source, batch_size=64, transform=light, num_workers=2, executor=executor) as loader:
            waits, boundaries = [], []
            for epoch in range(20):
                batches = iter(loader)
                for step in range(len(loader)):
                    start = time.perf_counter()
                    next(batches)
                    if epoch:
                        (waits if step else boundaries).append(time.perf_counter() - start)
                    time.sleep(0.005)  # a model that takes longer than a batch
                next(batches, None)
        first, wait, boundary = (statistics.median(times) for times in (seconds, waits, boundaries))
        print(
            f"  {executor:12} first {first * 1e3:7.1f} ms (aim {aim * 1e3:.0f})  "
            f"wait {wait * 1e3:6.3f} ms, at boundaries {boundary * 1e3:6.3f} ms"
        )
        rows.append(
            {
                "title": "first batch",
                "case": executor,
                "seconds": first,
                "met": first < aim,
                "wait": wait,
                "boundary": boundary,
            }
        )
    return rows


def memory(batches=100_000):
    """Resident memory after a tenth of a long run and at its end."""
    rows = []
    print(f"\nResident memory over {batches:,} batches")
    for executor in ("threads", "processes"):
        with dataload.Loader(
            dataload.RangeSource(batches * 16), batch_size=16, shuffle=True, num_workers=2, executor=executor, epochs=1
        ) as loader:
            before = after = 0
            for step, _ in enumerate(loader):
                if step == batches // 10:
                    before = resident()
            after = resident()
        print(f"  {executor:12} {before / 1e6:8.1f} MB -> {after / 1e6:8.1f} MB")
        rows.append(
            {"title": "memory", "case": executor, "before": before, "after": after, "met": after < before + 8e6}
        )
    return rows


def resident():
    """Bytes in memory now; not the peak, which getrusage would give."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize()
