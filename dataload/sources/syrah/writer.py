"""Writer of Syrah files (.syr) that the original tool can read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from dataload._util.arrays import to_array
from dataload.errors import ConfigError
from dataload.sources.options import FileOptions
from dataload.sources.syrah.layout import (
    BSON_LIMIT,
    DTYPES,
    HEADER_SIZE,
    Column,
    Shapes,
    build_header,
    build_metadata,
    load_bson,
)
from dataload.sources.writer import Writer, require_fields
from dataload.types import Array

_BYTES_PER_ENTRY = 16  # offset and size
_AT_ONCE = 1024  # records checked together
_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # `dtype.name` is slow enough to notice


@dataclass(slots=True)
class _Tables:
    """The growing tables of one key."""

    dtype: str
    is_bytes: bool
    offsets: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    ndims: array[int] = field(default_factory=lambda: array("q"))
    dims: array[int] = field(default_factory=lambda: array("q"))


class SyrahWriter(Writer):
    """Writes one Syrah file.

    All records have the fields and dtypes of the first; lengths and shapes may differ. Values are arrays with dtypes of
    the format, numbers, text or bytes. The metadata are one BSON document of at most 2 GiB, which is enough for about
    134 million records with one field; write several shards for more.

    Options: `FileOptions`.
    """

    options_type: ClassVar[Any] = FileOptions

    def _begin(self, options: Any) -> None:  # noqa: ARG002 - none is for the records
        load_bson()  # which the end of the file needs
        self._tables: dict[str, _Tables] = {}
        self._position = HEADER_SIZE
        self._stream = self._part.create()
        self._stream.write(bytes(HEADER_SIZE))

    def _write(self, record: Any) -> None:
        values = {name: _encode(name, value) for name, value in require_fields(record, "syrah").items()}
        if not self._tables:
            if not values:
                raise ConfigError("format 'syrah' does not store records without fields")
            for name in values:
                if "\0" in name:
                    raise ConfigError(f"format 'syrah' does not allow zero bytes in field names: {name!r}", key=name)
                _utf8(name, name)
            self._tables = {name: _Tables(dtype, is_bytes) for name, (_, dtype, is_bytes) in values.items()}
        self._check(values)
        for name in self._tables:  # in the file's order of keys
            data, table = values[name][0], self._tables[name]
            table.offsets.append(self._position)
            table.sizes.append(data.nbytes)
            table.ndims.append(data.ndim)
            table.dims.extend(data.shape)
            self._stream.write(data.tobytes())
            self._position += data.nbytes
        self.stored_bytes = self._position

    def _write_all(self, records: Sequence[Any]) -> None:
        for start in range(0, len(records), _AT_ONCE):
            some = records[start : start + _AT_ONCE]
            if not self._write_alike(some):
                super()._write_all(some)

    def _write_alike(self, records: Sequence[Any]) -> bool:
        """Write arrays that need no conversion, or return False; what the records have in common is checked once."""
        tables = self._tables
        if not tables or any(type(record) is not dict or record.keys() != tables.keys() for record in records):
            return False
        columns: dict[str, list[Array]] = {}
        for name, table in tables.items():
            values = columns[name] = [record[name] for record in records]
            if table.dtype == "str" or table.is_bytes or set(map(type, values)) != {np.ndarray}:
                return False
            alike = {(value.dtype, value.shape, value.flags.c_contiguous) for value in values}
            if len(alike) != 1 or alike != {(DTYPES[table.dtype], values[0].shape, True)}:
                return False
        if not self._fit(len(records)):
            return False
        stride = sum(values[0].nbytes for values in columns.values())
        start = self._position
        for name, values in columns.items():
            table, first = tables[name], values[0]
            table.offsets.extend(
                range(start, start + stride * len(values), stride) if stride else [start] * len(values)
            )
            table.sizes.extend([first.nbytes] * len(values))
            table.ndims.extend([first.ndim] * len(values))
            table.dims.extend(first.shape * len(values))
            start += first.nbytes
        self._stream.writelines(chain.from_iterable(zip(*columns.values(), strict=True)))
        self._position += stride * len(records)
        self.stored_bytes: int = self._position
        self._count += len(records)
        return True

    def _fit(self, records: int) -> bool:
        """Return whether the metadata has room for `count` more records."""
        return (len(self) + records) * len(self._tables) * _BYTES_PER_ENTRY <= BSON_LIMIT - 4096

    def _recover(self) -> bool:
        for table in self._tables.values():
            del table.dims[sum(table.ndims[: len(self)]) :]
            for column in (table.offsets, table.sizes, table.ndims):
                del column[len(self) :]
        self._position = self._stream.tell()  # bytes that belong to no record do no harm
        return True

    def _check(self, values: dict[str, tuple[Array, str, bool]]) -> None:
        if values.keys() != self._tables.keys():
            one, other = (", ".join(map(repr, names)) for names in (self._tables, values))
            raise ConfigError(f"record {len(self)} has the fields {other}; the first one has {one}")
        for name, (_, dtype, is_bytes) in values.items():
            table = self._tables[name]
            if (dtype, is_bytes) != (table.dtype, table.is_bytes):
                found, first = _describe(dtype, is_bytes), _describe(table.dtype, table.is_bytes)
                message = f"field {name!r} of record {len(self)} is {found}; in the first record it was {first}"
                raise ConfigError(message, key=name)
        if not self._fit(1):
            raise ConfigError(
                f"a Syrah file can have {len(self)} records of {len(values)} fields (its metadata are one BSON "
                "document of at most 2 GiB): write several shards"
            )

    def _finish(self) -> None:
        columns = [_column(name, table) for name, table in self._tables.items()]
        # A file without records needs a key too; any will do.
        empty = Column("data", "uint8", np.empty(0, np.int64), np.empty(0, np.int64))
        metadata = build_metadata(columns or [empty])
        with self._stream as stream:
            stream.write(metadata)
            stream.seek(0)
            stream.write(build_header(self._position, len(metadata)))

    def _discard(self) -> None:
        self._stream.close()


def _describe(dtype: str, is_bytes: bool) -> str:
    return f"bytes ({dtype})" if is_bytes else dtype


def _encode(name: str, value: Any) -> tuple[Array, str, bool]:
    """Return the bytes of a value as an array, the name of the dtype, and whether the value was bytes."""
    if isinstance(value, str):
        # One-dimensional, because text has no shape.
        return np.frombuffer(_utf8(value, name), np.uint8), "str", False
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8), "uint8", True
    data = to_array(name, value)
    if data.dtype.kind in "UT":
        message = f"field {name!r}: an array of text, whose elements the format would join: pass one str"
        raise ConfigError(message, key=name)
    little = data.dtype if data.dtype in _NAMES else data.dtype.newbyteorder("<")
    dtype = _NAMES.get(little)
    if dtype is None:
        known = ", ".join(DTYPES)
        raise ConfigError(f"field {name!r} has dtype {data.dtype}; supported are {known}, text and bytes", key=name)
    return np.asarray(data, little, order="C"), dtype, False


def _utf8(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"field {name!r}: text cannot be encoded as UTF-8: {error.reason}", key=name) from error


def _column(name: str, table: _Tables) -> Column:
    ndims, dims = np.array(table.ndims, np.int64), np.array(table.dims, np.int64)
    shapes = None
    if (ndims != 1).any():
        width = int(ndims[0])
        same = (ndims == width).all() and (dims.reshape(len(ndims), width) == dims[:width]).all()
        shapes = Shapes(ndims[:1], dims[:width]) if same else Shapes(ndims, dims)
    offsets, sizes = np.array(table.offsets, np.int64), np.array(table.sizes, np.int64)
    return Column(name, table.dtype, offsets, sizes, shapes, table.is_bytes)
