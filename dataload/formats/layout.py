"""Columns of serialized records of few wire layouts, copied out of all of them at once.

Records of equal length are taken together. The first of them is parsed, which tells where the values lie; those that
equal it in every other byte are read alike, and the first of the others is parsed in turn. Long values are copied
once, from the record to the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload.types import Array, Batch, BytesArray, Int64Array

__all__ = ["Layout", "Span", "columns_by_layout"]

_Data = bytes | memoryview

_FEWEST_ROWS = 4
"""Records per layout, on average, from which taking them together is worth it."""

_LONG_BYTES = 512
"""From here on it costs less to cut a value out of each record than to copy it twice."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where the value of a field lies in a record, and what it is.

    Attributes:
        start: First byte.
        stop: Byte behind the last.
        dtype: Of the column; None for values that are bytes.
        shape: Of one value.
        convert: Rows of these bytes, (rows, bytes) uint8 with any strides, to values, (rows, *shape); None if
            the bytes are the values, in the byte order of this machine.
        mask: Bits of these bytes that say how to read the others, and so must be the same in all records.
    """

    start: int
    stop: int
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    convert: Callable[[BytesArray], Array] | None = None
    mask: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether each record's bytes are handled by themselves."""
        return self.dtype is None or (self.convert is None and self.stop - self.start >= _LONG_BYTES)


Layout = Mapping[str, Span]
"""The spans of a record by name; they do not overlap."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Records of one length and one layout.

    Attributes:
        rows: Which rows of the batch they are; None for all.
        layout: Of each of them.
        table: (rows, bytes) uint8, the records without the spans that are cut out.
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
        or shapes, or `fields` are not among them.
    """
    waiting = _by_length(buffers)
    groups: list[_Group] = []
    while waiting:
        rows = waiting.pop(0)  # that of the first record first: the order of its fields counts
        several = buffers if rows is None else [buffers[row] for row in rows.tolist()]
        layout = parse(several[0])
        if layout is None or (groups and not _agree(layout, groups[0].layout)):
            return None
        group, others = _split(rows, several, layout)
        groups.append(group)
        if others.size:
            waiting.append(others)
        if len(buffers) < _FEWEST_ROWS * (len(groups) + len(waiting)):
            return None
    if not groups:
        return None
    first = groups[0].layout
    names = tuple(first) if fields is None else fields
    if not first.keys() >= set(names):
        return None
    return {name: _column(name, first[name], buffers, groups) for name in names}


def _by_length(buffers: Sequence[_Data]) -> list[Int64Array | None]:
    """Rows of equally long records, (n,) int64; None stands for all rows. Nothing if it is not worth it."""
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
    table = _table(buffers, [span for span in layout.values() if span.is_cut])
    places = _places(layout)
    mask = np.full(table.shape[1], 0xFF, np.uint8)
    for name, place in places.items():
        mask[place] = layout[name].mask
    differs = ((table ^ table[0]) & mask).any(axis=1)
    if not differs.any():
        return _Group(rows, layout, table, places), np.empty(0, np.int64)
    of_row = np.arange(len(buffers)) if rows is None else rows
    return _Group(of_row[~differs], layout, table[~differs], places), of_row[differs]


def _table(buffers: Sequence[_Data], cut: Iterable[Span]) -> BytesArray:
    """(rows, bytes) uint8, the records without some spans."""
    edges = [0, *(edge for span in sorted((s.start, s.stop) for s in cut) for edge in span), len(buffers[0])]
    kept = [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
    pieces = buffers if len(edges) == 2 else [buffer[part] for buffer in buffers for part in kept]
    return np.frombuffer(b"".join(pieces), np.uint8).reshape(len(buffers), -1)


def _places(layout: Layout) -> dict[str, slice]:
    """Where the spans that are not cut out lie in a row of the table."""
    places: dict[str, slice] = {}
    removed = 0
    for name, span in sorted(layout.items(), key=lambda item: item[1].start):
        if span.is_cut:
            removed += span.stop - span.start
        else:
            places[name] = slice(span.start - removed, span.stop - removed)
    return places


def _agree(one: Layout, other: Layout) -> bool:
    """Whether two layouts give the same columns."""
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape) for name in one
    )


def _column(name: str, first: Span, buffers: Sequence[_Data], groups: list[_Group]) -> Any:
    if first.dtype is None:
        return [bytes(piece) for piece in _pieces(name, buffers, groups)]
    if all(group.layout[name].is_cut for group in groups):
        # a bytearray, for what is made of it shall be writable
        joined = bytearray().join(_pieces(name, buffers, groups))
        return np.frombuffer(joined, first.dtype).reshape(len(buffers), *first.shape)
    column = np.empty((len(buffers), *first.shape), first.dtype)
    for group in groups:
        rows = group.table[:, group.places[name]]
        convert = group.layout[name].convert
        values = np.ascontiguousarray(rows).view(first.dtype) if convert is None else convert(rows)
        column[slice(None) if group.rows is None else group.rows] = values.reshape(len(rows), *first.shape)
    return column


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
