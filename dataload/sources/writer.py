"""What every writer shares: nothing shows at the destination before it is whole, and no old file is harmed."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from dataload.errors import ConfigError, SourceError, SourceNotFoundError

__all__ = ["Writer", "require_fields"]


class Writer(ABC):
    """Writes records to a temporary name beside the destination; `close` makes them durable and renames.

    Leaving a ``with`` block by an exception throws the temporary away; so does a killed process, nearly: it
    leaves a hidden file that no source opens.

    Args:
        path: Destination, a file or (for LMDB) a directory.
        overwrite: Replace what is there; otherwise that is an error.

    Raises:
        ConfigError: The destination exists and `overwrite` is false.
        SourceNotFoundError: The directory of the destination does not exist.
        SourceError: It cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = os.path.normpath(os.fspath(path))
        self._overwrite = overwrite
        self._count = 0
        self._pid = os.getpid()
        self._state = "refused"  # -> "open" -> "closed" | "aborted"
        self._check_destination()
        directory, name = os.path.split(self.path)
        self._directory = directory or "."
        if not os.path.isdir(self._directory):
            raise SourceNotFoundError(f"there is no directory {self._directory} to write {name} to", path=self.path)
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise SourceError(f"the directory {self._directory} cannot be written to", path=self.path)
        self._temporary = os.path.join(self._directory, f".{name}.{uuid.uuid4().hex[:12]}.tmp")
        self._state = "open"

    def _check_destination(self) -> None:
        if os.path.exists(self.path) and not self._overwrite:
            raise ConfigError(
                f"{self.path} exists: choose another name, or pass overwrite=True to replace it",
                key="path",
                value=self.path,
            )

    @abstractmethod
    def _write(self, record: Any) -> None:
        """Append one record to the temporary, or raise and leave it as it was."""

    @abstractmethod
    def _finish(self) -> None:
        """Complete the temporary and flush it to the disk (`fsync`)."""

    def _discard(self) -> None:  # noqa: B027 - most writers hold nothing else
        """Release what `_finish` would have released, after a failure."""

    def __len__(self) -> int:
        """Records written so far."""
        return self._count

    def write(self, record: Any) -> None:
        """Append one record.

        Raises:
            ConfigError: The format cannot hold it; the file is as before the call.
        SourceError: The operating system refused, for example because the disk is full.
        """
        if self._state != "open":
            raise ConfigError(f"the writer of {self.path} is {self._state}: nothing more can be written")
        with _write_errors(self.path):
            self._write(record)
        self._count += 1

    def extend(self, records: Iterable[Any]) -> None:
        """Append several records."""
        for record in records:
            self.write(record)

    def close(self) -> None:
        """Put the finished file in its place. May be called twice.

        Raises:
            ConfigError: Something has appeared at the destination meanwhile.
        SourceError: The operating system refused.
        """
        if self._state != "open":
            return
        try:
            with _write_errors(self.path):
                self._finish()
                self._check_destination()
                _replace(self._temporary, self.path)
        except BaseException:
            self.abort()
            raise
        self._state = "closed"
        _sync_directory(self._directory)

    def abort(self) -> None:
        """Throw away what was written; the destination is untouched."""
        if self._state != "open":
            return
        self._state = "aborted"
        try:
            self._discard()
        finally:
            _remove(self._temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        # A writer that was forgotten wrote nothing; its hidden file goes too.
        with contextlib.suppress(Exception):
            if self._pid == os.getpid():  # in a fork it is still the parent's
                self.abort()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {self._count} records, {self._state})"


@contextlib.contextmanager
def _write_errors(path: str) -> Generator[None]:
    """Translate the operating system's errors, such as a full disk."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"cannot write {path}: {error.strerror or error}", path=path) from error


def require_fields(record: Any, format_name: str) -> Mapping[str, Any]:
    """`record` as a mapping of fields.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(record, Mapping):
        raise ConfigError(f"format {format_name!r} stores fields, got a record of type {type(record).__name__}")
    for name in record:
        if not isinstance(name, str):
            raise ConfigError(f"names of fields are text, got {name!r} ({type(name).__name__})")
    return record


def _replace(temporary: str, destination: str) -> None:
    if os.path.isdir(temporary) and os.path.isdir(destination):
        # A directory cannot be renamed over another: the old one steps aside, and comes back if that fails.
        aside = f"{temporary}.old"
        os.rename(destination, aside)
        try:
            os.rename(temporary, destination)
        except BaseException:
            os.rename(aside, destination)
            raise
        shutil.rmtree(aside)
    else:
        os.replace(temporary, destination)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _sync_directory(path: str) -> None:
    """Make the new name survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
