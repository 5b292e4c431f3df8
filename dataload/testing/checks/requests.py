"""Requests: sizes, bounds, and columns."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataload.errors import ConfigError
from dataload.sources.memory import MemorySource
from dataload.testing.cases import (
    Case,
    Maker,
    NotApplicable,
    expect,
    expect_each_raises,
    expect_raises,
    maker_check,
    source_check,
)

_PAGE = 4096
_HUGE = (2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63) - 1)
_LETTERS = bytes(97 + byte % 26 for byte in range(256))


@maker_check("Sizes")
def check_single_record(maker: Maker) -> None:
    """A data set of one record is read like any other."""
    case = maker.case(maker.records(1))
    expect(len(case.source) == 1, f"len is {len(case.source)}, expected 1")
    case.check_record(0, case.source[0])
    case.check_request([0, 0])


@maker_check("Sizes")
def check_empty_dataset(maker: Maker) -> None:
    """A data set without records has length 0, no index, and reads as nothing; or writing it raises an error."""
    if not maker.traits.empty_dataset:
        expect_raises((ConfigError, ValueError), lambda: len(maker.open(maker.write([]))), "an empty data set")
        return
    case = maker.case([])
    expect(len(case.source) == 0, f"len is {len(case.source)}, expected 0")
    case.check_request([])
    expect(list(case.source) == [], "iterating over an empty data set gives records")
    expect_each_raises(IndexError, lambda index: case.source[index], (0, -1), "source[{}] of an empty data set")


@maker_check("Sizes")
def check_record_sizes(maker: Maker) -> None:
    """Records of one byte, about a page, and more than a megabyte are read correctly side by side."""
    sizes = [1, 2, 511, 512, 513, _PAGE - 1, _PAGE, _PAGE + 1, 65_536, (1 << 20) + 3, 1, 7]
    case = maker.case(_records_of(maker, sizes))
    case.check_request([*case.indices, *reversed(case.indices)])


@maker_check("Sizes")
def check_empty_values(maker: Maker) -> None:
    """Values of zero bytes, such as empty captions, are read beside other values; or writing them raises an error."""
    records = _records_of(maker, [0, 5, 0, 0, 3, 0])
    if not maker.traits.empty_values:
        expect_raises((ConfigError, ValueError), lambda: maker.case(records).source[0], "an empty value")
        return
    for case in (maker.case(records), maker.case(_records_of(maker, [0, 0, 0]))):
        case.check_request(case.indices)


def _records_of(maker: Maker, sizes: list[int]) -> list[Any]:
    """Return records whose values have these sizes in bytes."""
    traits = maker.traits
    data = [np.random.default_rng(size).bytes(size) for size in sizes]
    if traits.record_type is bytes:
        return data
    kinds = [kind for kind in traits.value_types if kind in (np.ndarray, bytes, str)]
    if not kinds:
        raise NotApplicable("all values have a fixed size")
    return [{kind.__name__: _value(kind, value, traits.dtypes[0]) for kind in kinds} for value in data]


def _value(kind: type, data: bytes, dtype: str) -> Any:
    if kind is np.ndarray:
        return np.frombuffer(data, np.uint8).astype(dtype)
    return data.translate(_LETTERS).decode() if kind is str else data


@maker_check("Sizes")
def check_shards(maker: Maker) -> None:
    """Several files, some of them empty, are one data set in the order given, without losses at boundaries."""
    if not maker.traits.several_paths:
        raise NotApplicable("open takes one path")
    lengths = [5, 1, 0, 3, 1, 0] if maker.traits.empty_dataset else [5, 1, 3, 1]
    records = maker.records(sum(lengths))
    starts = [sum(lengths[:shard]) for shard in range(len(lengths))]
    parts = [records[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    # Expected records are computed per file, because they may depend on the position in it, as keys do.
    oracle = MemorySource([record for part in parts for record in maker.oracle(part)])
    source = maker.open([maker.write(part) for part in parts])
    case = Case(source, oracle, tuple(range(len(records))), maker.traits)
    expect(len(source) == len(records), f"len is {len(source)}, expected {len(records)}")
    case.check_single_reads(case.indices)
    for indices in (case.permuted(), case.indices, case.indices[-1:], case.pick(40)):
        case.check_request(indices)
    expect_raises(IndexError, lambda: source[len(records)], f"source[{len(records)}]")
    found = getattr(source, "shard_lengths", tuple(lengths))
    expect(found == tuple(lengths), f"shard_lengths are {found}, expected {tuple(lengths)}")


@source_check("Bounds")
def check_negative_index(case: Case) -> None:
    """``source[-1]`` is the last record and ``source[-len]`` the first, or every negative index is an IndexError."""
    length = len(case.oracle)
    for index in case.indices[-3:][::-1] + case.indices[:1]:
        negative = index - length
        if case.traits.negative_index:
            case.check_record(index, case.source[negative])
        else:
            expect_raises(IndexError, lambda at=negative: case.source[at], f"source[{negative}]")


@source_check("Bounds")
def check_negative_index_in_request(case: Case) -> None:
    """A request treats negative indices as single reads do."""
    read = case.method("__getitems__")
    length = len(case.oracle)
    indices = [*case.indices[-2:], *case.indices[:2]]
    mixed: list[int] = [index - length if row % 2 else index for row, index in enumerate(indices)]
    for request in (mixed, np.array(mixed, np.int64)):
        if case.traits.negative_index:
            case.check_request(indices, request)
        elif any(index < 0 for index in mixed):
            expect_raises(IndexError, lambda request=request: read(request), f"a request of {mixed}")


@source_check("Bounds")
def check_out_of_range(case: Case) -> None:
    """An index out of range raises IndexError, which ends Python's iteration, even beyond machine integers."""
    length = len(case.oracle)
    outside = (length, length + 1, -length - 1, *_HUGE)
    expect_each_raises(IndexError, lambda index: case.source[index], outside, f"source[{{}}] of {length} records")


@source_check("Bounds")
def check_index_error_text(case: Case) -> None:
    """The IndexError names the index and the number of records."""
    length = len(case.oracle)
    for index in (length, length + 1000):
        text = str(expect_raises(IndexError, lambda at=index: case.source[at], f"source[{index}]"))
        rest = text.replace(str(index), "", 1)  # which may contain the other number
        expect(rest != text and str(length) in rest, f"{text!r} does not name {index} and {length}")


@source_check("Bounds")
def check_wrong_index_types(case: Case) -> None:
    """A float, a string, a bool and None are not indices: TypeError."""
    source: Any = case.source
    wrong = (1.0, "1", None, True, np.float64(0), np.bool_(False), [0.5])
    expect_each_raises(TypeError, lambda index: source[index], wrong, "source[{}]")


@source_check("Bounds")
def check_bad_index_in_request(case: Case) -> None:
    """One bad index fails the whole request, no records are returned, and the source still works."""
    read = case.method("__getitems__")
    length, good = len(case.oracle), case.pick(3)
    bad = [[*good, index] for index in (length, -length - 1, 2**63)]
    expect_each_raises(IndexError, read, [*bad, *([request[-1], *good] for request in bad)], "a request of {}")
    wrong = ([*good, 1.0], [*good, "1"], [*good, None], [True, False], np.array([0.0]), 0, [[0]])
    expect_each_raises(TypeError, read, wrong, "a request of {}")
    case.check_request(good)


@source_check("Columns")
def check_columns(case: Case) -> None:
    """``read_batch(indices)`` equals ``default_collate`` of the records, also in its ConfigError for ragged ones."""
    case.method("read_batch")
    for indices in (case.indices, case.permuted(), case.pick(12), case.pick(1)):
        case.check_batch(indices)


@source_check("Columns")
def check_columns_of_long_request(case: Case) -> None:
    """`read_batch` may be asked for more rows than the source has records."""
    case.method("read_batch")
    case.check_batch(case.pick(min(1100, 20 * len(case.indices))))


@source_check("Columns")
def check_columns_of_any_request(case: Case) -> None:
    """`read_batch` takes what `__getitems__` takes: duplicates, negative indices, arrays, tuples, ranges, iterators."""
    case.method("read_batch")
    first, last, length = case.indices[0], case.indices[-1], len(case.oracle)
    case.check_batch([last, first, last, last])
    indices = case.pick(6)
    requests: list[Any] = [tuple(indices), np.array(indices, np.int32), np.array(indices, np.uint64), iter(indices)]
    if case.traits.negative_index:
        requests += [[index - length for index in indices], np.array(indices) - length]
    for request in requests:
        case.check_batch(indices, request)


@source_check("Columns")
def check_columns_out_of_range(case: Case) -> None:
    """One bad index fails the whole batch: IndexError if it is out of range, TypeError if it is not an index."""
    read_batch = case.method("read_batch")
    good, length = case.pick(2), len(case.oracle)
    bad = [[*good, index] for index in (length, -length - 1, 2**63)]
    expect_each_raises(IndexError, read_batch, bad, "read_batch({})")
    wrong = ([*good, 1.0], [*good, None], [True, False], np.array([0.0]))
    expect_each_raises(TypeError, read_batch, wrong, "read_batch({})")


@source_check("Columns")
def check_columns_of_some_fields(case: Case) -> None:
    """``read_batch(indices, fields)`` reads these fields in order, or raises a ConfigError naming an unknown one."""
    read_batch = case.method("read_batch")
    indices = case.pick(5)
    record = case.oracle[indices[0]]
    unknown = "x"
    if isinstance(record, Mapping):
        names = list(record)
        unknown = f"{names[0]}s?"
        for chosen in (names[:1], names[::-1]):
            got = case.check_batch(indices, fields=chosen)
            expect(
                got is None or list(got) == chosen,
                f"fields={chosen} returns the fields in the order {got and list(got)}",
            )
    call = f"read_batch(indices, [{unknown!r}])"
    error = expect_raises(ConfigError, lambda: read_batch(indices, [unknown]), call)
    expect(unknown in str(error), f"the error does not name the unknown field: {error}")


@source_check("Columns")
def check_fields(case: Case) -> None:
    """`fields` names the fields of every record, with the dtypes and shapes of their values."""
    specs: Any = getattr(case.source, "fields", None)
    if not isinstance(specs, Mapping):
        raise NotApplicable(f"{type(case.source).__name__} has no fields")
    for index in case.indices:
        record = case.oracle[index]
        if not isinstance(record, Mapping):
            expect(not specs, f"fields is {dict(specs)!r}, but record {index} is {type(record).__name__}")
            continue
        expect(set(specs) == set(record), f"fields are {sorted(specs)}, record {index} has {sorted(record)}")
        for name, value in record.items():
            kind = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            message = f"field {name!r} of record {index} is {kind}, fields has {specs[name]}"
            expect(_fits(value, specs[name]), message)


def _fits(value: Any, spec: Any) -> bool:
    if spec.dtype == "unknown":
        return True
    if isinstance(value, (bytes, str)):
        return spec.dtype == type(value).__name__
    array = np.asarray(value)
    shape = array.shape if spec.shape is None else spec.shape
    fits = len(shape) == array.ndim and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
    return fits and str(array.dtype) == spec.dtype
