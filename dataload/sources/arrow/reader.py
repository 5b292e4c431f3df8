"""The sources of Arrow IPC files and streams, of data sets that Hugging Face saved, and of CSV files."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self, cast

import numpy as np

from dataload._util.arrays import Claims, check_size
from dataload._util.caches import DecodedCache, Memo
from dataload._util.clock import decoding
from dataload.codecs import arrow
from dataload.codecs.arrow import ColumnContext, load_arrow
from dataload.codecs.nulls import fill_nulls, shows_nulls
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError, closest
from dataload.sources.arrow import STATE_FILE, ArrowOptions, CsvOptions
from dataload.sources.arrow.columns import differing_types, numbered
from dataload.sources.arrow.gather import Gatherer, plan_nodes
from dataload.sources.arrow.ipc import Layout, Message, pairs_of, parse_layout, schema_message
from dataload.sources.arrow.table import TableReader, TableSource
from dataload.sources.directory import ShardDirectory
from dataload.sources.shards import ShardReader
from dataload.storage import RecordFile, Remote, join, named_files, read_limited, storage_of
from dataload.storage.backend import TextFile
from dataload.types import Array, FieldSpec, Int64Array, Record

_END = b"\xff\xff\xff\xff" + bytes(4)  # of a stream


class ArrowSource(TableSource):
    """Records of Arrow IPC files and streams, also called Feather. A column comes out as a column.

    Values are copied out of the file without reading their batch, unless the file is compressed or has views or
    unions (Polars writes views). Then a batch is decoded as a whole, and those used last are kept (`cached_bytes`).

    Options: `ArrowOptions`.
    """

    format_name = "arrow"
    options_type: ClassVar[Any] = ArrowOptions

    def _prepare(self) -> None:
        super()._prepare()
        self._last: Memo[Gatherer] = Memo(1)  # shards of equal layout share what it is made of
        self._layouts: Memo[tuple[bytes, Layout]] = Memo(1)

    @property
    def reads_in_order(self) -> bool:
        """Whether batches of the first file are decoded as a whole."""
        reader = self._data_set().reader(0)
        return isinstance(reader, _ArrowFile) and reader.gatherer is None

    def _open_shard(self, path: str) -> ShardReader[Record]:
        return self._with_classes(_ArrowFile(path, self.options, self._cache, self._last, self._layouts))


class _ArrowFile(TableReader):
    """An IPC file or stream; `gatherer` reads values without their batch, None if batches have to be decoded."""

    def __init__(
        self,
        path: str,
        options: ArrowOptions,
        cache: DecodedCache,
        last: Memo[Gatherer],
        layouts: Memo[tuple[bytes, Layout]],
    ) -> None:
        self._pa = pa = load_arrow("format 'arrow'")
        self._path = path
        file = storage_of(path, options.remote_settings).map(path, mapped=options.map, whole=True)
        self._file = file

        def read(offset: int, length: int) -> bytes:
            return file.read(offset, min(length, file.size - offset))

        self._chosen: tuple[Sequence[str], dict[str, None], tuple[int, ...]] = (), {}, ()  # what was read last
        self._layout = layout = parse_layout(read, file.size, path, layouts)

        def schema() -> Any:
            if layout.footer:
                return pa.ipc.open_file(pa.py_buffer(layout.footer)).schema
            return pa.ipc.read_schema(pa.py_buffer(layout.schema))

        counts = np.array([found.rows for found in layout.batches], np.int64)
        if len(counts) and float(counts.sum(dtype=np.float64)) >= 1 << 62:
            raise CorruptFileError("its batches claim impossible numbers of records", path=path)
        with self._errors():
            super().__init__(path, schema, np.cumsum(counts), options, cache, layout.form)
            self._plan = cache.get(("nodes", layout.form), lambda: (plan_nodes(self._schema), 1))
        nodes = None if any(each.compressed for each in self._messages()) else self._plan
        self.gatherer = None
        if nodes is not None:
            key = layout.form, *layout.batches
            found = last.recall(key) or last.keep(key, Gatherer(self._file, nodes, layout.batches))
            self.gatherer = found.of(self._file)
        self._empty = self._load_dictionaries() if self.gatherer is not None else None

    def _messages(self) -> list[Message]:
        return [*self._layout.dictionaries, *self._layout.batches]

    def shared(self) -> tuple[RecordFile | None, Any] | None:
        if self.gatherer is None:
            return super().shared()
        return None if self._numbered else (self._file, (self._kind, self.gatherer.kinds))

    def layout_ranges(self) -> Sequence[tuple[int, int]] | None:
        return None if self.gatherer is None or self._empty is not None else self._layout.ranges(self._file.size)

    def joined(self, directory: ShardDirectory) -> Self:
        joined = super().joined(directory)
        joined.gatherer = None if self.gatherer is None else self.gatherer.joined(directory)
        return joined

    def join(self, joined: Any, shard: int) -> None:
        super().join(joined, shard)
        if self.gatherer is not None:
            self.gatherer.join(joined.gatherer, shard)

    def _pick(self, indices: Int64Array, names: Sequence[str], claims: Claims) -> dict[str, Any]:
        if self.gatherer is None:
            return super()._pick(indices, names, claims)
        batch, rows = self._blocks.locate(indices)
        chosen = self._chosen
        if chosen[0] != names:
            bases = dict.fromkeys(self._bases.get(name, name) for name in names)
            columns = tuple([self._numbers[name] for name in bases if name not in self._numbered])
            self._chosen = chosen = names, bases, columns
        _, bases, columns = chosen
        numbers = self.gatherer.numbers(columns, batch, rows, claims)
        if len(numbers) == len(names) and not self._fills:
            return dict(zip(names, map(numbers.__getitem__, columns), strict=True))
        found = {name: self._gathered(name, numbers, batch, rows, indices, claims) for name in bases}
        return {name: found[self._bases.get(name, name)][name in self._bases] for name in names}

    def _gathered(
        self,
        name: str,
        numbers: Mapping[int, Array],
        batch: Int64Array,
        rows: Int64Array,
        indices: Int64Array,
        claims: Claims,
    ) -> tuple[Any, Any]:
        """Return a column, and where its nulls have been filled, (rows,) bool; None if they are not filled."""
        assert self.gatherer is not None, "callers look for one"
        number, fill = self._numbers[name], self._fills.get(name)
        column = numbers.get(number)
        if column is None and name not in self._numbered:
            column = self.gatherer.column(number, batch, rows, claims)
        if column is not None:  # it has no nulls
            return column, None if fill is None else np.zeros(len(rows), np.bool_)
        empty, nulls = None if self._empty is None else self._empty.column(number), None
        array = self.gatherer.take(number, batch, rows, claims, empty)
        if name in self._classes:
            array = numbered(array, self._classes[name])
        if fill is not None:
            array, nulls = fill_nulls(array, fill)
        return arrow.to_column(array, name, ColumnContext(self._path, indices), self._shapes.get(name)), nulls

    def _raw(self, group: int, name: str) -> Any:
        if self.gatherer is None or name in self._bases:
            return super()._raw(group, name)
        rows, number = np.arange(self._length(group)), self._numbers[name]
        empty = None if self._empty is None else self._empty.column(number)
        claims = Claims(rows, self._limit, self._path)
        return self.gatherer.take(number, np.full_like(rows, group), rows, claims, empty)

    def null_counts(self) -> Mapping[str, int]:
        nodes, batches = self._plan, self._layout.batches
        shown = [number for number, each in enumerate(self._schema) if shows_nulls(each.type)]
        if not (shown and nodes and batches) or any(len(found.nodes) != 16 * nodes.counts[0] for found in batches):
            return {}
        counts = pairs_of([found.nodes for found in batches]).reshape(len(batches), -1, 2)[:, :, 1]
        return {self._schema[each].name: int(counts[:, nodes.columns[each].number].sum()) for each in shown}

    def _load_dictionaries(self) -> Any:
        """Return a batch without records but with all dictionaries; None if there are none."""
        layout, pa = self._layout, self._pa
        if not layout.dictionaries:
            return None
        self._check_replaced(layout)
        with self._errors():
            empty = pa.RecordBatch.from_arrays([pa.nulls(0, each.type) for each in self._schema], schema=self._schema)
            return self._read_stream([*self._bytes(layout.dictionaries), empty.serialize().to_pybytes()], None)

    def _check_replaced(self, layout: Layout) -> None:
        whole = Counter(found.dictionary for found in layout.dictionaries if not found.is_delta)
        if max(whole.values(), default=1) > 1:
            message = f"{self._path} replaces its dictionaries between batches: write it as an Arrow or Parquet file"
            raise UnsupportedFormatError(message, path=self._path)

    @contextmanager
    def _opened(self, block: int, names: Sequence[str]) -> Generator[Callable[[str], Any]]:
        self._check_replaced(self._layout)
        try:
            messages = self._bytes([*self._layout.dictionaries, self._layout.batches[block]])
        finally:
            self._file.release()
        yield self._read_stream(messages, names).column

    def _bytes(self, messages: Sequence[Message]) -> list[bytes]:
        """Return messages; their decompression takes no more memory than the limit."""
        several: list[bytes] = []
        claims = 0
        for found in messages:
            data = self._file.read(found.offset, found.body + found.body_length - found.offset)
            if found.compressed:
                at = found.body - found.offset
                pairs = pairs_of([found.buffers]).tolist()
                heads = [data[at + start : at + start + 8] for start, size in pairs if size]
                # -1 stands for a buffer that is not compressed.
                claims += sum(max(0, int.from_bytes(head, "little", signed=True)) for head in heads)
                check_size(claims, self._limit, f"the batch at byte {found.offset}", path=self._path)
            several.append(data)
        return several

    def _read_stream(self, messages: Sequence[bytes], names: Sequence[str] | None) -> Any:
        """Return a batch of records that follows all dictionaries, as pyarrow reads it; of some columns, if named."""
        parts = [schema_message(self._layout), *messages, _END]
        chosen = None if names is None else [self._numbers[name] for name in names]
        options = self._pa.ipc.IpcReadOptions(included_fields=chosen, use_threads=False)
        found = self._pa.ipc.open_stream(self._pa.py_buffer(b"".join(parts)), options=options).read_next_batch()
        wanted = self._schema if chosen is None else [self._schema.field(number) for number in sorted({*chosen})]
        if [(each.name, each.type) for each in found.schema] != [(each.name, each.type) for each in wanted]:
            raise ValueError("the schemas at the start and at the end of the file differ")
        found.validate(full=True)
        return found

    def release(self) -> None:
        self._file.release()


_MOST_BYTES = 64 << 20  # parsed JSON takes up to 24 times the memory
_SPLITS_FILE = "dataset_dict.json"


class HuggingFaceSource(ArrowSource):
    """Records of a directory that ``Dataset.save_to_disk`` wrote; its files are the shards.

    Images and audio are the bytes of their files, or decoded with ``decode="auto"``. Formats that were set in the
    library (``set_format``) are ignored.

    The path is the directory, which has ``state.json``. Options: `ArrowOptions`.
    """

    format_name = "hugging_face"

    def _prepare(self) -> None:
        super()._prepare()
        self._paths = tuple(file for path in self._paths for file in _data_files(path, self._remote))


def _data_files(directory: str, remote: Remote | None) -> list[str]:
    """Return the files that ``state.json`` lists, in their order."""
    storage, path = storage_of(directory, remote), join(directory, STATE_FILE)
    splits = join(directory, _SPLITS_FILE)
    if not storage.exists(path) and storage.exists(splits):
        names = ", ".join(name for name in storage.list(directory) if storage.is_directory(join(directory, name)))
        message = f"{directory} has several splits, {names}: open one of these directories"
        raise ConfigError(message, key="paths", value=directory)
    try:
        state = json.loads(read_limited(storage, path, _MOST_BYTES, "a list of files"))
        names = [entry["filename"] for entry in cast("list[Any]", state["_data_files"])]
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise CorruptFileError("it has a list of indices: save it again with a newer library", path=path)
        if not names:
            raise ValueError("it lists no file")
    except CorruptFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"expected a list of the files of a data set of Hugging Face: {type(error).__name__}: {error}"
        raise CorruptFileError(message, path=path) from error
    return named_files(path, names)


_VALUE_BYTES, _COLUMN_BYTES = 8, 2048  # about what pyarrow takes
_FEW_COLUMNS = 256
_BLOCK_BYTES, _MOST_BLOCK_BYTES = 1 << 20, (1 << 31) - 1  # that pyarrow parses at once
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class CsvSource(TableSource):
    """Records of CSV files with a header line, plain or compressed (``.csv.gz``, ``.csv.zst``).

    A file is parsed as a whole by pyarrow, and those used last are kept (`cached_bytes`). So CSV is for small data and
    for import: convert larger files to another format.

    Options: `CsvOptions`.
    """

    format_name = "csv"
    options_type: ClassVar[Any] = CsvOptions

    @property
    def reads_in_order(self) -> bool:
        """True if there are several files, since each is parsed as a whole."""
        return len(self.paths) > 1

    def _open_shard(self, path: str) -> ShardReader[Record]:
        return self._with_classes(_CsvFile(path, self.options, self._cache))

    def _known_fields(
        self, readers: Sequence[ShardReader[Record]], fields: Sequence[Mapping[str, FieldSpec]]
    ) -> Mapping[str, FieldSpec]:
        known = super()._known_fields(readers, fields)
        shards = zip(self._paths, readers, fields, strict=False)
        if problem := differing_types(shards, known if self._selected is None else self._selected):
            warnings.warn(f"{self!r} {problem}", stacklevel=2)
        return known


class _CsvFile(TableReader):
    def __init__(self, path: str, options: CsvOptions, cache: DecodedCache) -> None:
        self._path, self._options, self._cache = path, options, cache
        self._content = TextFile(path, options.max_record_bytes, options.remote_settings)
        table = cache.get(path, self._parse)
        super().__init__(path, lambda: table.schema, np.array([len(table)], np.int64), options, cache)

    @contextmanager
    def _opened(self, block: int, names: Sequence[str]) -> Generator[Callable[[str], Any]]:  # noqa: ARG002 - all are parsed
        yield self._cache.get(self._path, self._parse).column

    def null_counts(self) -> Mapping[str, int]:
        table = self._cache.get(self._path, self._parse)
        return {each.name: table.column(each.name).null_count for each in self._schema if shows_nulls(each.type)}

    def _parse(self) -> tuple[Any, int]:
        csv = load_arrow("format 'csv'", "pyarrow.csv")
        pa, options = load_arrow("format 'csv'"), self._options
        data, _ = self._content.read()
        comma, head = options.delimiter.encode(), data.find(b"\n") + 1 or len(data)
        cells = data.count(comma, head) + data.count(b"\n", head)
        size = _VALUE_BYTES * cells + _COLUMN_BYTES * max(0, data.count(comma, 0, head) - _FEW_COLUMNS)
        check_size(size, options.max_record_bytes, "the table", path=self._path)
        types = {name: _type_of(name, dtype) for name, dtype in (options.dtypes or {}).items()}

        def parse(block: int) -> Any:
            return csv.read_csv(
                pa.BufferReader(data),
                csv.ReadOptions(use_threads=False, block_size=block),
                csv.ParseOptions(delimiter=options.delimiter, newlines_in_values=True),
                csv.ConvertOptions(column_types=types),
            )

        with self._errors():
            with decoding():
                try:
                    table = parse(_BLOCK_BYTES)
                except pa.ArrowInvalid:  # perhaps a row is longer than a block
                    if len(data) <= _BLOCK_BYTES:
                        raise
                    table = parse(min(len(data) + 1, _MOST_BLOCK_BYTES))
            self._check(table, types)
            return table, table.nbytes

    def _check(self, table: Any, types: Mapping[str, Any]) -> None:
        known: list[str] = table.column_names
        for name in types:
            if name not in known:
                message = f"dtypes names {name!r}, which {self._path} does not have: {closest(name, known)}"
                raise ConfigError(message, key=f"dtypes.{name}")
        first, *others = known
        if not others and (found := next((each for each in ";\t|" if each in first), "")):
            message = f"{self._path} has one column, {first!r}: pass delimiter={found!r} if this separates columns"
            warnings.warn(message, stacklevel=2)
        # 0, 1, 2, ... are names: pandas gives them to columns that have none.
        names = [str(number) for number in range(len(others) + 1)]
        if all(map(_NUMBER.fullmatch, known)) and known != names:
            line = self._options.delimiter.join(known)
            message = f"{self._path} has numbers as column names: write names above {line!r:.80} if this is a record"
            warnings.warn(message, stacklevel=2)
        for each in table.schema:
            if load_arrow("format 'csv'").types.is_binary(each.type):
                raise CorruptFileError(f"the column {each.name!r} is not UTF-8", path=self._path)
            if each.type == "double" and each.name not in types and _are_large_integers(table.column(each.name)):
                message = f"{self._path}: column {each.name!r} has integers beyond int64, which are rounded to floats"
                warnings.warn(f"{message}: pass dtypes={{{each.name!r}: 'uint64'}}, or 'str'", stacklevel=2)
        check_size(table.nbytes, self._options.max_record_bytes, "the table", path=self._path)


def _are_large_integers(column: Any) -> bool:
    """Return whether all numbers of a column of floats are integers, and some too large for int64."""
    values = column.drop_null().to_numpy()
    values = values[np.isfinite(values)]
    return bool(np.abs(values).max(initial=0) >= 1 << 63 and (values == np.trunc(values)).all())


def _type_of(name: str, dtype: str) -> Any:
    pa = load_arrow("format 'csv'")
    try:
        return pa.string() if dtype == "str" else pa.from_numpy_dtype(np.dtype(dtype))
    except (TypeError, pa.ArrowException) as error:
        message = f"dtypes: {dtype!r} is not the dtype of a column; expected one such as 'int64', 'float32' or 'str'"
        raise ConfigError(message, key=f"dtypes.{name}", value=dtype) from error
