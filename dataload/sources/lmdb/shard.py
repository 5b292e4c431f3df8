"""What the sources of LMDB environments share."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from typing import TypeVar

import numpy as np

from dataload.errors import CorruptFileError
from dataload.sources.files import FileSource, ShardReader
from dataload.sources.lmdb.environment import Environment, open_environment
from dataload.sources.lmdb.file import data_file
from dataload.types import Int64Array

__all__ = ["LMDBFileSource", "LMDBShard"]

T_co = TypeVar("T_co", covariant=True)


class LMDBShard(ShardReader[T_co]):
    """One environment; between `release` and the next read it is closed.

    Args:
        path: A directory with data.mdb, or a single file.
        needed_by: As in `load_optional`.
    """

    def __init__(self, path: str, needed_by: str) -> None:
        self._path = path
        self._needed_by = needed_by
        self._environment: Environment | None = open_environment(path, needed_by)
        self._info = self._environment.info

    def environment(self) -> Environment:
        """Return the environment, opened again if it was released.

        Raises:
            CorruptFileError: It was written to since it was opened first.
        """
        environment = self._environment
        if environment is None:
            environment = open_environment(self._path, self._needed_by)
            if environment.info != self._info:
                raise CorruptFileError(
                    "the environment was written to since it was opened: open the data set again",
                    path=environment.path,
                )
            self._environment = environment
        return environment

    def release(self) -> None:
        """See `ShardReader.release`."""
        self._environment = None

    @abstractmethod
    def stored(self, indices: Int64Array) -> list[bytes]:
        """Return records as they are stored."""

    def identity(self) -> list[str]:
        """Return hashes of the first and the last record: at both ends of a file LMDB keeps its own books."""
        ends = np.unique([0, len(self) - 1]) if len(self) else np.empty(0, np.int64)
        return [hashlib.blake2b(data, digest_size=16).hexdigest() for data in self.stored(ends)]


class LMDBFileSource(FileSource[T_co]):
    """A data set in LMDB environments, each a directory or a file; its shards are `LMDBShard`."""

    def _data_file(self, path: str) -> str:
        return data_file(path)
