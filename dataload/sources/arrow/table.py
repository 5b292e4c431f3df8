"""The base of all sources of tables, which keeps decoded groups of records."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Self, cast

import numpy as np

from dataload._util.arrays import Claims, split_records
from dataload._util.caches import DecodedCache
from dataload._util.clock import decoding
from dataload._util.system import usable_cpus
from dataload._util.threads import DaemonThreads
from dataload.catalog.facts import require_known
from dataload.codecs import arrow
from dataload.codecs.arrow import REMEDIES, ColumnContext, load_arrow, pa_module
from dataload.codecs.decoders import Decoder
from dataload.codecs.nulls import Fill, fill_nulls, with_masks
from dataload.errors import CorruptFileError, DataloadError, UnsupportedFormatError
from dataload.sources.arrow import TableOptions
from dataload.sources.arrow.blocks import Blocks, Column, Form
from dataload.sources.arrow.columns import UNKNOWN, classes_in, facts_of, merged_classes, numbered, value_set
from dataload.sources.directory import ShardDirectory
from dataload.sources.encoded import decoded, located
from dataload.sources.expression import Expression
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ShardReader
from dataload.storage import RecordFile, is_url
from dataload.storage.errors import system_error
from dataload.storage.record_file import RowLayout, cut_loaded
from dataload.types import Array, Batch, FieldSpec, Int64Array, Record

_MANY_COLUMNS = 32
"""Columns that are handled together, because each by itself costs more than its values."""

_SHARE = 4  # of the cache, at least, for groups that are kept row by row


class TableSource(FileSource[Record]):
    """The base class of sources of tables; see `dataload.codecs.arrow` for the values."""

    def _prepare(self) -> None:
        self._cache = DecodedCache(min(self.options.cached_bytes, self.options.max_record_bytes))
        self._found: dict[str, Sequence[Any]] = {}  # classes, by the field whose values they are

    def _with_classes(self, reader: TableReader) -> TableReader:
        """Return a reader that numbers categories as this source does."""
        reader.use_classes(self._found)
        return reader

    def _use_classes(self, readers: Sequence[TableReader]) -> None:
        """Find the classes of categories whose classes are not given, in all files, and tell the readers."""
        names = {name: None for reader in readers for name in reader.categories}
        groups = [(reader, group) for reader in readers for group in range(len(reader.group_lengths))]
        with DaemonThreads(usable_cpus()) as pool:
            for name in names:
                parts = [pool.submit(reader.classes_in, group, name) for reader, group in groups]
                found, in_order = [part.result() for part in parts], any(each.is_dictionary(name) for each in readers)
                self._found[name] = merged_classes(found, in_order=in_order)
        for reader in readers:
            reader.use_classes(self._found)

    def _wanted(self, known: Mapping[str, FieldSpec]) -> tuple[str, ...] | None:
        return with_masks(self._selected, known, self.options.nulls)

    def _known_fields(
        self, readers: Sequence[ShardReader[Record]], fields: Sequence[Mapping[str, FieldSpec]]
    ) -> Mapping[str, FieldSpec]:
        several = [cast("TableReader", reader) for reader in readers]
        if not self._found and any(reader.categories for reader in several):
            self._use_classes(several)
            fields = [reader.fields for reader in several]
        known = super()._known_fields(readers, fields)
        names = known if self._selected is None else self._selected
        for reader in several:
            reader.check_readable(names)
        counts = Counter[str]()
        for reader in several if self.options.nulls is None else ():
            counts.update(reader.null_counts())
        if found := ", ".join(f"{counts[name]:,} of {name!r}" for name in names if counts[name]):
            message = f"{self!r} has nulls ({found}) in {sum(map(len, readers)):,} records, and reading one is an error"
            warnings.warn(f"{message}: {REMEDIES}", stacklevel=2)
        return known

    def _matches(self, condition: Expression, indices: Int64Array | None) -> Int64Array:
        """See `Source._matches`: row groups and batches at the same time, those that have some of the records."""
        readers = [cast("TableReader", reader) for reader in self._readers()]
        groups = [(reader, group) for reader in readers for group in range(len(reader.group_lengths))]
        ends = np.cumsum([length for reader in readers for length in reader.group_lengths], dtype=np.int64)
        wanted = np.arange(len(groups)) if indices is None else np.unique(np.searchsorted(ends, indices, side="right"))

        def match(number: int) -> Int64Array:
            reader, group = groups[number]
            found = reader.matches(group, condition)
            return np.flatnonzero(found) + (ends[number] - len(found))

        with DaemonThreads(min(usable_cpus(), len(wanted))) as pool:
            chosen = np.concatenate([np.empty(0, np.int64), *pool.map(match, wanted.tolist())])
        return chosen if indices is None else np.flatnonzero(np.isin(indices, chosen))

    def close(self) -> None:
        super().close()
        self._cache.clear()


class _ApartError(Exception):
    """Columns of a block cannot be kept row by row: they take too much, or one has nulls."""


class TableReader(ShardReader[Record]):
    """A table in a file; `ends` is (groups,) int64, the cumulative number of records of its row groups or batches."""

    whole = True

    _schema: Any  # these are equal for all files of one schema: see `facts_of`
    _numbers: dict[str, int]
    _scalars: dict[str, np.dtype[Any]]  # columns of single numbers
    _shapes: dict[str, tuple[int, ...]]
    _decoders: dict[str, Decoder]
    _fills: dict[str, Fill]
    _bases: dict[str, str]  # the columns whose nulls a field of masks shows
    _fields: dict[str, FieldSpec]
    _unreadable: dict[str, str]  # columns of types that cannot be read, and why
    _numbered: frozenset[str]  # categories
    _classes: dict[str, Any]  # the values of categories
    categories: list[str]  # those whose classes have to be found
    _kind: Any

    def __init__(
        self,
        path: str,
        schema: Callable[[], Any],
        ends: Int64Array,
        options: TableOptions,
        cache: DecodedCache,
        form: bytes | None = None,
    ) -> None:
        """Open a file; others whose `form` is equal have the same schema."""
        self._path, self._ends, self._cache = path, ends, cache
        self._limit: int = options.max_record_bytes
        self._most_bytes = options.cached_bytes // _SHARE
        self._planned: tuple[Sequence[str], Sequence[Any], RowLayout | None] = (), (), None  # what was read last
        self._kept_apart = False  # whether columns of single numbers are kept one by one, even if they are many

        def find() -> tuple[dict[str, Any], int]:
            return facts_of(schema(), options, path), 1

        vars(self).update(find()[0] if form is None else cache.get(("schema", form), find))

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self._ends)

    @property
    def group_lengths(self) -> list[int]:
        """Number of records in each row group or batch."""
        return np.diff(self._ends, prepend=0).tolist()

    def _length(self, group: int) -> int:
        return int(self._ends[group] - (self._ends[group - 1] if group else 0))

    def matches(self, group: int, condition: Expression) -> Array:
        """Return where the records of a group fulfil a condition, (records,) bool; nulls are null here."""
        length = self._length(group)  # an empty file may lack the columns
        if not (length and condition.may_match(partial(self._bounds, group))):
            return np.zeros(length, np.bool_)
        require_known(condition.fields, self._numbers | self._bases, self._path)
        with self._errors(group):
            return condition.matches_arrow(partial(self._raw, group))

    def _raw(self, group: int, name: str) -> Any:
        """Return a column of a group as it is stored, as an array of pyarrow."""
        if name in self._bases:
            base = self._bases[name]
            return pa_module().array(fill_nulls(self._raw(group, base), self._fills[base])[1])
        with self._opened(group, [name]) as decode:
            return decode(name)

    def _bounds(self, group: int, name: str) -> tuple[Any, Any] | None:  # noqa: ARG002 - for files that know them
        """Return the least and greatest value of a column in a group; None if they are unknown."""
        return None

    def null_counts(self) -> Mapping[str, int]:
        """Return how many nulls columns of numbers and text have, as far as that is known without reading them."""
        return {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        classes = {name: tuple(map(str, values.to_pylist())) for name, values in self._classes.items()}
        return self._fields | {name: FieldSpec("int64", (), classes.get(name, ())) for name in self._numbered}

    def check_readable(self, names: Collection[str]) -> None:
        """Raise an UnsupportedFormatError if one of the columns has a type that cannot be read."""
        for name, problem in self._unreadable.items():
            if name in names:
                message = f"{self._path}: {problem}, or leave the column out by fields="
                raise UnsupportedFormatError(message, path=self._path)

    def use_classes(self, classes: Mapping[str, Sequence[Any]]) -> None:
        """Number the values of fields by these classes."""
        self._classes |= {name: value_set(name, each, self._schema.field(name).type) for name, each in classes.items()}

    def is_dictionary(self, name: str) -> bool:
        return pa_module().types.is_dictionary(self._schema.field(name).type)

    def classes_in(self, group: int, name: str) -> Any:
        with self._errors(group):
            return classes_in(self._raw(group, name))

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        return split_records(self._columns(indices, fields), len(indices))

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        return arrow.stacked(self._columns(indices, fields))

    def _columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> dict[str, Any]:
        names = tuple(self._fields if self._bases else self._numbers) if fields is None else fields
        if fields is not None:
            require_known(names, self._numbers | self._bases, self._path)
        with self._errors():
            columns = self._pick(indices, names, Claims(indices, self._limit, self._path)) if names else {}
        for name in columns.keys() & self._numbered:
            if (unknown := columns[name] == UNKNOWN).any():
                message = f"field {name!r} has a value that is none of its {len(self._classes[name])} classes"
                raise ColumnContext(self._path, indices).error(int(np.argmax(unknown)), message)
        for name in self._decoders:
            if name in columns:
                columns[name] = self._decode_values(columns[name], self._decoders[name], name, indices)
        return columns

    def shared(self) -> tuple[RecordFile | None, Any] | None:
        return None if is_url(self._path) else (None, self._kind)

    def joined(self, directory: ShardDirectory) -> Self:
        joined = directory.copy_of(self)
        joined._blocks = Blocks(directory=directory)
        return joined

    def join(self, joined: Any, shard: int) -> None:
        joined._blocks.join(shard, self, self._ends)

    def _pick(self, indices: Int64Array, names: Sequence[str], claims: Claims) -> dict[str, Any]:
        """Return columns of records, by decoding the blocks that they are in."""
        _, keys, layout = self._plan_rows(names)
        if layout is None or self._kept_apart:
            return self._read_blocks(names, indices, claims)
        try:
            found = self._read_blocks(keys, indices, claims, layout)
        except _ApartError:
            self._kept_apart = True
            return self._read_blocks(names, indices, claims)
        columns = found.pop(keys[0])
        if not isinstance(columns, dict):
            cut = partial(cut_loaded, columns, np.arange(len(indices)) * layout.length, layout.length)
            columns = layout.columns(len(indices), cut) or {}
        return {name: columns[name] if name in columns else found[name] for name in names} if found else columns

    def _plan_rows(self, names: Sequence[str]) -> tuple[Sequence[str], Sequence[Any], RowLayout | None]:
        """Return `names`, what to read for them, and the layout of rows of single numbers; None if these are few."""
        planned = self._planned  # other threads may read other columns
        if planned[0] != names:
            chosen = tuple(name for name in names if name in self._scalars)
            starts = accumulate((self._scalars[name].itemsize for name in chosen), initial=0)
            fields = {name: (start, self._scalars[name], ()) for name, start in zip(chosen, starts, strict=False)}
            length = sum(self._scalars[name].itemsize for name in chosen)
            layout = RowLayout(length, fields) if len(chosen) >= _MANY_COLUMNS else None
            self._planned = planned = names, (chosen, *(name for name in names if name not in fields)), layout
        return planned

    def _read_blocks(
        self, names: Sequence[Any], indices: Int64Array, claims: Claims, layout: RowLayout | None = None
    ) -> dict[Any, Any]:
        return self._blocks.read(self, self._cache, names, indices, claims, self._shapes, layout)

    def load(
        self, block: int, names: Sequence[Any], index: int, cache: DecodedCache, use: Callable[[Any, Column], None]
    ) -> None:
        """Give `use` columns of a block one by one; `index` is one of its records, for messages."""
        columns = dict.fromkeys(
            self._bases.get(n, n) for each in names for n in ([each] if isinstance(each, str) else each)
        )
        with self._errors(block, index), self._opened(block, [*columns]) as decode:
            for name in names:
                use(name, self._get(decode, block, name, cache))

    def _get(self, decode: Callable[[str], Any], block: int, name: Any, cache: DecodedCache) -> Column:
        return cache.get((self._path, block, name), partial(self._load, decode, block, name, cache))

    def _load(self, decode: Callable[[str], Any], block: int, name: Any, cache: DecodedCache) -> tuple[Column, int]:
        """Return a column of a block, or rows of several columns, and its bytes."""
        count = self._length(block)
        if name in self._bases:
            column = Column.of_numbers(self._get(decode, block, self._bases[name], cache).nulls, 1)
            return column, column.nbytes
        if isinstance(name, str):
            what = f"field {name!r} of row group {block}"
            with decoding():
                array = numbered(decode(name), self._classes[name]) if name in self._classes else decode(name)
                column = Column.of(array, self._fills.get(name), self._limit, what, self._path)
            if len(column) != count:
                raise ValueError(f"{len(column)} values of {name!r} for {count} records")
            return column, column.nbytes
        length, start, claimed = sum(self._scalars[each].itemsize for each in name), 0, 0
        if count * length > self._most_bytes:
            raise _ApartError
        rows = np.empty((count, length), np.uint8)
        for each in name:
            dtype, (column, _) = self._scalars[each], self._load(decode, block, each, cache)
            if column.form != Form("numbers", dtype):
                raise _ApartError
            rows[:, start : start + dtype.itemsize].view(dtype)[:, 0] = column.array
            start, claimed = start + dtype.itemsize, claimed + int(column.sizes)
        return Column.of_numbers(rows, claimed), max(1, rows.nbytes)

    @abstractmethod
    def _opened(self, block: int, names: Sequence[str]) -> AbstractContextManager[Callable[[str], Any]]:
        """Return a function that decodes a column of a block, by its name, into an array of pyarrow."""

    @contextmanager
    def _errors(self, group: int | None = None, index: int | None = None) -> Generator[None]:
        """Translate errors about the file's content, but not errors of storage."""
        try:
            yield
        except (DataloadError, MemoryError):
            raise
        except (load_arrow("tables").ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # Arrow's own errors about content have none
                raise system_error("read", self._path, error) from error
            where = "" if group is None else f"row group {group}: "
            raise CorruptFileError(f"{where}{error}", path=self._path, index=index) from error

    def _decode_values(self, column: Any, decoder: Decoder, name: str, indices: Int64Array) -> list[Any]:
        def locate(error: Exception, row: int) -> Exception:
            return located(error, self._path, int(indices[row]), f"field {name!r}", own=decoder.own)

        return decoded(map(decoder.decode, column), len(indices), locate)
