"""The source of MDS data sets."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

from dataload._util.arrays import FIELD_BYTES, check_lengths, check_size, fits, split_records
from dataload._util.clock import decoding
from dataload.catalog.facts import require_known
from dataload.codecs.decoders import decode_images
from dataload.collate import default_collate
from dataload.errors import CorruptFileError, DataloadError, UnsupportedFormatError
from dataload.sources.directory import ShardDirectory
from dataload.sources.encoded import LoadedRecords, decoded, located
from dataload.sources.file_source import FileSource
from dataload.sources.mds import INDEX_NAME, MDS, MDSOptions
from dataload.sources.mds.columns import Column, array_head, parse_column
from dataload.sources.shards import ListedShards, ShardReader
from dataload.storage import RecordFile, base_name, is_url, join, named_files, parent, storage_of
from dataload.storage.backend import map_unpacked
from dataload.storage.errors import rewritten_error
from dataload.storage.local.record_files import MappedFile
from dataload.types import Array, Batch, BytesArray, FieldSpec, Int64Array, Record

MOST_BYTES = 64 << 20
"""Maximum size of an index, of about 100,000 shards: parsed JSON takes up to twenty times the memory."""

_VERSION = 2
_MOST = (1 << 32) - 1  # offsets in a shard have 32 bits


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard: a file of `bytes` bytes beside the index; `columns` are in the order in which a sample holds them.

    `packed` is the same file compressed, None if there is none; `compression` says how, such as ``"zstd"``.
    """

    name: str
    bytes: int
    samples: int
    columns: tuple[Column, ...]
    packed: str | None
    compression: str | None


def parse_index(data: bytes, path: str) -> tuple[ShardInfo, ...]:
    """Return the shards in the order of their samples; `path` is for messages."""
    if len(data) > MOST_BYTES:
        raise CorruptFileError(f"an index has at most {MOST_BYTES:,} bytes", path=path)
    try:
        shards = _expect(list, json.loads(data)["shards"])
        if not shards:
            raise ValueError("it lists no shard")
        return tuple(_parse_shard(shard, path) for shard in shards)
    except DataloadError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__} {str(error)[:200]}"
        message = f"expected the index of an MDS data set, with a list of shards: {problem}"
        raise CorruptFileError(message, path=path) from error


def _parse_shard(shard: Mapping[str, Any], path: str) -> ShardInfo:
    if (shard["format"], shard["version"]) != ("mds", _VERSION):
        message = f"{path}: a shard is {str(shard['format'])[:40]!r} of version {str(shard['version'])[:40]}"
        raise UnsupportedFormatError(f"{message}; only 'mds' of version {_VERSION} is supported", path=path)
    names, encodings = shard["column_names"], shard["column_encodings"]
    columns = _columns(tuple(map(_text, names)), tuple(map(_text, encodings)))
    if [column.size for column in columns] != shard["column_sizes"]:
        raise ValueError(f"column_sizes {shard['column_sizes']} contradict column_encodings {encodings}")
    packed = shard["zip_data"]
    names = [each["basename"] for each in (shard["raw_data"], packed) if each is not None]
    named_files(path, names)
    return ShardInfo(
        name=names[0],
        bytes=_count(shard["raw_data"]["bytes"]),
        samples=_count(shard["samples"]),
        columns=columns,
        packed=None if packed is None else names[1],
        compression=None if packed is None else _text(shard["compression"]).partition(":")[0],
    )


@cache
def _columns(names: tuple[str, ...], encodings: tuple[str, ...]) -> tuple[Column, ...]:
    if len({*names}) != len(names):
        raise ValueError("two columns have the same name")
    return tuple(parse_column(name, encoding) for name, encoding in zip(names, encodings, strict=True))


def _expect(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{str(value)[:80]!r} is not {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return _expect(str, value)


def _count(value: Any) -> int:
    if not 0 <= _expect(int, value) <= _MOST:
        raise ValueError(f"{value} is not in [0, {_MOST}]")
    return value


_WORD = np.dtype("<u4")
_CODECS = {
    "br": ("brotli", "decompress_into"),
    "bz2": ("bzip2", "decompress_into"),
    "gz": ("gzip", "decompress_into"),
    "snappy": ("snappy", "decompress_raw_into"),
    "zstd": ("zstd", "decompress_into"),
}
"""Compression -> module of cramjam and its function."""


class MDSSource(FileSource[Record]):
    """Samples of data sets that MosaicML Streaming wrote.

    Shards are opened when they are first read, as the index has the rest. Compressed ones are decompressed into the
    cache of the node, unless the decompressed file is beside them; see `dataload.RemoteOptions`.

    `paths` are directories with ``index.json``, or such files. Options: `MDSOptions`.
    """

    format_name = "mds"
    options_type: ClassVar[Any] = MDSOptions

    def _prepare(self) -> None:
        self._indexes = [path if base_name(path) == INDEX_NAME else join(path, INDEX_NAME) for path in self._paths]
        shards = self._read_indexes()
        self._shards: dict[str, ShardInfo] | None = dict(shards)
        self._paths = tuple(path for path, _ in shards)
        known = {column.name: column.spec for column in shards[0][1].columns}
        self._check_fields(known, self._indexes[0])
        self.open_on_first_use(ListedShards(tuple(shard.samples for _, shard in shards), known, listed=False))

    def _read_indexes(self) -> list[tuple[str, ShardInfo]]:
        """Return the path of each shard, and what the index says of it."""
        found: list[tuple[str, ShardInfo]] = []
        for path in self._indexes:
            storage = storage_of(path, self._remote)
            data = storage.read_ranges(path, np.zeros(1, np.int64), np.array([MOST_BYTES + 1]))[0]
            found += [(_file_of(shard, parent(path), self._remote), shard) for shard in parse_index(data, path)]
        return found

    def _open_shard(self, path: str) -> ShardReader[Record]:
        if self._shards is None:  # in another process
            self._shards = dict(self._read_indexes())
        shard = self._shards.get(path)
        if shard is None:  # in the process that made this source, there was one
            raise rewritten_error(self._indexes[0])
        return _MDSShard(path, shard, self.options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_shards": None}


def _file_of(shard: ShardInfo, directory: str, remote: Any) -> str:
    """Return the file of a shard that is there: as the original, prefer the one that is not compressed."""
    raw = join(directory, shard.name)
    if shard.packed is None or (not is_url(raw) and storage_of(raw, remote).exists(raw)):
        return raw
    return join(directory, shard.packed)


class _MDSShard(ShardReader[Record]):
    def __init__(self, path: str, shard: ShardInfo, options: MDSOptions) -> None:
        self._columns = {column.name: column for column in shard.columns}
        self._options = options
        self._limit = options.max_record_bytes
        check_size(
            FIELD_BYTES * len(shard.columns), self._limit, f"a sample of {len(shard.columns):,} columns", path=path
        )
        self.whole = base_name(path) != base_name(shard.name)
        if self.whole:
            unpack = _unpacker(path, shard.compression)
            self._file = map_unpacked(path, shard.bytes, unpack, mapped=options.map, remote=options.remote_settings)
        else:
            self._file = storage_of(path, options.remote_settings).map(path, mapped=options.map)
        self._edges = _read_edges(self._file, shard)
        self._variable = sum(column.size is None for column in shard.columns)
        self._fixed = np.array([column.size or 0 for column in shard.columns], np.int64)
        self._least = _WORD.itemsize * self._variable + int(self._fixed.sum())  # bytes of a sample
        self._is_variable = np.array([column.size is None for column in shard.columns])

    def __len__(self) -> int:
        return len(self._edges) - 1

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return {name: column.spec for name, column in self._columns.items()}

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        columns = self._read_columns(indices, fields)
        for name, values in columns.items():
            if self._columns[name].encoding == "int":
                columns[name] = values.tolist()
        return split_records(columns, len(indices))

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        columns = self._read_columns(indices, fields)
        for name, values in columns.items():
            if isinstance(values, list):
                with decoding():
                    columns[name] = default_collate.column(values, name)
        return columns

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array]:  # noqa: ARG002 - most fields are beside each other
        offsets = self._edges.take(indices, mode="clip").astype(np.int64)
        lengths = self._edges.take(indices + 1, mode="clip").astype(np.int64) - offsets
        check_lengths(lengths, self._limit, indices, self._file.path)
        return offsets, lengths

    def shared(self) -> tuple[RecordFile, Any]:
        return self._file, self._columns

    def joined(self, directory: ShardDirectory) -> Self:
        joined = directory.copy_of(self)
        joined._edges = directory.numbers(is_place=True)
        return joined

    def join(self, joined: Any, shard: int) -> None:
        joined._edges.put(shard, self._edges)

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> dict[str, Any]:
        """Return the values of columns: an array, a `BytesColumn` or a list for each."""
        require_known(fields or (), self._columns, self._file.path)  # the first shard may have other columns
        offsets, lengths = self.ranges(indices, None)
        file: RecordFile | LoadedRecords = self._file
        starts = offsets
        if fields is None or not isinstance(file, MappedFile):  # each read may be a request
            file, starts = LoadedRecords.of(file, offsets, lengths)
        self._check(lengths >= self._least, f"the sample has fewer than {self._least} bytes", offsets, indices)
        sizes = np.tile(self._fixed[:, None], (1, len(indices)))  # (columns, rows)
        head = _WORD.itemsize * self._variable
        if head:
            sizes[self._is_variable] = file.gather(starts, head).view(_WORD).T
        ends = head + np.cumsum(sizes, axis=0)
        self._check(
            ends[-1] == lengths, "the sizes of the fields do not add up to the size of the sample", offsets, indices
        )
        found: dict[str, Any] = {}
        for number, (name, column) in enumerate(self._columns.items()):
            if fields is None or name in fields:
                at = starts + ends[number] - sizes[number]
                found[name] = self._values(column, file, at, sizes[number], indices)
        return found if fields is None else {name: found[name] for name in fields}

    def _check(self, right: Array, message: str, offsets: Int64Array, indices: Int64Array) -> None:
        if not right.all():
            row = int(np.argmin(right))
            raise CorruptFileError(message, path=self._file.path, offset=int(offsets[row]), index=int(indices[row]))

    def _values(
        self,
        column: Column,
        file: RecordFile | LoadedRecords,
        offsets: Int64Array,
        sizes: Int64Array,
        indices: Int64Array,
    ) -> Any:
        if column.size is not None:
            assert column.dtype is not None, "only numbers and arrays have a known size"
            assert column.shape is not None, "as above"
            return file.gather(offsets, column.size).view(column.dtype).reshape(len(indices), *column.shape)
        options = self._options
        decode = column.decoder(images=options.decode, allow_pickle=options.allow_pickle, limit=self._limit)
        if column.encoding == "ndarray" and (alike := _alike(column, file, offsets, sizes)) is not None:
            return alike
        data = file.gather_ranges(offsets, sizes)
        if decode is None:
            return data
        if column.encoding in ("jpeg", "png"):
            with decoding():
                images = decode_images([*data.views()], column.encoding.upper(), self._limit)
            if images is not None:
                return images

        def locate(error: Exception, row: int) -> Exception:
            index = int(indices[row])
            return located(error, self._file.path, index, f"field {column.name!r}", int(self._edges[index]))

        return decoded(map(decode, data.views()), len(indices), locate)

    def release(self) -> None:
        self._file.release()


def _alike(column: Column, file: RecordFile | LoadedRecords, offsets: Int64Array, sizes: Int64Array) -> Array | None:
    """Return arrays of one dtype and shape, (rows, *shape); None if they differ, or one is damaged."""
    size = int(sizes[0])
    if not size or bool((sizes != size).any()):
        return None
    rows = file.gather(offsets, size)
    try:
        dtype, shape, start = array_head(column.dtype, column.shape, rows[0].data)
    except CorruptFileError:
        return None  # the general path raises it again
    items = rows[:, start:]
    count, rest = divmod(items.shape[1], dtype.itemsize)
    if rest or not fits(shape, count) or bool((rows[:, :start] != rows[0, :start]).any()):
        return None
    return np.ascontiguousarray(items).view(dtype).reshape(len(rows), *shape)


def _unpacker(path: str, compression: str | None) -> Any:
    """Return the function that decompresses a shard into an array."""
    if compression not in _CODECS:
        message = f"{path} is compressed as {compression!r}; supported are {', '.join(_CODECS)}"
        raise UnsupportedFormatError(message, path=path)
    module, function = _CODECS[compression]
    package = MDS.require("cramjam")

    def unpack(data: bytes, out: BytesArray) -> None:
        try:
            count = getattr(getattr(package, module), function)(data, out)
        except package.DecompressionError as error:
            message = f"the shard cannot be decompressed to the {len(out)} bytes that the index gives: {error}"
            raise CorruptFileError(message, path=path) from error
        if count != len(out):
            raise CorruptFileError(f"the shard has {count} bytes, and {len(out)} in the index", path=path)

    return unpack


def _read_edges(file: RecordFile, shard: ShardInfo) -> Array:
    """Return where the samples of a shard start and end, (samples + 1,) uint32, all of them inside the file."""
    path, count = file.path, shard.samples
    if file.size != shard.bytes:
        message = f"the shard has {file.size} bytes, and {shard.bytes} in the index: it was cut off, or is another one"
        raise CorruptFileError(message, path=path, offset=min(file.size, shard.bytes))
    head = _WORD.itemsize * (count + 2)
    words = np.frombuffer(file.read(0, min(head, file.size)), _WORD) if file.size >= head else None
    if words is None or int(words[0]) != count:
        found = "fewer" if words is None else f"{int(words[0])}"
        raise CorruptFileError(f"the shard has {found} samples, and {count} in the index", path=path, offset=0)
    edges = words[1:]
    wrong = np.flatnonzero(edges[1:] < edges[:-1])
    if len(wrong) or int(edges[0]) < head or int(edges[-1]) != file.size:
        first = int(wrong[0]) if len(wrong) else 0
        message = f"the offsets of samples do not rise from {head} or more to {file.size}, the end of the file"
        raise CorruptFileError(message, path=path, offset=_WORD.itemsize * (first + 1))
    return edges
