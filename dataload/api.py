"""From what a user writes to objects: paths to sources and writers, configs to loaders."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from dataload._util.indexing import expand_braces
from dataload.errors import ConfigError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.array_record.layout import parse_selection
from dataload.sources.base import Source
from dataload.sources.detect import HEAD_SIZE, describe_head, detect
from dataload.sources.registry import Format, by_suffix, construct, format_names, get_format
from dataload.sources.writer import Writer
from dataload.storage.errors import file_errors

if TYPE_CHECKING:
    from dataload.loader.loader import Loader
    from dataload.streams import MultiStreamLoader

__all__ = ["create", "find_shards", "from_config", "open_source", "record_loader"]

Path: TypeAlias = "str | os.PathLike[str]"

_LMDB_FILE = "data.mdb"


def open_source(
    paths: Any,
    *,
    format: str | None = None,  # noqa: A002 - the word that users expect
    fields: Sequence[str] | None = None,
    **options: Any,
) -> Source[Any]:
    """Open a data set.

    Args:
        paths: A path; ``"format:path"``; a pattern with ``*``, ``?``, ``[...]``, ``{000..127}`` or ``{a,b}``; a
            directory of shards; or a list of these, which are taken in that order. What a pattern or a directory
            matches is taken in order of name.
        format: Name of the format, such as ``"tar"``; by default the end of the name decides, then the content.
        fields: Names of the fields to read; None means all.
        options: Options of the format, see its source class: ``codec=``, ``decode=``, ``shapes=``, ...

    Returns:
        A source: a sequence of records with `read` and `read_batch`.

    Raises:
        SourceNotFoundError: There is nothing there.
        UnsupportedFormatError: The content is in no known format.
        CorruptFileError: A file contradicts its format.
        ConfigError: An option or a field is unknown.
        MissingDependencyError: The format needs a package that is not installed.

    Example:
        >>> source = dataload.open("train-{000..127}.tar", decode="auto")  # doctest: +SKIP
        >>> source[0]  # doctest: +SKIP
    """
    entry, rest = _named_format(paths, format)
    if fields is not None:
        options["fields"] = fields
    if entry is not None and not entry.takes_paths:
        return construct(entry, "source", _single_argument(entry, rest), options)
    entry, names = find_shards(paths, format=format)
    source: Source[Any] = construct(entry, "source", names, options)
    len(source)  # opens the files, so that what is wrong with them is said here and not at the first batch
    return source


def find_shards(
    paths: Any,
    *,
    format: str | None = None,  # noqa: A002 - the word that users expect
) -> tuple[Format, list[str]]:
    """The format of a data set and its files in index order, without opening it.

    Args:
        paths: As in `open_source`.
        format: As in `open_source`; one that takes paths.

    Raises:
        SourceNotFoundError: There is nothing there.
        UnsupportedFormatError: The content is in no known format.
        ConfigError: There is no such format, or the files are of several.
    """
    entry, rest = _named_format(paths, format)
    names = [name for item in _as_list(rest) for name in _expand(item, entry)]
    if not names:
        raise ConfigError("no path was given: the list is empty", key="paths", value=paths)
    return entry or get_format(_common_format(names)), names


def create(
    path: Path,
    *,
    format: str | None = None,  # noqa: A002 - the word that users expect
    overwrite: bool = False,
    **options: Any,
) -> Writer:
    """Write a data set: ``with dataload.create("out.syr") as writer: writer.write(record)``.

    Nothing shows at `path` before the writer is closed without an error.

    Args:
        path: Destination, or ``"format:path"``.
        format: By default the end of the name decides.
        overwrite: Replace what is there.
        options: Options of the format, see its writer class.

    Raises:
        ConfigError: The destination exists, or format or option are unknown.
    """
    entry, name = _named_format(os.fspath(path), format)
    entry = entry or by_suffix(name)
    if entry is None:
        raise ConfigError(
            f"the end of {name!r} names no format: pass format=, one of {', '.join(format_names())}",
            key="format",
        )
    return construct(entry, "writer", name, {"overwrite": overwrite, **options})


def from_config(config: Path | Mapping[str, Any], *, overrides: Sequence[str] = ()) -> Loader[Any] | MultiStreamLoader:
    """Build a loader from a config.

    Args:
        config: A TOML or YAML file, or a dict of the same structure.
        overrides: Settings that replace those of the file: ``"loader.batch_size=64"``.

    Returns:
        A `Loader`, or a `MultiStreamLoader` if ``sampler.kind`` is ``"iterators"``.

    Raises:
        ConfigError: All that is wrong with the settings, each with its key, value and what is allowed; or the one that
            does not fit the data.
        SourceError: The data cannot be opened: see `open_source`.
        MissingDependencyError: pydantic is not installed.
    """
    from dataload.config import read_config  # pydantic takes 60 ms to import, and only configs need it

    return read_config(config, overrides).build(open_source)


def record_loader(config: Path | Mapping[str, Any], *, overrides: Sequence[str] = ()) -> Loader[Any]:
    """Build a loader from a config for a tool that needs its source and order.

    Args:
        config: As in `from_config`.
        overrides: As in `from_config`.

    Raises:
        ConfigError: As `from_config`; or the config is of a `MultiStreamLoader`, which has neither.
    """
    from dataload.loader.loader import Loader

    loader = from_config(config, overrides=overrides)
    if not isinstance(loader, Loader):
        loader.close()
        raise ConfigError(
            "sampler.kind is 'iterators': streams have no order of records to look at",
            key="sampler.kind",
            value="iterators",
        )
    return loader


def _named_format(paths: Any, name: str | None) -> tuple[Format | None, Any]:
    """The format that is named apart or before a colon, and the paths without it."""
    if name is not None:
        return get_format(name), paths
    if not isinstance(paths, str):
        return None, paths
    prefix, colon, rest = paths.partition(":")
    # A path that exists, a URL or a drive letter has a colon, too.
    if not colon or len(prefix) == 1 or not prefix.isidentifier() or rest.startswith("//") or os.path.exists(paths):
        return None, paths
    return get_format(prefix), rest


def _as_list(paths: Any) -> list[str]:
    several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    for path in several:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"paths are text or path objects, got {path!r} ({type(path).__name__})")
    return [os.fspath(path) for path in several]


def _expand(path: str, entry: Format | None) -> list[str]:
    """All shards that one path or pattern stands for."""
    if os.path.exists(path):
        return _shards_of_directory(path, entry) if _is_directory_of_shards(path, entry) else [path]
    if os.path.exists(parse_selection(path).path):  # x.array_record[2:4], which would be a pattern otherwise
        return [path]
    names: list[str] = []
    for name in expand_braces(path):
        if not os.path.exists(name) and glob.has_magic(name):
            matches = sorted(glob.glob(name))
            if not matches:
                raise SourceNotFoundError(f"nothing matches the pattern {name}", path=name)
            names += matches
        else:
            with file_errors(name):
                os.stat(name)
            names.append(name)
    return names


def _is_directory_of_shards(path: str, entry: Format | None) -> bool:
    if not os.path.isdir(path) or os.path.exists(os.path.join(path, _LMDB_FILE)):
        return False
    return entry is None or bool(entry.suffixes)  # else it is for the plug-in to say what a directory is


def _shards_of_directory(path: str, entry: Format | None) -> list[str]:
    """The shards in a directory, in order of name: whatever has the suffix of a format."""
    found = [
        os.path.join(path, name)
        for name in sorted(os.listdir(path))
        if not name.startswith(".")  # hidden: a writer's temporary, or nothing of ours
        and (shard := by_suffix(name)) is not None
        and (entry is None or shard.name == entry.name or {shard.name, entry.name} == {"lmdb", "torchrecord"})
    ]
    if not found:
        wanted = f"of format {entry.name!r} " if entry is not None else ""
        raise SourceNotFoundError(f"the directory {path} holds no shard {wanted}by its suffix", path=path)
    return found


def _common_format(names: Sequence[str]) -> str:
    formats = {name: _format_of(name) for name in names}
    kinds = set(formats.values())
    if len(kinds) > 1:
        examples = ", ".join(f"{next(n for n, k in formats.items() if k == kind)} ({kind})" for kind in sorted(kinds))
        raise ConfigError(
            f"one data set has one format, got {examples}: open them apart and join them with ConcatSource",
            key="paths",
        )
    return kinds.pop()


def _format_of(path: str) -> str:
    path = parse_selection(path).path
    entry = by_suffix(path)
    if entry is not None and entry.name not in ("lmdb", "torchrecord"):
        return entry.name
    data = os.path.join(path, _LMDB_FILE) if os.path.isdir(path) else path
    with file_errors(data), open(data, "rb") as stream:
        head = stream.read(HEAD_SIZE)
    name = detect(head)
    if name == "lmdb":
        from dataload.sources.lmdb.file import is_torchrecord

        return "torchrecord" if is_torchrecord(data) else "lmdb"
    if name is None and entry is not None:
        return entry.name  # its reader says best what is wrong
    if name is None:
        raise UnsupportedFormatError(
            f"{path} is in no known format: {describe_head(head)}; understood are Syrah (b'GS'), ArrayRecord, LMDB, "
            "tar and .npy files of tokens; for other formats pass format=, for raw tokens format='tokens'",
            path=path,
        )
    return name


def _single_argument(entry: Format, value: Any) -> Any:
    if entry.name != "range":
        if isinstance(value, str):
            raise ConfigError(
                f"format {entry.name!r} takes data, not a path: pass records or columns",
                key="paths",
                value=value,
            )
        return value
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"format 'range' takes the number of records (range:1000), got {value!r}",
            key="paths",
            value=value,
        ) from None
