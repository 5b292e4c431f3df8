"""The machine and its system: CPUs, memory, threads, and substitutes for calls that macOS or Windows lack.

No other module knows the systems.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from time import process_time
from typing import Any, NamedTuple


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
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as stream:
        stream.write("1000")


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
    """Return `length` bytes from `offset` of a file, fewer at its end."""
    data = _read_once(descriptor, length, offset)
    while 0 < len(data) < length and (more := _read_once(descriptor, length - len(data), offset + len(data))):
        data += more  # Linux reads at most 2 GiB at a time
    return data


def _read_once(descriptor: int, length: int, offset: int) -> bytes:
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


class _ControlGroup(NamedTuple):
    directory: Path  # may be invisible in a container
    version: int  # 1 or 2; they differ in file names


class _MemoryNames(NamedTuple):
    """Names in a memory control group."""

    limit: str  # a file
    used: str  # a file
    # Counters of file pages, which the system frees before memory runs out.
    cached: tuple[str, str]


_MEMORY_NAMES = {
    1: _MemoryNames("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: _MemoryNames("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def usable_cpus() -> int:
    """Return the CPUs that this process may use: its affinity, or its control groups' quota if smaller, rounded up."""
    affinity = getattr(os, "sched_getaffinity", None)
    count, quota = (os.cpu_count() or 1) if affinity is None else len(affinity(0)), cgroup_quota()
    return count if quota is None else min(count, math.ceil(quota))


def cpu_demand() -> float:
    """Return seconds that this process's threads used a CPU or (on Linux) waited for one; takes 10 us a thread."""
    waited = 0
    with suppress(OSError, ValueError, IndexError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                waited += int(_read(f"/proc/self/task/{thread}/schedstat").split()[1])
    return process_time() + 1e-9 * waited


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 100)
    finally:
        os.close(descriptor)


def is_single_threaded() -> bool:
    """Return whether a fork is safe: this process has one thread. Threads of OpenBLAS do not count.

    OpenBLAS ends its threads before a fork and starts others later. Without `/proc` the answer is False.
    """
    with suppress(OSError):
        threads = len(os.listdir("/proc/self/task"))
        return threads == 1 or (threading.active_count() == 1 and threads <= 1 + _threads_of_openblas())
    return False


def _threads_of_openblas() -> int:
    """Return the threads that the libraries of numpy and scipy keep beside this process's own."""
    found = 0
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in paths:
        with suppress(OSError):  # it was replaced
            library = ctypes.CDLL(path)
            for before, after in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
                count = getattr(library, f"{before}openblas_get_num_threads{after}", None)
                # 1 means its own threads. OpenMP's threads do not survive a fork.
                if count is not None and getattr(library, f"{before}openblas_get_parallel{after}")() == 1:
                    found += count() - 1
                    break
    return found


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process's control groups, or None without a limit."""
    quotas: list[float] = []
    for group, version in _control_groups("cpu", root):
        with suppress(OSError, ValueError, IndexError):  # invisible, or "max"
            if version == 2:
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory still available to this process: the machine's or its control groups', if less."""
    found: list[int] = []
    with suppress(OSError, ValueError, KeyError):
        found.append(_numbers(root / "proc/meminfo")["MemAvailable:"] * 1024)
    for group, version in _control_groups("memory", root):
        names = _MEMORY_NAMES[version]
        with suppress(OSError, ValueError, KeyError):  # invisible, or no limit
            limit, used = (int((group / name).read_text()) for name in (names.limit, names.used))
            statistics = _numbers(group / "memory.stat")
            found.append(max(0, limit - used + sum(statistics[name] for name in names.cached)))
    return min(found, default=1 << 62)


def _control_groups(controller: str, root: Path) -> Iterator[_ControlGroup]:
    """Yield the control groups that limit this process, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_bytes().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = os.fsdecode(line).split(":", 2)
        if not controllers:
            mount, version = mounts, 2
        elif controller in controllers.split(","):
            # The controllers of a hierarchy share a directory, usually linked under each name.
            shared = mounts / controllers
            mount, version = shared if shared.is_dir() else mounts / controller, 1
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            yield _ControlGroup(mount / group, version)


def _numbers(path: Path) -> dict[str, int]:
    with path.open(encoding="utf-8") as stream:
        return {words[0]: int(words[1]) for words in map(str.split, stream)}
