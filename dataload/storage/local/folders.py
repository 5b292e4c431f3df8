"""Folders of many small files: listing them, and reading many at once."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TypeAlias

from dataload.errors import SourceError
from dataload.storage.errors import changed_error, file_errors
from dataload.storage.local.regular import open_regular

Listing: TypeAlias = dict[str, dict[str, int]]
"""Folder, relative and ``""`` for the root, -> name of a file -> its size in bytes."""

_MOST_THREADS = 16
_PROBED = 4  # files from whose time it is known whether others wait for a disk or a server
_SLOW_SECONDS = 0.001  # for each file; faster ones are in memory, where threads gain nothing


def list_folder(root: str, wanted: Callable[[str], object] = lambda _: True) -> Listing:
    """Return all folders below `root`, and in each the files whose relative path is `wanted`.

    Links are followed. What is hidden (its name begins with a dot) is left out.

    Raises:
        SourceNotFoundError: There is no such folder, or a link points to nothing.
        SourceError: A folder cannot be read, or contains a link to a folder above it.
    """
    found: Listing = {}
    todo: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())]
    while todo:
        folder, above = todo.pop()
        path = os.path.join(root, folder) if folder else root
        with file_errors(path):
            status = os.stat(path)
            here = status.st_dev, status.st_ino
            if here in above:
                message = f"{path} is a link to a folder above it, so its files would have no end: remove the link"
                raise SourceError(message, path=path)
            with os.scandir(path) as entries:
                found[folder], folders = _list_entries(entries, f"{folder}/" if folder else "", wanted)
            todo += ((inner, (*above, here)) for inner in folders)
    return found


def _list_entries(
    entries: Iterable[os.DirEntry[str]], prefix: str, wanted: Callable[[str], object]
) -> tuple[dict[str, int], list[str]]:
    """Return the sizes of the files among the entries of a folder by name, and the relative paths of its folders."""
    files: dict[str, int] = {}
    folders: list[str] = []
    for entry in entries:
        name = entry.name
        if name[0] == ".":
            continue
        if entry.is_dir():
            folders.append(prefix + name)
        elif wanted(prefix + name):
            try:
                files[name] = entry.stat().st_size
            except OSError:
                with file_errors(entry.path):
                    raise
    return files, folders


def read_files(paths: Sequence[str], sizes: Sequence[int], indices: Sequence[int]) -> list[bytes]:
    """Return the content of files, which must have these sizes; `indices` are those of their records, for messages.

    Slow files, on a disk or a server, are read in threads.

    Raises:
        SourceNotFoundError: A file does not exist any more.
        SourceError: A file cannot be read, or is not a regular one.
        CorruptFileError: A file has another size.
    """
    begun = perf_counter()
    first = [*map(_read_file, paths[:_PROBED], sizes[:_PROBED], indices[:_PROBED])]
    others = paths[_PROBED:], sizes[_PROBED:], indices[_PROBED:]
    if not others[0] or perf_counter() - begun < _SLOW_SECONDS * _PROBED:
        return [*first, *map(_read_file, *others)]
    with ThreadPoolExecutor(min(_MOST_THREADS, len(others[0]))) as pool:
        return [*first, *pool.map(_read_file, *others)]


def _read_file(path: str, size: int, index: int) -> bytes:
    with file_errors(path):
        descriptor = open_regular(path)
        try:
            data = os.read(descriptor, size + 1)
            while 0 < len(data) < size and (more := os.read(descriptor, size + 1 - len(data))):
                data += more
            if len(data) != size:
                raise changed_error(path, size, os.fstat(descriptor).st_size, index=index)
            return data
        finally:
            os.close(descriptor)
