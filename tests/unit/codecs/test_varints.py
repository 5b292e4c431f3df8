"""The refusals; tests/properties/test_codecs.py compares the numbers."""

import numpy as np
import pytest

from dataload.codecs.wire import encode_varint, encode_varints, parse_packed, parse_varint, parse_varints
from dataload.errors import CorruptFileError


def parse_row(data):
    return parse_varints(np.frombuffer(data, np.uint8)[None])[0]


@pytest.mark.parametrize("parse", [parse_row, parse_packed])
@pytest.mark.parametrize("others", [0, 40])  # few are read in another way than many
@pytest.mark.parametrize(
    ("end", "message"),
    [
        (b"\x80", "^the packed integers end in the middle of an integer$"),
        (b"\xff" * 9, "^the packed integers end in the middle of an integer$"),
        (b"\x80" * 10 + b"\x01", "^a packed integer has more than 10 bytes$"),
        (b"\xff" * 15 + b"\x00", "^a packed integer has more than 10 bytes$"),
    ],
)
def test_packed_integers_that_are_none(parse, others, end, message):
    with pytest.raises(CorruptFileError, match=message):
        parse(b"\x01" * others + end)


@pytest.mark.parametrize("parse", [parse_row, parse_packed])
def test_bits_beyond_the_64th_are_dropped(parse):
    longest = b"\xff" * 9 + b"\x7f"
    for others in (0, 40):
        assert parse(b"\x01" * others + longest).tolist() == [1] * others + [-1]
    assert parse(longest * 4).tolist() == [-1] * 4


def test_one_number():
    assert parse_varint(b"\x00\xac\x02", 1) == (300, 3)
    assert encode_varint(300) == encode_varints(np.array([300])) == b"\xac\x02"
    with pytest.raises(IndexError):
        parse_varint(b"\x80", 0)
    with pytest.raises(CorruptFileError, match=r"^a varint at byte 1 of the record has more than 10 bytes$"):
        parse_varint(b"\x00" + b"\x80" * 11, 1)
