"""Settings from a command line: ``loader.batch_size=64``. Pure (no I/O)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from dataload.config.plain import shorten
from dataload.errors import ConfigError

__all__ = ["apply_overrides", "parse_assignment", "parse_value"]


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`data` with the settings of `overrides` in place of its own.

    Args:
        data: Not modified.
        overrides: ``"key=value"``; the last of several for one key counts.

    Raises:
        ConfigError: One is no ``key=value``, or its key leads into something that is no table.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of 'key=value', got the text {overrides!r}", value=overrides)
    for override in overrides:
        keys, value = parse_assignment(override)
        data = _with(data, keys, value, override)
    return data


def _with(table: dict[str, Any], keys: tuple[str, ...], value: Any, override: str) -> dict[str, Any]:
    first, *rest = keys
    if rest:
        inner = table.get(first, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"override {override!r}: {first!r} is no table but {shorten(inner)}", key=first, value=inner
            )
        return {**table, first: _with(cast("dict[str, Any]", inner), tuple(rest), value, override)}
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
