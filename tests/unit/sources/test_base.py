"""The base of sources, slices, concatenations and ranges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload.errors import ClosedSourceError, ConfigError
from dataload.sources.base import SliceSource, Source, select_fields, spec_of
from dataload.sources.concat import ConcatSource
from dataload.sources.memory import MemorySource
from dataload.sources.range import RangeSource
from dataload.types import FieldSpec


class Letters(Source):
    """The least that a backend has to write."""

    text = "abcdefghij"
    closed = False

    def __len__(self):
        return len(self.text)

    def _read(self, indices):
        if self.closed:
            raise ClosedSourceError("closed")
        return [{"letter": self.text[index], "n": int(index)} for index in indices]

    def fingerprint(self):
        return "letters"

    def close(self):
        self.closed = True

    def __repr__(self):
        return "Letters()"


SOURCE = Letters()
RECORDS = SOURCE.read(range(10))

bounds = st.one_of(st.none(), st.integers(-14, 14))


@given(start=bounds, stop=bounds, step=st.one_of(st.none(), st.integers(-4, 4).filter(bool)))
def test_a_slice_is_the_slice_of_a_list(start, stop, step):
    part, expected = SOURCE[start:stop:step], RECORDS[start:stop:step]
    assert isinstance(part, SliceSource)
    assert len(part) == len(expected)
    assert list(part) == expected
    assert [part[index] for index in range(len(part))] == expected
    assert part.read(range(len(part))) == expected
    assert sum(part.shard_lengths) == len(part)
    assert min(part.shard_lengths) >= 0


@given(data=st.data())
def test_a_slice_of_a_slice_is_the_slice_of_a_list(data):
    part, expected = SOURCE, RECORDS
    for _ in range(3):
        where = data.draw(st.slices(12))
        part, expected = part[where], expected[where]
    assert list(part) == expected


def test_a_slice():
    batch = SOURCE[2:9:2].read_batch([3, 0, -1], fields=["n"])
    assert {name: column.tolist() for name, column in batch.items()} == {"n": [8, 2, 8]}
    for index, read in ((3, SOURCE[2:5].__getitem__), (-4, lambda index: SOURCE[2:5].read([0, index]))):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 3 records"):
            read(index)
    for part, text in (
        (SOURCE[2:5], "Letters()[2:5]"), (SOURCE[::-2], "Letters()[9:-1:-2]"), (SOURCE[1:][:3], "Letters()[1:10][0:3]"),
    ):  # fmt: skip
        assert repr(part) == text
    parts = [SOURCE[:], SOURCE[1:], SOURCE[:-1], SOURCE[::2], SOURCE[1:][1:]]
    assert len({part.fingerprint() for part in [*parts, SOURCE]}) == len(parts) + 1
    assert SOURCE[1:5].fingerprint() == Letters()[1:5].fingerprint()
    assert MemorySource({"x": np.zeros((4, 2))})[1:3].fields == {"x": FieldSpec("float64", (2,))}
    source = Letters()
    with source[2:4]:
        pass
    with pytest.raises(ClosedSourceError):
        source[0]


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), start=st.integers(0, 12), stop=st.integers(0, 12))
def test_shards_of_a_slice_equal_counting(lengths, start, stop):
    source = ConcatSource([RangeSource(length) for length in lengths])
    shard_of = [shard for shard, length in enumerate(lengths) for _ in range(length)][start:stop]
    expected = tuple(shard_of.count(shard) for shard in sorted(set(shard_of))) or (0,)
    assert source[start:stop].shard_lengths == expected
    for step in (2, -1):  # is one shard
        assert source[::step].shard_lengths == (len(range(0, len(source), abs(step))),)


def test_iteration_reads_in_blocks():
    asked = []

    class Recorded(RangeSource):
        def _read(self, indices):
            asked.append(len(indices))
            return super()._read(indices)

    assert [record["index"] for record in Recorded(600)] == list(range(600))
    assert max(asked) < 600
    assert len(asked) < 10


def test_defaults():
    assert (SOURCE.fields, SOURCE.shard_lengths) == ({}, (10,))
    assert SOURCE.__getitems__([-1, 0]) == [RECORDS[9], RECORDS[0]]
    assert list(SOURCE.read_batch([0], fields=["n", "letter"])) == ["n", "letter"]
    with pytest.raises(ConfigError, match=r"a record has no field 'leter': did you mean 'letter'\? Known: letter, n"):
        SOURCE.read_batch([0], fields=["leter"])
    with pytest.raises(ConfigError, match="records are bytes, not fields: choose a codec to read fields x, y"):
        select_fields(b"abc", ["x", "y"])


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        (b"ab", FieldSpec("bytes", ()), "bytes ()"),
        ("ab", FieldSpec("str", ()), "str ()"),
        (np.zeros((2, 3), np.float16), FieldSpec("float16", (2, 3)), "float16 (2, 3)"),
        (3, FieldSpec("int64", ()), "int64 ()"),
        (3.5, FieldSpec("float64", ()), "float64 ()"),
    ],
)
def test_spec_of_a_value(value, spec, text):
    assert (spec_of(value), str(spec)) == (spec, text)
    assert (str(FieldSpec("int64", (None, 3))), str(FieldSpec("int64"))) == ("int64 (?, 3)", "int64")


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


@pytest.mark.parametrize("numbers", [range(5), range(3, 9), range(3, 20, 4), range(9, 0, -2), range(0)])
def test_records_are_the_numbers_of_a_range(numbers):
    source = RangeSource(numbers.stop, start=numbers.start, step=numbers.step)
    assert list(source) == [{"index": number} for number in numbers]
    if numbers:
        assert source.read_batch([-1, 0])["index"].tolist() == [numbers[-1], numbers[0]]


def test_a_range_that_no_memory_holds():
    source = RangeSource(2**62)
    assert (len(source), source[-1]) == (2**62, {"index": 2**62 - 1})
    assert repr(source) == "RangeSource(4611686018427387904, start=0, step=1)"
    assert source.read_batch([0], fields=[]) == {}
    with pytest.raises(ConfigError, match=r"there is no field 'indx': did you mean 'index'\? Known: index"):
        source.read_batch([0], fields=["indx"])
    with pytest.raises(ConfigError, match="step must not be 0") as caught:
        RangeSource(5, step=0)
    assert caught.value.key == "step"
