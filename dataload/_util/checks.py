"""Checks of settings that several modules share."""

import inspect
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

from dataload.errors import ConfigError, closest


def setting_error(name: str, value: Any, rule: str) -> ConfigError:
    """Return the error for a setting that breaks a rule, such as "must ascend"."""
    return ConfigError(f"{name} {rule}{';' if ',' in rule else ','} got {value!r}", key=name, value=value)


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Return the elements of a setting, or () if it has none or is not a sequence."""
    try:
        return tuple(values)
    except TypeError:
        return ()


def check_count(name: str, value: Any, *, least: int, below: int | None = None) -> int:
    """Return `value` as an int in [least, below), or in [least, infinity) if `below` is None."""
    allowed = f"an integer >= {least}" if below is None else f"an integer in [{least}, {below})"
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least or (below is not None and number >= below):
        raise ConfigError(f"{name} must be {allowed}, got {value!r}", key=name, value=value)
    return number


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check that the setting `name` has one of the `allowed` values; if not, suggest the closest one and list all."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}: {closest(value, allowed)}", key=name, value=value)


def check_directory(path: str, key: str) -> None:
    """Check that the directory of an output file exists, before any work is done that could be lost.

    The setting that holds the path is called `key`.
    """
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise ConfigError(f"there is no directory {directory} to write to", key=key, value=path)


def check_call(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Check that a function, the setting `name`, can be called with positional arguments that stand for `arguments`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C may have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        shown = getattr(function, "__qualname__", None) or type(function).__qualname__
        shown += f"({', '.join(signature.parameters)})"  # without defaults, which may be secret
        message = f"{name} is called with {' and '.join(arguments)}, and {shown} does not fit: {error}"
        raise ConfigError(message, key=name, value=function) from None


def check_fields(fields: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of the fields to read, None for all; refuse a string, whose letters would be names."""
    if isinstance(fields, str):
        raise ConfigError(f"fields must be a list of names, got the text {fields!r}", key="fields", value=fields)
    return None if fields is None else tuple(fields)


def check_seconds(name: str, value: Any) -> float | None:
    """Return a positive duration in seconds, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        raise ConfigError(f"{name} must be a number of seconds above 0, or None; got {value!r}", key=name, value=value)
    return value
