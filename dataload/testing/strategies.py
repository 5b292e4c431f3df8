"""Hypothesis strategies for records and requests."""

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dataload.testing.cases import SourceTraits

_MAX_RECORDS = 12
_NAMES = ("a", "b1", "image", "x_y")


def arrays(dtype: str, *, min_ndim: int = 0, empty: bool = True) -> st.SearchStrategy[Any]:
    """Generate arrays of one dtype with any bits and up to three dimensions; `empty` allows extents of 0."""
    item = np.dtype(dtype)

    def fill(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
        size = int(np.prod(shape, dtype=np.int64)) * item.itemsize
        return st.binary(min_size=size, max_size=size).map(lambda data: _array(data, item, shape))

    extents = st.integers(0 if empty else 1, 4)
    return st.lists(extents, min_size=min_ndim, max_size=3).map(tuple).flatmap(fill)


def _array(data: bytes, item: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    if item == np.bool_:
        data = bytes(byte & 1 for byte in data)  # only 0 and 1 are valid bools
    return np.frombuffer(data, item).reshape(shape).copy()


def records_for(traits: SourceTraits) -> st.SearchStrategy[list[Any]]:
    """Generate lists of records for these traits: the same fields, types and dtypes; shapes and lengths vary."""
    smallest = 0 if traits.empty_values else 1
    fewest = 0 if traits.empty_dataset else 1
    record: st.SearchStrategy[Any]
    if traits.record_type is bytes:
        record = st.binary(min_size=smallest, max_size=300)
        return st.lists(record, min_size=max(1, fewest), max_size=_MAX_RECORDS)
    kinds: list[Any] = [kind for kind in traits.value_types if kind is not np.ndarray]
    kinds += traits.dtypes if np.ndarray in traits.value_types else ()
    fields = st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(kinds), min_size=1, max_size=len(_NAMES))
    return fields.flatmap(
        lambda kinds: st.lists(
            st.fixed_dictionaries({name: _values(kind, smallest) for name, kind in kinds.items()}),
            min_size=max(1, fewest),
            max_size=_MAX_RECORDS,
        )
    )


def _values(kind: Any, smallest: int) -> st.SearchStrategy[Any]:
    if kind is bytes:
        return st.binary(min_size=smallest, max_size=40)
    if kind is str:
        return st.text(st.characters(codec="utf-8"), min_size=smallest, max_size=20)
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if kind is float:
        # A text format preserves NaN, but not its sign or payload.
        return st.floats().map(lambda value: math.nan if math.isnan(value) else value)
    return arrays(kind, empty=smallest == 0)


def requests_for(length: int, *, negative: bool = True) -> st.SearchStrategy[list[int]]:
    """Generate requests for a source of `length` records: one or more indices in any order, with repetitions."""
    return st.lists(st.integers(-length if negative else 0, length - 1), min_size=1, max_size=3 * length)
