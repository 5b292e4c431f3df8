"""One committed transaction of an LMDB file, read without locks while others may write; see `file`."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from dataload.errors import CorruptFileError, DataloadError, SourceError
from dataload.sources.lmdb.file import FileInfo, Tree, is_unchanged, open_file, read_info
from dataload.sources.lmdb.tree import subdatabases
from dataload.storage import RecordFile, Remote, storage_of

T = TypeVar("T")

_ATTEMPTS = 5


class Snapshot:
    """An open file, and the transaction that is read of it.

    Attributes:
        file: The file.
        info: The meta page of the transaction.
    """

    def __init__(self, file: RecordFile, info: FileInfo) -> None:
        self.file = file
        self.info = info

    @contextmanager
    def reading(self) -> Generator[RecordFile]:
        """Check after reads that they belong to the transaction.

        Raises:
            CorruptFileError: Two later transactions have been committed, so that the next may have overwritten what was
                read. This takes the place of other errors.
        """
        try:
            yield self.file
        finally:
            if not is_unchanged(self.file, self.info):
                raise CorruptFileError(
                    "the file has been written to since it was opened, so its records may be overwritten: open the "
                    "data set again",
                    path=self.info.path,
                )


def open_snapshot(
    path: str, parse: Callable[[RecordFile, FileInfo], T], *, mapped: bool = True, remote: Remote | None = None
) -> tuple[Snapshot, T]:
    """Open an environment and parse it; start again if a writer overtakes that.

    Args:
        path: A directory with data.mdb, or the file itself.
        parse: Reads what is needed of the file.
        mapped: Map the file into memory, if that is safe.
        remote: The settings of data at URLs.

    Returns:
        The snapshot, and the result of `parse`.

    Raises:
        SourceNotFoundError: There is no such file.
        UnsupportedFormatError: The file is from another version of LMDB or kind of machine.
        CorruptFileError: The file is not an LMDB file, or is damaged or truncated.
        SourceError: The file is written to faster than it can be read.
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
