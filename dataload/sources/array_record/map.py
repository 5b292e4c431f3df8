"""Records of uncompressed ArrayRecord files, read through a memory map."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from dataload.codecs.layout import RecordTable
from dataload.sources.array_record.layout import BLOCK_SIZE
from dataload.sources.array_record.riegeli import BLOCK_HEADER_BYTES, HEAD_BYTES, Chunks, Spans, parse_chunks, pieces
from dataload.storage import MappedFile, storage_of
from dataload.types import Int64Array

_TABLE_BYTES = 1 << 14  # for larger records, one more copy costs more than slicing each
_CUT = struct.Struct("<8xQQ")  # in a block header: bytes from the start of the chunk, bytes to its end


class MappedRecords:
    """The records of one file.

    Reads are thread-safe. Each read checks that the file is not shorter than when it was opened, that the chunk headers
    agree with the footer, and that the block headers inside chunks have the right distances. It does not check hashes.
    """

    def __init__(self, file: MappedFile, chunks: Chunks) -> None:
        self._file = file
        self._chunks = chunks

    @classmethod
    def open(cls, path: str) -> MappedRecords | None:
        """Open a file; None if only the package can read it (or report what is wrong with it)."""
        file = storage_of(path).map(path)
        chunks = parse_chunks(file.data)
        return None if chunks is None else cls(file, chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def release(self) -> None:
        """Release the map. The next read maps the file again."""
        self._file.release()

    def read(self, indices: Int64Array, *, views: bool) -> Sequence[bytes | memoryview] | None:
        """Return the bytes of records.

        Args:
            indices: (rows,) int64 in [0, len), at least one.
            views: Return memoryviews of the map or of one copy of all records, except for records that lie across
                blocks, which may be bytes.

        Returns:
            None if a chunk does not look as the footer says.

        Raises:
            CorruptFileError: The file is shorter now.
        """
        self._file.check()
        spans = self._chunks.spans(indices)
        if views and _is_table(spans):
            return self._table(spans)
        self._file.hint(spans.starts, spans.lengths)
        heads = self._file.gather(spans.starts, HEAD_BYTES).view("<i8")
        joined = self._join_cut(spans, heads)
        if joined is None or spans.differ(heads):
            return None
        sizes = spans.lengths - spans.ahead
        sizes[list(joined)] = 0
        records = self._slices(spans.starts + spans.ahead, sizes, views=views)
        for row, record in joined.items():
            records[row] = record
        return records

    def _table(self, spans: Spans) -> RecordTable | None:
        """Read records of one size by one gather, including the chunk headers; None as in `read`."""
        rows = self._file.gather(spans.starts, int(spans.lengths[0]))
        heads = rows[:, :HEAD_BYTES].copy().view("<i8")
        joined = self._join_cut(spans, heads)
        if joined is None or spans.differ(heads):
            return None
        records = rows[:, int(spans.ahead[0]) :]
        for row, record in joined.items():
            records[row] = np.frombuffer(record, np.uint8)
        return RecordTable(records)

    def _slices(self, starts: Int64Array, sizes: Int64Array, *, views: bool) -> list[bytes | memoryview]:
        if not views:
            return [*self._file.copies(starts, sizes)]
        view = self._file.view(0, self._file.size)
        return [view[start:end] for start, end in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]

    def _join_cut(self, spans: Spans, heads: Int64Array) -> dict[int, bytes] | None:
        """Join the records of the chunks that block headers cut, and fix their `heads`, (n, 6) int64.

        Returns:
            Record by row; None if a block header belongs to another chunk.
        """
        rows = np.flatnonzero((spans.starts & (BLOCK_SIZE - 1)) + spans.lengths > BLOCK_SIZE)
        columns = (rows, spans.starts[rows], spans.lengths[rows], spans.ahead[rows])
        view, records = self._file.view(0, self._file.size), dict[int, bytes]()
        for row, start, length, ahead in zip(*(column.tolist() for column in columns), strict=True):
            block = start - start % BLOCK_SIZE + BLOCK_SIZE
            end = start + length + BLOCK_HEADER_BYTES
            if block - start >= HEAD_BYTES and end <= block + BLOCK_SIZE:  # cut once, within the record
                blocks = [block]
                record = view[start + ahead : block], view[block + BLOCK_HEADER_BYTES : end]
            else:
                *cut, last = pieces(start, length)
                blocks, end = [part.stop for part in cut], last.stop
                record = [view[part] for part in pieces(start, length, ahead)]
                head = b"".join([view[part] for part in pieces(start, HEAD_BYTES)])
                heads[row] = np.frombuffer(head, "<i8")
            # If a chunk starts with a block, the header of that block belongs to the chunk.
            edge = start - BLOCK_HEADER_BYTES if block - start == BLOCK_SIZE - BLOCK_HEADER_BYTES else start
            for at in blocks:
                if _CUT.unpack_from(view, at) != (at - edge, end - at):
                    return None
            records[row] = b"".join(record)
        return records


def _is_table(spans: Spans) -> bool:
    """Return whether the records have one size, and are small enough to be copied together."""
    length = int(spans.lengths[0])
    if not HEAD_BYTES <= length <= _TABLE_BYTES:
        return False
    return bool((spans.lengths == length).all() and (spans.ahead == spans.ahead[0]).all())
