"""Sources of Parquet files, and of Arrow IPC files and streams."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np

from dataload._util.buffers import pooled_empty
from dataload._util.decoding import decoding
from dataload._util.indexing import split_by_shard
from dataload._util.limits import check_size
from dataload.codecs import arrow
from dataload.codecs.arrow import Rows, load_arrow
from dataload.codecs.decoders import DECODERS, Decoder, find_decoder, for_extension
from dataload.collate import scatter_columns
from dataload.errors import ConfigError, CorruptFileError, DataloadError, UnsupportedFormatError, closest
from dataload.sources.arrow.format import ArrowOptions, TableOptions
from dataload.sources.arrow.gather import Gatherer, plan_nodes
from dataload.sources.arrow.ipc import Layout, Message, parse_layout
from dataload.sources.decoded import DecodedCache
from dataload.sources.files import FileSource
from dataload.sources.shards import ShardReader
from dataload.storage import storage_of
from dataload.storage.errors import rewritten_error
from dataload.storage.stream import FileStream
from dataload.types import Batch, FieldSpec, Int64Array, Record

_END = b"\xff\xff\xff\xff" + bytes(4)  # of a stream
_DECODED_ROWS = 1 << 14  # at once, between two looks at the memory that they take


class TableSource(FileSource[Record]):
    """The base class of sources of tables; see `dataload.codecs.arrow` for the values."""

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(paths, fields=fields, **options)
        self._cache = DecodedCache(self.options.cached_bytes)

    def close(self) -> None:
        """See `FileSource.close`."""
        super().close()
        self._cache.clear()


class ParquetSource(TableSource):
    """Records of Parquet files. A column comes out as a column.

    A row group is decoded as a whole, and those used last are kept (`cached_bytes`). So the default shuffle goes by
    shards, through a pool (`reads_in_order`).

    Args:
        paths: One or more files.
        fields: Names of the columns to read; None means all. Others are not decoded.
        options: See `TableOptions`.

    Raises:
        CorruptFileError: A file is damaged, a row group takes more than `max_record_bytes`, or a value is null where
            numpy has none.
        MissingDependencyError: On first use, if pyarrow is not installed.
    """

    format_name = "parquet"
    options_type = TableOptions

    @property
    def reads_in_order(self) -> bool:
        """See `Source.reads_in_order`."""
        return True

    def _open_shard(self, path: str) -> ShardReader[Record]:
        return _ParquetFile(path, self.options, self._cache)


class ArrowSource(TableSource):
    """Records of Arrow IPC files and streams, also called Feather. A column comes out as a column.

    Values are copied out of the file without reading their batch, unless the file is compressed or has views or
    unions (Polars writes views). Then a batch is decoded as a whole, and those used last are kept (`cached_bytes`).

    Args:
        paths: One or more files.
        fields: Names of the columns to read; None means all. Others are not read.
        options: See `ArrowOptions`.

    Raises:
        CorruptFileError: A file is damaged, a compressed batch takes more than `max_record_bytes`, or a value is null
            where numpy has none.
        MissingDependencyError: On first use, if pyarrow is not installed.
    """

    format_name = "arrow"
    options_type = ArrowOptions

    @property
    def reads_in_order(self) -> bool:
        """Whether batches of the first file are decoded as a whole."""
        reader = self._data_set().reader(0)
        return isinstance(reader, _ArrowFile) and reader.gatherer is None

    def _open_shard(self, path: str) -> ShardReader[Record]:
        return _ArrowFile(path, self.options, self._cache)


class TableReader(ShardReader[Record]):
    """A table in a file.

    Args:
        path: The file.
        schema: Its schema, of pyarrow.
        ends: (groups,) int64, cumulative number of records of its row groups or batches.
        options: The options.
        cache: Decoded columns of row groups.
    """

    whole = True

    def __init__(self, path: str, schema: Any, ends: Int64Array, options: TableOptions, cache: DecodedCache) -> None:
        self._path, self._schema, self._ends, self._cache = path, schema, ends, cache
        self._limit: int = options.max_record_bytes
        str(schema)  # raises if a name, of a field in any field, is not UTF-8
        twice = [name for name, count in Counter(schema.names).items() if count > 1]
        if twice:
            message = f"{path} has several columns called {twice[0]!r}: rename them where the table is made"
            raise UnsupportedFormatError(message, path=path)
        self._numbers = {name: number for number, name in enumerate(schema.names)}
        features = _features(schema)
        self._shapes = {name: shape for name in schema.names if (shape := _shape(features.get(name)))}
        self._decoders = _plan_decoders(schema, features, options, path)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """See `ShardReader.fields`."""
        decoded = FieldSpec("unknown", None)
        return {
            each.name: decoded
            if each.name in self._decoders
            else arrow.spec_of_type(each.type, self._shapes.get(each.name))
            for each in self._schema
        }

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        """See `ShardReader.read`."""
        return arrow.split(self._columns(indices, fields), len(indices))

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        """See `ShardReader.read_batch`."""
        return arrow.stacked(self._columns(indices, fields))

    def _columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> dict[str, Any]:
        names = tuple(self._schema.names) if fields is None else fields
        for name in names:
            if name not in self._numbers:
                known = closest(name, self._schema.names)
                raise ConfigError(f"{self._path} has no field {name!r}: {known}", key="fields", value=name)
        with self._errors():
            columns = self._pick(indices, names)
        for name in names:
            if name in self._decoders:
                columns[name] = self._decode_values(columns[name], self._decoders[name], name, indices)
        return columns

    def _pick(self, indices: Int64Array, names: Sequence[str]) -> dict[str, Any]:
        """Return columns of records, by decoding the groups that they are in."""
        parts = list(split_by_shard(self._ends, indices))
        columns: dict[str, Any] = {}
        for name in names:
            found = [(self._group(group, name, int(indices[rows[0]])), local, rows) for group, local, rows in parts]
            columns[name] = self._join(found, name, indices)
        return columns

    def _join(self, found: list[tuple[Any, Int64Array, Int64Array]], name: str, indices: Int64Array) -> Any:
        """Return values of several groups as one column: of each the prepared column, rows in it, and ours."""
        first, shape = found[0][0], self._shapes.get(name)
        if all(isinstance(each, np.ndarray) and each.dtype == first.dtype for each, _, _ in found):
            out = pooled_empty((len(indices), *first.shape[1:]), first.dtype)
            for each, local, rows in found:
                out[rows] = each[local]
            return out
        pieces = [
            (rows, {name: arrow.pick(each, name, local, Rows(self._path, indices[rows]), shape)})
            for each, local, rows in found
        ]
        return scatter_columns(pieces, len(indices))[name]

    def _group(self, group: int, name: str, index: int) -> Any:
        """Return a column of a group; `index` is one of its records, for messages."""

        def decode() -> tuple[Any, int]:
            with self._errors(group, index):
                with decoding():
                    array = arrow.prepare(self._decode(group, name))
                count = int(self._ends[group] - (self._ends[group - 1] if group else 0))
                if len(array) != count:
                    raise ValueError(f"{len(array)} values of {name!r} for {count} records")
                return array, array.nbytes

        return self._cache.get((self._path, group, name), decode)

    @abstractmethod
    def _decode(self, group: int, name: str) -> Any:
        """Return a column of a group as an array of pyarrow."""

    @contextmanager
    def _errors(self, group: int | None = None, index: int | None = None) -> Generator[None]:
        """Translate errors about the file's content; those of storage stay."""
        try:
            yield
        except (DataloadError, MemoryError):
            raise
        except (load_arrow("tables").ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
            where = "" if group is None else f"row group {group}: "
            raise CorruptFileError(f"{where}{error}", path=self._path, index=index) from error

    def _decode_values(self, column: Any, decoder: Decoder, name: str, indices: Int64Array) -> list[Any]:
        values: list[Any] = []
        with decoding():
            for row, value in enumerate(column):
                try:
                    values.append(decoder.decode(value))
                except CorruptFileError as error:
                    message = f"field {name!r}: {error}"
                    raise CorruptFileError(message, path=self._path, index=int(indices[row])) from error
        return values


def _features(schema: Any) -> Mapping[str, Any]:
    """Return what Hugging Face's library has written about the columns."""
    try:
        found = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    except (TypeError, KeyError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _shape(feature: Any) -> tuple[int, ...] | None:
    """Return the shape that Hugging Face declares for a list of lists, if it is constant."""
    shape = feature.get("shape") if isinstance(feature, dict) else None
    if isinstance(shape, list) and shape and all(type(extent) is int and extent > 0 for extent in shape):
        return tuple(shape)
    return None


def _plan_decoders(schema: Any, features: Mapping[str, Any], options: TableOptions, path: str) -> dict[str, Decoder]:
    """Return the decoder of each field that has one."""
    chosen: Mapping[str, Any] = options.decode if isinstance(options.decode, Mapping) else {}
    if options.decode == "auto":
        kinds = {name: str(each.get("_type")).lower() for name, each in features.items() if isinstance(each, dict)}
        chosen = {name: kind for name, kind in kinds.items() if kind in DECODERS and name in schema.names}
    for name in chosen:
        spec = arrow.spec_of_type(schema.field(name).type) if name in schema.names else None
        if spec is None or spec.dtype != "bytes":
            known = closest(name, schema.names) if spec is None else f"it is {spec}, and decoders take bytes"
            raise ConfigError(f"decode names the field {name!r} of {path}: {known}", key="decode", value=name)
    return {
        name: for_extension(find_decoder(what, name), "", options.max_record_bytes) for name, what in chosen.items()
    }


class _ParquetFile(TableReader):
    def __init__(self, path: str, options: TableOptions, cache: DecodedCache) -> None:
        self._parquet = load_arrow("format 'parquet'", "pyarrow.parquet")
        self._path = path
        self._storage = storage_of(path, options.place)
        self._identity = self._storage.identity(path)
        with self._errors(), self._storage.open(path) as file:
            self._metadata = self._parquet.read_metadata(FileStream(file))
            schema = self._metadata.schema.to_arrow_schema()
        counts = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
        if min(counts, default=0) < 0 or sum(counts) >= 1 << 62:
            raise CorruptFileError("the footer claims impossible numbers of records", path=path)
        with self._errors():
            super().__init__(path, schema, np.cumsum(counts, dtype=np.int64), options, cache)

    def _decode(self, group: int, name: str) -> Any:
        if self._storage.identity(self._path) != self._identity:
            raise rewritten_error(self._path)
        claims = self._metadata.row_group(group)
        columns = [claims.column(number) for number in range(claims.num_columns)]
        own = [each for each in columns if f"{each.path_in_schema}.".startswith(f"{name}.")]
        what = f"field {name!r} of row group {group}"
        check_size(sum(each.total_uncompressed_size for each in own), self._limit, what, path=self._path)
        arrays: list[Any] = []
        with self._storage.open(self._path, whole=True) as file:
            reader = self._parquet.ParquetFile(
                FileStream(file), metadata=self._metadata, page_checksum_verification=True
            )
            batches = reader.iter_batches(_DECODED_ROWS, row_groups=[group], columns=[name], use_threads=False)
            for batch in batches:
                arrays.append(_without_dictionary(batch.column(name)))
                check_size(sum(each.nbytes for each in arrays), self._limit, what, path=self._path)
        pa = load_arrow("format 'parquet'")
        return pa.chunked_array(arrays, arrays[0].type if arrays else self._schema.field(name).type)


def _without_dictionary(array: Any) -> Any:
    types = load_arrow("tables").types
    return array.dictionary_decode() if types.is_dictionary(array.type) else array


class _ArrowFile(TableReader):
    """An IPC file or stream.

    Attributes:
        gatherer: Reads values without their batch; None if batches have to be decoded.
    """

    def __init__(self, path: str, options: ArrowOptions, cache: DecodedCache) -> None:
        self._pa = pa = load_arrow("format 'arrow'")
        self._path = path
        storage = storage_of(path, options.place)
        self._file = storage.map(path, mapped=options.map, whole=True)
        with storage.open(path, whole=True) as file:
            self._layout = parse_layout(file.read, min(file.size, self._file.size), path)
        layout = self._layout
        with self._errors():
            if layout.footer:
                schema = pa.ipc.open_file(pa.py_buffer(layout.footer)).schema
            else:
                schema = pa.ipc.read_schema(pa.py_buffer(layout.schema))
        counts = np.array([found.rows for found in layout.batches], np.int64)
        if len(counts) and float(counts.sum(dtype=np.float64)) >= 1 << 62:
            raise CorruptFileError("its batches claim impossible numbers of records", path=path)
        with self._errors():
            super().__init__(path, schema, np.cumsum(counts), options, cache)
        self._starts = self._ends - counts
        nodes = None if any(each.compressed for each in self._messages()) else plan_nodes(schema)
        self.gatherer = None if nodes is None else Gatherer(self._file, nodes, self._layout.batches, self._limit)
        self._empty = self._load_dictionaries() if self.gatherer is not None else None

    def _messages(self) -> list[Message]:
        return [*self._layout.dictionaries, *self._layout.batches]

    def _pick(self, indices: Int64Array, names: Sequence[str]) -> dict[str, Any]:
        if self.gatherer is None:
            return super()._pick(indices, names)
        batch, rows = self._locate(indices)
        where, columns = Rows(self._path, indices), dict[str, Any]()
        for name in names:
            number = self._numbers[name]
            column = self.gatherer.column(number, batch, rows, indices)
            if column is None:
                empty = None if self._empty is None else self._empty.column(number)
                array = self.gatherer.take(number, batch, rows, indices, empty)
                column = arrow.to_column(array, name, where, self._shapes.get(name))
            columns[name] = column
        return columns

    def _locate(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the batch of each record, and its row there."""
        if len(self._ends) == 1:
            return np.zeros(len(indices), np.int64), indices
        batch = np.searchsorted(self._ends, indices, side="right")
        return batch, indices - self._starts[batch]

    def _load_dictionaries(self) -> Any:
        """Return a batch without records but with all dictionaries; None if there are none."""
        layout, pa = self._layout, self._pa
        if not layout.dictionaries:
            return None
        self._check_replaced(layout)
        with self._errors():
            empty = pa.RecordBatch.from_arrays([pa.array([], each.type) for each in self._schema], schema=self._schema)
            return self._read_stream([empty.serialize().to_pybytes()], None)

    def _check_replaced(self, layout: Layout) -> None:
        whole = Counter(found.dictionary for found in layout.dictionaries if not found.is_delta)
        if max(whole.values(), default=1) > 1:
            message = (
                f"{self._path} replaces its dictionaries between batches: write it as an Arrow file, or as Parquet"
            )
            raise UnsupportedFormatError(message, path=self._path)

    def _decode(self, group: int, name: str) -> Any:
        self._check_replaced(self._layout)
        found = self._layout.batches[group]
        data = self._bytes(found)
        if found.compressed:
            at = found.buffers[:, 0] - found.offset
            heads = [data[start : start + 8] for start, size in zip(at, found.buffers[:, 1], strict=True) if size]
            # -1 stands for a buffer that is not compressed.
            claims = sum(max(0, int.from_bytes(head, "little", signed=True)) for head in heads)
            check_size(claims, self._limit, f"batch {group}", path=self._path)
        return self._read_stream([data], name).column(name)

    def _bytes(self, found: Message) -> bytes:
        return self._file.read(found.offset, found.body + found.body_length - found.offset)

    def _read_stream(self, batch: Sequence[bytes], name: str | None) -> Any:
        """Return a batch of records that follows all dictionaries, as pyarrow reads it; of one column, if named."""
        schema = self._layout.schema or self._schema.serialize().to_pybytes()
        parts = [schema, *map(self._bytes, self._layout.dictionaries), *batch, _END]
        chosen = None if name is None else [self._numbers[name]]
        options = self._pa.ipc.IpcReadOptions(included_fields=chosen, use_threads=False)
        found = self._pa.ipc.open_stream(self._pa.py_buffer(b"".join(parts)), options=options).read_next_batch()
        found.validate(full=True)
        return found

    def release(self) -> None:
        self._file.release()
