"""Records of uncompressed ArrayRecord files, copied out of the file without the package."""

from __future__ import annotations

import struct
from typing import Any, cast

import numpy as np

from dataload.sources.array_record.layout import BLOCK_SIZE
from dataload.sources.array_record.riegeli import BLOCK_HEADER_BYTES, HEAD_BYTES, Chunks, Spans, parse_chunks, pieces
from dataload.storage import RecordFile, storage_of
from dataload.storage.core import core
from dataload.storage.table_cache import CachedTable, IndexKey, load_cached, store_cached
from dataload.types import Array, BytesArray, BytesColumn, Int64Array

_CHECKED_BYTES = 42  # of a head; the smallest chunk has one more
_LEAST_CACHED = 100_000  # records; parsing the footer of fewer takes 20 ms
_CUT = struct.Struct("<8xQQ")  # in a block header: bytes from the start of the chunk, bytes to its end


class MappedRecords:
    """The records of one file.

    Reads are thread-safe. Each read checks that the chunk headers agree with the footer, and that the block headers
    inside chunks have the right distances. It does not check hashes.
    """

    def __init__(self, file: RecordFile, chunks: Chunks) -> None:
        self._file = file
        self._chunks = chunks

    @classmethod
    def open(cls, path: str, *, mapped: bool = True, cache: bool = True) -> MappedRecords | None:
        """Open a file; None if only the package can read it (or report what is wrong with it)."""
        file = storage_of(path).map(path, mapped=mapped)
        key = IndexKey.of("array_record", (path,)) if cache else None
        found = None if key is None else load_cached(key)
        chunks = None if found is None else _unpack(found, file.size)
        if chunks is None:
            chunks = parse_chunks(file.read, file.size)
            if key is not None and chunks is not None and len(chunks) >= _LEAST_CACHED:
                store_cached(key, CachedTable({"edges": chunks.edges}, {"alike": chunks.alike}))
        return None if chunks is None else cls(file, chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def release(self) -> None:
        """Close the file. The next read opens it again."""
        self._file.release()

    def read(self, indices: Int64Array) -> list[bytes] | None:
        """Return the bytes of records.

        Args:
            indices: (rows,) int64 in [0, len), at least one.

        Returns:
            None if a chunk does not look as the footer says.

        Raises:
            CorruptFileError: The file is shorter now.
        """
        spans = self._chunks.spans(indices)
        self._file.hint(spans.starts, spans.lengths)
        joined = self._join_cut(spans, self._file.gather(spans.starts, HEAD_BYTES))
        if joined is None:
            return None
        sizes = spans.lengths - spans.ahead
        sizes[list(joined)] = 0
        records = self._file.copies(spans.starts + spans.ahead, sizes)
        for row, record in joined.items():
            records[row] = record
        return records

    def read_together(self, indices: Int64Array) -> BytesColumn | None:
        """Return the bytes of records in one block of memory; see `read`."""
        spans = self._chunks.spans(indices)
        (block,), _, starts, stops = self._file.gather_ranges(spans.starts, spans.lengths).parts()
        return BytesColumn([block], None, starts + spans.ahead, stops) if self._mend(block, spans) else None

    def _mend(self, block: BytesArray, spans: Spans) -> bool:
        """Put together the cut records among chunks that lie one after another in `block`.

        Returns:
            Whether all chunks look as the footer says.
        """
        stops = np.cumsum(spans.lengths)
        starts = stops - spans.lengths
        checked = np.empty((len(starts), _CHECKED_BYTES), np.uint8)
        core().gather(checked, block, 0, 1, starts, _CHECKED_BYTES, -1)
        heads = np.zeros((len(starts), HEAD_BYTES), np.uint8)
        heads[:, :_CHECKED_BYTES] = checked
        joined = self._join_cut(spans, heads)
        if joined is None:
            return False
        for row, record in joined.items():
            block[int(starts[row] + spans.ahead[row]) : int(stops[row])] = np.frombuffer(record, np.uint8)
        return True

    def _join_cut(self, spans: Spans, heads: Array) -> dict[int, bytes] | None:
        """Join the records of the chunks that block headers cut, and check all chunks.

        Args:
            spans: The chunks.
            heads: (n, HEAD_BYTES) uint8, the bytes at the start of each; those of cut chunks are mended.

        Returns:
            Record by row; None if a header contradicts the footer, or a block header belongs to another chunk.
        """
        numbers, records = heads.view("<i8"), dict[int, bytes]()
        rows = np.flatnonzero((spans.starts & (BLOCK_SIZE - 1)) + spans.lengths > BLOCK_SIZE)
        cut = [
            pieces(start, length)
            for start, length in zip(spans.starts[rows].tolist(), spans.lengths[rows].tolist(), strict=True)
        ]
        starts = spans.starts[rows]
        whole = self._file.copies(starts, np.array([parts[-1].stop for parts in cut], np.int64) - starts)
        for row, parts, data, ahead in zip(rows.tolist(), cut, whole, spans.ahead[rows].tolist(), strict=True):
            start, end = parts[0].start, parts[-1].stop
            chunk = b"".join([data[part.start - start : part.stop - start] for part in parts])
            numbers[row] = np.frombuffer(chunk[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"), "<i8")
            # If a chunk starts with a block, the header of that block belongs to the chunk.
            edge = start - BLOCK_HEADER_BYTES * (start % BLOCK_SIZE == BLOCK_HEADER_BYTES)
            for part in parts[:-1]:
                if _CUT.unpack_from(data, part.stop - start) != (part.stop - edge, end - part.stop):
                    return None
            records[row] = chunk[ahead:]
        return None if spans.differ(numbers) else records


def _unpack(found: CachedTable, size: int) -> Chunks | None:
    """Return the chunks from the cache, or None if they are not inside the file. Each read compares their headers."""
    edges, alike = found.arrays["edges"], found.extras["alike"]
    if edges.dtype != np.int64 or not len(edges) or int(edges[0]) < 0 or int(edges[-1]) > size:
        return None
    if bool((edges[1:] <= edges[:-1]).any()) or not (alike is None or _are_lengths(alike)):
        return None
    return Chunks(edges, None if alike is None else (alike[0], alike[1]))


def _are_lengths(pair: Any) -> bool:
    return isinstance(pair, list) and [type(number) for number in cast("list[Any]", pair)] == [int, int] and pair[1] > 0
