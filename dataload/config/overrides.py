"""Settings from a command line: ``loader.batch_size=64``. Pure (no I/O)."""

import json
import math
import re
import tomllib
from collections.abc import Sequence
from types import NoneType
from typing import Any, cast

from dataload.config.problems import shorten
from dataload.errors import ConfigError

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
