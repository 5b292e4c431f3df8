"""Measure shards by reading them: statistics and lengths of fields, specifications, and marks of content."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from dataload._util.arrays import as_array
from dataload._util.indexing import even_split
from dataload._util.system import usable_cpus
from dataload.catalog.arrays import seconds_until_settled
from dataload.catalog.checks import ContentMark
from dataload.catalog.facts import Evidence, Measures, ShardFacts, select_fields, spec_of
from dataload.catalog.statistics import (
    LONGEST_LABEL,
    MOST_LABELS,
    MOST_SHAPES,
    FieldStatistics,
    Length,
    Numbers,
    merge_fields,
)
from dataload.errors import ConfigError
from dataload.jobs.engine import Engine
from dataload.loader.failures import OnError
from dataload.loader.loader import Loader
from dataload.sources.base import Source
from dataload.sources.file_source import FileSource
from dataload.sources.format import Format
from dataload.sources.views.mapped import Measured, key_of, measure_sample, measured_transform, recall_mapped
from dataload.transforms import NamedTransform, SampleContext
from dataload.types import Array, BytesColumn, FieldSpec, Int64Array

_TARGET_BYTES = 16 << 20
_MOST_RECORDS = 65_536
_CHUNK = 1 << 16  # numbers that fit into the processor's cache
_BITS = 36  # of a number added at a time: sums of `_CHUNK` fit into the 53 bits of a float
_LARGEST_EXPONENT = 960
_LARGEST_SQUARED = 2.0**500
_SPLIT = float(2**27 + 1)


def measure(source: Source[Any], fields: Sequence[str] | None = None) -> Measures:
    found: dict[str, FieldStatistics] = {}
    blocks: dict[str, list[Array]] = {}
    for columns in _blocks(source, fields):
        described = {name: _describe(column) for name, column in columns.items()}
        found = merge_fields(found, {name: each for name, (each, _) in described.items()})
        for name, (_, lengths) in described.items():
            if lengths is not None:
                blocks.setdefault(name, []).append(narrow(lengths))
    whole = [name for name, each in found.items() if each.length is not None and each.records == len(source)]
    return Measures(found, {name: narrow(np.concatenate(blocks[name])) for name in whole})


def narrow(lengths: Array) -> Array:
    """Return lengths, 0 or more, in the narrowest unsigned dtype, in the byte order of files."""
    return lengths.astype(np.min_scalar_type(int(lengths.max(initial=0))).newbyteorder("<"), copy=False)


def _blocks(source: Source[Any], fields: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the columns of blocks of records: arrays with a row per record, or sequences of values."""
    start, rows = 0, 1
    # Dtypes of the array fields in the first record; None if columns are useless.
    arrays: dict[str, np.dtype[Any]] | None = None
    while start < len(source):
        indices = np.arange(start, min(start + rows, len(source)), dtype=np.int64)
        columns = None if arrays is None else _columns(source, indices, fields, arrays)
        if columns is None:
            columns, arrays = _transposed(source.read(indices), fields), None
        if not start and not any(type(column[0]) in (int, float) for column in columns.values()):
            first = {name: column[0] for name, column in columns.items()}
            arrays = {name: value.dtype for name, value in first.items() if isinstance(value, (np.ndarray, np.generic))}
        start += len(indices)
        nbytes = sum(map(_nbytes, columns.values()))
        # Grow in steps: the first record may be unusually small.
        rows = max(1, min(_TARGET_BYTES * len(indices) // max(1, nbytes), rows * 8, _MOST_RECORDS))
        yield columns


def _columns(
    source: Source[Any], indices: Int64Array, fields: Sequence[str] | None, arrays: Mapping[str, np.dtype[Any]]
) -> Mapping[str, Any] | None:
    """Return columns if they are equivalent to the records, else None."""
    try:
        found: Any = source.read_batch(indices, fields)
    except (ConfigError, AttributeError, TypeError):  # different shapes or fields, or reading records reports the error
        return None
    columns = cast("Mapping[str, Any]", found if isinstance(found, Mapping) else {"": found})
    for name, column in columns.items():
        if isinstance(column, (Mapping, tuple)):  # fields in fields, or columns of tuples
            return None
        if isinstance(column, np.ndarray) and column.ndim == 1:
            # Python's numbers: if a column mixes both, integers became floats. Files hold numbers of one type.
            mixed = column.dtype == np.float64 and not isinstance(source, FileSource)
            if mixed or arrays.get(name) != column.dtype:
                return None
    return columns


def _transposed(records: list[Any], fields: Sequence[str] | None) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for record in records:
        chosen = record if fields is None else select_fields(record, fields)
        for name, value in chosen.items() if isinstance(chosen, Mapping) else [("", chosen)]:
            columns.setdefault(name, []).append(value)
    return columns


def _nbytes(column: Any) -> int:
    if isinstance(column, np.ndarray) or type(column) is BytesColumn:
        return column.nbytes
    return sum(len(value) if isinstance(value, (str, bytes)) else getattr(value, "nbytes", 8) for value in column)


def _describe(column: Any) -> tuple[FieldStatistics, Int64Array | None]:
    """Return the statistics of a column, and the length of each value (None if one has no length)."""
    if isinstance(column, np.ndarray) and not column.dtype.hasobject:
        lengths = np.full(len(column), column.shape[1], np.int64) if column.ndim > 1 else None
        return _of_arrays(column.dtype, {column.shape[1:]: len(column)}, column), lengths
    if type(column) is BytesColumn:
        _, _, starts, stops = column.parts()
        return _of_text(column, "bytes", stops - starts), stops - starts
    values: list[Any] = [*column]
    found = FieldStatistics()
    for kind, group in _by_kind(values):
        found = found.merge(_of_group(kind, group))
    lengths = np.array([len(value) for value in values], np.int64) if found.length is not None else None
    return found, lengths


def _by_kind(values: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Divide values into text, bytes, arrays of each dtype, and others of each class."""
    groups: dict[Any, list[Any]] = {}
    for value in values:
        if isinstance(value, (bool, int, float, np.generic)):
            value = np.asarray(value)
        elif not isinstance(value, (np.ndarray, str, bytes)):
            value = as_array(value)  # of tensors
        kind: Any = value.dtype if isinstance(value, np.ndarray) and not value.dtype.hasobject else type(value)
        groups.setdefault(kind, []).append(value)
    yield from groups.items()


def _of_group(kind: Any, values: list[Any]) -> FieldStatistics:
    if isinstance(kind, np.dtype):
        arrays = cast("list[Array]", values)
        flat = arrays[0].ravel() if len(arrays) == 1 else np.concatenate([array.ravel() for array in arrays])
        return _of_arrays(cast("np.dtype[Any]", kind), Counter(array.shape for array in arrays), flat)
    if kind in (str, bytes, bytearray, memoryview):
        text = "str" if kind is str else "bytes"
        return _of_text(values, text, np.array([*map(len, values)], np.int64))
    plain = FieldStatistics(records=len(values), dtypes={kind.__name__: len(values)}, shapes=None, labels=None)
    if kind is not list:
        return plain
    lengths = [*map(len, values)]
    length = Length(min(lengths), max(lengths), sum(lengths))
    return FieldStatistics(records=plain.records, dtypes=plain.dtypes, shapes=None, labels=None, length=length)


def _of_arrays(dtype: np.dtype[Any], shapes: Mapping[tuple[int, ...], int], values: Array) -> FieldStatistics:
    """Return the statistics of arrays of one dtype, given the number of each shape and all their elements."""
    records = sum(shapes.values())
    axes = length = None
    if len({*map(len, shapes)}) == 1:
        axes = tuple((min(extents), max(extents)) for extents in zip(*shapes, strict=True))
    if all(shapes):
        first = {shape[0] for shape in shapes}
        length = Length(min(first), max(first), sum(shape[0] * count for shape, count in shapes.items()))
    labels: dict[int | str, int] | None = None
    if dtype.kind in "biu" and all(math.prod(shape) == 1 for shape in shapes):
        found, counts = np.unique(values.astype(np.uint8) if dtype.kind == "b" else values, return_counts=True)
        labels = dict(zip(found.tolist(), counts.tolist(), strict=True)) if len(found) <= MOST_LABELS else None
    # The names of other dtypes tell the length of a text, and units of time.
    name = dtype.name if dtype.kind in "biufc" else dtype.type.__name__
    return FieldStatistics(
        records=records,
        dtypes={name: records},
        shapes=dict(shapes) if len(shapes) <= MOST_SHAPES else None,
        axes=axes,
        length=length,
        numbers=_numbers(values.ravel()) if dtype.kind in "biuf" else None,
        labels=labels,
    )


def _of_text(values: Sequence[Any], dtype: str, lengths: Int64Array) -> FieldStatistics:
    length = Length(int(lengths.min()), int(lengths.max()), int(lengths.sum()))
    return FieldStatistics(
        records=len(values),
        dtypes={dtype: len(values)},
        shapes={(): len(values)},
        axes=(),
        length=length,
        labels=_text_labels(values) if length.longest <= LONGEST_LABEL else None,
    )


def _text_labels(values: Sequence[Any]) -> dict[int | str, int] | None:
    try:
        labels: Counter[int | str] = Counter(
            value if isinstance(value, str) else bytes(value).decode() for value in values
        )
        "".join(map(str, labels)).encode()  # a surrogate would not survive
    except UnicodeError:
        return None
    return dict(labels) if len(labels) <= MOST_LABELS else None


def _numbers(values: Array) -> Numbers:
    found = Numbers()
    for start in range(0, len(values), _CHUNK):
        chunk = values[start : start + _CHUNK]
        found = found.merge(_of_floats(chunk) if chunk.dtype.kind == "f" else _of_integers(chunk))
    return found


def _of_integers(values: Array) -> Numbers:
    values = values.astype(np.uint8) if values.dtype.kind == "b" else values
    if values.dtype.itemsize < 8:
        total = int(values.sum(dtype=np.int64))
    else:
        total = (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())
    if values.dtype.itemsize <= 2:
        squares = Fraction(int(np.square(values, dtype=np.int64).sum()))
    else:
        squares = _squares(values.astype(np.float64))
    ends = {"minimum": int(values.min()), "maximum": int(values.max())}
    return Numbers(finite=len(values), total=Fraction(total), squares=squares, **ends)


def _of_floats(given: Array) -> Numbers:
    values = given.astype(np.float64)
    nan = infinite = 0
    finite = np.isfinite(values)
    if not finite.all():
        nan = int(np.isnan(values).sum())
        infinite = len(values) - int(finite.sum()) - nan
        values = values[finite]
    if not len(values):
        return Numbers(nan=nan, infinite=infinite)
    ends = {"minimum": float(values.min()) + 0.0, "maximum": float(values.max()) + 0.0}  # not -0.0
    largest = max(-ends["minimum"], ends["maximum"])
    squares = _squares(values) if largest < _LARGEST_SQUARED else None
    return Numbers(finite=len(values), nan=nan, infinite=infinite, total=exact_sum(values), squares=squares, **ends)


def _squares(values: Array) -> Fraction:
    """Return the exact sum of the squares of floats, each as the sum of two floats (Dekker 1971)."""
    squares = values * values
    scaled = values * _SPLIT
    high = scaled - (scaled - values)
    low = values - high
    return exact_sum(squares) + exact_sum(((high * high - squares) + 2 * high * low) + low * low)


def exact_sum(values: Array) -> Fraction:
    """Return the exact sum of at most `_CHUNK` finite float64, which does not depend on their order."""
    total, rest = Fraction(0), values
    while (largest := float(np.abs(rest).max(initial=0.0))) > 0:
        exponent = math.frexp(largest)[1]
        if exponent > _LARGEST_EXPONENT:
            return total + sum(map(Fraction, rest.tolist()), Fraction(0))
        # Adding and subtracting a large number rounds to multiples of 2**grid, whose sum is exact in any order.
        grid = max(exponent - _BITS, -1074)
        large = math.ldexp(1.5, grid + 52)
        rounded = (rest + large) - large
        total += Fraction(int(math.ldexp(float(rounded.sum()), -grid))) * Fraction(2) ** grid
        rest = rest - rounded
    return total


_ROWS = 256
_RECORDS_OF_WORKER = 512  # to start a process takes as long as to measure some hundred records
_RECORDS_OF_PART = 4096


class MappedLengths(NamedTuple):
    """Lengths by field, 0 for bad records; the number of these; and whether the lengths are kept, and were before."""

    fields: dict[str, Int64Array]
    bad: int
    kept: bool
    known: bool = False


def _measure(functions: tuple[NamedTransform, ...], sample: Any, context: SampleContext) -> dict[str, Any]:
    lengths, compact = measure_sample(functions, sample)
    return {"index": context.index, "lengths": lengths, "samples": compact}


@dataclass(frozen=True, slots=True)
class _Measuring:
    """The measurement of one of several parts of a source's records: what is found, and the number of bad records."""

    source: Source[Any]
    settings: Mapping[str, Any]  # of the loader

    def __call__(self, *, part: tuple[int, int], progress: Callable[[int, int], None]) -> tuple[Measured, int]:
        start, stop = even_split(len(self.source), part[1])[part[0] - 1]
        records = self.source if part[1] == 1 else self.source[start:stop]
        found = Measured(len(records))
        with Loader(records, batch_size=_ROWS, epochs=1, **self.settings) as loader:
            for step, batch in enumerate(loader, 1):
                found.add(batch["index"], batch["lengths"], batch["samples"])
                progress(min(step * _ROWS, len(records)), len(records))
            return found, loader.statistics().bad


def measure_mapped(
    source: Source[Any],
    transform: Any,
    *,
    on_error: OnError = "raise",
    engine: Engine | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005 - shows nothing
) -> MappedLengths:
    """Return the lengths of the fields that a transform makes of each record; see `mapped_lengths`."""
    functions, total = measured_transform(transform), len(source)
    if (known := recall_mapped(source, transform)) is not None:
        return MappedLengths(known.lengths, 0, kept=True, known=True)
    stages = [*(each.function for each in functions), partial(_measure, functions)]
    settings = {"transform": stages, "on_error": on_error}
    if engine is None:
        count = min(usable_cpus(), -(-total // _RECORDS_OF_WORKER))
        workers = {"num_workers": count, "executor": "processes"} if count > 1 else {}
        found, bad = _Measuring(source, {**settings, **workers})(part=(1, 1), progress=progress)
    else:
        count = min(engine.parts or engine.default_parts(-(-total // _RECORDS_OF_PART)), total) or 1
        parts = engine.run(_Measuring(source, settings), count, lambda done: progress(done, total))
        found, bad = Measured(total), sum(part_bad for _, part_bad in parts)
        for (start, stop), (part, _) in zip(even_split(total, count), parts, strict=True):
            found.add(np.arange(start, stop), part.lengths, part.samples())
    if (key := key_of(source, transform)) is not None:
        time.sleep(seconds_until_settled(key))  # lengths of files that have just changed would not be kept
        found.keep(key)
    return MappedLengths(found.lengths, bad, kept=recall_mapped(source, transform) is not None)


def with_etag(entry: Format, shard: ShardFacts) -> ShardFacts:
    """Return facts for a manifest, which knows ETags of single files only."""
    return shard if entry.directory_file is None else replace(shard, evidence=Evidence())


def fields_of(entry: Format, paths: Iterable[str], options: Mapping[str, Any]) -> Mapping[str, FieldSpec]:
    """Return the fields of the first shard with records; none if records are bytes."""
    for path in paths:
        with entry.open([path], options=without_cache(entry, options)) as source:
            if len(source):
                if source.fields:
                    return source.fields
                record = source[0]
                known = cast("Mapping[str, Any]", record if isinstance(record, Mapping) else {})
                return {name: spec_of(value) for name, value in known.items()}
    return {}


def contents_of(entry: Format, paths: Sequence[str], options: Mapping[str, Any]) -> list[ContentMark | None]:
    """Return the marks of the shards' content, for the data set's fingerprint."""
    with entry.open(paths, options=without_cache(entry, options)) as source:
        return [*source.shard_identities()] if isinstance(source, FileSource) else [None] * len(paths)


def without_cache(entry: Format, options: Mapping[str, Any]) -> dict[str, Any]:
    return {**({"cache": False} if "cache" in entry.reader_options.names() else {}), **options}
