"""The record table of an uncompressed ArrayRecord file, so that its records can be read without the package.

An ArrayRecord is a Riegeli/records file: consecutive chunks, cut into blocks of 64 KiB. Every block starts with a
header of 24 bytes, even in the middle of a chunk. Numbers are little-endian.

| block header | chunk header | data of an uncompressed chunk of one record |
|---|---|---|
| hash (8) | hash (8) | 0 for no compression (1) |
| distance from the start of the chunk to the block (8) | bytes of data (8), hash of data (8) | length of the next (1) |
| distance from the block to the end of the chunk (8) | type (1), records (7) | size of the record, a varint |
| | bytes of the records (8) | the record |

The last block of an ArrayRecord holds three copies of a message with the position of the footer. The footer is a chunk
of messages: the first describes the file, each of the others gives the position of a chunk, the bytes of its records
and their number. Unless the chunks are contiguous exactly as these numbers say, from the first to the footer, no table
is made; no flipped bit in the footer passes this check. The hashes (HighwayHash) of chunks can be compared.

Layouts: https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md and `cpp/layout.proto` of
https://github.com/google/array_record.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataload.codecs.wire import LENGTH, VARINT, parse_varint, walk
from dataload.errors import CorruptFileError
from dataload.sources.array_record.layout import BLOCK_SIZE
from dataload.types import BytesArray, Int64Array

BLOCK_HEADER_BYTES = 24

HEAD_BYTES = 42
"""The header of a chunk and the two bytes before the size of its record."""

_BLOCK_ROOM = BLOCK_SIZE - BLOCK_HEADER_BYTES
_BLOCK_BITS = 16  # shifts of arrays are faster than divisions
_CHUNK_HEADER = struct.Struct("<8xQ8xQQ")  # bytes of data; type and records; bytes of the records
CHUNK_HEADER_BYTES = _CHUNK_HEADER.size
HASH_BYTES = 8
"""Bytes of the hash with which a chunk header begins, the hash of the rest."""

HASH_KEY = b"Riegeli/records\nRiegeli/records\n"

_BEFORE_SIZE = _CHUNK_HEADER.size + 2
HEAD = np.dtype(
    [
        ("header_hash", "<u8"),
        ("data_size", "<i8"),
        ("data_hash", "<u8"),
        ("kind", "<i8"),
        ("decoded_size", "<i8"),
        ("prefix", "<u2"),
    ]
)
"""The first `HEAD_BYTES` of a chunk."""

_SIMPLE = 0x72  # the type of a chunk that is not transposed
_ONE_SIMPLE = _SIMPLE | 1 << 8

_MAGIC = 0x71930E704FDAE05E
_VERSION = 1
_COPIES = 3  # of the message in the last block

# The smallest sizes that take 2, 3, ... bytes as a varint, and the lengths of their chunks.
_SIZE_STEPS = np.array([1 << bits for bits in range(7, 63, 7)], np.int64)
_LENGTH_STEPS = _SIZE_STEPS + _BEFORE_SIZE + np.arange(2, len(_SIZE_STEPS) + 2)

_MOST_BYTES_ABOUT = 1 << 16  # of the message that describes the file: version, counts, options of the writer
_ENTRIES_AT_ONCE = 1 << 16  # each takes 48 bytes while it is parsed
_NUMBERS = 6  # an entry of the footer is three fields: tag, position, tag, bytes, tag, records
_ENTRY_TAGS = (0x08, 0x10, 0x18)
_MOST_VARINT_BYTES = 9  # a position has at most 63 bits


def pieces(start: int, length: int) -> list[slice]:
    """Return the slices of the file, one per block, that hold a chunk of `length` bytes without block headers."""
    found: list[slice] = []
    while length > 0:
        part = min(length, BLOCK_SIZE - start % BLOCK_SIZE)
        found.append(slice(start, start + part))
        length -= part
        start += part + BLOCK_HEADER_BYTES
    return found


@dataclass(frozen=True, slots=True)
class Spans:
    """Positions of chunks of one record each, and their bytes without block headers; (n,) int64.

    A start at a block is the position after the block header. `ahead` are the bytes of a chunk before its record.
    """

    starts: Int64Array
    lengths: Int64Array
    ahead: Int64Array

    def differ(self, heads: BytesArray) -> bool:
        """Return whether any of `heads`, (n, HEAD_BYTES) uint8, is not of one uncompressed record of this size."""
        found = heads.view(HEAD).ravel()
        differ = found["data_size"] != self.lengths - _CHUNK_HEADER.size
        differ |= found["kind"] != _ONE_SIMPLE
        differ |= found["decoded_size"] != self.lengths - self.ahead
        differ |= found["prefix"] != self.ahead - _BEFORE_SIZE << 8  # not compressed; length of the size
        return bool(differ.any())

    def pieces(self) -> Pieces:
        """Return the pieces into which block headers cut the chunks."""
        room = BLOCK_SIZE - (self.starts & (BLOCK_SIZE - 1))  # in the block of the first piece
        rest = np.maximum(self.lengths - room, 0)
        counts = 1 + -(-rest // _BLOCK_ROOM)
        chunk = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = number == 0
        starts, room, rest = self.starts[chunk], room[chunk], rest[chunk]
        offsets = np.where(first, starts, starts + room + (number - 1) * BLOCK_SIZE + BLOCK_HEADER_BYTES)
        lengths = np.where(
            first, np.minimum(self.lengths[chunk], room), np.minimum(rest - (number - 1) * _BLOCK_ROOM, _BLOCK_ROOM)
        )
        last = np.cumsum(counts) - 1
        # If a chunk starts with a block, the header of that block belongs to the chunk.
        edges = self.starts - BLOCK_HEADER_BYTES * (self.starts & (BLOCK_SIZE - 1) == BLOCK_HEADER_BYTES)
        return Pieces(offsets, lengths, first, edges[chunk], (offsets + lengths)[last][chunk])


@dataclass(frozen=True, slots=True)
class Pieces:
    """Consecutive parts of chunks, each within one block: (n,) int64, positions in the file or bytes.

    `first`, bool, says whether a chunk starts. `edges` are where the chunk starts, with the block header that belongs
    to it, and `ends` where it ends.
    """

    offsets: Int64Array
    lengths: Int64Array
    first: npt.NDArray[np.bool_]
    edges: Int64Array
    ends: Int64Array

    def block_headers(self) -> tuple[Int64Array, Int64Array]:
        """Return the block headers inside chunks: positions, (m,) int64, and bytes before and after, (m, 2) int64."""
        later = ~self.first
        at = self.offsets[later] - BLOCK_HEADER_BYTES
        return at, np.stack((at - self.edges[later], self.ends[later] - at), axis=1)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a file, each of one uncompressed record, between `edges`, (records + 1,) int64 positions.

    A block header at an edge belongs to the next chunk. `alike` is `Spans.lengths` and `Spans.ahead` of all chunks, if
    equal.
    """

    edges: Int64Array
    alike: tuple[int, int] | None

    def __len__(self) -> int:
        return len(self.edges) - 1

    def spans(self, indices: Int64Array) -> Spans:
        """Return the spans of the chunks at `indices`, (n,) int64 in [0, len)."""
        edges = self.edges[indices]
        starts = edges + BLOCK_HEADER_BYTES * (edges & (BLOCK_SIZE - 1) == 0)
        if self.alike is not None:
            return Spans(starts, *(np.full(len(starts), number) for number in self.alike))
        lengths = _without_headers(self.edges[indices + 1]) - _without_headers(edges)
        return Spans(starts, lengths, _BEFORE_SIZE + 1 + np.searchsorted(_LENGTH_STEPS, lengths, side="right"))


def _without_headers(edges: Int64Array) -> Int64Array:
    """Convert positions of edges, (n,), to positions in the file without its block headers."""
    return edges - BLOCK_HEADER_BYTES * ((edges + (BLOCK_SIZE - 1)) >> _BLOCK_BITS)


Read = Callable[[int, int], bytes]
"""Returns the bytes [offset, offset + length) of a file, which are inside it."""


def parse_chunks(read: Read, size: int) -> Chunks | None:
    """Find the records of a file of `size` bytes; None if only the package can read it or explain its defect."""
    # It is then compressed, its chunks hold several records, are padded or have another layout, or the last block and
    # the footer contradict each other. The cost is bounded by the size of the footer.
    if not size or size % BLOCK_SIZE:
        return None
    end = size - BLOCK_SIZE
    try:
        footer = _parse_postscript(read(end, BLOCK_SIZE))
        return _parse_footer(read, end, footer) if 0 < footer < end and _may_be_edges(footer) else None
    except (CorruptFileError, IndexError, struct.error):
        return None


def _parse_postscript(block: bytes) -> int:
    """Return the position of the footer, from the last block."""
    data_size, kind, decoded = _CHUNK_HEADER.unpack_from(block, BLOCK_HEADER_BYTES)
    start = BLOCK_HEADER_BYTES + _CHUNK_HEADER.size
    size = block[start + 2]
    head = bytes((0, _COPIES, size, size, size))
    message = block[start + len(head) : start + len(head) + size]
    whole = head + _COPIES * message
    if (data_size, kind, decoded) != (len(whole), _SIMPLE | _COPIES << 8, _COPIES * size):
        raise CorruptFileError("another layout of the postscript")
    if block[start : start + len(whole)] != whole:
        raise CorruptFileError("the copies of the postscript differ")
    numbers = _numbers(message, 0, size)
    if numbers.get(2) != _MAGIC:
        raise CorruptFileError("another magic number")
    return numbers.get(1, 0)


def _numbers(message: bytes, start: int, stop: int) -> dict[int, int]:
    """Return the varint fields of a message by number."""
    fields = walk(message, start, stop, "footer")
    return {number: parse_varint(message, first)[0] for number, wire, first, _ in fields if wire == VARINT}


def _parse_footer(read: Read, end: int, edge: int) -> Chunks | None:
    """Parse the footer, a chunk that starts at `edge`; `end` is the start of the last block."""
    start = edge if edge % BLOCK_SIZE else edge + BLOCK_HEADER_BYTES
    data_size, kind, decoded = _CHUNK_HEADER.unpack(_chunk(read, end, start, _CHUNK_HEADER.size))
    count = (kind >> 8) - 1
    if kind & 0xFF != _SIMPLE or not 0 <= count < data_size < end - start:
        return None
    footer = _chunk(read, end, start, _CHUNK_HEADER.size + data_size)[_CHUNK_HEADER.size :]
    bytes_of_sizes, sizes = parse_varint(footer, 1)
    messages = sizes + bytes_of_sizes
    size, sizes = parse_varint(footer, sizes)
    # The sizes of all messages but the first take one byte.
    if footer[0] or messages - sizes != count or data_size - messages != decoded:
        return None
    if size > min(decoded, _MOST_BYTES_ABOUT) or not _describes(footer, messages, messages + size, count):
        return None
    table = np.frombuffer(footer, np.uint8)
    entries = _parse_entries(table[messages + size :], table[sizes:messages].astype(np.int64))
    return None if entries is None else _join(*entries, edge)


def _chunk(read: Read, end: int, start: int, length: int) -> bytes:
    """Return the bytes of a chunk without block headers; fewer if the blocks end earlier."""
    parts = pieces(start, length)
    data = read(start, min(parts[-1].stop, end) - start)
    return b"".join([data[part.start - start : part.stop - start] for part in parts])


def _describes(footer: bytes, start: int, stop: int, count: int) -> bool:
    """Return whether the first message describes an ArrayRecord of `count` chunks of one record each."""
    for number, wire, first, last in walk(footer, start, stop, "footer"):
        if (number, wire) == (1, LENGTH):
            numbers = _numbers(footer, first, last)
            return [numbers.get(field) for field in (1, 2, 3)] == [_VERSION, count, count]
    return False


def _parse_entries(messages: BytesArray, sizes: Int64Array) -> tuple[Int64Array, Int64Array] | None:
    """Return each chunk's position and the bytes of its record, (chunks,) int64, from messages of `sizes` bytes."""
    edges = np.concatenate(([0], np.cumsum(sizes)))
    if edges[-1] != len(messages):
        return None
    positions, records = np.empty((2, len(sizes)), np.int64)
    for row in range(0, len(sizes), _ENTRIES_AT_ONCE):
        rows = slice(row, min(row + _ENTRIES_AT_ONCE, len(sizes)))
        block = messages[edges[rows.start] : edges[rows.stop]]
        # Tags and values are varints; the last byte of each has its highest bit clear.
        ends = np.flatnonzero(block < 0x80)
        if len(ends) != _NUMBERS * (rows.stop - rows.start):
            return None
        ends = ends.reshape(-1, _NUMBERS)
        starts = edges[rows] - edges[rows.start]
        tags = np.column_stack((starts, ends[:, 1] + 1, ends[:, 3] + 1))
        if (ends[:, ::2] != tags).any() or (block[tags] != _ENTRY_TAGS).any():
            return None
        if (ends[:, 5] != ends[:, 4] + 1).any() or (block[ends[:, 5]] != 1).any():  # chunks of one record
            return None
        for column, values in ((1, positions), (3, records)):
            found = _varints(block, ends[:, column - 1] + 1, ends[:, column])
            if found is None:
                return None
            values[rows] = found
    return positions, records


def _varints(data: BytesArray, starts: Int64Array, lasts: Int64Array) -> Int64Array | None:
    """Decode the numbers with these first and last bytes, (n,); None if one has more than 63 bits."""
    lengths = lasts - starts + 1
    longest = int(lengths.max())
    if longest > _MOST_VARINT_BYTES:
        return None
    values = (data[starts] & 0x7F).astype(np.int64)
    for byte in range(1, longest):
        longer = np.flatnonzero(lengths > byte)
        rows = slice(None) if len(longer) == len(starts) else longer  # a slice takes a third of the time
        values[rows] |= (data[starts[rows] + byte] & 0x7F).astype(np.int64) << 7 * byte
    return values


def _join(positions: Int64Array, sizes: Int64Array, end: int) -> Chunks | None:
    """Return the chunks at `positions` with records of `sizes` bytes if they are contiguous up to `end`."""
    if not len(positions):
        return Chunks(np.array([end], np.int64), None)
    if positions.max() > end or sizes.max() > end or not _may_be_edges(positions).all():
        return None
    edges = np.append(positions, end)
    widths = 1 + np.searchsorted(_SIZE_STEPS, sizes, side="right")  # bytes of each size as a varint
    if (np.diff(_without_headers(edges)) != sizes + widths + _BEFORE_SIZE).any():
        return None
    ahead = _BEFORE_SIZE + int(widths[0])
    return Chunks(edges, (ahead + int(sizes[0]), ahead) if (sizes == sizes[0]).all() else None)


def _may_be_edges(positions: Any) -> Any:
    """Return whether chunks may start at `positions`: not inside a block header nor right after it."""
    inside = positions & (BLOCK_SIZE - 1)
    return (inside == 0) | (inside > BLOCK_HEADER_BYTES)
