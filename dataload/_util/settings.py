"""Checks of settings that several modules share."""

import inspect
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import numpy.typing as npt

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


def check_max_bad(value: Any) -> int | float:
    """Return the setting `max_bad`: a number of records as an int, or a share of them, in (0, 1], as a float."""
    if isinstance(value, float) and 0 < value <= 1:
        return value
    try:
        return check_count("max_bad", value, least=0)
    except ConfigError:
        rule = "must be a number of records (an integer >= 0) or a share of them (a float, 0 < max_bad <= 1)"
        raise setting_error("max_bad", value, rule) from None


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check that the setting `name` has one of the `allowed` values; if not, suggest the closest one and list all."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}: {closest(value, allowed)}", key=name, value=value)


_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, (bool, np.bool_))),
    int: ("an integer", lambda value: hasattr(value, "__index__") and not isinstance(value, (bool, np.bool_))),
    str: ("text", lambda value: isinstance(value, str)),
    NoneType: ("None", lambda value: value is None),
    Callable: ("a function", callable),
    Mapping: ("a mapping", lambda value: isinstance(value, Mapping)),
    Sequence: ("a list", lambda value: isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))),
    np.ndarray: ("an array", lambda value: isinstance(value, np.ndarray)),
    npt.NDArray: ("an array", lambda value: isinstance(value, np.ndarray)),  # numpy 2.5 no longer expands the alias
    os.PathLike: ("a path", lambda value: isinstance(value, os.PathLike)),
}


def check_type(name: str, value: Any, hint: Any) -> None:
    """Check a setting against its annotation; one that names classes of others is left to them."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    allowed: list[str] = []
    for kind in kinds:
        origin = get_origin(kind) or kind
        if origin is Literal:
            values = get_args(kind)
            allowed += map(repr, values)
            texts = isinstance(value, str) and isinstance(values[0], str)
            if texts and {*kinds} <= {kind, NoneType}:
                check_choice(name, value, values)
            fits = texts or any(value is each for each in values)  # the spelling of some is checked with their meaning
        elif origin in _KINDS:
            allowed.append(_KINDS[origin][0])
            fits = _KINDS[origin][1](value)
            items: Any = value if fits and origin in (Mapping, Sequence) else ()
            items = [*items.values()] if origin is Mapping and fits else items
            for item in items if isinstance(items, (list, tuple)) else ():  # others may be large, or read only once
                check_type(name, item, get_args(kind)[-1])
        else:
            return
        if fits:
            return
    raise setting_error(name, value, f"must be {', '.join(allowed[:-1])}{' or ' if allowed[1:] else ''}{allowed[-1]}")


def check_flags(**flags: Any) -> None:
    """Check that settings are True or False: the text "false" would be true."""
    for name, value in flags.items():
        check_type(name, value, bool)


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


def check_fields(fields: Any) -> tuple[str, ...] | None:
    """Return the names of the fields to read, None for all; refuse a string, whose letters would be names."""
    if isinstance(fields, str):
        raise ConfigError(f"fields must be a list of names, got the text {fields!r}", key="fields", value=fields)
    if fields is None:
        return None
    names: Any = tuple(fields) if isinstance(fields, Iterable) and not isinstance(fields, bytes) else fields
    check_type("fields", names, Sequence[str])
    return names


def check_seconds(name: str, value: Any) -> float | None:
    """Return a positive duration in seconds, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        raise ConfigError(f"{name} must be a number of seconds above 0, or None; got {value!r}", key=name, value=value)
    return value
