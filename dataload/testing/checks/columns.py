"""Columns: `read_batch`, the fast path, equals the slow one; and `fields` says what records hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataload.collate import default_collate
from dataload.errors import ConfigError
from dataload.testing.cases import Case, NotApplicable, expect, expect_equal, expect_raises, source_check


@source_check("Columns", since="0.1")
def check_columns(case: Case) -> None:
    """``read_batch(indices)`` equals ``default_collate`` of the records: values, dtypes, shapes, order.

    It exists because it is faster, and must not be told apart by anything else. Where records cannot be stacked, both
    raise ConfigError.
    """
    case.method("read_batch")
    for indices in (list(case.indices), case.permuted(), case.pick(12), case.pick(1)):
        _check_batch(case, indices, None)


@source_check("Columns", since="0.1")
def check_columns_of_long_request(case: Case) -> None:
    """The same for more rows than there are records, some of them many times.

    Gathers by sorted and merged ranges go wrong here first.
    """
    case.method("read_batch")
    _check_batch(case, case.pick(min(1100, 20 * len(case.indices))), None)


@source_check("Columns", since="0.1")
def check_columns_of_any_request(case: Case) -> None:
    """`read_batch` takes what `__getitems__` takes: duplicates, negative indices, arrays, tuples, ranges, iterators.

    The loader chooses between the two by speed.
    """
    read_batch = case.method("read_batch")
    first, last, length = case.indices[0], case.indices[-1], len(case.oracle)
    _check_batch(case, [last, first, last, last], None)
    indices = case.pick(6)
    want = _stacked(case.expected(indices))
    if want is None:
        raise NotApplicable("these records cannot be stacked")
    requests: list[Any] = [tuple(indices), np.array(indices, np.int32), np.array(indices, np.uint64), iter(indices)]
    if case.traits.negative_index:
        requests += [[index - length for index in indices], np.array(indices) - length]
    for request in requests:
        expect_equal(read_batch(request), want, f"read_batch({request!r})")


@source_check("Columns", since="0.1")
def check_columns_out_of_range(case: Case) -> None:
    """One bad index fails the whole batch: IndexError outside of the data set, TypeError for what is no index.

    A fast path that clips or wraps gives a batch that looks right.
    """
    read_batch = case.method("read_batch")
    good, length = case.pick(2), len(case.oracle)
    for bad in (length, -length - 1, 2**63):
        expect_raises(IndexError, lambda bad=bad: read_batch([*good, bad]), f"read_batch with {bad} in it")
    for wrong in ([*good, 1.0], [*good, None], [True, False], np.array([0.0])):
        expect_raises(TypeError, lambda wrong=wrong: read_batch(wrong), f"read_batch({wrong!r})")


def _stacked(records: list[Any]) -> Any:
    try:
        return default_collate(records)
    except ConfigError:
        return None


@source_check("Columns", since="0.1")
def check_columns_of_some_fields(case: Case) -> None:
    """``read_batch(indices, fields)`` reads these fields, in that order; an unknown one is a ConfigError naming it.

    Not reading what nobody uses is the cheapest of all optimisations; a typing error in a name must not pass.
    """
    read_batch = case.method("read_batch")
    indices = case.pick(5)
    record = case.oracle[indices[0]]
    if not isinstance(record, Mapping):
        error = expect_raises(ConfigError, lambda: read_batch(indices, ["x"]), "read_batch(indices, ['x'])")
        expect("x" in str(error), f"the error does not name the field: {error}")
        return
    names = list(record)
    for chosen in (names[:1], names[::-1]):
        got = _check_batch(case, indices, chosen)
        expect(got is None or list(got) == chosen, f"fields={chosen} gives them in the order {got and list(got)}")
    call = f"read_batch(indices, ['{names[0]}s?'])"
    error = expect_raises(ConfigError, lambda: read_batch(indices, [f"{names[0]}s?"]), call)
    expect(f"{names[0]}s?" in str(error), f"the error does not name the unknown field: {error}")


def _check_batch(case: Case, indices: list[int], fields: list[str] | None) -> dict[str, Any] | None:
    """Compare one batch; returns it, or None where records cannot be stacked."""
    records = case.expected(indices)
    if fields is not None:
        records = [{name: record[name] for name in fields} for record in records]
    call = f"read_batch of {len(indices)} rows" + (f", fields={fields}" if fields else "")
    try:
        want = default_collate(records)
    except ConfigError:
        expect_raises(ConfigError, lambda: case.source.read_batch(indices, fields), call)
        return None
    got = case.source.read_batch(indices, fields)
    expect_equal(got, want, call)
    return got if isinstance(got, dict) else None


@source_check("Columns", since="0.1")
def check_fields(case: Case) -> None:
    """`fields` names the fields of every record, with dtypes and shapes that the values have.

    Tools plan from it (`inspect`, a conversion, a buffer) without reading a record.
    """
    specs: Any = getattr(case.source, "fields", None)
    if not isinstance(specs, Mapping):
        raise NotApplicable(f"{type(case.source).__name__} has no fields")
    for index in case.indices:
        record = case.oracle[index]
        if not isinstance(record, Mapping):
            expect(not specs, f"fields are {dict(specs)!r}, but record {index} is {type(record).__name__}")
            continue
        expect(set(specs) == set(record), f"fields are {sorted(specs)}, record {index} has {sorted(record)}")
        for name, value in record.items():
            expect(
                _fits(value, specs[name]),
                f"field {name!r} of record {index} is {_describe(value)}, fields says {specs[name]}",
            )


def _fits(value: Any, spec: Any) -> bool:
    if spec.dtype == "unknown":
        return True
    if isinstance(value, (bytes, str)):
        return spec.dtype == type(value).__name__
    array = np.asarray(value)
    if str(array.dtype) != spec.dtype:
        return False
    if spec.shape is None:
        return True
    return len(spec.shape) == array.ndim and all(
        extent in (None, actual) for extent, actual in zip(spec.shape, array.shape, strict=True)
    )


def _describe(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
