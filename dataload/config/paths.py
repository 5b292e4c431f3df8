"""Where the paths in a config file lie. Pure (no I/O)."""

from __future__ import annotations

import glob
import os
from typing import Any, cast

from dataload.errors import ConfigError
from dataload.registry import get_format

__all__ = ["PATH_KEYS", "anchor_paths"]

PATH_KEYS = ("path", "index")
"""Keys of the section ``source`` that hold paths."""


def anchor_paths(data: dict[str, Any], directory: str) -> dict[str, Any]:
    """`data` with the paths of its source relative to `directory` rather than to the working directory."""
    source = data.get("source")
    if not isinstance(source, dict) or not _takes_paths(cast("dict[str, Any]", source).get("format")):
        return data
    section = cast("dict[str, Any]", source)
    anchored = {name: _anchor(value, directory) if name in PATH_KEYS else value for name, value in section.items()}
    return {**data, "source": anchored}


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
