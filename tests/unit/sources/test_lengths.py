"""record_lengths: how long the records are, counted by reading them."""

import numpy as np
import pytest

from dataload.errors import ConfigError
from dataload.sources.concat import ConcatSource
from dataload.sources.memory import MemorySource
from dataload.sources.sequences import record_lengths

TEXT = ["", "a", "äöü"] * 200  # several blocks


def test_arrays_count_their_first_axis_and_text_its_characters():
    records = [
        {"x": np.zeros((i % 7, 2)), "text": text, "data": text.encode(), "label": i} for i, text in enumerate(TEXT)
    ]
    source = MemorySource(records)
    assert record_lengths(source, "x").tolist() == [i % 7 for i in range(600)]
    assert record_lengths(source, "text").tolist() == [0, 1, 3] * 200
    assert record_lengths(source, "data").tolist() == [0, 1, 6] * 200
    assert record_lengths(source, "x").dtype == np.int64


def test_the_parts_of_a_source_follow_one_another():
    parts = [MemorySource([{"x": np.zeros(n)} for n in lengths]) for lengths in ([3, 1], [], [4])]
    assert record_lengths(ConcatSource(parts), "x").tolist() == [3, 1, 4]
    assert record_lengths(parts[1], "x").shape == (0,)


@pytest.mark.parametrize(
    ("records", "match"),
    [
        ([{"y": b"1"}], "a record has no field 'x': Known: y"),
        ([b"abc"], "records are bytes, not fields: choose a codec"),
        ([{"x": b""}, {"x": 3}], "field 'x' of record 1 has no length: expected an array, bytes or text, got 3"),
        ([{"x": np.array(3.5)}], r"field 'x' of record 0 has no length: .*, got array\(3\.5\)"),
    ],
)
def test_records_without_a_length(records, match):
    with pytest.raises(ConfigError, match=match):
        record_lengths(MemorySource(records), "x")
