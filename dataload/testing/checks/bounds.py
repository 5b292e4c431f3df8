"""Bounds: an index that names no record is an error that says so, and nothing is read in part."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataload.testing.cases import Case, NotApplicable, expect, expect_raises, source_check

_HUGE = (2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63) - 1)


@source_check("Bounds", since="0.1")
def check_negative_index(case: Case) -> None:
    """``source[-1]`` is the last record, ``source[-len]`` the first; or every negative index is an IndexError.

    What it may not be is some other record.
    """
    length = len(case.oracle)
    for index in case.indices[-3:][::-1] + case.indices[:1]:
        negative = index - length
        if case.traits.negative_index:
            case.check_record(index, case.source[negative])
        else:
            expect_raises(IndexError, lambda at=negative: case.source[at], f"source[{negative}]")


@source_check("Bounds", since="0.1")
def check_negative_index_in_request(case: Case) -> None:
    """A request counts negative indices as single reads do.

    Otherwise the same index means two records.
    """
    read = case.method("__getitems__")
    length = len(case.oracle)
    indices = [*case.indices[-2:], *case.indices[:2]]
    mixed: list[int] = [index - length if place % 2 else index for place, index in enumerate(indices)]
    for request in (mixed, np.array(mixed, np.int64)):
        if case.traits.negative_index:
            case.check_records(indices, read(request))
        elif any(index < 0 for index in mixed):
            expect_raises(IndexError, lambda request=request: read(request), f"a request of {mixed}")


@source_check("Bounds", since="0.1")
def check_out_of_range(case: Case) -> None:
    """An index outside is an IndexError, up to numbers that no machine integer holds.

    IndexError ends Python's iteration; anything else, or a record, is a wrong answer.
    """
    length = len(case.oracle)
    for index in (length, length + 1, -length - 1, *_HUGE):
        expect_raises(IndexError, lambda at=index: case.source[at], f"source[{index}] of {length} records")


@source_check("Bounds", since="0.1")
def check_index_error_text(case: Case) -> None:
    """The IndexError names the index and the number of records.

    "list index out of range" in a worker, three hours into a run, helps nobody.
    """
    length = len(case.oracle)
    for index in (length, length + 1000):
        error = expect_raises(IndexError, lambda at=index: case.source[at], f"source[{index}]")
        text = str(error)
        expect(str(index) in text and str(length) in text, f"{text!r} does not name {index} and {length}")


@source_check("Bounds", since="0.1")
def check_wrong_index_types(case: Case) -> None:
    """A float, a text, a bool and None are no indices: TypeError.

    1.5 would be rounded, True would be 1 (and a mask of bools a request of ones and zeros).
    """
    source: Any = case.source
    for index in (1.0, "1", None, True, np.float64(0), np.bool_(False), [0]):
        expect_raises(TypeError, lambda at=index: source[at], f"source[{index!r}]")


@source_check("Bounds", since="0.1")
def check_bad_index_in_request(case: Case) -> None:
    """One bad index fails the whole request; nothing is returned in part, and the source goes on.

    A batch with a row less is a shape error far away, or none at all.
    """
    read = case.method("__getitems__")
    if not case.indices:
        raise NotApplicable("the data set is empty")
    length = len(case.oracle)
    good = case.pick(3)
    for bad in (length, -length - 1, 2**63):
        for request in ([*good, bad], [bad, *good]):
            expect_raises(IndexError, lambda request=request: read(request), f"a request with {bad} in it")
    wrong: tuple[Any, ...] = ([*good, 1.0], [*good, "1"], [*good, None], [True, False], np.array([0.0]), 0, [[0]])
    for request in wrong:
        expect_raises(TypeError, lambda request=request: read(request), f"a request of {request!r}")
    case.check_records(good, read(good))
