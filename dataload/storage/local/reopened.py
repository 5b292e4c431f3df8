"""Local files that can be released, and are opened again by the next read."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from dataload.storage.errors import changed_error, file_errors, rewritten_error
from dataload.storage.local.regular import open_regular
from dataload.storage.records import RecordFile


class FileIdentity(NamedTuple):
    """Version of a file.

    Attributes:
        size: Size in bytes.
        changed: Time of the last change, in nanoseconds.
        file: Device and inode, which identify a file under any path.
    """

    size: int
    changed: int
    file: tuple[int, int]

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Return the version of the file with this status."""
        return cls(status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))


class Handle:
    """An open file, closed with the last reference to this object.

    Attributes:
        descriptor: Its descriptor.
        identity: Its version when it was opened.
    """

    __slots__ = ("__weakref__", "descriptor", "identity")

    def __init__(self, path: str) -> None:
        self.descriptor: int = open_regular(path)
        weakref.finalize(self, os.close, self.descriptor).atexit = False  # threads may still be reading at exit
        self.identity: FileIdentity = FileIdentity.of(os.fstat(self.descriptor))


HandleT = TypeVar("HandleT", bound=Handle)


class ReopenedFile(RecordFile, Generic[HandleT]):
    """A local file; see `RecordFile`. A running read keeps its handle.

    Args:
        path: Its path.
        make: Opens the file at a path.
    """

    def __init__(self, path: str, make: Callable[[str], HandleT]) -> None:
        self.path = path
        self._make = make
        with file_errors(path):
            self._handle: HandleT | None = make(path)
        self._identity = self._handle.identity
        self.size: int = self._identity.size

    def release(self) -> None:
        """See `RecordFile`."""
        self._handle = None

    def is_deleted(self) -> bool:
        """Return whether the file is open here, and has no name any more."""
        handle = self._handle
        return handle is not None and os.fstat(handle.descriptor).st_nlink == 0

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
