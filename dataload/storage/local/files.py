"""The storage backend for local files, files that are appended to, and versions of files."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import platform
import stat
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dataload._util.system import (
    LOCK_EX,
    LOCK_NB,
    NO_FOLLOW,
    NO_WAIT,
    lock,
    lock_record,
    open_file,
    read_at,
    read_into_at,
    write_at,
)
from dataload._util.threads import DaemonThreads
from dataload.errors import SourceError, SourceNotFoundError, printable
from dataload.storage.core import can_map, core
from dataload.storage.errors import file_errors, overwritten_error, rewritten_error, write_errors
from dataload.storage.local.atomic import AtomicFile, make_directory, remove, remove_leftovers
from dataload.storage.local.record_files import FileIdentity, Handle, MappedFile, UnmappedFile, open_regular
from dataload.storage.paths import encoded_paths
from dataload.storage.record_file import RecordFile
from dataload.types import Int64Array


def append_text(path: str, text: str, *, sync: bool = False) -> None:
    """Append lines as UTF-8 in one write, after completing a torn last line; processes may share the file."""
    descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):  # of file systems without locks
            lock_record(descriptor)  # an unfinished write of another process looks like a torn line
        size = os.fstat(descriptor).st_size
        is_torn = bool(text) and size > 0 and read_at(descriptor, 1, size - 1) != b"\n"
        data = ("\n" * is_torn + text).encode()
        written = os.write(descriptor, data)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if written < len(data):
        raise OSError(f"only {written} of {len(data)} bytes could be written")


def read_text(path: str, characters: int = -1) -> str:
    with open(path, encoding="utf-8", opener=open_regular) as stream:
        return stream.read(characters)


_LONGEST_HOLDER = 300  # bytes
_PROBE_SECONDS = 0.02  # `dataload cache` takes a lock for a moment, to see whether a process holds it


class LocalFile:
    """An open file that any number of threads may read at any offset. `name` replaces its path in messages."""

    def __init__(self, path: str, name: str | None = None) -> None:
        self.path: str = name or path
        with file_errors(self.path):
            self._handle: Handle | None = Handle(path)
        self.size: int = self._handle.identity.size

    @property
    def _open(self) -> Handle:
        if (handle := self._handle) is None:
            raise ValueError(f"{self.path} was closed")
        return handle

    def read(self, offset: int, length: int) -> bytes:
        handle = self._open
        with file_errors(self.path):
            return read_at(handle.descriptor, length, offset)

    def read_into(self, offset: int, buffer: Any) -> int:
        handle = self._open
        with file_errors(self.path):
            return read_into_at(handle.descriptor, memoryview(buffer), offset)

    def close(self) -> None:
        self._handle = None  # a running read holds it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class LocalLease:
    """A local file, which needs no lease."""

    path: str


def _size_if_there(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:  # a link that leads nowhere
        return 0


class LocalStorage:
    """Local files. `RemoteStorage` has the same methods; any number of threads may call them at once.

    Methods that read raise `SourceNotFoundError` if nothing exists at the path, and `SourceError` if it cannot be read.
    """

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted, without hidden ones."""
        with file_errors(path):
            return sorted(name for name in os.listdir(path) if not name.startswith("."))

    def glob(self, pattern: str) -> list[str]:
        """Return the paths that match a pattern with ``*``, ``?`` or ``[...]``, sorted."""
        return sorted(glob.glob(pattern))

    def size(self, path: str) -> int:
        """Return the size in bytes of a file, or of all files in a directory."""
        with file_errors(path):
            if os.path.isdir(path):
                names = (os.path.join(folder, name) for folder, _, files in os.walk(path) for name in files)
                return sum(map(_size_if_there, names))
            return os.stat(path).st_size

    def identity(self, path: str) -> FileIdentity:
        with file_errors(path):
            return FileIdentity.of(os.stat(path))

    def read(self, path: str) -> bytes:
        with LocalFile(path) as file:
            return file.read(0, file.size)

    def read_ranges(self, path: str, offsets: Int64Array, lengths: Int64Array) -> list[bytes]:
        """Return byte ranges of a file in the requested order; ranges beyond its end are shorter."""
        with self.open(path) as file:
            return [
                file.read(offset, length) for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
            ]

    def open(self, path: str, *, whole: bool = False) -> LocalFile:  # noqa: ARG002 - for storage that is far away
        """Open a file for reading at any offset; `whole` announces that most of it will be read."""
        return LocalFile(path)

    def map(self, path: str, *, mapped: bool = True, whole: bool = False) -> RecordFile:  # noqa: ARG002 - as in `open`
        """Open a file to copy records out of it, mapped if that is safe; keep a local copy of the `whole` meanwhile."""
        return MappedFile(path) if mapped and can_map() else UnmappedFile(path)

    def lease(self, path: str) -> LocalLease:
        """Return a local copy of a file, which stays until the last reference is dropped."""
        return LocalLease(path)

    def lend(self, path: str, holder: Any) -> tuple[LocalLease, None]:  # noqa: ARG002 - for storage that is far away
        """Return a lease for opening a file, and what `holder` keeps while it is open, until others need the room."""
        return LocalLease(path), None

    def create(self, path: str, *, overwrite: bool = False) -> AtomicFile:
        """Start an atomic file or directory, which appears at `path` when it is published."""
        return AtomicFile(path, overwrite=overwrite)

    def load(self, path: str) -> tuple[bytes, None] | None:
        """Return the content of a small file and its version for `replace`; None if it does not exist."""
        try:
            return self.read(path), None
        except SourceNotFoundError:
            return None

    def replace(self, path: str, data: bytes, version: Any) -> None:  # noqa: ARG002 - the lock makes it needless
        """Write a small file in one step, and return its version.

        `version` is the one to replace, as returned by `load` or `replace`, or None to create. If the file has another
        version now, that is a FileExistsError. For local files the version is not checked: hold the lock.
        """
        with write_errors(path), AtomicFile(path, overwrite=True) as file:
            with file.create() as stream:
                stream.write(data)
            file.publish()

    def etag(self, path: str) -> None:  # noqa: ARG002 - for storage that has them
        """Return the ETag of an object; None if it has none, and for local files."""
        return

    def remove(self, path: str) -> None:
        remove(path)

    @contextmanager
    def lock(self, path: str) -> Generator[None]:
        """Hold an exclusive lock named after `path`; raise a `SourceError` that names the holder if it is taken."""
        # The lock of a URL excludes other processes of this node only; `replace` excludes other nodes.
        make_directory(os.path.dirname(path) or ".")
        name = os.path.join(os.path.dirname(path), f".{os.path.basename(path).lstrip('.')}.lock")
        with lock_file(name, path):
            remove_leftovers(path)
            yield


@contextmanager
def lock_file(name: str, path: str) -> Generator[None]:
    descriptor = _lock_file(name, path)
    try:
        yield
    finally:
        remove(name)
        os.close(descriptor)


def _lock_file(name: str, path: str) -> int:
    """Create and lock the file `name`, write the holder into it, and return its descriptor."""
    with write_errors(name):
        deadline = time.monotonic() + _PROBE_SECONDS
        while True:
            descriptor, may_write = _open_lock(name)
            try:
                lock(descriptor, LOCK_EX | LOCK_NB)
                # The previous holder may have deleted the file between the two calls: the next one would not see it.
                is_there = os.path.samestat(os.fstat(descriptor), os.lstat(name))
                if is_there and may_write:
                    os.ftruncate(descriptor, 0)
                    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
                    write_at(descriptor, f"process {os.getpid()} on {platform.node()}, since {now}".encode(), 0)
                    return descriptor
                if is_there:
                    os.unlink(name)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    os.close(descriptor)
                    time.sleep(_PROBE_SECONDS / 4)
                    continue
                holder = printable(read_at(descriptor, _LONGEST_HOLDER, 0).decode(errors="replace"), kept="")
                os.close(descriptor)
                who = f" ({holder})" if holder else ""
                raise SourceError(
                    f"another process is writing to {path}{who}: wait until it has ended", path=path
                ) from None
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def _open_lock(name: str) -> tuple[int, bool]:
    """Return the descriptor of a lock file, and whether this user may write to it."""
    may_write = True
    try:
        try:
            descriptor = open_file(name, os.O_RDWR | os.O_CREAT | NO_FOLLOW | NO_WAIT)
        except PermissionError:  # another user's, whose process may have ended
            may_write, descriptor = False, open_file(name, os.O_RDONLY | NO_FOLLOW | NO_WAIT)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SourceError(f"{name} must be a lock file, but is a symbolic link: remove it", path=name) from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # another name of it may be a valuable file
        os.close(descriptor)
        raise SourceError(f"{name} must be a lock file, but is something else: remove it", path=name)
    return descriptor, may_write


_SECONDS_BETWEEN_SYNCS = 1.0


class AppendedFile:
    """An existing file that is open for appending, until another process renames one to its place."""

    def __init__(self, path: str) -> None:
        self.path: str = path
        with write_errors(path):
            self._descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | NO_FOLLOW)
        self._synced = time.monotonic()

    def write(self, data: bytes) -> None:
        """Append `data` in one write; a SourceError if the file is not at its path any more."""
        with write_errors(self.path):
            if not self.is_current():
                message = f"another process has taken over {self.path}: wait until it has ended"
                raise SourceError(message, path=self.path)
            if (written := os.write(self._descriptor, data)) < len(data):
                raise OSError(f"only {written} of {len(data)} bytes could be written")
            if time.monotonic() - self._synced > _SECONDS_BETWEEN_SYNCS:
                self._sync()

    def is_current(self) -> bool:
        """Return whether the file is at its path."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        return False

    def _sync(self) -> None:
        getattr(os, "fdatasync", os.fsync)(self._descriptor)  # macOS has only the latter
        self._synced = time.monotonic()

    def close(self) -> None:
        try:
            with write_errors(self.path):
                self._sync()
        finally:
            os.close(self._descriptor)


_MANY_FILES = 1024  # the status of each takes 1.5 us, mostly waiting for memory


def versions_of(paths: Sequence[str]) -> Int64Array:
    """Return size, time of change in ns and number of each file, (files, 3); zeros for a missing file."""
    found = np.empty((len(paths), 3), np.int64)

    def look(part: slice) -> None:
        core().file_versions(found[part], encoded_paths(paths[part]))

    first, second = slice(len(paths) // 2), slice(len(paths) // 2, None)
    if len(paths) < _MANY_FILES:
        look(slice(None))
        return found
    with DaemonThreads(1) as pool:
        try:
            other = pool.submit(look, second)
        except RuntimeError:  # the machine starts no more threads
            look(second)
            other = None
        look(first)
        if other is not None:
            other.result()
    return found


def check_versions(paths: Sequence[str], known: Int64Array) -> None:
    """Raise CorruptFileError if a file is not of the version that `versions_of` returned before."""
    now = versions_of(paths)
    if now.tobytes() == known.tobytes():  # nearly always; often of one file
        return
    differs = (now != known).any(axis=1) & now.any(axis=1)  # opening a missing file says what is wrong
    if differs.any():
        raise rewritten_error(paths[int(np.argmax(differs))])


def check_not_overwritten(paths: Sequence[str], known: Int64Array) -> None:
    """Raise ChangedFileError if a file was changed in place; one that was replaced or deleted is read on."""
    now = versions_of(paths)
    overwritten = (now[:, 2] == known[:, 2]) & (now != known).any(axis=1)
    if overwritten.any():
        first = int(np.argmax(overwritten))
        raise overwritten_error(paths[first], int(known[first, 1]), int(now[first, 1]))
