"""The protocol of storage backends, and the choice of a backend by path or URL."""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, Self

import numpy as np

from dataload.errors import CorruptFileError
from dataload.storage.errors import rewritten_error
from dataload.storage.local.atomic import AtomicFile
from dataload.storage.local.files import LocalStorage
from dataload.storage.local.folders import list_folder
from dataload.storage.local.record_files import FileIdentity
from dataload.storage.paths import is_hub_url, is_url
from dataload.storage.record_file import RecordFile
from dataload.storage.remote.settings import Remote
from dataload.types import Int64Array


class FileStream(io.RawIOBase):
    """A file object over an open `ReadableFile`, which it does not close."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = self._file.read_into(self._position, buffer) if len(buffer) else 0
        self._position += count
        return count

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(self._position, self._file.size - self._position if size < 0 else size)
        self._position += len(data)
        return data


class ReadableFile(Protocol):
    """An open file that any number of threads may read at any offset."""

    @property
    def size(self) -> int:
        """Size in bytes when the file was opened."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes [offset, offset + length), or fewer at the end of the file."""
        ...

    def read_into(self, offset: int, buffer: Any) -> int:
        """Read from `offset` into a writable buffer, and return the number of bytes read."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class LeasedFile(Protocol):
    """A local file that is not evicted while this object exists."""

    @property
    def path(self) -> str: ...


class Storage(Protocol):
    """A storage backend: reads and writes bytes by path, and knows nothing about formats.

    Methods that read raise `SourceNotFoundError` if nothing exists at the path, and `SourceError` if it cannot be read.
    All methods may be called from several threads at once.
    """

    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory at `path`."""
        ...

    def is_directory(self, path: str) -> bool: ...

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
        """Return byte ranges of a file in the requested order; ranges beyond its end are shorter."""
        ...

    def open(self, path: str, *, whole: bool = False) -> ReadableFile:
        """Open a file for reading at any offset; `whole` announces that most of it will be read."""
        ...

    def map(self, path: str, *, mapped: bool = True, whole: bool = False) -> RecordFile:
        """Open a file to copy records out of it, mapped if that is safe; keep a local copy of the `whole` meanwhile."""
        ...

    def lease(self, path: str) -> LeasedFile:
        """Return a local copy of a file, which stays until the last reference is dropped."""
        ...

    def lend(self, path: str, holder: Any) -> tuple[LeasedFile, Any]:
        """Return a lease for opening a file, and what `holder` keeps while it is open, until others need the room."""
        ...

    def create(self, path: str, *, overwrite: bool = False) -> AtomicFile:
        """Start an atomic file or directory, which appears at `path` when it is published."""
        ...

    def load(self, path: str) -> tuple[bytes, Any] | None:
        """Return the content of a small file and its version for `replace`; None if it does not exist."""
        ...

    def replace(self, path: str, data: bytes, version: Any) -> Any:
        """Write a small file in one step, and return its version.

        Args:
            path: The file.
            data: Its content.
            version: Version to replace, as returned by `load` or `replace`; None to create. For local files the version
                is not checked: hold the lock.

        Raises:
            FileExistsError: The file has another version now.
        """
        ...

    def etag(self, path: str) -> str | None:
        """Return the ETag of an object; None if it has none, and for local files."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file or directory, if it exists."""
        ...

    def lock(self, path: str) -> AbstractContextManager[None]:
        """Hold an exclusive lock named after `path`; raise a `SourceError` that names the holder if it is taken."""
        # A local directory is made, and leftovers of killed writers of the file removed. The lock of a URL excludes
        # other processes of this node only; `replace` excludes other nodes.
        ...


def read_limited(storage: Storage, path: str, most: int, what: str) -> bytes:
    """Return the content of a file in one request; a CorruptFileError about `what` if it exceeds `most` bytes."""
    data = storage.read_ranges(path, np.zeros(1, np.int64), np.array([most + 1]))[0]
    if len(data) > most:
        raise CorruptFileError(f"{what} has at most {most:,} bytes", path=path)
    return data


@contextmanager
def unchanged(storage: Storage, path: str, identity: FileIdentity) -> Generator[None]:
    """Raise an error after reading a file if its version has changed, in place of any other error."""
    try:
        yield
    finally:
        if storage.identity(path) != identity:
            raise rewritten_error(path)


_LOCAL = LocalStorage()


def storage_of(path: str, remote: Remote | None = None) -> Storage:
    """Return the backend for a path or URL; `remote` holds the settings for URLs."""
    if not is_url(path):
        return _LOCAL
    from dataload.storage.remote.backend import RemoteStorage  # most data are local

    return RemoteStorage(Remote() if remote is None else remote)


def files_below(directory: str, remote: Remote | None = None) -> list[str]:
    """Return the relative paths of all visible files in a local directory and below; at a URL, of those in it."""
    if is_url(directory):
        return [*storage_of(directory, remote).list(directory)]
    folders, _ = list_folder(directory)
    return [f"{folder}/{name}" if folder else name for folder, files in folders.items() for name in files]


def held_by_hub(paths: list[str], remote: Remote | None) -> list[str]:
    """Return paths with local ones in place of the ``hf://`` URLs of what the cache of `huggingface_hub` holds."""
    if not any(map(is_hub_url, paths)):
        return paths
    from dataload.storage.remote.clients import held_paths

    return [*held_paths(paths, remote)]
