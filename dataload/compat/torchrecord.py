"""TorchRecord's interface: change ``from torchrecord import Writer, TorchRecord``.

Differences from the original:

- The sampler runs the shuffle pool, not the dataset. An epoch therefore contains each record exactly once, for any
  number of records and workers, and `TRDataset` returns the requested records to PyTorch's own `DataLoader`, too.
- Each epoch has a different order. Without shuffling, it is the order of the file.
- A missing key raises `CorruptFileError` instead of giving the next record. Keys may have any width.
- A written file appears when it is complete, and replaces an existing TorchRecord.
- `default_transform` resizes with torch, several times as fast as Pillow. As with pillow-simd, which the original
  recommends, some 0.3% of the values differ from Pillow's by 1/255.
- With the default transform, the workers of `TorchRecord` are threads, and failures are `WorkerError`s.
- `DataLoader` is torch's; it takes the same arguments.
"""

import functools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, cast

import numpy as np

from dataload._util.indexing import check_index, even_split
from dataload._util.lazy import load_optional
from dataload._util.settings import check_count
from dataload.codecs.decoders import decode_image, image_kind
from dataload.codecs.tensorprotos import TYPES
from dataload.errors import ConfigError
from dataload.samplers import PoolShuffle, Sequential
from dataload.sources.lmdb import TORCHRECORD
from dataload.sources.lmdb.reader import LMDBShard
from dataload.sources.lmdb.torchrecord import TorchRecordSource
from dataload.sources.lmdb.tree import is_torchrecord, list_subdatabases
from dataload.sources.lmdb.writer import NewEnvironment
from dataload.sources.shards import shard_of
from dataload.storage import storage_of
from dataload.storage.errors import file_errors
from dataload.storage.local.record_files import open_regular
from dataload.types import Int64Array

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    TensorProto: Any
    TensorProtos: Any

__all__ = [
    "DataLoader",
    "TRDataset",
    "TRSampler",
    "TensorProto",
    "TensorProtos",
    "TorchRecord",
    "Writer",
    "default_data_process_func",
    "default_transform",
]

_POOL_PER_WORKER = 64


def __getattr__(name: str) -> Any:
    if name in ("TensorProto", "TensorProtos"):  # these need protobuf, imported on first use
        return message_class(name)
    if name == "DataLoader":
        return _torch_images(name).DataLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def default_data_process_func(data: str) -> Any:
    """Return the image and label of a line such as ``"path/of/image.jpg 3"``.

    They are two tensors of type BYTE in `TensorProtos`: RGB pixels in rows, with dims [width, height]; and text.
    """
    parts = data.split(" ")
    if len(parts) < 2:
        raise IndexError(f"a line of the data list must be 'path label', got {data!r}")
    message = message_class("TensorProtos")()
    with open(open_regular(parts[0]), "rb") as file:
        image = decode_image(file.read(), kind=image_kind(parts[0]))
    message.protos.add(dims=image.shape[1::-1], data_type=BYTE, byte_data=image.tobytes())
    message.protos.add(data_type=BYTE, byte_data=parts[1].encode())
    return message


def default_transform(tensor_protos: Any) -> tuple[Any, int]:
    """Return the image, (3, 224, 224) float32 in [0, 1], and label written by `default_data_process_func`."""
    images = _torch_images("default_transform")
    image, label = images.read_image(tensor_protos)
    return images.collate_images([(image, label)])[0][0], label


def _torch_images(needed_by: str) -> Any:
    module = "dataload.compat._torchrecord_images"
    return load_optional(module, needed_by=needed_by, extra="torch", package="torch")


class Writer:
    """Writes the items named in a .txt or .csv file, one a line, to a TorchRecord of `db_num` equal parts.

    `map_size` is ignored, because the map grows as needed. Other files in `output_dir` are left alone.
    """

    def __init__(
        self,
        data_list: str | None = None,
        output_dir: str = "./torchrecord",
        map_size: int = 1 << 40,
        db_num: int = 1,
        shuffle: bool = True,
        data_process_func: Callable[[str], Any] = default_data_process_func,
    ) -> None:
        if data_list is None or not os.fspath(data_list).endswith((".txt", ".csv")):
            message = f"data_list must be a .txt or .csv file, got {data_list!r}"
            raise ConfigError(message, key="data_list", value=data_list)
        check_count("db_num", db_num, least=1)
        self.data_list: str = data_list
        self.output_dir: str = output_dir
        self.map_size: int = map_size
        self.db_num: int = db_num
        self.shuffle: bool = shuffle
        self.data_process_func: Callable[[str], Any] = data_process_func

    def parse_data_list(self) -> list[str]:
        """Return the lines in writing order."""
        with file_errors(self.data_list), open(open_regular(self.data_list), encoding="utf-8") as stream:
            lines = [line.strip() for line in stream]
        if self.shuffle:
            random.shuffle(lines)
        return lines

    def write(self) -> None:
        """Write everything. A ConfigError if `output_dir` holds an LMDB environment that is not a TorchRecord."""
        lines = self.parse_data_list()
        spans = even_split(len(lines), self.db_num)
        width = len(str(max(stop - start for start, stop in spans)))  # the original's reader needs equal widths
        destination = os.path.join(self.output_dir, "data.mdb")
        if os.path.exists(destination) and not is_torchrecord(self.output_dir):
            message = f"{destination} is not a TorchRecord and will not be replaced: choose another output_dir"
            raise ConfigError(message, key="output_dir")
        os.makedirs(self.output_dir, exist_ok=True)
        with storage_of(destination).create(destination, overwrite=True) as part:
            folder = f"{part.temporary}.lmdb"
            with closing(NewEnvironment(folder, TORCHRECORD, self.db_num)) as environment:
                for database, (start, stop) in enumerate(spans):
                    for number, line in enumerate(lines[start:stop]):
                        value = self.data_process_func(line).SerializeToString()
                        environment.put(b"%0*d" % (width, number), value, database=database, append=True)
                environment.finish()
            os.rename(os.path.join(folder, "data.mdb"), part.temporary)
            part.publish()


class TRSampler:
    """Batches of record keys ``(sub-database, key, closes)`` for a `TRDataset`.

    `closes` is 1 for the last record of its sub-database in an epoch. Each iteration is another epoch. The seed comes
    from the global generator of `random`: after ``random.seed(0)``, a new sampler repeats the same epochs.

    `shuffle` goes through each of the first `record_num` sub-databases, then through a pool of 64 records or 4 batches
    per worker, whichever is larger; `full_shuffle` goes through all records.
    """

    def __init__(
        self,
        record_path: str,
        record_num: int,
        shuffle: bool = False,
        full_shuffle: bool = False,
        batch_size: int = 1,
        num_workers: int = 1,
    ) -> None:
        check_count("batch_size", batch_size, least=1)
        self.record_path: str = record_path
        self.record_num: int = record_num
        self.shuffle: bool = shuffle
        self.full_shuffle: bool = full_shuffle
        self.batch_size: int = batch_size
        self.num_workers: int = num_workers
        self._lengths = _lengths(record_path, record_num)
        self._seed, self._epoch = random.getrandbits(63), 0

    def __len__(self) -> int:
        return math.ceil(sum(self._lengths) / self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        keys, self._epoch = self._keys(self._epoch), self._epoch + 1
        for start in range(0, len(keys), self.batch_size):
            yield list(map(tuple, keys[start : start + self.batch_size].tolist()))

    def record_numbers(self, epoch: int) -> Int64Array:
        """Return the records of an epoch in order, numbered across all sub-databases."""
        databases, numbers, _ = self._keys(epoch).T
        return np.concatenate(([0], np.cumsum(self._lengths)))[databases] + numbers

    def _keys(self, epoch: int) -> Int64Array:
        """Return the keys of an epoch in order, (records, 3) int64."""
        generator = np.random.default_rng((self._seed, epoch))
        numbers = [generator.permutation(length) if self.shuffle else np.arange(length) for length in self._lengths]
        databases = np.repeat(np.arange(len(self._lengths)), self._lengths)
        keys = np.stack((databases, np.concatenate(numbers)), 1)
        if self.full_shuffle:
            keys = generator.permutation(keys)
        if self.shuffle:
            pool = max(_POOL_PER_WORKER, 4 * self.batch_size) * max(1, self.num_workers)
            order = PoolShuffle(Sequential(len(keys)), pool, self._seed)
            keys = keys[order.indices(np.arange(len(keys)), epoch=epoch)]
        closes = np.zeros((len(keys), 1), np.int64)
        _, from_end = np.unique(keys[::-1, 0], return_index=True)
        closes[len(keys) - 1 - from_end] = 1
        return np.concatenate((keys, closes), 1)


class TRDataset:
    """Records of a TorchRecord by key, for PyTorch's `DataLoader` with a `TRSampler`.

    `transform` makes a sample of a message, of the class `proto` (by default `TensorProtos`), of the first `record_num`
    sub-databases. `shuffle` and `batch_size` are the sampler's, and ignored here.
    """

    def __init__(
        self,
        record_path: str = "",
        transform: Callable[[Any], Any] = default_transform,
        record_num: int = 1,
        shuffle: bool = False,
        batch_size: int = 1,
        proto: Any = None,
    ) -> None:
        self.record_path: str = record_path
        self.record_num: int = record_num
        self.transform: Callable[[Any], Any] = transform
        self.proto: Any = proto
        self.shuffle: bool = shuffle
        self.batch_size: int = batch_size
        self._lengths = _lengths(record_path, record_num)
        self._source = _StoredSource(record_path)
        len(self._source)  # open the file, so that errors are raised here and not in a worker

    def __len__(self) -> int:
        return sum(self._lengths)

    def __getitem__(self, item: SupportsIndex | Sequence[int]) -> Any:
        """Return the sample of a key, or of a number that counts the records of all sub-databases."""
        return self._samples([item])[0]

    def __getitems__(self, items: Sequence[SupportsIndex | Sequence[int]]) -> list[Any]:
        """Return several samples in one read. PyTorch's `DataLoader` calls this."""
        if type(self).__getitem__ is not TRDataset.__getitem__:  # respect subclasses that override __getitem__
            return [self[item] for item in items]
        return self._samples(items)

    def read_item(self, db_idx: int, key_idx: int) -> bytes:
        """Return the stored bytes of a message."""
        return self._source.stored([self._index((db_idx, key_idx))])[0]

    def parse_byte(self, byte_str: bytes) -> Any:
        """Return the sample decoded from a message's stored bytes."""
        message = (self.proto or message_class("TensorProtos"))()
        message.ParseFromString(byte_str)
        return self.transform(message)

    def _samples(self, items: Sequence[SupportsIndex | Sequence[int]]) -> list[Any]:
        samples: list[Any] = []
        indices = [self._index(item) for item in items]
        for index, data in zip(indices, self._source.stored(indices), strict=True):
            try:
                samples.append(self.parse_byte(data))
            except Exception as error:
                database, key = shard_of(np.cumsum(self._lengths), index)
                error.add_note(f"in {self.record_path}, record {key} of db{database}")
                raise
        return samples

    def _index(self, item: Any) -> int:
        if np.ndim(item) == 0:
            return check_index(item, len(self))
        db_idx, key_idx = item[:2]
        if not 0 <= db_idx < len(self._lengths):
            raise IndexError(f"sub-database {db_idx} is out of range for {len(self._lengths)} of {self.record_path}")
        if not 0 <= key_idx < self._lengths[db_idx]:
            raise IndexError(f"record {key_idx} is out of range for {self._lengths[db_idx]} of db{db_idx}")
        return sum(self._lengths[:db_idx]) + int(key_idx)


def TorchRecord(
    record_path: str = "",
    record_num: int = 1,
    shuffle: bool = True,
    batch_size: int = 1,
    num_workers: int = 1,
    transform: Callable[[Any], Any] = default_transform,
) -> Any:
    """Return a PyTorch `DataLoader` for a TorchRecord; see `TRDataset` and `TRSampler`."""
    images = _torch_images("TorchRecord")
    dataset = TRDataset(record_path, transform, record_num, shuffle, batch_size)
    sampler = TRSampler(record_path, record_num, shuffle, batch_size=batch_size, num_workers=num_workers)
    loader_class = images.ImageLoader if transform is default_transform else images.DataLoader
    return loader_class(dataset, batch_sampler=sampler, num_workers=num_workers)


class _StoredSource(TorchRecordSource):
    """A source that also returns the stored bytes of records."""

    def stored(self, indices: list[int]) -> list[bytes]:
        return cast("LMDBShard", self._data_set().reader(0)).stored(np.array(indices, np.int64))


def _lengths(path: str, record_num: int) -> tuple[int, ...]:
    """Return the record counts of the first `record_num` sub-databases."""
    check_count("record_num", record_num, least=1)
    with file_errors(path):
        entries = {found.name: found.entries for found in list_subdatabases(os.fspath(path))}
    names = [b"db%d" % number for number in range(record_num)]
    missing = [name.decode() for name in names if name not in entries]
    if missing:
        message = f"record_num is {record_num}, but {path} has no sub-database {missing[0]}"
        raise ConfigError(message, key="record_num", value=record_num)
    return tuple(entries[name] for name in names)


# caffe2's messages `TensorProto` and `TensorProtos`, built with protobuf on first use


BYTE: Final = 3  # TensorProto.BYTE

_PACKAGE: Final = "torchrecord"


@functools.cache
def message_class(name: str) -> Any:
    """Return the class ``"TensorProto"`` or ``"TensorProtos"``."""
    found = _load("message_factory").GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))
    found.__module__ = __name__  # where pickle looks for it
    return found


@functools.cache
def _pool() -> Any:
    # A private pool, because another package may have registered caffe2's messages.
    pool = _load("descriptor_pool").DescriptorPool()
    pool.Add(_load("descriptor_pb2").FileDescriptorProto(**_SCHEMA))
    return pool


def _load(module: str) -> Any:
    return load_optional(f"google.protobuf.{module}", needed_by="TensorProtos", extra="lmdb", package="protobuf")


def _field(name: str, number: int, kind: int | str, label: int = 1, **more: Any) -> dict[str, Any]:
    """Return a FieldDescriptorProto; `kind` is the number of a scalar type or the name of a message."""
    typed = {"type": kind} if isinstance(kind, int) else {"type": 11, "type_name": f".{_PACKAGE}.{kind}"}
    return {"name": name, "number": number, "label": label, **typed, **more}


_DOUBLE, _FLOAT, _INT64, _INT32, _STRING, _BYTES, _ENUM = 1, 2, 3, 5, 9, 12, 14
_REQUIRED, _REPEATED = 2, 3  # labels
_PACKED: Final = {"packed": True}
_TENSOR_FIELDS: Final = [
    _field("dims", 1, _INT64, _REPEATED),
    _field("data_type", 2, _ENUM, type_name=f".{_PACKAGE}.TensorProto.DataType", default_value="FLOAT"),
    _field("float_data", 3, _FLOAT, _REPEATED, options=_PACKED),
    _field("int32_data", 4, _INT32, _REPEATED, options=_PACKED),
    _field("byte_data", 5, _BYTES),
    _field("string_data", 6, _BYTES, _REPEATED),
    _field("name", 7, _STRING),
    _field("double_data", 9, _DOUBLE, _REPEATED, options=_PACKED),
    _field("int64_data", 10, _INT64, _REPEATED, options=_PACKED),
    _field("segment", 11, "TensorProto.Segment"),
]
_SEGMENT_FIELDS: Final = [_field("begin", 1, _INT64, _REQUIRED), _field("end", 2, _INT64, _REQUIRED)]
_DATA_TYPES: Final = {0: "UNDEFINED", **{number: kind.name for number, kind in TYPES.items()}}
_TENSOR: Final = {
    "name": "TensorProto",
    "field": _TENSOR_FIELDS,
    "nested_type": [{"name": "Segment", "field": _SEGMENT_FIELDS}],
    "enum_type": [
        {"name": "DataType", "value": [{"name": name, "number": number} for number, name in _DATA_TYPES.items()]}
    ],
}
_SCHEMA: Final = {
    "name": "dataload_tensor_protos.proto",
    "package": _PACKAGE,
    "syntax": "proto2",
    "message_type": [_TENSOR, {"name": "TensorProtos", "field": [_field("protos", 1, "TensorProto", _REPEATED)]}],
}
