"""User's dicts as plain tables: own copies, of nothing but what TOML and JSON know. Pure (no I/O)."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from typing import Any, cast

from dataload.errors import ConfigError

__all__ = ["plain_table", "shorten"]


def plain_table(table: Mapping[Any, Any], origin: str) -> dict[str, Any]:
    """A copy with path objects as text and tuples as lists, all the way down.

    Raises:
        ConfigError: A key is no text.
    """
    return {_key(key, origin): _plain(value, f"{origin}: {key}") for key, value in table.items()}


def _key(key: Any, origin: str) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"{origin}: keys are text, got {key!r} ({type(key).__name__}): put it in quotes", value=key)
    return key


def _plain(value: Any, origin: str) -> Any:
    if isinstance(value, Mapping):
        return plain_table(cast("Mapping[Any, Any]", value), origin)
    if isinstance(value, (list, tuple)):
        return [_plain(item, origin) for item in cast("list[Any]", value)]
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if not isinstance(value, (bool, int)) and hasattr(value, "__index__"):
        return operator.index(value)  # numpy's integers
    return value


def shorten(value: Any, limit: int = 60) -> str:
    """A value as a message shows it."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
