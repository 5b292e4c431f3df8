"""What sources of LMDB environments share."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from dataload.errors import CorruptFileError
from dataload.formats.lmdb_file import data_file
from dataload.sources.base import spec_of
from dataload.sources.files import FileSource, ShardReader
from dataload.state import digest
from dataload.types import FieldSpec, Int64Array

__all__ = ["LMDBFileSource", "LMDBShard"]

T_co = TypeVar("T_co", covariant=True)


class LMDBShard(ShardReader[T_co]):
    """An opened environment."""

    @abstractmethod
    def stored(self, indices: Int64Array) -> list[bytes]:
        """Records as they are stored."""

    def edges(self) -> list[str]:
        """Hashes of the first and the last record."""
        places = np.unique([0, len(self) - 1]) if len(self) else np.empty(0, np.int64)
        return [hashlib.blake2b(data, digest_size=16).hexdigest() for data in self.stored(places)]

    def first_fields(self) -> Mapping[str, FieldSpec]:
        """What the first record holds; nothing if its records are bytes, or there is none."""
        if not len(self):
            return {}
        try:
            record: Any = self.read(np.zeros(1, np.int64), None)[0]
        except CorruptFileError:  # raised when it is read: the other records may be good
            return {}
        return {name: spec_of(value) for name, value in record.items()} if isinstance(record, Mapping) else {}


class LMDBFileSource(FileSource[T_co]):
    """A data set in LMDB environments, each a directory or a file; its shards are `LMDBShard`."""

    def _data_file(self, path: str) -> str:
        return data_file(path)

    def _shard(self, number: int) -> LMDBShard[T_co]:
        shard = self._reader(self._state(), number)
        assert isinstance(shard, LMDBShard)
        return shard

    def fingerprint(self) -> str:
        """See `Source.fingerprint`. LMDB keeps its own books at both ends of a file, so records are looked at too."""
        if self._record_fingerprint is None:
            edges = [self._shard(number).edges() for number in range(len(self._paths))]
            self._record_fingerprint = digest(super().fingerprint(), edges)
        return self._record_fingerprint

    _record_fingerprint: str | None = None
