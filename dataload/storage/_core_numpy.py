"""The core in numpy, for machines without a C compiler. Each function equals its namesake in `_core.c`.

Files are not mapped here, so `file`, the descriptor behind the buffer `data`, is always -1, for plain memory. A range
outside the buffer is a ValueError. The compiled core alone maps many files at once; see `dataload.storage.core`.
"""

import os
import re
import struct
from typing import Any

import numpy as np

from dataload.storage._orders_numpy import permute, put_keys
from dataload.types import BytesArray, Int64Array

__all__ = [
    "MapFault",
    "Maps",
    "copies",
    "cut",
    "file_versions",
    "gather",
    "gather_ranges",
    "hash_ranges",
    "highway_hashes",
    "integers",
    "lmdb_nodes",
    "permute",
    "put_keys",
    "tar_lines",
    "tar_open",
]


PLACE_BITS = 44
"""Bits of a place below the number of its shard: an offset in a file or an index in a table."""


class MapFault(Exception):
    """A mapped file shrank or changed, or its disk failed; raised by the compiled core only.

    The message is the offset of the fault or the size; from `Maps`, the number of the shard comes first.
    """


class Maps:
    """Memory of many shards, from which ranges are copied. Without the compiled core, that is never of files."""

    def __init__(self, shards: int, /) -> None:
        self._shards: dict[int, memoryview] = {}
        self._count = shards

    def put_memory(self, shard: int, buffer: Any, /) -> None:
        if not 0 <= shard < self._count:
            raise ValueError(f"shard {shard} of {self._count}")
        view = memoryview(buffer)
        self._shards[shard] = view.cast("B") if view.nbytes else memoryview(b"")  # which refuses a shape with zeros

    def drop(self, shard: int, /) -> None:
        self._shards.pop(shard, None)

    def gather(self, out: Any, places: Int64Array, length: int, /) -> None:
        """Copy records of `length` bytes at places, (rows,) int64, to the buffer `out`."""
        self.gather_ranges(out, places, np.full(len(places), length))

    def gather_ranges(self, out: Any, places: Int64Array, lengths: Int64Array, /) -> None:
        """Copy ranges, (rows,) int64 places and lengths, one after another; they fill `out`."""
        target, filled = np.frombuffer(out, np.uint8), 0
        for place, length in zip(places.tolist(), lengths.tolist(), strict=True):
            shard, at = place >> PLACE_BITS, place & (1 << PLACE_BITS) - 1
            source = self._shards[shard]
            if not 0 <= length <= min(source.nbytes - at, target.size - filled):
                raise ValueError(f"a range outside the {source.nbytes} bytes of shard {shard}")
            target[filled : filled + length] = source[at : at + length]
            filled += length

    def cut(self, out: Any, places: Int64Array, length: int, *fields: Any) -> int:
        """Copy fields of records of `length` bytes at places; see `cut`."""
        rows = np.empty((len(places), length), np.uint8)
        self.gather(rows, places, length)
        return cut(out, rows, np.arange(len(places)) * length, length, *fields, file=-1)


def gather(out: Any, data: Any, start: int, stride: int, indices: Int64Array, length: int, file: Any) -> None:
    """Copy records of `length` bytes at ``start + indices[i] * stride``, (rows,) int64, to the buffer `out`."""
    rows, size = len(indices), memoryview(data).nbytes
    target = np.frombuffer(out, np.uint8)
    if start < 0 or stride < 1 or length < 0:
        raise ValueError(f"start {start}, stride {stride}, length {length}: expected at least 0, 1 and 0")
    if target.size != rows * length:
        raise ValueError(f"{rows} rows of {length} bytes do not fill {target.size} bytes")
    end = (size - start - length) // stride + 1 if size - start - length >= 0 else 0
    inside = (indices >= 0) & (indices < end)
    if not inside.all():
        raise ValueError(f"row {int(np.argmin(inside))}: a record outside the {size} bytes")
    if target.size:
        item = np.dtype((np.void, length))
        # `np.take` would first copy records that overlap or have gaps, all of them.
        target.view(item)[:] = np.ndarray((end,), item, data, start, (stride,))[indices]


def gather_ranges(out: Any, data: Any, offsets: Int64Array, lengths: Int64Array, file: Any) -> None:
    """Copy ranges of `data`, (rows,) int64 offsets and lengths in bytes, one after another; they fill `out`."""
    source, target = memoryview(data).cast("B"), memoryview(out).cast("B")
    _check_ranges(offsets, lengths, source.nbytes)
    total = int(lengths.sum())
    if total != target.nbytes:
        raise ValueError(f"ranges of {total} bytes do not fill {target.nbytes} bytes")
    at = 0
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        target[at : at + length] = source[offset : offset + length]
        at += length


def copies(data: Any, offsets: Int64Array, lengths: Int64Array, file: Any) -> list[bytes]:
    """Return ranges of `data`, (rows,) int64 offsets and lengths in bytes, as bytes objects."""
    source = memoryview(data).cast("B")
    _check_ranges(offsets, lengths, source.nbytes)
    pairs = zip(offsets.tolist(), lengths.tolist(), strict=True)
    return [source[offset : offset + length].tobytes() for offset, length in pairs]


def cut(
    out: Any,
    data: Any,
    offsets: Int64Array,
    length: int,
    starts: Int64Array,
    lengths: Int64Array,
    targets: Int64Array,
    first: Any,
    mask: Any,
    file: Any,
) -> int:
    """Copy fields of records of `length` bytes at `offsets`, (rows,) int64, to columns in the buffer `out`.

    A field has `lengths` bytes at `starts` in each record; its column begins at `targets`, all (fields,) int64. Returns
    the first row that differs from the record `first` in the bits of `mask`, or -1; then `out` is incomplete.
    """
    to, count = np.frombuffer(out, np.uint8), len(offsets)
    if not len(starts) == len(lengths) == len(targets):
        raise ValueError(f"{len(starts)} starts, {len(lengths)} lengths and {len(targets)} targets")
    fields = [*zip(starts.tolist(), lengths.tolist(), targets.tolist(), strict=True)]
    for field, (start, size, target) in enumerate(fields):
        if min(start, size, target) < 0 or start + size > length or target + count * size > to.size:
            message = f"outside the {max(0, length)} bytes of a row or the {to.size} bytes of columns"
            raise ValueError(f"field {field}: {message}")
    if first is not None and (length < 8 or not len(first) == len(mask) == length):
        found = f"a record and a mask of {len(first)} and {len(mask)} bytes"
        raise ValueError(f"{found} for rows of {max(0, length)}, at least 8")
    rows = np.empty((count, max(0, length)), np.uint8)
    gather(rows, data, 0, 1, offsets, length, file)
    if first is not None:
        differ = ((rows ^ np.frombuffer(first, np.uint8)) & np.frombuffer(mask, np.uint8)).any(axis=1)
        if differ.any():
            return int(np.argmax(differ))
    for start, size, target in fields:
        to[target : target + count * size] = rows[:, start : start + size].reshape(-1)
    return -1


def file_number(device: int, inode: int) -> int:
    """Return a number of a file that others are unlikely to have, in the range of int64."""
    return ((inode ^ device << 48) + 2**63) % 2**64 - 2**63


def file_versions(out: Int64Array, paths: bytes, /) -> None:
    """Fill `out` with size, time of change in ns and number of each file, (files, 3) int64; zeros for a missing one.

    Paths are separated by zero bytes.
    """
    names = paths.split(b"\0") if paths or out.size else []
    if out.size != 3 * len(names):
        raise ValueError(f"versions of {len(names)} files do not fill {out.nbytes} bytes")
    for row, name in zip(out.reshape(-1, 3), names, strict=True):
        try:
            found = os.stat(name)
        except OSError:
            row[:] = 0
        else:
            row[:] = found.st_size, found.st_mtime_ns, file_number(found.st_dev, found.st_ino)


def integers(out: Int64Array, data: Any, offsets: Int64Array, lengths: Int64Array, /) -> int:
    """Fill `out`, (rows,), with decimal numbers; return the first row not of 1 to 18 digits after a minus, or -1."""
    if out.size != len(offsets):
        raise ValueError(f"{len(offsets)} numbers do not fill {out.nbytes} bytes")
    for row, text in enumerate(copies(data, offsets, lengths, -1)):
        if not _INTEGER.fullmatch(text):
            return row
        out[row] = int(text)
    return -1


def hash_ranges(out: Any, data: Any, offsets: Int64Array, lengths: Int64Array, key: bytes, file: Any) -> None:
    """Write the 64-bit HighwayHash of ranges, (rows,) int64, of `data` to `out`, (rows,) uint64; `key`: 32 bytes."""
    source, target = np.frombuffer(data, np.uint8), np.frombuffer(out, np.uint8)
    _check_ranges(offsets, lengths, source.size)
    if len(key) != 32 or target.size != 8 * len(offsets):
        raise ValueError(
            f"a key of {len(key)} bytes, and {target.size} bytes for {len(offsets)} hashes: expected 32, and 8 for each"
        )
    target.view(np.uint64)[:] = highway_hashes(source, offsets, lengths, key)


_INTEGER = re.compile(rb"-?[0-9]{1,18}")


def _check_ranges(offsets: Int64Array, lengths: Int64Array, size: int) -> None:
    if len(offsets) != len(lengths):
        raise ValueError(f"{len(offsets)} offsets and {len(lengths)} lengths")
    inside = (lengths >= 0) & (lengths <= size) & (offsets >= 0)
    inside &= offsets <= size - np.where(inside, lengths, 0)
    if not inside.all():
        raise ValueError(f"row {int(np.argmin(inside))}: a range outside the {size} bytes")
    if float(lengths.sum(dtype=np.float64)) > 2.0**63:
        raise OverflowError("the ranges are longer than any memory")


_START = np.array(
    [
        [0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3],
        [0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377],
    ],
    np.uint64,
)
_ZIPPED = np.array([3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7])  # bytes of two words
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_PACKET = 32  # bytes


def highway_hashes(data: BytesArray, offsets: Int64Array, lengths: Int64Array, key: bytes) -> Any:
    """Return the hashes, (rows,) uint64, of ranges of `data`, (rows,) int64 offsets and lengths."""
    order = np.argsort(-lengths, kind="stable")  # those with a further packet come first
    starts, sizes = offsets[order], lengths[order]
    words = np.frombuffer(key, "<u8")
    mul = np.repeat(_START[:, None], len(order), axis=1)  # (2, rows, 4), a half of the state; `add` is the other
    add = mul ^ np.stack([words, _swap(words)])[:, None]
    for at in range(0, int(sizes.max(initial=0)) - _PACKET + 1, _PACKET):
        rows = int(np.count_nonzero(sizes >= at + _PACKET))
        packets = data[starts[:rows, None] + np.arange(at, at + _PACKET)]
        _mix(add[:, :rows], mul[:, :rows], packets.view("<u8"))
    _mix_rests(add, mul, [data[start : start + size] for start, size in zip(starts, sizes, strict=True)])
    for _ in range(4):
        _mix(add, mul, _swap(add[0][:, [2, 3, 0, 1]]))
    hashes = np.empty(len(order), np.uint64)
    hashes[order] = add[0, :, 0] + add[1, :, 0] + mul[0, :, 0] + mul[1, :, 0]
    return hashes


def _swap(words: Any) -> Any:
    return words << _HALF | words >> _HALF


def _mix(add: Any, mul: Any, words: Any) -> None:
    add[1] += words + mul[0]
    mul[0] ^= (add[1] & _LOW) * (add[0] >> _HALF)
    add[0] += mul[1]
    mul[1] ^= (add[0] & _LOW) * (add[1] >> _HALF)
    add[0] += _zip(add[1])
    add[1] += _zip(add[0])


def _zip(words: Any) -> Any:
    pairs = words.astype("<u8").view(np.uint8).reshape(-1, 16)
    return pairs.take(_ZIPPED, axis=1).view("<u8").reshape(-1, 4)


def _mix_rests(add: Any, mul: Any, ranges: list[BytesArray]) -> None:
    rows = [row for row, each in enumerate(ranges) if each.size % _PACKET]
    rests = [ranges[row][ranges[row].size // _PACKET * _PACKET :].tobytes() for row in rows]
    size = np.array([len(rest) for rest in rests], np.uint64)[:, None]
    add_rows, mul_rows = add[:, rows], mul[:, rows]
    add_rows[0] += (size << _HALF) + size
    low, high = add_rows[1] & _LOW, add_rows[1] >> _HALF
    low, high = ((half << size | half >> (_HALF - size)) & _LOW for half in (low, high))
    add_rows[1] = high << _HALF | low
    packets = b"".join(map(_last_packet, rests))
    _mix(add_rows, mul_rows, np.frombuffer(packets, "<u8").reshape(-1, 4))
    add[:, rows], mul[:, rows] = add_rows, mul_rows


def _last_packet(rest: bytes) -> bytes:
    odd = len(rest) % 4
    whole = rest[: len(rest) - odd]
    if len(rest) & 16:
        return whole.ljust(28, b"\0") + rest[-4:]
    ends = bytes((rest[-odd], rest[-odd + odd // 2], rest[-1])) if odd else b""
    return (whole.ljust(16, b"\0") + ends).ljust(_PACKET, b"\0")


def tar_lines(*_: Any) -> tuple[Any, ...] | None:
    """Parse (text, start, samples, fields) of an archive's text index; None if it is unusual, and always here.

    Returns extensions, each before a space, and bytes of a `SampleTable`: codes, ends, blocks, sizes, keys, their ends.
    """


def tar_open(
    archives: bytes, indexes: bytes, versions: Int64Array, checks: bool, /
) -> list[tuple[int, int, tuple[Any, ...]] | None]:
    """Open the first of several archives, at least one, and their text indexes; paths are separated by zero bytes.

    Returns the device, the inode and the result of `tar_lines`. None for an archive of another version or outside which
    components are, for an unusual or long index, and always here. With `checks`, some headers are compared.
    """
    del indexes, versions, checks
    return [None] * (archives.count(b"\0") + 1)


_BRANCH, _PAGE_KINDS, _LARGE, _NODE_BYTES = 1, 0x6F, 1, 8
_DECIMAL = re.compile(rb"0*[0-9]{1,18}")
_BAD_KIND, _BAD_BOUNDS, _BAD_POSITION, _BAD_ENTRY, _BAD_PAGE = range(1, 6)


def lmdb_nodes(
    out: Int64Array,
    counts: Int64Array,
    pages: BytesArray,
    numbers: Int64Array,
    page_size: int,
    header_size: int,
    size: int,
    kind: int,
) -> int:
    """Parse and check branch or leaf pages of LMDB, and return the number of nodes.

    `kind` is the flag of the pages: 1 for branches, 2 for leaves; see `dataload.sources.lmdb.file`. `pages` is
    (pages, page_size) uint8, contiguous; `numbers`, (pages,) int64, are their numbers; `size` is the bytes in use.

    Fills `counts`, (pages,) int64, with the nodes of each page, and `out`, (4, capacity) int64: the number of the child
    page, or for leaves the value's offset in the file, its length, the key as a decimal number below 10**18 (else -1),
    and the key's size plus 65,536 times the flags. Returns -(8 * row + reason) for the first page that is refused.
    """
    fit = header_size in (16, 24) and 256 <= page_size <= 65536 and page_size % 8 == 0
    fit = fit and pages.size == len(numbers) * page_size and len(counts) == len(numbers)
    most = page_size // (_NODE_BYTES + 2)
    if not fit or out.shape[1] < len(numbers) * most:
        raise ValueError("the pages and the buffers do not fit each other")
    outside = (numbers < 0) | (numbers >= size // page_size)
    if outside.any():
        raise ValueError(f"row {int(np.argmax(outside))}: a page outside the {size} bytes")
    base = header_size if header_size == 24 else 0  # since LMDB 1.0, positions do not count the header
    total = 0
    for row, (number, page) in enumerate(zip(numbers.tolist(), pages.reshape(-1, page_size), strict=True)):
        data = page.tobytes()
        flags, lower, upper = _HEADER.unpack_from(data, header_size - _HEADER.size)
        counts[row] = count = (lower + base - header_size) // 2
        if flags & _PAGE_KINDS != kind:
            return -(8 * row + _BAD_KIND)
        if not (header_size <= lower + base and lower <= upper and upper + base <= page_size and count <= most):
            return -(8 * row + _BAD_BOUNDS)
        nodes = [base + node for (node,) in _POSITION.iter_unpack(data[header_size : header_size + 2 * count])]
        for node in nodes:
            found = _parse_node(data, node, number * page_size, page_size, header_size, size, kind)
            if isinstance(found, int):
                return -(8 * row + found)
            out[: len(found), total] = found
            total += 1
    return total


_HEADER, _POSITION, _NODE, _NUMBER = (
    struct.Struct("=3H"),
    struct.Struct("=H"),
    struct.Struct("=4H"),
    struct.Struct("=Q"),
)


def _parse_node(
    data: bytes, node: int, start: int, page_size: int, header_size: int, size: int, kind: int
) -> tuple[int, ...] | int:
    """Return the numbers of a node of the page `data`, which begins at `start` of the file; or why it is refused."""
    if not header_size <= node <= page_size - _NODE_BYTES or node % 2:
        return _BAD_POSITION
    low, high, flags, key_size = _NODE.unpack_from(data, node)
    length = low | high << 16
    if kind == _BRANCH:
        child = length | flags << 32
        return (child,) if 2 <= child < size // page_size else _BAD_PAGE
    value = node + _NODE_BYTES + key_size
    value += key_size & 1 if header_size == 24 else 0  # LMDB 1.0 aligns values to two bytes
    if value + (_NUMBER.size if flags & _LARGE else length) > page_size:
        return _BAD_ENTRY
    offset = start + value
    if flags & _LARGE:
        (page,) = _NUMBER.unpack_from(data, value)
        offset = page * page_size + header_size
        if not 2 <= page < size // page_size or offset + length > size:
            return _BAD_PAGE
    key = data[node + _NODE_BYTES : node + _NODE_BYTES + key_size]
    return offset, length, int(key) if _DECIMAL.fullmatch(key) else -1, key_size | flags << 16
