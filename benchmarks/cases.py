"""The formats: for each one the bare read, the source's own, and the loader over it."""

import mmap
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

import dataload
from benchmarks.harness import ROOT, ROUNDS, Case, batches, blobs, consume, made, run_cases, show, through_loader, total
from dataload.bench.data import made_data, write
from dataload.bench.timing import median_seconds
from dataload.bench.workloads import floats, get_workload
from dataload.sources.tokens.reader import TokenSource

T = 1024
ROWS = 64
TOKENS = 50_000_000


def column_sum(batch):
    return float(batch["x"][:, 0].astype(np.float64).sum())


def bytes_sum(values):
    return sum(map(len, values))


def over_format(title, limits, opened, check, plan, floors, *, read="read_batch", rounds=ROUNDS):
    """Time bare reads, the source, and the loader; the first of the `limits` is the base of all ratios.

    `opened` returns a context with the open source, whose method `read` returns a batch; `plan` has the indices of each
    batch, and `floors` the aims of the loader by number of workers, and of the source by its method.
    """
    count, batch_size = sum(map(len, plan)), len(plan[0])

    def through_source():
        with opened() as source:
            return consume(map(getattr(source, read), plan), check)

    def loading(workers):
        with opened() as source:
            return through_loader(source, batch_size, workers, check)()

    names = {0: "Loader, no worker", 1: "Loader, 1 worker", 2: "Loader, 2 workers"}
    loaders = [Case(names[n], partial(loading, n), floors[n]) for n in names if n in floors]
    cases = [*limits, Case(f"source.{read}", through_source, floors.get(read)), *loaders]
    return run_cases(title, cases, items=count, steps=len(plan), rounds=rounds)


def syrah(size, count, batch_size, floor, floor_of_two=None):
    path = made(f"{4 * size}-{count}.syr", floats(size), count)
    # As bytes: the arrays start at byte 22, and np.take copies a whole array that is not aligned.
    stored = np.memmap(path, np.uint8, "r", 22, (count, 4 * size))
    plan = batches(count, batch_size)

    def take(part):
        return total(({"x": np.take(stored, rows, axis=0).view(np.float32)} for rows in part), column_sum)

    def take_on_two_threads():
        with ThreadPoolExecutor(2) as pool:
            return round(sum(pool.map(take, (plan[::2], plan[1::2]))), 1)

    limits = [
        Case("np.take of the mapped file (the limit)", lambda: round(take(plan), 1)),
        Case("the same on two threads", take_on_two_threads),
    ]
    opened = partial(nullcontext, dataload.open(path))
    title = f"Syrah, {4 * size} B records, batch {batch_size}"
    return over_format(title, limits, opened, column_sum, plan, {0: None, 1: floor, 2: floor_of_two})


@contextmanager
def lmdb_values(path, name=None):
    """`get` of a transaction; LMDB refuses to open an environment twice in a process, so it is closed each time."""
    import lmdb

    with lmdb.open(path, readonly=True, lock=False, readahead=False, max_dbs=1) as environment:
        database = environment.open_db(name) if name else None
        with environment.begin(db=database, buffers=True) as transaction:
            yield transaction


def lmdb_keys(path, name=None):
    with lmdb_values(path, name) as transaction:
        return [bytes(key) for key in transaction.cursor().iternext(values=False)]


def lmdb_raw(size, count, batch_size):
    path = made(f"{size}-{count}.lmdb", blobs(size), count, field="bin")
    plan, keys = batches(count, batch_size), lmdb_keys(path)

    def bare():
        with lmdb_values(path) as txn:
            return consume(([bytes(txn.get(keys[i])) for i in rows.tolist()] for rows in plan), bytes_sum)

    limits = [Case("bytes(txn.get) (the limit)", bare)]
    title = f"LMDB, {size} B values, batch {batch_size}"
    opened = partial(dataload.open, path)
    return over_format(title, limits, opened, bytes_sum, plan, {0: None, 1: 0.8}, read="read")


def torchrecord(size, count, batch_size):
    from dataload.codecs.tensorprotos import decode

    path = made(f"{4 * size}-{count}.torchrecord", floats(size), count, num_records=count)
    plan, keys = batches(count, batch_size), lmdb_keys(path, b"db0")

    def stack(value_of):
        with lmdb_values(path, b"db0") as txn:
            value = value_of(txn)
            stacked = ({"x": np.stack([value(txn.get(keys[i])) for i in rows.tolist()])} for rows in plan)
            return consume(stacked, column_sum)

    def parsing(_txn):
        return lambda data: decode(data)["x"]

    def slicing(txn):
        first = txn.get(keys[0])
        start = bytes(first).index(decode(first)["x"].tobytes())
        return lambda data: np.frombuffer(data, "<f4", size, start)

    limits = [
        Case("txn.get, decode, np.stack", partial(stack, parsing)),
        Case("txn.get, a fixed slice, np.stack: no parsing", partial(stack, slicing)),
    ]
    title = f"TorchRecord, {4 * size} B records, batch {batch_size}"
    return over_format(title, limits, partial(dataload.open, path), column_sum, plan, {0: None, 1: 0.8})


def array_record(size, count, batch_size, options, floor, floor_of_loader=None):
    from array_record.python.array_record_module import ArrayRecordReader

    mapped = "uncompressed" in options
    name = f"{size}-{count}{'-uncompressed' * mapped}.array_record"
    path = made(name, blobs(size), count, field="bin", options=options)
    plan = batches(count, batch_size)

    def bare():
        reader = ArrayRecordReader(path, "readahead_buffer_size:0", file_reader_buffer_size=4096)
        found = consume((reader.read(rows.tolist()) for rows in plan), bytes_sum)
        reader.close()
        return found

    limits = [Case("reader.read(list)" if mapped else "reader.read(list) (the limit)", bare)]
    title = f"ArrayRecord, {options}, {size} B records, batch {batch_size}"
    opened = partial(nullcontext, dataload.open(path))
    floors = {"read": floor, 0: None, 1: floor_of_loader}
    return over_format(title, limits, opened, bytes_sum, plan, floors, read="read", rounds=5)


def tar(size, count, batch_size):
    path = made(f"{size}-{count}.tar", blobs(size), count)
    plan = batches(count, batch_size)
    with open(path, "rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    lines = Path(path).with_suffix(".idx").read_text().splitlines()[1:]
    spans = [(int(start), int(start) + int(length)) for _, start, length, _ in map(str.split, lines)]

    def check(batch):
        return bytes_sum(batch["bin"])

    def bare():
        return consume(({"bin": [mapped[a:b] for a, b in (spans[i] for i in rows.tolist())]} for rows in plan), check)

    opened = partial(nullcontext, dataload.open(path, fields=["bin"]))
    title = f"tar with index, {size} B components, batch {batch_size}"
    return over_format(title, [Case("slices of a map (the limit)", bare)], opened, check, plan, {0: None, 1: 0.8})


def overhead():
    """The cost of a batch when reading costs nothing."""
    title = "Loader over records that cost nothing (aim: under 50 us a batch more than read_batch)"
    opened = partial(nullcontext, dataload.RangeSource(1_000_000))
    floors = {0: None, 1: None, 2: None}
    return over_format(title, [], opened, lambda batch: int(batch["index"][0]), batches(1_000_000, 256), floors)


def opening(count=1_000_000):
    """The time to open a million records, and the memory that they hold."""
    raw = {"field": "bin", "options": "group_size:1,uncompressed"}
    tar = made(f"64-{count}.tar", blobs(64), count)
    cases = [
        ("Syrah", made(f"64-{count}.syr", floats(16), count), {}, 0.3),
        ("TorchRecord", made(f"64-{count}.torchrecord", floats(16), count, num_records=count), {}, 0.3),
        ("LMDB", made(f"64-{count}.lmdb", blobs(64), count, field="bin"), {}, 0.3),
        ("ArrayRecord", made(f"64-{count}.array_record", blobs(64), count, field="bin"), {}, 0.3),
        ("ArrayRecord, mapped", made(f"64-{count}-uncompressed.array_record", blobs(64), count, **raw), {}, 0.3),
        ("tar with index", tar, {"cache": False}, 0.3),
        ("tar, index cached", tar, {}, 0.01),
    ]
    rows = []
    for name, path, options, aim in cases:
        opened = partial(dataload.open, path, **options)
        for _ in range(2):  # imports, warms the page cache, and writes the cached table
            with opened() as source:
                assert len(source) == count
        seconds = median_seconds(lambda opened=opened: opened().close())
        tracemalloc.start()
        with opened():
            held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        met = seconds < aim and held / count <= 16
        rows.append({"case": name, "seconds": seconds, "bytes_per_record": held / count, "met": met})
    aims = "aim: < 0.3 s, < 0.01 s with a cached index, <= 16 bytes a component held"
    return show("open", f"Opening {count:,} records ({aims})", rows)


def first_tokens(batch):
    return float(batch["tokens"][:, 0].astype(np.float64).sum())


def first_inputs(batch):
    return float(batch[0][:, 0].sum())


def to_xy(batch):
    """Inputs and targets as torch's embeddings and losses take them."""
    import torch

    tokens = torch.from_numpy(batch["tokens"].astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


def tokens():
    path = write(made_data(get_workload("tokens"), TOKENS // T + 1), "tokens", ROOT).path
    source = TokenSource(path, window=T + 1)
    plan = batches(len(source), ROWS)
    stored = np.load(path, mmap_mode="r")
    # Items that overlap: the fastest way to index windows in numpy, before sliding_window_view and np.stack.
    windows = np.ndarray((len(source),), np.dtype((np.void, 2 * T + 2)), stored, 0, (2 * T,))

    def gather():
        found = ({"tokens": windows[rows].view(np.uint16).reshape(-1, T + 1)} for rows in plan)
        return consume(found, first_tokens)

    def stack():
        found = ({"tokens": np.stack([stored[i * T : i * T + T + 1] for i in rows.tolist()])} for rows in plan)
        return consume(found, first_tokens)

    size = {"items": len(source), "steps": len(plan)}
    limits = [
        Case("numpy gather of the mapped file (the limit)", gather),
        Case("np.stack of slices of the memmap", stack),
    ]
    title = f"Token windows, {ROWS} rows of {T} + 1 uint16"
    rows = over_format(title, limits, partial(nullcontext, source), first_tokens, plan, {0: None, 1: 0.8, 2: 0.8})
    return rows + documents(path, size) + beside_torch(source, stored, size)


def documents(path, size):
    """Windows that follow documents of half to four times their length."""
    rng = np.random.default_rng(0)
    starts = np.cumsum(rng.integers(T // 2, 4 * T, TOKENS // T))
    starts = np.concatenate([[0], starts[starts < TOKENS]])
    cases = []
    for ends in ("across", "drop", "pad"):
        source = TokenSource(path, window=T + 1, ends=ends, documents=None if ends == "across" else starts)

        def run(source=source, plan=batches(len(source), ROWS)):  # noqa: B008 - bound to this source on purpose
            return consume(map(source.read_batch, plan), first_tokens)

        cases.append(Case(f'source.read_batch, ends="{ends}"', run, items=len(source)))
    return run_cases("Token windows that follow documents", cases, **size)


class Windows:
    """The usual memmap Dataset of language models: inputs and targets of T tokens each, one after the other."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return (len(self.tokens) - 1) // T

    def __getitem__(self, index):
        import torch

        window = self.tokens[index * T : index * T + T + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


def beside_torch(source, stored, size):
    """Inputs and targets as int64 tensors, as nanoGPT's training loop takes them."""
    try:
        import torch
        from torch.utils.data import DataLoader
    except ImportError:
        print("torch is not installed: no peer")
        return []

    theirs, ours = [], []
    for workers in (0, 1, 2):
        several = {"num_workers": workers, "persistent_workers": workers > 0}
        loader = DataLoader(Windows(stored), batch_size=ROWS, shuffle=True, **several)
        theirs.append(Case(f"torch DataLoader, {workers} workers", partial(consume, loader, first_inputs)))
        run = through_loader(source, ROWS, workers, first_inputs, batch_transform=to_xy)
        ours.append(Case(f"Loader, {workers} workers, to int64 tensors", run))

    def get_batch():
        for _ in range(size["steps"]):
            starts = torch.randint(len(stored) - T, (ROWS,)).tolist()
            x, y = (
                torch.stack([torch.from_numpy(stored[i + by : i + by + T].astype(np.int64)) for i in starts])
                for by in (0, 1)
            )
            first_inputs((x, y))

    title = f"Token windows as int64 tensors x and y, {ROWS} rows of {T}"
    rows = run_cases(title, [*theirs, Case("nanoGPT's get_batch, no loader", get_batch), *ours], rounds=3, **size)
    rate = {row["case"]: row["records_per_second"] for row in rows}
    best, tensors = (max(cases, key=lambda case: rate[case.name]) for cases in (theirs, ours))
    as_stored = [
        Case(f"Loader, {workers} workers, uint16 as stored", through_loader(source, ROWS, workers, first_tokens), 5)
        for workers in (1, 2)
    ]
    cases = [best, replace(tensors, floor=5), *as_stored]
    return rows + run_cases("The same beside torch's best", cases, rounds=5, **size)
