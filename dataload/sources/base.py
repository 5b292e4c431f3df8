"""The base class of sources: sequence behaviour, index checks and batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, Self, SupportsIndex, TypeVar, overload

import numpy as np

from dataload._util.fingerprint import digest
from dataload._util.habits import SaysInstead
from dataload._util.html import html_of_source
from dataload._util.indexing import as_indices, check_index
from dataload._util.randomness import check_seed
from dataload._util.settings import check_fields
from dataload.catalog.fields import select_fields
from dataload.collate import default_collate
from dataload.executors import ExecutorName
from dataload.sources.shards import Location, shard_of
from dataload.sources.views.select import Filter, Predicate, Rule, Share, run_filter
from dataload.storage import Remote
from dataload.storage.remote.traffic import Traffic
from dataload.types import AheadReader, Batch, FieldSpec, Int64Array, ReadsAhead, StepsAhead

T_co = TypeVar("T_co", covariant=True)

_ITERATION_BLOCK = 256


class Source(SaysInstead, ABC, Generic[T_co]):
    """A sequence of records.

    A backend implements `__len__` and `_read`, and `_read_columns` if it can build columns without collating records.
    All reads may be called from several threads at once. Returned values belong to the caller: they stay valid after
    later reads and after `close`, and writing to them changes no file.
    """

    _habits = "source"

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of records, which never changes."""

    @abstractmethod
    def _read(self, indices: Int64Array) -> list[T_co]:
        """Return the records at `indices`, (rows,) int64, which have been checked to be in [0, len)."""

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        """Return columns of the records at `indices`; `fields` None means all."""
        records: list[Any] = self._read(indices)
        if fields is not None:
            records = [select_fields(record, fields) for record in records]
        return default_collate(records)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Specifications by field name; empty if records are plain bytes."""
        return {}

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of records per shard, in index order."""
        return (len(self),)

    def locate(self, index: SupportsIndex, /) -> Location:
        """Return the location of the record at `index`, without reading the record, which may be damaged.

        Raises:
            IndexError: The index is outside [-len, len).
            ClosedSourceError: `close` was called.
        """
        return self._locate(check_index(index, len(self)))

    def _locate(self, index: int) -> Location:
        """See `locate`; `index` is in [0, len)."""
        lengths = self.shard_lengths
        shard, record = shard_of(np.cumsum(lengths), index)
        return Location(f"shard {shard}" if len(lengths) > 1 else None, record, None)

    @property
    def reads_in_order(self) -> bool:
        """Whether reading in index order is so much faster that a shuffle should stay close to it.

        This is a property of the data, not of the machine, because the default order depends on it.
        """
        return False

    def _check_files(self) -> None:
        """Raise ChangedFileError if a mapped file was overwritten in place since it was opened."""

    def _traffics(self) -> Sequence[Traffic]:
        """Return what counts the downloads of this source in this process; nothing if no data are remote."""
        return ()

    def _files(self) -> Sequence[tuple[str, Remote | None]]:
        """Return the files that hold the records, with the settings for URLs; none if they are elsewhere, too."""
        return ()

    def _repr_html_(self) -> str | None:
        return html_of_source(self)

    @abstractmethod
    def fingerprint(self) -> str:
        """Return an identifier of the content: equal for a copy elsewhere, different for other data.

        Returns:
            32 hexadecimal digits.
        """

    @overload
    def __getitem__(self, index: slice, /) -> Source[T_co]: ...
    @overload
    def __getitem__(self, index: SupportsIndex, /) -> T_co: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> T_co | Source[T_co]:
        """Return one record, or for a slice a source that reads its records lazily.

        Raises:
            IndexError: The index is outside [-len, len).
        """
        if isinstance(index, slice):
            return SliceSource(self, range(len(self))[index])
        return self._read(np.array([check_index(index, len(self))], np.int64))[0]

    def __getitems__(self, indices: Any, /) -> list[T_co]:
        """Return records in the requested order, like `read`; torch's fetcher calls this name."""
        rows = as_indices(indices, len(self))
        return self._read(rows) if rows.size else []

    def read(self, indices: Any) -> list[T_co]:
        """Return records in the requested order.

        Args:
            indices: Integers in any order, duplicates allowed; negative ones count from the end.

        Raises:
            IndexError: An index is out of range; no partial result is returned.
            CorruptFileError: A record contradicts its format.
            ChangedFileError: A file was written to since it was opened.
            ClosedSourceError: `close` was called.
        """
        return self.__getitems__(indices)

    def read_batch(self, indices: Any, fields: Sequence[str] | None = None) -> Batch:
        """Return columns: equal to ``default_collate(read(indices))``, but much faster.

        Args:
            indices: See `read`.
            fields: Names of the fields to read; None means all.

        Returns:
            Arrays of shape ``(rows, *shape)``, or lists of bytes or text, by field name; ``{}`` for no indices.

        Raises:
            ConfigError: A field is unknown, or shapes differ from record to record.
        """
        rows, names = as_indices(indices, len(self)), check_fields(fields)
        return self._read_columns(rows, names) if rows.size else {}

    def __iter__(self) -> Iterator[T_co]:
        """Iterate over all records in index order, reading them in blocks."""
        for start in range(0, len(self), _ITERATION_BLOCK):
            yield from self._read(np.arange(start, min(start + _ITERATION_BLOCK, len(self)), dtype=np.int64))

    def filter(
        self,
        predicate: Predicate,
        *,
        fields: Sequence[str] | None = None,
        num_workers: int | Literal["auto"] = "auto",
        executor: ExecutorName = "threads",
        progress: Callable[[int, int], None] | None = None,
    ) -> Source[T_co]:
        """Return a source of the records for which `predicate` is true, in index order.

        All records are read once, now. For data in files, the result is kept, and found again while the data, the code
        of the predicate, and all that the code refers to are the same. A predicate must depend on the record alone.

        Args:
            predicate: A function of a record that returns True or False.
            fields: Names of the fields that the predicate needs, for which only these are read; None means all.
            num_workers: Workers that ask the predicate; ``"auto"`` means one per CPU, 0 none but this thread.
            executor: ``"threads"``; or ``"processes"``, for a predicate that holds the GIL. A predicate that is not at
                the top level of a module needs cloudpickle there.
            progress: Called with (records done, total records). By default a terminal shows them.

        Raises:
            ConfigError: A field is unknown, the predicate returned something else, or a setting is unknown.

        Examples:
            >>> from dataload import RangeSource
            >>> [record["index"] for record in RangeSource(10).filter(lambda record: record["index"] % 3 == 0)]
            [0, 3, 6, 9]
        """
        work = Filter(self, predicate, check_fields(fields))
        rule = run_filter(work, self._files(), num_workers=num_workers, executor=executor, progress=progress)
        return SelectionSource(self, rule)

    def split(self, share: float, *, seed: int = 0) -> tuple[Source[T_co], Source[T_co]]:
        """Return two sources: one with about `share` of the records, and one with the others, for held-out data.

        The side of a record is a hash of the seed and its index. So it stays the same when records are appended, and
        sizes are close to `share`, not exact: for n records, usually within 1 / sqrt(n) of it.

        Raises:
            ConfigError: `share` is not between 0 and 1, or the seed is not an integer.

        Examples:
            >>> from dataload import RangeSource
            >>> train, held_out = RangeSource(1000).split(0.9, seed=0)
            >>> len(train), len(held_out)
            (896, 104)
        """
        seed = check_seed(seed)
        return SelectionSource(self, Share(share, seed, True)), SelectionSource(self, Share(share, seed, False))

    def close(self) -> None:
        """Release files; later reads raise `ClosedSourceError`. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ViewSource(Source[T_co]):
    """The base class of sources made of other sources, `_parents`, at least one."""

    _parents: tuple[Source[Any], ...]

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Fields of the first parent."""
        return self._parents[0].fields

    @property
    def reads_in_order(self) -> bool:
        """See `Source.reads_in_order`: whether it is true of any parent."""
        return any(parent.reads_in_order for parent in self._parents)

    def _check_files(self) -> None:
        for parent in self._parents:
            parent._check_files()

    def _traffics(self) -> Sequence[Traffic]:
        # Parents may share one.
        return [*{id(each): each for parent in self._parents for each in parent._traffics()}.values()]

    def _files(self) -> Sequence[tuple[str, Remote | None]]:
        files = [parent._files() for parent in self._parents]
        return [file for some in files for file in some] if all(files) else ()

    def close(self) -> None:
        """Close the parents too, because the user may only have this source."""
        for parent in self._parents:
            parent.close()


class SubsetSource(ViewSource[T_co]):
    """Some of the records of another source."""

    def __init__(self, parent: Source[T_co]) -> None:
        self._parents = (parent,)
        self._parent = parent

    @property
    def parent(self) -> Source[T_co]:
        """The source that this is a subset of."""
        return self._parent

    @property
    def indices(self) -> Int64Array:
        """(records,) int64, the indices in the parent."""
        return self._map(np.arange(len(self)))

    @abstractmethod
    def _map(self, indices: Int64Array) -> Int64Array:
        """Return the parent's indices."""

    def _read(self, indices: Int64Array) -> list[T_co]:
        return self._parent._read(self._map(indices))

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        return self._parent._read_columns(self._map(indices), fields)

    def _locate(self, index: int) -> Location:
        return self._parent._locate(int(self._map(np.array([index], np.int64))[0]))

    def read_ahead(
        self, steps: Iterator[StepsAhead], fields: Sequence[str] | None, *, here: bool, share: float = 1.0
    ) -> AheadReader | None:
        if not isinstance(self._parent, ReadsAhead):
            return None
        mapped = (replace(block, indices=self._map(block.indices)) for block in steps)
        return self._parent.read_ahead(mapped, fields, here=here, share=share)


class SliceSource(SubsetSource[T_co]):
    """A slice of another source, which stores neither records nor indices."""

    def __init__(self, parent: Source[T_co], span: range) -> None:
        super().__init__(parent)
        self._span = span

    def __len__(self) -> int:
        return len(self._span)

    def _map(self, indices: Int64Array) -> Int64Array:
        return indices * self._span.step + self._span.start

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of records that each of the parent's shards has in the slice; one shard unless the step is 1."""
        if self._span.step != 1 or not self._span:
            return (len(self),)
        ends = np.cumsum(self._parent.shard_lengths)
        inside = np.diff(np.clip(ends, self._span.start, self._span.stop), prepend=self._span.start)
        return tuple(n for n in inside.tolist() if n) or (0,)

    def fingerprint(self) -> str:
        return digest("slice", self._parent.fingerprint(), self._span.start, self._span.stop, self._span.step)

    def __repr__(self) -> str:
        s = self._span
        return f"{self._parent!r}[{s.start}:{s.stop}{f':{s.step}' if s.step != 1 else ''}]"


class SelectionSource(SubsetSource[T_co]):
    """The records of another source that a rule selects; see `Source.filter` and `Source.split`."""

    def __init__(self, parent: Source[T_co], rule: Rule) -> None:
        super().__init__(parent)
        self._rule = rule
        self._indices = rule.indices(len(parent))

    def __reduce__(self) -> Any:
        return type(self), (self._parent, self._rule)

    def __len__(self) -> int:
        return len(self._indices)

    def _map(self, indices: Int64Array) -> Int64Array:
        return self._indices[indices]

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of selected records in each of the parent's shards, without those that have none."""
        ends = np.searchsorted(self._indices, np.cumsum(self._parent.shard_lengths))
        return tuple(n for n in np.diff(ends, prepend=0).tolist() if n) or (0,)

    def fingerprint(self) -> str:
        return digest("selection", self._parent.fingerprint(), self._rule.identity)

    def __repr__(self) -> str:
        return f"SelectionSource({self._parent!r}, {len(self)} records)"


def traffics_of(source: Any) -> Sequence[Traffic]:
    """Return what counts the downloads of any source in this process; nothing if no data are remote."""
    return source._traffics() if isinstance(source, Source) else ()  # pyright: ignore[reportPrivateUsage] # for sources


def check_files(source: Any) -> None:
    """Raise ChangedFileError if a mapped file of any source was overwritten in place since it was opened."""
    if isinstance(source, Source):
        source._check_files()  # pyright: ignore[reportPrivateUsage] # for sources
