"""Compressed files: unpacked into the cache, or read as text."""

import gzip
import io
import zlib
from collections.abc import Callable
from functools import partial

import numpy as np

from dataload._util.clock import decoding
from dataload._util.lazy import load_optional
from dataload._util.limits import check_size
from dataload._util.threads import Wait
from dataload.errors import CorruptFileError, DataloadError
from dataload.storage.backend import FileStream, storage_of, unchanged
from dataload.storage.core import can_map
from dataload.storage.paths import absolute, base_name
from dataload.storage.record_file import RecordFile
from dataload.storage.remote.settings import ObjectVersion, Remote
from dataload.types import BytesArray


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


def read_text(path: str, limit: int, remote: Remote | None = None) -> bytes | bytearray:
    """Return the text of a file, decompressed by its suffix; over `limit` bytes it is a CorruptFileError."""
    with storage_of(path, remote).open(path, whole=True) as file:
        if not is_compressed(path):
            check_size(file.size, limit, _TEXT, path=path)
            return file.read(0, file.size)
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
