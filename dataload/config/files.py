"""Config files: TOML, YAML, JSON."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from typing import Any

from dataload._util.optional import load_optional
from dataload.config.plain import shorten
from dataload.errors import ConfigError

__all__ = ["read_file"]


def read_file(path: str) -> dict[str, Any]:
    """The table that a config file holds.

    Raises:
        ConfigError: There is no such file, its name ends otherwise, it does not parse, or holds no table.
        MissingDependencyError: It is YAML, and PyYAML is not installed.
    """
    suffix = os.path.splitext(path)[1].lower()
    parse = _PARSERS.get(suffix)
    if parse is None:
        raise ConfigError(f"{path}: a config ends in {', '.join(_PARSERS)}, not {suffix!r}", key="config", value=path)
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no UTF-8 text ({error.reason})"
        raise ConfigError(f"cannot read the config {path}: {reason}", key="config", value=path) from error
    table = parse(text, path)
    if table is None:  # what YAML makes of an empty file
        return {}
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: a config is a table of sections, got {shorten(table)}", key="config", value=path)
    return table


def _parse_toml(text: str, path: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}", key="config", value=path) from error


def _parse_json(text: str, path: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}", key="config", value=path) from error


def _parse_yaml(text: str, path: str) -> Any:
    yaml = load_optional("yaml", needed_by=f"the config {path}", extra="config", package="pyyaml")

    class Loader(yaml.SafeLoader):
        """The safe loader, which would let the last of two equal keys win."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"]
            for key in keys:
                if keys.count(key) > 1:
                    line = node.start_mark.line + 1
                    raise ConfigError(f"{path}: {key!r} stands twice in the table at line {line}", key=key)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no YAML: {reason}", key="config", value=path) from error


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    ".toml": _parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": _parse_json,
}
