"""Records of uncompressed ArrayRecord files, copied out of the file without the package."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from dataload._util.limits import MAX_RECORD_BYTES, check_lengths
from dataload.catalog.arrays import IndexKey, remember
from dataload.errors import CorruptFileError
from dataload.sources.array_record.riegeli import (
    BLOCK_HEADER_BYTES,
    CHUNK_HEADER_BYTES,
    HASH_BYTES,
    HASH_KEY,
    HEAD,
    HEAD_BYTES,
    Chunks,
    parse_chunks,
)
from dataload.sources.directory import ShardDirectory
from dataload.storage import RecordFile, Remote, storage_of
from dataload.storage.array_file import CachedTable
from dataload.storage.core import core
from dataload.types import BytesArray, BytesColumn, Int64Array

_LEAST_CACHED = 100_000  # records; parsing the footer of fewer takes 20 ms


class MappedRecords:
    """The records of one file, each of at most `limit` bytes. Reads are thread-safe."""

    # Each read checks that the chunk headers agree with the footer, and that the block headers inside chunks have the
    # right distances; with `verify_hashes`, also the hashes of chunk headers and of data.

    def __init__(
        self, file: RecordFile, chunks: Chunks, *, verify_hashes: bool = False, limit: int = MAX_RECORD_BYTES
    ) -> None:
        self._file = file
        self._chunks = chunks
        self._verify_hashes = verify_hashes
        self._limit = limit
        edges = chunks.edges
        self._has_large = int(edges[-1] - edges[0]) > limit and int(np.diff(edges).max()) > limit

    @classmethod
    def open(
        cls,
        path: str,
        *,
        mapped: bool = True,
        cache: bool = True,
        verify_hashes: bool = False,
        limit: int = MAX_RECORD_BYTES,
        remote: Remote | None = None,
    ) -> MappedRecords | None:
        """Open a file; None if only the package can read it, or explain its defect."""
        file = storage_of(path, remote).map(path, mapped=mapped)
        key = IndexKey.of("array_record", (path,), remote=remote) if cache else None
        chunks = remember(
            key, lambda found: _unpack(found, file.size), lambda: parse_chunks(file.read, file.size), _pack
        )
        return None if chunks is None else cls(file, chunks, verify_hashes=verify_hashes, limit=limit)

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def file(self) -> RecordFile:
        return self._file

    def joined(self, directory: ShardDirectory) -> MappedRecords:
        """Return the records of many files, so far of none."""
        joined = directory.copy_of(self)
        joined._chunks, joined._has_large = Chunks(directory.numbers(is_place=True), None), False
        return joined

    def join(self, joined: Any, shard: int, first: int, length: int) -> None:
        """Add `length` records from `first` on to those of many files."""
        joined._chunks.edges.put(shard, self._chunks.edges[first : first + length + 1])
        joined._has_large |= self._has_large

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
        pieces = self._chunks.spans(indices).pieces()
        cuts, _ = pieces.block_headers()
        headers = np.full(len(cuts), BLOCK_HEADER_BYTES)
        return np.concatenate((pieces.offsets, cuts)), np.concatenate((pieces.lengths, headers))

    def read_together(self, indices: Int64Array) -> BytesColumn | None:
        """Return records, (rows,) in [0, len), in one block; None if a chunk does not look as the footer says."""
        spans = self._chunks.spans(indices)
        if self._has_large:
            check_lengths(spans.lengths - spans.ahead, self._limit, indices, self._file.path)
        pieces = spans.pieces()
        # Packed one after another, the pieces of a chunk are the chunk.
        (block,), *_ = self._file.gather_ranges(pieces.offsets, pieces.lengths).parts()
        stops = np.cumsum(spans.lengths)
        starts = stops - spans.lengths
        heads = np.empty((len(starts), HEAD_BYTES), np.uint8)
        core().gather(heads, block, 0, 1, starts, HEAD_BYTES, -1)
        if spans.differ(heads):
            return None
        if self._verify_hashes:
            self._compare_hashes(block, starts, spans.lengths, heads, indices)
        cuts, distances = pieces.block_headers()
        if len(cuts) and bool((self._file.gather(cuts, BLOCK_HEADER_BYTES).view("<i8")[:, 1:] != distances).any()):
            return None
        return BytesColumn([block], None, starts + spans.ahead, stops)

    def _compare_hashes(
        self, block: BytesArray, starts: Int64Array, lengths: Int64Array, heads: BytesArray, indices: Int64Array
    ) -> None:
        """Compare the hashes in chunk headers with hashes of the chunks, which lie in `block` at `starts`."""
        stored = heads.view(HEAD).ravel()
        headers = np.full_like(starts, CHUNK_HEADER_BYTES - HASH_BYTES)
        parts = ("header", HASH_BYTES, headers), ("data", CHUNK_HEADER_BYTES, lengths - CHUNK_HEADER_BYTES)
        for part, ahead, sizes in parts:
            found = np.empty(len(starts), np.uint64)
            core().hash_ranges(found, block, starts + ahead, sizes, HASH_KEY, -1)
            if bool((differ := found != stored[f"{part}_hash"]).any()):
                row = int(np.argmax(differ))
                raise CorruptFileError(
                    f"the hash of the chunk's {part} is {int(found[row]):#x}, but the chunk says "
                    f"{int(stored[f'{part}_hash'][row]):#x}",
                    path=self._file.path,
                    offset=int(self._chunks.edges[indices[row]]),
                    index=int(indices[row]),
                )


def _pack(chunks: Chunks | None) -> CachedTable | None:
    if chunks is None or len(chunks) < _LEAST_CACHED:
        return None
    return CachedTable({"edges": chunks.edges}, {"alike": chunks.alike})


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
