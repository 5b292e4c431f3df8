"""One committed transaction of an LMDB file, read without locks while others may write; see `file`."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from dataload.errors import ChangedFileError, DataloadError, SourceError
from dataload.sources.lmdb.file import FileInfo, Tree, is_unchanged, open_file, read_info
from dataload.sources.lmdb.tree import subdatabases
from dataload.storage import RecordFile, Remote, storage_of
from dataload.types import Array, Int64Array

T = TypeVar("T")

_ATTEMPTS = 5
_SAMPLES, _SAMPLE_BYTES = 8, 256


class Snapshot:
    """An open file, and the meta page of the transaction that is read of it."""

    def __init__(self, file: RecordFile, info: FileInfo) -> None:
        self.file = file
        self.info = info
        self._ranges = np.empty((2, 0), np.int64)
        self._samples: list[bytes] = []

    def sample(self, offsets: Int64Array, lengths: Array | int) -> None:
        """Remember some values: an environment that is copied over this one may have the same meta page."""
        rows = np.flatnonzero(offsets >= 0)  # others are missing
        rows = rows[:: len(rows) // _SAMPLES + 1]
        sizes = np.minimum(np.broadcast_to(lengths, offsets.shape)[rows], _SAMPLE_BYTES)
        self._ranges = np.stack([offsets[rows], sizes.astype(np.int64)])
        self._samples = self.file.copies(*self._ranges)

    @contextmanager
    def reading(self) -> Generator[RecordFile]:
        """Check after reads that they belong to the transaction; a ChangedFileError takes the place of other errors.

        It means that two later transactions have been committed, so that the next may have overwritten what was read,
        or that something else than LMDB has written to the file.
        """
        try:
            yield self.file
        finally:
            overwritten = self.file.is_written() and self.file.copies(*self._ranges) != self._samples
            if overwritten or not is_unchanged(self.file, self.info):
                raise ChangedFileError(
                    "the file has been written to since it was opened, so its records may be overwritten: open the "
                    "data set again",
                    path=self.info.path,
                )


def open_snapshot(
    path: str, parse: Callable[[RecordFile, FileInfo], T], *, mapped: bool = True, remote: Remote | None = None
) -> tuple[Snapshot, T]:
    """Open an environment and parse it by `parse`; start again if a writer overtakes that.

    A file that is written to faster than it can be read is a SourceError. For other arguments see `open_file`.
    """
    for _ in range(_ATTEMPTS):
        file, info = open_file(path, mapped=mapped, remote=remote), None
        try:
            info = read_info(file)
            result = parse(file, info)
        except DataloadError:
            if _is_unchanged(file, info, remote):
                raise
        else:
            if is_unchanged(file, info):
                return Snapshot(file, info), result
    raise SourceError(
        f"{path} was written to {_ATTEMPTS} times while it was being opened: open it when its writer has finished, or "
        "a copy of it (mdb_copy)",
        path=path,
    )


def _is_unchanged(file: RecordFile, info: FileInfo | None, remote: Remote | None) -> bool:
    """Return whether no writer can have caused an error. Without a meta page, the size of the file tells."""
    if info is not None:
        return is_unchanged(file, info)
    return storage_of(file.path, remote).identity(file.path).size == file.size


def list_subdatabases(path: str, remote: Remote | None = None) -> list[Tree]:
    """Return the named databases of an environment in LMDB's order; raise like `open_snapshot`."""
    return open_snapshot(path, subdatabases, remote=remote)[1]


def is_torchrecord(path: str, remote: Remote | None = None) -> bool:
    """Return whether the main database has a sub-database ``db0``; raise like `open_snapshot`."""
    return any(found.name == b"db0" for found in list_subdatabases(path, remote))
