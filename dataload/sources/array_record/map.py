"""Records of uncompressed ArrayRecord files, read through a memory map."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from dataload.codecs.layout import RecordTable
from dataload.sources.array_record.riegeli import (
    BLOCK_HEADER_BYTES,
    BLOCK_SIZE,
    HEAD_BYTES,
    Chunks,
    Spans,
    parse_chunks,
    pieces,
)
from dataload.storage import MappedFile, storage_of
from dataload.types import Int64Array

_TABLE_BYTES = 1 << 14  # larger records are copied once more than they need be
_CUT = struct.Struct("<8xQQ")  # a block header: from the start of the chunk to it, from it to the end of the chunk


class MappedRecords:
    """The records of one file.

    Reads are thread-safe. In each is checked that the file is as long as when it was opened, that the headers of the
    chunks say what the footer does, and that the block headers which cut them say where. Hashes are not.
    """

    def __init__(self, file: MappedFile, chunks: Chunks) -> None:
        self._file = file
        self._chunks = chunks

    @classmethod
    def open(cls, path: str) -> MappedRecords | None:
        """None if the file has to be read by its own library, which also says whether it can be.

        Raises:
            OSError: The file cannot be opened.
        """
        file = storage_of(path).map(path)
        chunks = parse_chunks(file.data)
        return None if chunks is None else cls(file, chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def release(self) -> None:
        """Give the map back; the next read maps the file again."""
        self._file.release()

    @property
    def _view(self) -> memoryview:
        return self._file.view(0, self._file.size)

    def read(self, indices: Int64Array, *, views: bool) -> Sequence[bytes | memoryview] | None:
        """The bytes of records.

        Args:
            indices: (rows,) int64 in [0, len), at least one.
            views: Give memoryviews, of the map or of a copy of all of them; records that are cut may be bytes.

        Returns:
            None if one of them is not where and how it should be.

        Raises:
            CorruptFileError: The file is shorter now.
        """
        self._file.check()
        spans = self._chunks.spans(indices)
        if views and _is_table(spans):
            return self._table(spans)
        self._file.hint(spans.starts, spans.lengths)
        heads = self._file.gather(spans.starts, HEAD_BYTES).view("<i8")
        cut = self._put_together(spans, heads)
        if cut is None or spans.differ(heads):
            return None
        sizes = spans.lengths - spans.ahead
        sizes[list(cut)] = 0
        records = self._slices(spans.starts + spans.ahead, sizes, views=views)
        for row, record in cut.items():
            records[row] = record
        return records

    def _table(self, spans: Spans) -> RecordTable | None:
        """Records of one size by one gather, heads and all; None as in `read`."""
        rows = self._file.gather(spans.starts, int(spans.lengths[0]))
        heads = rows[:, :HEAD_BYTES].copy().view("<i8")
        cut = self._put_together(spans, heads)
        if cut is None or spans.differ(heads):
            return None
        records = rows[:, int(spans.ahead[0]) :]
        for row, record in cut.items():
            records[row] = np.frombuffer(record, np.uint8)
        return RecordTable(records)

    def _slices(self, starts: Int64Array, sizes: Int64Array, *, views: bool) -> list[bytes | memoryview]:
        if not views:
            return [*self._file.copies(starts, sizes)]
        view = self._view
        return [view[start:end] for start, end in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]

    def _put_together(self, spans: Spans, heads: Int64Array) -> dict[int, bytes] | None:
        """The records of chunks that block headers cut, by row; None if such a header is another chunk's.

        Args:
            spans: All chunks.
            heads: (n, 6) int64, which are put together, too.
        """
        rows = np.flatnonzero((spans.starts & (BLOCK_SIZE - 1)) + spans.lengths > BLOCK_SIZE)
        columns = (rows, spans.starts[rows], spans.lengths[rows], spans.ahead[rows])
        view, records = self._view, dict[int, bytes]()
        for row, start, length, ahead in zip(*(column.tolist() for column in columns), strict=True):
            block = start - start % BLOCK_SIZE + BLOCK_SIZE
            end = start + length + BLOCK_HEADER_BYTES
            if block - start >= HEAD_BYTES and end <= block + BLOCK_SIZE:  # cut once, and that in the record
                blocks = [block]
                record = view[start + ahead : block], view[block + BLOCK_HEADER_BYTES : end]
            else:
                *cut, last = pieces(start, length)
                blocks, end = [part.stop for part in cut], last.stop
                record = [view[part] for part in pieces(start, length, ahead)]
                head = b"".join([view[part] for part in pieces(start, HEAD_BYTES)])
                heads[row] = np.frombuffer(head, "<i8")
            # The header of the block with which a chunk starts belongs to it, too.
            edge = start - BLOCK_HEADER_BYTES if block - start == BLOCK_SIZE - BLOCK_HEADER_BYTES else start
            for at in blocks:
                if _CUT.unpack_from(view, at) != (at - edge, end - at):
                    return None
            records[row] = b"".join(record)
        return records


def _is_table(spans: Spans) -> bool:
    """Whether the records are of one size, and not so large that it is better to look at each."""
    length = int(spans.lengths[0])
    if not HEAD_BYTES <= length <= _TABLE_BYTES:
        return False
    return bool((spans.lengths == length).all() and (spans.ahead == spans.ahead[0]).all())
