"""Checks of settings that several modules make."""

from __future__ import annotations

import operator
from typing import Any

from dataload.errors import ConfigError

__all__ = ["check_count"]


def check_count(name: str, value: Any, *, least: int, below: int | None = None) -> int:
    """`value` as an int in [least, below).

    Raises:
        ConfigError: It is no integer, or outside; the message names key, value and what is allowed.
    """
    allowed = f"an integer >= {least}" if below is None else f"an integer in [{least}, {below})"
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least or (below is not None and number >= below):
        raise ConfigError(f"{name} must be {allowed}, got {value!r}", key=name, value=value)
    return number
