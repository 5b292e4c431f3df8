"""Writers of Parquet and Arrow files, which any reader of Arrow understands."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from dataload._util.arrays import IMMUTABLE
from dataload.codecs.arrow import load_arrow
from dataload.errors import ConfigError, closest
from dataload.sources.arrow import ParquetWriterOptions, TableWriterOptions
from dataload.sources.writer import Writer, require_fields
from dataload.types import Array

_MOST_RECORDS = 1 << 16  # in a row group or batch
_NUMBERS = frozenset((bool, int, float))


class TableWriter(Writer):
    """The base class of writers of tables.

    All records have the fields, dtypes and shapes of the first. Arrays are stored as tensors of one shape, or as lists
    if they have one axis and differ in length. Numbers, text, bytes, lists and dicts are stored unchanged.

    Options: see `options_type`.
    """

    def _begin(self, options: TableWriterOptions) -> None:
        self._pa = load_arrow("writing tables")
        self._options = options
        self._records: list[dict[str, Any]] = []
        self._bytes = 0
        self._kinds: dict[str, Any] = {}
        self._schema: Any = None
        self._file: Any = None
        if options.compression is not None and not self._knows(options.compression):
            message = f"compression is {options.compression!r}, which this pyarrow does not offer here"
            raise ConfigError(message, key="compression", value=options.compression)
        self._stream = self._part.create()

    @abstractmethod
    def _knows(self, compression: str) -> bool:
        """Return whether files can be compressed so."""

    @abstractmethod
    def _open(self, schema: Any) -> Any:
        """Return a writer of pyarrow, with ``write_table`` and ``close``."""

    def _write(self, record: Any) -> None:
        values = dict(require_fields(record, "tables"))
        if not values:
            raise ConfigError("a table does not store records without fields")
        kinds = {name: _kind(value, name) for name, value in values.items()}
        if not self._kinds:
            for name in self._options.ragged:
                if name not in values:
                    message = f"ragged names the field {name!r}: {closest(name, values)}"
                    raise ConfigError(message, key="ragged", value=name)
            self._kinds = kinds
        if kinds != self._kinds:
            name = next(name for name in [*kinds, *self._kinds] if kinds.get(name) != self._kinds.get(name))
            found, first = kinds.get(name, "missing"), self._kinds.get(name, "missing")
            message = f"field {name!r} of record {len(self)} is {found}, and {first} in the first record"
            raise ConfigError(f"{message}: a table has columns of one type", key=name)
        if self._schema is not None:
            self._check_shapes(values)
        # The caller may reuse its arrays and lists.
        self._records.append({name: v.copy() if isinstance(v, np.ndarray) else _plain(v) for name, v in values.items()})
        size = sum(_size(value) for value in values.values())
        self._bytes += size
        self.stored_bytes += size
        if self._bytes >= self._options.group_bytes or len(self._records) >= _MOST_RECORDS:
            self._flush()

    def _check_shapes(self, values: dict[str, Any]) -> None:
        for each in self._schema:
            value = values[each.name]
            if isinstance(value, np.ndarray) and isinstance(each.type, self._pa.FixedShapeTensorType):
                self._refuse_shape(each.name, value, tuple(each.type.shape), len(self))

    def _refuse_shape(self, name: str, value: Array, shape: tuple[int, ...], index: int) -> None:
        if value.shape != shape:
            message = f"field {name!r} of record {index} has the shape {value.shape}, and {shape} in the first record"
            hint = f": pass ragged=[{name!r}]" if value.ndim == 1 else ": a table stores arrays of one shape"
            raise ConfigError(message + hint, key="ragged" if value.ndim == 1 else name)

    def _flush(self) -> None:
        """Write the records so far as a row group or batch."""
        pa = self._pa
        columns: dict[str, Any] = {}
        for name in self._kinds:
            values = [record[name] for record in self._records]
            try:
                columns[name] = self._column(name, values)
                name.encode()
            except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError) as error:
                raise ConfigError(f"field {name!r} cannot be stored in a table: {error}", key=name) from error
        table = pa.table(columns)
        try:
            if self._file is None:
                self._schema = table.schema
                self._file = self._open(table.schema)
            self._file.write_table(table)
        except pa.ArrowNotImplementedError as error:  # such as a struct without fields in Parquet
            raise ConfigError(f"{self.path} cannot store this table: {error}") from error
        self._records, self._bytes = [], 0

    def _column(self, name: str, values: list[Any]) -> Any:
        pa, first = self._pa, values[0] if values else None
        known = None if self._schema is None else self._schema.field(name).type
        if not isinstance(first, (np.ndarray, np.generic)):
            found = pa.array(values)
            if known is None or found.type == known:
                return found
            if _loses(pa.types, found.type, known):
                raise TypeError(f"it is {found.type} here, and {known} in the first row group: give records one type")
            return pa.array(values, known)
        if not first.ndim:
            return pa.array(np.array(values), known)
        shapes = {value.shape for value in values}
        is_list = first.ndim == 1 and (len(shapes) > 1 or not first.size or name in self._options.ragged)
        if known is not None:
            is_list = not isinstance(known, pa.FixedShapeTensorType)
        if is_list:
            ends = np.cumsum([0, *map(len, values)])
            return pa.LargeListArray.from_arrays(ends, pa.array(np.concatenate(values)))
        start = len(self) - len(values)
        for row, value in enumerate(values):
            self._refuse_shape(name, value, first.shape, start + row)
        if not first.size:
            raise TypeError(f"an array of shape {first.shape} has no items")
        items = pa.array(np.stack(values).reshape(-1))
        storage = pa.FixedSizeListArray.from_arrays(items, first.size)
        return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(items.type, first.shape), storage)

    def _finish(self) -> None:
        if self._records or self._file is None:
            self._flush()
        writer: Any = self._file
        writer.close()
        self._stream.close()

    def _discard(self) -> None:
        if self._file is not None:
            with contextlib.suppress(Exception):  # its file is deleted
                self._file.close()
        self._stream.close()


class ParquetWriter(TableWriter):
    """Writes a Parquet file, with checksums of its pages; see `TableWriter`."""

    options_type: ClassVar[Any] = ParquetWriterOptions

    def _knows(self, compression: str) -> bool:
        return compression in ("snappy", "gzip", "brotli", "lz4", "zstd") and self._pa.Codec.is_available(compression)

    def _open(self, schema: Any) -> Any:
        parquet = load_arrow("format 'parquet'", "pyarrow.parquet")
        compression = self._options.compression or "none"
        return parquet.ParquetWriter(self._stream, schema, compression=compression, write_page_checksum=True)


class ArrowWriter(TableWriter):
    """Writes an Arrow IPC file; see `TableWriter`."""

    options_type: ClassVar[Any] = TableWriterOptions

    def _knows(self, compression: str) -> bool:
        return compression in ("lz4", "zstd") and self._pa.Codec.is_available(compression)

    def _open(self, schema: Any) -> Any:
        options = self._pa.ipc.IpcWriteOptions(compression=self._options.compression, use_threads=False)
        return self._pa.ipc.new_file(self._stream, schema, options=options)


def _kind(value: Any, name: str) -> str:
    """Return the type of a value, which all of a column have."""
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in "biufmM":
            message = f"field {name!r} is an array of {value.dtype}, which a table cannot store: convert it to numbers"
            raise ConfigError(message, key=name)
        return f"{value.dtype} of {value.ndim} axes"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "bytes"
    return "list" if isinstance(value, Sequence) and not isinstance(value, str) else type(value).__name__


def _loses(types: Any, given: Any, kind: Any) -> bool:
    """Return whether pyarrow would cut values of a `given` type to another one in silence: fractions, fields, times."""
    if types.is_list(given) and types.is_list(kind):
        return _loses(types, given.value_type, kind.value_type)
    if types.is_struct(given) and types.is_struct(kind):
        inner = [(each.type, kind.get_field_index(each.name)) for each in given]
        return any(number < 0 or _loses(types, own, kind.field(number).type) for own, number in inner)
    if types.is_floating(given):
        return not types.is_floating(kind) or kind.bit_width < given.bit_width
    return types.is_timestamp(given) and types.is_date(kind)


def _plain(value: Any) -> Any:
    """Return a copy whose structs hold numbers and dates: pyarrow refuses arrays without axes, and days of numpy."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return items.copy() if IMMUTABLE.issuperset(map(type, items)) else [*map(_plain, items)]
    if isinstance(value, np.ndarray):
        return value.copy() if value.ndim else value.item() if value.dtype == "datetime64[D]" else value[()]
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else value


def _size(value: Any) -> int:
    """Return about how many bytes Arrow stores for a value."""
    if isinstance(value, str) and not value.isascii():
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return 8 * len(items) if _NUMBERS.issuperset(map(type, items)) else sum(map(_size, items))
    return int(getattr(value, "nbytes", 8))
