"""Columns of serialized records that share a few wire layouts, copied from all records at once.

Records of equal length are handled together. The first is parsed to find the spans of its values. All records that
equal it in every other byte have the same spans; the first of the rest is parsed next. Long values are copied once,
from the record to the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np

from dataload.errors import CorruptFileError
from dataload.types import Array, Batch, BytesArray, BytesColumn, Int64Array

_Data = bytes | memoryview

_FEWEST_ROWS = 4
"""Fewest records per layout, on average, for which handling them together pays."""

_LEAN_LAYOUTS = 4
"""Number of layouts that may have fewer records, before many layouts are assumed."""

_LONG_BYTES = 512
"""Size from which a value is cut out of each record instead of being copied twice.

In warm memory, that pays only from about 4 KB on. But copies of whole batches, made and freed at each step, may be
returned to the system and faulted in again, which is several times slower.
"""


class RecordTable(Sequence[memoryview]):
    """Serialized records of one length in one array, (records, bytes) uint8, so that none is handled by itself."""

    __slots__ = ("_rows",)

    def __init__(self, rows: BytesArray) -> None:
        self._rows = rows

    @property
    def rows(self) -> BytesArray:
        return self._rows

    def columns(self, fields: Sequence[str] | None, parse: Parse) -> Batch | None:  # noqa: ARG002 - for tables in files
        """Return the columns of records that all have the layout of the first; None if they must be compared."""
        return None

    def cut(self, start: int, stop: int) -> BytesArray:
        """Return a contiguous copy of the bytes [start, stop) of each record, at least one."""
        return np.array(self.rows[:, start:stop], order="C")

    @classmethod
    def of(cls, column: BytesColumn) -> Self | None:
        """Return the table of values with equal lengths and distances in memory; None for others."""
        blocks, _, starts, stops = column.parts()
        if len(blocks) != 1 or len(starts) < 2:
            return None
        length, distance = int(stops[0] - starts[0]), int(starts[1] - starts[0])
        if not (stops - starts == length).all() or not (np.diff(starts) == distance).all():
            return None
        return cls(np.ndarray((len(starts), length), np.uint8, blocks[0], int(starts[0]), (distance, 1)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        rows = self.rows[index]
        return RecordTable(rows) if isinstance(index, slice) else rows.data

    def __iter__(self) -> Iterator[memoryview]:
        return (row.data for row in self.rows)


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes [start, stop) of a field's value in a record, and their meaning."""

    start: int
    stop: int
    # Dtype of the values as stored, or as returned by `convert`; the column has it in native byte order. None for
    # values that are not arrays.
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()  # of one value
    # From bytes, (rows, bytes) uint8 with any strides, to new values, (rows, *shape). None if the bytes are the values.
    convert: Callable[[BytesArray], Array] | None = None
    mask: int = 0  # bits that determine how to read the others, so they must be equal in all records
    item: Callable[[_Data], Any] = bytes  # makes a value that is not an array from its bytes

    @property
    def is_long(self) -> bool:
        """True for long bytes, which stay out of the table that their group is copied to."""
        return self.convert is None and self.stop - self.start >= _LONG_BYTES

    @property
    def column(self) -> tuple[object, ...]:
        """The properties that spans of one column share. Long values are long in all records."""
        return (self.item,) if self.dtype is None else (self.dtype, self.shape, self.is_long)


Layout: TypeAlias = Mapping[str, Span]
"""The spans of a record, by field name. They do not overlap."""

Parse: TypeAlias = Callable[[_Data], Layout | None]
"""Returns the layout of a record; None if its values are not contiguous."""


def mask_of(layout: Layout, length: int) -> BytesArray:
    """Return the bits, (length,) uint8, in which records of one layout are equal."""
    mask = np.full(length, 0xFF, np.uint8)
    for span in layout.values():
        mask[span.start : span.stop] = span.mask
    return mask


def values_of(span: Span, stored: Array) -> Any:
    """Return a column, given the stored values: (rows, *shape) of the span's dtype, or (rows, bytes) uint8."""
    if span.dtype is None:
        return [span.item(row.data) for row in stored]
    values = stored if span.convert is None else span.convert(stored).reshape(len(stored), *span.shape)
    return np.asarray(values, span.dtype.newbyteorder("="))


@dataclass(frozen=True, slots=True)
class _Group:
    """Records of one length and one layout."""

    rows: Int64Array | None  # their rows in the batch; None for all rows
    layout: Layout
    table: BytesArray  # (rows, bytes), the records without the long spans
    columns: Mapping[str, slice]  # the columns of the table that hold each of the other spans


def columns_by_layout(buffers: Sequence[_Data], fields: Sequence[str] | None, parse: Parse) -> Batch | None:
    """Decode records, at least one, of a few layouts, which `parse` finds, to columns; None if that is impossible."""
    try:
        found = buffers.columns(fields, parse) if isinstance(buffers, RecordTable) else None
        if found is not None:
            return found
        groups = _groups(buffers, parse)
        if not groups:
            return None
        names = tuple(groups[0].layout) if fields is None else fields
        if not groups[0].layout.keys() >= set(names):
            return None
        return {name: _column(name, buffers, groups) for name in names}
    except CorruptFileError:
        return None


def _groups(buffers: Sequence[_Data], parse: Parse) -> list[_Group]:
    """Group records by layout, starting with the first record's; return [] if columns are impossible or do not pay."""
    waiting = _by_length(buffers)
    groups: list[_Group] = []
    taken = 0
    while waiting:
        rows = waiting.pop(0)  # the first record's group first: its order of fields counts
        several = buffers if rows is None else [buffers[row] for row in rows.tolist()]
        layout = parse(several[0])
        if layout is None or (groups and _kinds(layout) != _kinds(groups[0].layout)):
            return []
        group, others = _split(rows, several, layout)
        groups.append(group)
        taken += len(group.table)
        if others.size:
            waiting.append(others)
        found = len(groups) + len(waiting)
        if len(buffers) < _FEWEST_ROWS * found or taken < _FEWEST_ROWS * (len(groups) - _LEAN_LAYOUTS):
            return []
    return groups


def _by_length(buffers: Sequence[_Data]) -> list[Int64Array | None]:
    """Return groups of rows with equally long records, (n,) int64 or None for all rows; [] if it does not pay."""
    if isinstance(buffers, RecordTable):
        return [None] if len(buffers) >= _FEWEST_ROWS else []
    lengths = list(map(len, buffers))
    if lengths.count(lengths[0]) == len(lengths):
        return [None] if len(lengths) >= _FEWEST_ROWS else []
    different = dict.fromkeys(lengths)
    if len(buffers) < _FEWEST_ROWS * len(different):
        return []
    of_row = np.array(lengths)
    return [np.flatnonzero(of_row == length) for length in different]


def _split(rows: Int64Array | None, buffers: Sequence[_Data], layout: Layout) -> tuple[_Group, Int64Array]:
    """Return the records that equal the first outside the values, and the rows of the others."""
    table = _table(buffers, [span for span in layout.values() if span.is_long])
    columns = _table_columns(layout)
    mask = np.full(table.shape[1], 0xFF, np.uint8)
    for name, column in columns.items():
        mask[column] = layout[name].mask
    structural = np.flatnonzero(mask)
    few = 2 * len(structural) < len(mask)  # otherwise selecting them costs more than comparing all
    structure = table.take(structural, axis=1) & mask[structural] if few else table & mask
    differs = structure != structure[0]
    if not differs.any():
        return _Group(rows, layout, table, columns), np.empty(0, np.int64)
    other = differs.any(axis=1)  # many times slower than the check above
    of_row = np.arange(len(buffers)) if rows is None else rows
    return _Group(of_row[~other], layout, table[~other], columns), of_row[other]


def _table(buffers: Sequence[_Data], without: Iterable[Span]) -> BytesArray:
    """Return the records without some spans, (rows, bytes) uint8."""
    edges = [0, *(edge for span in sorted((s.start, s.stop) for s in without) for edge in span), len(buffers[0])]
    kept = [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
    if isinstance(buffers, RecordTable):
        parts = [buffers.cut(part.start, part.stop) for part in kept]
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty((len(buffers), 0), np.uint8)], axis=1)
    pieces = buffers if len(edges) == 2 else [buffer[part] for buffer in buffers for part in kept]
    return np.frombuffer(b"".join(pieces), np.uint8).reshape(len(buffers), -1)


def _table_columns(layout: Layout) -> dict[str, slice]:
    columns: dict[str, slice] = {}
    removed = 0
    for name, span in sorted(layout.items(), key=lambda item: item[1].start):
        if span.is_long:
            removed += span.stop - span.start
        else:
            columns[name] = slice(span.start - removed, span.stop - removed)
    return columns


def _kinds(layout: Layout) -> dict[str, tuple[object, ...]]:
    return {name: span.column for name, span in layout.items()}


def _column(name: str, buffers: Sequence[_Data], groups: list[_Group]) -> Any:
    first = groups[0].layout[name]
    if first.dtype is None:
        return list(map(first.item, _pieces(name, buffers, groups)))
    dtype, shape = first.dtype.newbyteorder("="), (len(buffers), *first.shape)
    if first.is_long:
        if isinstance(buffers, RecordTable) and groups[0].rows is None:
            values = buffers.cut(first.start, first.stop)
            return np.asarray(values.view(first.dtype).reshape(shape), dtype)
        # a bytearray, so that the array is writable
        joined = bytearray().join(_pieces(name, buffers, groups))
        return np.asarray(np.frombuffer(joined, first.dtype).reshape(shape), dtype)
    if groups[0].rows is None:
        return np.asarray(_values(name, first.dtype, groups[0]).reshape(shape), dtype)
    column = np.empty(shape, dtype)
    for group in groups:
        column[group.rows] = _values(name, first.dtype, group).reshape(len(group.table), *first.shape)
    return column


def _values(name: str, dtype: np.dtype[Any], group: _Group) -> Array:
    convert, rows = group.layout[name].convert, group.table[:, group.columns[name]]
    return np.array(rows, order="C").view(dtype) if convert is None else convert(rows)


def _pieces(name: str, buffers: Sequence[_Data], groups: list[_Group]) -> list[_Data]:
    spans = [slice(group.layout[name].start, group.layout[name].stop) for group in groups]
    if groups[0].rows is None:
        return [buffer[spans[0]] for buffer in buffers]
    of_row = [spans[0]] * len(buffers)
    for group, span in zip(groups, spans, strict=True):
        assert group.rows is not None
        for row in group.rows.tolist():
            of_row[row] = span
    return [buffer[span] for buffer, span in zip(buffers, of_row, strict=True)]
