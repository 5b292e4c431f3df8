"""Statistics of fields, beside a slow model, and however the records are divided."""

import json
from collections import Counter
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis.extra import numpy as hnp

from dataload.catalog import statistics
from dataload.catalog.statistics import FieldStatistics, merge_fields
from dataload.convert import measuring
from dataload.convert.measuring import exact_sum, measure
from dataload.sources.memory import MemorySource

NUMBERS = ("u1", "i2", "i4", "i8", "u8", "f2", "f4", "f8", "?", ">i4")
ARRAYS = st.sampled_from(NUMBERS).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
)
VALUES = st.one_of(
    ARRAYS,
    st.text(max_size=3),
    st.binary(max_size=3),
    st.integers(-5, 5),
    st.floats(),
    st.sampled_from(["x" * 64, "x" * 65, b"\xff", [1, 2], (1, 2.5), {"a": 1}]),
)
RECORDS = st.lists(st.fixed_dictionaries({"x": VALUES}, optional={"y": VALUES}), min_size=1, max_size=12)


def model(values):
    """Compute statistics one value, and one number, at a time."""
    plain = [np.asarray(v) if isinstance(v, (bool, int, float)) else v for v in values]
    arrays = [v for v in plain if isinstance(v, np.ndarray)]
    shapes = [
        v.shape if isinstance(v, np.ndarray) else None if isinstance(v, (list, tuple, dict)) else () for v in plain
    ]
    sizes = [
        None if isinstance(v, (tuple, dict)) or (np.ndim(v) == 0 and isinstance(v, np.ndarray)) else len(v)
        for v in plain
    ]
    numbers = [number.item() for array in arrays for number in array.ravel().astype(array.dtype.newbyteorder("="))]
    finite = [Fraction(number) for number in numbers if np.isfinite(number)]
    return {
        "records": len(plain),
        "dtypes": Counter(v.dtype.name if isinstance(v, np.ndarray) else type(v).__name__ for v in plain),
        "shapes": None if None in shapes else Counter(shapes),
        "axes": ends(shapes) if None not in shapes and len({*map(len, shapes)}) == 1 else None,
        "length": None if None in sizes else (min(sizes), max(sizes), sum(sizes)),
        "labels": labels(plain),
        "nan": sum(number != number for number in numbers),
        "infinite": sum(number in (np.inf, -np.inf) for number in numbers),
        "finite": len(finite),
        "minimum": min(finite, default=None),
        "maximum": max(finite, default=None),
        "total": sum(finite, Fraction(0)),
    }


def ends(shapes):
    return tuple((min(extents), max(extents)) for extents in zip(*shapes, strict=True))


def labels(values):
    found = Counter()
    for value in values:
        if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biu":
            found[int(value.item())] += 1
        elif isinstance(value, bytes) and len(value) <= 64:
            try:
                found[value.decode()] += 1
            except UnicodeDecodeError:
                return None
        elif isinstance(value, str) and len(value) <= 64:
            found[value] += 1
        else:
            return None
    return found


def found_by(field):
    numbers = field.numbers
    names = ("nan", "infinite", "finite", "minimum", "maximum", "total")
    own = {name: getattr(field, name) for name in ("records", "dtypes", "shapes", "axes", "length", "labels")}
    empty = {"nan": 0, "infinite": 0, "finite": 0, "minimum": None, "maximum": None, "total": 0}
    return {**own, **(empty if numbers is None else {name: getattr(numbers, name) for name in names})}


@given(RECORDS, st.data())
@example([{"x": 1.5}, {"x": 1}, {"x": 2.5}], None)
@example([{"x": (1, 2.5)}] * 3, None)
@example([{"x": np.array([2.0**60, 1.0, -(2.0**60)])}, {"x": np.array([1e300, 5e-324, -1e300])}], None)
def test_any_division_gives_what_a_slow_model_gives(records, data):
    whole = measure(MemorySource(records))
    for name, field in whole.fields.items():
        expected = model([record[name] for record in records if name in record])
        assert found_by(field) == expected
        if field.length is not None and len(records) == field.records:
            lengths = [len(record[name]) for record in records]
            assert whole.lengths[name].tolist() == lengths
            assert whole.lengths[name].dtype == np.min_scalar_type(max(lengths))
        assert FieldStatistics.parse(json.loads(json.dumps(field.to_json())), name) == field
    cuts = [1] if data is None else sorted(data.draw(st.sets(st.integers(0, len(records)))))
    parts = [records[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(records)], strict=True)]
    merged = {}
    for part in parts:
        merged = merge_fields(merged, measure(MemorySource(part)).fields if part else {})
    assert json.dumps({n: f.to_json() for n, f in merged.items()}) == json.dumps(
        {n: f.to_json() for n, f in whole.fields.items()}
    )


@given(hnp.arrays(np.float64, st.integers(0, 50), elements=st.floats(allow_nan=False, allow_infinity=False)))
def test_a_sum_of_floats_is_not_rounded(values):
    assert exact_sum(values) == sum(map(Fraction, values.tolist()), Fraction(0))


@given(hnp.arrays(np.float64, st.integers(1, 50), elements=st.floats(-1e6, 1e6)), st.floats(-1e12, 1e12))
def test_the_deviation_does_not_suffer_from_a_large_mean(values, shift):
    shifted = values + shift
    exact = [Fraction(value) for value in shifted.tolist()]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / len(exact)
    numbers = measure(MemorySource([{"x": shifted}])).fields["x"].numbers
    assert numbers.mean == float(mean)
    assert abs(numbers.std - float(variance) ** 0.5) <= 1e-9 * max(1e-3, float(variance) ** 0.5)


def test_numbers_whose_squares_no_float_holds_have_no_deviation():
    for largest, known in ((2.0**499, True), (2.0**500, False), (-(2.0**500), False)):
        numbers = measure(MemorySource([{"x": np.array([0.0, largest])}])).fields["x"].numbers
        assert (numbers.std is not None) == known
        assert not known or numbers.std == abs(largest) / 2


def test_tensors_are_measured_as_arrays():
    torch = pytest.importorskip("torch")
    arrays = [{"x": np.full(shape, 2.5), "y": np.int16(shape)} for shape in (1, 2, 2)]
    tensors = [{"x": torch.from_numpy(each["x"]), "y": torch.tensor(each["y"])} for each in arrays]
    assert measure(MemorySource(tensors)).fields == measure(MemorySource(arrays)).fields
    assert measure(MemorySource(tensors)).lengths["x"].tolist() == [1, 2, 2]


def test_few_labels_and_shapes_are_counted(monkeypatch):
    for module in (measuring, statistics):
        monkeypatch.setattr(module, "MOST_LABELS", 2)
        monkeypatch.setattr(module, "MOST_SHAPES", 2)

    def found(*values):
        field = measure(MemorySource([{"x": value} for value in values])).fields["x"]
        return field.labels, field.shapes

    assert [found(*values)[0] for values in ("aab", "abc")] == [{"a": 2, "b": 1}, None]
    numbers = np.array([1, 1, 2]), np.array([1, 2, 3])  # a block of one record, and then one of two
    assert [measure(MemorySource({"x": column})).fields["x"].labels for column in numbers] == [{1: 2, 2: 1}, None]
    ones = [np.ones(length) for length in (1, 2, 2, 3)]
    assert [found(*ones[:3])[1], found(*ones)[1]] == [{(1,): 1, (2,): 2}, None]
    assert [found(*ones[:2], ones[0])[1], found(*ones[:2], ones[3])[1]] == [{(1,): 2, (2,): 1}, None]


@pytest.mark.parametrize(
    ("size", "count", "blocks"), [(1, 1000, [1, 8, 64, 512, 415]), (1 << 18, 40, [1, 8, 31]), (1 << 20, 20, [1, 8, 11])]
)
def test_blocks_grow_until_they_have_some_megabytes(size, count, blocks):
    class Noted(MemorySource):
        def _read(self, indices):
            found.append(len(indices))
            return super()._read(indices)

        _read_columns = None

    found = []
    value = np.zeros(size, np.uint8)
    source = Noted([{"x": value.view()} for _ in range(count)])
    assert measure(source).fields["x"].records == count
    assert found == blocks
