"""Bounds: an index without a record is an error that says so, and no request is answered in part."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataload.testing.cases import Case, expect, expect_each_raises, expect_raises, source_check

_HUGE = (2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63) - 1)


@source_check("Bounds")
def check_negative_index(case: Case) -> None:
    """``source[-1]`` is the last record and ``source[-len]`` the first, or every negative index is an IndexError.

    It must never be some other record.
    """
    length = len(case.oracle)
    for index in case.indices[-3:][::-1] + case.indices[:1]:
        negative = index - length
        if case.traits.negative_index:
            case.check_record(index, case.source[negative])
        else:
            expect_raises(IndexError, lambda at=negative: case.source[at], f"source[{negative}]")


@source_check("Bounds")
def check_negative_index_in_request(case: Case) -> None:
    """A request treats negative indices as single reads do.

    Otherwise the same index means two records.
    """
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
    """An index out of range is an IndexError, even if no machine integer can hold it.

    IndexError is what ends Python's iteration.
    """
    length = len(case.oracle)
    outside = (length, length + 1, -length - 1, *_HUGE)
    expect_each_raises(IndexError, lambda index: case.source[index], outside, f"source[{{}}] of {length} records")


@source_check("Bounds")
def check_index_error_text(case: Case) -> None:
    """The IndexError names the index and the number of records.

    A bare "list index out of range" from a worker, three hours into a run, helps nobody.
    """
    length = len(case.oracle)
    for index in (length, length + 1000):
        text = str(expect_raises(IndexError, lambda at=index: case.source[at], f"source[{index}]"))
        expect(str(index) in text and str(length) in text, f"{text!r} does not name {index} and {length}")


@source_check("Bounds")
def check_wrong_index_types(case: Case) -> None:
    """A float, a string, a bool and None are not indices: TypeError.

    Otherwise 1.5 is rounded, and a mask of bools is a request for records 0 and 1.
    """
    source: Any = case.source
    wrong = (1.0, "1", None, True, np.float64(0), np.bool_(False), [0])
    expect_each_raises(TypeError, lambda index: source[index], wrong, "source[{}]")


@source_check("Bounds")
def check_bad_index_in_request(case: Case) -> None:
    """One bad index fails the whole request, nothing is returned in part, and the source still works.

    A batch that lacks a row causes a shape error far away, or none at all.
    """
    read = case.method("__getitems__")
    length, good = len(case.oracle), case.pick(3)
    bad = [[*good, index] for index in (length, -length - 1, 2**63)]
    expect_each_raises(IndexError, read, [*bad, *([request[-1], *good] for request in bad)], "a request of {}")
    wrong = ([*good, 1.0], [*good, "1"], [*good, None], [True, False], np.array([0.0]), 0, [[0]])
    expect_each_raises(TypeError, read, wrong, "a request of {}")
    case.check_request(good)
