"""The cases: for each format the bare read, the source's own, and the loader over it."""

import mmap
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import dataload
from benchmarks.datasets import blobs, made, records
from benchmarks.timing import Case, compare
from dataload.samplers import GlobalShuffle

SEED = 1


def batches(count, batch_size):
    order = GlobalShuffle(count, SEED).indices(np.arange(count), epoch=0)
    return [order[start : start + batch_size] for start in range(0, count, batch_size)]


def consume(loaded, check):
    """What a training loop does: it holds a batch while the next one is made."""
    total = 0.0
    for batch in loaded:
        total += check(batch)
    return round(total, 1)


def column_sum(batch):
    return float(batch["x"][:, 0].astype(np.float64).sum())


def through_loader(source, batch_size, workers, check, **options):
    loader = dataload.Loader(source, batch_size=batch_size, shuffle=True, seed=SEED, num_workers=workers, **options)

    def run():
        loader.set_epoch(0)
        return consume(loader, check)

    return run


def syrah(floats, count, batch_size, floor, floor_of_two=None):
    path = made(f"{4 * floats}-{count}.syr", lambda: records(count, floats))
    source = dataload.open(path)
    # As bytes: the arrays start at byte 22, and np.take copies a whole array that is not aligned.
    stored = np.memmap(path, np.uint8, "r", 22, (count, 4 * floats))
    plan = batches(count, batch_size)

    def take():
        return consume(({"x": np.take(stored, rows, axis=0).view(np.float32)} for rows in plan), column_sum)

    def take_on_two_threads():
        with ThreadPoolExecutor(2) as pool:
            halves = [pool.submit(sum_of_takes, stored, plan[part::2]) for part in range(2)]
            return round(sum(half.result() for half in halves), 1)

    def read():
        return consume(map(source.read_batch, plan), column_sum)

    return compare(
        f"Syrah, {4 * floats} B records, batch {batch_size}",
        [
            Case("np.take of the mapped file (the limit)", take),
            Case("the same on two threads", take_on_two_threads),
            Case("source.read_batch", read),
            Case("Loader, no worker", through_loader(source, batch_size, 0, column_sum)),
            Case("Loader, 1 worker", through_loader(source, batch_size, 1, column_sum), floor),
            Case("Loader, 2 workers", through_loader(source, batch_size, 2, column_sum), floor_of_two),
        ],
        items=count,
        steps=len(plan),
    )


def sum_of_takes(stored, plan):
    total = 0.0
    for rows in plan:
        batch = np.take(stored, rows, axis=0)
        total += column_sum({"x": batch.view(np.float32)})
    return total


def lmdb_raw(size, count, batch_size):
    import lmdb

    path = made(f"{size}-{count}.lmdb", lambda: (r["bin"] for r in blobs(count, size)))
    plan = batches(count, batch_size)
    keys = list(source_keys(path))

    def check(values):
        return sum(map(len, values))

    def bare():
        env = lmdb.open(path, readonly=True, lock=False, readahead=False)
        with env.begin(buffers=True) as txn:
            total = consume(([bytes(txn.get(keys[i])) for i in rows.tolist()] for rows in plan), check)
        env.close()
        return total

    def read():
        with dataload.open(path) as opened:
            return consume(map(opened.read, plan), check)

    def loader(workers):
        def run():
            with dataload.open(path) as opened:
                return through_loader(opened, batch_size, workers, check)()

        return run

    return compare(
        f"LMDB, {size} B values, batch {batch_size}",
        [
            Case("bytes(txn.get) (the limit)", bare),
            Case("source.read", read),
            Case("Loader, no worker", loader(0)),
            Case("Loader, 1 worker", loader(1), 0.8),
        ],
        items=count,
        steps=len(plan),
    )


def source_keys(path, name=None):
    import lmdb

    with lmdb.open(path, readonly=True, lock=False, max_dbs=4) as env:
        database = env.open_db(name) if name else None
        with env.begin(db=database) as txn:
            yield from list(txn.cursor().iternext(values=False))


def torchrecord(floats, count, batch_size):
    import lmdb

    from dataload.codecs.tensorprotos import decode

    path = made(f"{4 * floats}-{count}.torchrecord", lambda: records(count, floats), num_records=count)
    plan = batches(count, batch_size)
    keys = list(source_keys(path, b"db0"))

    def bare():
        with lmdb.open(path, readonly=True, lock=False, readahead=False, max_dbs=1) as env:
            database = env.open_db(b"db0")
            with env.begin(db=database, buffers=True) as txn:
                decoded = ([decode(txn.get(keys[i]))["x"] for i in rows.tolist()] for rows in plan)
                return consume(({"x": np.stack(values)} for values in decoded), column_sum)

    def unparsed():
        with lmdb.open(path, readonly=True, lock=False, readahead=False, max_dbs=1) as env:
            database = env.open_db(b"db0")
            with env.begin(db=database, buffers=True) as txn:
                start = bytes(txn.get(keys[0])).index(decode(txn.get(keys[0]))["x"].tobytes())
                sliced = (
                    [np.frombuffer(txn.get(keys[i]), "<f4", floats, start) for i in rows.tolist()] for rows in plan
                )
                return consume(({"x": np.stack(values)} for values in sliced), column_sum)

    def read():
        with dataload.open(path) as source:
            return consume(map(source.read_batch, plan), column_sum)

    def loader(workers):
        def run():
            with dataload.open(path) as source:
                return through_loader(source, batch_size, workers, column_sum)()

        return run

    return compare(
        f"TorchRecord, {4 * floats} B records, batch {batch_size}",
        [
            Case("txn.get, decode, np.stack", bare),
            Case("txn.get, a fixed slice, np.stack: no parsing", unparsed),
            Case("source.read_batch", read),
            Case("Loader, no worker", loader(0)),
            Case("Loader, 1 worker", loader(1), 0.8),
        ],
        items=count,
        steps=len(plan),
    )


def array_record(size, count, batch_size, options, floor, floor_of_loader=None):
    from array_record.python.array_record_module import ArrayRecordReader

    mapped = "uncompressed" in options
    name = f"{size}-{count}{'-uncompressed' * mapped}.array_record"
    path = made(name, lambda: (r["bin"] for r in blobs(count, size)), options=options)
    plan = batches(count, batch_size)
    source = dataload.open(path)

    def check(values):
        return sum(map(len, values))

    def bare():
        reader = ArrayRecordReader(path, "readahead_buffer_size:0", file_reader_buffer_size=4096)
        total = consume((reader.read(rows.tolist()) for rows in plan), check)
        reader.close()
        return total

    return compare(
        f"ArrayRecord, {options}, {size} B records, batch {batch_size}",
        [
            Case("reader.read(list)" if mapped else "reader.read(list) (the limit)", bare),
            Case("source.read", lambda: consume(map(source.read, plan), check), floor),
            Case("Loader, no worker", through_loader(source, batch_size, 0, check)),
            Case("Loader, 1 worker", through_loader(source, batch_size, 1, check), floor_of_loader),
        ],
        items=count,
        steps=len(plan),
        rounds=5,
    )


def tar(size, count, batch_size):
    path = made(f"{size}-{count}.tar", lambda: blobs(count, size))
    plan = batches(count, batch_size)
    source = dataload.open(path, fields=["bin"])
    with open(path, "rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    lines = Path(path).with_suffix(".idx").read_text().splitlines()[1:]
    places = [(int(start), int(start) + int(length)) for _, start, length, _ in map(str.split, lines)]

    def check(batch):
        return sum(map(len, batch["bin"]))

    def bare():
        return consume(({"bin": [mapped[a:b] for a, b in (places[i] for i in rows.tolist())]} for rows in plan), check)

    return compare(
        f"tar with index, {size} B components, batch {batch_size}",
        [
            Case("slices of a map (the limit)", bare),
            Case("source.read_batch", lambda: consume(map(source.read_batch, plan), check)),
            Case("Loader, no worker", through_loader(source, batch_size, 0, check)),
            Case("Loader, 1 worker", through_loader(source, batch_size, 1, check), 0.8),
        ],
        items=count,
        steps=len(plan),
    )


def overhead():
    """What a batch costs when reading costs nothing."""
    count, batch_size = 1_000_000, 256
    source = dataload.RangeSource(count)
    plan = batches(count, batch_size)

    def check(batch):
        return int(batch["index"][0])

    return compare(
        "Loader over records that cost nothing (aim: under 50 us a batch more than read_batch)",
        [
            Case("source.read_batch", lambda: consume(map(source.read_batch, plan), check)),
            Case("Loader, no worker", through_loader(source, batch_size, 0, check)),
            Case("Loader, 1 worker", through_loader(source, batch_size, 1, check)),
            Case("Loader, 2 workers", through_loader(source, batch_size, 2, check)),
        ],
        items=count,
        steps=len(plan),
    )


def opening():
    """Time to open a million records, and what that holds in memory."""
    count = 1_000_000
    paths = {
        "Syrah": made(f"64-{count}.syr", lambda: records(count, 16)),
        "TorchRecord": made(f"64-{count}.torchrecord", lambda: records(count, 16), num_records=count),
        "LMDB": made(f"64-{count}.lmdb", lambda: (r["bin"] for r in blobs(count, 64))),
        "ArrayRecord": made(f"64-{count}.array_record", lambda: (r["bin"] for r in blobs(count, 64))),
        "ArrayRecord, mapped": made(
            f"64-{count}-uncompressed.array_record",
            lambda: (r["bin"] for r in blobs(count, 64)),
            options="group_size:1,uncompressed",
        ),
        "tar with index": made(f"64-{count}.tar", lambda: blobs(count, 64)),
    }
    rows = []
    print(f"\nOpening {count:,} records (aim: < 0.3 s, < 0.01 s with a cached index, <= 16 bytes a component held)")
    print(f"  {'':20} {'seconds':>8} {'spread':>13} {'bytes held a record':>20}")
    cases = [(name, path, {"cache": False} if name.startswith("tar") else {}, 0.3) for name, path in paths.items()]
    cases.append(("tar, index cached", paths["tar with index"], {}, 0.01))
    for name, path, options, aim in cases:
        dataload.open(path, **options).close()  # imports, warms the page cache and writes the index cache

        def opened(path=path, options=options):
            source = dataload.open(path, **options)
            assert len(source) == count
            return source

        opened().close()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            opened().close()
            times.append(time.perf_counter() - start)
        tracemalloc.start()
        with opened():
            held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        median = sorted(times)[2]
        verdict = "met" if median < aim and held / count <= 16 else "NOT MET"
        print(f"  {name:20} {median:8.4f} {min(times):6.3f}-{max(times):6.3f} {held / count:20.2f}  {verdict}")
        rows.append({"title": "open", "case": name, "seconds": median, "bytes_per_record": held / count})
    return rows
