"""From what a user writes to a format and its files: ``"format:path"``, patterns, directories, suffixes, content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from os import PathLike, fspath
from typing import Any

from dataload._util.indexing import expand_braces
from dataload.errors import ConfigError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.format import Format
from dataload.sources.head import describe_head
from dataload.sources.registry import (
    added_formats,
    built_in_formats,
    by_suffix,
    format_names,
    get_format,
    writable_names,
)
from dataload.storage import join, storage_of

__all__ = ["HEAD_BYTES", "detect", "find_destination", "find_shards", "split_format", "split_prefix"]

HEAD_BYTES = 512
"""Bytes from the start of a file that tell its format."""

_MAGIC_OF_PATTERNS = re.compile(r"[*?[]")


def split_format(paths: Any, name: str | None = None) -> tuple[Format | None, Any]:
    """Take the format off the paths, where one is named.

    Args:
        paths: A path, which may begin with the name of a format and a colon, or anything else.
        name: Name of the format, if it is given apart.

    Returns:
        The format or None, and the paths without it.

    Raises:
        ConfigError: There is no format of that name.
    """
    if name is not None:
        return get_format(name), paths
    if not isinstance(paths, str):
        return None, paths
    prefix, rest = split_prefix(paths)
    # A path that exists may have a colon too.
    return (None, paths) if prefix is None or storage_of(paths).exists(paths) else (get_format(prefix), rest)


def split_prefix(path: str) -> tuple[str | None, str]:
    """Split ``"format:path"``; a path without a format, a URL and a path with a drive letter stay whole."""
    prefix, colon, rest = path.partition(":")
    is_name = colon and len(prefix) > 1 and prefix.isidentifier() and not rest.startswith("//")
    return (prefix, rest) if is_name else (None, path)


def find_shards(paths: Any, name: str | None = None) -> tuple[Format, list[str]]:
    """Return the format of a data set and its files in index order, without opening it.

    Args:
        paths: A path, ``"format:path"``, a pattern, a directory of shards, or a list of these.
        name: Name of the format, one that takes paths; by default suffix and content decide.

    Raises:
        SourceNotFoundError: There is nothing there.
        UnsupportedFormatError: The content is in no known format.
        ConfigError: There is no such format, or the files are in several.
    """
    entry, rest = split_format(paths, name)
    files = [file for item in _as_list(rest) for file in _expand(item, entry)]
    if not files:
        raise ConfigError("no path was given: the list is empty", key="paths", value=paths)
    return entry or _common_format(files), files


def find_destination(path: str, name: str | None = None) -> tuple[Format, str]:
    """Return the format to write, and the path without its name.

    Args:
        path: Destination, or ``"format:path"``.
        name: Name of the format; by default the end of the path decides.

    Raises:
        ConfigError: No format is named, there is none of that name, or it cannot be written.
    """
    entry, rest = split_format(path, name)
    entry = entry or by_suffix(rest)
    if entry is None:
        raise ConfigError(
            f"the end of {rest!r} names no format: pass format=, one of {', '.join(format_names())}",
            key="format",
            value=rest,
        )
    if not entry.can_write:
        raise ConfigError(
            f"format {entry.name!r} is only read; choose one that can be written: {', '.join(writable_names())}",
            key="format",
            value=entry.name,
        )
    return entry, rest


def _as_list(paths: Any) -> list[str]:
    several = [paths] if isinstance(paths, (str, PathLike)) else list(paths)
    for path in several:
        if not isinstance(path, (str, PathLike)):
            raise TypeError(f"paths are text or path objects, got {path!r} ({type(path).__name__})")
    return [fspath(path) for path in several]


def _expand(path: str, entry: Format | None) -> list[str]:
    """Return all shards that one path or pattern stands for."""
    storage = storage_of(path)
    if storage.exists(path):
        return _shards_of_directory(path, entry) if _is_directory_of_shards(path, entry) else [path]
    if any(storage.exists(known.file(path)) for known in ([entry] if entry else built_in_formats())):
        return [path]  # x.array_record[2:4], which would be a pattern otherwise
    names: list[str] = []
    for name in expand_braces(path):
        if not storage.exists(name) and _MAGIC_OF_PATTERNS.search(name):
            matches = storage.glob(name)
            if not matches:
                raise SourceNotFoundError(f"nothing matches the pattern {name}", path=name)
            names += matches
        else:
            storage.identity(name)  # raises where there is nothing
            names.append(name)
    return names


def _is_directory_of_shards(path: str, entry: Format | None) -> bool:
    if not storage_of(path).is_directory(path) or _holder(path) is not None:
        return False
    return entry is None or bool(entry.suffixes)  # else it is for the plug-in to say what a directory is


def _holder(directory: str) -> Format | None:
    """Return the format of which a directory is one data set."""
    known = chain(built_in_formats(), added_formats())
    return next((entry for entry in known if entry.is_data_set(directory)), None)


def _shards_of_directory(path: str, entry: Format | None) -> list[str]:
    """Return the shards in a directory, in order of name: the files whose suffix means a format."""
    known = [*built_in_formats(), *added_formats()]
    found = [
        join(path, name)
        for name in storage_of(path).list(path)  # without hidden ones, such as a writer's temporary
        if (shard := by_suffix(name, known)) is not None and (entry is None or _family(shard) == _family(entry))
    ]
    if not found:
        wanted = f"of format {entry.name!r} " if entry is not None else ""
        raise SourceNotFoundError(f"the directory {path} holds no shard {wanted}by its suffix", path=path)
    return found


def _family(entry: Format) -> str:
    """Return the name that formats share which differ neither in suffix nor in the head of a file."""
    return entry.refined or entry.name


def _refinements(entry: Format) -> list[Format]:
    return [other for other in built_in_formats() if other.refined == entry.name]


def _common_format(files: Sequence[str]) -> Format:
    found = {file: _format_of(file) for file in files}
    names = sorted({entry.name for entry in found.values()})
    if len(names) > 1:
        examples = ", ".join(f"{next(f for f, e in found.items() if e.name == name)} ({name})" for name in names)
        raise ConfigError(
            f"one data set has one format, got {examples}: open them apart and join them with ConcatSource",
            key="paths",
        )
    return found[files[0]]


def _format_of(path: str) -> Format:
    path = next((file for entry in built_in_formats() if (file := entry.file(path)) != path), path)
    by_name = by_suffix(path)
    if by_name is not None and by_name.refined is None and not _refinements(by_name):
        return by_name
    storage = storage_of(path)
    holder = _holder(path) if storage.is_directory(path) else None
    data = path if holder is None or holder.directory_file is None else join(path, holder.directory_file)
    with storage.open(data) as file:
        head = file.read(0, HEAD_BYTES)
    found = detect(head)
    if found is not None:
        return next((other for other in _refinements(found) if other.refines and other.refines(data)), found)
    if by_name is not None:
        return by_name  # its reader says best what is wrong
    known = ", ".join(sorted(entry.name for entry in built_in_formats() if entry.matches))
    raise UnsupportedFormatError(
        f"{path} is in no known format: {describe_head(head)}; known by their content are {known} (as .npy files); for "
        "others pass format=, for raw tokens format='tokens'",
        path=path,
    )


def detect(head: bytes) -> Format | None:
    """Return the format of a file that begins with `head`, up to `HEAD_BYTES` bytes, or None."""
    known = chain(built_in_formats(), added_formats())
    return next((entry for entry in known if entry.matches is not None and entry.matches(head)), None)
