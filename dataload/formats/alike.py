"""Columns of serialized records that differ only in their values, cut out of all of them at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from dataload.types import Array, Batch, BytesArray

__all__ = ["Span", "columns_of_alike"]

_FEWEST_ROWS = 4
"""Records of one length from which looking for their layout is worth it."""


class Span(NamedTuple):
    """Where the value of a field lies in a record.

    Attributes:
        start: First byte.
        stop: Byte behind the last.
        convert: Rows of these bytes, (rows, bytes) uint8 with any strides, to a column of the caller's own,
            (rows, *shape). None for values that are bytes.
        mask: Bits of these bytes that say how to read the others, and so must be the same in all records.
    """

    start: int
    stop: int
    convert: Callable[[BytesArray], Array] | None = None
    mask: int = 0


Scan = Callable[[bytes | memoryview], "dict[str, Span] | None"]
"""Finds the spans of a record, by name and not overlapping; None where they tell no columns."""


def columns_of_alike(buffers: Sequence[bytes | memoryview], fields: Sequence[str] | None, scan: Scan) -> Batch | None:
    """Columns of records that have few layouts; the result is that of decoding and collating.

    Records of equal length are taken together: the first is scanned, the others must be equal to it in every
    byte that is no value.

    Args:
        buffers: The records, at least one.
        fields: Names of the fields to cut out; None means all.
        scan: See `Scan`; for records it does not take, the result is None.

    Returns:
        None unless all records have the same fields and shapes, and `fields` are among them.
    """
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, buffer in enumerate(buffers):
        groups[len(buffer)].append(row)
    if len(buffers) < _FEWEST_ROWS * len(groups):
        return None
    out: Batch = {}
    for rows in groups.values():
        several = buffers if len(groups) == 1 else [buffers[row] for row in rows]
        batch = _columns(several, fields, scan)
        if batch is None or (len(groups) > 1 and not _scatter(batch, rows, len(buffers), out)):
            return None
        if len(groups) == 1:
            return batch
    return out


def _columns(buffers: Sequence[bytes | memoryview], fields: Sequence[str] | None, scan: Scan) -> Batch | None:
    """Columns of records of one length."""
    spans = scan(buffers[0])
    if spans is None or (fields is not None and not spans.keys() >= set(fields)):
        return None
    opaque = sorted((span.start, span.stop) for span in spans.values() if span.convert is None)
    table = _without(buffers, opaque)
    places = _places(spans)
    mask = np.full(table.shape[1], 0xFF, np.uint8)
    for name, place in places.items():
        mask[place] = spans[name].mask
    structural = np.flatnonzero(mask)
    structure = table.take(structural, axis=1) & mask[structural]
    if not (structure == structure[0]).all():
        return None
    columns: Batch = {}
    for name in spans if fields is None else fields:
        start, stop, convert, _ = spans[name]
        if convert is None:
            columns[name] = [bytes(buffer[start:stop]) for buffer in buffers]
        else:
            columns[name] = convert(table[:, places[name]])
    return columns


def _without(buffers: Sequence[bytes | memoryview], opaque: Sequence[tuple[int, int]]) -> BytesArray:
    """(rows, bytes) uint8: the records without their `opaque` parts, which may be large."""
    if not opaque:
        joined = b"".join(buffers)
    else:
        edges = [0, *(edge for part in opaque for edge in part), len(buffers[0])]
        kept = [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        joined = b"".join([buffer[part] for buffer in buffers for part in kept])
    return np.frombuffer(joined, np.uint8).reshape(len(buffers), -1)


def _places(spans: Mapping[str, Span]) -> dict[str, slice]:
    """Where in a row of `_without` the values lie that are to be converted."""
    places: dict[str, slice] = {}
    removed = 0
    for name, span in sorted(spans.items(), key=lambda item: item[1].start):
        if span.convert is None:
            removed += span.stop - span.start
        else:
            places[name] = slice(span.start - removed, span.stop - removed)
    return places


def _scatter(part: Batch, rows: list[int], total: int, out: Batch) -> bool:
    """Put the columns of some rows in their places; False if they do not go with those that are there."""
    if not out:
        out |= {
            name: [None] * total if isinstance(column, list) else np.empty((total, *column.shape[1:]), column.dtype)
            for name, column in part.items()
        }
    if part.keys() != out.keys():
        return False
    for name, column in part.items():
        target = out[name]
        if isinstance(target, list) and isinstance(column, list):
            for row, value in zip(rows, cast("list[Any]", column), strict=True):
                target[row] = value
        elif _kind(target) != _kind(column):
            return False
        else:
            target[np.array(rows)] = column
    return True


def _kind(column: Any) -> Any:
    return list if isinstance(column, list) else (column.dtype, column.shape[1:])
