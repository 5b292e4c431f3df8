"""Padding: values of different lengths in one array."""

import warnings
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Annotated, Any, Literal, TypeAlias, cast

import numpy as np

from dataload._util.arrays import pooled_empty
from dataload._util.settings import Least, as_tuple, check_count, check_settings, setting_error
from dataload.errors import ConfigError, closest
from dataload.types import Array

PadValue: TypeAlias = float | Mapping[str, float]
"""The padding value of all fields, or values by field name with 0 for the others."""

IGNORED = -100
"""The label of a token that losses leave out."""

Side: TypeAlias = Literal["left", "right"]
"""The beginning or the end of a sequence."""


@dataclass(frozen=True, slots=True)
class Pad:
    """A policy of `Collate`: fill the values of a field up to one length, along the first axis.

    ``collate={"input_ids": Pad(0), "labels": Pad(-100), "attention_mask": Pad(0)}`` pads each field with its own value.
    Unlike the policy ``"pad"``, it adds no field of lengths.

    Attributes:
        value: The value to fill up with.
        to: Lengths to pad to: a multiple of this number, or the first of these ascending lengths that is enough, so
            that batches have few distinct shapes. By default, the longest value of the batch.
        side: The side to fill up: ``"right"``, or ``"left"`` for generation.
        max_length: Length to which longer values are cut. None cuts nothing.
        truncation_side: The side to cut off: ``"right"`` keeps the beginning, ``"left"`` the end.

    Raises:
        ConfigError: A setting is out of its range; or, in a batch, the field's dtype cannot hold `value`.
    """

    value: float = 0
    to: int | Sequence[int] = 1
    side: Side = "right"
    max_length: Annotated[int, Least(1)] | None = None
    truncation_side: Side = "right"

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "to", check_padded_lengths("to", self.to))

    def cut(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the arrays, cut to `max_length`."""
        if self.max_length is None:
            return arrays
        kept = slice(self.max_length) if self.truncation_side == "right" else slice(-self.max_length, None)
        return [array[kept] for array in arrays]


def check_pad_value(value: Any, padded: Collection[str] | None) -> None:
    """Raise ConfigError unless `value` is a number or None, or maps `padded` fields (None: unknown) to numbers."""
    given = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else {}
    if not all(isinstance(each, Real) for each in given.values() or [value or 0]):
        raise setting_error("pad_value", value, 'must be a number, or a mapping such as {"labels": -100}')
    for name in () if padded is None else given.keys() - {*padded}:
        message = f"pad_value names {name!r}, which is not a padded field: {closest(name, padded or ())}"
        raise ConfigError(message, key=f"pad_value.{name}", value=given[name])


def fill_of(pad_value: PadValue | None, name: str, dtype: np.dtype[Any]) -> float:
    """Return the padding value of a field, after checking that its dtype can hold it."""
    value = pad_value.get(name, 0) if isinstance(pad_value, Mapping) else pad_value or 0
    least, most = 0, 1  # of bool
    if dtype.kind in "iu":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    if dtype.kind in "iub" and not (least <= value <= most and value == int(value)):
        message = f"pad_value of field {name!r} is {value!r}, but its dtype {dtype} holds {least} to {most}"
        raise ConfigError(f"{message}: choose a number that fits, or convert the field in a transform", key="pad_value")
    return value


def warn_of_padding(padded: Mapping[str, str], stacklevel: int) -> None:
    """Warn if several padded integer fields (name -> dtype) have no `pad_value`."""
    names = sorted(name for name, dtype in padded.items() if "int" in dtype)
    if len(names) > 1:
        warnings.warn(
            f"padding fills the integer fields {', '.join(names)} with 0, which a loss may count as a label: pass "
            f"pad_value={dict.fromkeys(names, 0)} with suitable values (torch's cross_entropy ignores -100), "
            "or pad_value=0 to keep 0; the next release raises an error without pad_value",
            stacklevel=stacklevel + 1,
        )


def check_padded_lengths(key: str, value: Any) -> int | tuple[int, ...]:
    """Return the setting `key`: pad to multiples of a number, or to one of some ascending lengths."""
    if isinstance(value, str) or not isinstance(value, (Sequence, np.ndarray)):
        return check_count(key, value, least=1)
    lengths = tuple(check_count(f"{key}[{i}]", length, least=0) for i, length in enumerate(as_tuple(value)))
    if not lengths or any(after <= before for before, after in pairwise(lengths)):
        raise setting_error(key, value, "must be an integer >= 1 or ascending lengths")
    return lengths


def pad(arrays: Sequence[Array], value: float, to: int | Sequence[int], name: str, side: Side = "right") -> Array:
    """Return arrays padded to the largest extent of each axis, the first rounded up to `to`: ``(rows, *largest)``."""
    longest, *others = (max(extents) for extents in zip(*(array.shape for array in arrays), strict=True))
    length, dtype, left = _round_up(longest, to, name), arrays[0].dtype, side == "left"
    if all(array.shape[1:] == (*others,) for array in arrays):
        filler = np.full((length, *others), value, dtype)
        pieces = [(filler[len(each) :], each) if left else (each, filler[len(each) :]) for each in arrays]
        return laid_out([piece for pair in pieces for piece in pair], (len(arrays), length, *others))
    out = np.full((len(arrays), length, *others), value, dtype)
    for row, array in enumerate(arrays):
        first = length - len(array) if left else 0
        out[(row, slice(first, first + len(array)), *map(slice, array.shape[1:]))] = array
    return out


def laid_out(pieces: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Return pieces of rows, one after another, as an array of this `shape`, copied in one call."""
    dtype = pieces[0].dtype
    out = (np.empty if dtype.hasobject else pooled_empty)(shape, dtype)
    np.concatenate(pieces, out=out.reshape(shape[0] * shape[1], *shape[2:]))
    return out


def _round_up(length: int, to: int | Sequence[int], name: str) -> int:
    if isinstance(to, int):
        return -(-length // to) * to
    at = bisect_left(to, length)
    if at == len(to):
        message = (
            f"cannot pad {name!r}: a value has length {length}, but the longest of the lengths to pad to is {to[-1]}"
        )
        raise ConfigError(f"{message}; add a length, or cut values off: Pad(max_length=...)", key=f"collate.{name}.pad")
    return to[at]
