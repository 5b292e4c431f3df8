"""Which arrays are alike, and what rows of columns are. That they stack as numpy does is a property of collation."""

import numpy as np
import pytest

from dataload._util.arrays import split_rows, stack_alike

F32 = np.float32


@pytest.mark.parametrize(
    "values",
    [
        [np.ones(3, F32), np.zeros(3, F32)],
        [np.ones((2, 3)), np.asfortranarray(np.zeros((2, 3)))],
        [np.ones((0, 2)), np.ones((0, 2))],
        [np.array(1), np.array(2)],
        [F32(1), F32(2)],
        [np.bool_(True), np.bool_(False)],
        [np.arange(3, dtype="l"), np.arange(3, dtype="q")],
    ],
)
def test_alike(values):
    stacked = stack_alike(values)
    assert (stacked.dtype, stacked.tolist()) == (np.stack(values).dtype, np.stack(values).tolist())


NOT_ALIKE = [
    *([np.ones(3), np.zeros(3, F32)], [np.ones(3, np.int64), np.zeros(3, np.int8)]),  # numpy would convert
    *([np.ones(3), np.ones(2)], [np.ones((2, 3)), np.ones((2, 4))]),
    [np.ones((2, 3)), np.ones((3, 3)), np.ones((1, 3))],  # as many values as if they were alike
    *([np.ones(2), np.ones((2, 1))], [np.ones(1), np.array(1.0)], [np.array(1.0), np.ones(1)]),
    *([np.array(1.0), np.array(1.0, F32)], [F32(1), np.float64(1)], [F32(1), np.array(1, F32)]),
    *([np.timedelta64(1, "s"), np.timedelta64(1, "ms")], [np.ones(2, ">f4")] * 2, [np.array([None])] * 2),
    *([np.array(["a"])] * 2, [np.ma.masked_array([1, 2])] * 2, [np.asfortranarray(np.ones((2, 3)))] * 2),
    *(["a", "b"], [[1], [2]]),
]


@pytest.mark.parametrize("values", NOT_ALIKE, ids=repr)
def test_not_alike(values):
    assert stack_alike(values) is None


def test_rows_are_arrays_or_items():
    assert [type(row) for row in split_rows(np.arange(2))] == [np.ndarray] * 2
    assert split_rows(["a", "b"]) == ["a", "b"]
    column = np.arange(6).reshape(3, 2)
    split_rows(column)[1][:] = 7
    assert column.tolist() == [[0, 1], [7, 7], [4, 5]]
