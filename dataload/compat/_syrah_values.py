"""Indices and arrays of Syrah's `File`: wrong ones are said with the classes of the original's errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataload.errors import ConfigError
from dataload.sources.syrah.layout import DTYPES
from dataload.types import Array

__all__ = ["check_position", "flat", "storable", "taken_for"]

_DTYPES = frozenset(DTYPES.values())


def check_position(number: int, length: int, what: str) -> int:
    """`number`, if it is in [0, length).

    Raises:
        IndexError: It is beyond.
        ConfigError: It is negative.
    """
    if number < 0:
        raise ConfigError(f"the index {number} is before the first of {length} {what}", key="index", value=number)
    if number >= length:
        raise IndexError(f"index {number} is out of range for {length} {what}")
    return number


def storable(name: Any, value: Any) -> Array | str:
    """What a writer takes of an item: text for an array of text.

    Raises:
        ConfigError: The name is no text, or the value no array.
        TypeError: The format has no such dtype.
    """
    if not isinstance(name, str):
        raise ConfigError(f"names of arrays are text, got {name!r} ({type(name).__name__})")
    if not isinstance(value, np.ndarray):
        raise ConfigError(f"array {name!r} is a {type(value).__name__}, not a numpy array", key=name)
    if value.dtype.kind == "U":
        return "".join(value.ravel().tolist())
    if value.dtype.newbyteorder("<") not in _DTYPES:
        raise TypeError(f"array {name!r} has dtype {value.dtype}; the format knows {', '.join(DTYPES)}, str")
    return value


def flat(value: Any) -> Array:
    """What a source gives, as an array of one dimension."""
    if isinstance(value, str):
        return np.array([value])
    return np.frombuffer(bytearray(value), np.uint8) if isinstance(value, bytes) else np.asarray(value).reshape(-1)


def taken_for(value: Any, dtype: str) -> Array:
    """The bytes of a value as an array of another dtype.

    Raises:
        TypeError: The format has no such dtype.
        ConfigError: They are no whole number of it.
        UnicodeDecodeError: They are no UTF-8, and shall be text.
    """
    data = value.encode() if isinstance(value, str) else flat(value).tobytes()
    if dtype == "str":
        return np.array([data.decode()])
    if dtype not in DTYPES:
        raise TypeError(f"the format has no dtype {dtype!r}; it knows {', '.join(DTYPES)}, str")
    if len(data) % DTYPES[dtype].itemsize:
        raise ConfigError(f"{len(data)} bytes are no whole number of {dtype}", key="dtype", value=dtype)
    return np.frombuffer(bytearray(data), DTYPES[dtype])
