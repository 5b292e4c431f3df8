"""Settings from a command line: ``loader.batch_size=64``. Pure (no I/O)."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from dataload.config.problems import shorten
from dataload.errors import ConfigError

__all__ = ["apply_overrides", "parse_assignment", "parse_value"]

_QUOTED_OR_PLACE = re.compile(r"""("[^"]*"|'[^']*')|\[(\d+)\](?=\s*(?:[.\[]|$))""")


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`data` with the settings of `overrides` in place of its own.

    Args:
        data: Not modified.
        overrides: ``"key=value"``; the last of several for one key counts. ``source[1].path`` is a key in the second
            table of a list.

    Raises:
        ConfigError: One is no ``key=value``, its key leads into something that is no table, or to no place of a list.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of 'key=value', got the text {overrides!r}", value=overrides)
    for override in overrides:
        key, equals, value = override.partition("=")
        # TOML has no key for the place in a list, so source[1].path is taken as source.1.path.
        key = _QUOTED_OR_PLACE.sub(lambda match: match[1] or f".{match[2]}", key)
        keys, parsed = parse_assignment(f"{key}{equals}{value}")
        data = _with(data, keys, parsed, override)
    return data


def _with(node: Any, keys: Sequence[str], value: Any, override: str, name: str = "") -> Any:
    """`node` with another value where `keys` lead to, and without it for None."""
    first, *rest = keys
    if isinstance(node, list):
        items = cast("list[Any]", node)
        if not first.isdecimal() or int(first) >= len(items):
            message = f"override {override!r}: {name!r} is a list of {len(items)}, and {name}[0] the first of it"
            raise ConfigError(message, key=name, value=items)
        place = int(first)
        kept = [] if value is None and not rest else [value]
        if rest:
            kept = [_with(items[place], rest, value, override, f"{name}[{place}]")]
        return [*items[:place], *kept, *items[place + 1 :]]
    if not isinstance(node, dict):
        raise ConfigError(f"override {override!r}: {name!r} is no table but {shorten(node)}", key=name, value=node)
    table = cast("dict[str, Any]", node)
    if rest:
        return {**table, first: _with(table.get(first, {}), rest, value, override, first)}
    if value is None:
        return {name: old for name, old in table.items() if name != first}
    return {**table, first: value}


def parse_assignment(text: str) -> tuple[tuple[str, ...], Any]:
    """``'a."b.c"=1'`` as ``(("a", "b.c"), 1)``.

    Raises:
        ConfigError: There is no ``=``, or what stands before it is no key as TOML writes them.
    """
    key, equals, value = text.partition("=")
    try:
        table: Any = tomllib.loads(f"{key.strip()} = 0") if equals and "\n" not in key else {}
    except tomllib.TOMLDecodeError:
        table = {}
    keys: list[str] = []
    while isinstance(table, dict) and len(cast("dict[str, Any]", table)) == 1:
        ((name, table),) = cast("dict[str, Any]", table).items()
        keys.append(name)
    if not keys or table != 0:
        raise ConfigError(f"{text!r} is no 'key=value', such as loader.batch_size=64", value=text)
    return tuple(keys), parse_value(value.strip())


def parse_value(text: str) -> Any:
    """What a value on the command line means: JSON, else TOML, else a list in brackets, else the text itself.

    Example:
        >>> [parse_value(text) for text in ("64", "true", "[a, b]", "train.syr", '"64"', "1_000")]
        [64, True, ['a', 'b'], 'train.syr', '64', 1000]
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        table = {}
    # TOML also knows dates, nan and inf, which are more likely names; and a line break could bring more keys.
    if table.keys() == {"value"} and _is_plain(table["value"]):
        return table["value"]
    if text.startswith("[") and text.endswith("]") and not set(text[1:-1]) & set("[]{}"):
        return [parse_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, cast("list[Any]", value)))
    if isinstance(value, dict):
        return all(map(_is_plain, cast("dict[str, Any]", value).values()))
    if isinstance(value, float):
        return abs(value) < float("inf")
    return isinstance(value, (str, bool, int))
