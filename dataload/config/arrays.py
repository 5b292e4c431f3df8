"""Arrays that a config names by their file."""

from __future__ import annotations

from dataload.codecs.npy import parse_npy
from dataload.errors import ConfigError, CorruptFileError
from dataload.types import Array

__all__ = ["NPY_PATTERN", "read_array"]

NPY_PATTERN = r"\.npy$"


def read_array(path: str, key: str) -> Array:
    """The array in a .npy file: one value for each record.

    Args:
        path: Of the file.
        key: The setting, for the error.

    Raises:
        ConfigError: The file cannot be read, or holds no array of one dimension.
    """
    try:
        with open(path, "rb") as stream:
            array = parse_npy(stream.read())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", key=key, value=path) from error
    except CorruptFileError as error:
        raise ConfigError(f"{path} is no array: {error}", key=key, value=path) from error
    if array.ndim != 1:
        raise ConfigError(f"{path} holds an array of shape {array.shape}: expected one dimension", key=key, value=path)
    return array
