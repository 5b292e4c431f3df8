"""The core in numpy, used if `_core.c` could not be compiled. Each function equals its namesake there.

`file` is the descriptor behind the buffer `data`, -1 for plain memory, or a pair with the file's last change in ns.
Errors: ValueError for a range outside the buffer, `MapFault` if the file has shrunk or changed.
"""

import os
import re
from contextlib import suppress
from typing import Any

import numpy as np

from dataload.storage._shards_numpy import MapFault, Maps, Tables, check_cut, cut_rows, file_number, permute, put_keys
from dataload.types import Array, BytesArray, Int64Array

__all__ = [
    "MapFault",
    "Maps",
    "Tables",
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
    "read_small",
    "tar_lines",
    "tar_open",
]


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
    _check_file(size, file)


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
    _check_file(source.nbytes, file)


def copies(data: Any, offsets: Int64Array, lengths: Int64Array, file: Any) -> list[bytes]:
    """Return ranges of `data`, (rows,) int64 offsets and lengths in bytes, as bytes objects."""
    source = memoryview(data).cast("B")
    _check_ranges(offsets, lengths, source.nbytes)
    pairs = zip(offsets.tolist(), lengths.tolist(), strict=True)
    found = [source[offset : offset + length].tobytes() for offset, length in pairs]
    _check_file(source.nbytes, file)
    return found


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
    rows = np.empty((len(offsets), max(0, length)), np.uint8)
    check_cut(rows, memoryview(out).nbytes, starts, lengths, targets, first, mask)
    gather(rows, data, 0, 1, offsets, length, file)
    return cut_rows(out, rows, starts, lengths, targets, first, mask)


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
    _check_file(source.size, file)


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


def _check_file(size: int, file: Any) -> None:
    descriptor, changed = file if isinstance(file, tuple) else (file, None)
    found = os.fstat(descriptor) if descriptor >= 0 else None
    if found is not None and (found.st_size < size or changed not in (None, found.st_mtime_ns)):
        raise MapFault(str(found.st_size))


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


_BRANCH, _PAGE_KINDS, _LARGE, _NODE_BYTES, _DECIMAL_LIMIT = 1, 0x6F, 1, 8, 10**18


def read_small(path: bytes, /) -> bytes | None:
    """Return the content of a regular file of at most 64 KiB; None for others, and if it cannot be read."""
    with suppress(OSError):
        if os.path.isfile(path) and os.path.getsize(path) <= 1 << 16:
            with open(path, "rb") as stream:
                return stream.read()
    return None


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
    if not fit or out.shape[1] < len(numbers) * (page_size // (_NODE_BYTES + 2)):
        raise ValueError("the pages and the buffers do not fit each other")
    outside = (numbers < 0) | (numbers >= size // page_size)
    if outside.any():
        raise ValueError(f"row {int(np.argmax(outside))}: a page outside the {size} bytes")
    words = pages.reshape(-1).view(np.uint16)
    good, refusal = _check_headers(words.reshape(len(numbers), -1), counts, page_size, header_size, kind)
    per_page = counts[:good]
    total = int(per_page.sum())
    pages_of = np.repeat(np.arange(good), per_page)
    places = np.arange(total) - np.repeat(np.cumsum(per_page) - per_page, per_page)
    nodes = words[pages_of * (page_size // 2) + header_size // 2 + places].astype(np.int64)
    nodes += header_size if header_size == 24 else 0  # since LMDB 1.0, positions do not count the header
    bad = np.zeros(total, np.uint8)
    outside = (nodes < header_size) | (nodes > page_size - _NODE_BYTES) | (nodes % 2 != 0)
    if outside.any():
        bad[outside] = _BAD_POSITION
        nodes[outside] = header_size
    starts = pages_of * page_size + nodes
    if kind == _BRANCH:
        _fill_branches(out, bad, words, starts // 2, size // page_size)
    else:
        values = _fill_entries(out, bad, words, starts, page_size - nodes, header_size)
        out[0, :total] = numbers[pages_of] * page_size + (values - pages_of * page_size)
        _fill_large(out, bad, pages.reshape(-1), values, page_size, header_size, size)
        _fill_decimals(out, bad, pages.reshape(-1), starts + _NODE_BYTES)
    first = np.flatnonzero(bad)[:1]
    if first.size:
        return -int(8 * pages_of[first[0]] + bad[first[0]])
    return -(8 * good + refusal) if refusal else total


def _check_headers(words: Array, counts: Int64Array, page_size: int, header_size: int, kind: int) -> tuple[int, int]:
    """Fill `counts`; return the number of pages before the first invalid one, and the reason (0 if all are valid)."""
    flags, lower, upper = words[:, header_size // 2 - 3 : header_size // 2].T.astype(np.int64)
    base = header_size if header_size == 24 else 0
    counts[:] = (lower + base - header_size) // 2
    wrong_kind = flags & _PAGE_KINDS != kind
    in_order = (header_size <= lower + base) & (lower <= upper) & (upper + base <= page_size)
    wrong_bounds = ~in_order | (counts > page_size // (_NODE_BYTES + 2))
    first = np.flatnonzero(wrong_kind | wrong_bounds)[:1]
    if not first.size:
        return len(words), 0
    return int(first[0]), _BAD_KIND if wrong_kind[first[0]] else _BAD_BOUNDS


def _fill_branches(out: Int64Array, bad: BytesArray, words: Array, at: Int64Array, pages: int) -> None:
    """Fill in the children of nodes, whose offsets in words are (nodes,); `pages` limits their numbers."""
    low, high, top = (words[at + place].astype(np.int64) for place in range(3))
    children = low | high << 16 | top << 32
    out[0, : len(at)] = children
    bad[((children < 2) | (children >= pages)) & (bad == 0)] = _BAD_PAGE


def _fill_entries(
    out: Int64Array, bad: BytesArray, words: Array, starts: Int64Array, room: Int64Array, header_size: int
) -> Int64Array:
    """Fill in lengths, key sizes and flags; return (nodes,) offsets of the values, or of their page numbers."""
    at = starts // 2
    low, high, flags, keys = (words[at + place].astype(np.int64) for place in range(4))
    length = low | high << 16
    before = _NODE_BYTES + keys
    if header_size == 24:  # LMDB 1.0 aligns values to two bytes
        before += keys & 1
    stored = np.where(flags & _LARGE, 8, length)
    bad[(before + stored > room) & (bad == 0)] = _BAD_ENTRY
    out[1, : len(at)] = length
    out[3, : len(at)] = keys | flags << 16
    return starts + before


def _fill_large(
    out: Int64Array, bad: BytesArray, data: BytesArray, values: Int64Array, page_size: int, header_size: int, size: int
) -> None:
    rows = np.flatnonzero((out[3, : len(values)] >> 16 & _LARGE != 0) & (bad == 0))
    found = data[values[rows, None] + np.arange(8)].view(np.uint64).ravel()
    inside = (found >= 2) & (found < size // page_size)
    offsets = np.where(inside, found, 0).astype(np.int64) * page_size + header_size
    inside &= offsets + out[1, rows] <= size
    out[0, rows] = offsets
    bad[rows[~inside]] = _BAD_PAGE


def _fill_decimals(out: Int64Array, bad: BytesArray, data: BytesArray, keys: Int64Array) -> None:
    """Fill in the keys that are decimal numbers, given the offsets of the keys."""
    sizes = out[3, : len(keys)] & 0xFFFF
    numbers = out[2, : len(keys)]
    numbers[:] = -1
    candidates = np.flatnonzero((sizes > 0) & (bad == 0))
    for size in np.unique(sizes[candidates]).tolist():
        rows = candidates[sizes[candidates] == size]
        value = np.zeros(len(rows), np.int64)
        for place in range(size):
            digits = data[keys[rows] + place] - np.uint8(ord("0"))  # wraps around
            decimal = (digits <= 9) & (value < _DECIMAL_LIMIT // 10)
            if not decimal.all():
                rows, value, digits = rows[decimal], value[decimal], digits[decimal]
                if not len(rows):
                    break
            value = value * 10 + digits
        numbers[rows] = value
