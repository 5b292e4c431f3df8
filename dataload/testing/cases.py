"""The parts of the conformance suite: checks, their arguments and their results."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, cast

import numpy as np

from dataload._util.randomness import generator
from dataload.collate import default_collate
from dataload.errors import ConfigError
from dataload.sources.memory import MemorySource
from dataload.testing.compare import show
from dataload.testing.traits import (
    NotApplicable,
    SourceTraits,
    close,
    expect,
    expect_equal,
    expect_raises,
    sample_records,
)

if TYPE_CHECKING:
    from dataload.testing.suite import SourceSuite

Paths: TypeAlias = "Path | list[Path]"

STANDARD_RECORDS = 37
"""Records in the standard data set: a prime number, not divisible by any block or shard size."""


@dataclass(frozen=True, slots=True)
class Case:
    """An open source and its expected records."""

    source: Any
    oracle: Any  # the expected records: has a length, and returns a new record for each of `indices`
    indices: tuple[int, ...]  # records that the oracle knows, ascending; a sample of large data sets
    traits: SourceTraits

    def pick(self, count: int, seed: int = 0) -> list[int]:
        """Return `count` random indices, with repetitions; raise NotApplicable without records."""
        self.needs_records(1)
        chosen = generator(seed, "testing", count).integers(0, len(self.indices), count)
        return [self.indices[number] for number in chosen.tolist()]

    def permuted(self, seed: int = 0) -> list[int]:
        """Return all known indices in random order, not ascending if they are more than one."""
        shuffled = generator(seed, "testing").permutation(np.array(self.indices, np.int64)).tolist()
        return shuffled[::-1] if shuffled == sorted(shuffled) else shuffled

    def needs_records(self, count: int) -> None:
        """Raise NotApplicable if fewer than `count` records are known."""
        if len(self.indices) < count:
            raise NotApplicable("the data set is empty" if not self.indices else "too few records are known")

    def needs_all_records(self) -> None:
        """Raise NotApplicable if only a sample of the records is known."""
        if len(self.indices) != len(self.oracle):
            raise NotApplicable("only some of the records are known")

    def expected(self, indices: Sequence[int]) -> list[Any]:
        return [self.oracle[index] for index in indices]

    def stacked(self, indices: Sequence[int]) -> Any:
        """Return the oracle's records as a batch; raise NotApplicable if they cannot be stacked."""
        try:
            return default_collate(self.expected(indices))
        except ConfigError:
            raise NotApplicable("these records cannot be stacked") from None

    def method(self, name: str) -> Callable[..., Any]:
        """Return an optional method of the source; raise NotApplicable if it is missing."""
        found = getattr(self.source, name, None)
        if found is None:
            raise NotApplicable(f"{type(self.source).__name__} has no {name}")
        return cast("Callable[..., Any]", found)

    def check_record(self, index: int, got: Any) -> None:
        expect_equal(got, self.oracle[index], f"record {index}")

    def check_single_reads(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.check_record(index, self.source[index])

    def check_request(self, indices: Sequence[int], request: Any = None) -> None:
        """Fail unless `request`, by default `indices`, reads the records at `indices`."""
        items = list(indices) if request is None else request
        read = getattr(self.source, "__getitems__", None)
        self.check_records(indices, [self.source[index] for index in items] if read is None else read(items))

    def check_records(self, indices: Sequence[int], got: Sequence[Any]) -> None:
        expect(len(got) == len(indices), f"{len(got)} records for a request of {len(indices)}")
        for row, (index, record) in enumerate(zip(indices, got, strict=True)):
            expect_equal(record, self.oracle[index], f"row {row} (record {index})")

    def check_batch(self, indices: Sequence[int], request: Any = None, fields: list[str] | None = None) -> Any:
        """Check `read_batch` against the records at `indices`; return None if they cannot be stacked: ConfigError."""
        items = list(indices) if request is None else request
        records = self.expected(indices)
        if fields is not None:
            records = [{name: record[name] for name in fields} for record in records]
        call = f"read_batch({show(items)}{f', fields={fields}' if fields else ''})"
        try:
            want = default_collate(records)
        except ConfigError:
            expect_raises(ConfigError, lambda: self.source.read_batch(items, fields), call)
            return None
        got = self.source.read_batch(items, fields)
        expect_equal(got, want, call)
        return got


class Maker:
    """Writes and opens data sets with an author's backend, each in its own directory below `directory`."""

    def __init__(self, backend: SourceSuite, directory: Path) -> None:
        self.backend = backend
        self._directory = directory
        self._numbers = itertools.count()
        self._opened = contextlib.ExitStack()
        self.traits: SourceTraits = backend.traits

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def path(self) -> Path:
        """Return an unused path in an empty directory."""
        directory = self._directory / str(next(self._numbers))
        directory.mkdir(parents=True)
        return directory / f"data{self.traits.suffix}"

    def records(self, count: int = STANDARD_RECORDS, seed: int = 0) -> list[Any]:
        return sample_records(self.traits, count, seed)

    def write(self, records: Sequence[Any]) -> Path:
        path = self.path()
        self.backend.write(path, records)
        return path

    def copy(self, path: Path) -> Path:
        """Copy a data set and the files beside it to another directory."""
        copy = self.path()
        shutil.copytree(path.parent, copy.parent, dirs_exist_ok=True)
        return copy

    def open(self, path: Paths) -> Any:
        """Open a data set; the end of the check closes it."""
        source = self.backend.open(path)
        self._opened.callback(close, source)
        return source

    def oracle(self, records: Sequence[Any]) -> MemorySource:
        """Return the expected records of a source after `records` were written."""
        return MemorySource(self.backend.expected(records))

    def case(self, records: Sequence[Any] | None = None) -> Case:
        """Write and open a data set, by default the standard one."""
        chosen = self.records() if records is None else records
        return self.case_of(self.open(self.write(chosen)), chosen)

    def case_of(self, source: Any, records: Sequence[Any]) -> Case:
        oracle = self.oracle(records)
        return Case(source, oracle, tuple(range(len(oracle))), self.traits)

    def needs_files(self) -> None:
        if not self.traits.in_files:
            raise NotApplicable("the records are not stored in files")


@dataclass(frozen=True, slots=True)
class Check:
    """One rule that sources follow."""

    name: str  # of the function, for example "check_duplicates"
    group: str  # the topic, for example "Reads"
    since: str  # the release that introduced the check
    # "source": takes a `Case` and only reads, so it also runs on real data; "maker": writes its own data
    needs: Literal["source", "maker"]
    run: Callable[[Any], None]  # raises AssertionError, or an error of the source

    @property
    def rule(self) -> str:
        """The first line of the function's docstring."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: Name of the check.
        group: Topic of the check.
        status: ``"passed"``, ``"failed"``, or ``"skipped"`` if there was nothing to check.
        message: Why the check failed or was skipped.
        rule: The rule that the check tests.
    """

    name: str
    group: str
    status: Literal["passed", "failed", "skipped"]
    message: str = ""
    rule: str = ""

    def __str__(self) -> str:
        return f"{self.status:7} {self.name}" + (f": {self.message}" if self.message else "")


_F = TypeVar("_F", bound=Callable[..., None])


def source_check(group: str, *, since: str = "0.1", needs: Literal["source", "maker"] = "source") -> Callable[[_F], _F]:
    """Mark a function of a `Case` as a check that only reads."""

    def mark(function: _F) -> _F:
        setattr(function, "check", Check(function.__name__, group, since, needs, function))  # noqa: B010
        return function

    return mark


def maker_check(group: str, *, since: str = "0.1") -> Callable[[_F], _F]:
    """Mark a function of a `Maker` as a check that writes its own data."""
    return source_check(group, since=since, needs="maker")


def checks_in(*modules: ModuleType) -> tuple[Check, ...]:
    """Return the marked functions of modules, in order of definition."""
    members = (member for module in modules for member in vars(module).values())
    found = (getattr(member, "check", None) for member in members)
    return tuple(check for check in found if isinstance(check, Check))


def run_check(check: Check, backend: SourceSuite, directory: Path, standard: Path | None = None) -> None:
    """Run one check on a backend, on the data set `standard` if it is already written."""
    with Maker(backend, directory) as maker:
        if check.needs == "maker":
            check.run(maker)
        else:
            check.run(maker.case() if standard is None else maker.case_of(maker.open(standard), maker.records()))
