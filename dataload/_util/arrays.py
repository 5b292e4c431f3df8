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
    """The memory blocks currently lent. Thread-safe."""

    def __init__(self) -> None:
        self._lent: dict[int, weakref.ref[Any]] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, block: BytesArray, give_back: Callable[[], None]) -> BytesArray:
        """Return `block` as a new array, and call `give_back` once that array and all views of it are gone."""
        lent = np.frombuffer(block.data, np.uint8)
        # numpy puts a memoryview between the two arrays, and every view refers to it, whichever array is the view's
        # base. A callback on `lent` itself would depend on numpy's choice of base.
        handle = lent.base
        key = id(handle)

        def gone(_: weakref.ref[Any]) -> None:
            self._lent.pop(key, None)
            give_back()

        self._lent[key] = weakref.ref(handle, gone)
        return lent


_SMALLEST = 1 << 18  # malloc reuses smaller blocks itself
_KEPT_BYTES = 1 << 27
_KEPT_BLOCKS = 2  # per size, however large
_SIZES_PER_OCTAVE = 8  # byte arenas vary in length between batches
_ALIGNMENT = 64


class BufferPool:
    """A thread-safe pool of arrays whose memory returns when the last view is dropped."""

    # It keeps unused blocks of recently requested sizes: up to 128 MiB in all, and at least two blocks of the size last
    # returned.

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
            # Allocate and free a block of this size: glibc returns free memory to the system above twice the largest
            # block freed so far, and the samples made by transforms would fault their pages in again.
            np.empty(size, np.uint8)
            # malloc places large blocks 16 bytes after a page; JAX avoids a copy of arrays aligned to 64 bytes.
            block = np.empty(size + _ALIGNMENT, np.uint8)
            start = -block.ctypes.data % _ALIGNMENT
            return block[start : start + size]

    def _lend(self, block: BytesArray) -> BytesArray:
        def give_back() -> None:
            # The garbage collector may call this function anywhere in any thread, so it takes no lock.
            self._free.setdefault(block.nbytes, []).append(block)
            self._trim(block.nbytes)

        return self._loans.lend(block, give_back)

    def _trim(self, returned: int) -> None:
        """Drop blocks beyond the limit, starting with the sizes requested longest ago."""
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
    step = 1 << max(0, size.bit_length() - _SIZES_PER_OCTAVE.bit_length())
    return -(-size // step) * step


_pool = BufferPool()
"""The pool of this process, shared by all sources and collations."""

pooled_empty = _pool.empty
"""Return an uninitialized array like `numpy.empty`, whose memory is reused once nothing refers to it."""


_DTYPE, _NDIM = attrgetter("dtype"), attrgetter("ndim")


def stack_alike(values: Sequence[Any]) -> Array | None:
    """Return ``numpy.stack(values)`` in pooled memory, or None unless all have one shape and plain native dtype."""
    # Also None if the first is not C-contiguous: then numpy.stack decides on the layout in memory.
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
        # `concatenate` also compares the dtypes and all axes but the first.
        np.concatenate(values, out=out.reshape(len(values) * len(first), *shape[1:]), casting="no")
    except (TypeError, ValueError):
        return None
    return out


def split_rows(column: Any) -> list[Any]:
    """Return the values of a column (rows, *shape) as views; scalars become 0-d arrays."""
    if isinstance(column, np.ndarray) and column.ndim == 1:
        return [column[row, ...] for row in range(len(column))]  # column[row] would be a scalar
    return list(column)


def split_records(columns: Mapping[str, Any], rows: int) -> list[dict[str, Any]]:
    """Split a batch of columns into records."""
    records: list[dict[str, Any]] = [{} for _ in range(rows)]
    for name, column in columns.items():  # takes a quarter of the time of dict(zip(...)) per record
        for record, value in zip(records, split_rows(column), strict=True):
            record[name] = value
    return records


PadValue: TypeAlias = float | Mapping[str, float]
"""The padding value of all fields, or values by field name with 0 for the others."""


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


def pad(arrays: Sequence[Array], value: float, to: int | Sequence[int], name: str) -> Array:
    """Return arrays padded to the largest extent of each axis, the first rounded up to `to`: ``(rows, *largest)``."""
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
            f"cannot pad {name!r}: a value has length {length}, but the longest of the lengths to pad to is {to[-1]}"
        )
        raise ConfigError(f"{message}; add a length, or cut values off in a transform", key=f"collate.{name}.pad")
    return to[at]


def added_columns(
    rows: Int64Array, starts: Int64Array, lengths: Int64Array, shape: tuple[int, int]
) -> tuple[Array, Array]:
    """Return the segments and positions that `Pack` adds, both int32 of this `shape`, from a `Packing`."""
    lengths = np.minimum(lengths, shape[1] - starts)
    is_new = np.diff(rows, prepend=-1) != 0
    number = np.arange(len(rows))
    segment = number - np.maximum.accumulate(np.where(is_new, number, 0)) + 1  # counted from 1 within the row
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    flat = np.repeat(rows * shape[1] + starts, lengths) + within
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments.ravel()[flat] = np.repeat(segment, lengths)
    positions.ravel()[flat] = within
    return segments, positions
