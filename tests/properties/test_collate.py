"""The shortcuts of collation equal the long way."""

from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_files import same as equal

from dataload._util.arrays import split_records, stack_alike
from dataload.collate import Collate, default_collate, scatter_columns
from dataload.errors import ConfigError
from dataload.testing.strategies import arrays


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


class Masked(np.ndarray):
    """A class of arrays of the user's own."""


DTYPES = ["uint8", "float32", "int64", "bool", "complex64", ">i4", "U3", "M8[s]", "m8[ms]", "i1,f4"]
LAYOUTS = {
    "as it is": lambda array: array,
    "fortran": np.asfortranarray,
    "reversed": lambda array: array[..., ::-1] if array.ndim else array,
    "own class": lambda array: array.view(Masked),
    "scalar": lambda array: array.ravel()[0] if array.size else array,
}


@st.composite
def rows_to_stack(draw):
    """Arrays that are alike, or of which one differs in shape, dtype, class or layout."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))

    def value(row, dtype=dtype, shape=shape, layout="as it is"):
        numbers = np.arange(row, row + int(np.prod(shape))).reshape(shape)
        return LAYOUTS[layout](numbers.astype(dtype))

    common = draw(st.sampled_from([*LAYOUTS]))
    values = [value(row, layout=common) for row in range(draw(st.integers(1, 4)))]
    if draw(st.booleans()):
        other_shape = draw(st.sampled_from([shape, (*shape, 1), (1, *shape), shape[::-1], shape[1:]]))
        other = value(9, draw(st.sampled_from([dtype, *DTYPES])), other_shape, draw(st.sampled_from([*LAYOUTS])))
        values.insert(draw(st.integers(0, len(values))), other)
    return values


def stack_slowly(values):
    """What stacking means."""
    arrays = [np.asarray(value) for value in values]
    if len({(array.shape, array.dtype) for array in arrays}) > 1:
        return "cannot stack"
    return np.stack(arrays)


@given(rows_to_stack())
def test_stacking_into_pooled_memory_equals_numpys(values):
    want, fast = stack_slowly(values), stack_alike(values)
    plain = all(type(v) is np.ndarray and v.dtype.str[1:] in ("u1", "f4", "i8", "b1", "c8") for v in values)
    contiguous = plain and values[0].flags.c_contiguous
    if fast is None:
        assert isinstance(want, str) or not contiguous
    else:
        assert (type(fast), fast.dtype, fast.shape) == (np.ndarray, want.dtype, want.shape)
        assert np.array_equal(fast, want)
        assert not any(np.may_share_memory(fast, value) for value in values)
    if isinstance(values[0], str):
        assert default_collate(values) == values
    elif isinstance(want, str):
        with pytest.raises(ConfigError, match=want):
            default_collate(values)
    else:
        equal(default_collate(values), want)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=4), st.booleans())
def test_dicts_collate_as_other_mappings_do(samples, same):
    if same:
        samples = [{**samples[0], **{key: 7 for key in sample if key in samples[0]}} for sample in samples]
    outcomes = []
    for each in (samples, [MappingProxyType(sample) for sample in samples]):
        try:
            outcomes.append(default_collate(each))
        except ConfigError as error:
            outcomes.append(str(error))
    equal(*outcomes)


def test_large_batches_are_made_in_memory_that_is_used_again():
    samples = [{"x": np.full((64, 64), row, np.float32)} for row in range(32)]
    batch = default_collate(samples)["x"]
    address = batch.ctypes.data
    assert (batch[:, 0, 0] == np.arange(32)).all()
    del batch
    again = default_collate(samples)["x"]
    assert again.ctypes.data == address


@given(rows=st.integers(0, 4), shape=st.lists(st.integers(0, 2), max_size=2), names=st.sets(st.sampled_from("abc")))
def test_records_of_columns_collate_to_them(rows, shape, names):
    columns = {name: np.arange(rows * int(np.prod(shape))).reshape(rows, *shape) for name in sorted(names)}
    records = split_records({**columns, "text": [f"{row}" for row in range(rows)]}, rows)
    assert len(records) == rows
    assert all(isinstance(record[name], np.ndarray) for record in records for name in columns)
    if rows:
        equal(default_collate(records), {**columns, "text": [f"{row}" for row in range(rows)]})
