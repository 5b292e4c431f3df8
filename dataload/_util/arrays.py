"""Arrays of batches: recycled memory, stacking and padding."""

import math
import warnings
import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from operator import attrgetter
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dataload._util.settings import as_tuple, check_count, setting_error
from dataload.errors import ConfigError, closest
from dataload.types import Array, BytesArray, Int64Array


class BufferLeases:
    """The blocks that are lent at present. Thread-safe."""

    def __init__(self) -> None:
        self._lent: dict[int, weakref.ref[Any]] = {}

    def __len__(self) -> int:
        """Return the number of blocks that are lent."""
        return len(self._lent)

    def lend(self, block: BytesArray, give_back: Callable[[], None]) -> BytesArray:
        """Return `block` as a new array, and call `give_back` once that array and all views of it are gone."""
        lent = np.frombuffer(block.data, np.uint8)
        # numpy puts a memoryview between the two arrays, and every view refers to it, whichever array of the chain is
        # the view's base. A callback on `lent` itself would depend on numpy's choice of the base.
        handle = lent.base
        key = id(handle)

        def gone(_: weakref.ref[Any]) -> None:
            self._lent.pop(key, None)
            give_back()

        self._lent[key] = weakref.ref(handle, gone)
        return lent


_SMALLEST = 1 << 18  # malloc keeps smaller blocks itself
_KEPT_BYTES = 1 << 27
_KEPT_BLOCKS = 2  # of a size, however large
_SIZES_PER_OCTAVE = 8  # arenas of bytes differ in length from batch to batch
_ALIGNMENT = 64


class BufferPool:
    """A thread-safe pool of arrays whose memory returns to the pool when the last view of it is dropped.

    Memory belongs to the caller while anything refers to it, as with newly allocated arrays. The pool keeps unused
    blocks of recently requested sizes: up to 128 MiB in all, but at least two blocks of the size last returned. Sizes
    are rounded up by at most an eighth.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[BytesArray]] = {}  # by size, in order of first request
        self._loans = BufferLeases()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialized array, like `numpy.empty`."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size < _SMALLEST:
            return np.empty(shape, kind)
        return self._lend(self._take(_rounded(size)))[:size].view(kind).reshape(shape)

    def _take(self, size: int) -> BytesArray:
        free = self._free.get(size)
        if free is None:
            free = self._free.setdefault(size, [])
        try:
            return free.pop()
        except IndexError:
            # Freed at once, as a batch would be. glibc returns free memory to the system above twice the largest block
            # that it has seen freed. Without this, the samples that transforms make would fault their pages in again.
            np.empty(size, np.uint8)
            # malloc places blocks this large 16 bytes after a page; JAX avoids a copy if they are aligned to 64.
            block = np.empty(size + _ALIGNMENT, np.uint8)
            start = -block.ctypes.data % _ALIGNMENT
            return block[start : start + size]

    def _lend(self, block: BytesArray) -> BytesArray:
        def give_back() -> None:
            # The garbage collector may call this at any point in any thread, so it takes no lock.
            self._free.setdefault(block.nbytes, []).append(block)
            self._trim(block.nbytes)

        return self._loans.lend(block, give_back)

    def _trim(self, returned: int) -> None:
        """Drop blocks beyond the limit, those of sizes first requested long ago first."""
        free = list(self._free.items())
        excess = sum(size * len(blocks) for size, blocks in free) - _KEPT_BYTES
        for size, blocks in free:
            if excess <= 0:
                return
            if size != returned:
                excess -= size * len(blocks)
                self._free.pop(size, None)
        blocks = self._free.get(returned, [])
        while excess > 0 and len(blocks) > _KEPT_BLOCKS:
            blocks.pop()
            excess -= returned


def _rounded(size: int) -> int:
    """Return `size` rounded up to one of a few sizes."""
    step = 1 << max(0, size.bit_length() - _SIZES_PER_OCTAVE.bit_length())
    return -(-size // step) * step


_pool = BufferPool()
"""The pool of this process, as malloc's is: what one source or collation returns, any other may use."""

pooled_empty = _pool.empty
"""Return an uninitialized array like `numpy.empty`, of memory that is reused once nothing refers to it."""


_DTYPE, _NDIM = attrgetter("dtype"), attrgetter("ndim")


def stack_alike(values: Sequence[Any]) -> Array | None:
    """Return ``numpy.stack(values)``, written row by row into pooled memory; None unless they are alike.

    They are alike if they are arrays or scalars of numpy, all of one shape and one plain native dtype, and the first is
    C-contiguous. For all others `numpy.stack` decides on the dtype and the layout in memory.
    """
    first, kinds = values[0], set(map(type, values))
    if kinds != {np.ndarray}:
        # The class of a number is its dtype, unless it has a unit.
        plain = isinstance(first, (np.bool_, np.number)) and not isinstance(first, np.timedelta64)
        return np.array(values) if plain and len(kinds) == 1 else None
    dtype, shape = first.dtype, first.shape
    if not dtype.isnative or dtype.kind not in "biufcmM" or not first.flags.c_contiguous:
        return None
    if not shape:
        alike = set(map(_DTYPE, values)) == {dtype} and set(map(_NDIM, values)) == {0}
        return np.array(values) if alike else None
    try:
        if set(map(len, values)) != {len(first)}:
            return None
        out = pooled_empty((len(values), *shape), dtype)
        # This compares the dtypes and all axes but the first.
        np.concatenate(values, out=out.reshape(len(values) * len(first), *shape[1:]), casting="no")
    except (TypeError, ValueError):
        return None
    return out


def split_rows(column: Any) -> list[Any]:
    """Return the values of a column, (rows, *shape): arrays that are views of it, also if they are scalars."""
    if isinstance(column, np.ndarray) and column.ndim == 1:
        return [column[row, ...] for row in range(len(column))]  # column[row] would be no array
    return list(column)


def split_records(columns: Mapping[str, Any], rows: int) -> list[dict[str, Any]]:
    """Return the records of a batch of columns."""
    records: list[dict[str, Any]] = [{} for _ in range(rows)]
    for name, column in columns.items():  # a quarter of the time of dict(zip(...)) for each record
        for record, value in zip(records, split_rows(column), strict=True):
            record[name] = value
    return records


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
