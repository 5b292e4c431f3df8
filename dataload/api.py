"""From what a user writes to objects: paths to sources and writers, configs to loaders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from dataload._util.settings import check_flags
from dataload.errors import ConfigError
from dataload.sources.base import Source
from dataload.sources.discover import discover

if TYPE_CHECKING:
    from dataload.loader.loader import Loader

Path: TypeAlias = "str | os.PathLike[str]"


def open_source(
    paths: Any,
    *,
    format: str | None = None,  # noqa: A002 - the word that users expect
    fields: Sequence[str] | None = None,
    check: bool = False,
    **options: Any,
) -> Source[Any]:
    """Open a data set.

    Args:
        paths: A path; ``"format:path"``; a pattern with ``*``, ``?``, ``[...]``, ``{000..127}`` or ``{a,b}``; a
            directory of shards; or a list of these, which are taken in that order. What a pattern or a directory
            matches is taken in order of name, unless the directory has a manifest, ``dataload.json``: that gives the
            shards in index order, the format, and options such as ``codec``.
        format: Name of the format, such as ``"tar"``; by default the end of the name decides, then the content.
        fields: Names of the fields to read; None means all.
        check: Open every shard now. Otherwise a shard that a manifest describes is opened when it is first read, except
            for the first: damage that leaves its name and its size as they were is found then.
        options: Options of the format, see its source class: ``codec=``, ``decode=``, ``shapes=``, ...

    Returns:
        A source: a sequence of records with `read` and `read_batch`.

    Raises:
        SourceNotFoundError: A path does not exist.
        UnsupportedFormatError: The content is in no known format.
        CorruptFileError: A file contradicts its format.
        ConfigError: An option or a field is unknown.
        MissingDependencyError: The format needs a package that is not installed.

    Examples:
        >>> source = dataload.open("train-{000..127}.tar", decode="auto")  # doctest: +SKIP
        >>> source[0]  # doctest: +SKIP
    """
    check_flags(check=check)
    if hasattr(paths, "columns") or isinstance(paths, Mapping):
        kind = type(cast("Any", paths)).__name__
        raise TypeError(f"open takes paths, got a {kind}: pass it to a Loader as it is, or to dataload.MemorySource")
    if isinstance(paths, (set, frozenset)):
        raise TypeError("a set of paths has another order in each process, and so would the records: pass a list")
    return discover(paths, format, options).open(fields, options, check=check)


def from_config(config: Path | Mapping[str, Any], *, overrides: Sequence[str] = ()) -> Loader[Any] | Any:
    """Build a loader from a config.

    Args:
        config: A ``.toml``, ``.yaml``, ``.yml`` or ``.json`` file, or a dict of the same structure. Paths in a file
            are relative to it, those in a dict and in `overrides` to the working directory.
        overrides: ``"key=value"`` with a dotted key, applied in turn: ``"loader.batch_size=64"``,
            ``"source.fields=[features, label]"``. A value is parsed as JSON or TOML if possible, and is text
            otherwise; ``null`` removes a setting.

    Returns:
        A `Loader`, or a `MultiStreamLoader` if ``sampler.kind`` is ``"iterators"``: to type checkers, ``Any``, too.

    Raises:
        ConfigError: All unknown keys and values out of range, each with what is allowed; or the first setting that
            contradicts another or does not fit the data.
        SourceError: The data cannot be opened: see `open_source`.
        MissingDependencyError: pydantic is not installed, or PyYAML for a YAML file.
    """
    from dataload.config import read_config  # pydantic takes 60 ms to import, and only configs need it

    return read_config(config, overrides).build(open_source)


def record_loader(config: Path | Mapping[str, Any], *, overrides: Sequence[str] = ()) -> Loader[Any]:
    """Build a loader for a tool that needs its source and order, which a `MultiStreamLoader` does not have."""
    from dataload.loader.loader import Loader

    loader = from_config(config, overrides=overrides)
    if not isinstance(loader, Loader):
        loader.close()
        message = "sampler.kind is 'iterators': streams have no order of records to look at"
        raise ConfigError(message, key="sampler.kind", value="iterators")
    return loader
