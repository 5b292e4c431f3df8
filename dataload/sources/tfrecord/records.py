"""The source and the writer of TFRecord files: records one after another, each between checksums.

| bytes | content, little-endian |
|---|---|
| 8 | length of the data |
| 4 | masked CRC-32C of the length |
| length | data |
| 4 | masked CRC-32C of the data |

Nothing in a file says how many records it has or where they start, so the chain of lengths is followed once. A file
without records has no bytes. Layout: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details.
"""

import contextlib
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Self, cast

import numpy as np

from dataload._util.arrays import check_lengths
from dataload.catalog.arrays import IndexKey, remember, require
from dataload.errors import CorruptFileError, UnsupportedFormatError
from dataload.sources.directory import ShardDirectory
from dataload.sources.encoded import EncodedShard, Gather
from dataload.sources.file_source import FileSource
from dataload.sources.format import describe_head
from dataload.sources.shards import ShardReader
from dataload.sources.tfrecord import TFRECORD, TFRecordOptions, TFRecordWriterOptions
from dataload.sources.writer import Writer, choose_codec, encode_bytes
from dataload.storage import RecordFile, storage_of
from dataload.storage.kept import CachedTable
from dataload.types import BytesArray, Codec, Int64Array

HEAD_BYTES = 12
"""Bytes before the data of a record."""

CRC_BYTES = 4
"""Bytes after the data of a record."""

FRAME_BYTES = HEAD_BYTES + CRC_BYTES

_LENGTH = struct.Struct("<Q")
_HEAD = np.dtype([("length", "<u8"), ("crc", "<u4")])
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its bits reversed
_MASK = 0xA282EAD8
_BLOCK = 1 << 18  # bytes that are read at once where records are small
_FIRST = 1 << 12


def mask(crc: Any) -> Any:
    """Return CRCs, (rows,), as they are stored: uint32, rotated right by 15 bits, plus a constant."""
    crc = np.asarray(crc, np.uint32)
    return (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(_MASK)


@cache
def _table() -> Any:
    """Return the CRC-32C of each byte, (256,) uint32."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> 1 ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


def crc_of_rows(rows: BytesArray) -> Any:
    """Return the CRC-32C, (rows,) uint32, of (rows, length) uint8. For a few bytes a row: it takes a step for each."""
    table, crc = _table(), np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        crc = table[(crc ^ column) & np.uint32(0xFF)] ^ crc >> np.uint32(8)
    return ~crc


def build_head(length: int) -> bytes:
    """Return the bytes before data of a length."""
    stored = _LENGTH.pack(length)
    return stored + mask(crc_of_rows(np.frombuffer(stored, np.uint8)[None])).astype("<u4").tobytes()


def is_tfrecord(head: bytes) -> bool:
    """Return whether bytes begin with a length and its checksum."""
    if len(head) < HEAD_BYTES or any(head[6:8]):  # no record has 2^48 bytes: most other formats need no checksum
        return False
    return not _wrong(np.frombuffer(head[:HEAD_BYTES], np.uint8)[None]).any()


def _wrong(heads: BytesArray) -> Any:
    """Return which of the (rows, 12) heads have a length that its checksum contradicts."""
    return mask(crc_of_rows(heads[:, : _LENGTH.size])) != heads[:, _LENGTH.size :].copy().view("<u4").ravel()


def find_records(read: Callable[[int, int], bytes], size: int, path: str) -> Int64Array:
    """Return the edges of records, (records + 1,) int64 offsets, with the checksums of their lengths compared."""
    edges, position, count, window = [np.zeros(1, np.int64)], 0, 0, _FIRST
    while position < size:
        block = read(position, min(window, size - position))
        found, after = _follow(block)
        if not found:
            raise _cut(size, position, count, path)
        starts = np.array(found)
        wrong = _wrong(np.frombuffer(block, np.uint8)[starts[:, None] + np.arange(HEAD_BYTES)])
        if wrong.any():
            row = int(np.argmax(wrong))
            raise _wrong_length(block[found[row] : found[row] + HEAD_BYTES], position + found[row], count + row, path)
        if after > size - position:
            raise _cut(size, position + found[-1], count + len(found) - 1, path)
        edges += (position + starts[1:], np.array([position + after]))
        position, count = position + after, count + len(found)
        window = _BLOCK if after < len(found) * _BLOCK // 8 else HEAD_BYTES
    return np.concatenate(edges)


def _follow(block: bytes) -> tuple[list[int], int]:
    """Return where in a block, which begins with a record, records begin; and where the next one does, outside."""
    unpack, last = _LENGTH.unpack_from, len(block) - HEAD_BYTES
    found: list[int] = []
    at = 0
    while at <= last:
        found.append(at)
        (length,) = unpack(block, at)
        at += length + FRAME_BYTES
    return found, at


def _wrong_length(head: bytes, offset: int, index: int, path: str) -> CorruptFileError | UnsupportedFormatError:
    if offset == 0:
        message = f"{path} does not begin with a TFRecord, a length and its CRC-32C: {describe_head(head)}"
        return UnsupportedFormatError(message, path=path)
    length, crc = np.frombuffer(head, _HEAD)[0].tolist()
    stored = int(mask(crc_of_rows(np.frombuffer(head[: _LENGTH.size], np.uint8)[None]))[0])
    message = f"the masked CRC-32C of the record's length, {length}, is {stored:#x}, but the file says {crc:#x}"
    return CorruptFileError(message, path=path, offset=offset, index=index)


def _cut(size: int, offset: int, index: int, path: str) -> CorruptFileError:
    message = f"the file ends at byte {size}, within this record: it was cut off, or its writer did not finish"
    return CorruptFileError(message, path=path, offset=offset, index=index)


def check_data(data: Any, crcs: Any, value: Callable[[bytes], int]) -> int | None:
    """Return the row of the first record whose checksum in `crcs`, (rows,) uint32, is wrong; None if none is."""
    found = mask(np.fromiter((value(bytes(record)) for record in data), np.uint32, len(data)))
    wrong = found != crcs
    return int(np.argmax(wrong)) if wrong.any() else None


_LEAST_CACHED = 100_000  # records; finding fewer takes 20 ms


class TFRecordSource(FileSource[Any]):
    """Records of uncompressed TFRecord files, as bytes or decoded by a codec.

    A file of zero bytes has no records, as for TensorFlow. Options: `TFRecordOptions`.
    """

    format_name = "tfrecord"
    options_type: ClassVar[Any] = TFRecordOptions

    def _open_shard(self, path: str) -> ShardReader[Any]:
        return _TFRecordFile(path, self.options)


class _TFRecordFile(EncodedShard):
    def __init__(self, path: str, options: TFRecordOptions) -> None:
        super().__init__(path, cast("Codec | None", options.codec))
        storage = storage_of(path, options.remote_settings)
        self._file = storage.map(path, mapped=options.map)
        self._limit = options.max_record_bytes
        self._crc32c: Any = TFRECORD.require("google_crc32c", package="google-crc32c").value if options.verify else None

        def find() -> Int64Array:
            # Read instead of using the map: a page fault would also read the pages around it.
            with storage.open(path, whole=True) as stream:
                return find_records(stream.read, self._file.size, path)

        self._edges = remember(
            IndexKey.of("tfrecord", (path,), remote=options.remote_settings) if options.cache else None,
            lambda found: _unpack(found, self._file.size),
            find,
            lambda edges: CachedTable({"edges": edges}, {}) if len(edges) > _LEAST_CACHED else None,
        )
        self._has_large = bool((np.diff(self._edges) > self._limit).any())  # perhaps: with their frames
        self._fields = {} if self._codec is None else self.first_fields()

    def __len__(self) -> int:
        return len(self._edges) - 1

    def shared(self) -> tuple[RecordFile, Any]:
        return self._file, ()

    def joined(self, directory: ShardDirectory) -> Self:
        joined = directory.copy_of(self)
        joined._edges, joined._has_large = directory.numbers(is_place=True), False
        return joined

    def join(self, joined: Any, shard: int) -> None:
        joined._edges.put(shard, self._edges)
        joined._has_large |= self._has_large

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array]:  # noqa: ARG002 - records are read whole
        return self._locations(indices)

    def _locations(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        offsets = self._edges.take(indices, mode="clip") + HEAD_BYTES
        lengths = self._edges.take(indices + 1, mode="clip") - CRC_BYTES - offsets
        if self._has_large:
            check_lengths(lengths, self._limit, indices, self._path)
        return offsets, lengths

    def _stored(self, indices: Int64Array, gather: Gather) -> Any:
        if self._crc32c is None:
            return super()._stored(indices, gather)
        offsets, lengths = self._locations(indices)
        data = gather(self._file, offsets, lengths)
        crcs = self._file.gather(offsets + lengths, CRC_BYTES).view("<u4").ravel()
        if (row := check_data(data, crcs, self._crc32c)) is not None:
            message = f"the masked CRC-32C of the record differs from the one in the file, {int(crcs[row]):#x}"
            raise CorruptFileError(message, path=self._path, offset=int(offsets[row]), index=int(indices[row]))
        return data


def _unpack(found: CachedTable, size: int) -> Int64Array:
    """Return the edges from the cache, whose records must fill the file."""
    edges = found.arrays["edges"]
    require(edges.dtype == np.int64, edges[0] == 0, edges[-1] == size, edges[1:] >= edges[:-1] + FRAME_BYTES)
    return edges


class TFRecordWriter(Writer):
    """Writes a TFRecord file. The same records and codec give the same bytes.

    Options: `TFRecordWriterOptions`.
    """

    options_type: ClassVar[Any] = TFRecordWriterOptions

    def _begin(self, options: TFRecordWriterOptions) -> None:
        self._crc32c: Any = TFRECORD.require("google_crc32c", package="google-crc32c").value
        self._codec: Any = options.codec
        self._stream = self._part.create()

    def _write(self, record: Any) -> None:
        codec = self._codec if len(self) else choose_codec(self._codec, record, TFRECORD.default_codec)
        data = encode_bytes(record, codec, "tfrecord")
        self._stream.write(build_head(len(data)) + data + mask([self._crc32c(data)]).astype("<u4").tobytes())
        self._codec = codec
        self.stored_bytes += len(data)

    def _finish(self) -> None:
        self._stream.close()

    def _discard(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
