"""The execution plane: processes, threads, decoding, first batches, epochs, and memory over a long run."""

import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import dataload
from benchmarks.timing import Case, compare

LARGE = 4 << 20  # float32 values of a batch of 16 MB
JPEGS = 2000


class Large:
    """Records of 1 MB that cost one copy each: 16 of them are a batch of 16 MB."""

    def __init__(self, count):
        self._count = count
        self._values = np.random.default_rng(0).random(LARGE // 16, dtype=np.float32)

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        return self._values

    def __getitems__(self, indices):
        return [self._values] * len(indices)


def stack(samples):
    """One copy into a batch."""
    return np.stack(samples)


def torch_stack(samples):
    import torch

    return torch.from_numpy(np.stack(samples))


def processes(batches=60):
    """Batches of 16 MB from worker processes, which the consumer reads once."""
    count = batches * 16
    source = Large(count)

    def copy_once():
        total = 0.0
        out = np.empty((16, LARGE // 16), np.float32)
        for _ in range(batches):
            np.stack([source[0]] * 16, out=out)
            total += float(out[:, ::1024].sum(dtype=np.float64))
        return round(total)

    cases = [Case("np.stack into one array, in this process (the limit)", copy_once)]
    loaders = []
    for workers in (1, 2):
        loader = dataload.Loader(source, batch_size=16, collate=stack, num_workers=workers, executor="processes")
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
                source, 16, collate_fn=torch_stack, num_workers=workers, persistent_workers=True, prefetch_factor=2
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


def first_batch():
    """From the loader's construction to its first batch; and the wait at the boundary of epochs."""
    rows = []
    print("\nTime to the first batch, and the longest wait at five boundaries of epochs against the median wait")
    for executor, aim in (("threads", 0.02), ("processes", 0.7)):
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            with dataload.Loader(
                dataload.RangeSource(20_000), batch_size=64, transform=busy, num_workers=2, executor=executor
            ) as loader:
                next(iter(loader))
                seconds.append(time.perf_counter() - start)
        with dataload.Loader(
            dataload.RangeSource(640), batch_size=64, transform=busy, num_workers=2, executor=executor
        ) as loader:
            waits, boundaries = [], []
            for _ in range(6):
                batches = iter(loader)
                for step in range(len(loader)):
                    start = time.perf_counter()
                    next(batches)
                    (boundaries if step == 0 else waits).append(time.perf_counter() - start)
                    time.sleep(0.04)  # a model that takes longer than a batch
                next(batches, None)
        median, boundary = statistics.median(waits), max(boundaries[1:])
        first = statistics.median(seconds)
        print(
            f"  {executor:12} first {first * 1e3:7.1f} ms (aim {aim * 1e3:.0f})  "
            f"wait {median * 1e3:6.2f} ms, at boundaries up to {boundary * 1e3:6.2f} ms"
        )
        rows.append(
            {
                "title": "first batch",
                "case": executor,
                "seconds": first,
                "met": first < aim,
                "wait": median,
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
