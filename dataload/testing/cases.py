"""What a check is, what it is given, and what comes out."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, cast

import numpy as np

from dataload._util.randomness import generator
from dataload.sources.memory import MemorySource
from dataload.testing.compare import difference, show
from dataload.testing.traits import SourceTraits, sample_records

__all__ = [
    "Backend",
    "Case",
    "Check",
    "CheckResult",
    "Maker",
    "NotApplicable",
    "Paths",
    "checks_in",
    "expect",
    "expect_equal",
    "expect_raises",
    "maker_check",
    "run_check",
    "source_check",
]

Paths: TypeAlias = "Path | list[Path]"

STANDARD_RECORDS = 37
"""Records of the standard data set: a prime, so that no block or shard size divides it."""


class Backend(Protocol):
    """What the author of a source supplies; see `SourceSuite` for what each method must do."""

    @property
    def traits(self) -> SourceTraits:
        """What the source is able to do."""
        ...

    def write(self, path: Path, records: Sequence[Any]) -> None:
        """Write a data set, without the source."""
        ...

    def open(self, path: Any) -> Any:
        """The source of a path, or of several."""
        ...

    def corrupt(self, path: Path, kind: str) -> None:
        """Damage a data set."""
        ...

    def expected(self, records: Sequence[Any]) -> Sequence[Any]:
        """What the source gives for what was written."""
        ...


class NotApplicable(Exception):
    """Raised by a check that finds nothing to check, with the reason."""


@dataclass(frozen=True, slots=True)
class Case:
    """An open source, and what it must hold.

    Attributes:
        source: The source under test.
        oracle: Gives the expected records: has a length, and a fresh record for each of `indices`.
        indices: Indices whose records the oracle knows, rising; all of them but for real data.
        traits: What the source is able to do.
    """

    source: Any
    oracle: Any
    indices: tuple[int, ...]
    traits: SourceTraits

    def pick(self, count: int, seed: int = 0) -> list[int]:
        """`count` of the indices, in no order and with repetitions.

        Raises:
            NotApplicable: There is no record.
        """
        if not self.indices:
            raise NotApplicable("the data set is empty")
        places = generator(seed, "testing", count).integers(0, len(self.indices), count)
        return [self.indices[place] for place in places.tolist()]

    def permuted(self, seed: int = 0) -> list[int]:
        """All known indices, each once, in no order, and not in the rising one unless there is but one."""
        shuffled = generator(seed, "testing").permutation(np.array(self.indices, np.int64)).tolist()
        return shuffled[::-1] if shuffled == sorted(shuffled) else shuffled

    def expected(self, indices: Sequence[int]) -> list[Any]:
        """The oracle's records."""
        return [self.oracle[index] for index in indices]

    def method(self, name: str) -> Callable[..., Any]:
        """An optional method of the source.

        Raises:
            NotApplicable: The source does not have it.
        """
        found = getattr(self.source, name, None)
        if found is None:
            raise NotApplicable(f"{type(self.source).__name__} has no {name}")
        return cast("Callable[..., Any]", found)

    def check_record(self, index: int, got: Any) -> None:
        """Fail unless `got` is the record at `index`."""
        expect_equal(got, self.oracle[index], f"record {index}")

    def check_records(self, indices: Sequence[int], got: Sequence[Any]) -> None:
        """Fail unless `got` are the records at `indices`, in that order."""
        expect(len(got) == len(indices), f"{len(got)} records for a request of {len(indices)}")
        for row, (index, record) in enumerate(zip(indices, got, strict=True)):
            expect_equal(record, self.oracle[index], f"row {row} (record {index})")


class Maker:
    """Makes data sets with an author's `write` and `open`, each in a directory of its own.

    Args:
        backend: The author's functions.
        directory: An empty directory.
    """

    def __init__(self, backend: Backend, directory: Path) -> None:
        self._backend = backend
        self._directory = directory
        self._numbers = itertools.count()
        self._opened = contextlib.ExitStack()
        self.traits = backend.traits

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def path(self) -> Path:
        """A path at which nothing is, alone in its directory."""
        directory = self._directory / str(next(self._numbers))
        directory.mkdir(parents=True)
        return directory / f"data{self.traits.suffix}"

    def records(self, count: int = STANDARD_RECORDS, seed: int = 0) -> list[Any]:
        """Records for `write`; see `sample_records`."""
        return sample_records(self.traits, count, seed)

    def write(self, records: Sequence[Any]) -> Path:
        """Write a data set."""
        path = self.path()
        self._backend.write(path, records)
        return path

    def corrupt(self, path: Path, kind: str) -> None:
        """Damage a data set as the author knows how to."""
        self._backend.corrupt(path, kind)

    def open(self, path: Paths) -> Any:
        """Open a data set; it is closed at the end, if it can be."""
        source = self._backend.open(path)
        close = getattr(source, "close", None)
        if close is not None:
            self._opened.callback(close)
        return source

    def use_and_forget(self, path: Path, use: Callable[[Any], None]) -> None:
        """Open a data set, use it, and keep nothing of it."""
        use(self._backend.open(path))

    def oracle(self, records: Sequence[Any]) -> MemorySource:
        """What a source of `records` must hold."""
        return MemorySource(self._backend.expected(records))

    def case(self, records: Sequence[Any] | None = None) -> Case:
        """Write and open a data set, the standard one unless told otherwise."""
        chosen = self.records() if records is None else records
        return self.case_of(self.open(self.write(chosen)), chosen)

    def case_of(self, source: Any, records: Sequence[Any]) -> Case:
        """A source that is open already, and what it must hold."""
        oracle = self.oracle(records)
        return Case(source, oracle, tuple(range(len(oracle))), self.traits)

    def needs_files(self) -> None:
        """Stop here unless the records lie in files."""
        if not self.traits.in_files:
            raise NotApplicable("the records do not lie in files")


@dataclass(frozen=True, slots=True)
class Check:
    """One rule that sources follow.

    Attributes:
        name: Name of the function, for example ``"check_duplicates"``.
        group: What it is about, for example ``"Reads"``.
        since: The release that brought it.
        needs: ``"source"``: takes a `Case`, only reads, and runs on real data too; ``"maker"``: takes a `Maker`.
        run: The function; raises AssertionError, or what the source raised.
    """

    name: str
    group: str
    since: str
    needs: Literal["source", "maker"]
    run: Callable[[Any], None]

    @property
    def rule(self) -> str:
        """The first line of the function's docstring."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How one check ended.

    Attributes:
        name: Name of the check.
        group: What it is about.
        status: ``"passed"``, ``"failed"``, or ``"skipped"`` where there was nothing to check.
        message: Why it failed or was skipped.
        rule: What the check demands.
    """

    name: str
    group: str
    status: Literal["passed", "failed", "skipped"]
    message: str = ""
    rule: str = ""

    def __str__(self) -> str:
        return f"{self.status:7} {self.name}" + (f": {self.message}" if self.message else "")


_F = TypeVar("_F", bound=Callable[..., None])


def source_check(group: str, *, since: str) -> Callable[[_F], _F]:
    """Mark a function of a `Case` as a check that only reads."""
    return _marker(group, since, "source")


def maker_check(group: str, *, since: str) -> Callable[[_F], _F]:
    """Mark a function of a `Maker` as a check that makes its own data."""
    return _marker(group, since, "maker")


def _marker(group: str, since: str, needs: Literal["source", "maker"]) -> Callable[[_F], _F]:
    def mark(function: _F) -> _F:
        setattr(function, "check", Check(function.__name__, group, since, needs, function))  # noqa: B010
        return function

    return mark


def checks_in(*modules: ModuleType) -> tuple[Check, ...]:
    """The marked functions of modules, in the order in which they are defined."""
    members = (member for module in modules for member in vars(module).values())
    found = (getattr(member, "check", None) for member in members)
    return tuple(check for check in found if isinstance(check, Check))


def run_check(check: Check, backend: Backend, directory: Path) -> None:
    """Put one backend to one check.

    Raises:
        AssertionError: It does not follow the rule.
        NotApplicable: There is nothing to check.
    """
    with Maker(backend, directory) as maker:
        check.run(maker.case() if check.needs == "source" else maker)


def expect(condition: object, message: str) -> None:
    """Fail with `message` unless the condition holds; unlike `assert`, under ``python -O`` too."""
    if not condition:
        raise AssertionError(message)


def expect_equal(got: Any, want: Any, place: str) -> None:
    """Fail unless two values are equal to the bit; see `difference`."""
    found = difference(got, want, place)
    expect(found is None, found or "")


def expect_raises(
    expected: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], what: str
) -> BaseException:
    """Fail unless `call` raises one of these; returns what it raised.

    Args:
        expected: Exception classes.
        call: Called without arguments.
        what: What it does, for the message: ``"source[37]"``.
    """
    kinds = expected if isinstance(expected, tuple) else (expected,)
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        got = call()
    except kinds as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__} ({error}), expected {names}") from error
    raise AssertionError(f"{what} gives {show(got)}, expected {names}")
