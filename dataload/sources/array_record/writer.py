"""ArrayRecord files, written through the array_record package, with reader options in the padding at their end.

The last block is the last message and a chunk of padding up to its end, whose content no reader looks at. Its hashes
are renewed, so the file stays valid in every detail.
"""

import contextlib
import errno
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dataload.errors import ConfigError, SourceError
from dataload.sources.array_record import ArrayRecordWriterOptions, load_array_record
from dataload.sources.array_record.layout import BLOCK_SIZE, CHUNK_HEADER_BYTES, HASH_BYTES, HASH_KEY
from dataload.sources.array_record.riegeli import BLOCK_HEADER_BYTES
from dataload.sources.options import MOST_RECORDED_BYTES, build_recorded, parse_recorded
from dataload.sources.writer import Writer, choose_codec, codec_name, encode_bytes
from dataload.storage import Remote, storage_of
from dataload.storage.core import core
from dataload.storage.errors import system_error


class ArrayRecordWriter(Writer):
    """Writes an ArrayRecord file, which says by which built-in codec its records are read.

    The same records and options give the same bytes.

    Options: `ArrayRecordWriterOptions`.
    """

    options_type: ClassVar[Any] = ArrayRecordWriterOptions

    def _begin(self, options: ArrayRecordWriterOptions) -> None:
        self._codec: Any = options.codec
        try:
            self._stream = load_array_record().ArrayRecordWriter(self._part.temporary, options.options)
        except ValueError as error:
            message = f"options {options.options!r}: {error}"
            raise ConfigError(message, key="options", value=options.options) from error
        if not self._stream.ok():
            self._finish()

    def _write(self, record: Any) -> None:
        codec = self._codec if len(self) else choose_codec(self._codec, record)
        data = encode_bytes(record, codec, "array_record")
        try:
            self._stream.write(data)
        except RuntimeError as error:
            raise self._failure(error) from error
        self._codec = codec
        self.stored_bytes += len(data)

    def _write_all(self, records: Sequence[Any]) -> None:
        if not len(self):  # the first record may choose the codec
            super()._write_all(records[:1])
            records = records[1:]
        codec, write = self._codec, self._stream.write
        try:
            for record in records:
                data = (
                    record if codec is None and type(record) is bytes else encode_bytes(record, codec, "array_record")
                )
                write(data)
                self._count += 1
                self.stored_bytes += len(data)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _finish(self) -> None:
        try:
            self._stream.close()
        except RuntimeError as error:
            raise self._failure(error) from error
        if (name := codec_name(self._codec)) is not None:
            with storage_of(self._part.temporary).open(self._part.temporary) as file:
                start = file.size - BLOCK_SIZE
                found = build_padding(file.read(start, BLOCK_SIZE), build_recorded({"codec": name}))
            if found is not None:
                self._part.patch(start + found[0], found[1])

    def _failure(self, error: RuntimeError) -> SourceError:
        if os.strerror(errno.ENOSPC) in str(error):
            return system_error("write", self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return SourceError(f"cannot write {self.path}: {error}", path=self.path)

    def _discard(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._stream.close()


_PADDING = 0x70  # the type of a chunk
_SIZE = struct.Struct("<8xQ")  # in a chunk header
_REST = struct.Struct("<QQQQ")  # of a chunk header, after its hash: size and hash of the data; type and records; bytes
_MOST_MESSAGE = 256  # bytes


def find_recorded(path: str, remote: Remote | None) -> Mapping[str, Any]:
    """Return the reader options that are recorded in a file."""
    with storage_of(path, remote).open(path) as file:
        block = file.read(max(0, file.size - BLOCK_SIZE), _MOST_MESSAGE + 2 * CHUNK_HEADER_BYTES + MOST_RECORDED_BYTES)
    start = _padding(block)
    return {} if start is None else parse_recorded(block[start + CHUNK_HEADER_BYTES :], ("codec",))


def build_padding(block: bytes, text: bytes) -> tuple[int, bytes] | None:
    """Return padding that begins with `text`, and its offset in the last `block`; None without padding to replace."""
    start = _padding(block)
    room = len(block) - (start or 0) - CHUNK_HEADER_BYTES
    if start is None or len(block) != BLOCK_SIZE or len(text) > room:
        return None
    data = text.ljust(room, b"\0")
    rest = _REST.pack(room, _hash(data), _PADDING, 0)
    return start, struct.pack("<Q", _hash(rest)) + rest + data


def _padding(block: bytes) -> int | None:
    """Return the offset of the chunk of padding in the last block."""
    if len(block) < BLOCK_HEADER_BYTES + _SIZE.size:
        return None
    start = BLOCK_HEADER_BYTES + CHUNK_HEADER_BYTES + _SIZE.unpack_from(block, BLOCK_HEADER_BYTES)[0]
    if start > _MOST_MESSAGE or len(block) < start + CHUNK_HEADER_BYTES:
        return None
    size, _, kind, _ = _REST.unpack_from(block, start + HASH_BYTES)
    return start if kind == _PADDING and size == BLOCK_SIZE - start - CHUNK_HEADER_BYTES else None


def _hash(data: bytes) -> int:
    found = np.empty(1, np.uint64)
    core().hash_ranges(found, np.frombuffer(data, np.uint8), np.zeros(1, np.int64), np.array([len(data)]), HASH_KEY, -1)
    return int(found[0])
