"""The base of all sources of tables, which keeps decoded groups of records; and CSV files."""

from __future__ import annotations

import json
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar, Self, cast

import numpy as np

from dataload._util.caches import DecodedCache
from dataload._util.clock import decoding
from dataload._util.limits import Claims, check_size
from dataload.catalog.fields import require_known
from dataload.codecs import arrow
from dataload.codecs.arrow import REMEDIES, check_field, load_arrow, numbers_of, spec_of_type
from dataload.codecs.decoders import DECODERS, Decoder, find_decoder, for_extension
from dataload.codecs.nulls import Fill, check_names, fill_of, mask_name, shows_nulls, with_masks
from dataload.errors import ConfigError, CorruptFileError, DataloadError, UnsupportedFormatError, closest
from dataload.sources.arrow.blocks import Blocks, Column, Form
from dataload.sources.arrow.format import CsvOptions, TableOptions
from dataload.sources.directory import ShardDirectory
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ShardReader
from dataload.storage import RecordFile, is_url, storage_of, unchanged
from dataload.storage.compressed import read_text
from dataload.storage.errors import system_error
from dataload.storage.row_layout import RowLayout, cut_loaded
from dataload.types import Batch, FieldSpec, Int64Array, Record

_MANY_COLUMNS = 32
"""Columns that are handled together, because each by itself costs more than its values."""

_SHARE = 4  # of the cache, at least, for groups that are kept row by row


class TableSource(FileSource[Record]):
    """The base class of sources of tables; see `dataload.codecs.arrow` for the values."""

    def _prepare(self) -> None:
        self._cache = DecodedCache(min(self.options.cached_bytes, self.options.max_record_bytes))

    def _wanted(self, known: Mapping[str, FieldSpec]) -> tuple[str, ...] | None:
        return with_masks(self._selected, known, self.options.nulls)

    def _known_fields(
        self, readers: Sequence[ShardReader[Record]], fields: Sequence[Mapping[str, FieldSpec]]
    ) -> Mapping[str, FieldSpec]:
        known = super()._known_fields(readers, fields)
        counts = Counter[str]()
        for reader in readers if self.options.nulls is None else ():
            counts.update(cast("TableReader", reader).null_counts())
        names = known if self._selected is None else self._selected
        if found := ", ".join(f"{counts[name]:,} of {name!r}" for name in names if counts[name]):
            message = f"{self!r} has nulls ({found}) in {sum(map(len, readers)):,} records, and reading one is an error"
            warnings.warn(f"{message}: {REMEDIES}", stacklevel=2)
        return known

    def close(self) -> None:
        super().close()
        self._cache.clear()


class _ApartError(Exception):
    """Columns of a block cannot be kept row by row: they take too much, or one has nulls."""


class TableReader(ShardReader[Record]):
    """A table in a file; `ends` is (groups,) int64, the cumulative number of records of its row groups or batches."""

    whole = True

    _schema: Any  # these are equal for all files of one schema: see `_facts_of`
    _numbers: dict[str, int]
    _scalars: dict[str, np.dtype[Any]]  # columns of single numbers
    _shapes: dict[str, tuple[int, ...]]
    _decoders: dict[str, Decoder]
    _fills: dict[str, Fill]
    _bases: dict[str, str]  # the columns whose nulls a field of masks shows
    _fields: dict[str, FieldSpec]
    _kind: Any

    def __init__(
        self,
        path: str,
        schema: Callable[[], Any],
        ends: Int64Array,
        options: TableOptions,
        cache: DecodedCache,
        form: bytes | None = None,
    ) -> None:
        """Open a file; others whose `form` is equal have the same schema."""
        self._path, self._ends, self._cache = path, ends, cache
        self._limit: int = options.max_record_bytes
        self._most_bytes = options.cached_bytes // _SHARE
        self._planned: tuple[Sequence[str], Sequence[Any], RowLayout | None] = (), (), None  # what was read last
        self._kept_apart = False  # whether columns of single numbers are kept one by one, even if they are many
        find = lambda: (_facts_of(schema(), options, path), 1)  # noqa: E731
        vars(self).update(find()[0] if form is None else cache.get(("schema", form), find))

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self._ends)

    def null_counts(self) -> Mapping[str, int]:
        """Return how many nulls columns of numbers and text have, as far as that is known without reading them."""
        return {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return self._fields

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        return arrow.split(self._columns(indices, fields), len(indices))

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        return arrow.stacked(self._columns(indices, fields))

    def _columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> dict[str, Any]:
        names = tuple(self.fields if self._bases else self._numbers) if fields is None else fields
        require_known(names, self._numbers | self._bases, self._path)
        with self._errors():
            columns = self._pick(indices, names, Claims(indices, self._limit, self._path))
        for name in self._decoders:
            if name in columns:
                columns[name] = self._decode_values(columns[name], self._decoders[name], name, indices)
        return columns

    def shared(self) -> tuple[RecordFile | None, Any] | None:
        return None if is_url(self._path) else (None, self._kind)

    def joined(self, directory: ShardDirectory) -> Self:
        joined = directory.copy_of(self)
        joined._blocks = Blocks(directory=directory)
        return joined

    def join(self, joined: Any, shard: int) -> None:
        joined._blocks.join(shard, self, self._ends)

    def _pick(self, indices: Int64Array, names: Sequence[str], claims: Claims) -> dict[str, Any]:
        """Return columns of records, by decoding the blocks that they are in."""
        layout = self._row_layout(names)
        if layout is None:
            return self._read_blocks(names, indices, claims)
        try:
            found = self._read_blocks(self._planned[1], indices, claims)
        except _ApartError:
            self._kept_apart = True
            return self._read_blocks(names, indices, claims)
        rows = found.pop(self._planned[1][0])
        cut = partial(cut_loaded, rows, np.arange(len(rows)) * layout.length, layout.length)
        found.update(layout.columns(len(rows), cut) or {})
        return {name: found[name] for name in names}

    def _row_layout(self, names: Sequence[str]) -> RowLayout | None:
        """Return the layout of rows of the columns of single numbers, if there are many and blocks are kept so."""
        if self._planned[0] != names:
            chosen = tuple(name for name in names if name in self._scalars)
            starts = accumulate((self._scalars[name].itemsize for name in chosen), initial=0)
            fields = {name: (start, self._scalars[name], ()) for name, start in zip(chosen, starts, strict=False)}
            length = sum(self._scalars[name].itemsize for name in chosen)
            layout = RowLayout(length, fields) if len(chosen) >= _MANY_COLUMNS else None
            self._planned = names, (chosen, *(name for name in names if name not in fields)), layout
        return None if self._kept_apart else self._planned[2]

    def _read_blocks(self, names: Sequence[Any], indices: Int64Array, claims: Claims) -> dict[Any, Any]:
        return self._blocks.read(self, self._cache, names, indices, claims, self._shapes)

    def load(
        self, block: int, names: Sequence[Any], index: int, cache: DecodedCache, use: Callable[[Any, Column], None]
    ) -> None:
        """Give `use` columns of a block one by one; `index` is one of its records, for messages."""
        columns = dict.fromkeys(
            self._bases.get(n, n) for each in names for n in ([each] if isinstance(each, str) else each)
        )
        with self._errors(block, index), self._opened(block, [*columns]) as decode:
            for name in names:
                use(name, self._get(decode, block, name, cache))

    def _get(self, decode: Callable[[str], Any], block: int, name: Any, cache: DecodedCache) -> Column:
        return cache.get((self._path, block, name), partial(self._load, decode, block, name, cache))

    def _load(self, decode: Callable[[str], Any], block: int, name: Any, cache: DecodedCache) -> tuple[Column, int]:
        """Return a column of a block, or rows of several columns, and its bytes."""
        count = int(self._ends[block] - (self._ends[block - 1] if block else 0))
        if name in self._bases:
            column = Column.of_numbers(self._get(decode, block, self._bases[name], cache).nulls, 1)
            return column, column.nbytes
        if isinstance(name, str):
            what = f"field {name!r} of row group {block}"
            with decoding():
                column = Column.of(decode(name), self._fills.get(name), self._limit, what, self._path)
            if len(column) != count:
                raise ValueError(f"{len(column)} values of {name!r} for {count} records")
            return column, column.nbytes
        length, start, claimed = sum(self._scalars[each].itemsize for each in name), 0, 0
        if count * length > self._most_bytes:
            raise _ApartError
        rows = np.empty((count, length), np.uint8)
        for each in name:
            dtype, (column, _) = self._scalars[each], self._load(decode, block, each, cache)
            if column.form != Form("numbers", dtype):
                raise _ApartError
            rows[:, start : start + dtype.itemsize].view(dtype)[:, 0] = column.array
            start, claimed = start + dtype.itemsize, claimed + int(column.sizes)
        return Column.of_numbers(rows, claimed), max(1, rows.nbytes)

    def _decode(self, block: int, name: str) -> Any:
        """Return a column of a block as an array of pyarrow."""
        with self._opened(block, [name]) as decode:
            return decode(name)

    @abstractmethod
    def _opened(self, block: int, names: Sequence[str]) -> AbstractContextManager[Callable[[str], Any]]:
        """Return a function that decodes a column of a block, by its name, into an array of pyarrow."""

    @contextmanager
    def _errors(self, group: int | None = None, index: int | None = None) -> Generator[None]:
        """Translate errors about the file's content, but not errors of storage."""
        try:
            yield
        except (DataloadError, MemoryError):
            raise
        except (load_arrow("tables").ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # Arrow's own errors about content have none
                raise system_error("read", self._path, error) from error
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


def _facts_of(schema: Any, options: TableOptions, path: str) -> dict[str, Any]:
    """Return what a `TableReader` knows of a schema, by its attributes."""
    for number, each in enumerate(schema):
        try:
            check_field(each)
        except UnicodeDecodeError as error:
            message = f"a name in column {number} is not UTF-8: {error.object[:80]!r}"
            raise CorruptFileError(message, path=path) from error
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        message = f"{path} has several columns called {twice[0]!r}: rename them where the table is made"
        raise UnsupportedFormatError(message, path=path)
    features, fields, scalars = _features(schema), dict[str, FieldSpec](), dict[str, np.dtype[Any]]()
    fills = ((each.name, fill_of(options.nulls, each.name, each.type)) for each in schema)
    filled = {name: fill for name, fill in fills if fill is not None}
    bases = {mask_name(name): name for name, fill in filled.items() if fill.masked}
    check_names(options.nulls, bases.values(), schema.names, path)
    shapes = {name: shape for name in schema.names if (shape := _shape(features.get(name)))}
    decoders = _plan_decoders(schema, features, options, path)
    for each in schema:
        numbers = numbers_of(each.type)
        if numbers is not None and not numbers.shape:
            scalars[each.name] = numbers.dtype
        spec = spec_of_type(each.type, shapes.get(each.name))
        fields[each.name] = FieldSpec("unknown", None) if each.name in decoders else spec
        if mask_name(each.name) in bases:
            fields[mask_name(each.name)] = FieldSpec("bool", ())
    return {
        "_schema": schema,
        "_numbers": {name: number for number, name in enumerate(schema.names)},
        "_scalars": scalars | dict.fromkeys(bases, np.dtype(np.bool_)),
        "_shapes": shapes,
        "_decoders": decoders,
        "_fills": filled,
        "_bases": bases,
        "_fields": fields,
        "_kind": ([(each.name, str(each.type)) for each in schema], shapes, [*decoders]),
    }


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
        spec = spec_of_type(schema.field(name).type) if name in schema.names else None
        if spec is None or spec.dtype != "bytes":
            known = closest(name, schema.names) if spec is None else f"it is {spec}, and decoders take bytes"
            raise ConfigError(f"decode names the field {name!r} of {path}: {known}", key="decode", value=name)
    return {
        name: for_extension(find_decoder(what, name), "", options.max_record_bytes) for name, what in chosen.items()
    }


_VALUE_BYTES, _COLUMN_BYTES = 8, 2048  # about what pyarrow takes
_FEW_COLUMNS = 256


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
        return _CsvFile(path, self.options, self._cache)


class _CsvFile(TableReader):
    def __init__(self, path: str, options: CsvOptions, cache: DecodedCache) -> None:
        self._path, self._options, self._cache = path, options, cache
        self._storage = storage_of(path, options.remote_settings)
        self._identity = self._storage.identity(path)
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
        with unchanged(self._storage, self._path, self._identity):
            data = read_text(self._path, options.max_record_bytes, options.remote_settings)
        comma, head = options.delimiter.encode(), data.find(b"\n")
        head = len(data) if head < 0 else head + 1
        cells = data.count(comma, head) + data.count(b"\n", head)
        size = _VALUE_BYTES * cells + _COLUMN_BYTES * max(0, data.count(comma, 0, head) - _FEW_COLUMNS)
        check_size(size, options.max_record_bytes, "the table", path=self._path)
        types = {name: _type_of(name, dtype) for name, dtype in (options.dtypes or {}).items()}
        with self._errors():
            with decoding():
                table = csv.read_csv(
                    pa.BufferReader(data),
                    csv.ReadOptions(use_threads=False),
                    csv.ParseOptions(delimiter=options.delimiter, newlines_in_values=True),
                    csv.ConvertOptions(column_types=types),
                )
            self._check(table, types)
            return table, table.nbytes

    def _check(self, table: Any, types: Mapping[str, Any]) -> None:
        for name in types:
            if name not in table.column_names:
                message = f"dtypes names {name!r}, which {self._path} has not: {closest(name, table.column_names)}"
                raise ConfigError(message, key=f"dtypes.{name}")
        for each in table.schema:
            if load_arrow("format 'csv'").types.is_binary(each.type):
                raise CorruptFileError(f"the column {each.name!r} is not UTF-8", path=self._path)
        check_size(table.nbytes, self._options.max_record_bytes, "the table", path=self._path)


def _type_of(name: str, dtype: str) -> Any:
    pa = load_arrow("format 'csv'")
    try:
        return pa.string() if dtype == "str" else pa.from_numpy_dtype(np.dtype(dtype))
    except (TypeError, pa.ArrowException) as error:
        message = f"dtypes: {dtype!r} is not the dtype of a column; expected one such as 'int64', 'float32' or 'str'"
        raise ConfigError(message, key=f"dtypes.{name}", value=dtype) from error
