"""The core in numpy, used where `_core.c` could not be compiled; each function equals the one of the same name there.

Arguments called `data` are buffers, and `descriptor` is the file behind a mapped one, or -1 for plain memory. All
functions raise ValueError for a range outside its buffer, and `MapFault` if the file has shrunk. Only the compiled core
survives a file that shrinks during a copy, so files are not mapped without it.
"""

import os
from typing import Any

import numpy as np

from dataload.storage._highway import highway_hashes
from dataload.storage._lmdb import lmdb_nodes as lmdb_nodes  # the twin of the one in `_core.c`
from dataload.types import Int64Array


class MapFault(Exception):
    """A mapped file has shrunk."""


def gather(out: Any, data: Any, start: int, stride: int, indices: Int64Array, length: int, descriptor: int) -> None:
    """Copy records of one length: row i of `out` is the record at ``start + indices[i] * stride``.

    Args:
        out: Writable buffer of ``rows * length`` bytes.
        data: Buffer that holds the records.
        start: Offset of record 0, at least 0.
        stride: Bytes between the starts of two records, at least 1.
        indices: (rows,) int64, at least 0.
        length: Bytes of a record, at least 0.
        descriptor: See the module.
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
    _check_size(size, descriptor)


def gather_ranges(out: Any, data: Any, offsets: Int64Array, lengths: Int64Array, descriptor: int) -> None:
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
    _check_size(source.nbytes, descriptor)


def copies(data: Any, offsets: Int64Array, lengths: Int64Array, descriptor: int) -> list[bytes]:
    """Return ranges of `data`, (rows,) int64 offsets and lengths in bytes, as bytes objects."""
    source = memoryview(data).cast("B")
    _check_ranges(offsets, lengths, source.nbytes)
    pairs = zip(offsets.tolist(), lengths.tolist(), strict=True)
    found = [source[offset : offset + length].tobytes() for offset, length in pairs]
    _check_size(source.nbytes, descriptor)
    return found


def hash_ranges(out: Any, data: Any, offsets: Int64Array, lengths: Int64Array, key: bytes, descriptor: int) -> None:
    """Compute the HighwayHash, with 64 bits, of ranges of `data`.

    Args:
        out: Writable buffer for (rows,) uint64.
        data: Buffer that holds the ranges.
        offsets: (rows,) int64, where the ranges start.
        lengths: (rows,) int64, their bytes.
        key: 32 bytes.
        descriptor: See the module.
    """
    source, target = np.frombuffer(data, np.uint8), np.frombuffer(out, np.uint8)
    _check_ranges(offsets, lengths, source.size)
    if len(key) != 32 or target.size != 8 * len(offsets):
        raise ValueError(
            f"a key of {len(key)} bytes, and {target.size} bytes for {len(offsets)} hashes: expected 32, and 8 for each"
        )
    target.view(np.uint64)[:] = highway_hashes(source, offsets, lengths, key)
    _check_size(source.size, descriptor)


def _check_ranges(offsets: Int64Array, lengths: Int64Array, size: int) -> None:
    if len(offsets) != len(lengths):
        raise ValueError(f"{len(offsets)} offsets and {len(lengths)} lengths")
    inside = (lengths >= 0) & (lengths <= size) & (offsets >= 0)
    inside &= offsets <= size - np.where(inside, lengths, 0)
    if not inside.all():
        raise ValueError(f"row {int(np.argmin(inside))}: a range outside the {size} bytes")
    if float(lengths.sum(dtype=np.float64)) > 2.0**63:
        raise OverflowError("the ranges are longer than any memory")


def _check_size(size: int, descriptor: int) -> None:
    if descriptor >= 0 and os.fstat(descriptor).st_size < size:
        raise MapFault("the file has shrunk")
