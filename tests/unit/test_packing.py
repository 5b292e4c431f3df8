"""Pack: records laid out in rows, with segment ids and positions."""

import numpy as np
import pytest

from dataload import ConfigError, Pack
from dataload.collate import Packing


def packing(rows, starts, lengths, shape):
    return Packing(*(np.array(values, np.int64) for values in (rows, starts, lengths)), shape)


def test_records_stand_in_their_places():
    samples = [{"t": np.array([1, 2, 3])}, {"t": np.array([4])}, {"t": np.array([5, 6])}]
    batch = Pack(pad_value=-1)(samples, packing([0, 0, 2], [0, 3, 0], [3, 1, 2], (3, 5)))
    assert batch["t"].tolist() == [[1, 2, 3, 4, -1], [-1] * 5, [5, 6, -1, -1, -1]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 0], [0] * 5, [1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0], [0] * 5, [0, 1, 0, 0, 0]]
    assert batch["t"].dtype == np.int64
    assert batch["segment_ids"].dtype == batch["position_ids"].dtype == np.int32


def test_records_may_be_arrays_and_have_more_axes():
    samples = [np.ones((2, 3), np.float32), np.full((1, 3), 2, np.float32)]
    batch = Pack()(samples, packing([0, 0], [0, 2], [2, 1], (1, 4)))
    assert batch["data"].shape == (1, 4, 3)
    assert batch["data"].dtype == np.float32
    assert batch["data"][0, :, 0].tolist() == [1, 1, 2, 0]


def test_what_does_not_fit_is_cut_off():
    batch = Pack(positions="positions")([np.arange(9)], packing([0], [0], [9], (1, 4)))  # the name of version 0.1
    assert batch["data"].tolist() == [[0, 1, 2, 3]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3]]


def test_records_of_no_length_take_no_place():
    samples = [np.arange(0), np.array([7, 8]), np.arange(0), np.array([9])]
    batch = Pack()(samples, packing([0, 0, 0, 0], [0, 0, 2, 2], [0, 2, 0, 1], (1, 4)))
    assert batch["data"].tolist() == [[7, 8, 9, 0]]
    assert batch["segment_ids"].tolist() == [[2, 2, 4, 0]]


@pytest.mark.parametrize("rows", [0, 2])
def test_no_records_give_the_fields_of_any_other_batch(rows):
    batch = Pack(pad_value=7)([{"t": np.arange(3, dtype=np.uint16)}], packing([], [], [], (rows, 4)))
    assert batch["t"].shape == batch["segment_ids"].shape == (rows, 4)
    assert batch["t"].dtype == np.uint16
    assert (batch["t"] == 7).all()


@pytest.mark.parametrize(
    ("samples", "match"),
    [
        (
            [np.arange(2), np.arange(2)],
            r"cannot pack field 'data': int64 \(2,\) in record 1 of the step, expected int64 \(3,\)",
        ),
        ([np.arange(2), np.arange(3.0)], r"float64 \(3,\) in record 1 of the step, expected int64 \(3,\)"),
        ([{"x": np.arange(2), "y": 1}, {"x": np.arange(3), "y": 1}], r"field 'y': int64 \(\) in record 0"),
        (
            [{"position_ids": np.arange(2)}, {"position_ids": np.arange(3)}],
            "packing adds 'position_ids', and the samples",
        ),
        ([{"segment_ids": np.arange(2)}, {"segment_ids": np.arange(3)}], "packing adds 'segment_ids'"),
    ],
)
def test_what_cannot_be_packed_is_named(samples, match):
    with pytest.raises(ConfigError, match=match):
        Pack()(samples, packing([0, 0], [0, 2], [2, 3], (1, 8)))


def test_pad_values_of_packed_rows_by_field():
    samples = [{"tokens": np.arange(3), "labels": np.arange(3, dtype=np.int16)}]
    rows = packing([0], [0], [3], (1, 5))
    batch = Pack({"labels": -100})(samples, rows)
    assert batch["labels"].tolist() == [[0, 1, 2, -100, -100]]
    assert batch["tokens"].tolist() == [[0, 1, 2, 0, 0]]
    with pytest.warns(UserWarning, match="padding fills the integer fields labels, tokens with 0"):
        Pack()(samples, rows)
    with pytest.raises(
        ConfigError, match="pad_value names 'lables', which is not a padded field: did you mean 'labels'"
    ):
        Pack({"lables": -100})(samples, rows)
    with pytest.raises(ConfigError, match="pad_value of field 'labels' is 40000, but its dtype int16"):
        Pack(40000)([{"labels": np.arange(3, dtype=np.int16)}], rows)
