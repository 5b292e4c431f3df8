"""Find the format and the files of a data set: ``"format:path"``, patterns, directories, suffixes, content."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from os import PathLike, fspath
from typing import Any

from dataload._util.indexing import expand_braces
from dataload.errors import ConfigError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.format import Format
from dataload.sources.head import describe_head
from dataload.sources.registry import added_formats, built_in_formats, by_suffix, get_format
from dataload.storage import Remote, is_url, join, local_path, storage_of

HEAD_BYTES = 512
"""Number of bytes at the start of a file from which its format is detected."""

_WILDCARDS = re.compile(r"[*?[]")
_PATTERN = re.compile(r"[*?[{]")


def split_format(paths: Any, name: str | None = None) -> tuple[Format | None, Any]:
    """Split ``"format:path"`` into the format, None if it is not named, and the rest; `name` gives the format apart.

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


def find_shards(paths: Any, name: str | None = None, remote: Remote | None = None) -> tuple[Format, list[str]]:
    """Return the format of a data set and its files in index order, without opening it.

    Args:
        paths: A path, ``"format:path"``, a pattern, a directory of shards, or a list of these.
        name: Name of a format that takes paths; by default suffix and content decide.
        remote: The settings of data at URLs.

    Raises:
        SourceNotFoundError: There is nothing there.
        UnsupportedFormatError: The content is not in a known format.
        ConfigError: There is no such format, or the files have different formats.
    """
    entry, rest = split_format(paths, name)
    files = [file for item in _as_list(rest) for file in _expand(item, entry, remote)]
    if not files:
        raise ConfigError("no path was given: the list is empty", key="paths", value=paths)
    return entry or _common_format(files, remote), files


def find_destination(path: str, name: str | None = None) -> tuple[Format, str]:
    """Return the format in which to write, and the path without its name.

    Args:
        path: Destination, or ``"format:path"``.
        name: Name of the format; by default the suffix decides.

    Raises:
        ConfigError: No format is named, there is no such format, or it is read-only.
    """
    entry, rest = split_format(path, name)
    rest = local_path(rest)
    entry = entry or by_suffix(rest)
    if entry is not None and entry.writer is not None:
        return entry, rest
    writable = ", ".join(known.name for known in _all_formats() if known.writer is not None)
    if entry is None:
        message = f"the suffix of {rest!r} does not name a format: pass format=, one of {writable}"
        raise ConfigError(message, key="format", value=rest)
    message = f"format {entry.name!r} is read-only; choose one that can be written: {writable}"
    raise ConfigError(message, key="format", value=entry.name)


def _all_formats() -> Iterable[Format]:
    return chain(built_in_formats(), added_formats())


def _as_list(paths: Any) -> list[str]:
    several = [paths] if isinstance(paths, (str, PathLike)) else list(paths)
    for path in several:
        if not isinstance(path, (str, PathLike)):
            raise TypeError(f"paths are text or path objects, got {path!r} ({type(path).__name__})")
    return [local_path(fspath(path)) for path in several]


def _expand(path: str, entry: Format | None, remote: Remote | None) -> list[str]:
    """Return all shards that a path or pattern names."""
    storage = storage_of(path, remote)
    # Nobody asks a store for an object whose name is a pattern: each question is a request.
    if not (is_url(path) and _PATTERN.search(path)) and storage.exists(path):
        return _shards_of_directory(path, entry, remote) if _is_directory_of_shards(path, entry, remote) else [path]
    if _is_selection(path, [entry] if entry else built_in_formats(), remote):
        return [path]  # x.array_record[2:4], which would otherwise be a pattern
    try:
        return _expand_pattern(path, remote)
    except SourceNotFoundError:
        if entry is None and _is_selection(path, added_formats(), remote):
            return [path]
        raise


def _is_selection(path: str, known: Iterable[Format], remote: Remote | None) -> bool:
    """Return whether one of the formats finds an existing file and a selection of its records in `path`."""
    return any((file := entry.file(path)) != path and storage_of(file, remote).exists(file) for entry in known)


def _expand_pattern(path: str, remote: Remote | None) -> list[str]:
    storage, far = storage_of(path, remote), is_url(path)
    names: list[str] = []
    for name in expand_braces(path):
        if _WILDCARDS.search(name) and (far or not storage.exists(name)):
            matches = storage.glob(name)
            if not matches:
                raise SourceNotFoundError(f"nothing matches the pattern {name}", path=name)
            names += matches
        elif far and name != path:
            names.append(name)  # found to be missing when it is opened, among others at the same time
        else:
            storage.identity(name)  # raises if there is nothing
            names.append(name)
    return names


def _is_directory_of_shards(path: str, entry: Format | None, remote: Remote | None) -> bool:
    if not storage_of(path, remote).is_directory(path) or _format_of_directory(path, remote) is not None:
        return False
    return entry is None or bool(entry.suffixes)  # without suffixes, the source decides what a directory is


def _format_of_directory(directory: str, remote: Remote | None) -> Format | None:
    """Return the format of a directory that is a single data set, or None."""
    return next((entry for entry in _all_formats() if entry.is_data_set(directory, remote)), None)


def _shards_of_directory(path: str, entry: Format | None, remote: Remote | None) -> list[str]:
    """Return the shards in a directory, sorted by name: the files with the suffix of a format."""
    known = [*_all_formats()]
    found = [
        join(path, name)
        for name in storage_of(path, remote).list(path)  # without hidden ones, such as a writer's temporary
        if (shard := by_suffix(name, known)) is not None and (entry is None or _family(shard) == _family(entry))
    ]
    if not found:
        wanted = f"of format {entry.name!r} " if entry is not None else ""
        raise SourceNotFoundError(f"the directory {path} contains no shard {wanted}by its suffix", path=path)
    return found


def _family(entry: Format) -> str:
    """Return the name of the general format, which shares suffixes and magic with its variants."""
    return entry.variant_of or entry.name


def _variants(entry: Format) -> list[Format]:
    return [other for other in built_in_formats() if other.variant_of == entry.name]


def _common_format(files: Sequence[str], remote: Remote | None) -> Format:
    # Looking for added formats takes long, so it is done once, and only if a built-in suffix does not decide.
    plain = all(by_suffix(file, built_in_formats()) for file in files)
    known = [*(built_in_formats() if plain else _all_formats())]
    found = {file: _format_of(file, known, remote) for file in files}
    names = sorted({entry.name for entry in found.values()})
    if len(names) > 1:
        examples = ", ".join(f"{next(f for f, e in found.items() if e.name == name)} ({name})" for name in names)
        raise ConfigError(
            f"the files of a data set have one format, got {examples}: open them separately and join them with "
            "ConcatSource",
            key="paths",
        )
    return found[files[0]]


def _format_of(path: str, known: Sequence[Format], remote: Remote | None) -> Format:
    path = next((file for entry in known if (file := entry.file(path)) != path), path)
    by_name = by_suffix(path, known)
    if by_name is not None and by_name.variant_of is None and not _variants(by_name):
        return by_name
    storage = storage_of(path, remote)
    holder = _format_of_directory(path, remote) if storage.is_directory(path) else None
    data = path if holder is None or holder.directory_file is None else join(path, holder.directory_file)
    with storage.open(data) as file:
        head = file.read(0, HEAD_BYTES)
    found = detect(head, known)
    if found is not None:
        return next((other for other in _variants(found) if other.is_variant and other.is_variant(data, remote)), found)
    if by_name is not None:
        return by_name  # its reader explains best what is wrong
    detected = ", ".join(sorted(entry.name for entry in known if entry.magic is not None))
    raise UnsupportedFormatError(
        f"{path} is not in a known format: {describe_head(head)}; {detected} are detected by their content (tokens in "
        ".npy files); for others pass format=, for raw tokens format='tokens'",
        path=path,
    )


def detect(head: bytes, known: Iterable[Format] | None = None) -> Format | None:
    """Return the first of the `known` formats, by default all, of a file that begins with `head`, or None."""
    return next((entry for entry in (_all_formats() if known is None else known) if entry.matches(head)), None)
