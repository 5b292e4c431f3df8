"""Files and directories that appear at their destination complete or not at all."""

import contextlib
import ctypes
import errno
import hashlib
import io
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count, pairwise
from typing import IO, Any, Self

from dataload._util.system import IS_POSIX, LOCK_EX, LOCK_NB, lock, open_file, open_folder, user_number
from dataload.errors import ConfigError, SourceError
from dataload.storage.errors import write_errors

_BUFFER_BYTES = 1 << 20
_ASIDE = ".old"

# Flags of Linux's renameat2 and macOS's renamex_np: fail if the destination exists; exchange both.
_NO_REPLACE, _EXCHANGE = (4, 2) if sys.platform == "darwin" else (1, 2)
_THIS_DIRECTORY = -100  # AT_FDCWD
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.ENOLCK, errno.EBADF}


class _OwnFile(io.FileIO):
    """A file of this process: what is in the buffer at a fork is not written by the child's end, too."""

    def __init__(self, path: str, mode: str) -> None:
        super().__init__(path, mode)
        self._pid = os.getpid()

    def write(self, data: Any, /) -> int:
        return super().write(data) if self._pid == os.getpid() else memoryview(data).nbytes


class AtomicFile:
    """A file or directory written in a hidden, private folder beside its destination, `path`."""

    def __init__(self, path: str, *, overwrite: bool = False) -> None:
        self.path: str = os.path.normpath(path)
        self._overwrite = overwrite
        self._check_destination()
        directory, name = os.path.split(self.path)
        self.directory: str = directory or "."
        make_directory(self.directory)
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise SourceError(f"the directory {self.directory} cannot be written to", path=self.path)
        remove_leftovers(self.path)
        self._check_destination()  # `remove_leftovers` may have restored the old one
        with write_errors(self.path):
            self._folder, self._lock = _make_folder(os.path.join(self.directory, name))
        self.temporary: str = os.path.join(self._folder, name)
        self._is_over = False

    def _check_destination(self) -> None:
        if not self._overwrite and os.path.lexists(self.path):
            raise exists_error(self.path)

    def create(self) -> IO[bytes]:
        """Create the temporary as a file and return a buffered stream to write it."""
        if os.path.isdir(self.path):
            self.abort()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        return io.BufferedWriter(_OwnFile(self.temporary, "xb"), _BUFFER_BYTES)

    def inside(self, name: str) -> str:
        """Return the path for a file in the temporary, which is a directory; the folders above it are made."""
        path = os.path.join(self.temporary, name)
        make_directory(os.path.dirname(path))
        return path

    def spool(self, memory_bytes: int) -> IO[bytes]:
        """Return a stream kept in memory up to `memory_bytes`, then in an unnamed file beside the destination."""
        return tempfile.SpooledTemporaryFile(memory_bytes, dir=self._folder)  # pyright: ignore[reportReturnType]

    def patch(self, offset: int, data: bytes, name: str = "") -> None:
        """Replace bytes of the temporary, or of the file `name` in it."""
        with open(os.path.join(self.temporary, name) if name else self.temporary, "r+b") as stream:
            stream.seek(offset)
            stream.write(data)

    def sync(self) -> None:
        for folder, _, names in os.walk(self.temporary):
            for name in names:
                _sync(os.path.join(folder, name))
            _sync(folder)
        if not os.path.isdir(self.temporary):
            _sync(self.temporary)

    def publish(self, *, durable: bool = True) -> None:
        """Rename the temporary to the destination, after flushing it to the disk if `durable`."""
        if durable:
            self.sync()
        if self._overwrite:
            _replace(self.temporary, self.path)
        else:
            try:
                _rename_new(self.temporary, self.path)
            except FileExistsError:
                raise exists_error(self.path) from None
        if durable:
            _sync(self.directory)  # otherwise a power failure may lose the new name
        self.abort()

    def abort(self) -> None:
        """Delete everything unpublished. May be called twice."""
        if self._is_over:  # the folder's name may be another writer's by now
            return
        self._is_over = True
        with contextlib.suppress(OSError):
            _clear(self._folder, self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


def make_directory(path: str) -> None:
    with write_errors(path):
        try:
            os.makedirs(path, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            taken = path
            while taken and not os.path.lexists(taken):
                taken = os.path.dirname(taken)
            message = f"cannot write to the directory {path}: {taken} is not a directory; choose another destination"
            raise ConfigError(message, key="path", value=path) from None


def exists_error(path: str) -> ConfigError:
    message = f"{path} exists: choose another name, or pass overwrite=True to replace it"
    return ConfigError(message, key="path", value=path)


def remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def remove_leftovers(path: str) -> None:
    """Delete folders of killed writers of `path` (this boot's, lock free); restore a directory that one moved aside."""
    for folder, after in pairwise(_folders(path)) if IS_POSIX else ():
        if not os.path.lexists(folder) and not os.path.lexists(after):
            return
        with contextlib.suppress(OSError):  # its writer is alive, or has just removed it
            _remove_leftover(folder, path)


def _remove_leftover(folder: str, path: str) -> None:
    held = _lock(folder)
    try:
        if os.fstat(held).st_uid == user_number():
            _clear(folder, path)
    finally:
        os.close(held)


def _clear(folder: str, path: str) -> None:
    """Delete the folder of an atomic file; if the old directory is in it and nowhere else, restore that first."""
    aside = os.path.join(folder, os.path.basename(path) + _ASIDE)
    if os.path.lexists(aside) and not os.path.lexists(path):
        _rename_new(aside, path)
    remove(folder)


def _folders(path: str) -> Iterator[str]:
    """Yield the folders that writers of `path` try: so leftovers are found without listing the directory."""
    directory, name = os.path.split(path)
    return (os.path.join(directory or ".", f".{name}.{_machine()}-{number}.tmp") for number in count())


@cache
def _machine() -> str:
    """Return a short name for this boot of this machine, within which a free lock means that a writer has ended."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as stream:
            text = stream.read()
    except OSError:  # not Linux
        text = platform.node().encode()
    return hashlib.blake2b(text, digest_size=4).hexdigest()


def _make_folder(path: str) -> tuple[str, int | None]:
    """Create and lock a folder; return its path and the lock's descriptor, None if locks are not supported."""
    folders = _folders(path)
    while True:
        folder = next(folders)
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:  # of another writer
            continue
        try:
            return folder, _lock(folder) if IS_POSIX else None  # Windows opens no folders
        except (BlockingIOError, FileNotFoundError):
            continue  # another process took it for a leftover before the lock
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return folder, None


def _lock(folder: str) -> int:
    """Lock a folder until the returned descriptor is closed or the process ends; BlockingIOError if it is locked."""
    descriptor = open_folder(folder)
    try:
        lock(descriptor, LOCK_EX | LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.lstat(folder)):  # its holder has deleted it between the calls
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _replace(temporary: str, destination: str) -> None:
    """Rename to a destination that may exist, leaving the old one at or beside `temporary`."""
    if not (os.path.isdir(temporary) and os.path.isdir(destination)):
        os.replace(temporary, destination)
    elif not _rename_with(_EXCHANGE, temporary, destination):
        names = os.listdir(temporary)
        if len(names) == 1 and os.path.isfile(inner := os.path.join(temporary, names[0])):
            # Without an exchange of directories, replace the only file inside the old one.
            os.replace(inner, os.path.join(destination, names[0]))
            for other in set(os.listdir(destination)) - set(names):
                remove(os.path.join(destination, other))
            return
        # If this process is killed between the two renames, the next writer moves the old one back.
        os.rename(destination, temporary + _ASIDE)
        try:
            os.rename(temporary, destination)
        except BaseException:
            os.rename(temporary + _ASIDE, destination)
            raise


def _rename_new(temporary: str, destination: str) -> None:
    """Rename to a destination that must not exist; FileExistsError if it does."""
    if _rename_with(_NO_REPLACE, temporary, destination):
        return
    if os.path.lexists(destination):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), destination)
    if os.path.isdir(temporary):
        try:
            os.rename(temporary, destination)  # never replaces a file or a directory with content
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), destination) from None
            raise
        return
    try:
        os.link(temporary, destination)
    except FileExistsError:
        raise
    except OSError:  # without links, a file that appears just now is replaced
        os.rename(temporary, destination)


def _rename_with(flag: int, source: str, destination: str) -> bool:
    """Rename with a flag that `os` does not offer; return False if it is not supported."""
    rename = _libc_rename()
    if rename is None:
        return False
    if not rename(os.fsencode(source), os.fsencode(destination), flag):
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), source, None, destination)


@cache
def _libc_rename() -> Callable[[bytes, bytes, int], int] | None:
    try:
        library: Any = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return library.renamex_np
        rename = library.renameat2
    except (OSError, AttributeError, TypeError):
        return None
    return lambda source, destination, flag: rename(_THIS_DIRECTORY, source, _THIS_DIRECTORY, destination, flag)


def _sync(path: str) -> None:
    if not IS_POSIX and os.path.isdir(path):
        return
    descriptor = open_file(path, os.O_RDONLY if IS_POSIX else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
