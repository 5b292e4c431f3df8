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


def test_a_slice_reads_columns():
    batch = SOURCE[2:9:2].read_batch([3, 0, -1], fields=["n"])
    assert {name: column.tolist() for name, column in batch.items()} == {"n": [8, 2, 8]}


def test_a_slice_is_asked_for_its_own_records_only():
    with pytest.raises(IndexError, match="index 3 is out of range for 3 records"):
        SOURCE[2:5][3]
    with pytest.raises(IndexError, match="index -4 is out of range for 3 records"):
        SOURCE[2:5].read([0, -4])


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    start=st.integers(0, 12),
    stop=st.integers(0, 12),
)
def test_shards_of_a_slice_equal_counting(lengths, start, stop):
    source = ConcatSource([RangeSource(length) for length in lengths])
    shard_of = [shard for shard, length in enumerate(lengths) for _ in range(length)][start:stop]
    expected = tuple(shard_of.count(shard) for shard in sorted(set(shard_of))) or (0,)
    assert source[start:stop].shard_lengths == expected


def test_a_slice_that_does_not_run_forwards_is_one_shard():
    source = ConcatSource([RangeSource(4), RangeSource(4)])
    assert source[::2].shard_lengths == (4,)
    assert source[::-1].shard_lengths == (8,)


def test_a_slice_passes_on_what_its_source_knows():
    part = MemorySource({"x": np.zeros((4, 2))})[1:3]
    assert part.fields == {"x": FieldSpec("float64", (2,))}


@pytest.mark.parametrize(
    ("part", "text"),
    [(SOURCE[2:5], "Letters()[2:5]"), (SOURCE[::-2], "Letters()[9:-1:-2]"), (SOURCE[1:][:3], "Letters()[1:10][0:3]")],
)
def test_a_slice_shows_what_it_is_of(part, text):
    assert repr(part) == text


def test_slices_have_their_own_fingerprints():
    parts = [SOURCE[:], SOURCE[1:], SOURCE[:-1], SOURCE[::2], SOURCE[1:][1:]]
    assert len({part.fingerprint() for part in [*parts, SOURCE]}) == len(parts) + 1
    assert SOURCE[1:5].fingerprint() == Letters()[1:5].fingerprint()


def test_closing_a_slice_closes_its_source():
    source = Letters()
    with source[2:4]:
        pass
    with pytest.raises(ClosedSourceError):
        source[0]


def test_iteration_reads_in_blocks():
    asked = []

    class Recorded(RangeSource):
        def _read(self, indices):
            asked.append(len(indices))
            return super()._read(indices)

    assert [record["index"] for record in Recorded(600)] == list(range(600))
    assert max(asked) < 600
    assert len(asked) < 10


def test_read_batch_of_some_fields_in_their_order():
    assert list(SOURCE.read_batch([0], fields=["n", "letter"])) == ["n", "letter"]


def test_records_without_such_a_field():
    with pytest.raises(ConfigError, match=r"a record has no field 'leter': did you mean 'letter'\? Known: letter, n"):
        SOURCE.read_batch([0], fields=["leter"])


def test_records_without_fields():
    with pytest.raises(ConfigError, match="records are bytes, not fields: choose a codec to read fields x, y"):
        select_fields(b"abc", ["x", "y"])


def test_defaults():
    assert SOURCE.fields == {}
    assert SOURCE.shard_lengths == (10,)
    assert SOURCE.__getitems__([-1, 0]) == [RECORDS[9], RECORDS[0]]


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
    assert spec_of(value) == spec
    assert str(spec) == text


def test_spec_with_unknown_extents():
    assert str(FieldSpec("int64", (None, 3))) == "int64 (?, 3)"
    assert str(FieldSpec("int64")) == "int64"
