"""ArrayRecord files through the array_record package: it writes them, and reads those that `riegeli` does not parse.

The writer puts reader options into the padding at the end of a file. The last block is the last message and a chunk of
padding up to its end, whose content no reader looks at. Its hashes are renewed, so the file stays valid in every
detail.
"""

import errno
import os
import struct
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import numpy as np

from dataload._util.arrays import check_lengths
from dataload._util.caches import on_fork
from dataload.errors import ConfigError, CorruptFileError, SourceError, SourceNotFoundError
from dataload.sources.array_record import ArrayRecordWriterOptions, load_array_record
from dataload.sources.array_record.layout import (
    BLOCK_SIZE,
    CHUNK_HEADER_BYTES,
    HASH_BYTES,
    HASH_KEY,
    SIGNATURE,
    footer_offset,
    group_size,
)
from dataload.sources.array_record.riegeli import BLOCK_HEADER_BYTES
from dataload.sources.options import MOST_RECORDED_BYTES, build_recorded, parse_recorded
from dataload.sources.writer import Writer, choose_codec, codec_name, encode_bytes
from dataload.storage import Remote, Storage, storage_of
from dataload.storage.core import core
from dataload.storage.errors import overwritten_error, rewritten_error, system_error
from dataload.types import Int64Array

_READER_OPTIONS = "readahead_buffer_size:0"  # the package's default reads 16 MiB ahead of each random access
_FILE_BUFFER_BYTES = 4096
# A reader serves one thread, and holds 30 to 70 bytes per record of the file. More than a few per file gain nothing,
# because each already reads on several threads.
_MOST_READERS = 4


class PackageReaders:
    """A pool of the package's readers of one version of a file. Each serves one thread at a time."""

    def __init__(self, file: str, storage: Storage, options: str | None) -> None:
        self._file = file
        self._storage = storage
        self._identity = storage.identity(file)
        self._kept: Any = None  # while readers may have the file open
        self._path: str | None = None  # of the file that they have open
        self._options = _READER_OPTIONS if options is None else options
        self._free = threading.Semaphore(_MOST_READERS)
        self._lock = threading.Lock()
        self.idle: list[Any] = []
        _pools.add(self)

    @contextmanager
    def take(self) -> Generator[Any]:
        """Lend a reader. One that fails is not used again."""
        with self._free:
            with self._lock:
                reader = self.idle.pop() if self.idle else None
            if reader is None:
                if self._storage.identity(self._file) != self._identity:
                    raise rewritten_error(self._file)
                lease, self._kept = self._storage.lend(self._file, self)
                self._path = lease.path
                reader = _open_reader(lease.path, self._options, self._file)
            yield reader
            self.idle.append(reader)

    def about(self) -> tuple[int, int]:
        """Return the number of records of the file, and of its largest group."""
        with self.take() as reader:
            return reader.num_records(), group_size(_writer_options(reader))

    def read(self, indices: Int64Array, limit: int) -> list[bytes]:
        """Return records, (rows,) int64 indices, of at most `limit` bytes each."""
        with self.take() as reader:
            try:
                data: list[bytes] = reader.read(indices.tolist())
            except MemoryError:
                raise
            except Exception as error:  # the package translates C++ errors to several built-in exceptions
                raise _find_corrupt(reader, indices, self._file, error) from error
            finally:
                self._check_overwritten()
        # Only the package knows them before that.
        check_lengths(np.fromiter(map(len, data), np.int64, len(data)), limit, indices, self._file)
        return data

    def _check_overwritten(self) -> None:
        """Raise if the file was overwritten: the package then gives torn or empty records, without an error."""
        with suppress(SourceNotFoundError):  # deleted, but still open in the reader, as is one that was replaced
            was, now = self._identity, self._storage.identity(self._file)
            if now != was and now.file == was.file:
                raise overwritten_error(self._file, was.changed, now.changed)

    def release(self) -> None:
        """Close all readers that are not lent; may be called at any time."""
        self.idle.clear()  # the last reference closes the file
        self._kept = self._path = None

    @property
    def is_open(self) -> bool:
        """Whether readers have the file open."""
        return self._path is not None

    def is_deleted(self) -> bool:
        """Return whether a file is open here that has no name any more."""
        path = self._path
        return path is not None and not storage_of(path).exists(path)


_pools: weakref.WeakSet[PackageReaders] = weakref.WeakSet()
_inherited: list[list[Any]] = []


def _keep_inherited() -> None:
    """Keep the parent's readers in a forked child, for ever: they must be neither used nor destroyed there."""
    for pool in list(_pools):
        _inherited.append(pool.idle)
        pool.idle = []


on_fork(_keep_inherited)


def _open_reader(path: str, options: str, file: str) -> Any:
    """Open the local file at `path`, which messages call `file`."""
    package = load_array_record()
    try:
        reader = package.ArrayRecordReader(path, options, file_reader_buffer_size=_FILE_BUFFER_BYTES)
    except ValueError as error:
        raise ConfigError(f"reader_options {options!r}: {error}", key="reader_options", value=options) from error
    if not reader.ok():
        reason = "it was truncated, or its writer was never closed"
        try:
            reader.close()
        except RuntimeError as error:
            reason = str(error) or reason
        raise CorruptFileError(f"the file has no valid end: {reason}", path=file)
    return reader


def _writer_options(reader: Any) -> str:
    try:
        return reader.writer_options_string()
    except UnicodeDecodeError:  # damaged, which only affects the speed
        return ""


def _find_corrupt(reader: Any, indices: Int64Array, file: str, error: Exception) -> CorruptFileError:
    """Return the error of the first record at `indices` that cannot be read."""
    for index in indices.tolist():
        try:
            reader.read(index, index + 1)
        except Exception as found:
            return CorruptFileError(str(found), path=file, index=index)
    return CorruptFileError(str(error), path=file)


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
        with suppress(RuntimeError):
            self._stream.close()


_PADDING = 0x70  # the type of a chunk
_SIZE = struct.Struct("<8xQ")  # in a chunk header
_REST = struct.Struct("<QQQQ")  # of a chunk header, after its hash: size and hash of the data; type and records; bytes
_MOST_MESSAGE = 256  # bytes


def find_recorded(path: str, remote: Remote | None) -> Mapping[str, Any] | None:
    """Return the reader options that are recorded in a file; None if it is empty."""
    with storage_of(path, remote).open(path) as file:
        block = file.read(max(0, file.size - BLOCK_SIZE), _MOST_MESSAGE + 2 * CHUNK_HEADER_BYTES + MOST_RECORDED_BYTES)
    start = _padding(block)
    found = {} if start is None else parse_recorded(block[start + CHUNK_HEADER_BYTES :], ("codec",))
    return found if found or footer_offset(block) != len(SIGNATURE) else None


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
