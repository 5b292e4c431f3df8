"""The shard directory and permutations in numpy, as in `_core.c`; see `_shards.h` and `_orders.h`."""

import builtins
import mmap
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns
from typing import Any

import numpy as np

from dataload._util.randomness import ROUNDS, SMALL, hash64, rounds
from dataload.types import Array, BytesArray, Int64Array

PLACE_BITS = 44
"""Bits of a place below the number of its shard: an offset in a file or an index in a table."""

MOST_SHARDS = 1 << 19

_WITHIN = (1 << PLACE_BITS) - 1
_SECOND = 10**9
_FEW_SHARDS = 8  # each read checks their files; with more shards, files are checked once a second


class MapFault(Exception):
    """A mapped file shrank or changed, or its disk failed.

    The message is the offset of the fault or the size; from `Maps`, the number of the shard comes first.
    """


class _Map:
    """A mapped file; see `Maps.put`. `looked` is when its file was looked at last, in ns."""

    def __init__(self, descriptor: int, path: bytes, size: int, changed: int) -> None:
        found = os.fstat(descriptor)
        self.data: Any = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) if size else b""
        self.looked = monotonic_ns()
        self._path, self._changed = path, changed
        self._file = (found.st_dev, found.st_ino)

    def has_changed(self) -> bool:
        """Return whether the file is no longer what was mapped. If another replaced it, the map keeps the old one."""
        try:
            found = os.stat(self._path)
        except OSError:
            return False
        if (found.st_dev, found.st_ino) != self._file:
            return False
        return found.st_size < len(self.data) or found.st_mtime_ns != self._changed


class _Memory(_Map):
    """Plain memory in place of a file; there is nothing to look at."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.looked = data, 1 << 63


class Maps:
    """Mapped files of many shards."""

    def __init__(self, shards: int, /) -> None:
        self._shards = _check_shards(shards)
        self._maps: dict[int, _Map] = {}

    def put(self, shard: int, descriptor: int, path: bytes, size: int, changed: int, /) -> None:
        """Map a file, which may be closed afterwards; `changed` is when it was changed last, in ns."""
        _check_shard(shard, self._shards)
        if size < 0 or size >> PLACE_BITS:
            raise ValueError(f"a file of {size} bytes")
        self._maps[shard] = _Map(descriptor, path, size, changed)

    def open(self, out: Int64Array, shards: Int64Array, paths: bytes, /) -> None:
        """Map a file as each shard, and close it; paths are separated by zero bytes.

        `out`, (shards, 5) int64, is filled with size, time of change in ns, number, device and inode; with zeros for
        what is not a regular file, or cannot be mapped.
        """
        names = paths.split(b"\0")
        if not (
            len(names) == len(shards) == out.size / 5 and all(0 <= each < self._shards for each in shards.tolist())
        ):
            raise ValueError("the shards, the paths and the numbers do not fit")
        for row, shard, name in zip(out.reshape(-1, 5), shards.tolist(), names, strict=True):
            row[:] = 0
            with suppress(OSError):
                if not stat.S_ISREG(os.stat(name).st_mode):
                    continue
                with builtins.open(name, "rb") as stream:
                    found = os.fstat(stream.fileno())
                    self.put(shard, stream.fileno(), name, found.st_size, found.st_mtime_ns)
                version = found.st_size, found.st_mtime_ns, file_number(found.st_dev, found.st_ino)
                row[:] = *version, found.st_dev, found.st_ino

    def put_memory(self, shard: int, buffer: Any, /) -> None:
        """Take plain memory in place of a file."""
        _check_shard(shard, self._shards)
        self._maps[shard] = _Memory(memoryview(buffer).cast("B"))

    def drop(self, shard: int, /) -> None:
        """Unmap a file once no copy uses it."""
        _check_shard(shard, self._shards)
        self._maps.pop(shard, None)

    def gather(self, out: Any, places: Int64Array, length: int, /) -> None:
        """Copy records of `length` bytes at places, (rows,) int64, to the buffer `out`."""
        self._copy(out, places, np.full(len(places), length))

    def gather_ranges(self, out: Any, places: Int64Array, lengths: Int64Array, /) -> None:
        """Copy ranges, (rows,) int64 places and lengths, one after another; they fill `out`."""
        self._copy(out, places, lengths)

    def cut(
        self,
        out: Any,
        places: Int64Array,
        length: int,
        starts: Int64Array,
        lengths: Int64Array,
        targets: Int64Array,
        first: Any,
        mask: Any,
        /,
    ) -> int:
        """See `_core_numpy.cut`."""
        rows = np.empty((len(places), max(0, length)), np.uint8)
        self._find(places, np.full(len(places), length))
        check_cut(rows, memoryview(out).nbytes, starts, lengths, targets, first, mask)
        self.gather(rows, places, length)
        return cut_rows(out, rows, starts, lengths, targets, first, mask)

    def look(self, places: Int64Array, /) -> None:
        """Look at the files of these places, however recently they were looked at."""
        found, _ = self._find(places, np.zeros_like(places))
        self._look(found, 1)

    def will_need(self, places: Int64Array, lengths: Int64Array, /) -> None:
        """Check ranges; the compiled core asks the kernel to read them ahead."""
        self._find(places, lengths)

    def _find(self, places: Int64Array, lengths: Int64Array) -> tuple[list[tuple[int, _Map]], int]:
        """Return the shard and the map of each row, and the length of all ranges."""
        if len(places) != len(lengths):
            raise ValueError(f"{len(places)} places and {len(lengths)} lengths")
        found: list[tuple[int, _Map]] = []
        total = 0
        for row, (place, length) in enumerate(zip(places.tolist(), lengths.tolist(), strict=True)):
            shard, at = place >> PLACE_BITS, place & _WITHIN
            if not 0 <= shard < self._shards:
                raise ValueError(f"row {row}: shard {shard} of {self._shards}")
            if shard not in self._maps:
                raise LookupError(str(shard))
            size = len(self._maps[shard].data)
            if length < 0 or at > size - length:
                raise ValueError(f"row {row}: a range outside the {size} bytes")
            found.append((shard, self._maps[shard]))
            total += length
        return found, total

    def _copy(self, out: Any, places: Int64Array, lengths: Int64Array) -> None:
        target = np.frombuffer(out, np.uint8)
        found, total = self._find(places, lengths)
        if total != target.size:
            raise ValueError(f"ranges of {total} bytes do not fill {target.size} bytes")
        filled = 0
        for (_, each), at, length in zip(found, (places & _WITHIN).tolist(), lengths.tolist(), strict=True):
            target[filled : filled + length] = np.frombuffer(each.data[at : at + length], np.uint8)
            filled += length
        self._look(found, 1 if self._shards <= _FEW_SHARDS else _SECOND)

    def _look(self, found: list[tuple[int, _Map]], interval: int) -> None:
        time = monotonic_ns()
        for shard, each in found:
            if time - each.looked >= interval:
                if each.has_changed():
                    raise MapFault(f"{shard} 0")
                each.looked = time


class Tables:
    """Numbers of many shards: an array for each shard, or a line."""

    def __init__(self, shards: int, /) -> None:
        self._shards = _check_shards(shards)
        self._tables: dict[int, Array | tuple[int, int, int]] = {}

    def put(self, shard: int, array: Array, /) -> None:
        """Set the numbers of a shard: integers of native byte order, which fit into int64."""
        _check_shard(shard, self._shards)
        if array.dtype.str[1:] not in ("u1", "u2", "u4", "i4", "i8") or not array.dtype.isnative:
            raise ValueError(f"a table of numbers of type {array.dtype.char}")
        self._tables[shard] = array

    def put_line(self, shard: int, start: int, stride: int, count: int, /) -> None:
        """Set the numbers of a shard: number i is ``start + i * stride``."""
        _check_shard(shard, self._shards)
        if count < 0 or not all(-(2**63) <= number < 2**63 for number in (count * stride, start + count * stride)):
            raise ValueError(f"start {start}, stride {stride}, count {count}")
        self._tables[shard] = (start, stride, count)

    def take(self, out: Int64Array, places: Int64Array, scale: int, is_place: bool, /) -> None:
        """Fill `out` with the number at each place, times `scale`; as a place in its shard, unless it is negative."""

        def number(row: int, shard: int, at: int) -> int:
            table = self._tables.get(shard)
            if isinstance(table, tuple):
                start, stride, count = table
                if at < count:
                    return start + at * stride
            elif table is not None and at < len(table):
                return int(table[at])
            raise IndexError(f"row {row}: there is no number at {at} of shard {shard}")

        self._look_up(out, places, number, scale, is_place=is_place)

    def search(self, out: Int64Array, places: Int64Array, /) -> None:
        """Fill `out` with how many numbers of the shard are at most the index in a place; as a place."""

        def number(row: int, shard: int, at: int) -> int:
            table = self._tables.get(shard)
            if table is None:
                raise IndexError(f"row {row}: there is no number at {at} of shard {shard}")
            numbers = np.arange(table[2]) * table[1] + table[0] if isinstance(table, tuple) else table
            return int(np.searchsorted(numbers, at, side="right"))

        self._look_up(out, places, number, 1, is_place=True)

    @staticmethod
    def _look_up(
        out: Int64Array, places: Int64Array, number: Callable[[int, int, int], int], scale: int, *, is_place: bool
    ) -> None:
        if out.size != len(places):
            raise ValueError(f"{len(places)} numbers do not fill {out.nbytes} bytes")
        found = np.empty_like(places)
        for row, place in enumerate(places.tolist()):
            at = place & _WITHIN
            value = number(row, place >> PLACE_BITS, at) * scale
            if not -(2**63) <= value < (2**PLACE_BITS if is_place else 2**63):
                raise ValueError(f"row {row}: the number at {at} of shard {place >> PLACE_BITS} is too large")
            found[row] = place - at + value if is_place and value >= 0 else value
        out[:] = found


def put_keys(constants: Any, images: Any, ends: Any, starts: Any, numbers: Any, keys: Any, /) -> int:
    """Set permutations of some numbers to those that keys select, (numbers, 2) uint64."""
    ends, starts = _of_permutations(images, ends, starts, numbers, len(keys) == len(numbers))
    each = np.broadcast_to(np.arange(2 * ROUNDS), (len(keys), 2 * ROUNDS))
    words = hash64(keys[:, 1:], hash64(keys[:, :1], each)) & _masks(ends)[0][:, None]
    constants[numbers] = words | np.arange(2 * ROUNDS, dtype=np.uint64) % 2
    sizes = np.where(ends <= SMALL, ends, 0)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    places = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    hashed = hash64(keys[owners, 1], hash64(keys[owners, 0], places))
    images[starts[owners] + places] = places[np.lexsort((hashed, owners))]
    return 0


def permute(
    constants: Any, images: Any, ends: Any, starts: Any, passes: Any, firsts: Any, numbers: Any, draws: Any, out: Any, /
) -> int:
    """Fill `out` with the image of each draw in its pass, -1 where another pass is set; return how many are."""
    fit = len(numbers) == len(draws) == len(out) and len(passes) == len(firsts) == len(ends)
    ends, starts = _of_permutations(images, ends, starts, numbers, fit)
    turns = (draws / ends).astype(np.int64)
    values = draws - turns * ends
    is_late, is_small = passes[numbers] != turns + firsts[numbers], ends <= SMALL
    out[:] = np.where(is_late, -1, np.append(images, 0)[np.where(is_small, starts + values, -1)])
    rows = np.flatnonzero(~is_late & ~is_small)
    while rows.size:
        (mask, *shifts), words = _masks(ends[rows]), constants[numbers[rows]].T
        keys = [(words[2 * i], words[2 * i + 1], mask, shifts[i % 2]) for i in range(ROUNDS)]
        out[rows] = values[rows] = rounds(values[rows].astype(np.uint64), keys)
        rows = rows[values[rows] >= ends[rows]]
    return int(is_late.sum())


def _masks(ends: Int64Array) -> list[Any]:
    """Return the mask of each domain, and the shifts of even and odd rounds."""
    bits = np.maximum(1, np.frexp(ends - 1.0)[1]).astype(np.uint64)
    half, one = (bits + np.uint64(1)) // np.uint64(2), np.uint64(1)
    return [(one << bits) - one, half, half + one]


def _of_permutations(images: Any, ends: Int64Array, starts: Any, numbers: Any, fit: bool) -> tuple[Int64Array, Any]:
    """Return the ends and starts of permutations by number."""
    right = (numbers >= 0) & (numbers < len(ends)) & fit
    end, start = ends[numbers * right], starts[numbers * right]
    right &= (end > SMALL) | ((end > 0) & (start >= 0) & (start <= len(images) - end))
    if not right.all() or not fit:
        raise ValueError(f"row {int(np.argmin(right))} is of no permutation")
    return end, start


def file_number(device: int, inode: int) -> int:
    """Return a number of a file that others are unlikely to have, in the range of int64."""
    return ((inode ^ device << 48) + 2**63) % 2**64 - 2**63


def check_cut(
    rows: BytesArray, room: int, starts: Int64Array, lengths: Int64Array, targets: Int64Array, first: Any, mask: Any
) -> None:
    """Check the arguments of `_core_numpy.cut`; `room` is the size of all columns."""
    count, length = rows.shape
    if not len(starts) == len(lengths) == len(targets):
        raise ValueError(f"{len(starts)} starts, {len(lengths)} lengths and {len(targets)} targets")
    fields = zip(starts.tolist(), lengths.tolist(), targets.tolist(), strict=True)
    for field, (start, size, target) in enumerate(fields):
        if min(start, size, target) < 0 or start + size > length or target + count * size > room:
            message = f"outside the {length} bytes of a row or the {room} bytes of columns"
            raise ValueError(f"field {field}: {message}")
    if first is not None and (length < 8 or not len(first) == len(mask) == length):
        found = f"a record and a mask of {len(first)} and {len(mask)} bytes"
        raise ValueError(f"{found} for rows of {length}, at least 8")


def cut_rows(
    out: Any, rows: BytesArray, starts: Int64Array, lengths: Int64Array, targets: Int64Array, first: Any, mask: Any
) -> int:
    """Copy fields of `rows`, (rows, bytes); see `_core_numpy.cut`."""
    if first is not None:
        bits = np.frombuffer(mask, np.uint8)
        differ = ((rows ^ np.frombuffer(first, np.uint8)) & bits).any(axis=1)
        if differ.any():
            return int(np.argmax(differ))
    to = np.frombuffer(out, np.uint8)
    for start, size, target in zip(starts.tolist(), lengths.tolist(), targets.tolist(), strict=True):
        to[target : target + len(rows) * size] = rows[:, start : start + size].reshape(-1)
    return -1


def _check_shards(shards: int) -> int:
    if not 0 <= shards <= MOST_SHARDS:
        raise ValueError(f"{shards} shards: a directory has 0 to {MOST_SHARDS}")
    return shards


def _check_shard(shard: int, shards: int) -> None:
    if not 0 <= shard < shards:
        raise ValueError(f"shard {shard} of {shards}")
