"""Arrays of batches: sizes checked before they are made, recycled memory, stacking and splitting."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError, CorruptFileError, MachineError
from dataload.types import Array, BytesArray, Int64Array

MAX_RECORD_BYTES = 1 << 30
"""Default of the option `max_record_bytes`."""

FIELD_BYTES = 512
"""Approximate size of a field's Python objects without its values."""

MOST_BYTES = 1 << 48
"""Larger sizes are cut to this limit, so that their sums fit into int64."""

IMMUTABLE = frozenset((bool, int, float, str, bytes))
"""Types whose values cannot change, so that copying a list of them need not copy its items."""

_MOST_AXES = 63 if int(np.__version__.partition(".")[0]) > 1 else 31  # numpy allows one more, which a batch adds
_MOST_ITEMS = 1 << 40  # of an empty array: numpy multiplies the other extents and the rows into an int64


def no_memory(path: str | None, index: int, what: str = "") -> MachineError:
    """Return the error for a record that cannot be decoded for lack of memory; `what` names a part of it."""
    return MachineError(
        f"{path}, record {index}: {what}decoding it needs more memory than this process may have: use fewer workers, "
        "or lower max_record_bytes to refuse such records",
        path=path,
    )


def fits(shape: Sequence[int], items: int) -> bool:
    """Return whether an array of `shape` (any integers) has that many items, and numpy can hold a batch of them."""
    known = len(shape) <= _MOST_AXES and min(shape, default=0) >= 0 and math.prod(shape) == items
    return known and (items > 0 or math.prod(filter(None, shape)) < _MOST_ITEMS)


def check_size(size: int, limit: int, what: str, *, path: str | None = None, index: int | None = None) -> None:
    """Raise if `what` takes more than `limit` bytes. Call it before allocation; codecs do not know the path."""
    if size > limit:
        raise CorruptFileError(
            f"{what} takes {size:,} bytes of memory, and max_record_bytes is {limit:,}: the file is damaged or "
            "malicious; if you expect such records, raise max_record_bytes",
            path=path,
            index=index,
        )


def check_lengths(lengths: Int64Array, limit: int, indices: Int64Array, path: str) -> None:
    """Raise for the first of the records `indices`, (rows,) int64, stored in more than `limit` bytes."""
    if int(lengths.max()) > limit:
        row = int(np.argmax(lengths > limit))
        check_size(int(lengths[row]), limit, "the record", path=path, index=int(indices[row]))


class Claims:
    """Memory claimed by the records `indices`, (rows,) int64, of one read, at most `limit` bytes each."""

    def __init__(self, indices: Int64Array, limit: int, path: str) -> None:
        self.indices: Int64Array = indices
        self.limit: int = limit
        self.path: str = path
        self._each, self._more, self._most = 0, np.zeros(len(indices), np.int64), 0

    def add(self, sizes: int | Int64Array, rows: Int64Array | None = None) -> None:
        """Claim bytes for each record; or for those at `rows`, which may repeat, separately."""
        if isinstance(sizes, int) and rows is None:
            self._each += sizes
        else:
            if rows is not None:
                weights = None if isinstance(sizes, int) else sizes
                sizes = np.bincount(rows, weights, len(self._more)) * (sizes if isinstance(sizes, int) else 1)
            self._more += np.minimum(sizes, MOST_BYTES).astype(np.int64, copy=False)
            self._most = int(self._more.max(initial=0))
        self._check()

    def add_to(self, rows: Int64Array, sizes: int | Int64Array) -> None:
        """Claim bytes for the records at `rows`, which must be distinct."""
        more = self._more[rows] + np.minimum(sizes, MOST_BYTES)
        self._more[rows] = more
        self._most = max(self._most, int(more.max(initial=0)))
        self._check()

    def _check(self) -> None:
        if self._each + self._most > self.limit:
            check_lengths(self._more + self._each, self.limit, self.indices, self.path)


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
        step = 1 << max(0, size.bit_length() - _SIZES_PER_OCTAVE.bit_length())
        return self._lend(self._take(-(-size // step) * step))[:size].view(kind).reshape(shape)

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


MASKED = "some values are masked: fill them first, with filled(...)"


def is_masked(value: Any) -> bool:
    """Return whether this is an array with masked values, which numpy.asarray would uncover."""
    mask = getattr(value, "mask", None) if isinstance(value, np.ndarray) else None
    return mask is not None and bool(mask.any())


def to_array(name: str, value: Any) -> Array:
    """Return the value of a field as an array; raise a ConfigError if numpy cannot hold it, or if some is masked."""
    field = f"field {name!r}" if name else "the samples"
    if is_masked(value):
        raise ConfigError(f"{field}: {MASKED}", key=name or None)
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # such as torch's bfloat16, or a tensor with a gradient
        message = f"{field}: numpy cannot hold this {type(value).__name__} ({error}): convert it first"
        raise ConfigError(message, key=name or None) from error


def split_rows(column: Any) -> list[Any]:
    """Return the values of a column (rows, *shape) as views; scalars become 0-d arrays."""
    if isinstance(column, np.ndarray) and column.ndim == 1:
        return [column[row, ...] for row in range(len(column))]  # column[row] would be a scalar
    return list(column)


def split_records(columns: Mapping[str, Any], rows: int) -> list[dict[str, Any]]:
    """Split a batch of columns into records; a column may be a dict of columns, or a tuple of any class."""
    records: list[dict[str, Any]] = [{} for _ in range(rows)]
    for name, column in columns.items():  # takes a quarter of the time of dict(zip(...)) per record
        for record, value in zip(records, _split(column, rows), strict=True):
            record[name] = value
    return records


def _split(column: Any, rows: int) -> list[Any]:
    if isinstance(column, dict):
        return split_records(cast("dict[str, Any]", column), rows)
    if isinstance(column, tuple):
        parts, make = cast("tuple[Any, ...]", column), getattr(type(cast("Any", column)), "_make", tuple)
        return [*map(make, zip(*(_split(part, rows) for part in parts), strict=True))] if parts else [()] * rows
    return split_rows(column)


def as_array(value: Any) -> Any:
    """Return an array or a tensor with values as an array, float32 if numpy lacks its dtype; anything else as it is."""
    if isinstance(value, (np.ndarray, np.generic)) or not hasattr(value, "__array__") or not hasattr(value, "shape"):
        return cast("Any", value)
    is_tensor = hasattr(value, "detach")  # of torch
    try:
        return np.asarray(value.detach().cpu() if is_tensor else value)
    except (TypeError, RuntimeError):
        pass
    try:
        return np.asarray(value.detach().cpu().to_dense().float()) if is_tensor else value
    except (TypeError, RuntimeError):
        return value
