"""Calls of the operating system that macOS or Windows lack, and their substitutes: the only module that knows them."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
from contextlib import suppress
from typing import Any


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_fcntl, _resource = _optional("fcntl"), _optional("resource")
IS_POSIX = _fcntl is not None

# Programs that this one starts do not inherit its files, and Windows does not change the ends of lines.
_ALWAYS: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
LOCK_SH, LOCK_EX, LOCK_NB, LOCK_UN = 1, 2, 4, 8  # as in `fcntl`

_UNLIMITED = 1 << 32
_FILES_ON_WINDOWS = 512  # of its C library
_seeking = threading.Lock()


def user_number() -> int:
    """Return the number of this user in the status of files."""
    return getattr(os, "geteuid", int)()


def die_first() -> None:
    """Ask Linux to end this process before others if memory runs out."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as stream:
        stream.write("1000")


def usable_cores() -> int:
    """Return the CPUs that the system's scheduler may use for this process."""
    affinity = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


def open_files_limit() -> int:
    """Return the number of files that this process may have open."""
    if _resource is None:
        return _FILES_ON_WINDOWS
    soft, _ = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == _resource.RLIM_INFINITY else soft


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a file like `os.open`; on Windows in such a way that it can be renamed and deleted, as elsewhere."""
    return _open_on_windows(path, flags) if sys.platform == "win32" else os.open(path, flags | _ALWAYS, mode)


def open_folder(path: str) -> int:
    """Open a folder in order to lock it; on Windows, which opens no folders, a file beside it."""
    directory = getattr(os, "O_DIRECTORY", None)
    if directory is None:
        return open_file(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    return open_file(path, directory | NO_FOLLOW)


def lock(descriptor: int, kind: int) -> None:
    """Lock a file until its descriptor is closed, like `fcntl.flock`."""
    if _fcntl is not None:
        _fcntl.flock(descriptor, kind)
    elif sys.platform == "win32":
        _lock_on_windows(descriptor, kind)


def lock_record(descriptor: int) -> None:
    """Wait for the lock of a file that processes append to, on file systems of servers, too."""
    if _fcntl is not None:
        _fcntl.lockf(descriptor, LOCK_EX)
    else:
        lock(descriptor, LOCK_EX)


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Return up to `length` bytes from `offset` of a file."""
    if sys.platform != "win32" and hasattr(os, "pread"):
        return os.pread(descriptor, length, offset)
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, length)


def read_into_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read bytes from `offset` of a file into a buffer, and return their number."""
    if sys.platform != "win32" and hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    data = read_at(descriptor, buffer.nbytes, offset)
    buffer.cast("B")[: len(data)] = data
    return len(data)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """Write bytes at `offset` of a file, and return their number."""
    if sys.platform != "win32" and hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, offset)
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def reserve(descriptor: int, size: int) -> None:
    """Give a file a size and, where the system can, the space for it: without, writing may fail later."""
    if sys.platform == "linux" and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


if sys.platform == "win32":
    import msvcrt
    from ctypes import wintypes

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.CreateFileW.restype = wintypes.HANDLE
    _IS_LOCKED = 33

    class _Overlapped(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_void_p * 2), ("offset", wintypes.DWORD * 2), ("event", wintypes.HANDLE))

    def _open_on_windows(path: str | os.PathLike[str], flags: int) -> int:
        access = 1 << 31 | (1 << 30 if flags & (os.O_WRONLY | os.O_RDWR) else 0)
        how = {0: 3, os.O_CREAT: 4, os.O_CREAT | os.O_EXCL: 1}[flags & (os.O_CREAT | os.O_EXCL)]
        handle = _kernel.CreateFileW(os.fspath(path), access, 7, None, how, 128, None)  # 7: others may do everything
        if handle == wintypes.HANDLE(-1).value:
            raise ctypes.WinError(ctypes.get_last_error())
        return msvcrt.open_osfhandle(handle, flags | _ALWAYS)

    def _lock_on_windows(descriptor: int, kind: int) -> None:
        handle = wintypes.HANDLE(msvcrt.get_osfhandle(descriptor))
        # Nothing else can read what is locked on Windows, so lock a byte beyond the end of every file.
        at = ctypes.byref(_Overlapped(offset=(0, 1 << 30)))
        _kernel.UnlockFileEx(handle, 0, 1, 0, at)
        flags = (2 if kind & LOCK_EX else 0) | (1 if kind & LOCK_NB else 0)
        if kind == LOCK_UN or _kernel.LockFileEx(handle, flags, 0, 1, 0, at):
            return
        code = ctypes.get_last_error()
        raise BlockingIOError(code, "the file is locked") if code == _IS_LOCKED else ctypes.WinError(code)
