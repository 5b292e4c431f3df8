"""The bytes that Arrow values take once expanded, computed beforehand: views may stand for any number of bytes."""

import math
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from dataload._util.arrays import MOST_BYTES, check_size
from dataload.codecs.arrow import is_bytes, is_list, is_text, numbers_of, pa_module, without_views
from dataload.types import Int64Array

OBJECT_BYTES = 64
"""About what an object of Python takes, and the reference to it."""

Sizes: TypeAlias = int | Int64Array
"""Bytes of each value; one number if all take the same."""


@lru_cache(maxsize=4096)
def least_bytes(kind: Any, *, packed: bool = False, each: int = OBJECT_BYTES) -> int:
    """Return the bytes of an Arrow value with empty lists; `packed` numbers are numpy's, other objects take `each`."""
    types, numbers = pa_module().types, numbers_of(kind)
    if numbers is not None and (packed or not each):
        return max(1, numbers.dtype.itemsize * math.prod(numbers.shape))
    kind = getattr(kind, "storage_type", kind)
    size = max(1, each)
    if types.is_struct(kind):
        size += sum(least_bytes(field.type, packed=packed, each=each) + each for field in kind)
    elif types.is_fixed_size_list(kind):
        size += kind.list_size * least_bytes(kind.value_type, each=each)
    elif types.is_fixed_size_binary(kind):
        size += kind.byte_width
    return min(size, MOST_BYTES)


def expansion(array: Any, *, packed: bool = True, each: int = OBJECT_BYTES) -> Sizes:
    """Return the bytes of each value of an array in a record; for the arguments, see `least_bytes`."""
    types, kind = pa_module().types, array.type
    array = getattr(array, "storage", array)
    least, storage = least_bytes(kind, packed=packed, each=each), array.type
    if types.is_dictionary(storage):
        return picked(expansion(array.dictionary, packed=packed, each=each), array.indices)
    if types.is_run_end_encoded(storage):
        return _greatest(expansion(array.values, packed=False, each=each))
    if types.is_union(storage):
        return _clip(
            least, [_greatest(expansion(array.field(n), packed=False, each=each)) for n in range(len(storage))]
        )
    if types.is_struct(storage):
        fields = [array.field(number) for number in range(len(storage))]
        fixed = sum(least_bytes(field.type, packed=packed, each=each) for field in fields)
        return _clip(least - fixed, [expansion(field, packed=packed, each=each) for field in fields])
    if types.is_fixed_size_list(storage) and not (packed and numbers_of(kind) is not None):
        inner = expansion(array.values, packed=False, each=each)
        if isinstance(inner, int):
            return min(max(1, each) + storage.list_size * inner, MOST_BYTES)
        starts = (np.arange(len(array)) + array.offset) * storage.list_size
        return _clip(max(1, each), [_sums(inner, starts, starts + storage.list_size)])
    if is_list(storage) or types.is_map(storage) or _is_list_view(storage):
        packed = packed and not types.is_map(storage) and numbers_of(storage.value_type) is not None
        inner = expansion(array.values, packed=packed, each=each)
        starts = array.offsets.to_numpy().astype(np.int64)
        starts, stops = (
            (starts, starts + array.sizes.to_numpy()) if _is_list_view(storage) else (starts[:-1], starts[1:])
        )
        return _clip(least, [_sums(inner, starts, stops)])
    if (is_text(storage) or is_bytes(storage)) and not types.is_fixed_size_binary(storage):
        return _lengths(array) + least
    return least


def picked(sizes: Sizes, indices: Any) -> Sizes:
    """Return the bytes of indices into a dictionary whose value `sizes` are known."""
    return sizes if isinstance(sizes, int) else sizes[indices.fill_null(0).to_numpy()] if len(sizes) else 0


def check_views(array: Any, limit: int, what: str, path: str) -> None:
    """Raise if views in an array or its dictionary stand for more than `limit` bytes of text."""
    array = getattr(array, "dictionary", array)
    if without_views(array.type) != array.type:
        check_size(total_bytes(array), limit, what, path=path)


def total_bytes(array: Any) -> int:
    sizes = expansion(array, each=0)
    return len(array) * sizes if isinstance(sizes, int) else int(sizes.sum(dtype=np.float64))


def longest_in_dictionaries(array: Any) -> int:
    """Return the bytes of the longest value in the dictionaries of an array and its items."""
    types = pa_module().types
    if types.is_dictionary(array.type):
        return _greatest(expansion(array.dictionary, each=0))
    if types.is_struct(array.type):
        return max((longest_in_dictionaries(array.field(n)) for n in range(len(array.type))), default=0)
    return longest_in_dictionaries(array.values) if hasattr(array, "values") else 0


def _is_list_view(kind: Any) -> bool:
    types = pa_module().types
    return types.is_list_view(kind) or types.is_large_list_view(kind)


def _lengths(array: Any) -> Int64Array:
    kind, pa = array.type, pa_module()
    data, count = array.buffers()[1], len(array)
    if data is None or not count:
        return np.zeros(count, np.int64)
    if kind in (pa.string_view(), pa.binary_view()):
        return np.frombuffer(data, "<i4", 4 * count, 16 * array.offset)[::4].astype(np.int64)
    size = 8 if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) else 4
    return np.diff(np.frombuffer(data, f"<i{size}", count + 1, size * array.offset)).astype(np.int64)


def _sums(inner: Sizes, starts: Int64Array, stops: Int64Array) -> Int64Array:
    if isinstance(inner, int):
        return np.minimum(stops - starts, MOST_BYTES // max(1, inner)) * inner
    ends = np.zeros(len(inner) + 1, np.int64)
    np.cumsum(np.minimum(inner, (1 << 62) // max(1, len(inner))), out=ends[1:])
    return ends[stops] - ends[starts]


def _clip(first: Sizes, others: list[Sizes]) -> Sizes:
    total = first
    for sizes in others:
        total = total + sizes
        total = min(total, MOST_BYTES) if isinstance(total, int) else np.minimum(total, MOST_BYTES)
    return total


def _greatest(sizes: Sizes) -> int:
    return sizes if isinstance(sizes, int) else int(sizes.max(initial=0))
