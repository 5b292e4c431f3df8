"""Files of text that are read as a whole, plain or compressed (``.gz``, ``.zst``)."""

import gzip
import io
import zlib
from collections.abc import Callable
from typing import Any

from dataload._util.limits import check_size
from dataload._util.optional import load_optional
from dataload.errors import CorruptFileError, DataloadError
from dataload.storage import Remote, storage_of
from dataload.storage.stream import FileStream

_PIECE = 1 << 22  # bytes
_TEXT = "the text of the file"


def is_compressed(path: str) -> bool:
    """Return whether a name says that the file is compressed."""
    return path.lower().endswith((".gz", ".zst"))


def read_text(path: str, limit: int, remote: Remote | None = None) -> bytes | bytearray:
    """Return the text of a file, decompressed if its name says so; over `limit` bytes it is a CorruptFileError."""
    with storage_of(path, remote).open(path, whole=True) as file:
        if not is_compressed(path):
            check_size(file.size, limit, _TEXT, path=path)
            return file.read(0, file.size)
        text = bytearray()  # grows in place
        errors: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
        if path.lower().endswith(".zst"):
            arrow = load_optional("pyarrow", needed_by="reading .zst", extra="arrow")
            errors = (arrow.ArrowException, OSError)
            read: Callable[[int], bytes] = _zst_reader(file, arrow)
        else:
            read = gzip.GzipFile(fileobj=io.BufferedReader(FileStream(file))).read
        try:
            while piece := read(_PIECE):
                check_size(len(text) + len(piece), limit, _TEXT, path=path)
                text += piece
        except (DataloadError, MemoryError):
            raise
        except errors as error:
            raise CorruptFileError(f"the file cannot be decompressed: {error}", path=path, offset=len(text)) from error
    return text


def _zst_reader(file: Any, arrow: Any) -> Callable[[int], bytes]:
    return arrow.CompressedInputStream(arrow.PythonFile(FileStream(file), "r"), "zstd").read
