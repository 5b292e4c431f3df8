"""Columns of serialized records of few wire layouts, copied out of all of them at once.

Records of equal length are taken together. The first of them is parsed, which tells where the values lie; those that
equal it in every other byte are read alike, and the first of the others is parsed in turn. Long values are copied
once, from the record to the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from dataload.errors import CorruptFileError
from dataload.types import Array, Batch, BytesArray, Int64Array

__all__ = ["Layout", "RecordTable", "Span", "columns_by_layout"]

_Data = bytes | memoryview

_FEWEST_ROWS = 4
"""Records per layout, on average, from which taking them together is worth it."""

_LEAN_LAYOUTS = 4
"""So many layouts may have fewer records than that before they are taken for a sign of many layouts."""

_LONG_BYTES = 512
"""From here on a value is cut out of each record instead of being copied twice.

In warm memory that pays from about 4 KB on only, but copies of whole batches, made and freed at each step, may be given
back to the system and faulted in again: several times slower.
"""


class RecordTable(Sequence[memoryview]):
    """Serialized records of one length that lie in one array: no record has to be looked at by itself.

    Args:
        rows: (records, bytes) uint8, of which each row is contiguous.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: BytesArray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> RecordTable: ...
    def __getitem__(self, index: int | slice) -> memoryview | RecordTable:
        rows = self.rows[index]
        return RecordTable(rows) if isinstance(index, slice) else rows.data

    def __iter__(self) -> Iterator[memoryview]:
        return (row.data for row in self.rows)


@dataclass(frozen=True, slots=True)
class Span:
    """Where the value of a field lies in a record, and what it is.

    Attributes:
        start: First byte.
        stop: Byte behind the last.
        dtype: Of the values, as they stand in the record or as `convert` gives them; that of the column is the
            same in the byte order of this machine. None for values that are no arrays.
        shape: Of one value.
        convert: Rows of these bytes, (rows, bytes) uint8 with any strides, to new values, (rows, *shape); None if
            the bytes are the values.
        mask: Bits of these bytes that say how to read the others, and so must be the same in all records.
        item: Makes a value that is no array of its bytes.
    """

    start: int
    stop: int
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    convert: Callable[[BytesArray], Array] | None = None
    mask: int = 0
    item: Callable[[_Data], Any] = bytes

    @property
    def is_long(self) -> bool:
        """Whether these bytes are better left out of the table of their group."""
        return self.convert is None and self.stop - self.start >= _LONG_BYTES

    @property
    def column(self) -> tuple[object, ...]:
        """What spans of one field have in common that make one column."""
        # what is long is cut out of the records, so it has to be long in all of them
        return (self.item,) if self.dtype is None else (self.dtype, self.shape, self.is_long)


Layout = Mapping[str, Span]
"""The spans of a record by name; they do not overlap."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Records of one length and one layout.

    Attributes:
        rows: Which rows of the batch they are; None for all.
        layout: Of each of them.
        table: (rows, bytes) uint8, the records without the long spans.
        places: Where in the table the other spans lie.
    """

    rows: Int64Array | None
    layout: Layout
    table: BytesArray
    places: Mapping[str, slice]


def columns_by_layout(
    buffers: Sequence[_Data], fields: Sequence[str] | None, parse: Callable[[_Data], Layout | None]
) -> Batch | None:
    """Columns of records that differ only in their values.

    Args:
        buffers: The records, at least one.
        fields: Names of the fields to read; None means all.
        parse: Finds the layout of a record; None where spans cannot tell its values.

    Returns:
        What collating the decoded records gives; None if they have many layouts, or different fields, dtypes
        or shapes, `fields` are not among them, or a record is corrupt: decoding one by one says which.
    """
    try:
        groups = _groups(buffers, parse)
        if not groups:
            return None
        names = tuple(groups[0].layout) if fields is None else fields
        if not groups[0].layout.keys() >= set(names):
            return None
        return {name: _column(name, buffers, groups) for name in names}
    except CorruptFileError:
        return None


def _groups(buffers: Sequence[_Data], parse: Callable[[_Data], Layout | None]) -> list[_Group]:
    """All records by layout, that of the first one first; none if columns would not serve or not pay."""
    waiting = _by_length(buffers)
    groups: list[_Group] = []
    taken = 0
    while waiting:
        rows = waiting.pop(0)  # that of the first record first: the order of its fields counts
        several = buffers if rows is None else [buffers[row] for row in rows.tolist()]
        layout = parse(several[0])
        if layout is None or (groups and not _agree(layout, groups[0].layout)):
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
    """Rows of equally long records, (n,) int64; None stands for all rows. Nothing if it is not worth it."""
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
    """The records that equal the first in every byte that is no value, and the rows of the others."""
    table = _table(buffers, [span for span in layout.values() if span.is_long])
    places = _places(layout)
    mask = np.full(table.shape[1], 0xFF, np.uint8)
    for name, place in places.items():
        mask[place] = layout[name].mask
    structural = np.flatnonzero(mask)
    few = 2 * len(structural) < len(mask)  # else picking them costs more than looking at all
    structure = table.take(structural, axis=1) & mask[structural] if few else table & mask
    differs = structure != structure[0]
    if not differs.any():
        return _Group(rows, layout, table, places), np.empty(0, np.int64)
    other = differs.any(axis=1)  # many times slower than the above
    of_row = np.arange(len(buffers)) if rows is None else rows
    return _Group(of_row[~other], layout, table[~other], places), of_row[other]


def _table(buffers: Sequence[_Data], without: Iterable[Span]) -> BytesArray:
    """(rows, bytes) uint8, the records without some spans."""
    edges = [0, *(edge for span in sorted((s.start, s.stop) for s in without) for edge in span), len(buffers[0])]
    kept = [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
    if isinstance(buffers, RecordTable):
        return np.concatenate([buffers.rows[:, part] for part in kept] or [buffers.rows[:, :0]], axis=1)
    pieces = buffers if len(edges) == 2 else [buffer[part] for buffer in buffers for part in kept]
    return np.frombuffer(b"".join(pieces), np.uint8).reshape(len(buffers), -1)


def _places(layout: Layout) -> dict[str, slice]:
    """Where the spans that are not long lie in a row of the table."""
    places: dict[str, slice] = {}
    removed = 0
    for name, span in sorted(layout.items(), key=lambda item: item[1].start):
        if span.is_long:
            removed += span.stop - span.start
        else:
            places[name] = slice(span.start - removed, span.stop - removed)
    return places


def _agree(one: Layout, other: Layout) -> bool:
    """Whether two layouts give the same columns."""
    return one.keys() == other.keys() and all(one[name].column == other[name].column for name in one)


def _column(name: str, buffers: Sequence[_Data], groups: list[_Group]) -> Any:
    first = groups[0].layout[name]
    if first.dtype is None:
        return list(map(first.item, _pieces(name, buffers, groups)))
    dtype, shape = first.dtype.newbyteorder("="), (len(buffers), *first.shape)
    if first.is_long:
        if isinstance(buffers, RecordTable) and groups[0].rows is None:
            span = groups[0].layout[name]
            values = np.array(buffers.rows[:, span.start : span.stop], order="C")
            return values.view(first.dtype).reshape(shape).astype(dtype, copy=False)
        # a bytearray, for what is made of it shall be writable
        joined = bytearray().join(_pieces(name, buffers, groups))
        return np.frombuffer(joined, first.dtype).reshape(shape).astype(dtype, copy=False)
    if groups[0].rows is None:
        return _values(name, first.dtype, groups[0]).reshape(shape).astype(dtype, copy=False)
    column = np.empty(shape, dtype)
    for group in groups:
        column[group.rows] = _values(name, first.dtype, group).reshape(len(group.table), *first.shape)
    return column


def _values(name: str, dtype: np.dtype[Any], group: _Group) -> Array:
    """New values of one field of the records of a group, in their order."""
    convert, rows = group.layout[name].convert, group.table[:, group.places[name]]
    return np.array(rows, order="C").view(dtype) if convert is None else convert(rows)


def _pieces(name: str, buffers: Sequence[_Data], groups: list[_Group]) -> list[_Data]:
    """The bytes of one span of each record."""
    spans = [slice(group.layout[name].start, group.layout[name].stop) for group in groups]
    if groups[0].rows is None:
        return [buffer[spans[0]] for buffer in buffers]
    of_row = [spans[0]] * len(buffers)
    for group, span in zip(groups, spans, strict=True):
        assert group.rows is not None
        for row in group.rows.tolist():
            of_row[row] = span
    return [buffer[span] for buffer, span in zip(buffers, of_row, strict=True)]
