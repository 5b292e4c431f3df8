"""Which dtypes a record may hold, in codecs that write them by name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from dataload.errors import ConfigError, CorruptFileError
from dataload.types import Array

__all__ = ["parse_dtype", "plain_array"]

_NAME = re.compile(r"[<>|=][biufcmMSU]\d{1,9}(\[\w{1,9}\])?")
"""What `dtype.str` gives, less objects, which would have to be unpickled, and structures."""


def parse_dtype(name: Any) -> np.dtype[Any]:
    """The dtype of that name, which comes from a file.

    Raises:
        CorruptFileError: It is no name of a dtype, or of one that is not read.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = "objects would have to be unpickled" if "O" in str(name) else "no plain dtype"
        raise CorruptFileError(f"an array of dtype {str(name)[:80]!r}: {what}")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise CorruptFileError(f"an array of dtype {name!r}: {error}") from error
    if not dtype.itemsize:  # would fit any number of times into nothing
        raise CorruptFileError(f"an array of dtype {name!r}: items of no bytes")
    return dtype


def plain_array(value: Any) -> Array:
    """`value` as an array in C order whose dtype `parse_dtype` reads.

    Raises:
        ConfigError: It has another dtype.
    """
    try:
        array = np.asarray(value, order="C")
    except ValueError as error:  # nested lists of different lengths
        raise ConfigError(f"{type(value).__name__} is no array: {error}") from error
    if array.dtype.kind not in "biufcmMSU" or not array.dtype.itemsize:
        reason = "would have to be pickled" if array.dtype.hasobject else "is not stored"
        raise ConfigError(f"an array of {array.dtype} {reason}; give its parts fields of their own")
    return array
