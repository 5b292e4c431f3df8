"""The record table of an ArrayRecord file, so that its records can be read without the package.

An ArrayRecord is a Riegeli/records file: consecutive chunks, cut into blocks of 64 KiB. Every block starts with a
header of 24 bytes, even in the middle of a chunk. Numbers are little-endian.

| block header | chunk header | data of a chunk |
|---|---|---|
| hash (8) | hash (8) | 0 for no compression, or z for Zstandard (1) |
| distance from the start of the chunk to the block (8) | bytes of data (8), hash of data (8) | length of the next |
| distance from the block to the end of the chunk (8) | type (1), records (7) | sizes of the records |
| | bytes of the records (8) | the records |

Lengths and sizes are varints. Compressed, the sizes and the records are each a varint, the bytes that they expand to,
and a frame.

The last block of an ArrayRecord holds three copies of a message with the position of the footer. The footer is a chunk
of messages: the first describes the file, each of the others gives the position of a chunk, the bytes of its records
and their number. Unless uncompressed chunks are contiguous exactly as these numbers say, from the first to the footer,
no table is made; no flipped bit in the footer passes this check. The hashes (HighwayHash) of chunks can be compared;
those of compressed chunks and of their footer always are.

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
from dataload.sources.array_record.layout import (
    BLOCK_SIZE,
    CHUNK_HEADER_BYTES,
    MOST_EXPANSION_BITS,
    ZSTD,
    Decompressor,
    UnlikeError,
    check,
    find_damage,
    parse_numbers,
)
from dataload.sources.directory import WITHIN, ShardNumbers
from dataload.types import BytesArray, Int64Array

BLOCK_HEADER_BYTES = 24

HEAD_BYTES = 42
"""The header of a chunk and the two bytes before the size of its record."""

_BLOCK_ROOM = BLOCK_SIZE - BLOCK_HEADER_BYTES
_BLOCK_BITS = 16  # shifts of arrays are faster than divisions
_CHUNK_HEADER = struct.Struct("<8xQ8xQQ")  # bytes of data; type and records; bytes of the records
_BEFORE_SIZE = CHUNK_HEADER_BYTES + 2
_NUMBERS_OF_HEAD = ("header_hash", "data_size", "data_hash", "kind", "decoded_size")
HEAD = np.dtype([*((name, "<i8") for name in _NUMBERS_OF_HEAD), ("prefix", "<u2")])
"""The first `HEAD_BYTES` of a chunk."""

_SIMPLE = 0x72  # the type of a chunk that is not transposed

_MAGIC = 0x71930E704FDAE05E
_VERSION = 1
_COPIES = 3  # of the message in the last block

# The smallest sizes that take 2, 3, ... bytes as a varint, and the lengths of their chunks.
_SIZE_STEPS = np.array([1 << bits for bits in range(7, 63, 7)], np.int64)
_LENGTH_STEPS = _SIZE_STEPS + _BEFORE_SIZE + np.arange(2, len(_SIZE_STEPS) + 2)

_MOST_BYTES_ABOUT = 1 << 16  # of the message that describes the file: version, counts, options of the writer
_ENTRIES_AT_ONCE = 1 << 16  # each takes 48 bytes while it is parsed
_MOST_ENTRY_BYTES = 33
_NUMBERS = 6  # an entry of the footer is three fields: tag, position, tag, bytes, tag, records
_ENTRY_TAGS = (0x08, 0x10, 0x18)


@dataclass(frozen=True, slots=True)
class Spans:
    """Positions of chunks, and their bytes without block headers; (n,) int64.

    A start at a block is the position after the block header. `ahead` are the bytes of a chunk before its record, None
    if it is compressed; `records` is how many it has.
    """

    starts: Int64Array
    lengths: Int64Array
    ahead: Int64Array | None
    records: Any = 1

    def differ(self, heads: BytesArray) -> bool:
        """Return whether any of `heads`, (n, HEAD_BYTES) uint8, does not begin such a chunk."""
        found = heads.view(HEAD).ravel()
        differ = found["data_size"] != self.lengths - CHUNK_HEADER_BYTES
        differ |= found["kind"] != _SIMPLE | self.records << 8
        if self.ahead is None:
            differ |= found["prefix"] & 0xFF != ZSTD
            differ |= found["decoded_size"] < 0
            differ |= found["decoded_size"] >> MOST_EXPANSION_BITS > self.lengths
        else:
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
    """The chunks of a file between `edges`, (chunks + 1,) int64 positions.

    A block header at an edge belongs to the next chunk. Uncompressed chunks have one record each; `alike` is
    `Spans.lengths` and `Spans.ahead` of all, if equal. `firsts`, (chunks + 1,) int64, are the numbers of the first
    record of each compressed chunk and of all records; None if each has one.
    """

    edges: Any  # arrays of one file, or `ShardNumbers` of many
    alike: tuple[int, int] | None
    compressed: bool = False
    firsts: Any = None

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.edges) - 1 if self.firsts is None else int(self.firsts[-1])

    @property
    def group_size(self) -> int:
        """The most records of a chunk."""
        return 1 if self.firsts is None else int(np.diff(self.firsts).max())

    def locate(self, indices: Int64Array) -> tuple[Int64Array, Int64Array | None]:
        """Return the chunk of each record, (n,) int64, and its number there, None if chunks have one record each."""
        firsts = self.firsts
        if firsts is None:
            return indices, None
        found = (
            firsts.search(indices) if isinstance(firsts, ShardNumbers) else np.searchsorted(firsts, indices, "right")
        )
        return found - 1, (indices & WITHIN) - firsts[found - 1]

    def counts(self, chunks: Int64Array) -> Any:
        """Return how many records chunks have, (n,) int64, or 1 for all."""
        return 1 if self.firsts is None else self.firsts[chunks + 1] - self.firsts[chunks]

    def spans(self, chunks: Int64Array) -> Spans:
        """Return the spans of chunks, (n,) int64."""
        edges = self.edges[chunks]
        starts = edges + BLOCK_HEADER_BYTES * (edges & (BLOCK_SIZE - 1) == 0)
        if self.alike is not None:
            return Spans(starts, *(np.full(len(starts), number) for number in self.alike))
        lengths = _without_headers(self.edges[chunks + 1]) - _without_headers(edges)
        if self.compressed:
            return Spans(starts, lengths, None, self.counts(chunks))
        return Spans(starts, lengths, _BEFORE_SIZE + 1 + np.searchsorted(_LENGTH_STEPS, lengths, side="right"))


def _without_headers(edges: Int64Array) -> Int64Array:
    """Convert positions of edges, (n,), to positions in the file without its block headers."""
    return edges - BLOCK_HEADER_BYTES * ((edges + (BLOCK_SIZE - 1)) >> _BLOCK_BITS)


Read = Callable[[int, int], bytes]
"""Returns the bytes [offset, offset + length) of a file, which are inside it."""


def parse_chunks(read: Read, size: int, decompressor: Decompressor) -> Chunks | None:
    """Find the records of a file of `size` bytes; None if only the package can read it or explain its defect."""
    # It is then compressed, its chunks hold several records, are padded or have another layout, or the last block and
    # the footer contradict each other. The cost is bounded by the size of the footer.
    if size % BLOCK_SIZE:
        return None
    end = size - BLOCK_SIZE
    try:
        footer = _parse_postscript(read(end, BLOCK_SIZE))
        check(0 < footer < end, _may_be_edges(footer))
        return _parse_footer(read, end, footer, decompressor)
    except (CorruptFileError, UnlikeError, IndexError, struct.error):
        return None


def _parse_postscript(block: bytes) -> int:
    """Return the position of the footer, from the last block."""
    data_size, kind, decoded = _CHUNK_HEADER.unpack_from(block, BLOCK_HEADER_BYTES)
    start = BLOCK_HEADER_BYTES + CHUNK_HEADER_BYTES
    size = block[start + 2]
    head = bytes((0, _COPIES, size, size, size))
    message = block[start + len(head) : start + len(head) + size]
    whole = head + _COPIES * message
    check((data_size, kind, decoded) == (len(whole), _SIMPLE | _COPIES << 8, _COPIES * size))
    check(block[start : start + len(whole)] == whole)
    numbers = _numbers(message, 0, size)
    check(numbers.get(2) == _MAGIC)
    return numbers.get(1, 0)


def _numbers(message: bytes, start: int, stop: int) -> dict[int, int]:
    """Return the varint fields of a message by number."""
    fields = walk(message, start, stop, "footer")
    return {number: parse_varint(message, first)[0] for number, wire, first, _ in fields if wire == VARINT}


def _parse_footer(read: Read, end: int, edge: int, decompressor: Decompressor) -> Chunks:
    """Parse the footer, a chunk that starts at `edge`; `end` is the start of the last block."""
    start = edge if edge % BLOCK_SIZE else edge + BLOCK_HEADER_BYTES
    data_size, kind, decoded = _CHUNK_HEADER.unpack(_chunk(read, end, start, CHUNK_HEADER_BYTES))
    count = (kind >> 8) - 1
    check(kind & 0xFF == _SIMPLE, 0 <= count <= edge // CHUNK_HEADER_BYTES, data_size < end - start)
    footer = _chunk(read, end, start, CHUNK_HEADER_BYTES + data_size)
    compressed = footer[CHUNK_HEADER_BYTES] == ZSTD
    if compressed:
        chunk, whole = np.frombuffer(footer, np.uint8), (np.zeros(1, np.int64), np.array([len(footer)]))
        check(decoded <= _MOST_BYTES_ABOUT + _MOST_ENTRY_BYTES * count)
        check(find_damage(chunk, *whole) is None)
        ((messages, edges),) = decompressor.groups(chunk, *whole, np.array([decoded]), np.array([count + 1]))
        footer, messages, size, sizes = messages.tobytes(), 0, int(edges[1]), np.diff(edges)[1:]
    else:
        footer = footer[CHUNK_HEADER_BYTES:]
        bytes_of_sizes, start = parse_varint(footer, 1)
        messages = start + bytes_of_sizes
        size, start = parse_varint(footer, start)
        # The sizes of all messages but the first take one byte.
        check(not footer[0], messages - start == count, len(footer) - messages == decoded)
        sizes = np.frombuffer(footer, np.uint8)[start:messages].astype(np.int64)
    check(size <= min(decoded, _MOST_BYTES_ABOUT))
    total = _count_records(footer, messages, messages + size, count)
    positions, record_bytes, records = _parse_entries(np.frombuffer(footer, np.uint8)[messages + size :], sizes)
    check(int(records.sum()) == total)
    if not compressed:
        return _join(positions, record_bytes, records, edge)
    chunks = _join_compressed(positions, records, edge)
    if not count:
        return chunks
    spans = chunks.spans(np.zeros(1, np.int64))  # all should be of the kind of the first
    head = np.frombuffer(_chunk(read, end, int(spans.starts[0]), HEAD_BYTES), np.uint8)
    check(not spans.differ(head.reshape(1, HEAD_BYTES)))
    return chunks


def _chunk(read: Read, end: int, start: int, length: int) -> bytes:
    """Return the bytes of a chunk without block headers; fewer if the blocks end earlier."""
    parts = Spans(np.array([start]), np.array([length]), None).pieces()
    spans = [(at, at + size) for at, size in zip(parts.offsets.tolist(), parts.lengths.tolist(), strict=True)]
    data = read(start, min(spans[-1][1], end) - start)
    return b"".join([data[first - start : stop - start] for first, stop in spans])


def _count_records(footer: bytes, start: int, stop: int, count: int) -> int | None:
    """Return how many records the first message states; None unless it describes an ArrayRecord of `count` chunks."""
    for number, wire, first, last in walk(footer, start, stop, "footer"):
        if (number, wire) == (1, LENGTH):
            numbers = _numbers(footer, first, last)
            return numbers.get(3) if (numbers.get(1), numbers.get(2)) == (_VERSION, count) else None
    return None


def _parse_entries(messages: BytesArray, sizes: Int64Array) -> Int64Array:
    """Return position, bytes and number of records of each chunk, (3, chunks) int64; messages have `sizes` bytes."""
    edges = np.concatenate(([0], np.cumsum(sizes)))
    check(edges[-1] == len(messages))
    entries = np.empty((3, len(sizes)), np.int64)
    for row in range(0, len(sizes), _ENTRIES_AT_ONCE):
        rows = slice(row, min(row + _ENTRIES_AT_ONCE, len(sizes)))
        block = messages[edges[rows.start] : edges[rows.stop]]
        # Tags and values are varints; the last byte of each has its highest bit clear.
        ends = np.flatnonzero(block < 0x80)
        check(len(ends) == _NUMBERS * (rows.stop - rows.start))
        ends = ends.reshape(-1, _NUMBERS)
        starts = edges[rows] - edges[rows.start]
        tags = np.column_stack((starts, ends[:, 1] + 1, ends[:, 3] + 1))
        check(ends[:, ::2] == tags)
        check(block[tags] == _ENTRY_TAGS)
        for column, values in enumerate(entries):
            values[rows] = parse_numbers(block, ends[:, 2 * column] + 1, ends[:, 2 * column + 1])
    return entries


def _join_compressed(positions: Int64Array, records: Int64Array, end: int) -> Chunks:
    """Return the compressed chunks at `positions` that have so many records, up to `end`."""
    edges = np.append(positions, end)
    check(positions <= end, records >= 1, _may_be_edges(positions))
    lengths = np.diff(_without_headers(edges))
    check(lengths >= HEAD_BYTES, records >> MOST_EXPANSION_BITS <= lengths)
    firsts = None if (records == 1).all() else np.concatenate(([0], np.cumsum(records)))
    return Chunks(edges, None, compressed=True, firsts=firsts)


def _join(positions: Int64Array, sizes: Int64Array, records: Int64Array, end: int) -> Chunks:
    """Return the chunks at `positions` with records of `sizes` bytes if they are contiguous up to `end`."""
    if not len(positions):
        return Chunks(np.array([end], np.int64), None)
    check(records == 1, positions <= end, sizes <= end, _may_be_edges(positions))
    edges = np.append(positions, end)
    widths = 1 + np.searchsorted(_SIZE_STEPS, sizes, side="right")  # bytes of each size as a varint
    check(np.diff(_without_headers(edges)) == sizes + widths + _BEFORE_SIZE)
    ahead = _BEFORE_SIZE + int(widths[0])
    return Chunks(edges, (ahead + int(sizes[0]), ahead) if (sizes == sizes[0]).all() else None)


def _may_be_edges(positions: Any) -> Any:
    """Return whether chunks may start at `positions`: not inside a block header nor right after it."""
    inside = positions & (BLOCK_SIZE - 1)
    return (inside == 0) | (inside > BLOCK_HEADER_BYTES)
