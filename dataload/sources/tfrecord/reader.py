"""The source of TFRecord files."""

from typing import Any, ClassVar, cast

import numpy as np

from dataload._util.limits import check_lengths
from dataload.errors import CorruptFileError
from dataload.sources.encoded import EncodedShard, Gather
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ShardReader
from dataload.sources.tfrecord.format import TFRECORD, TFRecordOptions
from dataload.sources.tfrecord.records import CRC_BYTES, FRAME_BYTES, HEAD_BYTES, check_data, find_records
from dataload.storage import storage_of
from dataload.storage.table_cache import CachedTable, IndexKey, remember
from dataload.types import Codec, Int64Array

_LEAST_CACHED = 100_000  # records; finding fewer takes 20 ms


class TFRecordSource(FileSource[Any]):
    """Records of uncompressed TFRecord files, as bytes or decoded by a codec.

    Args:
        paths: One or more files. One of zero bytes has no records, as for TensorFlow.
        fields: Names of the fields to read, if a codec decodes to fields; None means all.
        options: See `TFRecordOptions`.

    Raises:
        ConfigError: The codec is invalid.
        CorruptFileError: On first use, if a file is cut off within a record, or the checksum of a length is wrong; in
            reads, if a record cannot be decoded, or checksums are compared and differ.
        UnsupportedFormatError: On first use, if a file does not begin with a record; it may be compressed.
    """

    format_name = "tfrecord"
    options_type: ClassVar[Any] = TFRecordOptions

    def _open_shard(self, path: str) -> ShardReader[Any]:
        return _TFRecordFile(path, self.options)


class _TFRecordFile(EncodedShard):
    def __init__(self, path: str, options: TFRecordOptions) -> None:
        super().__init__(path, cast("Codec | None", options.codec))
        storage = storage_of(path, options.place)
        self._file = storage.map(path, mapped=options.map)
        self._limit = options.max_record_bytes
        self._crc32c: Any = TFRECORD.require("google_crc32c", package="google-crc32c").value if options.verify else None

        def find() -> Int64Array:
            # Read instead of using the map: a page fault would also read the pages around it.
            with storage.open(path, whole=True) as stream:
                return find_records(stream.read, self._file.size, path)

        self._edges = remember(
            IndexKey.of("tfrecord", (path,), remote=options.place) if options.cache else None,
            lambda found: _unpack(found, self._file.size),
            find,
            lambda edges: CachedTable({"edges": edges}, {}) if len(edges) > _LEAST_CACHED else None,
        )
        longest = int(np.diff(self._edges).max(initial=0)) - FRAME_BYTES
        self._has_large = longest > self._limit
        self._fields = {} if self._codec is None else self.first_fields()

    def __len__(self) -> int:
        return len(self._edges) - 1

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array]:  # noqa: ARG002 - records are read whole
        return self._locations(indices)

    def _locations(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        offsets = self._edges[indices] + HEAD_BYTES
        lengths = self._edges[indices + 1] - CRC_BYTES - offsets
        if self._has_large:
            check_lengths(lengths, self._limit, indices, self._path)
        return offsets, lengths

    def _stored(self, indices: Int64Array, gather: Gather) -> Any:
        if self._crc32c is None:
            return super()._stored(indices, gather)
        offsets, lengths = self._locations(indices)
        data = gather(self._file, offsets, lengths)
        crcs = self._file.gather(offsets + lengths, CRC_BYTES).view("<u4")[:, 0]
        if (row := check_data(data, crcs, self._crc32c)) is not None:
            raise CorruptFileError(
                f"the masked CRC-32C of the record differs from the one in the file, {int(crcs[row]):#x}",
                path=self._path,
                offset=int(offsets[row]),
                index=int(indices[row]),
            )
        return data


def _unpack(found: CachedTable, size: int) -> Int64Array | None:
    """Return the edges from the cache, or None if they are not those of records that fill the file."""
    edges = found.arrays["edges"]
    if edges.dtype != np.int64 or not len(edges) or int(edges[0]) != 0 or int(edges[-1]) != size:
        return None
    return edges if bool((edges[1:] >= edges[:-1] + FRAME_BYTES).all()) else None
