"""The core in numpy, used where `_core.c` could not be compiled; each function equals the one of the same name there.

Arguments called `data` are buffers, and `file` is the descriptor of the file behind a mapped one, or -1 for plain
memory; or the descriptor, and when the file was changed last, in nanoseconds. All functions raise ValueError for a
range outside its buffer, and `MapFault` if the file has shrunk or was changed since. Only the compiled core survives a
file that shrinks during a copy, so files are not mapped without it.
"""

import os
from typing import Any

import numpy as np

from dataload.storage._highway import highway_hashes
from dataload.storage._lmdb import lmdb_nodes as lmdb_nodes  # the twin of the one in `_core.c`
from dataload.types import Int64Array


class MapFault(Exception):
    """A mapped file has shrunk, was changed, or its disk fails. The message is the offset of a fault, or the size."""


def gather(out: Any, data: Any, start: int, stride: int, indices: Int64Array, length: int, file: Any) -> None:
    """Copy records of `length` bytes: row i of `out` is the record at ``start + indices[i] * stride`` in `data`.

    `out` is a writable buffer of ``rows * length`` bytes; `indices` is (rows,) int64, at least 0; `stride` is positive.
    """
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


def hash_ranges(out: Any, data: Any, offsets: Int64Array, lengths: Int64Array, key: bytes, file: Any) -> None:
    """Write the 64-bit HighwayHash of ranges of `data` to `out`, (rows,) uint64; `key` is 32 bytes.

    The ranges are (rows,) int64 `offsets` and `lengths` in bytes.
    """
    source, target = np.frombuffer(data, np.uint8), np.frombuffer(out, np.uint8)
    _check_ranges(offsets, lengths, source.size)
    if len(key) != 32 or target.size != 8 * len(offsets):
        raise ValueError(
            f"a key of {len(key)} bytes, and {target.size} bytes for {len(offsets)} hashes: expected 32, and 8 for each"
        )
    target.view(np.uint64)[:] = highway_hashes(source, offsets, lengths, key)
    _check_file(source.size, file)


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
