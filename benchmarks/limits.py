"""The limits of the machine, and bare loops over records."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from dataload._util.lazy import load_optional
from dataload.bench.data import Choices, Data, Written, open_data
from dataload.bench.task import Reading, Task
from dataload.samplers import GlobalShuffle, PoolShuffle, Sequential
from dataload.types import Int64Array

_AHEAD = 4
_POOL = 1024
_READER_BUFFER = 4096


# The plan


def plan_limits(data: Data, written: Mapping[str, Written], choices: Choices) -> list[Task]:
    """Plan the limits of the machine, and bare loops over the formats' own libraries, in each order."""
    first = next(iter(written))
    limits = [
        (first, "copy in memory, 1 thread", "gather", 1),
        (first, "copy in memory, 2 threads", "gather", 2),
        ("lmdb", "lmdb txn.get, nothing copied", "lmdb_get", 0),
        ("array_record", "array_record read", "array_record_read", 0),
    ]
    return [
        choices.task(
            data,
            kind="limit",
            name=name if order == choices.orders[0] else f"{name}, {order}",
            path=written[form].path,
            format=form,
            reading=f"{__name__}:{reading}",
            order=order,
            workers=workers,
            options={"open": written[form].options},
        )
        for order in choices.orders
        for form, name, reading, workers in limits
        if form in written
    ]


# Limits


def gather(task: Task) -> Reading:
    """Copy records that are in memory: nothing that returns new batches can be faster."""
    with open_data(task) as source:
        columns = source.read_batch(np.arange(len(source)))

    def take(rows: Int64Array) -> dict[str, Any]:
        return {name: np.take(column, rows, axis=0) for name, column in columns.items()}

    held, count = ExitStack(), len(next(iter(columns.values())))
    run = in_threads(held, task.workers, take)
    return Reading({"threads": max(1, task.workers)}, lambda epoch: run(_rows(count, task, epoch)), held=held)


def memcpy(stored: memoryview, lengths: Int64Array) -> Callable[[Int64Array], list[memoryview]]:
    """Return a function that copies records of any length from `stored`; the last two batches are valid."""
    starts = np.cumsum(lengths) - lengths
    arenas = cycle([[memoryview(b"")] for _ in range(2)])

    def copied(rows: Int64Array) -> list[memoryview]:
        sizes = lengths[rows]
        ends = np.cumsum(sizes)
        held = next(arenas)
        if ends[-1] > len(held[0]):
            held[0] = memoryview(bytearray(int(ends[-1]) * 5 // 4))
        (arena,) = held
        found = [arena[start:end] for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)]
        sources = starts[rows]
        for view, start, end in zip(found, sources.tolist(), (sources + sizes).tolist(), strict=True):
            view[:] = stored[start:end]
        return found

    return copied


def lmdb_get(task: Task) -> Reading:
    """Call ``txn.get(key)`` in a loop, with views of the map: nothing is copied or decoded."""
    lmdb = load_optional("lmdb", needed_by="the limit of LMDB", extra="lmdb")
    held = ExitStack()
    environment = held.enter_context(lmdb.open(task.path, readonly=True, lock=False, readahead=False, max_dbs=1))
    transaction = held.enter_context(environment.begin(buffers=True))
    keys = [bytes(key) for key in transaction.cursor().iternext(values=False)]

    def batches(epoch: int) -> Iterator[Any]:
        for rows in _rows(len(keys), task, epoch):
            yield {"bytes": [transaction.get(keys[row]) for row in rows.tolist()]}

    return Reading({"lmdb": lmdb.__version__}, batches, held=held)


def array_record_read(task: Task) -> Reading:
    """Call ``reader.read([...])`` of the package array_record, a batch at a time: nothing is decoded."""
    module = load_optional("array_record.python.array_record_module", needed_by="its limit", extra="arrayrecord")
    options = "readahead_buffer_size:0"
    reader = module.ArrayRecordReader(task.path, options, file_reader_buffer_size=_READER_BUFFER)
    held = ExitStack()
    held.callback(reader.close)
    settings = {"reader_options": options, "file_reader_buffer_size": _READER_BUFFER}
    count = reader.num_records()
    return Reading(
        settings, lambda epoch: ({"bytes": reader.read(rows.tolist())} for rows in _rows(count, task, epoch)), held=held
    )


def _rows(count: int, task: Task, epoch: int) -> Iterator[Int64Array]:
    """Return the rows of each batch, in the task's order. All are computed at once: a limit has no order to pay for."""
    plain = Sequential(count)
    orders = {
        "sequential": plain,
        "pool": PoolShuffle(plain, _POOL, task.seed),
        "global": GlobalShuffle(count, task.seed),
    }
    rows = orders[task.order].indices(np.arange(count), epoch=epoch)
    return (rows[start : start + task.batch_size] for start in range(0, count, task.batch_size))


def in_threads(held: ExitStack, threads: int, work: Callable[[Any], Any]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function like ``map(work, ...)``; several threads, if given, work a few items ahead, in order."""
    if threads < 2:
        return partial(map, work)
    pool = held.enter_context(ThreadPoolExecutor(threads))

    def run(items: Iterator[Any]) -> Iterator[Any]:
        ahead = deque(pool.submit(work, item) for item in islice(items, _AHEAD))
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(pool.submit(work, item) for item in islice(items, 1))

    return run
