import numpy as np
import pytest

from dataload.errors import ConfigError
from dataload.sources.concat import ConcatSource
from dataload.sources.memory import MemorySource
from dataload.sources.range import RangeSource


def test_parts_in_turn_of_any_format():
    source = ConcatSource([RangeSource(2), RangeSource(0), RangeSource(13, start=10)[::-1]])
    assert [record["index"] for record in source] == [0, 1, 12, 11, 10]
    assert (len(source.sources), repr(source)) == (3, "ConcatSource(3 sources)")
    source = ConcatSource([RangeSource(2), MemorySource({"index": np.array([7, 8])}), MemorySource([{"index": 9}])])
    assert [int(record["index"]) for record in source] == [0, 1, 7, 8, 9]
    assert source.read_batch([4, 0, 2])["index"].tolist() == [9, 0, 7]
    assert source.shard_lengths == (2, 2, 1)
    assert source.fields == RangeSource(1).fields


def test_parts_with_other_fields_are_refused_when_one_batch_needs_both():
    source = ConcatSource([MemorySource([{"x": 1}]), MemorySource([{"y": 1}])])
    assert source.read_batch([1])["y"].tolist() == [1]
    with pytest.raises(ConfigError, match=r"rows 1 and 0 have different fields \(x, y only in one\)"):
        source.read_batch([1, 0])


def test_fingerprint_is_of_the_parts_in_order():
    one, two = RangeSource(3), RangeSource(4)
    assert ConcatSource([one, two]).fingerprint() == ConcatSource([RangeSource(3), RangeSource(4)]).fingerprint()
    assert ConcatSource([one, two]).fingerprint() != ConcatSource([two, one]).fingerprint()
    assert ConcatSource([one]).fingerprint() != one.fingerprint()
