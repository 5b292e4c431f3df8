"""Decoded columns of blocks, which are row groups or batches, and records gathered from many blocks at once."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import ref

import numpy as np

from dataload._util.arrays import Claims, pooled_empty
from dataload._util.caches import DecodedCache
from dataload._util.clock import decoding
from dataload._util.system import usable_cpus
from dataload._util.threads import DaemonThreads
from dataload.codecs import arrow
from dataload.codecs.arrow import ColumnContext, is_bytes, is_text, pa_module
from dataload.codecs.expansion import Sizes, check_views, expansion, least_bytes
from dataload.codecs.nulls import Fill, fill_nulls
from dataload.collate import scatter_columns
from dataload.sources.directory import WITHIN, ShardDirectory, ShardNumbers
from dataload.storage.core import PLACE_BITS, core
from dataload.storage.record_file import RowLayout
from dataload.types import Array, BytesArray, BytesColumn, Int64Array

T = TypeVar("T")

_ZERO = np.zeros(1, np.int64)
_MOST_FORMS = 100  # of a column in the blocks of a data set
_SLOW_SECONDS = 0.002  # to decode a block; if it takes longer, others are decoded in threads
_FEWEST_IN_THREADS = 3  # blocks
_TOUCHED = 8  # blocks of a read, at most, whose place among those used last is renewed


class Form(NamedTuple):
    """The kind of values in a column. Columns of one form are gathered together."""

    kind: str  # "numbers", "bytes" or "text"; "" for others
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    shape: tuple[int, ...] = ()


class Column:
    """A column of a block in the form that is fastest to read.

    `array` has the values, which expand to `sizes` bytes; of bytes and text, `ends` are offsets, (records + 1,) int64.
    """

    __slots__ = ("__weakref__", "array", "ends", "form", "nulls", "sizes")

    def __init__(self, form: Form, array: Any, sizes: Sizes, ends: Int64Array | None = None) -> None:
        self.nulls: Any = None  # (records,) bool, where nulls have been filled
        self.form: Form = form
        self.array: Any = array
        self.sizes: Sizes = sizes
        self.ends: Int64Array | None = ends

    @classmethod
    def of(cls, array: Any, fill: Fill | None, limit: int, what: str, path: str) -> Column:
        """Return a column of an array of pyarrow, whose views may expand to `limit` bytes, with nulls filled."""
        array, nulls = arrow.combined(array), None
        check_views(array, limit, what, path)
        sizes = expansion(array)
        if fill is not None:
            array, nulls = fill_nulls(array, fill)
        found = cls._of(arrow.prepare(array), sizes)
        found.nulls = nulls
        return found

    @classmethod
    def _of(cls, prepared: Any, sizes: Sizes) -> Column:
        if isinstance(prepared, np.ndarray):
            return cls.of_numbers(prepared, sizes)
        kind, types = prepared.type, pa_module().types
        if prepared.null_count or not (is_text(kind) or is_bytes(kind)) or types.is_fixed_size_binary(kind):
            return cls(Form(""), prepared, sizes)
        (data,), _, starts, stops = arrow.to_column(prepared.cast(pa_module().large_binary()), "").parts()
        return cls(Form("text" if is_text(kind) else "bytes"), data, least_bytes(kind), np.append(starts, stops[-1:]))

    @classmethod
    def of_numbers(cls, array: Array, sizes: Sizes) -> Column:
        return cls(Form("numbers", array.dtype, array.shape[1:]), array, sizes)

    def __len__(self) -> int:
        return len(self.array) if self.ends is None else len(self.ends) - 1

    @property
    def nbytes(self) -> int:
        if self.form.kind == "":  # pyarrow crashes in `nbytes` of some unions
            return self.array.get_total_buffer_size()
        return self.array.nbytes + (0 if self.ends is None else self.ends.nbytes)

    def pick(self, local: Int64Array, rows: Int64Array, name: str, claims: Claims, shape: Any) -> Any:
        """Return records `local`, which are the `rows` of the request; `shape` is the known one of a list of lists."""
        if self.ends is not None:
            starts = self.ends[local]
            lengths = self.ends[local + 1] - starts
            claims.add_to(rows, lengths + self.sizes)
            ends, arena = _room(lengths)
            core().gather_ranges(arena, self.array, starts, lengths, -1)
            return _packed(self.form, arena, ends, name, _where(claims, rows))
        claims.add_to(rows, self.sizes if isinstance(self.sizes, int) else self.sizes[local])
        return arrow.pick(self.array, name, local, _where(claims, rows), shape)


def _where(claims: Claims, rows: Int64Array | None) -> ColumnContext:
    return ColumnContext(claims.path, claims.indices if rows is None else claims.indices[rows])


def _room(lengths: Int64Array) -> tuple[Int64Array, BytesArray]:
    """Return the ends of values of these lengths, after a zero, and memory for all."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends, pooled_empty((int(ends[-1]),), np.uint8)


def _packed(form: Form, arena: BytesArray, ends: Int64Array, name: str, where: ColumnContext) -> Any:
    """Return values of bytes or text, one after another, as a column."""
    column = BytesColumn.packed(arena, ends[1:])
    return column if form.kind == "bytes" else arrow.as_text(column, name, where)


_Where: TypeAlias = tuple[Int64Array, Int64Array, Int64Array | None]
"""Blocks of records, their rows there, and in the request; None for all. Each is (rows,) int64."""


class _Kept:
    """A column of many blocks, each as long as its `Column` is alive."""

    def __init__(self, blocks: int) -> None:
        self.forms: list[tuple[Form, int]] = []  # and what each value expands to, besides its bytes
        self.form_of: Array = np.zeros(blocks, np.int8)  # 1 + the number of its form; 0: it is not kept
        self._data, self._ends = core().Maps(blocks), core().Maps(blocks)
        self._refs: dict[int, Any] = {}

    def grown(self, blocks: int) -> _Kept:
        """Return the same with room for so many blocks."""
        found = _Kept(blocks)
        for block, known in [*self._refs.items()]:
            if (column := known()) is not None:
                found.keep(block, column)
        return found

    def keep(self, block: int, column: Column) -> None:
        """Note a column of a block."""
        if column.form.kind == "" or not isinstance(column.sizes, int):
            return
        known = column.form, column.sizes
        if known not in self.forms:
            if len(self.forms) == _MOST_FORMS:
                return
            self.forms.append(known)
        is_time = column.array.dtype.kind in "mM"  # numpy gives no buffer of times
        self._data.put_memory(block, column.array.view(np.int64) if is_time else column.array)
        if column.ends is not None:
            self._ends.put_memory(block, column.ends)
        self._refs[block] = ref(column, partial(_forget, ref(self), block))
        self.form_of[block] = 1 + self.forms.index(known)

    def forget(self, block: int, gone: Any) -> None:
        """Forget a column that is gone, unless there is another one by now."""
        if self._refs.get(block) is gone:
            self.form_of[block] = 0
            self._data.drop(block)
            self._ends.drop(block)
            del self._refs[block]

    def gather(self, number: int, where: _Where, name: Any, claims: Claims, layout: RowLayout | None) -> Any:
        """Return records of the form `number`, or their columns by a layout; a LookupError if one was forgotten."""
        blocks, local, rows = where
        claim = claims.add if rows is None else partial(claims.add_to, rows)
        form, sizes = self.forms[number]
        places = blocks << PLACE_BITS
        if form.kind == "numbers":
            claim(sizes)
            nbytes = form.dtype.itemsize * math.prod(form.shape)
            places += local * nbytes
            if rows is None and isinstance(name, tuple) and layout is not None:
                return layout.columns(len(local), partial(self._cut, places, nbytes))
            out = pooled_empty((len(local), nbytes), np.uint8)
            self._data.gather(out, places, nbytes)
            return out.view(form.dtype).reshape(len(local), *form.shape)
        spans = np.empty((len(local), 2), np.int64)
        self._ends.gather(spans, places + local * 8, 16)
        lengths = spans[:, 1] - spans[:, 0]
        claim(lengths + sizes)
        ends, arena = _room(lengths)
        self._data.gather_ranges(arena, places + spans[:, 0], lengths)
        return _packed(form, arena, ends, name, _where(claims, rows))

    def _cut(self, places: Int64Array, nbytes: int, out: BytesArray, *fields: Any) -> int:
        return self._data.cut(out, places, nbytes, *fields)


def _forget(kept: Callable[[], _Kept | None], block: int, gone: Any) -> None:
    if (found := kept()) is not None:
        found.forget(block, gone)


class Blocks:
    """The blocks of a file, or of many, whose records are then places; and where their columns are in memory."""

    def __init__(self, ends: Int64Array | None = None, directory: ShardDirectory | None = None) -> None:
        self._files: list[tuple[int, Any]] = []  # number of each file's first block, and its reader
        self._count = 0
        self._ends = np.empty(0, np.int64) if ends is None else ends
        self._starts = np.concatenate((_ZERO, self._ends))
        self._tables: list[ShardNumbers] = []  # of files: ends and starts of blocks, and their numbers
        if ends is not None:
            self._files, self._count = [(0, None)], len(ends)
        if directory is not None:
            self._tables = [directory.numbers(), directory.numbers(), directory.numbers()]
        self._kept: dict[Any, _Kept] = {}
        self._reads = 0

    def join(self, shard: int, reader: Any, ends: Int64Array) -> None:
        """Add a file, whose blocks end at the records `ends`, (blocks,) int64."""
        self._files.append((self._count, reader))
        self._tables[0].put(shard, ends)
        self._tables[1].put(shard, np.concatenate((_ZERO, ends[:-1])))
        self._tables[2].put_line(shard, self._count, 1, len(ends))
        self._count += len(ends)

    def locate(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the block of each record, of many files as a place, and its row there."""
        if self._tables:
            place = self._tables[0].search(indices)
            return place, (indices & WITHIN) - self._tables[1][place]
        if self._count == 1:
            return np.zeros_like(indices), indices
        block = np.searchsorted(self._ends, indices, side="right")
        return block, indices - self._starts[block]

    def _find(self, block: int) -> tuple[Any, int]:
        """Return the reader of a block, None for the only one, and its number there."""
        first, reader = self._files[bisect_right(self._files, block, key=itemgetter(0)) - 1]
        return reader, block - first

    def _column(self, name: Any) -> _Kept:
        """Return a column of all blocks."""
        found = self._kept.get(name)
        if found is None:
            found = self._kept[name] = _Kept(self._count)
        elif len(found.form_of) < self._count:  # files that are opened when they are read come one by one
            found = self._kept[name] = found.grown(max(self._count, 2 * len(found.form_of)))
        return found

    def read(
        self,
        reader: Any,
        cache: DecodedCache,
        names: Sequence[Any],
        indices: Int64Array,
        claims: Claims,
        shapes: Mapping[str, tuple[int, ...]],
        layout: RowLayout | None = None,
    ) -> dict[Any, Any]:
        """Return columns of records by name; by a tuple of names, rows of these columns, or the columns by `layout`.

        `reader` reads one file. What is in memory is gathered at once; other blocks are decoded, several in threads.
        """
        place, local = self.locate(indices)
        block = self._tables[2][place] if self._tables else place
        kept = [self._column(name) for name in names]
        forms = [column.form_of[block] for column in kept]
        chosen = [int(form.max()) for form in forms]
        alike = [form == number for form, number in zip(forms, chosen, strict=True)]
        ready = (alike[0] if len(alike) == 1 else np.logical_and.reduce(alike)) & (min(chosen) > 0)
        rows, pieces = np.flatnonzero(ready), list[tuple[Int64Array, dict[Any, Any]]]()
        if len(rows):
            some = (block, local, None) if len(rows) == len(indices) else (block[rows], local[rows], rows)
            numbered = zip(kept, chosen, names, strict=True)
            try:
                columns = [each.gather(number - 1, some, name, claims, layout) for each, number, name in numbered]
                found = dict(zip(names, columns, strict=True))
                self._touch(reader, cache, names, some[0])
                if some[2] is None:
                    return found
                pieces.append((rows, found))
            except LookupError:  # another thread needed the memory
                claims = Claims(indices, claims.limit, claims.path)
                ready[:] = False
                for column in kept:
                    column.form_of[block] = 0

        def load(number: int) -> tuple[Int64Array, dict[Any, Any]]:
            found: dict[Any, Any] = {}
            rows = np.flatnonzero(~ready & (block == number))

            def use(name: Any, column: Column) -> None:
                self._column(name).keep(number, column)
                found[name] = column.pick(local[rows], rows, name, claims, shapes.get(name))

            owner, own = self._find(number)
            (owner or reader).load(own, names, int(indices[rows[0]]), cache, use)
            return rows, found

        pieces += _in_threads(load, np.unique(block[~ready]).tolist())
        return pieces[0][1] if len(pieces) == 1 else scatter_columns(pieces, len(indices))

    def _touch(self, reader: Any, cache: DecodedCache, names: Sequence[Any], blocks: Int64Array) -> None:
        """Note that blocks, (rows,) int64, are used; of many, a sample that varies."""
        self._reads += 1
        each = -(-len(blocks) // _TOUCHED)
        for owner, block in map(self._find, set(blocks[self._reads % each :: each].tolist()) if each else ()):
            cache.touch([((owner or reader)._path, block, name) for name in names])


def _in_threads(load: Callable[[int], T], blocks: Sequence[int]) -> Iterator[T]:
    """Yield what `load` makes of blocks, in threads if the first one takes long."""
    begun = perf_counter()
    yield from map(load, blocks[:1])
    if len(blocks) < _FEWEST_IN_THREADS or perf_counter() - begun < _SLOW_SECONDS:
        yield from map(load, blocks[1:])
        return
    with DaemonThreads(min(usable_cpus(), len(blocks) - 1)) as pool, decoding():
        yield from pool.map(load, blocks[1:])
