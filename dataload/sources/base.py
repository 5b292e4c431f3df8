"""The base class of sources, which are sequences of records, and sources of some of another's records."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, SupportsIndex, TypeAlias, overload

import numpy as np

from dataload._util.fingerprint import digest
from dataload._util.indexing import check_index
from dataload._util.randomness import check_seed
from dataload._util.settings import check_count, check_fields
from dataload.errors import ConfigError
from dataload.executors import ExecutorName
from dataload.executors.base import Fleet
from dataload.sources.expression import Expression
from dataload.sources.records import Records, T_co
from dataload.sources.shards import Location
from dataload.sources.views.select import (
    Chosen,
    Filter,
    Predicate,
    Rule,
    Share,
    chosen_indices,
    match_columns,
    run_filter,
)
from dataload.sources.views.split import Division, check_shares
from dataload.storage import Remote
from dataload.storage.local.files import check_not_overwritten
from dataload.storage.remote.traffic import Traffic
from dataload.types import AheadReader, Array, Batch, FieldSpec, Int64Array, ReadsAhead, StepsAhead

Span: TypeAlias = tuple[FieldSpec, Callable[[Int64Array], Array]]
"""A field that lasts some time, and what reads it from some records on, (rows, ...)."""


class Source(Records[T_co]):
    """A sequence of records.

    A backend implements `__len__` and `_read`, and `_read_columns` if it can build columns without collating records.
    All reads may be called from several threads at once. Returned values belong to the caller: they stay valid after
    later reads and after `close`, and writing to them changes no file.
    """

    @overload
    def __getitem__(self, index: slice, /) -> Source[T_co]: ...
    @overload
    def __getitem__(self, index: SupportsIndex, /) -> T_co: ...
    @overload
    def __getitem__(self, index: Sequence[int] | Sequence[bool] | Array, /) -> Source[T_co]: ...
    def __getitem__(self, index: Any, /) -> T_co | Source[T_co]:
        """Return one record; or for a slice, a list of indices or a mask, a source that reads its records lazily.

        A mask is a list or array of True and False for all records. Indices may repeat, in any order.

        Raises:
            IndexError: An index is outside [-len, len), or a mask has another length.
        """
        if isinstance(index, slice):
            return SliceSource(self, range(len(self))[index])
        if isinstance(index, (list, range)) or (isinstance(index, np.ndarray) and index.ndim):
            return SelectionSource(self, Chosen(chosen_indices(index, len(self))))
        return self._read(np.array([check_index(index, len(self))], np.int64))[0]

    def _lasting(self, name: str, seconds: float) -> Span | None:  # noqa: ARG002 - for those that have one
        """Return how to read a field that lasts `seconds` from each record on; None if it is of a record alone."""
        return None

    def _matches(self, condition: Expression, indices: Int64Array | None) -> Int64Array:
        """Return which of `indices`, None for all, fulfil a condition: their numbers there, ascending."""
        return match_columns(lambda rows: self._read_columns(rows, condition.fields), condition, len(self), indices)

    def filter(
        self,
        predicate: Predicate | Expression,
        *,
        fields: Sequence[str] | None = None,
        num_workers: int | Literal["auto"] = "auto",
        executor: ExecutorName | Fleet = "threads",
        progress: Callable[[int, int], None] | None = None,
    ) -> Source[T_co]:
        """Return a source of the records for which `predicate` is true, in index order.

        All records are read once, now. For data in files, the result is kept, and found again while the data, the code
        of the predicate, of codecs and of decoders, and all that it refers to are the same. A predicate must depend on
        the record alone.

        A condition, such as ``dataload.field("label") == 3``, is evaluated column by column, much faster than a
        function. Row groups of Parquet that cannot have a match, by their statistics, are not read.

        Args:
            predicate: A condition; or a function of a record that returns True or False, or 1 or 0.
            fields: Names of the fields that a function needs: only these are read, and single numbers are Python's;
                None means whole records.
            num_workers: Workers that ask the predicate; ``"auto"`` means one per CPU, or none for
                threads and numbers only, whose predicate holds the GIL; 0 means none but this thread.
            executor: ``"threads"``; or ``"processes"``, for a predicate that holds the GIL, or a `Fleet`; see `Loader`.
                A predicate that is not at the top level of a module needs cloudpickle in processes.
            progress: Called with (records done, total records). By default a terminal shows them.

        Raises:
            ConfigError: A field is unknown, the predicate returned something else, a condition compares what cannot be
                compared, or a setting is unknown.

        Examples:
            >>> from dataload import RangeSource, field
            >>> [record["index"] for record in RangeSource(10).filter(lambda record: record["index"] % 3 == 0)]
            [0, 3, 6, 9]
            >>> [record["index"] for record in RangeSource(10).filter((field("index") > 5) & (field("index") != 8))]
            [6, 7, 9]
        """
        work = Filter(self, predicate, check_fields(fields))
        rule = run_filter(work, self._files(), num_workers=num_workers, executor=executor, progress=progress)
        return SelectionSource(self, rule)

    @overload
    def split(self, shares: float, *, seed: int = 0) -> tuple[Source[T_co], Source[T_co]]: ...
    @overload
    def split(
        self,
        shares: Mapping[str, float],
        *,
        seed: int = 0,
        exact: bool = False,
        stratify: str | None = None,
        group: str | None = None,
        by: str | None = None,
    ) -> Parts: ...
    def split(self, shares: Any, *, seed: int = 0, by: str | None = None, **settings: Any) -> Any:
        """Return sources of disjoint parts of the records, such as for training and evaluation.

        The part of a record is a hash of the seed and its index. So it stays the same when records are appended, and
        sizes are close to the shares, not exact: for n records, usually within 1 / sqrt(n). ``split(0.9)`` returns two
        sources, one with that share and one with the others.

        Args:
            shares: Shares of the records by the name of the part, which add up to 1: ``{"train": 0.9, "test": 0.1}``.
            seed: Seed of the hash.
            exact: Deal exact numbers of records to the parts. Most records change their part if records are appended.
            stratify: Name of a field: each part has its share of each value, to one record. Implies `exact`.
            group: Name of a field: records with the same value are in the same part. The part is a hash of the value,
                so it is stable. With `stratify`, groups are dealt, the largest first, to where most records of their
                classes are missing. `Parts.report` says how near the shares are.
            by: The same as `group`, for a field that is a key of the record.

        Returns:
            A dict of sources, `Parts`; the results of `stratify` and `group` are kept like filters.

        Raises:
            ConfigError: The shares are not numbers above 0 that add up to 1, a part has no record, a field is unknown
                or neither numbers nor text, or settings contradict each other.

        Examples:
            >>> from dataload import RangeSource
            >>> train, held_out = RangeSource(1000).split(0.9, seed=0)
            >>> len(train), len(held_out)
            (896, 104)
            >>> parts = RangeSource(1000).split({"train": 0.8, "val": 0.1, "test": 0.1}, seed=0, exact=True)
            >>> {name: len(part) for name, part in parts.items()}
            {'train': 800, 'val': 100, 'test': 100}
        """
        seed = check_seed(seed)
        if not isinstance(shares, Mapping) and by is None and not settings:
            return SelectionSource(self, Share(shares, seed, True)), SelectionSource(self, Share(shares, seed, False))
        named = check_shares(shares)
        division = Division.of(named.values(), seed, by, settings)
        rules = zip(named, division.rules(self), strict=True)
        parts = {name: SelectionSource(self, rule) for name, (rule, _) in rules}
        for name, part in parts.items():
            if not len(part):
                advice = "choose another share or seed" if len(self) else "the data to split have none"
                message = f"the part {name!r} of {len(self):,} records would be empty: {advice}"
                raise ConfigError(message, key="shares", value=shares)
        return Parts(self, parts, division)

    def k_fold(
        self,
        folds: int,
        *,
        seed: int = 0,
        exact: bool = False,
        stratify: str | None = None,
        group: str | None = None,
        by: str | None = None,
    ) -> Folds:
        """Return pairs of sources for cross-validation: all folds but one, and that one; see `split`."""
        settings = {"exact": exact, "stratify": stratify, "group": group}
        check_count("folds", folds, least=2)
        division = Division.of([1 / folds] * folds, check_seed(seed), by, settings)
        pairs = [
            (SelectionSource(self, others), SelectionSource(self, rule))
            for rule, others in division.rules(self, outside=True)
            if others is not None
        ]
        if not all(len(held_out) for _, held_out in pairs):
            message = f"a fold of {len(self):,} records would be empty: choose fewer folds, exact=True or another seed"
            raise ConfigError(message, key="folds", value=folds)
        return Folds(pairs, Parts(self, {f"fold {n}": fold for n, (_, fold) in enumerate(pairs)}, division))


class Folds(list[tuple[Source[Any], Source[Any]]]):
    """Pairs of the records of all folds but one, and of that fold; see `Source.k_fold`."""

    def __init__(self, pairs: Sequence[tuple[Source[Any], Source[Any]]], parts: Parts) -> None:
        super().__init__(pairs)
        self._parts = parts

    @property
    def report(self) -> str:
        """A line for each fold; see `Parts.report`."""
        return self._parts.report


class Parts(dict[str, Source[Any]]):
    """The parts of a source by name; see `Source.split`."""

    def __init__(self, source: Source[Any], parts: Mapping[str, SelectionSource[Any]], division: Division) -> None:
        super().__init__(parts)
        self._source, self._indices, self._division = source, [part.indices for part in parts.values()], division

    @property
    def report(self) -> str:
        """A line for each part, which compares its records, and with `stratify` its classes, with its share."""
        return "\n".join(self._division.report(self._source, [*self], self._indices))


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

    def _add_mapped(self, paths: list[str], versions: dict[int, Int64Array]) -> None:
        for parent in self._parents:
            parent._add_mapped(paths, versions)

    def _traffics(self) -> Sequence[Traffic]:
        # Parents may share one.
        return [*{id(each): each for parent in self._parents for each in parent._traffics()}.values()]

    def _files(self) -> Sequence[tuple[str, Remote | None]]:
        files = [parent._files() for parent in self._parents]
        return [file for some in files for file in some] if all(files) else ()

    def _functions(self) -> Sequence[Any]:
        return [function for parent in self._parents for function in parent._functions()]

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

    @abstractmethod
    def _within(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many of the parent's next `lengths` records are in the subset, without zeros."""

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of records here of each of the parent's shards that has any."""
        return self._within(self._parent.shard_lengths)

    @property
    def groups(self) -> tuple[int, ...]:
        return self._within(self._parent.groups)

    def _read(self, indices: Int64Array) -> list[T_co]:
        return self._parent._read(self._map(indices))

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        return self._parent._read_columns(self._map(indices), fields)

    def _lasting(self, name: str, seconds: float) -> Span | None:
        found = self._parent._lasting(name, seconds)
        return found and (found[0], lambda indices: found[1](self._map(indices)))

    def _matches(self, condition: Expression, indices: Int64Array | None) -> Int64Array:
        return self._parent._matches(condition, self._map(np.arange(len(self)) if indices is None else indices))

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

    def _within(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """See `SubsetSource._within`; one number unless the step is 1."""
        if self._span.step != 1 or not self._span:
            return (len(self),)
        ends = np.cumsum(lengths)
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

    def _within(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """See `SubsetSource._within`; one number if the records are in another order than in the parent."""
        if bool((self._indices[1:] < self._indices[:-1]).any()):
            return (len(self),)
        ends = np.searchsorted(self._indices, np.cumsum(lengths))
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
    paths, versions = list[str](), dict[int, Int64Array]()
    if isinstance(source, Source):
        source._add_mapped(paths, versions)  # pyright: ignore[reportPrivateUsage] # for sources
    if versions:
        check_not_overwritten(paths, np.concatenate([*versions.values()]))
