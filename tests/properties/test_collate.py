"""The shortcuts of collation equal the long way."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataload.collate import Collate, default_collate, scatter_columns
from dataload.testing.compare import difference
from dataload.testing.strategies import arrays


def equal(got, want):
    found = difference(got, want, "batch")
    assert found is None, found


@given(data=st.data(), rows=st.integers(1, 12), dtype=st.sampled_from(["uint8", "float32", "int64", "bool"]))
def test_scatter_columns_equals_collating_the_whole(data, rows, dtype):
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    samples = [
        {"x": np.full(shape, row % 2, dtype), "n": np.array(row), "t": f"row {row}", "b": bytes([row])}
        for row in range(rows)
    ]
    order = data.draw(st.permutations(range(rows)))
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=4)))
    parts = [part for part in np.split(np.array(order, np.int64), cuts) if len(part)]
    pieces = [(part, default_collate([samples[row] for row in part])) for part in parts]
    equal(scatter_columns(iter(pieces), rows), default_collate(samples))


@given(values=st.lists(arrays("int64", min_ndim=2), min_size=1, max_size=6), fill=st.integers(-5, 5))
def test_pad_equals_copying_element_by_element(values, fill):
    ndim = values[0].ndim
    alike = [value for value in values if value.ndim == ndim]
    got = Collate({"x": "pad"}, pad_value=fill)([{"x": value} for value in alike])
    extents = [max(value.shape[axis] for value in alike) for axis in range(ndim)]
    assert got["x"].shape == (len(alike), *extents)
    for row, value in enumerate(alike):
        for place in np.ndindex(*extents):
            inside = all(at < extent for at, extent in zip(place, value.shape, strict=True))
            assert got["x"][(row, *place)] == (value[place] if inside else fill)
    assert got["x_length"].tolist() == [len(value) for value in alike]


@given(st.lists(arrays("float32", min_ndim=1), min_size=1, max_size=6))
def test_ragged_gives_back_what_went_in(values):
    alike = [value for value in values if value.shape[1:] == values[0].shape[1:]]
    column = Collate({"x": "ragged"})([{"x": value} for value in alike])["x"]
    assert column.offsets.dtype == np.int64
    for row, value in enumerate(alike):
        equal(column.values[column.offsets[row] : column.offsets[row + 1]], value)
