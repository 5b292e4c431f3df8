"""Records of ArrayRecord files, read through the array_record package."""

import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from dataload._util.arrays import check_lengths
from dataload._util.caches import on_fork
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.sources.array_record import load_array_record
from dataload.sources.array_record.layout import group_size
from dataload.storage import Storage, storage_of
from dataload.storage.errors import overwritten_error, rewritten_error
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
