"""The protobuf wire format: fields of a message, found without a schema and without copying, and varints.

A varint has 7 bits per byte, lowest first, with the high bit set in all bytes but the last.
"""

from collections.abc import Iterator

import numpy as np

from dataload._util.arrays import MAX_RECORD_BYTES, check_size
from dataload.errors import CorruptFileError
from dataload.types import BytesArray, Int64Array

VARINT, FIXED64, LENGTH, _GROUP, _END_GROUP, FIXED32 = range(6)

_MAX_FIELD = (1 << 29) - 1
_MAX_GROUPS = 100
_MAX_LENGTH_BYTES = 5  # of a length prefix, as in protobuf

_MAX_BYTES = 10  # 64 bits
_MASK = 2**64 - 1
_FEW = 16  # numbers for which a Python loop beats numpy's fixed costs, when writing
_SHORT_BYTES = 24  # the same when reading, in bytes

_CUT = "the packed integers end in the middle of an integer"
_LONG = f"a packed integer has more than {_MAX_BYTES} bytes"


def walk(data: bytes | memoryview, start: int, stop: int, message: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type and payload span of a message's fields; errors name its type, `message`."""
    position = start
    while position < stop:
        try:
            number, wire, first, last = _field(data, position, stop, message)
            if last > stop:
                raise IndexError
        except IndexError:
            raise CorruptFileError(
                f"invalid {message}: the field at byte {position} of the record ends after byte {stop}, the end of the "
                "message"
            ) from None
        if not 0 < number <= _MAX_FIELD:
            raise CorruptFileError(f"invalid {message}: field {number} at byte {position} of the record")
        yield number, wire, first, last
        position = last


def _field(data: bytes | memoryview, position: int, stop: int, message: str) -> tuple[int, int, int, int]:
    """Return number, wire type and payload span of one field, without checking the span's end."""
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
    """Return the half-open span of the `LENGTH` payload whose length is at `position`; the caller checks its end."""
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
    return build_head(number, len(payload)) + payload


def build_head(number: int, length: int) -> bytes:
    if number < 16 and length < 0x80:
        return bytes((number << 3 | LENGTH, length))
    return encode_varint(number << 3 | LENGTH) + encode_varint(length)


def parse_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the number at `position`, and the next position. IndexError if the data end within it."""
    number, shift, at = 0, 0, position
    while shift < 7 * _MAX_BYTES:
        byte, at = data[at], at + 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise CorruptFileError(f"a varint at byte {position} of the record has more than {_MAX_BYTES} bytes")


def parse_packed(data: bytes | bytearray | memoryview, limit: int = MAX_RECORD_BYTES) -> Int64Array:
    """Return consecutive numbers, (n,) int64, of at most `limit` bytes; bits beyond the 64th are dropped."""
    packed = bytes(data)
    if 8 * len(packed) > limit:
        check_packed(packed, limit)
    if packed.isascii():  # numbers of one byte
        return np.frombuffer(packed, np.uint8).astype(np.int64)
    if len(packed) > _SHORT_BYTES:
        return parse_varints(np.frombuffer(packed, np.uint8)[None])[0]
    numbers: list[int] = []
    number = shift = 0
    for byte in packed:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number & _MASK)
            number = shift = 0
        elif shift == 7 * _MAX_BYTES:
            raise CorruptFileError(_LONG)
    if shift:
        raise CorruptFileError(_CUT)
    return np.array(numbers, np.uint64).view(np.int64)


def check_packed(data: bytes | memoryview, limit: int) -> None:
    """Raise CorruptFileError if consecutive numbers take more than `limit` bytes as int64."""
    count = int(np.count_nonzero(np.frombuffer(data, np.uint8) < 0x80))
    check_size(8 * count, limit, f"a list of {count:,} integers")


def parse_varints(rows: BytesArray) -> Int64Array:
    """Return numbers, (rows, numbers) int64, of (rows, bytes) uint8 with equal high bits in every row."""
    first = rows[0]
    if not (first & 0x80).any():
        return rows.astype(np.int64)
    ends = np.flatnonzero(first < 0x80)
    if not len(ends) or ends[-1] != len(first) - 1:
        raise CorruptFileError(_CUT)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends + 1 - starts
    if lengths.max() > _MAX_BYTES:
        raise CorruptFileError(_LONG)
    if lengths.min() == lengths.max():  # the usual case for many numbers, and many times faster
        groups = (rows & np.uint8(0x7F)).reshape(len(rows), -1, lengths[0])  # (rows, numbers, 7-bit groups)
        numbers = groups[..., 0].astype(np.uint64)
        for i in range(1, groups.shape[2]):
            numbers |= groups[..., i].astype(np.uint64) << np.uint64(7 * i)
        return numbers.view(np.int64)
    shifts = 7 * (np.arange(len(first)) - np.repeat(starts, lengths))
    bits = (rows & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts, axis=1).view(np.int64)


def encode_varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def encode_varints(numbers: Int64Array) -> bytes:
    """Encode consecutive numbers, (n,) int64. Negative ones take 10 bytes."""
    if len(numbers) < _FEW:
        return b"".join([encode_varint(number & _MASK) for number in numbers.tolist()])
    unsigned = np.ascontiguousarray(numbers).view(np.uint64)
    largest = int(unsigned.max(initial=0))
    if largest < 0x80:
        return unsigned.astype(np.uint8).tobytes()
    # (n, width): the 7-bit groups of each number; the first `lengths` are written
    column = np.arange(-(-largest.bit_length() // 7))
    groups = unsigned[:, None] >> (7 * column).astype(np.uint64)
    lengths = np.maximum(1, (groups != 0).sum(axis=1))[:, None]
    out = (groups & 0x7F).astype(np.uint8) | np.where(column < lengths - 1, 0x80, 0).astype(np.uint8)
    return out[column < lengths].tobytes()
