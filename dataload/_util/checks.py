"""Checks of settings that several modules make."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

from dataload.errors import ConfigError, closest

__all__ = ["check_choice", "check_count", "check_directory"]


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


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """See that a setting has one of some values.

    Raises:
        ConfigError: It has not; the message names key, value, what is allowed, and the closest of that.
    """
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}: {closest(value, allowed)}", key=name, value=value)


def check_directory(path: str, key: str) -> None:
    """See that there is a directory for a file to be written, before there is work to lose.

    Raises:
        ConfigError: There is none.
    """
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise ConfigError(f"there is no directory {directory} to write to", key=key, value=path)
