"""Arrays of different extents as a single array."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dataload._util.checks import as_tuple, check_count, setting_error
from dataload.errors import ConfigError
from dataload.types import Array


def check_padded_lengths(key: str, value: Any) -> int | tuple[int, ...]:
    """Return the setting `key`: a number whose multiples are the lengths to pad to, or these lengths, ascending."""
    if isinstance(value, str) or not isinstance(value, (Sequence, np.ndarray)):
        return check_count(key, value, least=1)
    lengths = tuple(check_count(f"{key}[{i}]", length, least=0) for i, length in enumerate(as_tuple(value)))
    if not lengths or any(after <= before for before, after in pairwise(lengths)):
        raise setting_error(key, value, "must be an integer >= 1 or ascending lengths")
    return lengths


def pad(arrays: Sequence[Array], value: float, to: int | Sequence[int], name: str) -> Array:
    """Return arrays filled up to the largest extent along each axis, the first one rounded up, as ``(rows, *largest)``.

    `to` is checked by `check_padded_lengths`; `name` is that of the field, for messages.
    """
    longest, *others = (max(extents) for extents in zip(*(array.shape for array in arrays), strict=True))
    out = np.full((len(arrays), _round_up(longest, to, name), *others), value, arrays[0].dtype)
    for row, array in enumerate(arrays):
        out[(row, *map(slice, array.shape))] = array
    return out


def _round_up(length: int, to: int | Sequence[int], name: str) -> int:
    if isinstance(to, int):
        return -(-length // to) * to
    at = bisect_left(to, length)
    if at == len(to):
        message = (
            f"cannot pad {name!r}: a value has length {length}, and the longest of the lengths to pad to is {to[-1]}"
        )
        raise ConfigError(f"{message}; add a length, or cut values off in a transform", key=f"collate.{name}.pad")
    return to[at]
