"""The formats, at three sizes: for each one the limit, the source's own reads, and the loader with 0 to 4 workers.

The limit of fixed records is ``np.take`` of the mapped file; that of bytes is a memcpy of each record from plain memory
into memory that is used again. It is called from Python: of small records, the calls cost more than the copies, and
there is no aim. LMDB and ArrayRecord are also compared with bare loops over their own libraries.
"""

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import dataload
from benchmarks.harness import Case, against, batches, blobs, loaders, made, more_workers, run_cases, warmed
from benchmarks.limits import memcpy
from benchmarks.workloads import floats, repeat_records

WORKERS = range(5)


@dataclass(frozen=True)
class Size:
    """One size of record, and the aims of the loader for it, by number of workers."""

    name: str
    nbytes: int
    count: int
    batch_size: int
    of_take: dict[int, float]
    of_memcpy: dict[int, float]
    of_get: dict[int, float]
    of_array_record: dict[int, float]

    @property
    def plan(self):
        return _plan(self.count, self.batch_size)


_plan = functools.cache(batches)
_LARGE = {0: 0.9, 1: 0.9, 2: 1.3}
# A bare `get` copies nothing: no loader can be twice as fast at 110 KB. All numbers of records are whole batches.
SIZES = {
    "64": Size("64 B", 64, 1 << 20, 1024, {1: 0.6}, {}, {0: 2, 1: 2}, {0: 8, 1: 8}),
    "4k": Size("4 KB", 4096, 384 * 256, 256, {0: 0.9}, {}, {0: 2, 1: 2}, {0: 8, 1: 8}),
    "110k": Size("110 KB", 110_000, 64 * 64, 64, _LARGE, _LARGE, {}, {}),
}


def over_format(title, size, source, limits, floors, *, read="read_batch", extra=()):
    """Time the limits (`extra`: others, and their floors), the source and loaders; ratios are to the first limit."""
    with ExitStack() as held:
        held.enter_context(source)
        through_source = Case(f"source.{read}", lambda: map(getattr(source, read), size.plan))
        through_loaders = list(loaders(held, source, size.batch_size, WORKERS, floors))
        rows = run_cases(f"{title}, {size.name}, batch {size.batch_size}", [*limits, through_source, *through_loaders])
    by_name = {row["case"]: row for row in rows}
    named = {count: by_name[case.name] for count, case in zip(WORKERS, through_loaders, strict=True)}
    compared = [against(named[count], by_name[name], floor) for name, aims in extra for count, floor in aims.items()]
    return [*rows, *compared, more_workers(list(named.values()))]


# Limits


def take_limits(size, path):
    """``np.take`` of the mapped file, of plain memory, and of the map on two threads."""
    # As bytes: the arrays start at byte 22, and np.take copies a whole array that is not aligned.
    stored = np.memmap(path, np.uint8, "r", 22, (size.count, size.nbytes))
    memory = stored[:].copy()
    pool = ThreadPoolExecutor(2)

    def take(values):
        return lambda: ({"x": np.take(values, rows, axis=0)} for rows in size.plan)

    def on_two_threads():
        for pair in zip(size.plan[::2], size.plan[1::2], strict=True):
            yield from pool.map(lambda rows: {"x": np.take(stored, rows, axis=0)}, pair)

    return [
        Case("np.take of the mapped file (the limit)", take(stored)),
        Case("np.take of plain memory", take(memory)),
        Case("np.take of the map on two threads", on_two_threads),
    ]


def memcpy_limit(size):
    values = _in_memory(size.nbytes, size.count)
    copied = memcpy(*values)
    return Case("a memcpy for each record (the limit)", lambda: map(copied, size.plan))


@functools.lru_cache(maxsize=1)
def _in_memory(nbytes, count):
    values = [record["bin"] for record in repeat_records(blobs(nbytes), count)]
    return memoryview(b"".join(values)), np.array([*map(len, values)], np.int64)


def get_limit(size, path, value_of: Callable[[Any], Any], name, database=None, *, compared=True):
    """A loop over ``txn.get`` with views of the map."""
    get, keys = _transaction(path, database)

    def epoch():
        return (value_of([get(keys[row]) for row in rows.tolist()]) for rows in size.plan)

    return Case(name, epoch, compared=compared)


def copied(path, number=0):
    """A copy of an environment beside it, for others to read: LMDB opens a file only once in a process."""
    copy = Path(f"{path}-copy{number}")
    if not copy.exists():
        (shutil.copytree if Path(path).is_dir() else shutil.copy)(path, copy)
    return warmed(str(copy))


_opened = ExitStack()


@functools.cache
def _transaction(path, database):
    """The method `get` of a transaction of a copy, and all keys."""
    import lmdb

    copy = copied(path)
    options = {"readonly": True, "lock": False, "readahead": False, "max_dbs": 1}
    environment = _opened.enter_context(lmdb.open(copy, subdir=os.path.isdir(copy), **options))
    opened = environment.open_db(database) if database else None
    transaction = _opened.enter_context(environment.begin(db=opened, buffers=True))
    return transaction.get, [bytes(key) for key in transaction.cursor().iternext(values=False)]


def forget():
    """Close the copies of environments."""
    _opened.close()
    _transaction.cache_clear()


def array_record_limit(size, path, name="reader.read(list)"):
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path, "readahead_buffer_size:0", file_reader_buffer_size=4096)
    return Case(name, lambda: (reader.read(rows.tolist()) for rows in size.plan))


# Formats


def syrah(size):
    path = made(f"{size.nbytes}-{size.count}.syr", floats(size.nbytes // 4), size.count)
    limits = take_limits(size, path)
    two = [(limits[-1].name, {2: 0.9})] if size.nbytes == 4096 else ()  # what this machine's two threads copy
    return over_format("Syrah, arrays", size, dataload.open(path), limits, size.of_take, extra=two)


def syrah_bytes(size):
    path = made(f"{size.nbytes}-{size.count}-bytes.syr", blobs(size.nbytes), size.count)
    return over_format("Syrah, bytes", size, dataload.open(path), [memcpy_limit(size)], size.of_memcpy)


def torchrecord(size):
    """TensorProtos: `txn.get` is the base; what counts as fixed records is also compared with ``np.take``."""
    from dataload.codecs.tensorprotos import decode

    different = floats(size.nbytes // 4)
    path = made(f"{size.nbytes}-{size.count}.torchrecord", different, size.count, num_records=size.count)
    flat = made(f"{size.nbytes}-{size.count}.syr", different, size.count)

    def decoded(values: Sequence[Any]):
        return {"x": np.stack([decode(value)["x"] for value in values])}

    limits = [
        get_limit(size, path, lambda values: values, "txn.get (nothing copied or decoded)", b"db0", compared=False),
        take_limits(size, flat)[0],
    ]
    if size.nbytes == 4096:
        limits.append(get_limit(size, path, decoded, "txn.get, decode, np.stack", b"db0"))
    source = dataload.open(path)
    take = [(limits[1].name, size.of_take)]
    return over_format("TorchRecord (TensorProtos)", size, source, limits, size.of_get, extra=take)


def example(size):
    """tf.Example in LMDB values of one wire layout, beside fixed records."""
    different = floats(size.nbytes // 4)
    path = made(f"{size.nbytes}-{size.count}-example.lmdb", different, size.count, codec="example")
    flat = made(f"{size.nbytes}-{size.count}.syr", different, size.count)
    source = dataload.open(path, codec="example")
    return over_format("tf.Example in LMDB", size, source, take_limits(size, flat)[:1], size.of_take)


def lmdb_values(size):
    path = made(f"{size.nbytes}-{size.count}.lmdb", blobs(size.nbytes), size.count, field="bin")
    get = get_limit(size, path, lambda values: values, "txn.get (nothing copied)")
    limits = [memcpy_limit(size), get]
    extra = [(get.name, size.of_get)]
    return over_format("LMDB", size, dataload.open(path), limits, size.of_memcpy, read="read", extra=extra)


def tar(size):
    path = made(f"{size.nbytes}-{size.count}.tar", blobs(size.nbytes), size.count)
    source = dataload.open(path, fields=["bin"])
    return over_format("tar with index", size, source, [memcpy_limit(size)], size.of_memcpy)


def array_record(size):
    name, options = f"{size.nbytes}-{size.count}-uncompressed.array_record", "group_size:1,uncompressed"
    path = made(name, blobs(size.nbytes), size.count, field="bin", options=options)
    source, own = dataload.open(path), array_record_limit(size, path)
    limits, extra = [memcpy_limit(size), own], [(own.name, size.of_array_record)]
    title = "ArrayRecord, uncompressed"
    return over_format(title, size, source, limits, size.of_memcpy, read="read", extra=extra)


def array_record_compressed(size):
    name = f"{size.nbytes}-{size.count}.array_record"
    path = made(name, blobs(size.nbytes), size.count, field="bin", options="group_size:1")
    own = array_record_limit(size, path)
    return over_format("ArrayRecord, compressed", size, dataload.open(path), [own], {0: 1.0, 1: 1.0}, read="read")


FORMATS = {
    "syrah": syrah,
    "syrah-bytes": syrah_bytes,
    "torchrecord": torchrecord,
    "example": example,
    "lmdb": lmdb_values,
    "tar": tar,
    "array_record": array_record,
    "array_record-compressed": array_record_compressed,
}
_SKIPPED = {"syrah-bytes-64", "syrah-bytes-4k", "example-110k"}
CASES = {
    f"{form}-{size}": functools.partial(run, SIZES[size])
    for form, run in FORMATS.items()
    for size in SIZES
    if f"{form}-{size}" not in _SKIPPED
}
