"""Records of ArrayRecord files, copied out of the file without the package."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from dataload._util.arrays import check_lengths, pooled_empty
from dataload.catalog.arrays import IndexKey, remember
from dataload.errors import CorruptFileError
from dataload.sources.array_record import ArrayRecordOptions
from dataload.sources.array_record.layout import Decompressor, UnlikeError, find_damage
from dataload.sources.array_record.riegeli import BLOCK_HEADER_BYTES, HEAD, HEAD_BYTES, Chunks, Spans, parse_chunks
from dataload.sources.directory import ShardDirectory
from dataload.storage import RecordFile, storage_of
from dataload.storage.core import core
from dataload.storage.kept import CachedTable
from dataload.types import BytesArray, BytesColumn, Int64Array

_EDGE_BYTES = 8  # of each record of a group
_LEAST_CACHED = 100_000  # records; parsing the footer of fewer takes 20 ms


class MappedRecords:
    """The records of one file. Reads are thread-safe."""

    # Each read checks that the chunk headers agree with the footer, and that the block headers inside chunks have the
    # right distances; with the option `verify`, or if chunks are compressed, also the hashes of headers and of data.

    def __init__(
        self, file: RecordFile, chunks: Chunks, options: ArrayRecordOptions, decompressor: Decompressor
    ) -> None:
        self._file = file
        self._chunks = chunks
        self._verify_hashes = options.verify or chunks.compressed
        self._decompressor = decompressor
        self._limit = limit = options.max_record_bytes
        edges = chunks.edges
        self._has_large = int(edges[-1] - edges[0]) > limit and int(np.diff(edges).max()) > limit

    @classmethod
    def open(cls, path: str, options: ArrayRecordOptions, decompressor: Decompressor) -> MappedRecords | None:
        """Open a file; None if only the package can read it, or explain its defect."""
        remote = options.remote_settings
        file = storage_of(path, remote).map(path, mapped=options.map)
        key = IndexKey.of("array_record", (path,), remote=remote) if options.cache else None
        chunks = remember(
            key,
            lambda found: _unpack(found, file.size),
            lambda: parse_chunks(file.read, file.size, decompressor),
            _pack,
        )
        return None if chunks is None else cls(file, chunks, options, decompressor)

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def file(self) -> RecordFile:
        return self._file

    @property
    def group_size(self) -> int:
        """The most records of a chunk."""
        firsts = self._chunks.firsts
        return 1 if firsts is None else int(np.diff(firsts).max())

    @property
    def kind(self) -> tuple[bool, bool]:
        """Properties that files must share to be read together."""
        return self._chunks.compressed, self._chunks.firsts is not None

    def joined(self, directory: ShardDirectory) -> MappedRecords:
        """Return the records of many files, so far of none."""
        joined = directory.copy_of(self)
        firsts = None if self._chunks.firsts is None else directory.numbers()
        joined._chunks = Chunks(
            directory.numbers(is_place=True), None, compressed=self._chunks.compressed, firsts=firsts
        )
        joined._has_large = False
        return joined

    def join(self, joined: Any, shard: int, first: int, length: int) -> None:
        """Add `length` records from `first` on to the table of many files; all of them, if they are in groups."""
        joined._has_large |= self._has_large
        if self._chunks.firsts is None:
            joined._chunks.edges.put(shard, self._chunks.edges[first : first + length + 1])
        else:
            joined._chunks.edges.put(shard, self._chunks.edges)
            joined._chunks.firsts.put(shard, self._chunks.firsts)

    def release(self) -> None:
        """Close the file. The next read opens it again."""
        self._file.release()

    def read(self, indices: Int64Array) -> list[bytes] | None:
        """Return the bytes of records; see `read_together`."""
        found = self.read_together(indices)
        if found is None:
            return None
        (block,), _, starts, stops = found.parts()
        return core().copies(block, starts, stops - starts, -1)

    def ranges(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return offsets and lengths in bytes of what `read_together` reads, both (n,) int64."""
        pieces = self._chunks.spans(np.unique(self._chunks.locate(indices)[0])).pieces()
        cuts, _ = pieces.block_headers()
        headers = np.full(len(cuts), BLOCK_HEADER_BYTES)
        return np.concatenate((pieces.offsets, cuts)), np.concatenate((pieces.lengths, headers))

    def read_together(self, indices: Int64Array) -> BytesColumn | None:
        """Return records, (rows,) in [0, len), in one block; None if a chunk does not look as the footer says."""
        try:
            if self._chunks.firsts is not None:
                return self._read_groups(indices)
            block, starts, spans, sizes = self._load(indices, indices)
            if spans.ahead is not None:
                return BytesColumn([block], None, starts + spans.ahead, starts + spans.lengths)
            return self._decompressor.records(block, starts, starts + spans.lengths, sizes)
        except UnlikeError:
            return None

    def _read_groups(self, indices: Int64Array) -> BytesColumn:
        """See `read_together`: each group is decompressed once. It is kept unless all of its records are read."""
        chunks, numbers = self._chunks.locate(indices)
        needed, rows, where, counts = np.unique(chunks, return_index=True, return_inverse=True, return_counts=True)
        again = counts < self._chunks.counts(needed)
        keys = [(self._file.path, chunk) if kept else None for chunk, kept in zip(needed.tolist(), again, strict=True)]

        def unpack(missing: list[int]) -> list[tuple[Any, int]]:
            block, starts, spans, sizes = self._load(needed[missing], indices[rows[missing]])
            groups = self._decompressor.groups(block, starts, starts + spans.lengths, sizes, spans.records)
            return [(group, len(group[0]) + group[1].nbytes) for group in groups]

        groups = self._decompressor.cached.get_all(keys, unpack)
        before = np.cumsum([0, *(len(edges) for _, edges in groups)])
        edges, at = np.concatenate([edges for _, edges in groups]), before[where] + numbers
        starts, stops = edges[at], edges[at + 1]
        ends = np.cumsum(stops - starts)
        arena = pooled_empty((int(ends[-1]),), np.uint8)
        target, views = arena.data, [memoryview(records) for records, _ in groups]
        each = zip(where.tolist(), starts.tolist(), stops.tolist(), ends.tolist(), strict=True)
        for group, start, stop, end in each:
            target[end - (stop - start) : end] = views[group][start:stop]
        return BytesColumn.packed(arena, ends)

    def _load(self, chunks: Int64Array, indices: Int64Array) -> tuple[BytesArray, Int64Array, Spans, Int64Array]:
        """Return chunks in one block, their starts and spans, and the bytes of their records; else an UnlikeError."""
        spans = self._chunks.spans(chunks)
        if self._has_large and spans.ahead is not None:
            check_lengths(spans.lengths - spans.ahead, self._limit, indices, self._file.path)
        pieces = spans.pieces()
        # Packed one after another, the pieces of a chunk are the chunk.
        (block,), *_ = self._file.gather_ranges(pieces.offsets, pieces.lengths).parts()
        starts = np.cumsum(spans.lengths) - spans.lengths
        heads = np.empty((len(starts), HEAD_BYTES), np.uint8)
        core().gather(heads, block, 0, 1, starts, HEAD_BYTES, -1)
        if spans.differ(heads):
            raise UnlikeError
        damage = find_damage(block, starts, spans.lengths) if self._verify_hashes else None
        if damage is not None:
            row, problem = damage
            offset = int(self._chunks.edges[chunks[row : row + 1]][0])
            raise CorruptFileError(problem, path=self._file.path, offset=offset, index=int(indices[row]))
        cuts, distances = pieces.block_headers()
        if len(cuts) and bool((self._file.gather(cuts, BLOCK_HEADER_BYTES).view("<i8")[:, 1:] != distances).any()):
            raise UnlikeError
        sizes = heads.view(HEAD).ravel()["decoded_size"].astype(np.int64)
        if spans.ahead is None:
            check_lengths(sizes + _EDGE_BYTES * spans.records, self._limit, indices, self._file.path)
        return block, starts, spans, sizes


def _pack(chunks: Chunks | None) -> CachedTable | None:
    if chunks is None or len(chunks) < _LEAST_CACHED:
        return None
    more = {} if chunks.firsts is None else {"firsts": chunks.firsts}
    return CachedTable({"edges": chunks.edges, **more}, {"alike": chunks.alike, "compressed": chunks.compressed})


def _unpack(found: CachedTable, size: int) -> Chunks | None:
    """Return the chunks from the cache, or None if they are not inside the file. Each read compares their headers."""
    edges, alike, compressed = found.arrays["edges"], found.extras["alike"], found.extras.get("compressed", False)
    if edges.dtype != np.int64 or not len(edges) or int(edges[0]) < 0 or int(edges[-1]) > size:
        return None
    if bool((edges[1:] <= edges[:-1]).any()) or not (alike is None or _are_lengths(alike)):
        return None
    firsts = found.arrays.get("firsts")
    if firsts is not None and (firsts.dtype != np.int64 or firsts.shape != edges.shape or (np.diff(firsts) < 1).any()):
        return None
    if type(compressed) is not bool or (firsts is not None and (firsts[0] != 0 or not compressed)):
        return None
    return Chunks(edges, None if alike is None else (alike[0], alike[1]), compressed, firsts)


def _are_lengths(pair: Any) -> bool:
    return isinstance(pair, list) and [type(number) for number in cast("list[Any]", pair)] == [int, int] and pair[1] > 0
