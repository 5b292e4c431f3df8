"""The columns of a Syrah file, kept for later runs if a few numbers describe all of their records."""

from typing import Any, cast

import numpy as np

from dataload.sources.syrah.layout import (
    DTYPES,
    HEADER_SIZE,
    Column,
    Shapes,
    check_columns,
    parse_header,
    parse_metadata,
)
from dataload.storage import RecordFile, Remote
from dataload.storage.table_cache import CachedTable, IndexKey, remember

_BYTES_PER_RECORD = 16  # at least, of the metadata
_LEAST_CACHED = 100_000  # records; parsing the metadata of fewer takes a few milliseconds


def load_columns(file: RecordFile, *, cache: bool, remote: Remote | None = None) -> list[Column]:
    """Return the columns of a file, after checking every number; raises as `parse_metadata`."""
    path, size = file.path, file.size
    offset, length = parse_header(file.read(0, min(HEADER_SIZE, size)), size, path)

    def unpack(found: CachedTable) -> list[Column] | None:
        columns = _unpack(found, length // _BYTES_PER_RECORD)
        if columns is not None:
            check_columns(columns, (offset, offset + length), size, path)
        return columns

    return remember(
        IndexKey.of("syrah", (path,), remote=remote) if cache else None,
        unpack,
        build=lambda: parse_metadata(file.read(offset, length), offset, size, path),
        pack=_pack,
    )


def _pack(columns: list[Column]) -> CachedTable | None:
    records = len(columns[0].offsets)
    described = [_describe(column) for column in columns] if records >= _LEAST_CACHED else [None]
    return None if None in described else CachedTable({}, {"records": records, "columns": described})


def _describe(column: Column) -> list[Any] | None:
    """Return a column as values for JSON; None if its records differ in distance, size or shape."""
    offsets, sizes, shapes = column.offsets, column.sizes, column.shapes
    stride = int(offsets[1] - offsets[0])
    if bool((np.diff(offsets) != stride).any() or (sizes != sizes[0]).any()):
        return None
    shape = None
    if shapes is not None:
        rows = shapes.dims.reshape(len(shapes.ndim), -1) if len(shapes.dims) % len(shapes.ndim) == 0 else None
        if rows is None or bool((shapes.ndim != shapes.ndim[0]).any() or (rows != rows[:1]).any()):
            return None
        shape = rows[0].tolist()
    return [column.name, column.dtype, column.is_bytes, int(offsets[0]), stride, int(sizes[0]), shape]


def _unpack(found: CachedTable, most: int) -> list[Column] | None:
    """Return the columns from the cache; None if they are not valid, or have more than `most` records."""
    records, described = found.extras.get("records"), found.extras.get("columns")
    if type(records) is not int or not 0 < records <= most or not isinstance(described, list):
        return None
    columns: list[Column] = []
    for name, dtype, is_bytes, start, stride, size, shape in cast("list[Any]", described):
        numbers = [start, stride, size, *(shape or [])]
        if any(type(number) is not int or not 0 <= number < 1 << 48 for number in numbers):
            return None
        if not isinstance(name, str) or dtype not in ("str", *DTYPES) or start + stride * records >= 1 << 62:
            return None
        offsets = np.arange(records) * stride
        offsets += start
        shapes = None if shape is None else Shapes(np.array([len(shape)]), np.array(shape, np.int64))
        columns.append(Column(name, dtype, offsets, np.full(records, size), shapes, is_bytes=bool(is_bytes)))
    return columns or None
