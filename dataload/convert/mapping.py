"""The function that a conversion applies to each sample, such as a tokenizer, and the bad records it leaves out."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np

from dataload._util.failures import mark_users
from dataload._util.fingerprint import code_digest
from dataload._util.lazy import load_optional
from dataload._util.randomness import check_seed
from dataload._util.settings import MaxBad, check_choice, check_setting
from dataload.catalog.checks import LONGEST_SOURCE, LONGEST_TEXT, MapEntry
from dataload.catalog.facts import require_known
from dataload.convert.blocks import read_each, read_records
from dataload.errors import ConfigError, WorkerError, closest, message_of, printable, traceback_of
from dataload.loader.failures import BadRecord, Budget, StageError
from dataload.sources.shards import locate
from dataload.storage import storage_of
from dataload.transforms import DROP, NamedTransform, SampleContext, compose
from dataload.types import Array

_MOST_OF_UINT16 = 1 << 16


@dataclass(frozen=True)
class Tokenize:
    """Turns a text, or a sample's field with one, into ``{"tokens": (n,) int64}``, ending with `end_token`."""

    file: str = field(repr=False)  # may have moved when the conversion is resumed
    text_field: str
    sha256: str
    end_token: int | None
    dtype: str

    @classmethod
    def of(cls, file: str, *, text_field: str = "text", end_token: str | None = None) -> Self:
        """Read a tokenizer; `end_token` is the text of the token after each document."""
        sha256 = hashlib.sha256(storage_of(file).read(file)).hexdigest()
        tokenizer = _load(file, sha256)
        end = None
        if end_token is not None and (end := tokenizer.token_to_id(end_token)) is None:
            known = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
            message = f"{file} has no special token {end_token!r}: {closest(end_token, known)}"
            raise ConfigError(message, key="end_token", value=end_token)
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        return cls(file, text_field, sha256, end, "uint16" if size <= _MOST_OF_UINT16 else "int32")

    @property
    def writer_options(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "end_token": self.end_token}

    def __call__(self, sample: Any) -> dict[str, Array]:
        text = sample
        if isinstance(sample, Mapping):
            require_known((self.text_field,), sample, key="text_field")
            text = sample[self.text_field]
        text = bytes(text).decode() if isinstance(text, (bytes, bytearray, memoryview)) else text
        if not isinstance(text, str):
            raise ConfigError(f"expected text, got {type(text).__name__}: choose its field", key="text_field")
        found = _load(self.file, self.sha256).encode(text, add_special_tokens=False)
        return {"tokens": np.array(found.ids, np.int64)}


@functools.lru_cache(maxsize=4)  # in each process
def _load(file: str, sha256: str) -> Any:
    if hashlib.sha256(storage_of(file).read(file)).hexdigest() != sha256:
        raise ConfigError(f"{file} has changed since the conversion began", key="tokenizer", value=file)
    return read_tokenizer(file)


def read_tokenizer(file: str) -> Any:
    tokenizers = load_optional("tokenizers", needed_by="--tokenizer", extra="tokens")
    data = storage_of(file).read(file)
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(f"{file} is not a tokenizer.json: {error}", key="tokenizer", value=file) from error


KEY = "__key__"
"""Name of the field that holds the key of a sample."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)
_SHOWN_DIGITS = 16


@dataclass(frozen=True, slots=True)
class MapFunction:
    """A function of a sample, described once, because other processes may not find its text."""

    transform: NamedTransform
    entry: MapEntry
    values: str = ""  # see `describe_values`; none for `Tokenize`, whose description suffices

    @classmethod
    def of(cls, function: Callable[..., Any] | MapFunction) -> MapFunction:
        if isinstance(function, MapFunction):
            return function
        (transform,), entry = compose([function], "map"), _describe(function)
        values = "" if type(function) is Tokenize else describe_values(function, entry.version)
        return cls(transform, entry, values)

    def __str__(self) -> str:
        version = f"version {self.entry.version}, " if self.entry.version else ""
        return f"{self.entry.name} ({version}sha256 {self.entry.sha256[:_SHOWN_DIGITS]})"


@dataclass(frozen=True, slots=True)
class RecordMap:
    """Turns samples into the records to write; `max_bad` is the number or share to leave out, None for errors."""

    function: MapFunction | None = None
    seed: int = 0
    max_bad: int | float | None = None

    @classmethod
    def of(
        cls, function: Callable[..., Any] | MapFunction | None, *, seed: int, on_error: str, max_bad: int | float
    ) -> Self:
        if on_error == "replace":
            message = "on_error='replace' would write another record twice: choose 'raise' or 'skip' for a conversion"
            raise ConfigError(message, key="on_error", value=on_error)
        check_choice("on_error", on_error, ("raise", "skip"))
        most = check_setting("max_bad", max_bad, MaxBad)
        described = None if function is None else MapFunction.of(function)
        return cls(described, check_seed(seed), most if on_error == "skip" else None)

    def __bool__(self) -> bool:
        """Return whether records, or their number, may differ from the samples."""
        return self.function is not None or self.max_bad is not None

    @property
    def settings(self) -> dict[str, str]:
        """Function and seed as text: they decide the content of files, except for skipped records."""
        if self.function is None:
            return {}
        return {
            "map": str(self.function),
            **({f"map{VALUES}": self.function.values} if self.function.values else {}),
            **({"seed": str(self.seed)} if self.function.transform.takes_context else {}),
        }

    def reader(self, source: Any) -> Callable[[int, int], list[Any]]:
        """Return a function that reads records [start, stop): a `BadRecord` for a bad one, if these are left out."""
        return functools.partial(read_records if self.max_bad is None else _read_tolerant, source)

    def records(
        self, source: Any, samples: Sequence[Any], first: int, skipped: SkippedRecords
    ) -> Iterator[tuple[int, int | None, Any]]:
        """Yield the index of each sample, from `first`, the record's number in a list (or None) and the record."""
        for index, sample in enumerate(samples, first):
            is_bad = isinstance(sample, BadRecord)
            skipped.count(index, sample if is_bad else None)
            if is_bad:
                continue
            if self.function is None:
                yield index, None, sample
            else:
                found = self._apply(self.function.transform, source, sample, index)
                if isinstance(found, BadRecord):
                    skipped.count(index, found, read=0)
                elif isinstance(found, list):
                    for number, record in enumerate(_with_own_keys(cast("list[Any]", found))):
                        if record is not DROP:
                            yield index, number, _checked(record, self.function, index)
                elif found is not DROP:
                    yield index, None, _checked(found, self.function, index)

    def _apply(self, transform: NamedTransform, source: Any, sample: Any, index: int) -> Any:
        try:
            if transform.takes_context:
                return transform.function(sample, SampleContext(index, 0, self.seed))
            return transform.function(sample)
        except Exception as error:
            mark_users(error)
            failure = StageError(f"transform {transform.name!r}", error, index)
            if self.max_bad is not None and failure.record_may_be_at_fault:
                return BadRecord.of(source, index, failure.stage, error, epoch=0, step=index)
            advice = "\n  on_error='skip' leaves such records out" if failure.record_may_be_at_fault else ""
            raise WorkerError(
                f"record {index} of the source failed in {failure.stage}: {message_of(error)}\n  location: "
                f"{printable(str(locate(source, index)))}{advice}{failure.advice}",
                step=index,
                epoch=0,
                indices=(index,),
                traceback_text=traceback_of(error),
            ) from error


class SkippedRecords:
    """Collects the bad records that are left out, in index order, and raises when there are too many."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.records: list[BadRecord] = []

    def count(self, index: int, bad: BadRecord | None, read: int = 1) -> None:
        """Count a record, which may be bad; a WorkerError if too many are."""
        found = [] if bad is None else [bad]
        self.records += found
        self._budget.spend(read, found, epoch=0, step=index, worker="main", where="the conversion")


def _read_tolerant(source: Any, start: int, stop: int) -> list[Any]:
    """Return records [start, stop), with a `BadRecord` in place of each unreadable one."""
    records: list[Any] = []
    for index, found in read_each(source, start, stop):
        is_bad = isinstance(found, Exception)
        records += [BadRecord.of(source, index, "read", found, epoch=0, step=index)] if is_bad else found
    return records


def _checked(record: Any, function: MapFunction, index: int) -> Any:
    if record is None:
        message = "return a record, a list of records, or dataload.DROP to write none"
        raise ConfigError(f"{function.entry.name} returned None for record {index} of the source: {message}", key="map")
    return record


def _with_own_keys(records: list[Any]) -> list[Any]:
    keys = [str(record[KEY]) for record in records if isinstance(record, Mapping) and KEY in record]
    if len({*keys}) == len(keys):
        return records
    return [
        {**record, KEY: numbered(record[KEY], number)} if isinstance(record, Mapping) and KEY in record else record
        for number, record in enumerate(records)
    ]


def numbered(key: str, number: int) -> str:
    return f"{key}-{number:04d}"


def _describe(function: Callable[..., Any]) -> MapEntry:
    """Describe a function: name, text, its module's version, and a hash that covers bound arguments too."""
    bound = ""
    inner: Any = function
    while isinstance(inner, functools.partial):
        # Arguments may be secret, so only their hash is kept.
        bound += repr((inner.args, sorted(inner.keywords.items())))
        inner = inner.func
    named: Any = inner if hasattr(inner, "__qualname__") else type(inner)
    if named is not inner:
        bound += repr(inner)
    try:
        source = inspect.getsource(named)
    except (TypeError, OSError):  # written in C, or in a session
        source = ""
    module = sys.modules.get(str(named.__module__))
    version = getattr(module, "__version__", getattr(module, "version", None))
    name = f"{named.__module__}.{named.__qualname__}"
    digest = hashlib.sha256("\0".join((name, source, _ADDRESS.sub("", bound))).encode(errors="surrogatepass"))
    return MapEntry(
        name=name[:LONGEST_TEXT],
        source=printable(source, LONGEST_SOURCE // 2)[:LONGEST_SOURCE],
        sha256=digest.hexdigest(),
        version=str(version)[:LONGEST_TEXT] if isinstance(version, (str, int, float)) else "",
    )


VALUES = " values"
"""End of the names of such entries among the options of a journal; releases before 0.3 wrote none."""

_UNKNOWN = "unknown: "


def describe_values(function: Any, version: str = "") -> str:
    try:
        return f"Python {sys.version_info.major}.{sys.version_info.minor}, {code_digest(function)}"
    except ValueError as error:
        return f"version {version} ({error})" if version else f"{_UNKNOWN}{error}"


def check_values(begun: Mapping[str, str], now: Mapping[str, str], subject: str, *, resuming: bool) -> None:
    """Raise a ConfigError that begins with `subject` if functions use other values than in the journal's options."""
    for entry, function, values in _functions(now):
        if entry not in begun:
            message = f"{subject} was begun by dataload 0.2, which did not note the values that {function} uses, so"
            remedy = "finish it with 0.2, or pass overwrite=True"
            raise ConfigError(f"{message} records of two functions could be mixed: {remedy}", key="resume")
        if resuming and values.startswith(_UNKNOWN):
            message = f"{subject} was begun with {_unnoticed(function, values)}: pass overwrite=True to start over"
            raise ConfigError(f"{message}. To resume the next time, {_remedy(function)}", key="resume")


def notes_of_values(begun: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield notes about functions that the journal cannot distinguish from others."""
    for entry, function, values in _functions(now):
        if entry not in begun:
            message = f"dataload 0.2 converted this, and did not note the values that {function} uses"
            yield f"{message}: whether they have changed cannot be told"
        elif values.startswith(_UNKNOWN):
            yield f"the function is {_unnoticed(function, values)}: {_remedy(function)}"


def _functions(options: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the journal entry, the name and the values of each function among the options."""
    for entry, values in options.items():
        if entry.endswith(VALUES):
            yield entry, options[entry.removesuffix(VALUES)].partition(" (")[0], values


def _unnoticed(function: str, values: str) -> str:
    return f"{function}, whose changes cannot be noticed, because {values.removeprefix(_UNKNOWN)}"


def _remedy(function: str) -> str:
    return f"give the object a method fingerprint(), or the module of {function} a `version`"
