"""The storage backends, the choice of one by path or URL, and compressed files: in the cache, or read as text."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dataload._util.arrays import check_size
from dataload._util.clock import decoding
from dataload._util.lazy import load_optional
from dataload._util.threads import Wait
from dataload.errors import CorruptFileError, DataloadError
from dataload.storage.core import can_map
from dataload.storage.errors import rewritten_error
from dataload.storage.local.files import LocalFile, LocalLease, LocalStorage
from dataload.storage.local.folders import list_folder
from dataload.storage.local.record_files import FileIdentity
from dataload.storage.paths import absolute, base_name, is_hub_url, is_url
from dataload.storage.record_file import RecordFile
from dataload.storage.remote.settings import ObjectVersion, Remote
from dataload.types import BytesArray

if TYPE_CHECKING:
    from dataload.storage.remote.backend import RemoteStorage
    from dataload.storage.remote.cache import Lease
    from dataload.storage.remote.files import RemoteStream


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


ReadableFile: TypeAlias = "LocalFile | RemoteStream"
"""An open file that any number of threads may read at any offset."""

LeasedFile: TypeAlias = "LocalLease | Lease"
"""A local file that is not evicted while this object exists."""

Storage: TypeAlias = "LocalStorage | RemoteStorage"
"""A backend, which reads and writes bytes by path, and knows nothing about formats; see `LocalStorage`."""


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


def map_unpacked(
    path: str,
    size: int,
    unpack: Callable[[bytes, BytesArray], None],
    *,
    mapped: bool = True,
    remote: Remote | None = None,
) -> RecordFile:
    """Open a compressed file for copying records; `unpack` fills `size` bytes, which are kept in the node's cache."""
    from dataload.storage.remote.backend import node_cache
    from dataload.storage.remote.files import keep, local_copy, open_shards
    from dataload.storage.remote.prefetch.shards import write  # most data are not compressed

    given = Remote() if remote is None else remote
    storage, cache, name = storage_of(path, remote), node_cache(given), absolute(path)
    # The version of the compressed file identifies its content.
    identity = storage.identity(path)
    version = ObjectVersion(size, f"unpacked {identity!r}", has_etag=False)

    def fill(descriptor: int) -> None:
        with unchanged(storage, path, identity), storage.open(path, whole=True) as file:
            data = file.read(0, file.size)
        with decoding():
            content = np.empty(size, np.uint8)
            unpack(data, content)
        write(descriptor, 0, content)

    return local_copy(
        path,
        version,
        lambda: cache.fetch(name, version, fill, open_shards().give_up, Wait(given.options.timeout)),
        mapped=mapped and can_map(),
        listed=True,
        keep=partial(keep, cache, base_name(path)),
    )


_BLOCK_BYTES = 1 << 22
_TEXT = "the text of the file"


def is_compressed(path: str) -> bool:
    return path.lower().endswith((".gz", ".zst"))


class TextFile:
    """A text file in the version that it has now, decompressed by its suffix."""

    def __init__(self, path: str, limit: int, remote: Remote | None) -> None:
        self._path, self._limit = path, limit
        self.storage: Storage = storage_of(path, remote)
        self._identity = self.storage.identity(path)

    def read(self) -> tuple[bytes | bytearray, int]:
        """Return the text and its length; over `limit` bytes it is a CorruptFileError."""
        with unchanged(self.storage, self._path, self._identity), self.storage.open(self._path, whole=True) as file:
            if is_compressed(self._path):
                text = _unpacked(file, self._path, self._limit)
            else:
                check_size(file.size, self._limit, _TEXT, path=self._path)
                text = file.read(0, file.size)
        return text, len(text)


def _unpacked(file: ReadableFile, path: str, limit: int) -> bytearray:
    if not file.size:
        raise CorruptFileError("the file is empty, which no compressed file is", path=path, offset=0)
    text = bytearray()  # grows in place
    errors: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
    if path.lower().endswith(".zst"):
        arrow = load_optional("pyarrow", needed_by="reading .zst", extra="arrow")
        errors = (arrow.ArrowException, OSError)
        stream = arrow.PythonFile(FileStream(file), "r")
        read: Callable[[int], bytes] = arrow.CompressedInputStream(stream, "zstd").read
    else:
        read = gzip.GzipFile(fileobj=io.BufferedReader(FileStream(file))).read
    try:
        while block := read(_BLOCK_BYTES):
            check_size(len(text) + len(block), limit, _TEXT, path=path)
            text += block
    except (DataloadError, MemoryError):
        raise
    except errors as error:
        raise CorruptFileError(f"the file cannot be decompressed: {error}", path=path, offset=len(text)) from error
    return text
