"""What a storage backend offers, and which backend a path belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dataload.storage.local.files import FileIdentity, LocalFile, LocalStorage
from dataload.storage.local.mapped import MappedFile
from dataload.storage.local.parts import Part
from dataload.types import Int64Array


class Storage(Protocol):
    """Bytes by path. A backend knows files, not formats.

    Methods that read raise `SourceNotFoundError` if there is nothing at the path, and `SourceError` if it cannot be
    read. All methods may be called from several threads at once.
    """

    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory at `path`."""
        ...

    def is_directory(self, path: str) -> bool:
        """Return whether `path` is a directory."""
        ...

    def list(self, path: str) -> Sequence[str]:
        """Return the names in a directory, sorted, hidden ones left out."""
        ...

    def glob(self, pattern: str) -> Sequence[str]:
        """Return the paths that match a pattern with ``*``, ``?`` or ``[...]``, sorted."""
        ...

    def size(self, path: str) -> int:
        """Return the bytes of a file, or of all files in a directory."""
        ...

    def identity(self, path: str) -> FileIdentity:
        """Return what tells one version of a file from another."""
        ...

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        ...

    def read_ranges(self, path: str, offsets: Int64Array, lengths: Int64Array) -> Sequence[bytes]:
        """Return many ranges of a file, in the order of the request; ranges are cut off at the end of the file."""
        ...

    def open(self, path: str) -> LocalFile:
        """Open a file for reading at any offset."""
        ...

    def map(self, path: str) -> MappedFile:
        """Map a file into memory."""
        ...

    def create(self, path: str, *, overwrite: bool = False) -> Part:
        """Begin a file or directory that appears at `path` when it is published, or never."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file or directory; nothing happens if there is none."""
        ...

    def lock(self, path: str) -> AbstractContextManager[None]:
        """Hold an exclusive lock by the name of `path`; raises `SourceError` if another process holds it."""
        ...


_LOCAL = LocalStorage()


def storage_of(path: str) -> Storage:
    """Return the backend that holds `path`."""
    del path  # local files are the only backend
    return _LOCAL
