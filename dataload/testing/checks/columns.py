"""Columns: `read_batch` gives the same batch as collating records, and `fields` describes the records."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataload.errors import ConfigError
from dataload.testing.cases import Case, source_check
from dataload.testing.expect import NotApplicable, expect, expect_each_raises, expect_raises


@source_check("Columns")
def check_columns(case: Case) -> None:
    """``read_batch(indices)`` equals ``default_collate`` of the records: values, dtypes, shapes, order.

    It exists because it is faster, and must not differ in anything else. If records cannot be stacked, both raise
    ConfigError.
    """
    case.method("read_batch")
    for indices in (case.indices, case.permuted(), case.pick(12), case.pick(1)):
        case.check_batch(indices)


@source_check("Columns")
def check_columns_of_long_request(case: Case) -> None:
    """The same holds for more rows than there are records.

    Gathers of sorted and merged ranges go wrong here first.
    """
    case.method("read_batch")
    case.check_batch(case.pick(min(1100, 20 * len(case.indices))))


@source_check("Columns")
def check_columns_of_any_request(case: Case) -> None:
    """`read_batch` takes what `__getitems__` takes: duplicates, negative indices, arrays, tuples, ranges, iterators.

    The loader chooses between the two by speed.
    """
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
    """One bad index fails the whole batch: IndexError if it is out of range, TypeError if it is not an index.

    A fast path that clips or wraps gives a batch that looks right.
    """
    read_batch = case.method("read_batch")
    good, length = case.pick(2), len(case.oracle)
    bad = [[*good, index] for index in (length, -length - 1, 2**63)]
    expect_each_raises(IndexError, read_batch, bad, "read_batch({})")
    wrong = ([*good, 1.0], [*good, None], [True, False], np.array([0.0]))
    expect_each_raises(TypeError, read_batch, wrong, "read_batch({})")


@source_check("Columns")
def check_columns_of_some_fields(case: Case) -> None:
    """``read_batch(indices, fields)`` reads these fields, in that order; an unknown field is a ConfigError naming it.

    Skipping unused fields is the cheapest optimisation; a typo in a name must not pass unnoticed.
    """
    read_batch = case.method("read_batch")
    indices = case.pick(5)
    record = case.oracle[indices[0]]
    unknown = "x"
    if isinstance(record, Mapping):
        names = list(record)
        unknown = f"{names[0]}s?"
        for chosen in (names[:1], names[::-1]):
            got = case.check_batch(indices, fields=chosen)
            expect(got is None or list(got) == chosen, f"fields={chosen} gives them in the order {got and list(got)}")
    call = f"read_batch(indices, [{unknown!r}])"
    error = expect_raises(ConfigError, lambda: read_batch(indices, [unknown]), call)
    expect(unknown in str(error), f"the error does not name the unknown field: {error}")


@source_check("Columns")
def check_fields(case: Case) -> None:
    """`fields` names the fields of every record, with the dtypes and shapes of their values.

    Tools plan from it (`inspect`, a conversion, a buffer) without reading a record.
    """
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
