"""What sources of LMDB environments share."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from typing import TypeVar

import numpy as np

from dataload.sources.files import FileSource, ShardReader
from dataload.sources.lmdb.file import data_file
from dataload.types import Int64Array

__all__ = ["LMDBFileSource", "LMDBShard"]

T_co = TypeVar("T_co", covariant=True)


class LMDBShard(ShardReader[T_co]):
    """An opened environment."""

    @abstractmethod
    def stored(self, indices: Int64Array) -> list[bytes]:
        """Records as they are stored."""

    def identity(self) -> list[str]:
        """Hashes of the first and the last record: at both ends of a file LMDB keeps its own books."""
        places = np.unique([0, len(self) - 1]) if len(self) else np.empty(0, np.int64)
        return [hashlib.blake2b(data, digest_size=16).hexdigest() for data in self.stored(places)]


class LMDBFileSource(FileSource[T_co]):
    """A data set in LMDB environments, each a directory or a file; its shards are `LMDBShard`."""

    def _data_file(self, path: str) -> str:
        return data_file(path)

    def _shard(self, number: int) -> LMDBShard[T_co]:
        shard = self._reader(self._state(), number)
        assert isinstance(shard, LMDBShard)
        return shard
