"""Where the paths in a config file lie. Pure (no I/O)."""

from __future__ import annotations

import glob
import os
from typing import Any, cast

from dataload.errors import ConfigError
from dataload.sources.registry import get_format

__all__ = ["ARRAY_KEYS", "PATH_KEYS", "anchor_paths"]

PATH_KEYS = ("path", "index", "documents")
"""Keys of the section ``source`` that hold paths of data."""

ARRAY_KEYS = ("indices", "weights", "lengths")
"""Keys of the section ``sampler``, and of the tables in it, that may hold the path of an array."""


def anchor_paths(data: dict[str, Any], directory: str) -> dict[str, Any]:
    """`data` with the paths in it relative to `directory` rather than to the working directory."""
    anchored = dict(data)
    if "source" in data:
        anchored["source"] = _anchor_source(data["source"], directory)
    if "sampler" in data:
        anchored["sampler"] = _anchor_arrays(data["sampler"], directory)
    loader = data.get("loader")
    if isinstance(loader, dict) and isinstance(cast("dict[str, Any]", loader).get("exclude"), str):
        anchored["loader"] = {**loader, "exclude": os.path.join(directory, os.path.expanduser(loader["exclude"]))}
    return anchored


def _anchor_source(source: Any, directory: str) -> Any:
    if isinstance(source, list):
        return [_anchor_source(section, directory) for section in cast("list[Any]", source)]
    if not isinstance(source, dict) or not _takes_paths(cast("dict[str, Any]", source).get("format")):
        return source
    section = cast("dict[str, Any]", source)
    return {name: _anchor(value, directory) if name in PATH_KEYS else value for name, value in section.items()}


def _anchor_arrays(value: Any, directory: str) -> Any:
    if isinstance(value, list):
        return [_anchor_arrays(item, directory) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    return {
        name: os.path.join(directory, os.path.expanduser(inner))
        if name in ARRAY_KEYS and isinstance(inner, str)
        else _anchor_arrays(inner, directory)
        for name, inner in cast("dict[str, Any]", value).items()
    }


def _anchor(value: Any, directory: str) -> Any:
    if isinstance(value, list):
        return [_anchor(item, directory) for item in cast("list[Any]", value)]
    if not isinstance(value, str) or not value:
        return value
    prefix, colon, rest = value.partition(":")
    if colon and prefix.isidentifier() and len(prefix) > 1:
        if rest.startswith("//") or not _takes_paths(prefix):
            return value  # a URL, or range:100
        return f"{prefix}:{_join(directory, rest)}"
    return _join(directory, value)


def _join(directory: str, path: str) -> str:
    path = os.path.expanduser(path)
    if os.path.isabs(path):
        return path
    # The directory is meant as it is, though its name may have the characters of a pattern.
    return os.path.join(glob.escape(directory) if glob.has_magic(path) else directory, path)


def _takes_paths(name: Any) -> bool:
    try:
        return not isinstance(name, str) or get_format(name).takes_paths
    except ConfigError:
        return True  # said later, together with everything else that is wrong
