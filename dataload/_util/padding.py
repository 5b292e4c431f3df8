"""Arrays of different extents as a single array, and the values that fill it up."""

import warnings
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, TypeAlias, cast

import numpy as np

from dataload._util.checks import as_tuple, check_count, setting_error
from dataload.errors import ConfigError, closest
from dataload.types import Array, Int64Array

PadValue: TypeAlias = float | Mapping[str, float]
"""The value that fills up all padded fields; or values by field, where others get 0."""


def check_pad_value(value: Any, padded: Collection[str] | None) -> None:
    """Raise ConfigError unless `value` is a number or None, or maps names of `padded` fields, if known, to numbers."""
    given = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else {}
    if not all(isinstance(each, Real) for each in given.values() or [value or 0]):
        raise setting_error("pad_value", value, 'must be a number, or a mapping such as {"labels": -100}')
    for name in () if padded is None else given.keys() - {*padded}:
        message = f"pad_value names {name!r}, which is not a padded field: {closest(name, padded or ())}"
        raise ConfigError(message, key=f"pad_value.{name}", value=given[name])


def fill_of(pad_value: PadValue | None, name: str, dtype: np.dtype[Any]) -> float:
    """Return the value that fills up a field, which its dtype must be able to hold."""
    value = pad_value.get(name, 0) if isinstance(pad_value, Mapping) else pad_value or 0
    least, most = 0, 1  # of bool
    if dtype.kind in "iu":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    if dtype.kind in "iub" and not (least <= value <= most and value == int(value)):
        message = f"pad_value of field {name!r} is {value!r}, and its dtype is {dtype}, from {least} to {most}"
        raise ConfigError(f"{message}: choose a number that fits, or convert the field in a transform", key="pad_value")
    return value


def warn_of_padding(padded: Mapping[str, str], stacklevel: int) -> None:
    """Warn if several of the padded fields, name -> dtype, are integers, for which no `pad_value` was given."""
    names = sorted(name for name, dtype in padded.items() if "int" in dtype)
    if len(names) > 1:
        warnings.warn(
            f"padding fills the integer fields {', '.join(names)} with 0, which a loss may count as a label: pass "
            f"pad_value={dict.fromkeys(names, 0)} with the values that you mean (torch's cross_entropy ignores -100), "
            "or pad_value=0 to keep 0; without one, this is an error in the release after",
            stacklevel=stacklevel + 1,
        )


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


def added_columns(
    rows: Int64Array, starts: Int64Array, lengths: Int64Array, shape: tuple[int, int]
) -> tuple[Array, Array]:
    """Return the segments and positions that `Pack` adds, from a `Packing`."""
    lengths = np.minimum(lengths, shape[1] - starts)
    is_new = np.diff(rows, prepend=-1) != 0
    number = np.arange(len(rows))
    segment = number - np.maximum.accumulate(np.where(is_new, number, 0)) + 1  # within the row, from 1
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    flat = np.repeat(rows * shape[1] + starts, lengths) + within
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments.ravel()[flat] = np.repeat(segment, lengths)
    positions.ravel()[flat] = within
    return segments, positions
