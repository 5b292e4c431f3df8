"""The dtypes that records may have, in codecs that store dtypes by name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from dataload.errors import ConfigError, CorruptFileError
from dataload.types import Array

_NAME = re.compile(r"[<>|=][biufcmMSU]\d{1,9}(\[\w{1,9}\])?")
"""Values of `dtype.str`, except objects, which would have to be unpickled, and structures."""


def parse_dtype(name: Any) -> np.dtype[Any]:
    """Return the dtype for a name read from a file.

    Raises:
        CorruptFileError: The name is not that of a supported dtype.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = "objects would have to be unpickled" if "O" in str(name) else "not a plain dtype"
        raise CorruptFileError(f"an array of dtype {str(name)[:80]!r}: {what}")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise CorruptFileError(f"an array of dtype {name!r}: {error}") from error
    if not dtype.itemsize:  # any number of items would fit
        raise CorruptFileError(f"an array of dtype {name!r}: items of zero bytes")
    return dtype


def plain_array(value: Any) -> Array:
    """Return `value` as an array in C order with a dtype that `parse_dtype` supports.

    Raises:
        ConfigError: The dtype is not supported.
    """
    try:
        array = np.asarray(value, order="C")
    except ValueError as error:  # nested lists of different lengths
        raise ConfigError(f"{type(value).__name__} is not an array: {error}") from error
    if array.dtype.kind not in "biufcmMSU" or not array.dtype.itemsize:
        reason = "would have to be pickled" if array.dtype.hasobject else "is not supported"
        raise ConfigError(f"an array of {array.dtype} {reason}; store its parts in separate fields")
    return array
