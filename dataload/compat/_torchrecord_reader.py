"""TorchRecord's `TRSampler` and `TRDataset`; see `dataload.compat.torchrecord`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dataload._util.optional import load_optional
from dataload.compat._tensor_protos import message_class
from dataload.errors import ConfigError
from dataload.samplers import PoolShuffle, Sequential
from dataload.sources.lmdb.file import subdatabases
from dataload.sources.lmdb.torchrecord import TorchRecordSource
from dataload.storage.errors import file_errors
from dataload.types import Int64Array

__all__ = ["TRDataset", "TRSampler", "default_transform"]

_SIDE = 224
_POOL_PER_WORKER = 64


def default_transform(tensor_protos: Any) -> tuple[Any, int]:
    """What `default_data_process_func` made, for training.

    Returns:
        (3, 224, 224) float32, a tensor in [0, 1]; and the label.

    Raises:
        IndexError: The message has fewer than two tensors.
        MissingDependencyError: Pillow or torch is not installed.
    """
    image_module = load_optional("PIL.Image", needed_by="default_transform", extra="tar", package="pillow")
    torch = load_optional("torch", needed_by="default_transform", extra="torch")
    pixels, label = tensor_protos.protos[0], tensor_protos.protos[1]
    picture = image_module.frombytes("RGB", tuple(pixels.dims), pixels.byte_data)
    resized = np.asarray(picture.resize((_SIDE, _SIDE), image_module.Resampling.BILINEAR))
    return torch.from_numpy(resized.transpose(2, 0, 1).astype(np.float32) / np.float32(255)), int(label.byte_data)


class TRSampler:
    """Batches of places in a TorchRecord, each ``(sub-database, key, closes)``.

    `closes` is 1 for the last record of its sub-database in an epoch. Iterating again is the next epoch. The global
    generator of `random` decides: after ``random.seed(0)`` a new sampler gives the same epochs again.

    Args:
        record_path: The directory.
        record_num: How many sub-databases to read, from db0 on.
        shuffle: Shuffle within each sub-database, and mix through a pool of 64 records a worker, or 4 batches.
        full_shuffle: Shuffle all records.
        batch_size: Places in a batch; the last one may have fewer.
        num_workers: Of the loader, for the size of the pool.

    Raises:
        ConfigError: A number is less than 1, or there are not so many sub-databases.
        CorruptFileError: The file is truncated or damaged.
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
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}", key="batch_size", value=batch_size)
        self.record_path, self.record_num = record_path, record_num
        self.shuffle, self.full_shuffle = shuffle, full_shuffle
        self.batch_size, self.num_workers = batch_size, num_workers
        self._lengths = _lengths(record_path, record_num)
        self._seed, self._epoch = random.getrandbits(63), 0

    def __len__(self) -> int:
        return math.ceil(sum(self._lengths) / self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        places, self._epoch = self._places(self._epoch), self._epoch + 1
        for start in range(0, len(places), self.batch_size):
            yield list(map(tuple, places[start : start + self.batch_size].tolist()))

    def _places(self, epoch: int) -> Int64Array:
        """(records, 3) int64, in the order of an epoch."""
        generator = np.random.default_rng((self._seed, epoch))
        keys = [generator.permutation(length) if self.shuffle else np.arange(length) for length in self._lengths]
        numbers = np.repeat(np.arange(len(self._lengths)), self._lengths)
        places = np.stack((numbers, np.concatenate(keys)), 1)
        if self.full_shuffle:
            places = generator.permutation(places)
        if self.shuffle:
            pool = max(_POOL_PER_WORKER, 4 * self.batch_size) * max(1, self.num_workers)
            order = PoolShuffle(Sequential(len(places)), pool, self._seed)
            places = places[order.indices(np.arange(len(places)), epoch=epoch)]
        closes = np.zeros((len(places), 1), np.int64)
        _, from_end = np.unique(places[::-1, 0], return_index=True)
        closes[len(places) - 1 - from_end] = 1
        return np.concatenate((places, closes), 1)


class TRDataset:
    """Records of a TorchRecord by their place, for torch's `DataLoader` with a `TRSampler`.

    Args:
        record_path: The directory.
        transform: Message -> sample.
        record_num: How many sub-databases to read, from db0 on.
        shuffle: Accepted: the sampler shuffles.
        batch_size: Accepted.
        proto: Class of the messages; `TensorProtos` by default.

    Raises:
        ConfigError: There are not so many sub-databases.
        CorruptFileError: The file is truncated or damaged; when a record is read, it is missing.
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
        self.record_path, self.record_num = record_path, record_num
        self.transform, self.proto = transform, proto
        self.shuffle, self.batch_size = shuffle, batch_size
        self._lengths = _lengths(record_path, record_num)
        self._source = _StoredSource(record_path)
        len(self._source)  # what is wrong with the file is said here, and not by a worker

    def __len__(self) -> int:
        return sum(self._lengths)

    def __getitem__(self, item: Sequence[int]) -> Any:
        return self._samples([item])[0]

    def __getitems__(self, items: Sequence[Sequence[int]]) -> list[Any]:
        """Several records in one read: the method that torch's fetcher looks for."""
        if type(self).__getitem__ is not TRDataset.__getitem__:  # a subclass that changes samples
            return [self[item] for item in items]
        return self._samples(items)

    def read_item(self, db_idx: int, key_idx: int) -> bytes:
        """A message as it is stored."""
        return self._source.stored([self._index(db_idx, key_idx)])[0]

    def parse_byte(self, byte_str: bytes) -> Any:
        """A sample from a message as it is stored."""
        message = (self.proto or message_class("TensorProtos"))()
        message.ParseFromString(byte_str)
        return self.transform(message)

    def _samples(self, items: Sequence[Sequence[int]]) -> list[Any]:
        samples: list[Any] = []
        for item, data in zip(items, self._source.stored([self._index(*item[:2]) for item in items]), strict=True):
            try:
                samples.append(self.parse_byte(data))
            except Exception as error:
                error.add_note(f"in {self.record_path}, record {item[1]} of db{item[0]}")
                raise
        return samples

    def _index(self, db_idx: int, key_idx: int) -> int:
        if not 0 <= db_idx < len(self._lengths):
            raise IndexError(f"sub-database {db_idx} is out of range for {len(self._lengths)} of {self.record_path}")
        if not 0 <= key_idx < self._lengths[db_idx]:
            raise IndexError(f"record {key_idx} is out of range for {self._lengths[db_idx]} of db{db_idx}")
        return sum(self._lengths[:db_idx]) + int(key_idx)


class _StoredSource(TorchRecordSource):
    """Records as they are stored."""

    def stored(self, indices: list[int]) -> list[bytes]:
        return self._shard(0).stored(np.array(indices, np.int64))


def _lengths(path: str, record_num: int) -> tuple[int, ...]:
    """Records of each of the first `record_num` sub-databases."""
    if record_num < 1:
        raise ConfigError(f"record_num must be at least 1, got {record_num}", key="record_num", value=record_num)
    with file_errors(path):
        entries = {found.name: found.entries for found in subdatabases(path)}
    names = [b"db%d" % number for number in range(record_num)]
    missing = [name.decode() for name in names if name not in entries]
    if missing:
        message = f"record_num says {record_num}, and {path} has no sub-database {missing[0]}"
        raise ConfigError(message, key="record_num", value=record_num)
    return tuple(entries[name] for name in names)
