"""The records that a filter or a split selects: as values, and computed in parallel."""

from __future__ import annotations

import hashlib
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from dataload._util.fingerprint import code_digest
from dataload._util.indexing import as_indices
from dataload._util.interactive import ShownProgress
from dataload._util.randomness import derive_word, hash64
from dataload._util.settings import check_count, setting_error
from dataload._util.system import usable_cpus
from dataload._util.threads import DaemonThreads
from dataload.catalog.arrays import IndexKey, load_cached, remember, within
from dataload.catalog.facts import require_known, select_fields
from dataload.errors import ConfigError, SourceError
from dataload.executors import ExecutorName, check_executor, make_executor
from dataload.executors.base import Executor, Fleet, Result, TimeoutPolicy, WorkerLostError, WorkerStatus, worker_name
from dataload.executors.serialization import sendable
from dataload.sources.expression import Expression
from dataload.storage import Remote
from dataload.storage.kept import CachedTable
from dataload.types import Array, Int64Array

Predicate: TypeAlias = Callable[[Any], Any]

_log = logging.getLogger("dataload")
_BLOCK, _NUMBERS = 64, 1 << 14  # records that a function is asked about at once, which may be large; or numbers
_COLUMNS = 1 << 16  # records whose columns a condition is evaluated on at once
_HASHED = 1 << 20
_AHEAD = 4  # blocks per worker

HELD_OUT = "held-out"
"""The purpose of the hashes that deal records to parts."""


class Rule(ABC):
    """A value that selects records."""

    __slots__ = ()

    @property
    def identity(self) -> str:
        """Text that identifies the selection."""
        return repr(self)

    @abstractmethod
    def indices(self, length: int) -> Int64Array:
        """Return the indices of the selected records."""


@dataclass(frozen=True, slots=True, eq=False)
class Chosen(Rule):
    """Records by index, (n,) int64."""

    chosen: Int64Array

    @property
    def identity(self) -> str:
        return hashlib.blake2b(self.chosen.tobytes(), digest_size=16).hexdigest()

    def indices(self, length: int) -> Int64Array:  # noqa: ARG002 - see `Rule`
        return self.chosen


@dataclass(frozen=True, slots=True)
class Share(Rule):
    """One side of a split, about `share` in (0, 1) of the records; the side is a hash of the seed and the index."""

    share: float
    seed: int
    first: bool

    def __post_init__(self) -> None:
        share: Any = self.share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
            raise setting_error("the share of a split", self.share, "must be a number between 0 and 1")
        object.__setattr__(self, "share", float(share))  # numpy's has another repr

    def indices(self, length: int) -> Int64Array:
        limit = np.uint64(int(self.share * 2.0**64))
        return hashed_blocks(length, self.seed, lambda hashes: (hashes < limit) == self.first)


def hashed_blocks(length: int, seed: int, chosen: Callable[[Array], Array]) -> Int64Array:
    """Return the indices whose hashes, (rows,) uint64, are chosen."""
    key, found = derive_word(seed, HELD_OUT), [np.empty(0, np.int64)]
    for start in range(0, length, _HASHED):  # the temporaries of all at once would take several times the memory
        block = np.arange(start, min(start + _HASHED, length), dtype=np.int64)
        found.append(block[chosen(hash64(key, block))])
    return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class Filter:
    """A predicate and the records that it is asked about."""

    source: Any
    predicate: Predicate | Expression
    fields: tuple[str, ...] | None

    def __call__(self, start: int, stop: int) -> Int64Array:
        """Return the selected ones of the records [start, stop)."""
        indices, ask = np.arange(start, stop, dtype=np.int64), cast("Predicate", self.predicate)
        names, columns = [*(self.fields or ())], self._columns(indices)
        records: Iterable[Any] = ()
        try:
            # A list of all records would take longer to make than most predicates take.
            if len(columns) == 1:
                (name,), (column,) = names, columns
                verdicts = [ask({name: value}) for value in column]
            elif columns:
                verdicts = [ask(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
            else:
                records = self._read(indices)
                verdicts = [ask(record) for record in records]
        except Exception:
            records = records or (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
            self._find_error(ask, records, start)
            raise
        with suppress(TypeError, ValueError):  # to look at each type would take as long as many a predicate
            if not (chosen := bytes(verdicts)).strip(b"\0\1"):
                return indices[np.frombuffer(chosen, np.bool_)]
        return indices[[_truth(each, index) for index, each in enumerate(verdicts, start)]]

    @staticmethod
    def _find_error(ask: Predicate, records: Iterable[Any], start: int) -> None:
        """Raise the error of the first record for which the predicate fails again."""
        for index, record in enumerate(records, start):
            try:
                ask(record)
            except Exception as error:
                error.add_note(f"raised by the predicate of filter, for record {index}")
                raise

    def _columns(self, indices: Int64Array) -> Sequence[Any]:
        """Return the columns of the fields; none if there are none, or the records have to be read one by one."""
        if self.fields:
            with suppress(ConfigError):  # shapes may differ between records
                columns = [*map(_values, self.source.read_batch(indices, self.fields).values())]
                return [] if any(isinstance(column, (Mapping, tuple)) for column in columns) else columns
        return []

    def _read(self, indices: Int64Array) -> Sequence[Any]:
        records = self.source.read(indices)
        return records if self.fields is None else [select_fields(record, self.fields) for record in records]

    @property
    def reads_numbers(self) -> bool:
        """Whether each record is single numbers: they are read in large blocks, and asking takes most of the time."""
        known = self.source.fields if self.fields else {}
        return bool(known) and all(
            known[name].shape == () and known[name].dtype != "bytes" for name in self.fields or ()
        )

    def key(self, files: Sequence[tuple[str, Remote | None]]) -> IndexKey | None:
        """Return the key under which the result is kept, given the files of the source; None if it is not."""
        if not files:
            return None
        try:
            is_condition = isinstance(self.predicate, Expression)
            # What version 0.2 has kept of conditions may be inexact.
            code = f"exactly {self.predicate!r}" if is_condition else code_digest(self.predicate)
            options = code, self.fields, *identity_of(self.source)
        except ValueError as error:
            _log.warning(
                "the result of filter is not kept, and will be computed again: %s, which may change without notice",
                error,
            )
            return None
        return IndexKey.of_filter(files, options)


def identity_of(source: Any) -> tuple[str, ...]:
    """Return what identifies the records of a source in files; ValueError if that is unknown."""
    functions = source._functions()
    return source.fingerprint(), *([code_digest(functions)] if functions else [])


def run_filter(
    work: Filter,
    files: Sequence[tuple[str, Remote | None]],
    *,
    num_workers: int | Literal["auto"],
    executor: ExecutorName | Fleet,
    progress: Callable[[int, int], None] | None,
) -> Chosen:
    """Return the selected records, from the cache if they are known; see `Source.filter` for the arguments."""
    condition = work.predicate if isinstance(work.predicate, Expression) else None
    if condition is None and not callable(work.predicate):
        what = "must be a function of a record or a condition, such as dataload.field('label') == 3"
        raise setting_error("the predicate of filter", work.predicate, what)
    executor = check_executor(executor)
    names = work.fields if condition is None else condition.fields
    require_known(names or (), work.source.fields if names else (), work.source)
    if num_workers == "auto":
        # Threads that only hold the GIL take turns, which costs a fifth of the time.
        num_workers = 0 if executor == "threads" and work.reads_numbers else usable_cpus()
    workers, length = check_count("num_workers", num_workers, least=0), len(work.source)
    key = work.key(files)

    def unpack(table: CachedTable) -> Int64Array | None:
        found = table.arrays["indices"].astype(np.int64)
        return found if within(found, length) and bool((np.diff(found) > 0).all()) else None

    def build() -> Int64Array:
        if condition is not None:
            return work.source._matches(condition, None)
        found = [
            np.empty(0, np.int64),
            *_blocks(work, length, workers, executor, progress or ShownProgress("records are filtered")),
        ]
        return np.concatenate(found)

    chosen = remember(key, unpack, build, lambda found: CachedTable({"indices": found}, {}))
    if key is not None and load_cached(key) is None:
        _log.warning(
            "the result of filter is not kept, and will be computed again: no directory for it is writable, "
            "or the data have just been written"
        )
    return Chosen(chosen)


@dataclass(frozen=True, slots=True)
class _Task:
    """The work of `filter` on a block. In a process, it returns its error, because workers can only send values."""

    work: Filter
    in_process: bool

    def __call__(self, block: tuple[int, int], status: WorkerStatus) -> Int64Array | Exception:  # noqa: ARG002 - for executors
        try:
            return self.work(*block)
        except Exception as error:
            if not self.in_process:
                raise
            return sendable(error, worker_name())


def _blocks(
    work: Filter, length: int, workers: int, executor: ExecutorName | Fleet, progress: Callable[[int, int], None]
) -> Generator[Int64Array]:
    """Yield the selected records of each block, in order."""
    starts = range(0, length, size := _NUMBERS if work.reads_numbers else _BLOCK)
    blocks = ((start, min(start + size, length)) for start in starts)
    workers = min(workers, len(starts))
    pool: Executor[tuple[int, int], Int64Array | Exception] = make_executor(
        _Task(work, in_process=bool(workers) and executor != "threads"),
        executor,
        workers,
        window=0,  # results are too small for slots of shared memory
        timeouts=TimeoutPolicy(warn_after=math.inf),
        settings=[("source", "the source", work.source), ("predicate", "the predicate", work.predicate)],
    )
    with closing(pool):
        pending: deque[tuple[tuple[int, int], Result[Int64Array | Exception]]] = deque()
        while True:
            for block in islice(blocks, max(1, workers * _AHEAD) - len(pending)):
                pending.append((block, pool.submit(block)))
            if not pending:
                return
            (start, stop), asked = pending.popleft()
            try:
                found = asked.result()
            except WorkerLostError as lost:
                message = f"filter failed for the records {start} to {stop - 1}: {lost.worker} {lost.reason}"
                raise SourceError(f"{message}\n{lost.stacks}" if lost.stacks else message) from None
            if isinstance(found, Exception):
                raise found
            yield found
            progress(stop, length)


def _values(column: Any) -> Any:
    """Return a column, with Python's numbers if it has one number a record: they take a tenth of the time of arrays."""
    return column.tolist() if getattr(column, "ndim", 0) == 1 and column.dtype.kind in "biuf" else column


def _truth(found: Any, index: int) -> bool:
    """Return what the predicate has returned for a record, if it is True or False, or 1 or 0."""
    single = isinstance(found, (int, np.generic)) or (isinstance(found, np.ndarray) and not found.ndim)
    if single and np.asarray(found).dtype.kind in "biu" and found in (0, 1):
        return bool(found)
    forgot = ": does the predicate end without `return`?" if found is None else ""
    message = f"the predicate of filter returned {found!r:.80} for record {index}, expected True or False{forgot}"
    raise ConfigError(message, key="predicate")


def match_columns(
    read: Callable[[Int64Array], Mapping[str, Any]], condition: Expression, length: int, indices: Int64Array | None
) -> Int64Array:
    """Return which of the records, by default all, fulfil a condition; `read` returns columns of records."""
    count = length if indices is None else len(indices)
    starts = range(0, count, _COLUMNS)

    def match(start: int) -> Int64Array:
        rows = np.arange(start, min(start + _COLUMNS, count)) if indices is None else indices[start : start + _COLUMNS]
        return start + np.flatnonzero(condition.matches(read(rows).__getitem__))

    with DaemonThreads(max(1, min(usable_cpus(), len(starts)))) as pool:
        return np.concatenate([np.empty(0, np.int64), *pool.map(match, starts)])


def chosen_indices(chosen: Any, length: int) -> Int64Array:
    """Return the indices that a list, an array or a mask of True and False selects, in a new array."""
    values: Array = np.asarray(chosen)
    if values.dtype != np.bool_ or values.ndim != 1:
        return np.array(as_indices(chosen, length))  # the caller may shuffle its array
    if len(values) != length:
        raise IndexError(f"a mask has a value for each record: this one has {len(values)} for {length} records")
    return np.flatnonzero(values)
