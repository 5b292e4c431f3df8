"""The base classes of sources and shards in LMDB environments."""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from dataload.sources.files import FileSource, ShardReader
from dataload.sources.format import Format
from dataload.sources.lmdb.environment import Environment, Transaction, open_environment
from dataload.sources.lmdb.file import data_file
from dataload.storage import storage_of
from dataload.storage.errors import rewritten_error
from dataload.types import FieldSpec, Int64Array

T_co = TypeVar("T_co", covariant=True)


class LMDBShard(ShardReader[T_co]):
    """One environment, closed between `release` and the next read.

    Args:
        path: A directory with data.mdb, or a single file.
        entry: The format that is read.
    """

    _databases: tuple[bytes | None, ...] = ()
    """Names of the databases that are read: a transaction only sees those opened before it begins."""
    _fields: Mapping[str, FieldSpec]

    def __init__(self, path: str, entry: Format) -> None:
        self._path = path
        self._format = entry
        self._environment: Environment | None = open_environment(path, entry)
        self._file = self._environment.path
        self._identity = storage_of(path).identity(self._file)
        self._fields = {}

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The fields of the first record."""
        return self._fields

    def environment(self) -> Environment:
        """Return the environment, opened again if it was released.

        Raises:
            CorruptFileError: It has been written to since it was first opened.
        """
        environment = self._environment
        if environment is None:
            environment = open_environment(self._path, self._format)
            if storage_of(environment.path).identity(environment.path) != self._identity:
                raise rewritten_error(environment.path)
            for name in self._databases:
                environment.database(name)
            self._environment = environment
        return environment

    def release(self) -> None:
        """End the lease of the environment."""
        self._environment = None

    @abstractmethod
    def _values(self, environment: Environment, txn: Transaction, indices: Int64Array) -> list[Any]:
        """Return the stored values; views are only valid within the transaction."""

    def stored(self, indices: Int64Array) -> list[bytes]:
        """Return records as they are stored."""
        environment = self.environment()
        with environment.reading(buffers=False) as txn:
            return self._values(environment, txn, indices)

    def identity(self) -> list[str]:
        """Return hashes of the first and the last record: LMDB keeps its own pages at both ends of a file."""
        ends = np.unique([0, len(self) - 1]) if len(self) else np.empty(0, np.int64)
        return [hashlib.blake2b(data, digest_size=16).hexdigest() for data in self.stored(ends)]


class LMDBFileSource(FileSource[T_co]):
    """A data set in LMDB environments, each a directory or a file; its shards are `LMDBShard`."""

    def _data_file(self, path: str) -> str:
        return data_file(path)
