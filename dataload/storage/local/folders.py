"""Folders: of many small files, which are listed and read at once, and of caches, which only this user may write."""

import os
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import TypeAlias

from dataload._util.system import IS_POSIX, user_number
from dataload._util.threads import DaemonThreads
from dataload.errors import ConfigError, SourceError
from dataload.storage.errors import changed_error, file_errors, overwritten_error, system_error
from dataload.storage.local.record_files import open_regular


def user_directory() -> str | None:
    """Return the user's cache directory, which may not exist; None without a home directory."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(chosen):  # the specification says to ignore relative paths
        chosen = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return os.path.join(chosen, "dataload") if os.path.isabs(chosen) else None


def distrust(status: os.stat_result, *owners: int) -> str | None:
    """Return why a user other than this one, root and `owners` could have written a file or folder; else None."""
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "it is neither a file nor a folder"
    if not IS_POSIX:
        return None  # the folders of a user are private on Windows, and the mode does not tell
    if status.st_uid not in {user_number(), 0, *owners}:
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "all users may write to it"
    return f"its group {status.st_gid} may write to it" if status.st_mode & stat.S_IWGRP else None


def trusted_folder(root: str, *names: str, create: bool = True) -> str:
    """Return the folder ``root/names`` of a cache; ConfigError if another user could have written to any of them."""
    for path in accumulate((root, *names), os.path.join):
        try:
            if create:
                os.makedirs(path, 0o700, exist_ok=True)
            status = os.stat(path, follow_symlinks=path == root)
            if path == user_directory() and status.st_uid == user_number() and status.st_mode & 0o022:
                os.chmod(path, 0o700)  # version 0.2 left its mode to the umask
                status = os.stat(path)
        except OSError as error:
            raise system_error("create the cache", root, error) from error
        if reason := distrust(status):
            raise ConfigError(
                f"{path} cannot be used as a cache, because {reason}: run `chmod go-w {path}` if no other user "
                "has written to it, or set remote.cache to a directory that only you can change",
                key="remote.cache",
                value=root,
            )
    return os.path.join(root, *names)


def discard_untrusted(path: str) -> str:
    """Delete a file that another user could have written, if it exists, and return its path."""
    if os.path.lexists(path) and distrust(os.lstat(path)):
        os.unlink(path)
    return path


Listing: TypeAlias = dict[str, dict[str, int]]
"""Folder, relative and ``""`` for the root, -> name of a file -> its size in bytes."""

_MOST_THREADS = 16
_PROBED = 4  # files whose time tells whether reading waits for a disk or a server
_SLOW_SECONDS = 0.001  # for each file; faster ones are in memory, where threads gain nothing


def list_names(path: str) -> dict[str, bool]:
    """Return the visible names in a directory, each with whether it is a folder."""
    with file_errors(path), os.scandir(path) as entries:
        return {entry.name: _is_folder(entry) for entry in entries if entry.name[0] != "."}


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself, which `stat` names where it matters
        return False


def list_folder(root: str, wanted: Callable[[str], object] = lambda _: True) -> tuple[Listing, int]:
    """Return all folders below `root` with the files that are `wanted` by relative path, and the last change in ns."""
    found: Listing = {}
    newest = 0
    todo: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())]
    while todo:
        folder, above = todo.pop()
        path = os.path.join(root, folder) if folder else root
        with file_errors(path):
            status = os.stat(path)
            here = status.st_dev, status.st_ino
            if here in above:
                message = f"{path} is a link to a folder above it, so the list of files has no end: remove the link"
                raise SourceError(message, path=path)
            with os.scandir(path) as entries:
                found[folder], folders, last = _list_entries(entries, f"{folder}/" if folder else "", wanted)
            newest = max(newest, last)
            todo += ((inner, (*above, here)) for inner in folders)
    return found, newest


def _list_entries(
    entries: Iterable[os.DirEntry[str]], prefix: str, wanted: Callable[[str], object]
) -> tuple[dict[str, int], list[str], int]:
    """Return a folder's file sizes by name, the relative paths of its subfolders, and the last change in ns."""
    files: dict[str, int] = {}
    newest = 0
    folders: list[str] = []
    for entry in entries:
        name = entry.name
        if name[0] == ".":
            continue
        if _is_folder(entry):
            folders.append(prefix + name)
        elif wanted(prefix + name):
            try:
                status = entry.stat()
            except OSError:
                with file_errors(entry.path):
                    raise
            files[name], newest = status.st_size, max(newest, status.st_mtime_ns)
    return files, folders, newest


def read_files(paths: Sequence[str], sizes: Sequence[int], indices: Sequence[int], newest: int) -> list[bytes]:
    """Return the content of files of these sizes, unchanged since `newest`, ns; `indices` are for messages."""
    begun = perf_counter()
    read = partial(_read_file, newest=newest)
    first = [*map(read, paths[:_PROBED], sizes[:_PROBED], indices[:_PROBED])]
    others = paths[_PROBED:], sizes[_PROBED:], indices[_PROBED:]
    if not others[0] or perf_counter() - begun < _SLOW_SECONDS * _PROBED:
        return [*first, *map(read, *others)]
    with DaemonThreads(min(_MOST_THREADS, len(others[0]))) as pool:
        return [*first, *pool.map(read, *others)]


def _read_file(path: str, size: int, index: int, *, newest: int) -> bytes:
    with file_errors(path):
        descriptor = open_regular(path)
        try:
            data = os.read(descriptor, size + 1)
            while 0 < len(data) < size and (more := os.read(descriptor, size + 1 - len(data))):
                data += more
            status = os.fstat(descriptor)
            if len(data) != size:
                raise changed_error(path, size, status.st_size, index=index)
            if status.st_mtime_ns > newest:
                raise overwritten_error(path, newest, status.st_mtime_ns)
            return data
        finally:
            os.close(descriptor)
