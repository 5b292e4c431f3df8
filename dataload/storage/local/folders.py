"""Folders of many small files: listing them, and reading many at once."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import TypeAlias

from dataload._util.threads import DaemonThreads
from dataload.errors import SourceError
from dataload.storage.errors import changed_error, file_errors, overwritten_error
from dataload.storage.local.record_files import open_regular

Listing: TypeAlias = dict[str, dict[str, int]]
"""Folder, relative and ``""`` for the root, -> name of a file -> its size in bytes."""

_MOST_THREADS = 16
_PROBED = 4  # files whose time tells whether reading waits for a disk or a server
_SLOW_SECONDS = 0.001  # for each file; faster ones are in memory, where threads gain nothing


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
                message = (
                    f"{path} is a link to a folder above it, which makes the list of files endless: remove the link"
                )
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
        if entry.is_dir():
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
