"""ArrayRecord files: read through a memory map, or, in other layouts, through the array_record package."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar, Self, TypeAlias, cast

import numpy as np

from dataload._util.arrays import check_lengths, pooled_empty
from dataload._util.caches import DecodedCache
from dataload.catalog.arrays import IndexKey, remember, require
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.array_record import ArrayRecordOptions
from dataload.sources.array_record.layout import (
    BLOCK_SIZE,
    SIGNATURE,
    Decompressor,
    UnlikeError,
    check_head,
    file_of,
    find_damage,
    footer_offset,
    parse_selection,
)
from dataload.sources.array_record.package import PackageReaders
from dataload.sources.array_record.riegeli import BLOCK_HEADER_BYTES, HEAD, HEAD_BYTES, Chunks, Spans, parse_chunks
from dataload.sources.directory import ShardDirectory
from dataload.sources.encoded import EncodedShard, Gather, copy_records
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ShardReader
from dataload.storage import RecordFile, reading_tables, storage_of
from dataload.storage.core import core
from dataload.storage.kept import CachedTable
from dataload.storage.paths import FileInstruction, as_path
from dataload.types import Batch, BytesArray, BytesColumn, Codec, FieldSpec, Int64Array

_AROUND_BYTES = 4096
_EDGE_BYTES = 8  # of each record of a group
_LEAST_CACHED = 100_000  # records; parsing the footer of fewer takes 20 ms

Location: TypeAlias = str | PathLike[str] | FileInstruction


class ArrayRecordSource(FileSource[Any]):
    """Records of ArrayRecord files, as bytes or decoded by a codec.

    Files that are compressed by Zstandard, as by default, or written with ``group_size:1,uncompressed`` are read by a
    memory map, all others through the array_record package. Hashes of compressed data are compared. Each read of
    uncompressed files checks the headers of the chunks; it compares hashes only with the option `verify`, as
    ``dataload verify`` does.

    `paths` are files, slices ``"path[start:stop]"`` of their records, or objects with the attributes of
    `FileInstruction`. Options: `ArrayRecordOptions`.

    A process that was forked after array_record was used cannot use it: files that need it then raise a ConfigError.
    Workers have to be started by ``"forkserver"`` or ``"spawn"``. A file that was written with a `group_size` other
    than 1 is a UserWarning.
    """

    format_name = "array_record"
    options_type: ClassVar[Any] = ArrayRecordOptions

    def __init__(
        self, paths: Location | Sequence[Location], *, fields: Sequence[str] | None = None, **options: Any
    ) -> None:
        several = [paths] if isinstance(paths, (str, PathLike, FileInstruction)) else paths
        super().__init__([as_path(path) for path in several], fields=fields, **options)

    def _prepare(self) -> None:
        self._warned = False
        self._decompressor = Decompressor(DecodedCache(min(self.options.cached_bytes, self.options.max_record_bytes)))
        for path in self.paths:
            parse_selection(path)
        if self._selected is not None and self.options.codec is None:
            message = "fields were given, but the records are plain bytes: give a codec too"
            raise ConfigError(message, key="fields", value=self._selected)

    def _open_shard(self, path: str) -> ShardReader[Any]:
        return _ArrayRecordFile(path, self.options, self._decompressor)

    def close(self) -> None:
        super().close()
        self._decompressor.cached.clear()

    def _known_fields(
        self, readers: Sequence[ShardReader[Any]], fields: Sequence[Mapping[str, FieldSpec]]
    ) -> Mapping[str, FieldSpec]:
        groups = {} if self._warned else self._groups(readers)
        self._warned = True
        for file, size in groups.items():
            warnings.warn(
                f"{file} was written with group_size:{size}: reading one record at random decompresses that many; "
                "write it again with group_size:1 (dataload convert does)",
                UserWarning,
                stacklevel=2,
            )
        filled = next((shard for shard, reader in enumerate(readers) if len(reader)), None)
        if filled is not None and self.options.codec is not None:  # one file is enough: it reads a record to find out
            with reading_tables():
                fields = [*fields[:filled], readers[filled].first_fields(), *fields[filled + 1 :]]
        return super()._known_fields(readers, fields)

    @staticmethod
    def _groups(readers: Sequence[ShardReader[Any]]) -> dict[str, int]:
        """Return the group size of each file whose records are compressed in groups."""
        files = (reader for reader in readers if isinstance(reader, _ArrayRecordFile))
        return {reader.file: reader.group_size for reader in files if reader.group_size != 1}

    @property
    def reads_in_order(self) -> bool:
        """Whether records are compressed in groups; reading one decompresses its whole group."""
        return bool(self._groups(self._readers()))

    def _data_file(self, path: str) -> str:
        return file_of(path)


class _ArrayRecordFile(EncodedShard):
    """A file, or the selected part of it; `file` is its path without the slice.

    Without `_chunks`, records are read through the package.
    """

    # Each read checks that the chunk headers agree with the footer, and that the block headers inside chunks have the
    # right distances; with the option `verify`, or if chunks are compressed, also the hashes of headers and of data.

    def __init__(self, path: str, options: ArrayRecordOptions, decompressor: Decompressor) -> None:
        self.file, self._first, stop = parse_selection(path)
        super().__init__(self.file, cast("Codec | None", options.codec))
        self._limit: int = options.max_record_bytes
        self._storage = storage_of(self.file, options.remote_settings)
        with self._storage.open(self.file) as file:
            check_head(file.read(0, len(SIGNATURE)), file.size, self.file)
        self._decompressor = decompressor
        self._chunks = chunks = self._find_chunks(options) if options.reader_options is None else None
        self.whole = chunks is None
        self._package = PackageReaders(self.file, self._storage, options.reader_options)
        self._is_shared = self._has_large = self._verifies = False
        if chunks is not None:
            self._records, self.group_size = len(chunks), chunks.group_size
            self._verifies, edges = options.verify or chunks.compressed, chunks.edges
            self._has_large = int(edges[-1] - edges[0]) > self._limit and int(np.diff(edges).max()) > self._limit
        else:
            self._records, self.group_size = self._package.about()
        stop = self._records if stop is None else stop
        if stop > self._records:
            message = f"{path} selects records {self._first} to {stop}; the file has {self._records}"
            raise ConfigError(message, key="paths", value=path)
        self._length = stop - self._first

    def _find_chunks(self, options: ArrayRecordOptions) -> Chunks | None:
        """Return the chunks of the file; None if only the package can read it, or explain its defect."""
        remote = options.remote_settings
        file = self._storage.map(self.file, mapped=options.map)
        key = IndexKey.of("array_record", (self.file,), remote=remote) if options.cache else None
        chunks = remember(
            key,
            lambda found: _unpack(found, file.size),
            lambda: parse_chunks(file.read, file.size, self._decompressor),
            _pack,
        )
        if chunks is not None:
            self._file = file
        return chunks

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Any]:
        return super().read(indices + self._first, fields)

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        return super().read_batch(indices + self._first, fields)

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array] | None:  # noqa: ARG002 - records are read whole
        if self._chunks is None:
            return None
        pieces = self._chunks.spans(np.unique(self._chunks.locate(indices + self._first)[0])).pieces()
        cuts, _ = pieces.block_headers()
        headers = np.full(len(cuts), BLOCK_HEADER_BYTES)
        return np.concatenate((pieces.offsets, cuts)), np.concatenate((pieces.lengths, headers))

    def shared(self) -> tuple[RecordFile, Any] | None:
        chunks = self._chunks
        if chunks is None or (self.group_size > 1 and self._length < self._records):
            return None
        return self._file, (chunks.compressed, chunks.firsts is not None)

    def joined(self, directory: ShardDirectory) -> Self:
        joined, own = directory.copy_of(self), self._chunks
        assert own is not None, "it is shared"
        joined._first, joined._is_shared, joined._has_large = 0, True, False
        firsts = None if own.firsts is None else directory.numbers()
        joined._chunks = Chunks(directory.numbers(is_place=True), None, compressed=own.compressed, firsts=firsts)
        return joined

    def join(self, joined: Any, shard: int) -> None:
        chunks = self._chunks
        assert chunks is not None, "it is shared"
        joined._has_large |= self._has_large
        if chunks.firsts is None:
            joined._chunks.edges.put(shard, chunks.edges[self._first : self._first + self._length + 1])
        else:
            joined._chunks.edges.put(shard, chunks.edges)
            joined._chunks.firsts.put(shard, chunks.firsts)

    def _stored(self, indices: Int64Array, gather: Gather) -> BytesColumn | list[bytes]:
        found = None if self._chunks is None else self._read_chunks(self._chunks, indices)
        if found is None and self._is_shared:
            raise CorruptFileError("a record needs the package, which reads one file at a time")
        if found is None:
            return self._package.read(indices, self._limit)
        if gather is not copy_records:
            return found
        (block,), _, starts, stops = found.parts()
        return core().copies(block, starts, stops - starts, -1)

    def _read_chunks(self, chunks: Chunks, indices: Int64Array) -> BytesColumn | None:
        """Return records, (rows,) in [0, len), in one block; None if a chunk does not look as the footer says."""
        try:
            if chunks.firsts is not None:
                return self._read_groups(chunks, indices)
            block, starts, spans, sizes = self._load(chunks, indices, indices)
            if spans.ahead is not None:
                return BytesColumn([block], None, starts + spans.ahead, starts + spans.lengths)
            return self._decompressor.records(block, starts, starts + spans.lengths, sizes)
        except UnlikeError:
            return None

    def _read_groups(self, chunks: Chunks, indices: Int64Array) -> BytesColumn:
        """See `_read_chunks`: each group is decompressed once. It is kept unless all of its records are read."""
        chunk, numbers = chunks.locate(indices)
        needed, rows, where, counts = np.unique(chunk, return_index=True, return_inverse=True, return_counts=True)
        again = counts < chunks.counts(needed)
        keys = [
            (self._file.path, number) if kept else None for number, kept in zip(needed.tolist(), again, strict=True)
        ]

        def unpack(missing: list[int]) -> list[tuple[Any, int]]:
            block, starts, spans, sizes = self._load(chunks, needed[missing], indices[rows[missing]])
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

    def _load(
        self, chunks: Chunks, numbers: Int64Array, indices: Int64Array
    ) -> tuple[BytesArray, Int64Array, Spans, Int64Array]:
        """Return chunks in one block, their starts and spans, and the bytes of their records; else an UnlikeError."""
        spans = chunks.spans(numbers)
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
        damage = find_damage(block, starts, spans.lengths) if self._verifies else None
        if damage is not None:
            row, problem = damage
            offset = int(chunks.edges[numbers[row : row + 1]][0])
            raise CorruptFileError(problem, path=self._file.path, offset=offset, index=int(indices[row]))
        cuts, distances = pieces.block_headers()
        if len(cuts) and bool((self._file.gather(cuts, BLOCK_HEADER_BYTES).view("<i8")[:, 1:] != distances).any()):
            raise UnlikeError
        sizes = heads.view(HEAD).ravel()["decoded_size"].astype(np.int64)
        if spans.ahead is None:
            check_lengths(sizes + _EDGE_BYTES * spans.records, self._limit, indices, self._file.path)
        return block, starts, spans, sizes

    def identity(self) -> str:
        """Return a hash of the end of the records and the start of the footer; the last block is nearly empty."""
        with self._storage.open(self.file) as file:
            end = footer_offset(file.read(max(0, file.size - BLOCK_SIZE), 128))
            around = file.read(max(0, min(end or 0, file.size) - _AROUND_BYTES), 2 * _AROUND_BYTES)
        return hashlib.blake2b(around, digest_size=8).hexdigest()

    def release(self) -> None:
        self._package.release()
        if self._chunks is not None:
            super().release()


def _pack(chunks: Chunks | None) -> CachedTable | None:
    if chunks is None or len(chunks) < _LEAST_CACHED:
        return None
    more = {} if chunks.firsts is None else {"firsts": chunks.firsts}
    return CachedTable({"edges": chunks.edges, **more}, {"alike": chunks.alike, "compressed": chunks.compressed})


def _unpack(found: CachedTable, size: int) -> Chunks:
    """Return the chunks from the cache, which are inside the file. Each read compares their headers."""
    edges, alike, compressed = found.arrays["edges"], found.extras["alike"], found.extras.get("compressed", False)
    require(edges.dtype == np.int64, len(edges) > 0, type(compressed) is bool, alike is None or _are_lengths(alike))
    require(edges[0] >= 0, edges[-1] <= size, edges[1:] > edges[:-1])
    firsts = found.arrays.get("firsts")
    if firsts is not None:
        require(firsts.dtype == np.int64, firsts.shape == edges.shape, compressed)
        require(firsts[0] == 0, np.diff(firsts) >= 1)
    return Chunks(edges, None if alike is None else (alike[0], alike[1]), compressed, firsts)


def _are_lengths(pair: Any) -> bool:
    return isinstance(pair, list) and [type(number) for number in cast("list[Any]", pair)] == [int, int] and pair[1] > 0
