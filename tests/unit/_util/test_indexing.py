"""Indices as lists take them, spans and shards as plain loops find them, braces as bash expands them."""

import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload._util.indexing import as_indices, check_index, distinct, expand_braces, missing_parts


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_check_index_is_what_a_list_says():
    for index in (0, 9, -1, -10, np.int64(3), np.uint8(9), np.array(4), Index(-3)):
        assert check_index(index, 10) == list(range(10))[index]
    for index in (10, -11, 2**63, -(2**70), np.uint64(2**64 - 1)):
        with pytest.raises(IndexError, match=rf"^index {int(index)} is out of range for 10 records$"):
            check_index(index, 10)
    for index in (1.0, "1", None, b"1", np.float32(1), [1], np.bool_(True)):
        with pytest.raises(TypeError):
            check_index(index, 10)
    with pytest.raises(TypeError, match=r"^an index must be an integer, got True$"):
        check_index(True, 10)


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9)))
def test_distinct_numbers_are_those_of_a_set(numbers):
    assert distinct(np.array(numbers, np.int64)).tolist() == sorted({*numbers})


MAKERS = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "int64": lambda i: np.array(i, np.int64),
    "int32": lambda i: np.array(i, np.int32),
    "int16": lambda i: np.array(i, np.int16),
    "big-endian": lambda i: np.array(i, ">i8"),
    "strided": lambda i: np.repeat(np.array(i, np.int64), 3)[::3],
    "numpy ints": lambda i: [np.int16(n) for n in i],
    "__index__": lambda i: [Index(n) for n in i],
    "read-only": lambda i: np.broadcast_to(np.array(i, np.int64), len(i)),
}


@given(data=st.data(), length=st.integers(1, 100), kind=st.sampled_from(sorted(MAKERS)))
def test_as_indices_equals_a_list_index_by_index(data, length, kind):
    asked = data.draw(st.lists(st.integers(-length, length - 1), max_size=20))
    got = as_indices(MAKERS[kind](asked), length)
    assert (got.dtype, got.ndim) == (np.int64, 1)
    assert got.tolist() == [list(range(length))[index] for index in asked]


def test_as_indices_keeps_the_callers_array():
    asked, negative = np.array([3, 1, 3]), np.array([-1, 1])
    assert as_indices(asked, 4) is asked
    assert as_indices(negative, 4).tolist() == [3, 1]
    assert negative.tolist() == [-1, 1]
    for nothing in ([], (), np.empty(0), np.empty(0, np.int64), np.empty(0, bool)):
        got = as_indices(nothing, 0)
        assert (got.dtype, got.shape) == (np.int64, (0,))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ([2**63], 2**63),
        ([1, -(2**64)], -(2**64)),
        (np.array([1, 2**64 - 1], np.uint64), 2**64 - 1),
        (np.array([2**63 - 1]), 2**63 - 1),
        (np.array([-(2**63)]), -(2**63)),
        (range(10**15), 10**15 - 1),  # before an array of that many is made
        (range(2**70, 2**70 + 1), 2**70),
        (range(-12, 3), -12),
    ],
)
def test_as_indices_takes_no_number_too_large_for_it(asked, named):
    with pytest.raises(IndexError, match=rf"^index {named} is out of range for 10 records$"):
        as_indices(asked, 10)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([True, False], "indices must be integers, got bool; for a mask use np.flatnonzero"),
        ([0, np.bool_(True)], "got bool"),
        (np.array([True, False]), "indices must be integers, got an array of bool"),
        (np.array([0.0, 1.0]), "indices must be integers, got an array of float64"),
        (np.array(["a"]), "got an array of <U1"),
        (np.zeros((2, 2), np.int64), r"indices must have one dimension, got an array of shape \(2, 2\)"),
        (np.int64(3), "not iterable"),
        (np.array(3), r"got an array of shape \(\)"),
        ([1, 2.0], "'float' object cannot be interpreted as an integer"),
        ("12", "'str' object cannot be interpreted as an integer"),
        (3, "'int' object is not iterable"),
        (None, "'NoneType' object is not iterable"),
    ],
)
def test_as_indices_refuses_what_are_no_integers(asked, message):
    with pytest.raises(TypeError, match=message):
        as_indices(asked, 10)


PATTERNS = [
    *("plain.tar", "train-{000..012}.tar", "{8..11}", "{08..11}", "{8..011}", "{5..3}", "{05..3}", "{3..3}"),
    *("{00..2}", "{100..98}", "a{b,c}d", "{a,b}{1..3}", "{a,}x", "{,}", "{a}", "{}", "x{1..2}y{03..04}z"),
    *("{1..3,5}", "{a,b,c}-{x,y}", "a{b", "a}b", "{1..}", "{..2}", "/data/{train,test}/{0..1}.syr"),
]


def test_expand_braces_equals_bash():
    program = "\n".join(f"printf '%s\\n' {pattern}; echo =" for pattern in PATTERNS)
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=30)
    expected = [block.strip("\n").split("\n") for block in done.stdout.split("=\n")[:-1]]
    # bash drops a word that becomes empty
    assert [[text for text in expand_braces(pattern) if text] or [""] for pattern in PATTERNS] == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], None),
        (["a.tar", "a-3.tar", "-of-.tar"], None),
        (["a-0-of-2.tar", "a-1-of-2.tar"], None),
        (["a-1-of-2.tar", "a-2-of-2.tar"], None),
        (["a-1-of-2.tar"], ("a-0-of-2.tar", 1)),
        (["a-00000-of-00003.tar", "a-00002-of-00003.tar"], ("a-00001-of-00003.tar", 1)),
        (["a-00001-of-00003.tar", "a-00003-of-00003.tar"], ("a-00002-of-00003.tar", 1)),
        (["a-0-of-2.tar", "a-1-of-2.idx"], ("a-1-of-2.tar", 1)),
        (["a-0-of-1", "b-0-of-1", "c-01-of-05"], ("c-00-of-05", 4)),
        (["a-0-of-999999999999999999.tar"], ("a-1-of-999999999999999999.tar", 999999999999999998)),
    ],
)
def test_missing_parts(names, expected):
    assert missing_parts(names) == expected
