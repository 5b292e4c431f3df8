"""From a config file, or a user's dict, to plain tables."""

import glob
import json
import operator
import os
import re
import tomllib
from collections.abc import Mapping
from types import NoneType
from typing import Any, cast

from dataload._util.optional import load_optional
from dataload.config.problems import shorten
from dataload.config.references import REFERENCE_PATTERN
from dataload.errors import ConfigError
from dataload.sources.find import split_prefix
from dataload.sources.registry import get_format
from dataload.storage import is_url

_SUFFIXES = (".toml", ".yaml", ".yml", ".json")


def read_file(path: str) -> dict[str, Any]:
    """Read the table that a TOML, YAML or JSON file holds.

    Raises:
        ConfigError: The file does not exist, has another suffix, does not parse, or does not hold a table.
        MissingDependencyError: The file is YAML, and PyYAML is not installed.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in _SUFFIXES:
        message = f"{path}: the name of a config ends in {', '.join(_SUFFIXES)}, not {suffix!r}"
        raise ConfigError(message, key="config", value=path)
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text ({error.reason})"
        raise ConfigError(f"cannot read the config {path}: {reason}", key="config", value=path) from error
    try:
        if suffix == ".json":
            table = json.loads(text)
        else:
            table = tomllib.loads(text) if suffix == ".toml" else _parse_yaml(text, path)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        message = f"{path} is not valid {suffix[1:].upper()}: {error}"
        raise ConfigError(message, key="config", value=path) from error
    if not isinstance(table, (dict, NoneType)):
        message = f"{path}: a config is a table of sections, got {shorten(table)}"
        raise ConfigError(message, key="config", value=path)
    return table or {}  # None for an empty YAML file


def _parse_yaml(text: str, path: str) -> Any:
    yaml = load_optional("yaml", needed_by=f"the config {path}", extra="config", package="pyyaml")

    class Loader(yaml.SafeLoader):
        """The safe loader; it also refuses duplicate keys, of which PyYAML keeps the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"]
            for key in keys:
                if keys.count(key) > 1:
                    line = node.start_mark.line + 1
                    raise ConfigError(f"{path}: the table at line {line} has two keys {key!r}", key=key)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {reason}", key="config", value=path) from error


def plain_table(table: Mapping[Any, Any], origin: str) -> dict[str, Any]:
    """Copy a table, with path objects as text, tuples as lists and NumPy integers as integers.

    Raises:
        ConfigError: A key is not text.
    """
    for key in table:
        if not isinstance(key, str):
            message = f"{origin}: keys are text, got {key!r} ({type(key).__name__}): put it in quotes"
            raise ConfigError(message, value=key)
    return {key: _plain(value, f"{origin}: {key}") for key, value in table.items()}


def _plain(value: Any, origin: str) -> Any:
    if isinstance(value, Mapping):
        return plain_table(cast("Mapping[Any, Any]", value), origin)
    if isinstance(value, (list, tuple)):
        return [_plain(item, origin) for item in cast("list[Any]", value)]
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if not isinstance(value, (bool, int)) and hasattr(value, "__index__"):
        return operator.index(value)
    return value


_PATHS = {
    "source": ("path", "index", "documents"),
    "sampler": ("indices", "weights", "lengths", "sequences"),
    "loader": ("exclude",),
    "remote": ("cache",),
}
_NESTED = ("parent", "sampler", "samplers")


def anchor_paths(data: dict[str, Any], directory: str) -> dict[str, Any]:
    """Return `data` with its paths relative to `directory` instead of the working directory."""
    return {name: _anchor_table(value, name, directory) for name, value in data.items()}


def _anchor_table(table: Any, section: str, directory: str) -> Any:
    if isinstance(table, list):
        return [_anchor_table(item, section, directory) for item in cast("list[Any]", table)]
    if not isinstance(table, dict) or not _takes_paths(table.get("format")):
        return table
    anchored = dict(cast("dict[str, Any]", table))
    for name, value in anchored.items():
        if name in _PATHS.get(section, ()):
            anchored[name] = _anchor_source(value, directory) if section == "source" else _anchor(value, directory)
        elif name in _NESTED:
            anchored[name] = _anchor_table(value, section, directory)
    return anchored


def _anchor(value: Any, directory: str) -> Any:
    if not isinstance(value, str) or is_url(value) or re.match(REFERENCE_PATTERN, value):
        return value  # an array, or a function
    return os.path.join(directory, os.path.expanduser(value))


def _anchor_source(value: Any, directory: str) -> Any:
    if isinstance(value, list):
        return [_anchor_source(item, directory) for item in cast("list[Any]", value)]
    if not isinstance(value, str) or not value:
        return value
    prefix, rest = split_prefix(value)
    if prefix is not None:
        return f"{prefix}:{_anchor_source(rest, directory)}" if _takes_paths(prefix) else value
    if is_url(value):
        return value
    path = os.path.expanduser(value)
    # The directory is meant literally, even if its name has the characters of a pattern.
    pattern = glob.has_magic(path) and not os.path.isabs(path)
    return os.path.join(glob.escape(directory) if pattern else directory, path)


def _takes_paths(name: Any) -> bool:
    try:
        return not isinstance(name, str) or get_format(name).takes_paths
    except ConfigError:
        return True  # reported later, together with everything else that is wrong
