"""The base class of writers, which replace their destination atomically."""

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from types import TracebackType
from typing import Any, ClassVar, Self, cast

import numpy as np

from dataload._util.arrays import to_array
from dataload.codecs.codec import CODEC_NAMES, READ_ONLY_CODEC, resolve_codec
from dataload.errors import ConfigError, SourceError, message_of
from dataload.sources.options import FileOptions, Options
from dataload.storage import local_path, storage_of
from dataload.storage.errors import write_errors

_BLOCK_BYTES, _MOST_RECORDS = 1 << 22, 1 << 10  # encoded at once
_DAMAGING = OSError, SourceError, KeyboardInterrupt  # may leave part of a record in the file


class ClosedOrAborted(ABC):
    """The end of a writer: a ``with`` block closes it, or aborts it if an exception leaves the block."""

    _pid: int  # of the process that made it
    _lock: threading.RLock  # held by the thread that writes, closes or aborts
    _state: str

    @abstractmethod
    def close(self) -> None:
        """Publish the written data. May be called twice."""

    @abstractmethod
    def abort(self) -> None:
        """Discard everything written, without touching the destination."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid != os.getpid():
            return  # a forked child leaves its parent's file alone
        if error is None:
            self.close()
        else:
            self._abort_after(error)

    def _abort_after(self, error: BaseException) -> None:
        """Abort because of `error`, which a failure to do so must not hide."""
        try:
            self.abort()
        except Exception as failure:
            error.add_note(f"closing {self!r} failed, too: {message_of(failure)}")

    def _check_open(self, path: str) -> None:
        state = self._state if self._pid == os.getpid() else "of another process"
        if state != "open":
            raise ConfigError(f"the writer of {path} is {state}: nothing more can be written")

    def __del__(self, suppress: Any = contextlib.suppress) -> None:
        # A writer that was never closed leaves nothing behind. At the interpreter's exit, `contextlib` may be gone.
        with suppress(Exception):
            if self._pid == os.getpid():
                self.abort()


class Writer(ClosedOrAborted):
    """Writes records to a temporary file, which `close` makes durable and renames to its destination.

    The temporary is in a hidden folder beside the destination. If an exception leaves the ``with`` block, the folder is
    deleted. If the process is killed, the next writer to the same destination deletes it. Threads may share a writer.

    Args:
        path: Destination: a file or, for LMDB, a directory.
        overwrite: Replace an existing destination, which is otherwise an error.
        options: Options of the format's writer; see `options_type`.

    Attributes:
        stored_bytes: Bytes of the records written so far, as the format stores them, before compression and without its
            tables; 0 if the writer does not count.
        before_publish: Called with the path of the complete temporary, which is on this machine for URLs, too.

    Raises:
        ConfigError: The destination exists and `overwrite` is False, a file is where its directory would be, or an
            option is unknown or out of range.
        SourceError: The directory of the destination, which is created if needed, cannot be written to.
    """

    options_type: ClassVar[type[Options]] = Options

    def __init__(self, path: str | PathLike[str], *, overwrite: bool = False, **options: Any) -> None:
        self.before_publish: Callable[[str], None] | None = None
        self._state = "refused"  # -> "open" -> "closed" | "aborted"
        self._damage: str | None = None
        self._count = 0
        self.stored_bytes = 0
        self._pid, self._lock = os.getpid(), threading.RLock()
        self.path = local_path(fspath(path))
        given = self.options_type.parse(options, type(self).__name__)
        self._overwrite = overwrite
        self._remote = given.remote_settings if isinstance(given, FileOptions) else None
        self._part = storage_of(self.path, self._remote).create(self.path, overwrite=overwrite)
        self.path: str = self._part.path
        self._state = "open"
        try:
            with write_errors(self.path):
                self._begin_file(given)
        except BaseException:
            self._state = "aborted"
            self._part.abort()
            raise

    def _begin_file(self, options: Any) -> None:
        try:
            self._begin(options)
        except IsADirectoryError as error:
            message = f"{self.path} is a directory, and the format writes a file: choose another name, or delete it"
            raise ConfigError(message, key="path", value=self.path) from error

    def _begin(self, options: Any) -> None:
        """Create the temporary; `options` is an instance of `options_type`."""

    @abstractmethod
    def _write(self, record: Any) -> None:
        """Append one record to the temporary, or raise and leave it unchanged."""

    def _write_all(self, records: Sequence[Any]) -> None:
        """Append records and count each; if one is refused, those before it have been written and counted."""
        for record in records:
            self._write(record)
            self._count += 1

    def _write_encoded(
        self, records: Sequence[Any], encode: Callable[[Any], bytes], write: Callable[[list[bytes]], None]
    ) -> None:
        """Encode records, and pass the bytes to `write` in blocks of some MiB: a `_write_all` for formats of bytes."""
        start, some = 0, 1
        while start < len(records):
            values: list[bytes] = []
            block = records[start : start + some]
            try:
                values.extend(map(encode, block))
                if len(values) < len(block):
                    raise RuntimeError("the codec raised StopIteration")
            finally:  # if a record is refused, those before it are in the list
                if values:
                    write(values)
                    self._count += len(values)
            start += some
            some = max(1, min(some * 8, _MOST_RECORDS, _BLOCK_BYTES * len(values) // (1 + sum(map(len, values)))))

    def _recover(self) -> bool:
        """Take back what an interrupted `_write` has left, and return True; False if the format cannot."""
        return False

    @abstractmethod
    def _finish(self) -> None:
        """Complete and close the temporary."""

    def _discard(self) -> None:
        """Release resources without completing the temporary."""

    @property
    def temporary(self) -> str:
        """Path of the file that is being written, until it is published."""
        return self._part.temporary

    def __len__(self) -> int:
        """Return the number of records written so far."""
        return self._count

    def write(self, record: Any) -> None:
        """Append one record.

        Raises:
            ConfigError: The format cannot store the record; the file is unchanged.
            SourceError: The operating system reports an error, such as a full disk.
        """
        with self._lock:
            self._check_open(self.path)
            self._check_whole()
            try:
                self._write(record)
                self._count += 1
            except _DAMAGING as error:
                self._damage = None if self._recover() else message_of(error)
                with write_errors(self.path):  # only now: for small records it would take as long as the rest
                    raise

    def extend(self, records: Iterable[Any]) -> None:
        """Append several records; of a list or tuple, small ones are written faster than by `write`.

        Raises:
            ConfigError: The format cannot store a record; those before it have been written.
            SourceError: The operating system reports an error, such as a full disk.
        """
        if not isinstance(records, (list, tuple)):
            for record in records:
                self.write(record)
            return
        with self._lock, write_errors(self.path):
            self._check_open(self.path)
            self._check_whole()
            try:
                self._write_all(cast("Sequence[Any]", records))
            except _DAMAGING as error:
                self._damage = None if self._recover() else message_of(error)
                raise

    def _check_whole(self) -> None:
        """Raise a SourceError if an earlier record may be in the file in part."""
        if self._damage is not None:
            message = f"an error has interrupted writing {self.path}, so it cannot be completed: {self._damage}"
            raise SourceError(message, path=self.path)

    def close(self) -> None:
        """Complete the file and rename it to its destination. May be called twice.

        Raises:
            ConfigError: The destination has come into existence in the meantime.
            SourceError: The operating system reports an error, or has done so when a record was written.
        """
        with self._lock:
            if self._state != "open":
                return
            self._check_open(self.path)
            try:
                self._check_whole()
                with write_errors(self.path):
                    self._finish()
                    if self.before_publish is not None:
                        self.before_publish(self._part.temporary)
                    self._part.publish()
            except BaseException as error:
                self._abort_after(error)
                raise
            self._state = "closed"

    def abort(self) -> None:
        """Discard everything written, without touching the destination."""
        with self._lock:
            if self._state != "open":
                return
            self._state = "aborted"
            try:
                self._discard()
            finally:
                self._part.abort()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {self._count} records, {self._state})"


class IndexedWriter(Writer):
    """A writer of files with an index beside each, which is renamed right after the file.

    A subclass calls `_begin_index` first, and `_finish_index` last.
    """

    _has_index = False

    def _begin_index(self, path: str) -> None:
        self._index = storage_of(self.path, self._remote).create(path, overwrite=self._overwrite)

    def _finish_index(self, pieces: Iterable[bytes | bytearray] | None) -> None:
        """Write an index of these pieces, None for none, so that only its rename is left."""
        if pieces is not None:
            with self._index.create() as stream:
                stream.writelines(pieces)
            self._index.sync()
            self._has_index = True
        if self._overwrite:
            self._part.sync()
            # First: a file must never be beside the index of another, because the index would be trusted.
            storage_of(self.path, self._remote).remove(self._index.path)

    def close(self) -> None:
        """Publish the file, and then its index. May be called twice."""
        with self._lock:
            if self._state == "open":
                super().close()
                if self._has_index:
                    self._index.publish()
                self._index.abort()

    def abort(self) -> None:
        """Discard everything written; the destination is unchanged."""
        try:
            super().abort()
        finally:
            self._index.abort()


def require_fields(record: Any, format_name: str) -> Mapping[str, Any]:
    """Return `record` as a mapping of fields, in which tensors of torch, JAX and others are numpy arrays.

    Raises:
        ConfigError: The record is not a mapping, the name of a field is not text, or numpy cannot hold a tensor.
    """
    if type(record) is not dict and not isinstance(record, Mapping):  # the abstract class takes longer to ask
        raise ConfigError(f"format {format_name!r} stores fields, got a record of type {type(record).__name__}")
    tensors: list[str] = []
    for name, value in record.items():
        if not isinstance(name, str):
            raise ConfigError(f"field names must be text, got {name!r} ({type(name).__name__})")
        if hasattr(value, "__array__") and type(value) is not np.ndarray and not isinstance(value, np.generic):
            tensors.append(name)
    return {**record, **{name: to_array(name, record[name]) for name in tensors}} if tensors else record


DEFAULT_CODEC = "tensorprotos"
"""The codec of records with fields in a format that stores bytes, if none is chosen."""


def choose_codec(codec: Any, first: Any, default: str | None = None) -> Any:
    """Return the codec to write with, given the chosen one, the first record and the format's default."""
    return resolve_codec(default or DEFAULT_CODEC) if codec is None and isinstance(first, Mapping) else codec


def codec_name(codec: Any) -> str | None:
    """Return the name by which a codec can be recorded; None for a user's codec, or one that only reads."""
    name = getattr(codec, "name", None)
    return name if name in CODEC_NAMES and name != READ_ONLY_CODEC and resolve_codec(name) == codec else None


def encode_bytes(record: Any, codec: Any, format_name: str) -> bytes:
    """Return `record` as the bytes that `codec` encodes; without a codec it has to be bytes already."""
    data = record if codec is None else codec.encode(record)
    if type(data) is bytes:
        return data
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if codec is not None:
        raise ConfigError(f"codec {codec!r} encoded a record as {type(data).__name__}, not bytes", key="codec")
    message = f"format {format_name!r} stores bytes, got a record of type {type(record).__name__}"
    raise ConfigError(f"{message}: choose a codec, one of {', '.join(CODEC_NAMES)}", key="codec")
