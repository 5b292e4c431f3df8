"""Checks of what a manifest says, at their bounds."""

import json
import tracemalloc

import pytest

from dataload.catalog import checks, statistics
from dataload.catalog.statistics import FieldStatistics, merge_fields
from dataload.codecs.codec import CODEC_NAMES
from dataload.errors import ConfigError
from dataload.types import FieldSpec

LONG, LARGE = 4096, 2**63 - 1


@pytest.mark.parametrize(
    ("option", "fit", "wrong"),
    [
        ("case_sensitive", [True, False], [0, None, "true"]),
        ("codec", [*CODEC_NAMES], ["pickle", 1, None]),
        ("db_num", [0, LARGE], [-1, LARGE + 1, True, 1.0]),
        ("decode", ["a" * LONG, {}, {"x": "y"}], ["a" * (LONG + 1), {"x": 1}, {"x": "a" * (LONG + 1)}, ["x"], None]),
        ("dtype", ["uint16", "<u2", "|S7", "datetime64[ns]", "u" * 32], [">u2", "", "u2 ", "u" * 33, "<", 2]),
        ("end_token", [-LARGE, 0, LARGE], [-LARGE - 1, LARGE + 1, True, 0.0]),
        ("field", ["", "a" * LONG], ["a" * (LONG + 1), b"x", None]),
        ("shapes", [{}, {"x": []}, {"x": [-1, LARGE]}], [{"x": [1.5]}, {"x": 3}, {"x": [LARGE + 1]}, []]),
    ],
)
def test_options_that_a_manifest_may_set(option, fit, wrong):
    fits = checks.STORED_OPTIONS[option]
    assert [value for value in fit if not fits(value)] == []
    assert [value for value in wrong if fits(value)] == []


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], None),
        (["a.tar", "b c.tar", "é" * LONG], None),
        (["a.tar", "b.tar", "a.tar", "b.tar"], "the shard a.tar is listed twice"),
        (["a.tar", ".b.tar"], "shards.name: expected a name in the directory of the manifest, not hidden"),
        (["a.tar", "c/b.tar"], "shards.name: expected a name in the directory"),
        (["a.tar", ".."], "shards.name: expected a name in the directory"),
        (["a.tar", ""], "shards.name: expected 1 to 4096 characters but found"),
        (["é" * (LONG + 1)], "shards.name: expected 1 to 4096 characters but found"),
        (["a.tar", 7], "shards.name: expected 1 to 4096 characters but found 7"),
    ],
)
def test_names_of_shards(names, text):
    if text is None:
        checks.check_names(names)
        return
    with pytest.raises(ConfigError, match=f"^{text}"):
        checks.check_names(names)


@pytest.mark.parametrize("inner", [None, "", "ab", "b" * 9, "é", "a\0", ["a"], "x" * (LONG + 1), 1])
@pytest.mark.parametrize(
    "other", [[LARGE, "cd", "ef"], [0, "", None], [-1, "ab", None], [1, "ab"], [LARGE + 1, "cd", "ef"], None]
)
def test_packed_marks_are_the_marks(inner, other):
    marks = [[7, "ab", inner], other, [0, "xy", inner]]
    for several in (marks, marks[::2], marks[:1], []):
        packed = checks.PackedMarks.of(several)
        if packed is not None:
            assert packed == [checks.as_content(mark) for mark in several]
            assert packed != [*packed, None]
            assert len(packed) == len(several)


def test_packed_marks_take_little_memory():
    marks = [[LARGE - number, f"{number:016x}", f"{number:032x}"] for number in range(1000)]
    tracemalloc.start()
    packed = checks.PackedMarks.of(marks)
    found = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert packed == [checks.as_content(mark) for mark in marks]
    assert found < 60 * len(marks)


@pytest.mark.parametrize("wrong", [1, ["a"], b"a", "", "abcd", "g"])
def test_texts(wrong):
    checks.check_texts([None, "a", "abc"], checks.HEX, range(1, 4), "x", "a hash")
    with pytest.raises(ConfigError, match=r"^x: expected a hash but found"):
        checks.check_texts(["a", wrong], checks.HEX, range(1, 4), "x", "a hash")


@pytest.mark.parametrize("inner", [None, "", "x" * LONG, [], ["x" * LONG] * 16])
def test_marks_of_content(inner):
    assert checks.as_content([LARGE, "ab", inner]) == (LARGE, "ab", inner)
    wrong = [
        [-1, "ab", inner],
        [1, b"ab", inner],
        [1, "ab"],
        {},
        *([1, "ab", each] for each in (1, ["x"] * 17, [1], {})),
    ]
    for mark in (*wrong, [1, "ab", "x" * (LONG + 1)], [1, "ab", ["x" * (LONG + 1)]]):
        with pytest.raises(ConfigError, match=r"^shards\.identity: expected a size, a text, and a text, a list"):
            checks.as_content(mark)


def test_keys_of_tables():
    assert checks.as_table({"a": 1, "b": 2}, "x", ("a",), ("b", "c")) == {"a": 1, "b": 2}
    for table, message in (
        ({"a": 1}, "expected the key 'b' but found only a"),
        ({"a": 1, "b": 2, "d": 3}, "unknown key d"),
    ):
        with pytest.raises(ConfigError, match=f"^x: {message}"):
            checks.as_table(table, "x", ("a", "b"), ["c"])


TEXTS = "text of at most {} characters but found"


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ({"dtype": "<f4", "shape": [None, 0, LARGE, *[1] * 61]}, None),
        ({"dtype": "str", "shape": None, "classes": ["a", ""]}, None),
        ({"dtype": "<f4", "shape": [1] * 65}, "shape"),
        ({"dtype": "<f4", "shape": [-1]}, "shape"),
        ({"dtype": "<f4", "shape": 3}, "shape"),
        ({"dtype": ">f4", "shape": [3]}, None),
        ({"dtype": "[('a', '<i4')]", "shape": []}, "dtype"),
        ({"dtype": 4, "shape": []}, "dtype"),
        ({"dtype": "int64", "shape": [], "classes": [1]}, "classes"),
        ({"dtype": "int64", "shape": [], "classes": "ab"}, "classes"),
    ],
)
def test_fields(spec, key):
    if key is None:
        found = checks.as_field(spec, "x")
        shape, classes = spec["shape"], spec.get("classes")
        expected = FieldSpec(spec["dtype"], shape and tuple(shape), classes and tuple(classes))
        assert found == expected
        assert checks.as_field(json.loads(json.dumps(checks.field_to_json(found))), "x") == found
        return
    with pytest.raises(ConfigError) as caught:
        checks.as_field(spec, "x")
    assert caught.value.key == f"fields.x.{key}"


def test_functions_of_conversions():
    fit = {"name": "m:f" + "a" * (LONG - 3), "source": "s" * (64 << 10), "sha256": "", "version": "1"}
    assert checks.as_map(fit) == checks.MapEntry(**fit)
    for key, longest in (("name", LONG), ("source", 64 << 10), ("version", LONG)):
        for wrong in ("a" * (longest + 1), 3):
            with pytest.raises(ConfigError, match=rf"^map\.{key}: expected {TEXTS.format(longest)}"):
                checks.as_map({**fit, key: wrong})


NUMBERS = {"finite": 2, "nan": 3, "infinite": 4, "minimum": 1, "maximum": 2, "total": "3", "squares": "5"}
FIELD = {"records": 2, "dtypes": {"int64": 2}, "shapes": None, "axes": None, "length": None, "labels": None}
FIELD["numbers"] = NUMBERS


def shapes(*found):
    return {"shapes": {"shape": [*found], "records": [2, *[0] * (len(found) - 1)]}}


def labels(*found):
    return {"labels": {"value": [*found], "records": [2, *[0] * (len(found) - 1)]}}


@pytest.mark.parametrize(
    ("key", "fit", "wrong"),
    [
        ("records", [{}], [{"records": 3}, {"records": -1}, {"records": True}]),
        ("dtypes", [{"dtypes": {"int64": 1, "str": 1}}], [{"dtypes": {"int64": 1}}, {"dtypes": {"a": 3, "b": -1}}]),
        ("shapes", [shapes([1] * 64), shapes([1], [2])], [shapes([1] * 65), shapes([1], [1]), shapes([-1]), shapes(1)]),
        ("labels", [labels(1 - 2**64, 2**64 - 1, "a" * 64)], [labels(2**64), labels(-(2**64)), labels("a" * 65)]),
        (
            "labels",
            [labels(1, "1")],
            [labels(True), labels(1.0), labels(1, 1), {"labels": {"value": [1], "records": [1]}}],
        ),
        ("axes", [{"axes": [[0, 0]] * 64}], [{"axes": [[0, 0]] * 65}, {"axes": [[1, 0]]}, {"axes": [[0]]}]),
        ("length", [{"length": [1, 3, each]} for each in (2, 6)], [{"length": [1, 3, each]} for each in (1, 7)]),
        ("length", [{"length": [2, 2, 4]}], [{"length": [1, 2]}, {"length": [-1, 2, 1]}, {"length": 3}]),
    ],
)
def test_statistics_at_their_bounds(key, fit, wrong):
    for changes in fit:
        assert FieldStatistics.parse({**FIELD, **changes}, "f").to_json() == {**FIELD, **changes}
    for changes in wrong:
        with pytest.raises(ConfigError, match=rf"^f\.(dtypes|{key})"):
            FieldStatistics.parse({**FIELD, **changes}, "f")


@pytest.mark.parametrize(
    ("key", "fit", "wrong"),
    [
        (
            "minimum",
            [{"minimum": 2}, {"minimum": -1.5}],
            [{"minimum": 3}, {"minimum": None}, {"maximum": float("inf")}],
        ),
        ("minimum", [{"finite": 0, "minimum": None, "maximum": None}], [{"finite": 0}]),
        ("nan", [{"nan": 2**63 - 1}], [{"nan": -1}, {"nan": 2**63}]),
        (
            "total",
            [{"total": f"-{'9' * 1000}"}, {"total": "-1/2"}],
            [{"total": "9" * 1001}, {"total": 3}, {"total": "1/3"}],
        ),
        ("squares", [{"squares": None}, {"squares": "1/1024"}], [{"squares": "1/0"}, {"squares": "x"}]),
    ],
)
def test_numbers_at_their_bounds(key, fit, wrong):
    for changes in fit:
        numbers = {**NUMBERS, **changes}
        assert FieldStatistics.parse({**FIELD, "numbers": numbers}, "f").to_json()["numbers"] == numbers
    for changes in wrong:
        with pytest.raises(ConfigError, match=rf"^f\.numbers\.{key}"):
            FieldStatistics.parse({**FIELD, "numbers": {**NUMBERS, **changes}}, "f")


def test_how_much_statistics_may_hold(monkeypatch):
    for name in ("MOST_FIELDS", "MOST_SHAPES", "MOST_LABELS"):
        monkeypatch.setattr(statistics, name, 2)
    one, other = (FieldStatistics.parse({**FIELD, **labels(1, each)}, "f") for each in (2, 3))
    assert one.merge(one).labels == {1: 4, 2: 0}
    numbers = {**NUMBERS, "finite": 4, "nan": 6, "infinite": 8, "total": "6", "squares": "10"}
    assert one.merge(one).numbers.to_json() == numbers
    assert one.merge(other).labels is None
    assert [*merge_fields({"a": one}, {"b": one})] == ["a", "b"]
    with pytest.raises(ConfigError, match="the records have more than 2 different fields: name those that you want"):
        merge_fields({"a": one, "b": one}, {"c": one})
    for make in (shapes, labels):
        with pytest.raises(ConfigError, match="expected at most 2 values with a number each"):
            FieldStatistics.parse({**FIELD, **make(*([n] for n in range(3)))}, "f")
    table = {"options": {}, "selected": None, "fields": {"a": FIELD, "b": FIELD}, "lengths": {}}
    assert [*statistics.DataSetStatistics.parse(table).fields] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"^statistics\.fields: expected at most 2 fields but found 3"):
        statistics.DataSetStatistics.parse({**table, "fields": {"a": FIELD, "b": FIELD, "c": FIELD}})
