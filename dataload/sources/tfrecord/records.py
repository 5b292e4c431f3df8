"""The TFRecord format: records one after another, each between checksums. Pure (no I/O).

| bytes | content, little-endian |
|---|---|
| 8 | length of the data |
| 4 | masked CRC-32C of the length |
| length | data |
| 4 | masked CRC-32C of the data |

Nothing in a file says how many records it has or where they start, so the chain of lengths is followed once. A file
without records has no bytes. Layout: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details.
"""

import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from dataload.errors import CorruptFileError, UnsupportedFormatError
from dataload.sources.format import describe_head
from dataload.types import BytesArray, Int64Array

HEAD_BYTES = 12
"""Bytes before the data of a record."""

CRC_BYTES = 4
"""Bytes after the data of a record."""

FRAME_BYTES = HEAD_BYTES + CRC_BYTES

_LENGTH = struct.Struct("<Q")
_HEAD = np.dtype([("length", "<u8"), ("crc", "<u4")])
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its bits reversed
_MASK = 0xA282EAD8
_BLOCK = 1 << 18  # bytes that are read at once where records are small
_FIRST = 1 << 12


def mask(crc: Any) -> Any:
    """Return CRCs, (rows,), as they are stored: uint32, rotated right by 15 bits, plus a constant."""
    crc = np.asarray(crc, np.uint32)
    return (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(_MASK)


@cache
def _table() -> Any:
    """Return the CRC-32C of each byte, (256,) uint32."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> 1 ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


def crc_of_rows(rows: BytesArray) -> Any:
    """Return the CRC-32C, (rows,) uint32, of (rows, length) uint8. For a few bytes a row: it takes a step for each."""
    table, crc = _table(), np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        crc = table[(crc ^ column) & np.uint32(0xFF)] ^ crc >> np.uint32(8)
    return ~crc


def build_head(length: int) -> bytes:
    """Return the bytes before data of a length."""
    stored = _LENGTH.pack(length)
    return stored + mask(crc_of_rows(np.frombuffer(stored, np.uint8)[None])).astype("<u4").tobytes()


def is_tfrecord(head: bytes) -> bool:
    """Return whether bytes begin with a length and its checksum."""
    return len(head) >= HEAD_BYTES and not _wrong(np.frombuffer(head[:HEAD_BYTES], np.uint8)[None]).any()


def _wrong(heads: BytesArray) -> Any:
    """Return which of the (rows, 12) heads have a length that its checksum contradicts."""
    return mask(crc_of_rows(heads[:, : _LENGTH.size])) != heads[:, _LENGTH.size :].copy().view("<u4")[:, 0]


def find_records(read: Callable[[int, int], bytes], size: int, path: str) -> Int64Array:
    """Return the edges of records, (records + 1,) int64 offsets inside a file of `size` bytes.

    The checksums of their lengths are compared. ``read(offset, length)`` returns fewer bytes at the end of the file.
    """
    edges, position, count, window = [np.zeros(1, np.int64)], 0, 0, _FIRST
    while position < size:
        block = read(position, min(window, size - position))
        found, after = _follow(block)
        if not found:
            raise _cut(size, position, count, path)
        starts = np.array(found)
        wrong = _wrong(np.frombuffer(block, np.uint8)[starts[:, None] + np.arange(HEAD_BYTES)])
        if wrong.any():
            row = int(np.argmax(wrong))
            raise _wrong_length(block[found[row] : found[row] + HEAD_BYTES], position + found[row], count + row, path)
        if after > size - position:
            raise _cut(size, position + found[-1], count + len(found) - 1, path)
        edges += (position + starts[1:], np.array([position + after]))
        position, count = position + after, count + len(found)
        window = _BLOCK if after < len(found) * _BLOCK // 8 else HEAD_BYTES
    return np.concatenate(edges)


def _follow(block: bytes) -> tuple[list[int], int]:
    """Return where in a block, which begins with a record, records begin; and where the next one does, outside."""
    unpack, last = _LENGTH.unpack_from, len(block) - HEAD_BYTES
    found: list[int] = []
    at = 0
    while at <= last:
        found.append(at)
        at += unpack(block, at)[0] + FRAME_BYTES
    return found, at


def _wrong_length(head: bytes, offset: int, index: int, path: str) -> CorruptFileError | UnsupportedFormatError:
    if offset == 0:
        message = f"{path} does not begin with a TFRecord, a length and its CRC-32C: {describe_head(head)}"
        return UnsupportedFormatError(message, path=path)
    length, crc = np.frombuffer(head, _HEAD)[0].tolist()
    stored = int(mask(crc_of_rows(np.frombuffer(head[: _LENGTH.size], np.uint8)[None]))[0])
    return CorruptFileError(
        f"the masked CRC-32C of the record's length, {length}, is {stored:#x}, but the file says {crc:#x}",
        path=path,
        offset=offset,
        index=index,
    )


def _cut(size: int, offset: int, index: int, path: str) -> CorruptFileError:
    return CorruptFileError(
        f"the file ends at byte {size}, within this record: it was cut off, or its writer did not finish",
        path=path,
        offset=offset,
        index=index,
    )


def check_data(data: Any, crcs: Any, value: Callable[[bytes], int]) -> int | None:
    """Return the row of the first record whose checksum in `crcs`, (rows,) uint32, is wrong; None if none is."""
    found = mask(np.fromiter((value(bytes(record)) for record in data), np.uint32, len(data)))
    wrong = found != crcs
    return int(np.argmax(wrong)) if wrong.any() else None
