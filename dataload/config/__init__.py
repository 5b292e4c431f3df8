"""Settings of a training job's data, from a dict, TOML, YAML or JSON.

```toml
[source]
path = "train-{000..127}.tar"     # relative to this file
decode = "auto"

[sampler]                         # or `shuffle = true` in the section `loader`
kind = "pool_shuffle"
pool_size = 4096

[loader]
batch_size = 256
```

One error names all keys, types and ranges that are wrong, each with its value and what is allowed there. Settings that
contradict each other are an error of the class that they are for.
"""

from __future__ import annotations

import glob
import json
import math
import operator
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dataload._util.lazy import load_optional
from dataload.config.problems import REFERENCE_PATTERN, config_error, find_problems, shorten
from dataload.errors import ConfigError
from dataload.sources.registry import get_format, split_prefix
from dataload.storage import is_url
from dataload.storage.errors import describe_missing
from dataload.storage.local.files import read_text

if TYPE_CHECKING:
    from dataload.config.models import DataloadConfig


__all__ = ["json_schema", "read_config"]

_MOST_FINDINGS = 100  # that one error lists; each takes up to a millisecond to explain


def read_config(config: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()) -> DataloadConfig:
    """Read and check a config; see `dataload.from_config` for its arguments and errors.

    Paths in a file are relative to it, those in a dict and in `overrides` to the working directory.
    """
    pydantic = load_optional("pydantic", needed_by="a config", extra="config")
    from dataload.config.models import DataloadConfig, tables

    if isinstance(config, Mapping):
        origin, data = "config", plain_value(config, "config")
    else:
        origin = os.fspath(config)
        data = anchor_paths(plain_value(read_file(origin), origin), os.path.dirname(os.path.abspath(origin)))
    if overrides:
        data = plain_value(apply_overrides(data, overrides), origin)
    try:
        return DataloadConfig.model_validate(data)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[:_MOST_FINDINGS]
    raise config_error(find_problems(details, data, tables()), origin)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a config, for editors."""
    load_optional("pydantic", needed_by="the schema of configs", extra="config")
    from dataload.config.models import DataloadConfig

    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **DataloadConfig.model_json_schema()}


_QUOTED_OR_INDEX = re.compile(r"""("[^"]*"|'[^']*')|\[(\d+)\](?=\s*(?:[.\[]|$))""")


_MOST_PARTS = 64  # of a dotted key; the time for parsing it grows with their square
_LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}""")


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `data` with overrides such as ``"source[1].path=a.tar"`` applied in turn."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of 'key=value', got the text {overrides!r}", value=overrides)
    for override in overrides:
        key, equals, value = override.partition("=")
        # TOML has no keys for items of a list, so source[1].path is read as source.1.path.
        key = _QUOTED_OR_INDEX.sub(lambda match: match[1] or f".{match[2]}", key)
        keys, parsed = parse_assignment(f"{key}{equals}{value}")
        data = _with(data, keys, parsed, override)
    return data


def _with(node: Any, keys: Sequence[str], value: Any, override: str, name: str = "") -> Any:
    """Return `node` with another value at `keys`, or without it if the value is None."""
    first, *rest = keys
    if isinstance(node, list):
        items = cast("list[Any]", node)
        if not re.fullmatch(r"\d{1,18}", first) or int(first) >= len(items):
            message = f"override {override!r}: {name!r} is a list of {len(items)}; its first item is {name}[0]"
            raise ConfigError(message, key=name, value=items)
        i = int(first)
        kept = [] if value is None else [value]
        if rest:
            kept = [_with(items[i], rest, value, override, f"{name}[{i}]")]
        return [*items[:i], *kept, *items[i + 1 :]]
    if not isinstance(node, dict):
        message = f"override {override!r}: {name!r} is {shorten(node)}, not a table"
        raise ConfigError(message, key=name, value=node)
    table = cast("dict[str, Any]", node)
    if value is None and first not in table:
        return table
    if rest:
        return {**table, first: _with(table.get(first, {}), rest, value, override, first)}
    if value is None:
        return {name: old for name, old in table.items() if name != first}
    return {**table, first: value}


def parse_assignment(text: str) -> tuple[tuple[str, ...], Any]:
    """Parse ``'a."b.c"=1'`` into ``(("a", "b.c"), 1)``."""
    key, equals, value = text.partition("=")
    try:
        table: Any = parse_toml(f"{key.strip()} = 0") if equals and "\n" not in key else {}
    except (ValueError, RecursionError):
        table = {}
    keys: list[str] = []
    while isinstance(table, dict) and len(cast("dict[str, Any]", table)) == 1:
        ((name, table),) = cast("dict[str, Any]", table).items()
        keys.append(name)
    if not keys or table != 0:
        raise ConfigError(f"{shorten(text)} is not 'key=value', such as loader.batch_size=64", value=text)
    return tuple(keys), parse_value(value.strip())


def parse_value(text: str) -> Any:
    """Parse a value from the command line: as JSON, else TOML, else a list in brackets, else text."""
    for parse in (json.loads, _parse_toml):
        try:
            value = parse(text)
            if _is_plain(value):  # dates, nan and inf are more likely names
                return value
        except (ValueError, RecursionError):
            continue
    if text.startswith("[") and text.endswith("]") and not set(text[1:-1]) & set("[]{}"):
        return [parse_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    return text


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; ValueError if it is invalid or would take long, RecursionError if it is nested too deeply."""
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has {_MOST_PARTS} parts or more")
    return tomllib.loads(text)


def _parse_toml(text: str) -> Any:
    table = parse_toml(f"value = {text}")
    return table["value"] if len(table) == 1 else math.nan  # a line break can add keys


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        items = cast("list[Any]", list(value.values()) if isinstance(value, dict) else value)
        return all(map(_is_plain, items))
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, (str, int, NoneType))


_MOST_CHARACTERS = 4 << 20  # of a file
_MOST_LEVELS = 64  # of tables and lists in each other
_MOST_REPEATED = 20_000  # values, of tables and lists that are used several times, as by YAML's aliases
_MOST_BITS = 256  # of an integer
_MOST_DIGITS = 100  # of a number or date in YAML
_TEXTS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:binary")
_SUFFIXES = (".toml", ".yaml", ".yml", ".json")


def read_file(path: str) -> dict[str, Any]:
    """Read the table that a TOML, YAML or JSON file holds."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in _SUFFIXES:
        message = f"{path}: the name of a config ends in {', '.join(_SUFFIXES)}, not {suffix!r}"
        message += f'; if this is data, write a config that names it: [source] path = "{path}"'
        raise ConfigError(message, key="config", value=path)
    try:
        text = read_text(path, _MOST_CHARACTERS + 1).removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text ({error.reason})"
        reason = describe_missing(path) if isinstance(error, FileNotFoundError) else reason
        raise ConfigError(f"cannot read the config {path}: {reason}", key="config", value=path) from error
    if len(text) > _MOST_CHARACTERS:
        message = f"{path} has more than {_MOST_CHARACTERS:,} characters, so it is hardly a config"
        raise ConfigError(message, key="config", value=path)
    try:
        if suffix == ".json":
            table = json.loads(text, object_pairs_hook=_table)
        else:
            table = parse_toml(text) if suffix == ".toml" else _parse_yaml(text, path)
    except ConfigError:
        raise
    # The parsers also raise errors about integers of thousands of digits, and deep nesting.
    except (ValueError, RecursionError) as error:
        message = f"{path} is not valid {suffix[1:].upper()}: {error}"
        raise ConfigError(message, key="config", value=path) from error
    if not isinstance(table, (dict, NoneType)):
        message = f"{path}: a config is a table of sections, got {shorten(table)}"
        raise ConfigError(message, key="config", value=path)
    return table or {}  # None for an empty YAML file


def _table(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of JSON; ValueError if a key stands twice in it."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"a table has two keys {key!r}")
        seen.add(key)
    return dict(pairs)


def _parse_yaml(text: str, path: str) -> Any:
    yaml = load_optional("yaml", needed_by=f"the config {path}", extra="config", package="pyyaml")
    try:
        return yaml.load(text, _yaml_loader(yaml, path))
    except ConfigError:
        raise
    except Exception as error:  # PyYAML's constructors raise various errors, for example about the date 2001-99-99
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path} is not valid YAML: {reason}", key="config", value=path) from error


def _yaml_loader(yaml: Any, path: str) -> Any:
    class Loader(yaml.SafeLoader):
        """The safe loader; it limits nesting and merged tables, and refuses duplicate keys: PyYAML keeps the last."""

        def fetch_flow_collection_start(self, token: Any) -> None:
            if self.flow_level > _MOST_LEVELS:  # the scanner's time grows with the square
                raise ConfigError(f"{path}: brackets at line {self.line + 1} are nested more than {_MOST_LEVELS} deep")
            super().fetch_flow_collection_start(token)

        def compose_scalar_node(self, anchor: Any) -> Any:
            node = super().compose_scalar_node(anchor)
            if len(node.value) > _MOST_DIGITS and node.tag not in _TEXTS:
                line = node.start_mark.line + 1
                raise ConfigError(f"{path}: the value at line {line} has {len(node.value)} characters, without quotes")
            return node

        def flatten_mapping(self, node: Any) -> None:
            own = len(node.value)
            super().flatten_mapping(node)
            if len(node.value) > own + _MOST_REPEATED:
                line = node.start_mark.line + 1
                raise ConfigError(f"{path}: the table at line {line} takes over more than {_MOST_REPEATED:,} keys")

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key in [key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"]:
                if key in seen:
                    line = node.start_mark.line + 1
                    raise ConfigError(f"{path}: the table at line {line} has two keys {key!r}", key=key)
                seen.add(key)
            return super().construct_mapping(node, deep)

    return Loader


def plain_value(value: Any, origin: str) -> Any:
    """Copy a value, with paths as text, tuples as lists, and NumPy's integers and flags as Python's; limit nesting."""
    return _Copy().value(value, origin, 0)


class _Copy:
    """Copies a value whose parts may be the same objects, so that it is larger than it seems."""

    def __init__(self) -> None:
        self._copied = 0
        self._repeated = 0
        # By id of a table or list: its copy, its number of values, and itself, so that no other one gets its id.
        self._found: dict[int, tuple[Any, int, Any]] = {}

    def value(self, value: Any, origin: str, level: int) -> Any:
        if isinstance(value, (Mapping, list, tuple)):
            return self._container(cast("Any", value), origin, level)
        self._copied += 1
        if isinstance(value, os.PathLike):
            return os.fspath(cast("os.PathLike[str]", value))
        if isinstance(value, np.bool_):
            return bool(value)
        if not isinstance(value, bool) and hasattr(value, "__index__"):
            with suppress(TypeError):  # of arrays
                value = operator.index(value)
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ConfigError(f"{origin}: an integer of {value.bit_length():,} bits; the limit is {_MOST_BITS}")
        return value

    def _container(self, value: Any, origin: str, level: int) -> Any:
        if level > _MOST_LEVELS:
            message = f"{origin}: tables and lists are nested more than {_MOST_LEVELS} deep, or contain themselves"
            raise ConfigError(message)
        copy, size, _ = self._found.get(id(value), (None, 0, None))
        if size:
            self._copied += size
            self._repeated += size
            if self._repeated > _MOST_REPEATED:
                raise ConfigError(
                    f"{origin}: the same tables and lists add more than {_MOST_REPEATED:,} repeated values"
                )
            return copy
        before = self._copied
        self._copied += 1
        if isinstance(value, Mapping):
            table = cast("Mapping[Any, Any]", value)
            for key in table:
                if not isinstance(key, str):
                    message = f"{origin}: keys are text, got {shorten(key)} ({type(key).__name__}): put it in quotes"
                    raise ConfigError(message, value=key)
            copy = {key: self.value(item, f"{origin}: {key}", level + 1) for key, item in table.items()}
        else:
            copy = [self.value(item, origin, level + 1) for item in value]
        self._found[id(value)] = copy, self._copied - before, value
        return copy


_PATHS = {
    "source": ("path", "index", "documents", "labels"),
    "sampler": ("indices", "weights", "lengths", "sequences"),
    "loader": ("changes", "error_report", "exclude"),
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
