"""Columns by layout, with records of a format made for it; tests/properties has those of real formats."""

import numpy as np
import pytest

from dataload.codecs.layout import RecordTable, Span, columns_by_layout
from dataload.errors import CorruptFileError


def record(tag, x, name=b"ab"):
    """A tag that is structure, a name of two bytes, and the bytes of an array."""
    return bytes((tag,)) + name + np.asarray(x).tobytes()


class Parser:
    """Says that x starts at byte 3 and has this dtype; counts how often it is asked."""

    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)
        self.calls = 0

    def __call__(self, data):
        self.calls += 1
        count = (len(data) - 3) // self.dtype.itemsize
        return {"name": Span(1, 3), "x": Span(3, len(data), self.dtype, (count,))}


@pytest.mark.parametrize("count", [0, 1, 3, 63, 64, 200])  # of 8 bytes each: 64 are long
@pytest.mark.parametrize("dtype", ["<i8", ">i8"])
@pytest.mark.parametrize("tags", [[0], [0, 1], [0, 1, 2, 3], [7] + [0] * 39], ids=len)
def test_columns_are_the_values_in_the_order_of_this_machine(count, dtype, tags):
    rng = np.random.default_rng(count)
    tags = (tags * 40)[:40]
    values = rng.integers(0, 2**60, (len(tags), count))
    names = [rng.bytes(2) for _ in tags]
    buffers = [record(tag, row.astype(dtype), name) for tag, row, name in zip(tags, values, names, strict=True)]
    for several in (buffers, [memoryview(buffer) for buffer in buffers]):
        batch = columns_by_layout(several, None, Parser(dtype))
        assert list(batch) == ["name", "x"]
        assert batch["name"] == names
        assert all(type(name) is bytes for name in batch["name"])
        assert batch["x"].dtype == np.int64
        assert batch["x"].dtype.isnative
        assert batch["x"].flags.writeable
        assert np.array_equal(batch["x"], values)
    assert list(columns_by_layout(buffers, ["x"], Parser(dtype))) == ["x"]
    assert columns_by_layout(buffers, ["x", "y"], Parser(dtype)) is None


@pytest.mark.parametrize(
    ("tags", "calls"),
    [
        ([row % 3 for row in range(60)], 3),  # layouts are looked for once each
        ([1, 2, 3, *[0] * 61], 4),  # and some of few records do no harm
    ],
)
def test_layouts_are_looked_for_once_each(tags, calls):
    parse = Parser("<i8")
    batch = columns_by_layout([record(tag, [tag]) for tag in tags], None, parse)
    assert (batch["x"].tolist(), parse.calls) == ([[tag] for tag in tags], calls)


@pytest.mark.parametrize(
    ("buffers", "calls"),
    [
        ([record(row, [row]) for row in range(256)], 7),  # many layouts of one length are given up soon
        ([record(0, [0] * (row % 20)) for row in range(64)], 0),  # many lengths are not looked at
        ([record(0, [0])] * 3, 0),
    ],
)
def test_records_that_are_given_up(buffers, calls):
    parse = Parser("<i8")
    assert columns_by_layout(buffers, None, parse) is None
    assert parse.calls <= calls


@pytest.mark.parametrize("dtype", ["<f8", "<i4"])
def test_columns_that_would_have_two_dtypes_or_shapes(dtype):
    def parse(data):
        return Parser("<i8" if data[0] else dtype)(data)

    assert columns_by_layout([record(row % 2, [0]) for row in range(16)], None, parse) is None


def test_a_parser_that_finds_nothing():
    assert columns_by_layout([b"abc"] * 8, None, lambda data: None) is None
    assert columns_by_layout([b"abc"] * 8, None, lambda data: {}) == {}
    assert columns_by_layout([b"abc"] * 8, ["x"], lambda data: {}) is None


def test_values_that_are_made_of_their_bytes():
    def parse(data):
        return {"name": Span(1, 3, item=bytes.hex if data[0] else bytes)}

    assert columns_by_layout([record(1, [], name) for name in (b"ab", b"xy")] * 2, None, parse) == {
        "name": ["6162", "7879"] * 2
    }
    assert columns_by_layout([record(row % 2, []) for row in range(16)], None, parse) is None


def test_corrupt_records_are_left_to_who_can_name_them():
    def refuse(anything):
        raise CorruptFileError("bad")

    assert columns_by_layout([b"abc"] * 8, None, refuse) is None
    assert columns_by_layout([b"abc"] * 8, None, lambda data: {"x": Span(0, 3, np.dtype("u1"), (3,), refuse)}) is None
    assert columns_by_layout([b"abc"] * 8, None, lambda data: {"x": Span(0, 3, item=refuse)}) is None


def test_bits_that_say_how_to_read_the_others():
    def parse(data):
        return {"x": Span(0, 2, np.dtype(np.int64), (2,), lambda rows: (rows & 0x7F).astype(np.int64), mask=0x80)}

    low, high = [b"\x01\x02", b"\x03\x04"], [b"\x81\x02", b"\x82\x03"]
    assert columns_by_layout(low * 4, None, parse)["x"].tolist() == [[1, 2], [3, 4]] * 4
    calls = []
    batch = columns_by_layout((low + high) * 4, None, lambda data: calls.append(data) or parse(data))
    assert batch["x"].tolist() == [[1, 2], [3, 4], [1, 2], [2, 3]] * 4
    assert calls == [low[0], high[0]]


def test_a_table_is_a_sequence_of_its_rows():
    table = RecordTable(np.arange(12, dtype=np.uint8).reshape(4, 3)[:, 1:])
    assert len(table) == 4
    assert (
        [bytes(row) for row in table] == [bytes(table[i]) for i in range(4)] == [b"\1\2", b"\4\5", b"\7\10", b"\12\13"]
    )
    assert [bytes(row) for row in table[1:3]] == [b"\4\5", b"\7\10"]
