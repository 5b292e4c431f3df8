"""Local files that can be released, and are opened again by the next read."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from dataload.errors import ChangedFileError
from dataload.storage.errors import changed_error, file_errors, overwritten_error, rewritten_error
from dataload.storage.local.regular import open_regular
from dataload.storage.records import RecordFile


class FileIdentity(NamedTuple):
    """Version of a file: size in bytes, time of the last change in ns, and the file's device and inode."""

    size: int
    changed: int
    file: tuple[int, int]

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Return the version of the file with this status."""
        return cls(status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))


class Handle:
    """An open file, closed with the last reference to this object, and its version at opening (`changed` in ns)."""

    __slots__ = ("__weakref__", "changed", "descriptor", "identity")

    def __init__(self, path: str) -> None:
        self.descriptor: int = open_regular(path)
        weakref.finalize(self, os.close, self.descriptor).atexit = False  # threads may still be reading at exit
        self.identity: FileIdentity = FileIdentity.of(os.fstat(self.descriptor))
        self.changed: int = self.identity.changed


HandleT = TypeVar("HandleT", bound=Handle)


class ReopenedFile(RecordFile, Generic[HandleT]):
    """A local file, which `make` opens by its path; see `RecordFile`. A running read keeps its handle."""

    def __init__(self, path: str, make: Callable[[str], HandleT]) -> None:
        self.path = path
        self._make = make
        with file_errors(path):
            self._handle: HandleT | None = make(path)
        self._identity = self._handle.identity
        self.size: int = self._identity.size

    def release(self) -> None:
        self._handle = None

    @property
    def is_open(self) -> bool:
        """Whether the file is open here."""
        return self._handle is not None

    def is_deleted(self) -> bool:
        """Return whether the file is open here, and has no name any more."""
        handle = self._handle
        with file_errors(self.path):
            return handle is not None and os.fstat(handle.descriptor).st_nlink == 0

    def is_written(self) -> bool:
        handle = self._open()
        with file_errors(self.path):
            return os.fstat(handle.descriptor).st_mtime_ns != handle.changed

    def _changed(self, handle: HandleT) -> ChangedFileError | None:
        """Return, after a read, the error for a file that was changed since it was opened; None if it was not."""
        with file_errors(self.path):
            now = os.fstat(handle.descriptor)
        if now.st_size < self.size:
            return changed_error(self.path, self.size, now.st_size)
        if now.st_mtime_ns == handle.changed or self.may_be_written:
            return None
        return overwritten_error(self.path, handle.changed, now.st_mtime_ns)

    def _open(self) -> HandleT:
        handle = self._handle
        if handle is None:
            with file_errors(self.path):
                handle = self._make(self.path)
            if handle.identity.size != self.size:
                raise changed_error(self.path, self.size, handle.identity.size)
            if handle.identity != self._identity:
                raise rewritten_error(self.path)
            self._handle = handle
        return handle
