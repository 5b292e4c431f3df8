"""LMDB environments: one for each file and process, shared by all sources that read it.

LMDB forbids opening a file twice in one process, so environments are kept by file and closed with their last
lease. They are opened read-only and without locks: the table of locks has 126 places, which killed readers
keep, and a read-only directory has none. So the data must be finished; a writer at work is not noticed.

A forked child goes on with the environments it inherited, for opening these files again is refused while they
are open, and closing them may never return: py-lmdb waits for the reads that other threads were in at the
moment of the fork, and these threads do not exist in the child. Without locks, an environment is nothing but
a shared, read-only map, which a child may read as well as its parent. It only must not be closed, so there it
is kept until the process ends.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dataload._util.per_process import on_fork
from dataload.errors import CorruptFileError, SourceError, UnsupportedFormatError
from dataload.sources.format import Format
from dataload.sources.lmdb.file import FileInfo, Subdatabase, check_whole, subdatabases
from dataload.storage import absolute, storage_of

Transaction = Any
"""A read transaction of lmdb."""

Database = Any
"""A handle of lmdb on the main database or a named one."""


@dataclass(slots=True, eq=False)
class _Shared:
    """An open environment.

    Attributes:
        key: Device and inode of its data file.
        path: The data file, absolute.
        info: What its meta page said.
        subdatabases: The named databases.
        handle: lmdb's environment.
        error: ``lmdb.Error``.
        leases: How many `Environment` objects use it.
        inherited: Opened by a parent of this process, so not to be closed.
        databases: Handles that are open, by name.
    """

    key: tuple[int, int]
    path: str
    info: FileInfo
    subdatabases: tuple[Subdatabase, ...]
    handle: Any
    error: type[Exception]
    leases: int = 0
    inherited: bool = False
    databases: dict[bytes | None, Database] = field(default_factory=dict[bytes | None, Database])


# State of the process, as the environments themselves are.
_shared: dict[tuple[int, int], _Shared] = {}
_lock = threading.Lock()
_dropped: deque[_Shared] = deque()  # leases that ended, not yet subtracted
_watches_forks = False


class Environment:
    """A lease of an open environment, which ends with the last reference to it.

    Reads are thread-safe: each uses a transaction of its own.

    Attributes:
        path: The data file.
        info: What its meta page said.
        main: The main database.
        subdatabases: The named databases.
    """

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self.path = shared.path
        self.info = shared.info
        self.main = shared.info.main
        self.subdatabases = shared.subdatabases
        # Not at exit: threads may still be reading, and the operating system closes everything anyway.
        weakref.finalize(self, _drop, shared).atexit = False

    @contextmanager
    def reading(self, *, buffers: bool) -> Generator[Transaction]:
        """A read transaction; errors of lmdb are translated.

        Args:
            buffers: What it gives are views into the map, valid only within the transaction; else bytes.

        Raises:
            CorruptFileError: The file became shorter, or LMDB found that it is damaged.
        """
        self._check()
        with lmdb_errors(self._shared.error, self.path), self._shared.handle.begin(buffers=buffers) as txn:
            yield txn

    def database(self, name: bytes | None) -> Database:
        """The handle of a named database that exists, or of the main one."""
        shared = self._shared
        found = shared.databases.get(name)
        if found is None:
            # One handle at a time: opening them from two threads is the one thing LMDB does not allow.
            with _lock, lmdb_errors(shared.error, self.path):
                found = shared.databases[name] = shared.handle.open_db(name, create=False)
            _sweep()
        return found

    def _check(self) -> None:
        """Touching a page that is gone kills the process, so the file's size is looked at first."""
        try:
            found = storage_of(self.path).identity(self.path)
        except SourceError:
            return  # unlinked: what was opened is still there
        size = self._shared.info.size
        if found.file == self._shared.key and found.size < size:
            raise CorruptFileError(
                f"the file has {found.size} bytes, and at least {size} were in use when it was opened: it was "
                "changed since; open it again, and replace files by renaming new ones over them",
                path=self.path,
                offset=found.size,
            )


def open_environment(path: str, entry: Format) -> Environment:
    """Open an environment, or share the one that is open.

    Args:
        path: A directory with data.mdb, or a single file.
        entry: The format that is read.

    Raises:
        OSError: There is no such file, or it cannot be read.
        CorruptFileError: It is truncated or damaged.
        UnsupportedFormatError: It is an LMDB file of another version or machine.
        SourceError: LMDB cannot open it.
        MissingDependencyError: lmdb is not installed.
    """
    lmdb = entry.require("lmdb")
    info = check_whole(path)
    key = storage_of(path).identity(info.path).file
    _sweep()
    with _lock:
        shared = _shared.get(key)
        if shared is None:
            _watch_forks()
            shared = _shared[key] = _open(lmdb, path, key, info)
        elif (shared.info.size, shared.info.main) != (info.size, info.main):
            raise SourceError(
                f"{info.path} was written to after another source of this process had opened it: close that one first",
                path=info.path,
            )
        shared.leases += 1
    environment = Environment(shared)
    _sweep()
    return environment


def _open(lmdb: Any, path: str, key: tuple[int, int], info: FileInfo) -> _Shared:
    named = tuple(subdatabases(path))
    with lmdb_errors(lmdb.Error, info.path):
        handle = lmdb.open(
            path,
            subdir=storage_of(path).is_directory(path),
            readonly=True,
            lock=False,
            readahead=False,  # shuffled reads; it would fetch neighbours that nobody asked for
            create=False,
            max_dbs=max(1, len(named)),
        )
    return _Shared(key, absolute(info.path), info, named, handle, lmdb.Error)


def _drop(shared: _Shared) -> None:
    """End a lease; may be called at any point of any thread, by the garbage collector."""
    _dropped.append(shared)
    _sweep()


def _sweep() -> None:
    """Close what nobody uses any more.

    Whoever holds the lock may be this very thread, interrupted by the garbage collector; so nobody waits for
    it here, and who has held it sweeps after releasing it.
    """
    while _dropped and _lock.acquire(blocking=False):
        try:
            while _dropped:
                shared = _dropped.popleft()
                shared.leases -= 1
                if shared.leases == 0 and not shared.inherited:
                    del _shared[shared.key]
                    shared.handle.close()
        finally:
            _lock.release()


def _watch_forks() -> None:
    global _watches_forks
    if not _watches_forks:
        on_fork(_after_fork)
        _watches_forks = True


def _after_fork() -> None:
    global _lock  # another thread of the parent may have held it, and does not exist here
    _lock = threading.Lock()
    for shared in _shared.values():
        shared.inherited = True


_CORRUPT = ("CorruptedError", "PageNotFoundError", "InvalidError", "PanicError", "BadChecksumError", "ProblemError")
_UNSUPPORTED = ("VersionMismatchError", "IncompatibleError", "EnvEncryptionError", "CryptoFailError")


@contextmanager
def lmdb_errors(base: type[Exception], path: str) -> Generator[None]:
    """Translate the exceptions of lmdb about `path`.

    Args:
        base: ``lmdb.Error``.
        path: The data file.
    """
    try:
        yield
    except base as error:
        name, text = type(error).__name__, str(error)
        if name in _CORRUPT:
            raise CorruptFileError(f"LMDB found it damaged: {text}", path=path) from error
        if name in _UNSUPPORTED:
            raise UnsupportedFormatError(f"LMDB cannot read {path}: {text}", path=path) from error
        hint = ""
        if "already open" in text:
            hint = ": code other than dataload has it open, and LMDB allows it once in a process; close it there"
        raise SourceError(f"LMDB cannot read {path}: {text}{hint}", path=path) from error
