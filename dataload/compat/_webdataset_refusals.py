"""The parts of WebDataset that need a sequential stream, and what to use instead."""

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from dataload._util.indexing import expand_braces
from dataload.errors import ConfigError

OnFailure: TypeAlias = Literal["raise", "skip"]

_BY_INDEX = "choose samples by position with slice(start, stop, step), or use a dataload.Loader with a Subset"
_BY_MAP = "write it as a function of a sample, for map()"
_LOCAL = "the archives are local files, which need no cache"
_FIELDS = "choose components with to_tuple() and rename(), or dataload.open(..., fields=[...])"
_ENDLESS = "pass shardshuffle=True and use repeat() or with_epoch(n), so that each sample comes equally often"

_METHODS = {
    **dict.fromkeys(("rsample", "select"), _BY_INDEX),
    **dict.fromkeys(("associate", "extract_keys", "info", "log_keys", "rename_keys", "xdecode"), _BY_MAP),
    **dict.fromkeys(("append", "compose", "stage"), "there is no stream to attach a stage to; " + _BY_MAP),
    **dict.fromkeys(("lmdb_cached", "mcached"), _LOCAL),
}
_ARGUMENTS = {
    **dict.fromkeys(("cache_dir", "cache_size", "url_to_name"), _LOCAL),
    **dict.fromkeys(("rename_files", "select_files"), _FIELDS),
    **dict.fromkeys(("nodesplitter", "workersplitter"), "omit it; the loader divides samples among ranks and workers"),
    **dict.fromkeys(("mode", "repeat", "resampled"), _ENDLESS),
}

_IGNORED = ("detshuffle", "verbose")  # orders are always deterministic; nothing is printed


def refuse_method(name: str) -> None:
    """Raise a ConfigError that names an alternative if WebDataset has a method `name`."""
    if name in _METHODS:
        raise ConfigError(f"{name}() does not work with random access: {_METHODS[name]}", key=name)


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise a ConfigError that names an alternative, unless all arguments are ignored or have harmless values."""
    for name, value in arguments.items():
        harmless = name in _IGNORED or (name in _ARGUMENTS and value in (None, False, -1))
        if not harmless:
            advice = _ARGUMENTS.get(name, "WebDataset has no such argument")
            raise ConfigError(f"WebDataset({name}=...): {advice}", key=name, value=value)


def check_handler(handler: Any) -> None:
    """Raise a ConfigError unless `handler` is one of the handlers of `dataload.compat.webdataset`."""
    if handler not in get_args(OnFailure):
        raise ConfigError(
            "handler must be reraise_exception, warn_and_continue or ignore_and_continue of "
            f"dataload.compat.webdataset, got {handler!r}",
            key="handler",
            value=handler,
        )


def archives(urls: Any) -> list[str]:
    """Return the paths of the archives, or raise a ConfigError if a URL is not a local archive."""
    if isinstance(urls, Mapping):
        raise ConfigError("urls is a specification: list the archives, and join datasets with Mixture", key="urls")
    if isinstance(urls, (str, os.PathLike)):
        urls = [name for url in os.fspath(urls).split("::") for name in expand_braces(url)]
    return [_local(os.fspath(url)) for url in urls]


def _local(url: str) -> str:
    scheme = re.match(r"(\w[\w+.-]+):", url)
    if scheme is not None and scheme[1] != "file":
        raise ConfigError(
            f"{url}: {scheme[1]}: is a stream, but samples are read in random order: copy it to a file", key="urls"
        )
    if url == "-" or "${" in url or url.endswith(("/", ".yaml", ".yml", ".json")):
        raise ConfigError(
            f"{url}: urls must be paths of tar archives, not a directory, a specification, a variable or standard "
            "input: list the archives, for example with glob.glob",
            key="urls",
            value=url,
        )
    return url if scheme is None else url.partition(":")[2]
