"""Open LMDB environments, one per file and process, shared by all sources that read the file.

LMDB forbids opening a file twice in one process, so environments are kept by file and closed with their last lease.
They are opened read-only and without locks: the lock table has 126 slots, which killed readers keep, and a read-only
directory has no lock table. Therefore the data must be complete; a running writer is not detected.

A forked child continues to use the environments of its parent. It cannot open these files again while they are open,
and closing them may never return: py-lmdb waits for reads that other threads were executing at the time of the fork,
and these threads do not exist in the child. Without locks, an environment is only a shared, read-only map, which a
child may read like its parent. It just must not be closed, so the child keeps it until it exits.
"""

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
"""An lmdb read transaction."""

Database = Any
"""An lmdb handle of the main database or a named one."""


@dataclass(slots=True, eq=False)
class _Shared:
    """An open environment.

    Attributes:
        key: Device and inode of the data file.
        path: Absolute path of the data file.
        info: Contents of its meta page.
        subdatabases: The named databases.
        handle: The lmdb environment.
        error: ``lmdb.Error``.
        leases: Number of `Environment` objects that use it.
        inherited: Whether a parent process opened it, so that it must not be closed.
        databases: Open handles by name.
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


# Process-wide, like the environments themselves.
_shared: dict[tuple[int, int], _Shared] = {}
_lock = threading.Lock()
_dropped: deque[_Shared] = deque()  # ended leases that have not been counted yet


class Environment:
    """A lease of an open environment, which ends with the last reference to this object.

    Reads are thread-safe: each uses its own transaction.

    Attributes:
        path: Path of the data file.
        main: The main database.
        subdatabases: The named databases.
    """

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self.path = shared.path
        self.main = shared.info.main
        self.subdatabases = shared.subdatabases
        # Not at exit, when threads may still be reading; the operating system closes everything anyway.
        weakref.finalize(self, _drop, shared).atexit = False

    @contextmanager
    def reading(self, *, buffers: bool) -> Generator[Transaction]:
        """Begin a read transaction, and translate lmdb's errors.

        Args:
            buffers: Whether values are views of the map, valid only within the transaction, instead of bytes.

        Raises:
            CorruptFileError: The file has shrunk, or LMDB reports damage.
        """
        self._check()
        with lmdb_errors(self._shared.error, self.path), self._shared.handle.begin(buffers=buffers) as txn:
            yield txn

    def database(self, name: bytes | None) -> Database:
        """Return the handle of an existing named database, or of the main one."""
        shared = self._shared
        found = shared.databases.get(name)
        if found is None:
            # LMDB does not allow two threads to open handles at the same time.
            with _lock, lmdb_errors(shared.error, self.path):
                found = shared.databases[name] = shared.handle.open_db(name, create=False)
            _sweep()
        return found

    def _check(self) -> None:
        """Check that the file has not shrunk: touching a page that no longer exists kills the process."""
        try:
            found = storage_of(self.path).identity(self.path)
        except SourceError:
            return  # unlinked, but still open
        size = self._shared.info.size
        if found.file == self._shared.key and found.size < size:
            raise CorruptFileError(
                f"the file has {found.size} bytes, but at least {size} were in use when it was opened: it was "
                "changed since; open it again, and replace files by renaming new ones over them",
                path=self.path,
                offset=found.size,
            )


def open_environment(path: str, entry: Format) -> Environment:
    """Open an environment, or share it if it is open.

    Args:
        path: A directory with data.mdb, or a single file.
        entry: The format that is read.

    Raises:
        OSError: The file does not exist or cannot be read.
        CorruptFileError: The file is truncated or damaged.
        UnsupportedFormatError: The file is from another version of LMDB or kind of machine.
        SourceError: LMDB cannot open the file.
        MissingDependencyError: lmdb is not installed.
    """
    lmdb = entry.require("lmdb")
    info = check_whole(path)
    key = storage_of(path).identity(info.path).file
    _sweep()
    with _lock:
        shared = _shared.get(key)
        if shared is None:
            shared = _shared[key] = _open(lmdb, path, key, info)
        elif (shared.info.size, shared.info.main) != (info.size, info.main):
            raise SourceError(
                f"{info.path} has been written to since another source opened it in this process: close that first",
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
            readahead=False,  # it would fetch neighbours that shuffled reads do not need
            create=False,
            max_dbs=max(1, len(named)),
        )
    return _Shared(key, absolute(info.path), info, named, handle, lmdb.Error)


def _drop(shared: _Shared) -> None:
    """End a lease. The garbage collector may call this at any point in any thread."""
    _dropped.append(shared)
    _sweep()


def _sweep() -> None:
    """Close environments without leases.

    The garbage collector may have interrupted this thread while it held the lock. Therefore nobody waits for the lock
    here, and whoever held it sweeps after releasing it.
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


def _after_fork() -> None:
    global _lock  # a thread of the parent may have held it at the fork
    _lock = threading.Lock()
    for shared in _shared.values():
        shared.inherited = True


on_fork(_after_fork)

_CORRUPT = ("CorruptedError", "PageNotFoundError", "InvalidError", "PanicError", "BadChecksumError", "ProblemError")
_UNSUPPORTED = ("VersionMismatchError", "IncompatibleError", "EnvEncryptionError", "CryptoFailError")


@contextmanager
def lmdb_errors(base: type[Exception], path: str) -> Generator[None]:
    """Translate lmdb's exceptions about `path`.

    Args:
        base: ``lmdb.Error``.
        path: The data file.
    """
    try:
        yield
    except base as error:
        name, text = type(error).__name__, str(error)
        if name in _CORRUPT:
            raise CorruptFileError(f"LMDB reports damage: {text}", path=path) from error
        if name in _UNSUPPORTED:
            raise UnsupportedFormatError(f"LMDB cannot read {path}: {text}", path=path) from error
        hint = ""
        if "already open" in text:
            hint = ": other code of this process has it open, which LMDB allows only once; close it there"
        raise SourceError(f"LMDB cannot read {path}: {text}{hint}", path=path) from error
