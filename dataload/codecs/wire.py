"""The protobuf wire format: find the fields of a message without copying and without a schema."""

from __future__ import annotations

from collections.abc import Iterator

from dataload.codecs.varints import encode_varint, parse_varint
from dataload.errors import CorruptFileError

VARINT, FIXED64, LENGTH, _GROUP, _END_GROUP, FIXED32 = range(6)

_MAX_FIELD = (1 << 29) - 1
_MAX_GROUPS = 100
_MAX_LENGTH_BYTES = 5  # of a length prefix, as in protobuf


def walk(data: bytes | memoryview, start: int, stop: int, message: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield the fields of a message, in the order of the bytes.

    Args:
        data: The record.
        start: Offset of the message in the record.
        stop: Offset after the message.
        message: Name of the message type, for error messages: ``"TensorProtos"``.

    Yields:
        Field number, wire type, and the half-open span of the payload, which lies within the message.

    Raises:
        CorruptFileError: The bytes are not a message. The error counts bytes from the start of the record.
    """
    position = start
    while position < stop:
        try:
            number, wire, first, last = _field(data, position, stop, message)
        except IndexError:
            number, wire, first, last = 1, 0, 0, stop + 1
        if last > stop:
            raise CorruptFileError(
                f"invalid {message}: the field at byte {position} of the record ends after byte {stop}, the end of the "
                "message"
            )
        if not 0 < number <= _MAX_FIELD:
            raise CorruptFileError(f"invalid {message}: field {number} at byte {position} of the record")
        yield number, wire, first, last
        position = last


def _field(data: bytes | memoryview, position: int, stop: int, message: str) -> tuple[int, int, int, int]:
    """Return number, wire type and payload span of one field; the span's end is not checked yet."""
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
    raise CorruptFileError(f"invalid {message}: wire type {wire} at byte {position} of the record")


def payload_span(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the half-open span of a payload of wire type `LENGTH` whose length is stored at `position`.

    The caller must check the end of the span, which may exceed the data.

    Raises:
        CorruptFileError: The length takes more than 5 bytes.
        IndexError: The data end within the length.
    """
    length = data[position]
    if length < 0x80:
        return position + 1, position + 1 + length
    length, start = parse_varint(data, position)
    if start - position > _MAX_LENGTH_BYTES:
        raise CorruptFileError(f"the length at byte {position} of the record has more than {_MAX_LENGTH_BYTES} bytes")
    return start, start + length


def _end_of_group(data: bytes | memoryview, position: int, stop: int, number: int, message: str) -> int:
    """Return the offset after a group, an obsolete kind of field that only unknown fields can have."""
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
    raise CorruptFileError(f"invalid {message}: a group before byte {position} of the record does not end")


def build_field(number: int, payload: bytes) -> bytes:
    """Encode a field of wire type `LENGTH`."""
    if number < 16 and len(payload) < 0x80:
        return bytes((number << 3 | LENGTH, len(payload))) + payload
    return encode_varint(number << 3 | LENGTH) + encode_varint(len(payload)) + payload
