"""Chunks that are compressed by Zstandard, decompressed by the package zstandard."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from dataload._util.arrays import pooled_empty
from dataload._util.caches import DecodedCache
from dataload._util.clock import decoding
from dataload._util.machine import usable_cpus
from dataload._util.threads import DaemonThreads
from dataload.sources.array_record.layout import CHUNK_HEADER_BYTES, MOST_VARINT_BYTES, parse_numbers
from dataload.types import BytesArray, BytesColumn, Int64Array

ZSTD = 0x7A
"""The compression, in the first byte of a chunk's data."""

MOST_EXPANSION_BITS = 16
"""Four bytes of a frame expand to 128 KiB at most."""

_BYTES_IN_THREADS = 1 << 22  # decompressed; fewer take as long as threads to start


class UnlikeError(Exception):
    """A chunk has another layout than is read here. The package array_record may read it, or say what is wrong."""


class Decompressor:
    """Decompresses chunks in a block of memory, which begin at `starts` and end at `stops`, (n,) int64.

    One serves all files of a source, because a context takes 160 KB; `cached` keeps groups of records.
    """

    def __init__(self, cached: DecodedCache) -> None:
        self.cached: DecodedCache = cached
        self._idle: list[Any] = []  # contexts; each serves one thread at a time

    def __reduce__(self) -> Any:
        return Decompressor, (self.cached,)

    def records(self, block: BytesArray, starts: Int64Array, stops: Int64Array, sizes: Int64Array) -> BytesColumn:
        """Return the records of chunks that have one each, of `sizes` bytes, (n,) int64."""
        first = _numbers_at(block, starts + CHUNK_HEADER_BYTES + 1)
        found, frames = _numbers_at(block, _end(*first, stops))
        _check(found == sizes, frames <= stops)
        ends = np.cumsum(sizes)
        out = pooled_empty((int(ends[-1]),), np.uint8)

        def fill(rows: slice) -> None:
            target, spans = out.data, zip((ends - sizes)[rows].tolist(), ends[rows].tolist(), strict=True)
            # The memory of one frame is used again for the next. Memory for all would be new each time: a page fault
            # for every 4 KiB takes longer than another copy.
            each = self._each(block, frames[rows], stops[rows], sizes[rows])
            for (start, end), data in zip(spans, each, strict=True):
                target[start:end] = data

        threads = min(usable_cpus(), len(sizes)) if len(out) >= _BYTES_IN_THREADS else 1
        with decoding():
            if threads == 1:
                fill(slice(None))
            else:
                cuts = [0, *np.searchsorted(ends, np.arange(1, threads) * (len(out) // threads)).tolist(), len(ends)]
                with DaemonThreads(threads) as pool:
                    list(pool.map(fill, map(slice, cuts, cuts[1:])))
        return BytesColumn.packed(out, ends)

    def groups(
        self, block: BytesArray, starts: Int64Array, stops: Int64Array, sizes: Int64Array, counts: Int64Array
    ) -> list[tuple[bytes, Int64Array]]:
        """Return all records of each chunk, and their edges; they are `counts`, and take `sizes` bytes, (n,) int64."""
        first = _numbers_at(block, starts + CHUNK_HEADER_BYTES + 1)
        middle = _end(*first, stops)
        found, frames = _numbers_at(block, middle)
        _check(found == sizes, frames <= stops)
        expanded, heads = _numbers_at(block, first[1])
        _check(heads <= middle, expanded // MOST_VARINT_BYTES <= counts)
        with decoding():
            packed = b"".join(self._each(block, heads, middle, expanded))
            records = list(self._each(block, frames, stops, sizes))
        numbers = np.frombuffer(packed, np.uint8)
        lasts, ends = np.flatnonzero(numbers < 0x80), np.cumsum(counts)
        _check(len(lasts) == ends[-1])
        _check(lasts[ends - 1] + 1 == np.cumsum(expanded))
        lengths = _numbers(numbers, np.concatenate(([0], lasts[:-1] + 1)), lasts)
        _check(lengths <= np.repeat(sizes, counts))
        edges = np.concatenate(([0], np.cumsum(lengths)))
        _check(edges[ends] == np.cumsum(sizes))
        each = zip((ends - counts).tolist(), ends.tolist(), records, strict=True)
        return [(data, edges[begin : end + 1] - edges[begin]) for begin, end, data in each]

    def _each(self, block: BytesArray, starts: Int64Array, stops: Int64Array, sizes: Int64Array) -> Iterator[bytes]:
        """Yield what frames expand to; an UnlikeError if that has not `sizes` bytes."""
        try:
            package = import_module("zstandard")
        except ImportError as error:
            raise UnlikeError from error
        context = self._idle.pop() if self._idle else package.ZstdDecompressor()
        told, decompress, view = package.frame_content_size, context.decompress, block.data
        for start, stop, size in zip(starts.tolist(), stops.tolist(), sizes.tolist(), strict=True):
            frame = view[start:stop]
            try:
                if told(frame) not in (size, -1):  # so much memory is taken
                    raise UnlikeError
                data: bytes = decompress(frame, size)
            except package.ZstdError as error:
                raise UnlikeError from error
            if len(data) != size:
                raise UnlikeError
            yield data
        self._idle.append(context)


def _check(*holds: Any) -> None:
    if not all(map(np.all, holds)):
        raise UnlikeError


def _end(lengths: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
    """Return the ends of what has these lengths, if they are in the chunks."""
    _check(lengths < stops - starts)
    return starts + lengths


def _numbers(data: BytesArray, starts: Int64Array, lasts: Int64Array) -> Int64Array:
    found = parse_numbers(data, starts, lasts)
    if found is None:
        raise UnlikeError
    return found


def _numbers_at(data: BytesArray, starts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the varints at positions, (n,) int64, and the positions after them."""
    lasts = starts.copy()
    for _ in range(MOST_VARINT_BYTES):
        _check(lasts < len(data))
        longer = data[lasts] > 0x7F
        if not longer.any():
            break
        lasts += longer
    return _numbers(data, starts, lasts), lasts + 1
