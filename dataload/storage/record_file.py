"""Base class of open files from which records are copied."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from dataload._util.arrays import pooled_empty
from dataload.storage.core import core
from dataload.storage.errors import outside_error
from dataload.types import Array, BytesArray, BytesColumn, Int64Array

Cut: TypeAlias = Callable[[BytesArray, Array, Array, Array, Any, Any], int]
"""Fills a block with columns, given starts, lengths and targets of fields, a record and a mask; see `core().cut`."""

_ALIGNMENT = 64


def cut_loaded(data: BytesArray, offsets: Int64Array, length: int, out: BytesArray, *fields: Any) -> int:
    """Fill `out` with columns of rows of `length` bytes at `offsets` of plain memory; see `Cut`."""
    function: Any = core().cut
    return function(out, data, offsets, length, *fields, -1)


class RowLayout:
    """The places of fields in rows of `length` bytes: name -> (start, dtype, shape of a value).

    With a record and a mask, all rows must equal `first` in the bits of `mask`, both of `length` bytes.
    """

    __slots__ = ("_first", "_groups", "_lengths", "_mask", "_names", "_order", "_planned", "_starts", "length")

    def __init__(
        self,
        length: int,
        fields: Mapping[str, tuple[int, np.dtype[Any], tuple[int, ...]]],
        first: bytes | None = None,
        mask: BytesArray | None = None,
    ) -> None:
        self.length: int = length
        self._names = tuple(fields)
        self._first, self._mask = first, mask
        groups: dict[tuple[np.dtype[Any], tuple[int, ...]], list[str]] = {}
        for name, (_, dtype, shape) in fields.items():
            groups.setdefault((dtype, shape), []).append(name)
        sizes = {kind: kind[0].itemsize * int(np.prod(kind[1], dtype=np.int64)) for kind in groups}
        self._groups = [(len(names), *kind, sizes[kind]) for kind, names in groups.items()]
        grouped = [name for names in groups.values() for name in names]
        places = {name: place for place, name in enumerate(grouped)}
        self._order = [places[name] for name in self._names]
        self._starts = np.array([fields[name][0] for name in grouped], np.int64)
        self._lengths = np.repeat([size for *_, size in self._groups], [count for count, *_ in self._groups])
        self._planned = self._plan(0)  # of the last batch: most have as many rows

    def columns(self, rows: int, cut: Cut) -> dict[str, Array] | None:
        """Return the fields of rows, arrays of (rows, *shape) in one block; None if a row is not as it must be."""
        planned = self._planned
        if planned[0] != rows:
            planned = self._planned = self._plan(rows)
        _, edges, joined = planned
        block = pooled_empty((edges[-1],), np.uint8)
        if cut(block, self._starts, self._lengths, joined, self._first, self._mask) >= 0:
            return None
        found: list[Array] = []
        for (count, dtype, shape, _), start, stop in zip(self._groups, edges[1::2], edges[2::2], strict=True):
            found.extend(block[start:stop].view(dtype).reshape(count, rows, *shape))
        return dict(zip(self._names, map(found.__getitem__, self._order), strict=True))

    def _plan(self, rows: int) -> tuple[int, list[int], Int64Array]:
        """Return the rows, start and end of each group in the block, and the offset of each field there."""
        edges, targets = [0], [self._starts[:0]]
        for count, _, _, size in self._groups:
            start = -(-edges[-1] // _ALIGNMENT) * _ALIGNMENT
            edges += [start, start + count * rows * size]
            targets.append(start + np.arange(count) * (rows * size))
        return rows, edges, np.concatenate(targets)


@dataclass(frozen=True, slots=True)
class Runs:
    """Ranges of a file merged into ascending runs, (runs,) int64, with `positions` in one buffer, (ranges,) int64."""

    starts: Int64Array
    stops: Int64Array
    positions: Int64Array


def merge_ranges(offsets: Int64Array, lengths: Int64Array | int, gap: int) -> Runs:
    """Merge ranges, (n,) int64 in bytes, n > 0, in any order, that overlap or are at most `gap` bytes apart."""
    order = np.argsort(offsets, kind="stable")
    starts = offsets[order]
    ends = np.maximum.accumulate((offsets + lengths)[order])
    first = np.concatenate(([True], starts[1:] > ends[:-1] + gap))
    heads = np.flatnonzero(first)
    run_starts, run_stops = starts[heads], ends[np.append(heads[1:], len(starts)) - 1]
    # From an offset in the file to one in the buffer.
    shifts = run_starts - np.concatenate(([0], np.cumsum(run_stops - run_starts)[:-1]))
    positions = np.empty(len(offsets), np.int64)
    positions[order] = starts - shifts[np.cumsum(first) - 1]
    return Runs(run_starts, run_stops, positions)


_reading_tables: ContextVar["reading_tables | None"] = ContextVar("reading_tables", default=None)


class reading_tables:  # a context manager; see `file_errors`
    """Mark reads of this thread as reads of tables, for which no whole shard is downloaded.

    With `whole`, both ends or all bytes are read next, so the first read loads a small local file until the block ends.
    """

    __slots__ = ("_token", "loaded")

    def __init__(self, *, whole: bool = False) -> None:
        self.loaded: list[Callable[[], None]] | None = [] if whole else None  # what forgets each file

    def __enter__(self) -> None:
        self._token = _reading_tables.set(self if self.loaded is not None else _reading_tables.get() or self)

    def __exit__(self, *_: object) -> None:
        _reading_tables.reset(self._token)
        for forget in self.loaded or ():
            forget()


def is_reading_tables() -> bool:
    return _reading_tables.get() is not None


def loaded_files() -> list[Callable[[], None]] | None:
    """Return what forgets the files that this thread has loaded; None if it loads none. See `reading_tables`."""
    now = _reading_tables.get()
    return None if now is None else now.loaded


class RecordFile(ABC):
    """An open file from which batches of records are copied. Thread-safe."""

    # `release` closes the file until the next read, so a process can hold more of these than it may open files. Reads
    # raise CorruptFileError for a range outside the file, and ChangedFileError if the file was written to or replaced
    # since.

    path: str
    size: int  # when the file was opened
    may_be_written: bool = False  # by others; then the format's reader checks what matters

    def read(self, offset: int, length: int) -> bytes:
        return self.copies(np.array([offset]), np.array([length]))[0]

    def gather(self, offsets: Int64Array, length: int) -> Array:
        """Copy records of `length` bytes at `offsets`, (rows,) int64, to a new (rows, length) uint8."""
        return self.gather_every(0, 1, length, offsets)

    def gather_every(self, start: int, stride: int, length: int, indices: Int64Array) -> Array:
        """Copy records `indices`, (rows,) int64, `stride` bytes apart, to a new (rows, length) uint8."""
        out = pooled_empty((len(indices), length), np.uint8)
        self._gather(out, start, stride, length, indices)
        return out

    def gather_columns(self, offsets: Int64Array, starts: Int64Array, length: int) -> Array:
        """Copy values of `length` bytes, `starts` after each of `offsets`, to a new (starts, offsets, length) uint8."""
        return self.gather((starts[:, None] + offsets).ravel(), length).reshape(len(starts), len(offsets), length)

    def gather_ranges(self, offsets: Int64Array, lengths: Int64Array) -> BytesColumn:
        """Copy ranges, (rows,) int64 offsets and lengths in bytes, into one block of memory."""
        ends = np.cumsum(lengths)
        # Negative lengths are refused where the ranges are checked.
        arena = pooled_empty((max(0, int(ends[-1])) if len(ends) else 0,), np.uint8)
        self._gather_ranges(arena, offsets, lengths)
        return BytesColumn.packed(arena, ends)

    def cut(self, offsets: Int64Array, layout: RowLayout) -> dict[str, Array] | None:
        """Copy the fields of rows at `offsets`, (rows,) int64; see `RowLayout.columns`."""
        return layout.columns(len(offsets), partial(self._cut, offsets, layout.length))

    def is_written(self) -> bool:
        """Return whether the file was written to since it was opened; objects never are."""
        return False

    @abstractmethod
    def copies(self, offsets: Int64Array, lengths: Int64Array) -> list[bytes]:
        """Return ranges, (rows,) int64 offsets and lengths in bytes, as bytes objects."""

    @abstractmethod
    def _gather(self, out: Array, start: int, stride: int, length: int, indices: Int64Array) -> None:
        """Fill `out` as `gather_every` does."""

    @abstractmethod
    def _gather_ranges(self, out: Array, offsets: Int64Array, lengths: Int64Array) -> None:
        """Fill `out` with ranges, one after another."""

    def _cut(self, offsets: Int64Array, length: int, out: BytesArray, *fields: Any) -> int:
        """Fill `out` as `core().cut` does."""
        rows = self.gather(offsets, length)
        return cut_loaded(rows, np.arange(len(offsets)) * length, length, out, *fields)

    @abstractmethod
    def release(self) -> None:
        """Close the file once no running read uses it."""

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.path}: an open file belongs to its process and cannot be pickled")


class MergedReads(RecordFile):
    """A file read in few calls: ranges up to `gap` bytes apart are read together, which is faster."""

    gap: int

    def copies(self, offsets: Int64Array, lengths: Int64Array) -> list[bytes]:
        if not len(offsets):
            return []
        data, positions = self._load(offsets, lengths)
        return core().copies(data, positions, lengths, -1)

    def _gather(self, out: Array, start: int, stride: int, length: int, indices: Int64Array) -> None:
        if len(indices):
            data, positions = self._load(start + indices * stride, length)
            core().gather(out, data, 0, 1, positions, length, -1)

    def _gather_ranges(self, out: Array, offsets: Int64Array, lengths: Int64Array) -> None:
        if len(offsets):
            data, positions = self._load(offsets, lengths)
            core().gather_ranges(out, data, positions, lengths, -1)

    def _load(self, offsets: Int64Array, lengths: Int64Array | int) -> tuple[BytesArray, Int64Array]:
        """Read ranges, at least one, into one buffer; return it with the offset of each range."""
        inside = (offsets >= 0) & (np.asarray(lengths) >= 0) & (offsets <= self.size) & (lengths <= self.size - offsets)
        if not inside.all():
            row = int(np.argmin(inside))
            raise outside_error(self.path, self.size, f"row {row}: a range outside the {self.size} bytes")
        runs = merge_ranges(offsets, lengths, self.gap)
        buffer = pooled_empty((int((runs.stops - runs.starts).sum()),), np.uint8)
        self._fill(buffer, runs)
        return buffer, runs.positions

    @abstractmethod
    def _fill(self, buffer: BytesArray, runs: Runs) -> None:
        """Read runs, all inside the file, one after another into `buffer`."""
