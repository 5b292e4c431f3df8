"""What reads the data of a task: this library, and the bare loops that are its limits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from dataload._util.optional import load_optional
from dataload.api import open_source
from dataload.bench.peers.reading import FunctionReading
from dataload.bench.task import Order, Task
from dataload.bench.workloads import WORKLOADS
from dataload.loader.loader import Loader
from dataload.loader.order import shuffled
from dataload.samplers import GlobalShuffle, Sequential
from dataload.sources.base import Source
from dataload.types import Int64Array, Sampler

__all__ = ["array_record_read", "decode_loop", "gather", "lmdb_get", "loader", "open_workload"]

_AHEAD = 8
_READER_BUFFER = 4096


def open_workload(task: Task) -> Source[Any]:
    """The source of a task's data, with what its format needs to give fields."""
    options: dict[str, Any] = dict(task.options.get("open", {}))
    return open_source(task.path, format=task.format, **options)


def order_of(source: Source[Any], order: Order, seed: int) -> Sampler:
    """The sampler of an order."""
    if order == "sequential":
        return Sequential(len(source))
    return shuffled(source, "global" if order == "global" else "shards", seed)


def loader(task: Task) -> FunctionReading:
    """`dataload.Loader` with threads, or with processes by the option ``executor``."""
    held = ExitStack()
    source = held.enter_context(open_workload(task))
    executor = task.options.get("executor", "threads")
    made: Loader[Any] = Loader(
        source,
        batch_size=task.batch_size,
        sampler=order_of(source, task.order, task.seed),
        transform=_decoder(task),
        num_workers=task.workers,
        executor=executor,
    )
    held.callback(made.close)

    def batches(epoch: int) -> Iterator[Any]:
        made.set_epoch(epoch)
        return iter(made)

    return FunctionReading({"executor": executor, "num_workers": task.workers, "prefetch": 2}, batches, held=held)


def gather(task: Task) -> FunctionReading:
    """Copying alone: the records in memory, and ``np.take`` (or ``bytes``) on one thread or several.

    Nothing that gives batches of its own can be faster.
    """
    with open_workload(task) as source:
        columns = source.read_batch(np.arange(len(source)))
    order = GlobalShuffle(len(next(iter(columns.values()))), task.seed)

    def take(rows: Int64Array) -> dict[str, Any]:
        return {name: _copied(column, rows) for name, column in columns.items()}

    held = ExitStack()
    run = partial(_in_threads, _threads(held, task.workers), take)
    return FunctionReading({"threads": max(1, task.workers)}, lambda epoch: run(_rows(order, task, epoch)), held=held)


def lmdb_get(task: Task) -> FunctionReading:
    """``bytes(txn.get(key))`` in a loop: nothing is decoded."""
    lmdb = load_optional("lmdb", needed_by="the limit of LMDB", extra="lmdb")
    held = ExitStack()
    environment = held.enter_context(lmdb.open(task.path, readonly=True, lock=False, readahead=False, max_dbs=1))
    transaction = held.enter_context(environment.begin(buffers=True))
    keys = [bytes(key) for key in transaction.cursor().iternext(values=False)]
    order = GlobalShuffle(len(keys), task.seed)

    def batches(epoch: int) -> Iterator[Any]:
        for rows in _rows(order, task, epoch):
            yield {"bytes": [bytes(transaction.get(keys[row])) for row in rows.tolist()]}

    return FunctionReading({"lmdb": lmdb.__version__}, batches, held=held)


def array_record_read(task: Task) -> FunctionReading:
    """``reader.read([...])`` of the package array_record, a batch at a time: nothing is decoded."""
    module = load_optional("array_record.python.array_record_module", needed_by="its limit", extra="arrayrecord")
    options = "readahead_buffer_size:0"
    reader = module.ArrayRecordReader(task.path, options, file_reader_buffer_size=_READER_BUFFER)
    held = ExitStack()
    held.callback(reader.close)
    order = GlobalShuffle(reader.num_records(), task.seed)
    return FunctionReading(
        {"reader_options": options, "file_reader_buffer_size": _READER_BUFFER},
        lambda epoch: ({"bytes": reader.read(rows.tolist())} for rows in _rows(order, task, epoch)),
        held=held,
    )


def decode_loop(task: Task) -> FunctionReading:
    """JPEGs decoded in threads from a list in memory: no order, no batches but lists."""
    simplejpeg = load_optional("simplejpeg", needed_by="decoding", extra="tar")
    (field,) = WORKLOADS[task.workload].decodes
    with open_workload(task) as source:
        files = [bytes(record[field]) for record in source]
    held = ExitStack()
    run = partial(_in_threads, _threads(held, task.workers), simplejpeg.decode_jpeg)

    def batches(_: int) -> Iterator[Any]:
        images = run(iter(files))
        while batch := list(islice(images, task.batch_size)):
            yield {field: batch}

    return FunctionReading({"threads": max(1, task.workers)}, batches, held=held)


def _copied(column: Any, rows: Int64Array) -> Any:
    if isinstance(column, np.ndarray):
        return np.take(column, rows, axis=0)
    return [bytes(memoryview(column[row])) for row in rows.tolist()]  # bytes of bytes would not copy


def _decoder(task: Task) -> Callable[[Any], Any] | None:
    fields = WORKLOADS[task.workload].decodes if task.workload in WORKLOADS else ()
    if not fields:
        return None
    simplejpeg = load_optional("simplejpeg", needed_by="decoding", extra="tar")

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, **{field: simplejpeg.decode_jpeg(sample[field]) for field in fields}}

    return decode


def _rows(order: Sampler, task: Task, epoch: int) -> Iterator[Int64Array]:
    """The rows of each batch. All are computed at once: a limit has no order to pay for."""
    rows = order.indices(np.arange(len(order)), epoch=epoch)
    return (rows[start : start + task.batch_size] for start in range(0, len(rows), task.batch_size))


def _threads(held: ExitStack, threads: int) -> ThreadPoolExecutor | None:
    """Threads for all epochs; None where the caller's is enough."""
    return held.enter_context(ThreadPoolExecutor(threads)) if threads > 1 else None


def _in_threads(pool: ThreadPoolExecutor | None, work: Callable[[Any], Any], items: Iterator[Any]) -> Iterator[Any]:
    """What `work` gives for `items`, in their order, made in threads a few ahead; in the caller's without a pool."""
    if pool is None:
        yield from map(work, items)
        return
    ahead = deque(pool.submit(work, item) for item in islice(items, _AHEAD))
    while ahead:
        yield ahead.popleft().result()
        ahead.extend(pool.submit(work, item) for item in islice(items, 1))
