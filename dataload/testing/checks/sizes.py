"""Sizes: data sets of none, one and several files, and records from no byte to more than a megabyte."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataload.errors import ConfigError
from dataload.sources.memory import MemorySource
from dataload.testing.cases import Case, Maker, NotApplicable, expect, expect_raises, maker_check

_PAGE = 4096
_LETTERS = bytes(97 + byte % 26 for byte in range(256))


@maker_check("Sizes", since="0.1")
def check_single_record(maker: Maker) -> None:
    """A data set of one record is read like any other.

    There is no stride, no second offset and no last-but-one to compute from.
    """
    case = maker.case(maker.records(1))
    expect(len(case.source) == 1, f"len is {len(case.source)}, expected 1")
    case.check_record(0, case.source[0])
    case.check_records([0, 0], _read(case.source, [0, 0]))


@maker_check("Sizes", since="0.1")
def check_empty_dataset(maker: Maker) -> None:
    """A data set of no records has length 0, reads as nothing and has no index; or it is refused by name.

    A filter that kept nothing, or the last shard of a conversion, makes one.
    """
    if not maker.traits.empty_dataset:
        expect_raises((ConfigError, ValueError), lambda: len(maker.open(maker.write([]))), "an empty data set")
        return
    source = maker.case([]).source
    expect(len(source) == 0, f"len is {len(source)}, expected 0")
    expect(_read(source, []) == [], "reading no records gives some")
    expect(list(source) == [], "iterating over no records gives some")
    expect_raises(IndexError, lambda: source[0], "source[0] of no records")
    expect_raises(IndexError, lambda: source[-1], "source[-1] of no records")


@maker_check("Sizes", since="0.1")
def check_record_sizes(maker: Maker) -> None:
    """Records of one byte, about a page and more than a megabyte come back whole, side by side.

    Block sizes, page boundaries and length fields of few bits lie between them.
    """
    sizes = [1, 2, 511, 512, 513, _PAGE - 1, _PAGE, _PAGE + 1, 65_536, (1 << 20) + 3, 1, 7]
    case = maker.case(_records_of(maker, sizes))
    indices = [*case.indices, *reversed(case.indices)]
    case.check_records(indices, _read(case.source, indices))


@maker_check("Sizes", since="0.1")
def check_empty_values(maker: Maker) -> None:
    """Values of no bytes come back as such, between others that have some; or they are refused by name.

    An empty caption is a caption. An offset that equals the next one must not read as missing, or as the rest.
    """
    records = _records_of(maker, [0, 5, 0, 0, 3, 0])
    if not maker.traits.empty_values:
        expect_raises((ConfigError, ValueError), lambda: maker.case(records).source[0], "an empty value")
        return
    case = maker.case(records)
    case.check_records(case.indices, _read(case.source, list(case.indices)))
    all_empty = maker.case(_records_of(maker, [0, 0, 0]))
    all_empty.check_records(all_empty.indices, _read(all_empty.source, list(all_empty.indices)))


def _records_of(maker: Maker, sizes: list[int]) -> list[Any]:
    """Records whose values have these numbers of bytes."""
    traits = maker.traits
    data = [np.random.default_rng(size).bytes(size) for size in sizes]
    if traits.record_type is bytes:
        return data
    kinds = [kind for kind in traits.value_types if kind in (np.ndarray, bytes, str)]
    if not kinds:
        raise NotApplicable("records have values of fixed size only")
    return [{kind.__name__: _value(kind, value, traits.dtypes[0]) for kind in kinds} for value in data]


def _value(kind: type, data: bytes, dtype: str) -> Any:
    if kind is np.ndarray:
        return np.frombuffer(data, np.uint8).astype(dtype)
    return data.translate(_LETTERS).decode() if kind is str else data


@maker_check("Sizes", since="0.1")
def check_shards(maker: Maker) -> None:
    """Several files are one data set, in the order in which they are given; no record is lost at a boundary.

    Shards have different lengths, and some are empty.
    """
    if not maker.traits.several_paths:
        raise NotApplicable("open takes one path")
    lengths = [5, 1, 0, 3, 1, 0] if maker.traits.empty_dataset else [5, 1, 3, 1]
    records = maker.records(sum(lengths))
    starts = [sum(lengths[:shard]) for shard in range(len(lengths))]
    parts = [records[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    # What is expected may depend on the place in a file, as keys do, so it is asked for by file.
    oracle = MemorySource([record for part in parts for record in maker.oracle(part)])
    source = maker.open([maker.write(part) for part in parts])
    case = Case(source, oracle, tuple(range(len(records))), maker.traits)
    expect(len(case.source) == len(records), f"len is {len(case.source)}, expected {len(records)}")
    for index in case.indices:
        case.check_record(index, case.source[index])
    for indices in (case.permuted(), list(case.indices), case.indices[-1:], case.pick(40)):
        case.check_records(indices, _read(case.source, list(indices)))
    expect_raises(IndexError, lambda: case.source[len(records)], f"source[{len(records)}]")
    found = getattr(case.source, "shard_lengths", tuple(lengths))
    expect(found == tuple(lengths), f"shard_lengths are {found}, expected {tuple(lengths)}")


def _read(source: Any, indices: list[int]) -> list[Any]:
    read = getattr(source, "__getitems__", None)
    return read(indices) if read is not None else [source[index] for index in indices]
