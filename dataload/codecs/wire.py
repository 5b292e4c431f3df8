"""The protobuf wire format: the fields of a message, found without copying and without a schema."""

from __future__ import annotations

from collections.abc import Iterator

from dataload.codecs.varints import encode_varint, parse_varint
from dataload.errors import CorruptFileError

__all__ = ["FIXED32", "FIXED64", "LENGTH", "VARINT", "build_field", "payload_span", "walk"]

VARINT, FIXED64, LENGTH, _GROUP, _END_GROUP, FIXED32 = range(6)

_MAX_FIELD = (1 << 29) - 1
_MAX_GROUPS = 100
_MAX_LENGTH_BYTES = 5  # of the number that says a length; protobuf reads no more


def walk(data: bytes | memoryview, start: int, stop: int, message: str) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message, in the order of the bytes.

    Args:
        data: The record.
        start: First byte of the message in it.
        stop: Byte behind the last.
        message: What these bytes should be, for error messages: ``"TensorProtos"``.

    Yields:
        Number of the field, wire type, and the half-open span of its payload, which lies within the message.

    Raises:
        CorruptFileError: These bytes are no message; the text counts bytes from the start of the record.
    """
    position = start
    while position < stop:
        try:
            number, wire, first, last = _field(data, position, stop, message)
        except IndexError:
            number, wire, first, last = 1, 0, 0, stop + 1
        if last > stop:
            raise CorruptFileError(
                f"no {message}: the field at byte {position} of the record ends behind byte {stop}, where the "
                "message does"
            )
        if not 0 < number <= _MAX_FIELD:
            raise CorruptFileError(f"no {message}: field {number} at byte {position} of the record")
        yield number, wire, first, last
        position = last


def _field(data: bytes | memoryview, position: int, stop: int, message: str) -> tuple[int, int, int, int]:
    """Number, wire type and payload of one field; the payload's end is not checked yet."""
    tag = data[position]
    first = position + 1
    if tag >= 0x80:
        tag, first = parse_varint(data, position)
    wire = tag & 7
    if wire == LENGTH:
        return tag >> 3, wire, *payload_span(data, first)
    if wire == VARINT:
        return tag >> 3, wire, first, parse_varint(data, first)[1]
    if wire == FIXED32:
        return tag >> 3, wire, first, first + 4
    if wire == FIXED64:
        return tag >> 3, wire, first, first + 8
    if wire == _GROUP:
        return tag >> 3, wire, first, _end_of_group(data, first, stop, tag >> 3, message)
    raise CorruptFileError(f"no {message}: wire type {wire} at byte {position} of the record")


def payload_span(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """The half-open span of the payload of wire type `LENGTH` whose length stands at `position`.

    The stop may lie behind the end of the data: a caller compares it with what holds the payload.

    Raises:
        CorruptFileError: The length takes more than 5 bytes.
        IndexError: The data end before the length does.
    """
    length = data[position]
    if length < 0x80:
        return position + 1, position + 1 + length
    length, start = parse_varint(data, position)
    if start - position > _MAX_LENGTH_BYTES:
        raise CorruptFileError(f"the length at byte {position} of the record has more than {_MAX_LENGTH_BYTES} bytes")
    return start, start + length


def _end_of_group(data: bytes | memoryview, position: int, stop: int, number: int, message: str) -> int:
    """The byte behind a group, a relic that only unknown fields can be."""
    still_open = [number]
    while still_open:
        tag, after = parse_varint(data, position)
        if tag & 7 == _GROUP:
            still_open.append(tag >> 3)
            position = after
        elif tag & 7 == _END_GROUP:
            if tag >> 3 != still_open.pop():
                break
            position = after
        else:
            position = _field(data, position, stop, message)[3]
        if len(still_open) > _MAX_GROUPS or position > stop:
            break
    else:
        return position
    raise CorruptFileError(f"no {message}: a group before byte {position} of the record does not end")


def build_field(number: int, payload: bytes) -> bytes:
    """A field of wire type `LENGTH`."""
    if number < 16 and len(payload) < 0x80:
        return bytes((number << 3 | LENGTH, len(payload))) + payload
    return encode_varint(number << 3 | LENGTH) + encode_varint(len(payload)) + payload
