"""Traits and records of a source under test; checks, their arguments and their results."""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, cast

import numpy as np

from dataload._util.randomness import generator
from dataload.collate import default_collate
from dataload.errors import ConfigError
from dataload.sources.memory import MemorySource
from dataload.testing.compare import arrays_in, difference, show

Paths: TypeAlias = "Path | list[Path]"

STANDARD_RECORDS = 37
"""Records in the standard data set: a prime number, not divisible by any block or shard size."""


class NotApplicable(Exception):
    """Raised by a check that does not apply; the message says why."""


def expect(condition: object, message: str) -> None:
    """Fail with `message` unless the condition holds, even under ``python -O``."""
    if not condition:
        raise AssertionError(message)


def expect_equal(got: Any, want: Any, label: str) -> None:
    """Fail unless two values are bitwise equal; see `difference`."""
    found = difference(got, want, label)
    expect(found is None, found or "")


def expect_raises(
    expected: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], what: str
) -> BaseException:
    """Return the exception of `call`; fail unless it is one of `expected`. `what` describes the call."""
    kinds = expected if isinstance(expected, tuple) else (expected,)
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        got = call()
    except kinds as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__} ({error}), expected {names}") from error
    raise AssertionError(f"{what} gives {show(got)}, expected {names}")


def expect_each_raises(
    expected: type[BaseException], call: Callable[[Any], Any], arguments: Iterable[Any], what: str
) -> None:
    """Fail unless `call` raises `expected` for each argument; `what` has ``{}`` for the argument."""
    for argument in arguments:
        expect_raises(expected, partial(call, argument), what.format(repr(argument)))


def close(source: Any) -> None:
    """Close a source that has `close`."""
    method = getattr(source, "close", None)
    if method is not None:
        method()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTraits:
    """The abilities of a source. A False trait does not skip checks: they then expect the documented refusal.

    Attributes:
        record_type: `dict` for records with fields, `bytes` for plain records. Determines what is written.
        value_types: Types of field values: some of ``np.ndarray, bytes, str, int, float``.
        dtypes: Names of numpy dtypes in which arrays are written.
        suffix: Suffix of the paths passed to `write`, for example ``".syr"``.
        in_files: Records are stored in files. If False, checks of files are skipped.
        several_paths: `open` also takes a list of paths, the shards of one data set.
        empty_dataset: A data set may have no records. If False, writing one raises ConfigError or ValueError.
        empty_values: Values may have zero bytes. If False, writing one raises ConfigError or ValueError.
        negative_index: ``source[-1]`` is the last record. If False, it raises IndexError.
        slices: ``source[a:b]`` is a source. If False, it raises TypeError.
        closes: After `close`, reading raises ClosedSourceError. If False, `close` has no effect on reads.
        fork_safe: A forked child can read. If False, it gets an error instead of a hang or wrong records.
        fingerprints: `fingerprint()` identifies the content. If False, the method does not exist.
        notices_cuts: A file that is cut off, or ends in zeros, is refused. If False, the records before the cut are
            read, and the last one may be incomplete.
        has_checksums: A file with any byte changed is refused. If False, the changed bytes may be read, but the
            number of records stays the same.
        corruptions: Kinds of damage that `corrupt` can do and that reading must detect.
    """

    record_type: type = dict
    value_types: tuple[type, ...] = (np.ndarray, bytes, str, int, float)
    dtypes: tuple[str, ...] = ("float32", "int64", "uint8")
    suffix: str = ""
    in_files: bool = True
    several_paths: bool = False
    empty_dataset: bool = True
    empty_values: bool = True
    negative_index: bool = True
    slices: bool = True
    closes: bool = True
    fork_safe: bool = True
    fingerprints: bool = True
    notices_cuts: bool = True
    has_checksums: bool = False
    corruptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.record_type not in (dict, bytes):
            raise TypeError(f"record_type must be dict or bytes, got {self.record_type!r}")
        known = (np.ndarray, bytes, str, int, float)
        for value_type in self.value_types:
            if value_type not in known:
                raise TypeError(f"value_types may hold ndarray, bytes, str, int, float, got {value_type!r}")


def sample_records(traits: SourceTraits, count: int, seed: int = 0) -> list[Any]:
    """Return distinct records, the same for the same arguments; each field has one shape, so that arrays stack."""
    return [dict(record) if isinstance(record, dict) else record for record in _made_once(traits, count, seed)]


@functools.lru_cache(maxsize=16)
def _made_once(traits: SourceTraits, count: int, seed: int) -> tuple[Any, ...]:
    rng = generator(seed, "testing records")
    return tuple(_sample_record(traits, index, rng) for index in range(count))


def _sample_record(traits: SourceTraits, index: int, rng: np.random.Generator) -> Any:
    data = index.to_bytes(4, "big") + rng.bytes(int(rng.integers(1, 200)))
    if traits.record_type is bytes:
        return data
    record: dict[str, Any] = {}
    for value_type in traits.value_types:
        if value_type is np.ndarray:
            for dtype in traits.dtypes:
                values = np.frombuffer(rng.bytes(12), np.uint8).astype(dtype)
                record[f"x{dtype}"] = values.reshape(3, 4)
            record["label"] = np.array(index % 128, traits.dtypes[0])
        elif value_type is bytes:
            record["image"] = data
        elif value_type is str:
            record["text"] = f"{index} {'é€𝄞'[index % 3]}{'.' * int(rng.integers(0, 9))}"
        else:
            record[value_type.__name__] = value_type(index)
    for array in arrays_in(record):
        array.flags.writeable = False
    return record


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


class Backend(Protocol):
    """The part of a `SourceSuite` that checks use."""

    @property
    def traits(self) -> SourceTraits: ...

    def write(self, path: Path, records: Sequence[Any]) -> None: ...

    def open(self, path: Any) -> Any: ...

    def corrupt(self, path: Path, kind: str) -> None: ...

    def expected(self, records: Sequence[Any]) -> Sequence[Any]: ...


class Maker:
    """Writes and opens data sets with an author's backend, each in its own directory below `directory`."""

    def __init__(self, backend: Backend, directory: Path) -> None:
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
    """The result of one check."""

    name: str
    group: str  # the topic
    status: Literal["passed", "failed", "skipped"]  # skipped if there was nothing to check
    message: str = ""  # why it failed or was skipped
    rule: str = ""  # that the check tests

    def __str__(self) -> str:
        return f"{self.status:7} {self.name}" + (f": {self.message}" if self.message else "")


_F = TypeVar("_F", bound=Callable[..., None])


def source_check(group: str, *, since: str = "0.1", needs: Literal["source", "maker"] = "source") -> Callable[[_F], _F]:
    """Mark a function of a `Case` as a check that only reads."""

    def mark(function: _F) -> _F:
        setattr(function, "check", Check(function.__name__, group, since, needs, function))  # noqa: B010
        return function

    return mark


def maker_check(group: str) -> Callable[[_F], _F]:
    """Mark a function of a `Maker` as a check that writes its own data."""
    return source_check(group, needs="maker")


def checks_in(*modules: ModuleType) -> tuple[Check, ...]:
    """Return the marked functions of modules, in order of definition."""
    members = (member for module in modules for member in vars(module).values())
    found = (getattr(member, "check", None) for member in members)
    return tuple(check for check in found if isinstance(check, Check))


def run_check(check: Check, backend: Backend, directory: Path, standard: Path | None = None) -> None:
    """Run one check on a backend, on the data set `standard` if it is already written."""
    with Maker(backend, directory) as maker:
        if check.needs == "maker":
            check.run(maker)
        else:
            check.run(maker.case() if standard is None else maker.case_of(maker.open(standard), maker.records()))
