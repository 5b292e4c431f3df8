"""Rows of batches as people look at them: records, where these lie, previews; images and curves over the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, cast

import numpy as np

from dataload._util.arrays import as_array
from dataload.catalog.facts import classes_of
from dataload.collate import Ragged
from dataload.errors import printable
from dataload.loader.failures import ErrorPolicy
from dataload.loader.loader import Loader
from dataload.samplers import BatchPlan
from dataload.sources.base import Source
from dataload.sources.shards import Location, locate
from dataload.types import Array, BytesColumn, TextColumn


def row_of(batch: Any, row: int, rows: int) -> Any:
    """Return one row of a batch, also of dicts and tuples; a value without `rows` rows, such as a sum, as it is."""
    if isinstance(batch, Mapping):
        return {name: row_of(column, row, rows) for name, column in cast("Mapping[Any, Any]", batch).items()}
    if isinstance(batch, tuple) and not isinstance(batch, Ragged):
        return tuple(row_of(column, row, rows) for column in cast("tuple[Any, ...]", batch))
    if _length(batch) != rows:
        return batch
    if isinstance(batch, Ragged):
        start, stop = batch.offsets[row : row + 2].tolist()
        if isinstance(values := batch.values, Ragged):
            return [row_of(values, each, len(values.offsets) - 1) for each in range(start, stop)]
        return values[start:stop]
    return batch[row]


def count_rows(batch: Any, plan: BatchPlan) -> int:
    """Return the number of rows of a batch: as planned, unless records were left out; 0 without columns."""
    lengths = [length for _, column in columns_of(batch) if (length := _length(column)) is not None]
    planned = planned_rows(plan)
    return planned if planned in lengths else next(iter(lengths), 0)


def has_rows(batch: Any) -> bool:
    """Return whether a batch has a column of rows, even an empty one."""
    return any(_length(column) is not None for _, column in columns_of(batch))


def planned_rows(plan: BatchPlan) -> int:
    """Return the number of rows of a batch without bad records."""
    return plan.rows if plan.packing is None else plan.packing.shape[0]


def columns_of(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the columns of a batch with their names; names of inner ones are joined by dots."""
    if isinstance(batch, Mapping) or (isinstance(batch, tuple) and not isinstance(batch, Ragged)):
        pairs = cast("Any", batch.items() if isinstance(batch, Mapping) else enumerate(cast("Any", batch)))
        for key, column in pairs:
            yield from columns_of(column, f"{name}.{key}" if name else str(key))
    else:
        yield name, batch


def as_integers(value: Any) -> Array | None:
    """Return an array or a list of integers as an array; None if a value is none."""
    value = as_array(value)
    if isinstance(value, list) and all(type(item) is int for item in cast("list[Any]", value)):
        value = np.array(value)
    return value if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu" else None


def _length(column: Any) -> int | None:
    """Return the number of rows of a column; None if it is a single value."""
    if isinstance(column, Ragged):
        return len(column.offsets) - 1
    has_items = hasattr(column, "__len__") and hasattr(column, "__getitem__")
    if not has_items or isinstance(column, (str, bytes)) or getattr(column, "shape", None) == ():
        return None
    return len(column)


_FEW = 8
_PREVIEW = 80  # characters


@dataclass(frozen=True, slots=True)
class ShownRecord:
    """A record in a row."""

    index: int
    location: Location
    start: int | None = None  # in a packed row, or the number in a row of several records
    length: int | None = None  # elements of a packed row
    filler: bool = False


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row of a batch, or a record."""

    row: int
    records: tuple[ShownRecord, ...]  # none if bad records were left out, because rows then do not tell
    values: Any

    @property
    def filler(self) -> bool:
        """True if nothing in the row is of the epoch."""
        return bool(self.records) and all(record.filler for record in self.records)


@dataclass(frozen=True, slots=True)
class Shown:
    """Some rows under a heading."""

    title: str
    batch: Any
    rows: tuple[ShownRow, ...]
    total: int  # number of rows
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


def policy_of(loader: Loader[Any]) -> ErrorPolicy:
    """Return which records the loader leaves out, and what it does with bad ones."""
    return loader._work.fetch.policy  # pyright: ignore[reportPrivateUsage] # users gave it to the loader


def has_others(plan: BatchPlan, policy: ErrorPolicy) -> bool:
    """Return whether other records stand in the rows of excluded ones; else the batch lacks these rows."""
    return policy.action == "replace" or plan.columns is not None


def show_batch(loader: Loader[Any], epoch: int, step: int, *, most: int) -> Shown:
    """Return the batch of any step, with at most `most` rows. Raises as `Loader.batch`."""
    batch = loader.batch(epoch, step)
    planner = loader.batch_sampler_of(epoch)
    plan, policy = planner.plan(step, epoch=epoch), policy_of(loader)
    is_excluded, others = np.isin(plan.indices, policy.excluded_among(plan.indices)), False
    if is_excluded.any():
        others = has_others(plan, policy)
        plan = plan if others else plan.without(is_excluded)
    total = count_rows(batch, plan)
    matched = total == planned_rows(plan) and not others
    rows = [
        ShownRow(row, tuple(_records_of(plan, row, loader.source)) if matched else (), row_of(batch, row, total))
        for row in range(min(total, most))
    ]
    ranks = f", rank {planner.rank} of {planner.world_size}" if planner.world_size > 1 else ""
    title = f"epoch {epoch}, step {step:,} of {planner.steps(epoch):,}{ranks}"
    fields = loader.source.fields if isinstance(loader.source, Source) else {}
    return Shown(title, batch, tuple(rows), total, classes_of(fields))


def _records_of(plan: BatchPlan, row: int, source: Any) -> Iterator[ShownRecord]:
    if plan.packing is not None:
        for at in np.flatnonzero(plan.packing.rows == row).tolist():
            index = int(plan.indices[at])
            place = int(plan.packing.starts[at]), int(plan.packing.lengths[at])
            yield ShownRecord(index, locate(source, index), *place)
        return
    for number in range(plan.chunk):
        at = row * plan.chunk + number
        index = int(plan.indices[at])
        filler = plan.valid is not None and not plan.valid.ravel()[at]
        yield ShownRecord(index, locate(source, index), number if plan.chunk > 1 else None, None, bool(filler))


def show_records(source: Source[Any], records: range, *, most: int) -> Shown:
    """Return some records of a source, at most `most` of them with their values."""
    chosen = records[:most]
    rows = [
        ShownRow(row, (ShownRecord(index, source.locate(index)),), value)
        for row, (index, value) in enumerate(zip(chosen, source.read(chosen), strict=True))
    ]
    title = f"records {records.start:,} to {records.stop - 1:,} of {len(source):,}"
    return Shown(title, None, tuple(rows), len(records), classes_of(source.fields))


def describe_record(record: ShownRecord) -> str:
    """Return index and place of a record, as text."""
    shard, number, key, offset = record.location
    byte = None if offset is None else f"from byte {offset:,}"
    place = ", ".join(part for part in (shard, byte, None if key is None else f"key {key!r}") if part)
    text = f"index {record.index:,}{f': record {number:,} of {place}' if place else ''}"
    if record.length is not None and record.start is not None:
        return f"{text}, at {record.start:,} to {record.start + record.length:,}"
    return f"{text}{' (filler)' if record.filler else ''}"


def describe_column(column: Any) -> tuple[str, str, str]:
    """Return dtype, shape and range of a column, as text."""
    if isinstance(column, Ragged):
        dtype, shape, values = describe_column(column.values)
        return dtype, f"{len(column.offsets) - 1} rows of different lengths, together {shape}", values
    if isinstance(array := as_array(column), np.ndarray):
        return _describe_array(array)
    if isinstance(column, BytesColumn):
        return "str" if isinstance(column, TextColumn) else "bytes", f"({len(column)},)", ""
    if isinstance(column, Sequence) and column:
        kinds = {type(item).__name__ for item in cast("Sequence[Any]", column)}
        return " or ".join(sorted(kinds)), f"({len(column)},)", ""
    return type(column).__name__, "", ""


def _describe_array(array: Any) -> tuple[str, str, str]:
    found = list[str]()
    if array.dtype.kind in "biuf":
        values = np.ma.compressed(array) if isinstance(array, np.ma.MaskedArray) else array
        finite = values[np.isfinite(values)] if array.dtype.kind == "f" else values
        if finite.size:
            found.append(f"{finite.min():g} to {finite.max():g}, mean {finite.mean(dtype=np.float64):.4g}")
        for what, count in (("not finite", values.size - finite.size), ("masked", array.size - values.size)):
            found += [f"{count} {what}"] if count else []
    return str(array.dtype), str(array.shape), ", ".join(found)


def preview(value: Any, classes: Sequence[str] = ()) -> str:
    """Return a value in one line; a label with the name of its class."""
    if isinstance(value, str):
        return printable(repr(value), _PREVIEW)
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value[:_FEW])
        return f"{len(value):,} bytes: {data.hex(' ')}{' ...' if len(value) > _FEW else ''}"
    array = as_array(value)
    if classes and isinstance(array, (int, np.integer, np.ndarray)) and np.size(array) == 1:
        number = np.asarray(array).item()
        if type(number) is int and 0 <= number < len(classes):
            return printable(f"{number} ({classes[number]})", _PREVIEW)
    if isinstance(array, np.ndarray):
        if array.size <= _FEW and not isinstance(array, np.ma.MaskedArray):
            return printable(np.array2string(array, precision=4, separator=", ", max_line_width=1 << 20), _PREVIEW)
        dtype, shape, found = _describe_array(array)
        return f"{dtype} {shape}{': ' if found else ''}{found}"
    return printable(str(value) if isinstance(value, np.generic) else repr(value), _PREVIEW)


_TIMES = {"time", "timestamp"}
_LEAST_ROWS = 3
_IMAGES = 6
_CURVES = 8  # elements of a field
_COLOURS = 6  # in page.css
_WIDTH, _HEIGHT = 480, 80  # pixels


def overview(shown: Shown, draw: Callable[[Any], str]) -> str:
    """Return what is above the records of a video or an episode; `draw` returns several images in a row."""
    rows: list[Any] = [row.values for row in shown.rows]
    if len(rows) < _LEAST_ROWS or not all(isinstance(row, Mapping) for row in rows):
        return ""
    fields = cast("Mapping[str, Any]", rows[0])
    if _TIMES.isdisjoint(fields):
        return ""
    parts: list[str] = []
    for name in fields:
        column = _stacked([as_array(row.get(name)) for row in rows])
        if column is None or name in _TIMES:
            continue
        drawn = draw(column) if column.ndim == 4 else _curves(column)
        if drawn:
            parts.append(f"<dt>{escape(printable(name, None))}</dt><dd>{drawn}</dd>")
    return f"<dl>{''.join(parts)}</dl>"


def _stacked(values: list[Any]) -> Array | None:
    """Return the values of all rows in one array, or some of them if they are images; None if they differ in kind."""
    arrays = [np.asarray(value) if isinstance(value, (float, np.ndarray, np.generic)) else None for value in values]
    found = [array for array in arrays if array is not None and array.dtype.kind in "uf"]
    if len(found) < len(values) or len({(array.shape, array.dtype) for array in found}) > 1:
        return None
    if found[0].ndim == 3:
        found = [found[at] for at in np.linspace(0, len(found) - 1, min(_IMAGES, len(found))).astype(int)]
    return np.stack(found)


def _curves(column: Array) -> str:
    """Draw floats, (rows,) or (rows, a few), each element as a curve over the rows."""
    values = column.reshape(len(column), -1).astype(np.float64)
    if (
        column.dtype.kind != "f"
        or not 0 < values.shape[1] <= _CURVES
        or column.ndim > 2
        or not np.isfinite(values).all()
    ):
        return ""
    low, high = float(values.min()), float(values.max())
    x = np.linspace(0, _WIDTH, len(values))
    y = _HEIGHT - 1 - (values - low) / max(high - low, 1e-9) * (_HEIGHT - 2)
    lines = "".join(
        f'<polyline fill="none" stroke="var(--s{number % _COLOURS})" points="'
        + " ".join(f"{at:.1f},{height:.1f}" for at, height in zip(x.tolist(), curve.tolist(), strict=True))
        + '"/>'
        for number, curve in enumerate(y.T)
    )
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">{lines}</svg>'
    return f'{svg}<br><span class="soft">{low:.4g} to {high:.4g}</span>'
