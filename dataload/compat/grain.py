"""Grain's random access data sources, implemented by dataload. Import them from here instead of ``grain.sources``.

They work with Grain's own loaders and with `dataload.Loader`, which also reads Grain's own sources. The sources of
`dataload.open` also work with Grain's loaders and their worker processes.

Files written with a `group_size` other than 1 cause a warning; Grain logs an error. Two of Grain's own tests do not
pass, because they call a private method, `_reader_idx_and_position`.
"""

import hashlib
import operator
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from multiprocessing import shared_memory
from typing import Any, Self, SupportsIndex, TypeAlias

import numpy as np

from dataload._util.indexing import split_by_shard
from dataload._util.system import open_files_limit
from dataload.errors import ConfigError
from dataload.sources.array_record.layout import parse_selection
from dataload.sources.array_record.reader import ArrayRecordSource, FileInstruction
from dataload.sources.array_record.tfds import TfdsSource, split_names
from dataload.sources.memory import RangeSource
from dataload.types import Int64Array, RandomAccessSource

__all__ = [
    "ArrayRecordDataSource",
    "InMemoryDataSource",
    "RandomAccessDataSource",
    "RangeDataSource",
    "RecordKeyError",
    "SharedMemoryDataSource",
    "tfds_data_source",
]

RandomAccessDataSource = RandomAccessSource
"""The protocol of a source: ``__len__`` and ``__getitem__``."""

PathOrInstruction: TypeAlias = str | os.PathLike[str] | FileInstruction


class RecordKeyError(IndexError, ValueError):
    """A record key is outside [0, len). Grain raises a ValueError, sequences raise an IndexError."""


class ArrayRecordDataSource:
    """The records of ArrayRecord files, as bytes. Negative record keys are refused, as in Grain.

    A file is opened when one of its records is read. Files given whole are also opened at once, for their length;
    others are slices, ``"path[start:end]"``, or objects with `filename`, `skip`, `take` and `examples_in_shard`.
    """

    def __init__(
        self,
        paths: PathOrInstruction | Sequence[PathOrInstruction],
        reader_options: Mapping[str, str] | None = None,
    ) -> None:
        # As in Grain, do not read ahead, because records are read in random order. Options also select the package
        # array_record, which is faster for single records, as Grain's DataLoader reads them.
        options = {"readahead_buffer_size": "0", **(reader_options or {})}
        self._options = ",".join(f"{name}:{value}" for name, value in options.items())
        self._parts = ArrayRecordSource(paths).paths  # turns FileInstructions into slices; opens nothing
        self._readers: OrderedDict[int, ArrayRecordSource] = OrderedDict()
        self._ends = np.cumsum([self._length(shard) for shard in range(len(self._parts))], dtype=np.int64)

    @property
    def paths(self) -> list[str]:
        """The files, without slices."""
        return [parse_selection(part).path for part in self._parts]

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """The number of records in each element of `paths`."""
        return tuple(np.diff(self._ends, prepend=0).tolist())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, record_key: SupportsIndex) -> bytes:
        return self.__getitems__([record_key])[0]

    def __getitems__(self, record_keys: Sequence[SupportsIndex] | Int64Array) -> list[bytes]:
        """Return records in the order requested."""
        keys = np.fromiter(map(operator.index, record_keys), np.int64, len(record_keys))
        outside = keys[(keys < 0) | (keys >= len(self))]
        if outside.size:
            raise RecordKeyError(f"record key {outside[0]} is outside [0, {len(self)})")
        records: list[bytes] = [b""] * len(keys)
        for shard, local, rows in split_by_shard(self._ends, keys):
            for row, record in zip(rows.tolist(), self._reader(shard).read(local), strict=True):
                records[row] = record
        return records

    _getitems = __getitems__  # the name that Grain's own pipelines call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files. As in Grain, the next read reopens them."""
        readers, self._readers = self._readers, OrderedDict()
        for reader in readers.values():
            reader.close()

    def __repr__(self) -> str:
        """Return the text that Grain's source returns, because Grain's checkpoints contain it."""
        paths = hashlib.sha1("".join(self.paths).encode(), usedforsecurity=False)
        return f"ArrayRecordDataSource(hash_of_paths={paths.hexdigest()})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_readers": OrderedDict()}

    def _reader(self, shard: int) -> ArrayRecordSource:
        reader = self._readers.get(shard)
        if reader is None:  # another thread may get here too; constructing a source opens nothing
            reader = ArrayRecordSource(self._parts[shard], reader_options=self._options)
            reader = self._readers.setdefault(shard, reader)
            while len(self._readers) > open_files_limit() // 2:
                self._readers.popitem(last=False)  # which closes its file once no thread reads it
        return reader

    def _length(self, shard: int) -> int:
        _, start, stop = parse_selection(self._parts[shard])
        return len(self._reader(shard)) if stop is None else stop - start


class RangeDataSource:
    """The numbers of ``range(start, stop, step)``. Negative record keys are refused, as in Grain."""

    def __init__(self, start: int, stop: int, step: int) -> None:
        self._source = RangeSource(stop, start=start, step=step)
        if -((start - stop) // step) < 0:  # unlike Python, Grain does not treat this as an empty range
            raise ConfigError(f"steps of {step} do not lead from {start} to {stop}", key="step", value=step)
        self._arguments = f"start={start}, stop={stop}, step={step}"

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, record_key: SupportsIndex) -> int:
        key = operator.index(record_key)
        if key < 0:
            raise IndexError(f"index {key} is out of range for {len(self)} records")
        return self._source[key]["index"]

    def __repr__(self) -> str:
        return f"RangeDataSource({self._arguments})"


_INT64 = 1 << 63
_SHAREABLE = (int, float, bool, str, bytes, type(None))


class SharedMemoryDataSource(shared_memory.ShareableList[Any]):
    """Numbers, texts, bytes and None in shared memory. A pickle refers to the memory and holds no data.

    Without `elements`, it attaches to the memory called `name`. Values that end in a zero byte are a ConfigError.
    """

    def __init__(self, elements: Sequence[Any] | None = None, *, name: str | None = None) -> None:
        if elements is None and name is None:
            raise ConfigError("pass elements, or the name of existing shared memory", key="elements")
        given = () if elements is None else elements
        for number, element in enumerate(given):
            if type(element) not in _SHAREABLE or (type(element) is int and not -_INT64 <= element < _INT64):
                message = (
                    f"element {number} is {element!r:.80}: shared memory takes int64, float, bool, str, bytes and None"
                )
                raise ConfigError(message, key="elements", value=element)
            if isinstance(element, (str, bytes)) and element[-1:] in ("\0", b"\0"):  # Python's list would strip it
                message = f"element {number} ends in a zero byte, which is lost in shared memory: {element[-20:]!r}"
                raise ConfigError(message, key="elements", value=element)
        # Python's list has as many bytes as a text has characters, and cuts it there without an error.
        texts = {number: text for number, text in enumerate(given) if isinstance(text, str) and not text.isascii()}
        room = [" " * len(texts[n].encode()) if n in texts else element for n, element in enumerate(given)]
        super().__init__(None if elements is None else room, name=name)
        for number, text in texts.items():
            self[number] = text

    def close(self) -> None:
        """Detach this process from the memory. The source must not be read again."""
        self.shm.close()

    def unlink(self) -> None:
        """Free the memory, once all processes have closed it."""
        self.shm.unlink()

    def __str__(self) -> str:
        return f"InMemoryDataSource(name={self.shm.name}, len={len(self)})"


InMemoryDataSource = SharedMemoryDataSource
"""The name of `SharedMemoryDataSource` in ``grain.python``."""


def tfds_data_source(data: Any, split: Any = None, *, fields: Sequence[str] | None = None) -> Any:
    """Return the same as ``tfds.data_source``, without TensorFlow Datasets; see `TfdsSource`.

    `data` is the directory with ``dataset_info.json``; or a result of ``tfds.data_source``, which is returned
    unchanged. `split` is as there, such as ``"train[:75%]"``. A list gives a list, None a dict of all splits.
    """
    if isinstance(data, (str, os.PathLike)):
        if split is None:
            return {name: TfdsSource(data, split=name, fields=fields) for name in split_names(data)}
        if isinstance(split, (list, tuple)):
            return [TfdsSource(data, split=one, fields=fields) for one in split]
        return TfdsSource(data, split=split, fields=fields)
    if not isinstance(data, RandomAccessSource) or split is not None or fields is not None:
        raise ConfigError(
            f"pass a directory, or a data source without split and fields; got {data!r}", key="data", value=data
        )
    return data
