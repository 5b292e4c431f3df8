"""The wire format of protobuf at its bounds: numbers of each length, numbers of fields, groups."""

import numpy as np
import pytest

from dataload.codecs import wire
from dataload.errors import CorruptFileError

BOUNDS = [0, -1, -(2**63), 2**63 - 1, *(2**bits + each for bits in range(7, 63, 7) for each in (-1, 0))]


@pytest.mark.parametrize(
    "numbers", [BOUNDS, BOUNDS[:15], BOUNDS[:16], [127] * 20, [128] * 20, [0] * 20, [127, 128] * 12, [-1] * 20, []]
)
def test_numbers_of_each_length(numbers):
    data = b"".join(wire.encode_varint(number % 2**64) for number in numbers)
    assert wire.encode_varints(np.array(numbers, np.int64)) == data
    for raw in (data, bytearray(data), memoryview(data)):
        found = wire.parse_packed(raw, 8 * len(numbers))
        assert (found.tolist(), found.flags.writeable) == (numbers, True)
    if numbers:
        assert wire.parse_varints(np.tile(np.frombuffer(data, np.uint8), (3, 1))).tolist() == [numbers] * 3
        with pytest.raises(CorruptFileError, match=f"a list of {len(numbers)} integers takes {8 * len(numbers)} bytes"):
            wire.parse_packed(data, 8 * len(numbers) - 1)
    found, position = [], 0
    while position < len(data):
        number, position = wire.parse_varint(data, position)
        found.append(number)
    assert found == [number % 2**64 for number in numbers]


def fields(data):
    return [(number, kind, data[first:last]) for number, kind, first, last in wire.walk(data, 0, len(data), "Thing")]


@pytest.mark.parametrize("number", [1, 15, 16, 2**29 - 1])
@pytest.mark.parametrize("length", [0, 1, 127, 128, 20_000])
def test_fields_of_each_length(number, length):
    data = wire.build_field(number, bytes(length))
    assert fields(data * 2) == [(number, wire.LENGTH, bytes(length))] * 2
    with pytest.raises(
        CorruptFileError, match=f"invalid Thing: the field at byte {len(data)} of the record ends after"
    ):
        fields(data + data[:-1])


@pytest.mark.parametrize("number", [1, 15, 16, 2**29 - 1])
def test_fields_of_each_kind(number):
    def tag(kind):
        return wire.encode_varint(number << 3 | kind)

    payloads = (wire.VARINT, b"\xff\x7f"), (wire.FIXED32, b"1234"), (wire.FIXED64, b"12345678")
    parts = [tag(kind) + payload for kind, payload in payloads]
    group = b"".join([*parts, tag(3), *parts, tag(4), tag(4)])  # 3 begins a group, and 4 ends it
    data = b"".join([*parts, tag(3), group])
    assert fields(data) == [(number, kind, payload) for kind, payload in [*payloads, (3, group)]]
    for cut in range(1, len(data)):
        if cut not in np.cumsum([*map(len, parts)]):
            with pytest.raises(CorruptFileError, match="invalid Thing: "):
                fields(data[:cut])
    for wrong in (tag(6), tag(7), wire.encode_varint(2**29 << 3), b"\0"):
        with pytest.raises(CorruptFileError, match=f"invalid Thing: .* at byte {len(data)} of the record"):
            fields(data + wrong + b"\0")


def test_groups_in_groups():
    assert len(fields(b"\x0b" * 100 + b"\x0c" * 100)) == 1
    for wrong in (b"\x0b" * 101 + b"\x0c" * 101, b"\x0b\x13\x0c\x14"):
        with pytest.raises(CorruptFileError, match=r"invalid Thing: a group before byte .* does not end"):
            fields(wrong)
