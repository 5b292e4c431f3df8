"""Strict comparison of records and batches: types, dtypes, shapes and every bit. Pure (no I/O)."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

import numpy as np

from dataload._util.arrays import as_array
from dataload.types import BytesColumn

_SHOWN = 60

snapshot: Callable[[Any], Any] = copy.deepcopy  # shares no memory with the original


def difference(got: Any, want: Any, label: str) -> str | None:
    """Describe the first difference between two records or batches, or return None if they are equal bit by bit."""
    # 1 is not 1.0, b"" is not bytearray(), -0.0 is not 0.0, and NaN equals the same NaN. `label` names the value.
    got, want = (list(value) if isinstance(value, BytesColumn) else value for value in (got, want))
    is_tensor = hasattr(want, "dtype") and not isinstance(want, np.ndarray)
    if type(got) is not type(want) or (is_tensor and got.dtype != want.dtype):
        return f"{label} is {show(got)}, expected {show(want)}"
    got, want = as_array(got), as_array(want)
    if isinstance(want, np.ndarray):
        return _array_difference(got, want, label)
    if isinstance(want, Mapping):
        if got.keys() != want.keys():
            return f"{label} has fields {sorted(map(str, got))}, expected {sorted(map(str, want))}"
        parts = (difference(got[name], value, f"{label}, field {name!r}") for name, value in want.items())
        return next((part for part in parts if part), None)
    if isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return f"{label} has {len(got)} parts, expected {len(want)}"
        parts = (difference(a, b, f"{label}[{i}]") for i, (a, b) in enumerate(zip(got, want, strict=True)))
        return next((part for part in parts if part), None)
    # repr distinguishes -0.0 from 0.0, and is equal for NaNs.
    is_number = isinstance(want, (float, complex, Decimal, np.generic))
    same = repr(got) == repr(want) if is_number else bool(got == want)
    return None if same else f"{label} is {show(got)}, expected {show(want)}"


def _array_difference(got: Any, want: Any, label: str) -> str | None:
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{label} is {got.dtype} {got.shape}, expected {want.dtype} {want.shape}"
    if got.dtype.hasobject:
        return difference(got.tolist(), want.tolist(), label)
    if got.dtype == np.longdouble:  # which has 80 bits in 16 bytes; the rest is padding
        same = bool(np.array_equal(got, want, equal_nan=True))
    else:
        same = got.tobytes() == want.tobytes()
    if same:
        return None
    where = [tuple(map(int, at)) for at in np.argwhere(got != want)[:1]]
    return f"{label} differs at {where[0] if where else 'NaNs or signs of zero'}: {show(got)}, expected {show(want)}"


def show(value: Any) -> str:
    """Return a short, one-line representation of a value for messages."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return f"{text} ({type(value).__name__})" if not isinstance(value, np.ndarray) else text


def record_digest(record: Any) -> str:
    """Return 16 hexadecimal digits, the same in every process for equal records."""
    state = hashlib.blake2b(digest_size=8)
    for part in _canonical(record):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def _canonical(value: Any) -> Iterator[bytes]:
    size = len(cast("Any", value)) if isinstance(value, (list, tuple, Mapping)) else 0  # tells [[1], 2] from [[1, 2]]
    yield f"{type(value).__name__} {size}".encode()
    if isinstance(array := as_array(value), np.ndarray):
        yield f"{array.dtype} {array.shape}".encode()
        has_bytes = not array.dtype.hasobject and array.dtype != np.longdouble  # see `_array_difference`
        yield array.tobytes() if has_bytes else repr(array.tolist()).encode()
    elif isinstance(value, Mapping):
        for name, item in sorted(cast("Mapping[Any, Any]", value).items(), key=lambda pair: str(pair[0])):
            yield str(name).encode()
            yield from _canonical(item)
    elif isinstance(value, (list, tuple, BytesColumn)):
        for item in cast("Sequence[Any]", value):
            yield from _canonical(item)
    else:
        yield bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else repr(value).encode()


def arrays_in(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Yield all arrays in a record or a batch."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from arrays_in(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            yield from arrays_in(item)


def overwrite(value: Any) -> int:
    """Change every byte of every array and bytearray in `value`, but no objects; return their number."""
    count = 0
    for array in arrays_in(value):
        if array.nbytes and not array.dtype.hasobject:
            inverted = np.invert(np.frombuffer(array.tobytes(), np.uint8))  # a copy, because of strides
            array[...] = inverted.view(array.dtype).reshape(array.shape)
            count += 1
    if isinstance(value, bytearray) and value:
        value[:] = bytes(255 - byte for byte in value)
        count += 1
    return count
