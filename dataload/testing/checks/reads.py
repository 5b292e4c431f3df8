"""Reads: an index identifies one record in any request."""

import contextlib
import itertools
import pickle
from typing import Any

import numpy as np

from dataload.errors import ConfigError
from dataload.sources.shards import Location
from dataload.testing.cases import (
    Case,
    NotApplicable,
    close,
    expect,
    expect_each_raises,
    expect_equal,
    expect_raises,
    source_check,
)


@source_check("Reads")
def check_length(case: Case) -> None:
    """`len` is the number of records, and does not change."""
    count = len(case.oracle)
    expect(len(case.source) == count, f"len is {len(case.source)}, expected {count}")
    for index in case.indices[:1]:
        _ = case.source[index]
        expect(len(case.source) == count, f"len is {len(case.source)} after a read, {count} before")


@source_check("Reads")
def check_records(case: Case) -> None:
    """``source[i]`` is record i, with the types, dtypes and shapes that were written."""
    case.check_single_reads(case.indices)


@source_check("Reads")
def check_repeated_reads(case: Case) -> None:
    """The same index gives the same record, in any order and in repeated reads."""
    case.check_single_reads([*reversed(case.indices), *case.pick(40), *case.indices[:1] * 3])


@source_check("Reads")
def check_request(case: Case) -> None:
    """``__getitems__(indices)`` is the list of ``source[i]``."""
    got = case.method("__getitems__")(list(case.indices))
    expect(isinstance(got, list), f"__getitems__ gives a {type(got).__name__}, expected a list")
    case.check_records(case.indices, got)


@source_check("Reads")
def check_request_order(case: Case) -> None:
    """Records come in the order of the request, not of the file."""
    case.method("__getitems__")
    for indices in (case.permuted(), list(reversed(case.indices))):
        case.check_request(indices)


@source_check("Reads")
def check_duplicates(case: Case) -> None:
    """An index that occurs twice in a request gives two records."""
    case.method("__getitems__")
    first, *_, last = case.pick(2)
    for indices in ([first, first], [last, first, last, last], [*case.indices[:3], *case.indices[:3]]):
        case.check_request(indices)


@source_check("Reads")
def check_empty_request(case: Case) -> None:
    """A request without indices gives ``[]``, and a batch without rows ``{}``: a rank's last step may be empty."""
    read = case.method("__getitems__")
    for empty in ([], (), np.empty(0, np.int64), range(0)):
        got = read(empty)
        expect(got == [] and isinstance(got, list), f"__getitems__({empty!r}) gives {got!r}, expected []")
    if hasattr(case.source, "read_batch"):
        expect_equal(case.source.read_batch([]), {}, "read_batch([])")


@source_check("Reads")
def check_long_request(case: Case) -> None:
    """A request may have more rows than the source has records."""
    case.method("__getitems__")
    case.check_request(case.pick(min(1100, 20 * len(case.indices))))


@source_check("Reads")
def check_iteration(case: Case) -> None:
    """Iteration gives every record once, in index order, and then ends."""
    whole = len(case.indices) == len(case.oracle)
    known = set(case.indices)
    # Request one more record than expected, so that a source that never ends is noticed.
    limit = len(case.oracle) + 1 if whole else min(len(case.oracle), 16)
    count = 0
    for index, record in enumerate(itertools.islice(iter(case.source), limit)):
        expect(index < len(case.oracle), f"iteration continues after the last of {len(case.oracle)} records")
        if index in known:
            case.check_record(index, record)
        count += 1
    wanted = len(case.oracle) if whole else limit
    expect(count == wanted, f"iteration ends after {count} records, expected {wanted}")


class _Index:
    """An integer only by `__index__`."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


@source_check("Reads")
def check_index_types(case: Case) -> None:
    """Everything with ``__index__`` is an index, numpy integers included."""
    for index in case.indices[-1:] + case.indices[:1]:
        kinds: list[Any] = [np.int64, np.int32, np.uint64, _Index]
        for kind in kinds + ([np.uint8] if index < 256 else []):
            case.check_record(index, case.source[kind(index)])


@source_check("Reads")
def check_request_types(case: Case) -> None:
    """A request may be a list, a tuple, an integer array of any width, a range or an iterator."""
    case.method("__getitems__")
    indices = case.pick(7)
    for request in (
        tuple(indices),
        np.array(indices, np.int64),
        np.array(indices, np.int32),
        np.array(indices, np.uint64),
        np.repeat(np.array(indices, np.int64), 2)[::2],  # strided
        [np.int64(index) for index in indices],
        [_Index(index) for index in indices],
        iter(indices),
    ):
        case.check_request(indices, request)
    start = case.indices[0]
    span = range(start, start + sum(1 for i, index in enumerate(case.indices) if index == start + i))
    case.check_request(span, span)


@source_check("Reads")
def check_request_is_not_changed(case: Case) -> None:
    """Reading does not write to the request: a sampler may return the same array again."""
    indices = np.array(case.pick(9), np.int64)
    before = indices.copy()
    case.method("__getitems__")(indices)
    expect((indices == before).all(), f"__getitems__ changed its argument from {before} to {indices}")
    if hasattr(case.source, "read_batch"):
        with contextlib.suppress(ConfigError):  # records that cannot be stacked
            case.source.read_batch(indices)
        expect((indices == before).all(), f"read_batch changed its argument from {before} to {indices}")


@source_check("Reads")
def check_slices(case: Case) -> None:
    """A slice is a source of these records, made without reading them."""
    source: Any = case.source
    if not case.traits.slices:
        expect_raises(TypeError, lambda: source[0:1], "source[0:1]")
        return
    case.needs_all_records()
    for where in (slice(1, 5), slice(None, None, 3), slice(None, None, -1), slice(-4, None), slice(5, 3)):
        span = range(len(case.oracle))[where]
        part = source[where]
        expect(len(part) == len(span), f"source[{where}] has {len(part)} records, expected {len(span)}")
        for offset, index in enumerate(span):
            expect_equal(part[offset], case.oracle[index], f"source[{where}][{offset}]")
        expect_raises(IndexError, lambda part=part: part[len(part)], f"source[{where}][len]")
        _check_shards(part, len(span), f"source[{where}]")


@source_check("Reads")
def check_slices_are_sources(case: Case) -> None:
    """A slice supports requests, batches, negative indices, further slices and pickling as a source does."""
    source: Any = case.source
    length = len(case.oracle)
    if not case.traits.slices or length != len(case.indices) or length < 4:
        raise NotApplicable("the source has no slices, or too few records are known")
    for where in (slice(1, None), slice(None, None, -2)):
        part, span = source[where], range(length)[where]
        of_part = Case(part, case.expected(span), tuple(range(len(span))), case.traits)
        indices = [len(span) - 1, 0, len(span) - 1]
        request = [*indices[:2], -1] if case.traits.negative_index else indices
        of_part.check_request(indices, request)
        if hasattr(part, "read_batch"):
            of_part.check_batch(indices, request)
        case.check_record(span[1], part[1:][0])
        copy = pickle.loads(pickle.dumps(part))  # noqa: S301 - made here
        case.check_record(span[-1], copy[len(span) - 1])
        close(copy)


@source_check("Reads")
def check_read(case: Case) -> None:
    """``read(indices)`` is ``__getitems__`` under a readable name."""
    read = case.method("read")
    for indices in (case.permuted(), case.pick(9), []):
        case.check_records(indices, read(indices))


@source_check("Reads")
def check_reversed(case: Case) -> None:
    """``reversed(source)`` gives the records from the last to the first."""
    last = case.indices[::-1][: 1 if len(case.indices) != len(case.oracle) else None]
    for index, record in zip(last, reversed(case.source), strict=False):
        case.check_record(index, record)


@source_check("Reads")
def check_reads_in_order(case: Case) -> None:
    """`reads_in_order`, which decides the default order, is a bool that reads do not change."""
    told: Any = case.method("reads_in_order")
    expect(isinstance(told, bool), f"reads_in_order is {told!r}, expected a bool")
    case.check_single_reads(case.pick(5))
    expect(case.source.reads_in_order == told, f"reads_in_order is {told}, and {not told} after reads")


@source_check("Reads")
def check_locate(case: Case) -> None:
    """``locate(index)`` gives each record its own location, for error messages, without reading the record."""
    locate = case.method("locate")
    length = len(case.oracle)
    seen: dict[Any, int] = {}
    for index in case.indices:
        found = locate(index)
        expect(isinstance(found, Location), f"locate({index}) gives {found!r}, expected a Location")
        expect(found.record >= 0, f"locate({index}) gives record {found.record}")
        other = seen.setdefault(found[:2], index)
        expect(other == index, f"locate gives {found[:2]} for both {other} and {index}")
        if case.traits.negative_index:
            expect(locate(index - length) == found, f"locate({index - length}) is not locate({index})")
    expect_each_raises(IndexError, locate, (length, -length - 1), f"locate({{}}) of {length} records")


@source_check("Reads")
def check_shard_lengths(case: Case) -> None:
    """`shard_lengths` are non-negative ints that add up to `len`."""
    case.method("shard_lengths")
    _check_shards(case.source, len(case.oracle), "source")


def _check_shards(source: Any, length: int, what: str) -> None:
    lengths = getattr(source, "shard_lengths", None)
    if lengths is None:
        return
    shown = f"{what}.shard_lengths is {lengths!r}"
    expect(isinstance(lengths, tuple), f"{shown}, expected a tuple")
    expect(all(type(n) is int and n >= 0 for n in lengths), f"{shown}, expected non-negative ints")
    expect(sum(lengths) == length, f"{shown}, which add up to {sum(lengths)}; the source has {length} records")
