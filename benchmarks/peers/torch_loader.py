"""torch's DataLoader over map-style data sets, as torch's documentation of ``torch.utils.data`` describes them.

Followed: "Map-style datasets" with the automatic batching of the default ``collate_fn``, data sets that offer
``__getitems__`` (which torch's fetcher calls if it is there), ``persistent_workers`` and the default
``prefetch_factor``; for `memmap_bulk` the section "Disable automatic batching" (a sampler of batches, and a data set
that takes a list).
https://docs.pytorch.org/docs/stable/data.html

Each worker opens the files when it reads its first record.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from benchmarks.peers.field import Field, expand_files, load, tensor_columns, worker_options
from dataload._util.caches import PerProcess
from dataload.bench.task import Reading, Task
from dataload.sources.base import Source
from dataload.types import Int64Array


def write_npy(source: Source[Any], field: Field, directory: str) -> str:
    path = os.path.join(directory, f"{field.name}.npy")
    rows = np.lib.format.open_memmap(path, "w+", field.dtype, (len(source), *field.shape))
    for index, value in enumerate(field.values(source)):
        rows[index] = value
    rows.flush()
    return path


class Memmap:
    """The rows of one array in a file."""

    def __init__(self, path: str, field: str) -> None:
        self._state = path, field
        # Copy on write: torch warns of arrays that must not be written to.
        self._rows = np.load(path, mmap_mode="c")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Return one row, or the rows of a list."""
        return {self._state[1]: self._rows[index]}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{self._state[1]: self._rows[index]} for index in indices]

    def __reduce__(self) -> Any:
        return Memmap, self._state


class Stored:
    """Records stored as bytes, which subclasses find (`_find`), open (`_open`) and read (`_read`)."""

    _find: Callable[[], int]
    _open: Callable[[ExitStack], Any]
    _read: Callable[[Any, Sequence[int]], Iterable[Any]]

    def __init__(self, path: str, field: Field) -> None:
        self._path = path
        self._field = field
        self._count = self._find()
        self._files: PerProcess[tuple[ExitStack, Any]] = PerProcess()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        name, decode = self._field.name, self._field.decoder()
        return [{name: decode(data)} for data in self.read(indices)]

    def read(self, indices: Sequence[int]) -> Iterable[Any]:
        """Return records as bytes, or as memoryviews that are valid until `close`. Thread-safe."""
        _, files = self._files.get(self._open_files)
        return self._read(files, indices)

    def _open_files(self) -> tuple[ExitStack, Any]:
        held = ExitStack()
        return held, self._open(held)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": PerProcess()}

    def close(self) -> None:
        """Close the files of this process."""
        if (files := self._files.drop()) is not None:
            files[0].close()


class LmdbRecords(Stored):
    """``txn.get`` of keys that are listed once."""

    def _environment(self) -> Any:
        return load("lmdb", "lmdb").open(self._path, readonly=True, lock=False, readahead=False, meminit=False)

    def _find(self) -> int:
        with self._environment() as environment, environment.begin() as transaction:
            self._keys = list(transaction.cursor().iternext(values=False))
        return len(self._keys)

    def _open(self, held: ExitStack) -> Any:
        return _Transactions(held.enter_context(self._environment()))

    def _read(self, opened: Any, indices: Sequence[int]) -> Iterable[Any]:
        get, keys = opened.get, self._keys
        return (get(keys[index]) for index in indices)


class _Transactions(threading.local):
    """A transaction for each thread: two threads must not share one."""

    def __init__(self, environment: Any) -> None:  # runs in each thread that uses the object
        self.get = environment.begin(buffers=True).get


class TarRecords(Stored):
    """Slices of mapped archives, found through the index that DALI's tools write beside them."""

    def _find(self) -> int:
        self._paths = expand_files(self._path)
        spans = [_spans(file, self._field.component) for file in self._paths]
        self._shards = np.repeat(np.arange(len(spans)), [len(found) for found in spans])
        self._spans = np.concatenate(spans)
        return len(self._spans)

    def _open(self, held: ExitStack) -> Any:
        return [held.enter_context(_mapped(path)) for path in self._paths]

    def _read(self, opened: Any, indices: Sequence[int]) -> Iterable[Any]:
        shards, spans = self._shards[indices].tolist(), self._spans[indices].tolist()
        return (opened[shard][start:end] for shard, (start, end) in zip(shards, spans, strict=True))


class ArrayRecords(Stored):
    """``ArrayRecordDataSource.__getitems__`` of the package array_record, as its README shows it."""

    def _find(self) -> int:
        self._paths = expand_files(self._path)
        with ExitStack() as held:
            return len(self._open(held))

    def _open(self, held: ExitStack) -> Any:
        module = load("array_record.python.array_record_data_source", "array-record")
        return held.enter_context(module.ArrayRecordDataSource(self._paths))

    def _read(self, opened: Any, indices: Sequence[int]) -> Iterable[Any]:
        return opened.__getitems__(indices)


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _spans(path: str, component: str) -> Int64Array:
    """Return (samples, 2) int64: start and end of a component in an archive, from the lines of its index."""
    spans: list[tuple[int, int]] = []
    with open(f"{path.removesuffix('.tar')}.idx", encoding="utf-8") as lines:
        next(lines)
        for words in map(str.split, lines):
            start, size = map(int, words[words.index(component) + 1 :][:2])
            spans.append((start, start + size))
    return np.array(spans, np.int64).reshape(-1, 2)


def memmap(task: Task, field: Field, *, bulk: bool = False) -> Reading:
    """Read rows of a memory-mapped ``.npy`` file: one by one, or a batch in one indexing operation."""
    return torch_reading(task, Memmap(task.path, field.name), bulk=bulk)


def _over(records_class: type[Stored], task: Task, field: Field, *, start: str | None = None) -> Reading:
    records, held = records_class(task.path, field), ExitStack()
    held.callback(records.close)
    return torch_reading(task, records, held, start=start)


memmap_bulk = partial(memmap, bulk=True)
RECORDS: Mapping[str, Callable[[Task, Field], Reading]] = {
    "lmdb": partial(_over, LmdbRecords),
    "tar": partial(_over, TarRecords),
    # The package has threads of its own, and crashes in a process that is forked after it.
    "array_record": partial(_over, ArrayRecords, start="forkserver"),
}


def torch_reading(
    task: Task, dataset: Any, held: ExitStack | None = None, *, bulk: bool = False, start: str | None = None
) -> Reading:
    """Run torch's DataLoader over items of field -> value; with `bulk`, over lists of indices at a time."""
    data = load("torch.utils.data", "torch")
    generator = load("torch", "torch").Generator().manual_seed(task.seed)
    sampler: Any = data.SequentialSampler(dataset)
    if task.order == "global":
        sampler = data.RandomSampler(dataset, generator=generator)
    batching: Mapping[str, Any] = {"batch_size": task.batch_size, "sampler": sampler}
    if bulk:
        batching = {"batch_size": None, "sampler": data.BatchSampler(sampler, task.batch_size, drop_last=False)}
    several = worker_options(task)
    if task.workers and start:
        several["multiprocessing_context"] = start
    loader = data.DataLoader(dataset, **batching, **several)
    settings = {**several, "prefetch_factor": loader.prefetch_factor, "bulk": bulk}
    return Reading(settings, lambda _: iter(loader), tensor_columns, held or ExitStack())
