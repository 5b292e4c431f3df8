"""What of WebDataset does not map on random access, and what to use instead."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, cast, get_args

from dataload._util.indexing import expand_braces
from dataload.errors import ConfigError

__all__ = ["OnFailure", "archives", "on_failure", "refuse_arguments", "refuse_method"]

OnFailure: TypeAlias = Literal["raise", "skip"]

_BY_INDEX = "choose samples by their place, slice(start, stop, step), or use a dataload.Loader with a Subset"
_BY_MAP = "write it as a function of a sample, for map()"
_LOCAL = "the archives are local files, which need no cache"
_FIELDS = "choose components with to_tuple() and rename(), or dataload.open(..., fields=[...])"
_ENDLESS = "give shardshuffle=True and use repeat() or with_epoch(n), so that each sample comes equally often"

_METHODS = {
    **dict.fromkeys(("rsample", "select"), _BY_INDEX),
    **dict.fromkeys(("associate", "extract_keys", "info", "log_keys", "rename_keys", "xdecode"), _BY_MAP),
    **dict.fromkeys(("append", "compose", "stage"), "a stage of a stream has no place; " + _BY_MAP),
    **dict.fromkeys(("lmdb_cached", "mcached"), _LOCAL),
}
_ARGUMENTS = {
    **dict.fromkeys(("cache_dir", "cache_size", "url_to_name"), _LOCAL),
    **dict.fromkeys(("rename_files", "select_files"), _FIELDS),
    **dict.fromkeys(("nodesplitter", "workersplitter"), "leave it out, the loader deals samples to ranks and workers"),
    **dict.fromkeys(("mode", "repeat", "resampled"), _ENDLESS),
}

_NEEDLESS = ("detshuffle", "verbose")  # orders are always deterministic; nothing is printed


def refuse_method(name: str) -> None:
    """Raise a ConfigError that says what to use, if WebDataset has a method of that name."""
    if name in _METHODS:
        raise ConfigError(f"{name}() does not map on random access: {_METHODS[name]}", key=name)


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise a ConfigError that says what to use, unless all of these say what is so anyway."""
    for name, value in arguments.items():
        harmless = name in _NEEDLESS or (name in _ARGUMENTS and value in (None, False, -1))
        if not harmless:
            advice = _ARGUMENTS.get(name, "WebDataset has no such argument")
            raise ConfigError(f"WebDataset({name}=...): {advice}", key=name, value=value)


def on_failure(handler: Any) -> OnFailure:
    """What a handler means.

    Raises:
        ConfigError: It is none.
    """
    if handler not in get_args(OnFailure):
        raise ConfigError(
            "handler is one of this module's reraise_exception, warn_and_continue and ignore_and_continue, got "
            f"{handler!r}",
            key="handler",
            value=handler,
        )
    return cast("OnFailure", handler)


def archives(urls: Any) -> list[str]:
    """Paths of the archives.

    Raises:
        ConfigError: Something is no local archive; the message names it.
    """
    if isinstance(urls, Mapping):
        raise ConfigError("urls is a specification: give the archives, and join data sets with Mixture", key="urls")
    if isinstance(urls, (str, os.PathLike)):
        several = [name for url in os.fspath(urls).split("::") for name in expand_braces(url)]
    else:
        several = [os.fspath(url) for url in urls]
    return [_local(url) for url in several]


def _local(url: str) -> str:
    scheme = re.match(r"(\w[\w+.-]+):", url)
    if scheme is not None and scheme[1] != "file":
        raise ConfigError(f"{url}: {scheme[1]}: is a stream, and samples are read at random: copy it first", key="urls")
    if url == "-" or "${" in url or url.endswith(("/", ".yaml", ".yml", ".json")):
        raise ConfigError(
            f"{url}: urls are paths of tar archives; a directory, a specification, a variable or the standard input is "
            "none: list the archives, as glob.glob does",
            key="urls",
            value=url,
        )
    return url if scheme is None else url.partition(":")[2]
