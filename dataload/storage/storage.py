"""The protocol of storage backends, and the choice of a backend by path."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dataload.storage.local.files import LocalFile, LocalStorage
from dataload.storage.local.parts import Part
from dataload.storage.local.reopened import FileIdentity
from dataload.storage.records import RecordFile
from dataload.types import Int64Array


class Storage(Protocol):
    """A storage backend: reads and writes bytes by path, and knows nothing about formats.

    Methods that read raise `SourceNotFoundError` if nothing exists at the path, and `SourceError` if it cannot be read.
    All methods may be called from several threads at once.
    """

    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory at `path`."""
        ...

    def is_directory(self, path: str) -> bool:
        """Return whether `path` is a directory."""
        ...

    def list(self, path: str) -> Sequence[str]:
        """Return the names in a directory, sorted, without hidden ones."""
        ...

    def glob(self, pattern: str) -> Sequence[str]:
        """Return the paths that match a pattern with ``*``, ``?`` or ``[...]``, sorted."""
        ...

    def size(self, path: str) -> int:
        """Return the size in bytes of a file, or of all files in a directory."""
        ...

    def identity(self, path: str) -> FileIdentity:
        """Return the version of a file."""
        ...

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        ...

    def read_ranges(self, path: str, offsets: Int64Array, lengths: Int64Array) -> Sequence[bytes]:
        """Return byte ranges of a file in the requested order; a range that exceeds the file is shorter."""
        ...

    def open(self, path: str) -> LocalFile:
        """Open a file for reading at any offset."""
        ...

    def map(self, path: str, *, mapped: bool = True) -> RecordFile:
        """Open a file to copy records out of it, mapped into memory if `mapped` and that is safe; see `can_map`."""
        ...

    def create(self, path: str, *, overwrite: bool = False) -> Part:
        """Start a file or directory that appears at `path` only when it is published."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file or directory, if it exists."""
        ...

    def lock(self, path: str) -> AbstractContextManager[None]:
        """Hold an exclusive lock named after `path`; raise a `SourceError` that names the holder if it is taken."""
        ...


_LOCAL = LocalStorage()


def storage_of(path: str) -> Storage:
    """Return the backend that holds `path`."""
    del path  # local files are the only backend
    return _LOCAL
