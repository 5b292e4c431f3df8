"""What the suite calls equal: a comparison that is lax would pass every wrong source."""

import math
from decimal import Decimal

import numpy as np
import pytest

from dataload.collate import Ragged
from dataload.testing.compare import arrays_in, difference, overwrite, record_digest, snapshot

NAN = float("nan")
OTHER_NAN = np.array([0x7FF8000000000001], np.uint64).view(np.float64)

DIFFERENT = [
    (1, 1.0, "x is 1 (int), expected 1.0 (float)"),
    (1, True, "x is 1 (int), expected True (bool)"),
    (1, np.int64(1), f"x is 1 (int), expected {np.int64(1)!r} (int64)"),
    (0.0, -0.0, "x is 0.0 (float), expected -0.0 (float)"),
    (b"a", bytearray(b"a"), "expected bytearray(b'a')"),
    (b"a", "a", "x is b'a' (bytes), expected 'a' (str)"),
    ([1], (1,), "x is [1] (list), expected (1,) (tuple)"),
    ([1], [1, 2], "x has 1 parts, expected 2"),
    ([[1], 2], [[1, 2]], "x has 2 parts, expected 1"),
    ([1, 3], [1, 2], "x[1] is 3 (int), expected 2 (int)"),
    ({"a": 1}, {"b": 1}, "x has fields ['a'], expected ['b']"),
    ({"a": 1}, {"a": 2}, "x, field 'a' is 1 (int), expected 2 (int)"),
    ({"a": {"b": 1}}, {"a": {"b": 2}}, "x, field 'a', field 'b' is 1"),
    (np.array(1), 1, "expected 1 (int)"),
    (np.zeros(2), np.zeros(2, np.float32), "x is float64 (2,), expected float32 (2,)"),
    (np.zeros(2), np.zeros((2, 1)), "x is float64 (2,), expected float64 (2, 1)"),
    (np.zeros((0, 2)), np.zeros((0, 3)), "x is float64 (0, 2), expected float64 (0, 3)"),
    (np.zeros(2), np.array([0.0, 1.0]), "x differs at (1,): array([0., 0.]), expected array([0., 1.])"),
    (np.zeros(2), -np.zeros(2), "x differs at NaNs or signs of zero"),
    (np.array([NAN]), OTHER_NAN, "x differs at (0,)"),
    (np.array(["a"], object), np.array(["b"], object), "x[0] is 'a' (str), expected 'b'"),
    (np.float32(0), np.float32(-0.0), "(float32), expected"),
    (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2]), "x differs at"),
    (np.zeros(1, np.longdouble), np.ones(1, np.longdouble), "x differs at (0,)"),
    (Ragged(np.zeros(2), np.zeros(1)), Ragged(np.zeros(2), np.ones(1)), "x[1] differs at (0,)"),
    (b"a" * 500, b"a" * 499, "..."),
]


@pytest.mark.parametrize(("one", "other", "text"), DIFFERENT)
def test_values_that_differ(one, other, text):
    found = difference(one, other, "x")
    assert found is not None
    assert text in found
    assert len(found) < 300
    assert difference(other, one, "x") is not None


@pytest.mark.parametrize(
    "value",
    [
        1, NAN, -0.0, math.inf, b"", "é", True, None, [], {}, (), np.array([NAN, -0.0]), np.zeros((0, 3), np.int8),
        np.array(3), np.full(2, NAN, np.longdouble), np.array([b"a", None, NAN], object),
        np.float32(NAN), complex(0, NAN), np.datetime64("NaT"), Decimal("NaN"),
        {"a": [np.arange(3)], "b": {"c": (1, 2)}},
        Ragged(np.zeros(2), np.zeros(1)),
    ],
    ids=repr,
)  # fmt: skip
def test_a_copy_is_equal_and_shares_nothing(value):
    copy = snapshot(value)
    assert difference(copy, value, "x") is None
    assert record_digest(copy) == record_digest(value)
    for one, other in zip(arrays_in(copy), arrays_in(value), strict=True):
        assert not np.shares_memory(one, other)


def test_tensors_are_compared_by_their_elements():
    torch = pytest.importorskip("torch")
    for value in (torch.tensor([1.0, NAN]), torch.ones(2, 3).bfloat16(), torch.empty(0)):
        test_a_copy_is_equal_and_shares_nothing(value)
    one = torch.zeros(2000)
    assert "x differs at (1000,)" in difference(one, torch.arange(2000).eq(1000).float(), "x")
    assert "expected tensor" in difference(one, one.bfloat16(), "x")
    assert record_digest(one) != record_digest(torch.arange(2000).eq(1000).float())


def test_fields_are_no_sequence_and_strides_no_difference():
    assert difference({"a": 1, "b": 2}, {"b": 2, "a": 1}, "x") is None
    assert record_digest({"a": 1, "b": 2}) == record_digest({"b": 2, "a": 1})
    assert record_digest(np.array([[1], [2, 3]], object)) == record_digest(np.array([[1], [2, 3]], object))


def test_digests_differ_where_values_do():
    pairs = [(one, other) for one, other, _ in DIFFERENT]
    assert [pair for pair in pairs if record_digest(pair[0]) == record_digest(pair[1])] == []
    assert record_digest({"a": b"", "b": b"x"}) != record_digest({"a": b"x", "b": b""})


def test_overwrite_changes_every_byte_of_what_is_writable():
    values = {
        "a": np.arange(6).reshape(2, 3).T,
        "f": np.array([0.0, NAN]),
        "b": [np.zeros(2, bool), bytearray(b"ab")],
        "e": np.empty(0),
    }
    overwrite(np.array([None]))  # objects are left alone
    before = snapshot(values)
    overwrite(values)
    for one, other in zip(arrays_in(values), arrays_in(before), strict=True):
        changed = np.frombuffer(one.tobytes(), np.uint8) ^ np.frombuffer(other.tobytes(), np.uint8)
        assert (changed == 255).all()
    frozen = np.arange(3)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        overwrite([frozen])
