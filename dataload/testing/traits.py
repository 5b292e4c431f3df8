"""The abilities of a source, and the records for testing it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dataload._util.randomness import generator
from dataload.testing.compare import arrays_in, difference, show


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
