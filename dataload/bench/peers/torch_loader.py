"""torch's DataLoader over map-style data sets, as torch's documentation of ``torch.utils.data`` describes them.

Followed: "Map-style datasets" with the automatic batching of the default ``collate_fn``, data sets that offer
``__getitems__`` (what torch's fetcher asks for first), ``persistent_workers`` and the default ``prefetch_factor``; for
`memmap_bulk` the section "Disable automatic batching" (a sampler of batches, and a data set that takes a list).
https://docs.pytorch.org/docs/stable/data.html

Files are opened by the worker that reads them, on its first record.
"""

from __future__ import annotations

import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from dataload.bench.peers.reading import Field, FunctionReading, expand_files, load, refuse_order, versions
from dataload.bench.task import Task
from dataload.types import Int64Array

__all__ = ["array_record", "lmdb", "memmap", "memmap_bulk", "tar", "tensor_columns", "torch_reading", "write_npy"]


def write_npy(records: Iterable[Any], field: Field, directory: str, count: int) -> str:
    """Write one array, (count, *shape), as ``x.npy``; returns its path."""
    path = os.path.join(directory, f"{field.name}.npy")
    rows = np.lib.format.open_memmap(path, "w+", field.dtype, (count, *field.shape))
    for index, record in enumerate(records):
        rows[index] = record
    rows.flush()
    return path


class Memmap:
    """The rows of one array in a file."""

    def __init__(self, path: str, field: Field) -> None:
        self._path = path
        self._field = field.name
        # Copy on write: torch warns of arrays that it might write to and must not.
        self._rows = np.load(path, mmap_mode="c")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """One row, or the rows of a list."""
        return {self._field: self._rows[index]}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{self._field: self._rows[index]} for index in indices]

    def __getstate__(self) -> tuple[str, str]:
        return self._path, self._field

    def __setstate__(self, state: tuple[str, str]) -> None:
        self._path, self._field = state
        self._rows = np.load(self._path, mmap_mode="c")


class Stored(ABC):
    """Records that are bytes; a format says how they are read."""

    def __init__(self, field: Field, count: int) -> None:
        self._field = field
        self._count = count
        self._opened: tuple[int, Any] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        name, decode = self._field.name, self._field.decoder()
        return [{name: decode(data)} for data in self.read(indices)]

    def read(self, indices: Sequence[int]) -> Iterable[Any]:
        """What the records store, as bytes or memoryviews that are good until `close`. Thread-safe."""
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = os.getpid(), self._open()
        return self._read(self._opened[1], indices)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_opened", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._opened = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close what this process has opened."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()

    @abstractmethod
    def _open(self) -> Any:
        """Open the files; what comes back has a `close`."""

    @abstractmethod
    def _read(self, opened: Any, indices: Sequence[int]) -> Iterable[Any]:
        """See `read`; `opened` is from `_open`."""


class LmdbRecords(Stored):
    """``txn.get`` of keys that are listed once."""

    def __init__(self, path: str, field: Field) -> None:
        self._path = path
        with load("lmdb", "lmdb").open(path, **self._OPTIONS) as environment, environment.begin() as transaction:
            self._keys = list(transaction.cursor().iternext(values=False))
        super().__init__(field, len(self._keys))

    _OPTIONS: Mapping[str, Any] = {"readonly": True, "lock": False, "readahead": False, "meminit": False}

    def _open(self) -> Any:
        environment = load("lmdb", "lmdb").open(self._path, **self._OPTIONS)
        return _Opened(_Transactions(environment), environment.close)

    def _read(self, opened: Any, indices: Sequence[int]) -> Iterable[Any]:
        get, keys = opened.what.mine().get, self._keys
        return (get(keys[index]) for index in indices)


class _Transactions(threading.local):
    """A transaction for each thread: one is not to be used by two."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._mine: Any = None

    def mine(self) -> Any:
        """That of the calling thread."""
        if self._mine is None:
            self._mine = self._environment.begin(buffers=True)
        return self._mine


class TarRecords(Stored):
    """Slices of mapped archives, found through the index that DALI's tools write beside them."""

    def __init__(self, path: str, field: Field) -> None:
        self._paths = expand_files(path)
        places = [_places(file, field.component) for file in self._paths]
        self._shards = np.repeat(np.arange(len(places)), [len(found) for found in places])
        self._places = np.concatenate(places)
        super().__init__(field, len(self._places))

    def _open(self) -> Any:
        held = ExitStack()
        maps: list[mmap.mmap] = []
        for path in self._paths:
            with open(path, "rb") as stream:
                maps.append(held.enter_context(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)))
        return _Opened(maps, held.close)

    def _read(self, opened: Any, indices: Sequence[int]) -> Iterable[Any]:
        shards, places = self._shards[indices].tolist(), self._places[indices].tolist()
        return (opened.what[shard][start:end] for shard, (start, end) in zip(shards, places, strict=True))


class ArrayRecords(Stored):
    """``ArrayRecordDataSource.__getitems__`` of the package array_record, as its README shows it."""

    def __init__(self, path: str, field: Field) -> None:
        self._paths = expand_files(path)
        source = self._open()
        super().__init__(field, len(source))
        source.close()

    def _open(self) -> Any:
        module = load("array_record.python.array_record_data_source", "array-record")
        source = module.ArrayRecordDataSource(self._paths)
        return _Opened(source, lambda: source.__exit__(None, None, None))

    def _read(self, opened: Any, indices: Sequence[int]) -> Iterable[Any]:
        return opened.what.__getitems__(indices)


class _Opened:
    """What is open in one process, and how it is closed."""

    def __init__(self, what: Any, close: Any) -> None:
        self.what = what
        self.close = close

    def __len__(self) -> int:
        return len(self.what)


def _places(path: str, component: str) -> Int64Array:
    """(samples, 2) int64: start and end of a component in an archive, from the lines of its index."""
    places: list[tuple[int, int]] = []
    with open(f"{path.removesuffix('.tar')}.idx", encoding="utf-8") as lines:
        next(lines)
        for line in lines:
            words = line.split()
            at = words.index(component)
            start, size = int(words[at + 1]), int(words[at + 2])
            places.append((start, start + size))
    return np.array(places, np.int64).reshape(-1, 2)


def memmap(task: Task) -> FunctionReading:
    """Rows of a memory-mapped ``.npy`` file, one by one."""
    return _over(task, Memmap(task.path, Field.of(task)))


def memmap_bulk(task: Task) -> FunctionReading:
    """Rows of a memory-mapped ``.npy`` file, a batch in one indexing operation."""
    return _over(task, Memmap(task.path, Field.of(task)), bulk=True)


def lmdb(task: Task) -> FunctionReading:
    """Values of an LMDB environment."""
    return _over(task, LmdbRecords(task.path, Field.of(task)))


def tar(task: Task) -> FunctionReading:
    """Components of tar archives with an index."""
    return _over(task, TarRecords(task.path, Field.of(task)))


def array_record(task: Task) -> FunctionReading:
    """Records of ArrayRecord files. Its package has threads of its own, and crashes in a process forked after it."""
    return _over(task, ArrayRecords(task.path, Field.of(task)), start="forkserver")


def _over(task: Task, dataset: Any, *, bulk: bool = False, start: str | None = None) -> FunctionReading:
    refuse_order(task, "global", "sequential")
    held = ExitStack()
    if isinstance(dataset, Stored):
        held.callback(dataset.close)
    return torch_reading(task, dataset, held, bulk=bulk, start=start)


def torch_reading(
    task: Task, dataset: Any, held: ExitStack | None = None, *, bulk: bool = False, start: str | None = None
) -> FunctionReading:
    """The reading of torch's loader over a map-style data set whose items are field -> value.

    Args:
        task: Its order is global or sequential.
        dataset: The data set.
        held: What to close at the end.
        bulk: Ask the data set for a list of indices at a time, and take its answer as the batch.
        start: How worker processes are started; None for the system's default.
    """
    data = load("torch.utils.data", "torch")
    generator = load("torch", "torch").Generator().manual_seed(task.seed)
    sampler: Any
    if task.order == "global":
        sampler = data.RandomSampler(dataset, generator=generator)
    else:
        sampler = data.SequentialSampler(dataset)
    batching: dict[str, Any] = {"batch_size": task.batch_size, "sampler": sampler}
    if bulk:
        batching = {"batch_size": None, "sampler": data.BatchSampler(sampler, task.batch_size, drop_last=False)}
    several: dict[str, Any] = {"num_workers": task.workers, "persistent_workers": task.workers > 0}
    if task.workers and start:
        several["multiprocessing_context"] = start
    loader = data.DataLoader(dataset, **batching, **several)
    settings = {**versions("torch"), **several, "prefetch_factor": loader.prefetch_factor, "bulk": bulk}
    return FunctionReading(settings, lambda _: iter(loader), tensor_columns, held)


def tensor_columns(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a batch of tensors or lists, with tensors seen as numpy arrays; nothing is copied."""
    return {name: value.numpy() if hasattr(value, "numpy") else value for name, value in batch.items()}
