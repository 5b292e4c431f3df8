"""Source of Syrah files (.syr), read through a memory map."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np

from dataload._util.arrays import check_lengths, fits, split_records, split_rows
from dataload._util.caches import Memo
from dataload.collate import default_collate
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.directory import ShardDirectory, ShardNumbers
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ShardReader
from dataload.sources.syrah import SyrahOptions
from dataload.sources.syrah.layout import DTYPES, HEADER_SIZE, Column, load_columns, parse_header
from dataload.storage import RecordFile, storage_of
from dataload.storage.record_file import RowLayout
from dataload.types import Array, Batch, BytesColumn, FieldSpec, Int64Array, Record


class SyrahSource(FileSource[Record]):
    """Records of Syrah files.

    Every field is an array, or text if its dtype is ``str``. Files of the original tool have no shapes, so
    their arrays are one-dimensional unless the option `shapes` is given. Files written by dataload keep shapes.

    Options: `SyrahOptions`.
    """

    format_name = "syrah"
    options_type: ClassVar[Any] = SyrahOptions

    def _prepare(self) -> None:
        self._last: Memo[_Tables] = Memo(1)

    def _open_shard(self, path: str) -> ShardReader[Record]:
        file = storage_of(path, self._remote).map(path, mapped=self.options.map)
        make = partial(_Tables.of, self.options, path)
        return _SyrahFile(file, load_columns(file, make, self._last, cache=self.options.cache, remote=self._remote))


class _Tables(NamedTuple):
    """Tables that readers of files with equal metadata share."""

    readers: Mapping[str, "_Reader"]
    length: int
    row: Any
    starts: Mapping[str, int]

    @classmethod
    def of(cls, options: SyrahOptions, path: str, columns: list[Column]) -> Self:
        shapes: Mapping[str, Any] = options.shapes or {}
        length, limit = len(columns[0].offsets), options.max_record_bytes
        readers = {column.name: _Reader(column, path, shapes.get(column.name), limit) for column in columns}
        for name in shapes:
            if name not in readers:
                known = ", ".join(readers)
                raise ConfigError(f"shapes names {name!r}; {path} has {known}", key="shapes", value=name)
        return cls(readers, length, *_row_of(readers, length))


class _SyrahFile(ShardReader[Record]):
    def __init__(self, file: RecordFile, tables: _Tables) -> None:
        self._file = file
        readers, self._length, self._row, self._starts = tables
        self._columns = {name: reader.of(file) for name, reader in readers.items()}
        self._planned: tuple[tuple[str, ...], RowLayout | None] = (), None  # what was read last

    def __len__(self) -> int:
        return self._length

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return {name: reader.spec for name, reader in self._columns.items()}

    def release(self) -> None:
        self._file.release()

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        names = tuple(self._columns) if fields is None else fields
        together = self._together(indices, names)
        columns = {name: together.get(name) for name in names}
        for name in columns.keys() - together.keys():
            columns[name] = self._columns[name].values(indices)
        return split_records(columns, len(indices))

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        names = tuple(self._columns) if fields is None else fields
        together = self._together(indices, names)
        if len(together) == len(names):
            return together
        return {n: together[n] if n in together else self._columns[n].column(indices, n) for n in names}

    def _together(self, indices: Int64Array, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the fields that lie at the same places in all rows, if they are several, copied in one pass."""
        known, layout = self._planned
        if known != names:
            fields = {name: (self._starts[name], *self._columns[name].array) for name in names if name in self._starts}
            length = max(
                (start + dtype.itemsize * math.prod(shape) for start, dtype, shape in fields.values()), default=0
            )
            layout = RowLayout(length, fields) if len(fields) > 1 else None
            self._planned = names, layout
        if layout is None:
            return {}
        row = self._row
        return self._file.cut(row[0] + indices * row[1] if isinstance(row, tuple) else row[indices], layout) or {}

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array]:
        names = tuple(self._columns) if fields is None else fields
        offsets, lengths = zip(*(self._columns[name].locations(indices) for name in names), strict=True)
        return np.concatenate(offsets), np.concatenate(lengths)

    def shared(self) -> tuple[RecordFile, Any] | None:
        kinds = [(name, reader.kind()) for name, reader in self._columns.items()]
        return None if any(kind is None for _, kind in kinds) else (self._file, (kinds, self._starts))

    def layout_ranges(self) -> Sequence[tuple[int, int]]:
        return (0, HEADER_SIZE), parse_header(self._file.read(0, HEADER_SIZE), self._file.size, self._file.path)

    def joined(self, directory: ShardDirectory) -> Self:
        joined = directory.copy_of(self)
        joined._columns = {name: reader.joined(directory) for name, reader in self._columns.items()}
        joined._row = directory.numbers(is_place=True)
        return joined

    def join(self, joined: Any, shard: int) -> None:
        for name, reader in self._columns.items():
            reader.join(joined._columns[name], shard, self._length)
        if isinstance(self._row, tuple):
            joined._row.put_line(shard, *self._row, self._length)


class _Reader:
    """The values of one key; it only keeps tables for irregular offsets, sizes or shapes."""

    _file: RecordFile

    def __init__(self, column: Column, path: str, shape: tuple[int, ...] | None, limit: int) -> None:
        self._text = column.dtype == "str"
        self._bytes = column.is_bytes and shape is None
        self._name = "bytes" if self._bytes else column.dtype
        self._dtype = np.dtype(np.uint8) if self._text else DTYPES[column.dtype]
        self._size = _constant(column.sizes)
        self._sizes = column.sizes if self._size is None else None
        self._limit = limit
        self._has_large = bool((column.sizes > limit).any())
        self._shape = _fixed_shape(column, self._size) if shape is None else _resolve(shape, column, self._size, path)
        self._shapes = column.shapes if self._shape is None else None
        self._dim_ends = None if self._shapes is None else np.cumsum(self._shapes.ndim)
        self._offsets: Int64Array | None = column.offsets
        self._start = 0
        self._stride = _constant(column.offsets[1:] - column.offsets[:-1]) if len(column.offsets) > 1 else 1
        if self._size is not None and self._stride is not None and self._stride > 0:  # then no table is needed
            self._start, self._offsets = int(column.offsets[0]), None

    def of(self, file: RecordFile) -> Self:
        """Return a reader of the same values of another file."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self), _file=file)
        return copied

    @property
    def spec(self) -> FieldSpec:
        if self._text or self._bytes:
            return FieldSpec(self._name, ())
        if self._shape is not None:
            return FieldSpec(self._name, tuple(None if n == -1 else n for n in self._shape))
        ndim = 1 if self._shapes is None else _constant(self._shapes.ndim)
        return FieldSpec(self._name, None if ndim is None else (None,) * ndim)

    @property
    def array(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The dtype and the shape of all values, if they are alike."""
        return self._dtype, self._shape or ()

    def line(self) -> tuple[int, int, int] | None:
        """Return start, stride and size of values that are arrays alike at equal distances; None for others."""
        alike = self._offsets is None and not (self._text or self._bytes or self._has_large)
        if not alike or self._shape is None or self._size is None or not self._stride:
            return None
        return self._start, self._stride, self._size

    def column(self, indices: Int64Array, name: str) -> Any:
        if self._bytes:
            return self._ranges(indices)
        rows = self._rows(indices)
        return default_collate.column(self._each(indices), name) if rows is None else rows

    def values(self, indices: Int64Array) -> list[Any]:
        rows = self._rows(indices)
        return self._each(indices) if rows is None else split_rows(rows)

    def _rows(self, indices: Int64Array) -> Array | None:
        """Return the values as one array; None if they are not arrays of one shape."""
        if self._text or self._bytes or self._shape is None or self._size is None or self._has_large:
            return None
        if self._offsets is None:
            data = self._file.gather_every(self._start, self._stride or 1, self._size, indices)
        else:
            data = self._file.gather(self._offsets.take(indices, mode="clip"), self._size)
        return data.view(self._dtype).reshape(len(indices), *self._shape)

    def locations(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        offsets = self._start + indices * (self._stride or 1)
        if self._offsets is not None:
            offsets = self._offsets.take(indices, mode="clip")
        lengths = np.full(len(indices), self._size) if self._sizes is None else self._sizes.take(indices, mode="clip")
        return offsets, lengths

    def _ranges(self, indices: Int64Array) -> BytesColumn:
        offsets, lengths = self.locations(indices)
        if self._has_large:
            check_lengths(lengths, self._limit, indices, self._file.path)
        return self._file.gather_ranges(offsets, lengths)

    def _each(self, indices: Int64Array) -> list[Any]:
        found = self._ranges(indices)
        if self._bytes:
            return list(found)
        if self._text:
            return [self._decode(index, view) for index, view in zip(indices.tolist(), found.views(), strict=True)]
        # All sizes are multiples of the item size, so all values are aligned.
        (block,), _, starts, stops = found.parts()
        values = [block[a:b].view(self._dtype) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        if self._shapes is None or self._dim_ends is None:
            return values if self._shape is None else [value.reshape(self._shape) for value in values]
        ends = self._dim_ends[indices].tolist()
        ndims = self._shapes.ndim[indices].tolist()
        dims = self._shapes.dims
        return [value.reshape(dims[end - ndim : end]) for value, end, ndim in zip(values, ends, ndims, strict=True)]

    def kind(self) -> Any:
        """Return what makes values of several files alike; None if they are read one file at a time."""
        if self._shapes is not None:
            return None
        return self._text, self._bytes, self._dtype, self._shape, self._limit, self._joined_size

    @property
    def _joined_size(self) -> int | None:
        return None if self._text or self._bytes else self._size

    def joined(self, directory: ShardDirectory) -> Self:
        """Return a reader of the values of many files."""
        joined = directory.copy_of(self)
        joined._offsets, joined._has_large = directory.numbers(is_place=True), False
        joined._size = self._joined_size
        joined._sizes = directory.numbers() if joined._size is None else None
        return joined

    def join(self, joined: Any, shard: int, count: int) -> None:
        """Add the tables of this file to a reader of many."""
        offsets, sizes = joined._offsets, cast("ShardNumbers | None", joined._sizes)
        if self._offsets is None:
            offsets.put_line(shard, self._start, self._stride or 1, count)
        else:
            offsets.put(shard, self._offsets)
        if sizes is not None and self._sizes is not None:
            sizes.put(shard, self._sizes)
        elif sizes is not None:
            sizes.put_line(shard, self._size or 0, 0, count)
        joined._has_large |= self._has_large

    def _decode(self, index: int, text: memoryview) -> str:
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            start = self._start + index * (self._stride or 1) if self._offsets is None else int(self._offsets[index])
            message = f"text is not UTF-8: {error.reason}"
            raise CorruptFileError(message, path=self._file.path, offset=start + error.start, index=index) from error


def _row_of(readers: Mapping[str, _Reader], count: int) -> tuple[Any, dict[str, int]]:
    """Return start and stride of rows of fields at equal distances, and where in a row each field is; or no fields."""
    lines = {name: line for name, reader in readers.items() if (line := reader.line()) is not None}
    start = min((line[0] for line in lines.values()), default=0)
    length = max((line[0] + line[2] for line in lines.values()), default=0) - start
    strides = {line[1] for line in lines.values()} if count > 1 else {length}
    if len(lines) < 2 or len(strides) > 1 or length > (stride := strides.pop()):
        return None, {}
    return (start, stride), {name: line[0] - start for name, line in lines.items()}


def _constant(numbers: Int64Array) -> int | None:
    """Return the number that all are equal to, or None."""
    # Faster than `all` and `diff` for the few numbers of a small shard.
    return int(numbers[0]) if len(numbers) and not np.count_nonzero(numbers != numbers[0]) else None


def _fixed_shape(column: Column, size: int | None) -> tuple[int, ...] | None:
    """Return the shape that all records have, or None; `size` is the size that all have, if any."""
    if size is None:
        return None
    if column.shapes is None:
        return (size // column.itemsize,)
    ndim, dims = column.shapes
    width = _constant(ndim)
    if width is None:
        return None
    table = dims.reshape(len(ndim), width)
    return tuple(table[0].tolist()) if bool((table == table[0]).all()) else None


def _resolve(shape: tuple[int, ...], column: Column, size: int | None, path: str) -> tuple[int, ...]:
    """Return `shape` with -1 replaced, unless records differ in size."""
    given = [n for n in shape if n != -1]
    known = math.prod(given)  # not an int64, which overflows
    items = (column.sizes if size is None else np.array([size])) // column.itemsize
    unknown = shape.count(-1)
    exact = fits(given, known) and known < 1 << 62
    alike = exact and (known > 0 and (items % known == 0).all() if unknown else (items == known).all())
    if unknown > 1 or not alike:
        found = f"{size // column.itemsize} values" if size is not None else "different numbers of values"
        message = f"shapes: {list(shape)} does not fit field {column.name!r} of {path}, whose records have {found}"
        raise ConfigError(message, key=f"shapes.{column.name}", value=shape)
    return shape if size is None else tuple(size // column.itemsize // known if n == -1 else n for n in shape)
