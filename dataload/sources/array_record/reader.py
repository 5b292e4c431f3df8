"""ArrayRecord files: read through a memory map, or, in other layouts, through the array_record package."""

import hashlib
import threading
import warnings
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from typing import Any, ClassVar, Self, TypeAlias, cast

import numpy as np

from dataload._util.arrays import check_lengths
from dataload._util.caches import DecodedCache, on_fork
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.sources.array_record import ArrayRecordOptions, load_array_record
from dataload.sources.array_record.layout import (
    BLOCK_SIZE,
    SIGNATURE,
    Decompressor,
    check_head,
    file_of,
    footer_offset,
    group_size,
    parse_selection,
)
from dataload.sources.array_record.map import MappedRecords
from dataload.sources.directory import ShardDirectory
from dataload.sources.encoded import EncodedShard, Gather, copy_records
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ShardReader
from dataload.storage import RecordFile, Storage, storage_of
from dataload.storage.errors import overwritten_error, rewritten_error
from dataload.storage.paths import FileInstruction, as_path
from dataload.types import Batch, BytesColumn, Codec, FieldSpec, Int64Array

_READER_OPTIONS = "readahead_buffer_size:0"  # the package's default reads 16 MiB ahead of each random access
_FILE_BUFFER_BYTES = 4096
_AROUND_BYTES = 4096
# A reader serves one thread, and holds 30 to 70 bytes per record of the file. More than a few per file gain nothing,
# because each already reads on several threads.
_MOST_READERS = 4


Location: TypeAlias = str | PathLike[str] | FileInstruction


class ArrayRecordSource(FileSource[Any]):
    """Records of ArrayRecord files, as bytes or decoded by a codec.

    Files that are compressed by Zstandard, as by default, or written with ``group_size:1,uncompressed`` are read by a
    memory map, all others through the array_record package. Hashes of compressed data are compared. Each read of
    uncompressed files checks the headers of the chunks; it compares hashes only with the option `verify`, as
    ``dataload verify`` does.

    `paths` are files, slices ``"path[start:stop]"`` of their records, or objects with the attributes of
    `FileInstruction`. Options: `ArrayRecordOptions`.

    A process that was forked after array_record was used cannot use it: files that need it then raise a ConfigError.
    Workers have to be started by ``"forkserver"`` or ``"spawn"``. A file that was written with a `group_size` other
    than 1 is a UserWarning.
    """

    format_name = "array_record"
    options_type: ClassVar[Any] = ArrayRecordOptions

    def __init__(
        self, paths: Location | Sequence[Location], *, fields: Sequence[str] | None = None, **options: Any
    ) -> None:
        several = [paths] if isinstance(paths, (str, PathLike, FileInstruction)) else paths
        super().__init__([as_path(path) for path in several], fields=fields, **options)

    def _prepare(self) -> None:
        self._warned = False
        self._decompressor = Decompressor(DecodedCache(min(self.options.cached_bytes, self.options.max_record_bytes)))
        for path in self.paths:
            parse_selection(path)
        if self._selected is not None and self.options.codec is None:
            message = "fields were given, but the records are plain bytes: give a codec too"
            raise ConfigError(message, key="fields", value=self._selected)

    def _open_shard(self, path: str) -> ShardReader[Any]:
        # One file that knows its fields is enough; each reads a record to find out.
        return _ArrayRecordFile(path, self.options, self._decompressor, has_fields=path == self.paths[0])

    def close(self) -> None:
        super().close()
        self._decompressor.cached.clear()

    def _known_fields(
        self, readers: Sequence[ShardReader[Any]], fields: Sequence[Mapping[str, FieldSpec]]
    ) -> Mapping[str, FieldSpec]:
        groups = {} if self._warned else self._groups(readers)
        self._warned = True
        for file, size in groups.items():
            warnings.warn(
                f"{file} was written with group_size:{size}: reading one record at random decompresses that many; "
                "write it again with group_size:1 (dataload convert does)",
                UserWarning,
                stacklevel=2,
            )
        return super()._known_fields(readers, fields)

    @staticmethod
    def _groups(readers: Sequence[ShardReader[Any]]) -> dict[str, int]:
        """Return the group size of each file whose records are compressed in groups."""
        files = (reader for reader in readers if isinstance(reader, _ArrayRecordFile))
        return {reader.file: reader.group_size for reader in files if reader.group_size != 1}

    @property
    def reads_in_order(self) -> bool:
        """Whether records are compressed in groups; reading one decompresses its whole group."""
        return bool(self._groups(self._readers()))

    def _data_file(self, path: str) -> str:
        return file_of(path)


class _ArrayRecordFile(EncodedShard):
    """A file, or the selected part of it; `file` is its path without the slice."""

    def __init__(self, path: str, options: ArrayRecordOptions, decompressor: Decompressor, *, has_fields: bool) -> None:
        self.file, self._first, stop = parse_selection(path)
        super().__init__(self.file, cast("Codec | None", options.codec))
        self._limit: int = options.max_record_bytes
        self._storage = storage_of(self.file, options.remote_settings)
        with self._storage.open(self.file) as file:
            self._size = file.size
            check_head(file.read(0, len(SIGNATURE)), self._size, self.file)
        plain = options.reader_options is None
        self._mapped = MappedRecords.open(self.file, options, decompressor) if plain else None
        self.whole = self._mapped is None
        self._is_shared = False
        self._readers = _Readers(self.file, self._storage, options.reader_options)
        if self._mapped is not None:
            self._records, self.group_size = len(self._mapped), self._mapped.group_size
        else:
            with self._readers.take() as reader:
                self._records = reader.num_records()
                self.group_size = group_size(_writer_options(reader))
        stop = self._records if stop is None else stop
        if stop > self._records:
            message = f"{path} selects records {self._first} to {stop}; the file has {self._records}"
            raise ConfigError(message, key="paths", value=path)
        self._length = stop - self._first
        self._fields = self.first_fields() if has_fields and self._codec is not None else {}

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Any]:
        return super().read(indices + self._first, fields)

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        return super().read_batch(indices + self._first, fields)

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array] | None:  # noqa: ARG002 - records are read whole
        return None if self._mapped is None else self._mapped.ranges(indices + self._first)

    def shared(self) -> tuple[RecordFile, Any] | None:
        if self._mapped is None or (self.group_size > 1 and self._length < self._records):
            return None
        return self._mapped.file, self._mapped.kind

    def joined(self, directory: ShardDirectory) -> Self:
        joined = directory.copy_of(self)
        joined._first, joined._is_shared = 0, True
        joined._mapped = None if self._mapped is None else self._mapped.joined(directory)
        return joined

    def join(self, joined: Any, shard: int) -> None:
        if self._mapped is not None:
            self._mapped.join(joined._mapped, shard, self._first, self._length)

    def _stored(self, indices: Int64Array, gather: Gather) -> BytesColumn | list[bytes]:
        found = None
        if self._mapped is not None:
            found = self._mapped.read(indices) if gather is copy_records else self._mapped.read_together(indices)
        if found is None and self._is_shared:
            raise CorruptFileError("a record needs the package, which reads one file at a time")
        return self._read_through_package(indices) if found is None else found

    def _read_through_package(self, indices: Int64Array) -> list[bytes]:
        with self._readers.take() as reader:
            try:
                data: list[bytes] = reader.read(indices.tolist())
            except MemoryError:
                raise
            except Exception as error:  # the package translates C++ errors to several built-in exceptions
                raise _find_corrupt(reader, indices, self.file, error) from error
            finally:
                self._check_overwritten()
        if max(map(len, data)) > self._limit:  # only the package knows before that
            check_lengths(np.fromiter(map(len, data), np.int64), self._limit, indices, self.file)
        return data

    def _check_overwritten(self) -> None:
        """Raise if the file was overwritten: the package then gives torn or empty records, without an error."""
        with suppress(SourceNotFoundError):  # deleted, but still open in the reader, as is one that was replaced
            was, now = self._readers.identity, self._storage.identity(self.file)
            if now != was and now.file == was.file:
                raise overwritten_error(self.file, was.changed, now.changed)

    def identity(self) -> str:
        """Return a hash of the end of the records and the start of the footer; the last block is nearly empty."""
        with self._storage.open(self.file) as file:
            end = footer_offset(file.read(max(0, file.size - BLOCK_SIZE), 128))
            around = file.read(max(0, min(end or 0, file.size) - _AROUND_BYTES), 2 * _AROUND_BYTES)
        return hashlib.blake2b(around, digest_size=8).hexdigest()

    def release(self) -> None:
        self._readers.release()
        if self._mapped is not None:
            self._mapped.release()


class _Readers:
    """A pool of the package's readers of one version of a file. Each serves one thread at a time."""

    def __init__(self, file: str, storage: Storage, options: str | None) -> None:
        self._file = file
        self._storage = storage
        self.identity = storage.identity(file)
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
                if self._storage.identity(self._file) != self.identity:
                    raise rewritten_error(self._file)
                lease, self._kept = self._storage.lend(self._file, self)
                self._path = lease.path
                reader = _open_reader(lease.path, self._options, self._file)
            yield reader
            self.idle.append(reader)

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


_pools: weakref.WeakSet[_Readers] = weakref.WeakSet()
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
