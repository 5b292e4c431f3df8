"""Varints of the protobuf wire format: 7 bits per byte, lowest first, with the high bit set in all but the last."""

from __future__ import annotations

import numpy as np

from dataload.errors import CorruptFileError
from dataload.types import BytesArray, Int64Array

_MAX_BYTES = 10  # 64 bits
_MASK = 2**64 - 1
_FEW = 16  # numbers for which a Python loop beats numpy's fixed costs, when writing
_SHORT_BYTES = 24  # the same when reading, in bytes

_CUT = "the packed integers end in the middle of an integer"
_LONG = f"a packed integer has more than {_MAX_BYTES} bytes"


def parse_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the number at `position`, and the position after it.

    Raises:
        CorruptFileError: The number does not end within 10 bytes.
        IndexError: The data end within the number.
    """
    number = shift = 0
    for at in range(position, position + _MAX_BYTES):
        byte = data[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at + 1
        shift += 7
    raise CorruptFileError(f"a varint at byte {position} of the record has more than {_MAX_BYTES} bytes")


def parse_packed(data: bytes | bytearray | memoryview) -> Int64Array:
    """Parse consecutive numbers of any lengths.

    Returns:
        (n,) int64, owned by the caller. Bits beyond the 64th are dropped, as protobuf does.

    Raises:
        CorruptFileError: A number has more than 10 bytes, or the last one is incomplete.
    """
    packed = bytes(data)
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


def parse_varints(rows: BytesArray) -> Int64Array:
    """Parse rows of consecutive numbers, whose lengths are the same in every row.

    Args:
        rows: (rows, bytes) uint8, with the same high bits in every row.

    Returns:
        (rows, numbers) int64. Bits beyond the 64th are dropped, as protobuf does.

    Raises:
        CorruptFileError: A number has more than 10 bytes, or the last one is incomplete.
    """
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
        return _joined((rows & np.uint8(0x7F)).reshape(len(rows), -1, lengths[0]))
    shifts = 7 * (np.arange(len(first)) - np.repeat(starts, lengths))
    bits = (rows & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts, axis=1).view(np.int64)


def _joined(groups: BytesArray) -> Int64Array:
    """Join 7-bit groups, (rows, numbers, groups) uint8, lowest first, to (rows, numbers) int64."""
    numbers = groups[..., 0].astype(np.uint64)
    for i in range(1, groups.shape[2]):
        numbers |= groups[..., i].astype(np.uint64) << np.uint64(7 * i)
    return numbers.view(np.int64)


def encode_varint(number: int) -> bytes:
    """Encode one number, 0 <= number < 2**64."""
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
    # (n, width): the 7-bit groups of each number, of which the first `lengths` are written
    column = np.arange(-(-largest.bit_length() // 7))
    groups = unsigned[:, None] >> (7 * column).astype(np.uint64)
    lengths = np.maximum(1, (groups != 0).sum(axis=1))[:, None]
    out = (groups & 0x7F).astype(np.uint8) | np.where(column < lengths - 1, 0x80, 0).astype(np.uint8)
    return out[column < lengths].tobytes()
