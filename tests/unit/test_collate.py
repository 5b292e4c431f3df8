from typing import NamedTuple

import numpy as np
import pytest
from made_files import same as equal

from dataload.collate import Collate, Pack, Pad, Ragged, default_collate, empty_like, scatter_columns
from dataload.errors import ConfigError, SourceError
from dataload.testing.compare import overwrite
from dataload.types import BytesColumn, TextColumn


def rows(*numbers):
    return np.array(numbers, np.int64)


class Pair(NamedTuple):
    image: object
    label: object


F32 = np.float32
NESTED = [[[1, 2], []], [], [[3]]]


@pytest.mark.parametrize(
    ("samples", "batch"),
    [
        ([], {}),
        ([{}, {}], {}),
        ([{"x": np.array([1, 2], F32)}, {"x": np.array([3, 4], F32)}], {"x": np.array([[1, 2], [3, 4]], F32)}),
        ([{"x": np.array(1, F32)}, {"x": np.array(2, F32)}], {"x": np.array([1, 2], F32)}),
        ([{"x": F32(1)}, {"x": F32(2)}], {"x": np.array([1, 2], F32)}),
        ([{"x": np.empty((0, 2), F32)}], {"x": np.empty((1, 0, 2), F32)}),
        ([{"x": 1}, {"x": 2}], {"x": np.array([1, 2])}),
        ([{"x": 1.5}, {"x": 2.0}], {"x": np.array([1.5, 2.0])}),
        ([{"x": 1}, {"x": 2.5}], {"x": np.array([1.0, 2.5])}),
        ([{"x": True}, {"x": False}], {"x": np.array([True, False])}),
        ([{"x": b"ab"}, {"x": b""}], {"x": [b"ab", b""]}),
        ([{"x": "ab"}, {"x": ""}], {"x": ["ab", ""]}),
        ([b"ab", b"c"], [b"ab", b"c"]),
        ([1, 2, 3], np.array([1, 2, 3])),
        ([np.arange(2), np.arange(2)], np.array([[0, 1], [0, 1]])),
        ([(1, "a"), (2, "b")], (np.array([1, 2]), ["a", "b"])),
        ([Pair(1, "a")], Pair(np.array([1]), ["a"])),
        ([{"x": {"y": 1}}, {"x": {"y": 2}}], {"x": {"y": np.array([1, 2])}}),
        ([{"a": 1, "b": 2}, {"b": 4, "a": 3}], {"a": np.array([1, 3]), "b": np.array([2, 4])}),
        ([{"x": None}, {"x": None}], {"x": [None, None]}),
        ([{"x": None}, {"x": "a"}], {"x": [None, "a"]}),
        ([{"x": b"a"}, {"x": None}, {"x": bytearray()}], {"x": [b"a", None, bytearray()]}),
        ([{"x": [1]}, {"x": None}], {"x": [[1], None]}),
    ],
)
def test_default_collate(samples, batch):
    equal(default_collate(samples), batch)


def test_a_batch_shares_no_memory_with_its_samples():
    samples = [{"x": np.arange(3)}, {"x": np.arange(3)}]
    overwrite(default_collate(samples))
    equal(samples, [{"x": np.arange(3)}, {"x": np.arange(3)}])


HINT = "set a collate policy for it: pad, ragged or list"


DIFFER = r"rows 0 and {} have different fields \({}\)"


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [{"x": np.zeros(3, F32)}, {"x": np.zeros(3, F32)}, {"x": np.zeros((2, 4), F32)}],
            rf"cannot stack field 'x': row 0 is float32 \(3,\), row 2 is float32 \(2, 4\); {HINT}",
        ),
        ([{"x": np.zeros(3, F32)}, {"x": np.zeros(3)}], r"row 0 is float32 \(3,\), row 1 is float64 \(3,\); give it"),
        ([{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}], r"row 0 is float64 \(2, 3\), row 1 is float64 \(2, 4\)"),
        ([{"x": {"y": np.zeros(1)}}, {"x": {"y": np.zeros(2)}}], r"cannot stack field 'x\.y'"),
        ([np.zeros(1), np.zeros(2)], "cannot stack the samples: row 0"),
        ([(np.zeros(1),), (np.zeros(2),)], "cannot stack field '0'"),
        ([{"x": 1}, {"x": True}], "cannot stack field 'x': row 0 is int, row 1 is bool"),
        ([{"x": 1}, {"x": "a"}], "row 0 is int, row 1 is str; give it one type in a transform"),
        ([{"x": "a"}, {"x": None}, {"x": 1}], "cannot stack field 'x': row 0 is str, row 2 is int"),
        ([{"x": None}, {"x": "a"}, {"x": 1}], "cannot stack field 'x': row 0 is NoneType, row 1 is str"),
        ([{"x": None}, {"x": 1}], "cannot stack field 'x': row 0 is NoneType, row 1 is int"),
        ([{"x": None}, {"x": np.zeros(1)}], "row 0 is NoneType, row 1 is ndarray"),
        ([{"x": b"a"}, {"x": None}, {"x": "a"}], "row 0 is bytes, row 2 is str; give it one type in a transform"),
        ([{"x": [1]}, {"x": {"y": 1}}], "row 0 is list, row 1 is dict"),
        ([{"x": {"y": 1}}, {"x": 1}], "cannot stack field 'x': row 0 is dict, row 1 is int"),
        ([{"x": 2**63}, {"x": -1}], f"field 'x' holds {2**63}, and a column of integers has 64 bits"),
        ([{"x": -(2**70)}, {"x": 1}], f"field 'x' holds {-(2**70)}, and"),
        ([{"x": 2**64}, {"x": 1}], f"field 'x' holds {2**64}, and"),
        ([{"x": np.zeros(1)}, {"x": b"a"}], r"row 0 is float64 \(1,\), row 1 is \|S1 \(\)"),
        ([{"x": 1}, {"y": 1}], f"samples in {DIFFER.format(1, 'x, y only in one')}: choose common ones"),
        ([{"x": 1}, {"x": 1}, {"x": 1, "y": 1}], DIFFER.format(2, "y only in one")),
        ([{"x": np.ma.array([1, 2], mask=[0, 1])}], r"field 'x': some values are masked: fill them first"),
        (
            [{"x": type("Unlike", (), {"__array__": lambda _: int("")})()}],
            "numpy cannot hold this Unlike .*: convert it",
        ),
        ([(1,), (1, 2)], r"samples are tuples of different lengths: \[1, 2\]"),
        ([{"x": (1, 2)}, {"x": None}], "field 'x': row 0 is tuple, row 1 is NoneType"),
        ([{"x": (1, 2)}, {"x": {"a": 1, "b": 2}}], "field 'x': row 0 is tuple, row 1 is dict"),
    ],
)
def test_samples_that_do_not_stack_are_named(samples, message):
    with pytest.raises(ConfigError, match=message):
        default_collate(samples)


TOKENS = [np.array([1, 2, 3]), np.array([], np.int64), np.array([4])]


IMAGES = [np.full((2, 3), 1, np.uint8), np.full((1, 4), 2, np.uint8)]
FLOATS = [np.ones((2, 3), F32), np.zeros((0, 3), F32), np.ones((1, 3), F32)]
PADDED = np.array([[1, 2, 3], [-1, -1, -1], [4, -1, -1]])
PICTURES = np.array([[[1, 1, 1, -1], [1, 1, 1, -1]], [[2, 2, 2, 2], [-1, -1, -1, -1]]], np.int8)


@pytest.mark.parametrize(
    ("policy", "values", "columns"),
    [
        ("pad", TOKENS, {"t": PADDED, "t_length": np.array([3, 0, 1])}),
        ("pad", [i.astype(np.int8) for i in IMAGES], {"t": PICTURES, "t_length": np.array([2, 1])}),
        (Pad(-1, side="left"), [i.astype(np.int8) for i in IMAGES], {"t": np.stack([PICTURES[0], PICTURES[1, ::-1]])}),
        ({"ragged": 1}, TOKENS, {"t": Ragged(np.array([1, 2, 3, 4]), np.array([0, 3, 3, 4]))}),
        ("ragged", TOKENS, {"t": Ragged(np.array([1, 2, 3, 4]), np.array([0, 3, 3, 4]))}),
        ("ragged", FLOATS, {"t": Ragged(np.ones((3, 3), F32), np.array([0, 2, 2, 3]))}),
        ("list", TOKENS, {"t": TOKENS}),
        # np.asarray([]) is float64, and would make floats of token numbers
        ("pad", [[], [1, 2]], {"t": np.array([[-1, -1], [1, 2]]), "t_length": np.array([0, 2])}),
        ("ragged", [[], [1, 2]], {"t": Ragged(np.array([1, 2]), np.array([0, 0, 2]))}),
        ({"ragged": 2}, NESTED, {"t": Ragged(Ragged(np.array([1, 2, 3]), rows(0, 2, 2, 3)), rows(0, 2, 2, 3))}),
        ({"ragged": 2}, [[], []], {"t": Ragged(Ragged(np.zeros(0), rows(0)), rows(0, 0, 0))}),
        ({"ragged": 3}, [[]], {"t": Ragged(Ragged(Ragged(np.zeros(0), rows(0)), rows(0)), rows(0, 0))}),
    ],
)
def test_policies(policy, values, columns):
    samples = [{"t": value, "k": i} for i, value in enumerate(values)]
    equal(Collate({"t": policy}, pad_value=-1)(samples), {**columns, "k": np.arange(len(values))})
    nested = Collate({"a.t": policy}, pad_value=-1)([{"a": sample} for sample in samples])
    equal(nested, {"a": {**columns, "k": np.arange(len(values))}})


ONE_AXIS = "arrays may differ only along the first axis"


@pytest.mark.parametrize(
    ("policy", "values", "message"),
    [
        ("pad", [np.zeros(2), np.zeros((2, 2))], r"row 0 is float64 \(2,\), row 1 is float64 \(2, 2\); arrays may"),
        ("pad", [np.zeros(2), np.zeros(2, F32)], r"row 0 is float64 \(2,\), row 1 is float32 \(2,\)"),
        ("pad", [np.array(1.0), np.array(2.0)], r"row 0 is float64 \(\), which has no axis"),
        ("ragged", [[[1], [2, 3]], []], r"lists of lists, whose lengths differ; set its policy to {'ragged': 2}"),
        ("pad", [[[1], [2, 3]], []], r"it has lists of lists, whose lengths differ"),
        ({"ragged": 2}, [[[1]], [2, 3]], r"row 1 is int64 \(\), which has no axis"),
        ({"ragged": 3}, [[1], [2]], "a value in row 0 is int, and lists of lists have a list there"),
        ("ragged", [np.zeros((2, 3)), np.zeros((2, 4))], rf"row 1 is float64 \(2, 4\); {ONE_AXIS}"),
        ("ragged", [np.zeros(2), np.zeros(2, F32)], r"row 1 is float32 \(2,\)"),
    ],
)
def test_what_a_policy_cannot_bridge_is_named(policy, values, message):
    name = policy if isinstance(policy, str) else "ragged"
    with pytest.raises(ConfigError, match=rf"cannot collate field 'x' by '{name}': .*{message}"):
        Collate({"x": policy})([{"x": value} for value in values])


@pytest.mark.parametrize(
    ("policy", "key", "message"),
    [
        ("padd", "collate.x", r"collate policy of field 'x' is 'padd': did you mean 'pad'\? Choose from list, pad"),
        (
            {"pda": 3},
            "collate.x",
            r'collate.x must be a policy, \{"ragged": 2\}, or \{"pad": lengths\}, optionally with .*; got \{\'pda\'',
        ),
        ({"pad": 0}, "collate.x.pad", "collate.x.pad must be an integer >= 1, got 0"),
        ({"pad": True}, "collate.x.pad", "collate.x.pad must be an integer >= 1, got True"),
        ({"pad": [4, 2]}, "collate.x.pad", r"collate.x.pad must be an integer >= 1 or ascending .*, got \[4, 2\]"),
        ({"pad": []}, "collate.x.pad", r"collate.x.pad must be an integer >= 1 or ascending lengths, got \[\]"),
        ({"pad": [4, "8"]}, "collate.x.pad[1]", r"collate.x.pad\[1\] must be an integer >= 0, got '8'"),
        (
            *({"pad": [2, 4]}, "collate.x.pad"),
            "cannot pad 'x': a value has length 5, but the longest of the lengths to pad to is 4; add a",
        ),
        ("pad", None, "padding field 'x' adds the true lengths as x_length, a field that exists"),
    ],
)
def test_wrong_policies(policy, key, message):
    with pytest.raises(ConfigError, match=message) as refused:
        Collate({"x": policy})([{"x": np.ones(5), "x_length": 2}])
    assert key is None or refused.value.key == key


ROWS = [{"tokens": np.arange(1 + i), "labels": np.arange(1 + i), "x": np.ones(1 + i, F32)} for i in range(2)]
BOTH = {"tokens": "pad", "labels": "pad"}
GUESSED = (
    "padding fills the integer fields labels, tokens with 0, which a loss may count as a label: pass "
    r"pad_value={'labels': 0, 'tokens': 0} with suitable values \(torch's cross_entropy ignores -100\), or "
    "pad_value=0 to keep 0; the next release raises an error without pad_value"
)


def test_padding_of_several_integer_fields_without_a_value_warns():
    samples = [{name: row[name] for name in ("tokens", "labels")} for row in ROWS]
    with pytest.warns(UserWarning, match=f"^{GUESSED}$") as warned:
        batch = Collate(BOTH)(samples)
    assert warned[0].filename == __file__
    assert batch["labels"].tolist() == [[0, 0], [0, 1]]
    with pytest.warns(UserWarning, match="the integer fields 0, 1 with 0"):
        Collate({"0": "pad", "1": "pad"})([(row["tokens"], row["labels"]) for row in ROWS])
    for silent in (
        Collate(BOTH, pad_value=0),
        Collate(BOTH, pad_value={}),
        Collate({"tokens": "pad", "labels": "ragged"}),
    ):
        silent(samples)
    Collate({"tokens": "pad", "x": "pad"})([{"tokens": row["tokens"], "x": row["x"]} for row in ROWS])


NUMBER = r"pad_value must be a number, or a mapping such as \{\"labels\": -100\}; got"
UNPADDED = "pad_value names '{}', which is not a padded field: {}"


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        ({"lables": -100}, "pad_value.lables", UNPADDED.format("lables", "did you mean 'labels'")),
        ({"x": -100}, "pad_value.x", UNPADDED.format("x", "choose from labels, tokens")),
        ({"labels": "-100"}, "pad_value", NUMBER),
        *(("0", "pad_value", NUMBER), ("", "pad_value", NUMBER)),
    ],
)
def test_wrong_pad_values(value, key, message):
    with pytest.raises(ConfigError, match=message) as refused:
        Collate(BOTH, pad_value=value)
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("dtype", "value", "least", "most"),
    [
        *(("uint8", -100, 0, 255), ("int8", 200, -128, 127), ("int64", 0.5, -(2**63), 2**63 - 1), ("bool", -1, 0, 1)),
        ("float16", -1e5, -65504.0, 65504.0),
    ],
)
def test_a_pad_value_must_fit_the_dtype(dtype, value, least, most):
    limits = f"{least} to {most}"
    told = f"pad_value of field 't' is {value}, but its dtype {dtype} holds {limits}.*: choose a number that fits, or"
    with pytest.raises(ConfigError, match=told):
        Collate({"t": "pad"}, pad_value={"t": value})([{"t": np.ones(2, dtype)}])
    for fits in (least, most):
        padded = Collate({"t": "pad"}, pad_value=fits)([{"t": np.ones(n, dtype)} for n in (1, 2)])["t"]
        equal(padded, np.array([[1, fits], [1, 1]], dtype))
    with pytest.raises(ConfigError, match="field 't' holds text, which is not padded: set its policy to list"):
        Collate({"t": "pad"})([{"t": ["a"]}, {"t": ["b", "c"]}])
    with pytest.raises(ConfigError, match="field 't' holds objects, which are not padded: set its policy to list"):
        Collate({"t": "pad"})([{"t": [{"role": "user"}]}, {"t": []}])
    for value in (np.nan, -np.inf):
        padded = Collate({"t": "pad"}, pad_value=value)([{"t": np.ones(n, F32)} for n in (1, 2)])["t"]
        assert str(padded[0, 1]) == str(value)


CHAT = [{"ids": np.arange(1, 4), "labels": np.arange(1, 4), "x": 1}, {"ids": np.array([9]), "labels": [7], "x": 2}]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Pad(-1), [[1, 2, 3], [9, -1, -1]]),
        (Pad(-1, side="left"), [[1, 2, 3], [-1, -1, 9]]),
        (Pad(-1, to=4), [[1, 2, 3, -1], [9, -1, -1, -1]]),
        (Pad(-1, to=[2, 5], side="left"), [[-1, -1, 1, 2, 3], [-1, -1, -1, -1, 9]]),
        (Pad(-1, max_length=2), [[1, 2], [9, -1]]),
        (Pad(-1, max_length=2, truncation_side="left"), [[2, 3], [9, -1]]),
        (Pad(-1, max_length=2, to=[4]), [[1, 2, -1, -1], [9, -1, -1, -1]]),
        ({"pad": 4, "value": -1, "side": "left", "max_length": 2}, [[-1, -1, 1, 2], [-1, -1, -1, 9]]),
    ],
)
def test_each_field_has_its_own_padding(rule, expected):
    batch = Collate({"ids": rule, "labels": Pad(-100)})(CHAT)
    equal(batch, {"ids": np.array(expected), "labels": np.array([[1, 2, 3], [7, -100, -100]]), "x": np.array([1, 2])})
    foreign = [{"ids": sample["ids"].astype(">i4")} for sample in CHAT]
    equal(Collate({"ids": rule})(foreign), {"ids": np.array(expected, np.int32)})  # as stacked arrays are
    assert Pack()(foreign)["ids"].dtype.isnative
    nested = Collate({"a.ids": rule})([{"a": {"ids": sample["ids"]}} for sample in CHAT])
    equal(nested, {"a": {"ids": np.array(expected)}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"value": None}, "value must be a number, got None"),
        ({"to": 0}, "to must be an integer >= 1, got 0"),
        ({"to": [4, 2]}, "to must be an integer >= 1 or ascending lengths"),
        ({"side": "both"}, "side is 'both': choose from left, right"),
        ({"max_length": 0}, "max_length must be an integer >= 1"),
        ({"truncation_side": "start"}, "truncation_side is 'start'"),
    ],
)
def test_wrong_settings_of_pad(settings, message):
    with pytest.raises(ConfigError, match=message):
        Pad(**settings)


def test_integers_of_64_bits_are_not_rounded():
    equal(default_collate([2**64 - 1, 0]), np.array([2**64 - 1, 0], np.uint64))
    equal(default_collate([-(2**63), 1]), np.array([-(2**63), 1]))


def packed(kind):
    return kind.packed(np.frombuffer(b"a", np.uint8), np.ones(1, np.int64))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([0, {"x": np.zeros(1)}], [1, {"y": np.zeros(1)}], DIFFER.format(1, "x, y only in one")),
        ([0, {}], [1, {"y": np.zeros(1)}], DIFFER.format(1, "y only in one")),
        ([0, np.zeros(1)], [1, {"y": np.zeros(1)}], DIFFER.format(1, "values without a name, y only in one")),
        ([2, {"x": np.zeros((1, 3))}], [0, {"x": np.zeros((1, 4))}], r"'x': row 2 is float64 \(3,\), row 0 is float64"),
        ([0, {"x": np.zeros(1)}], [1, {"x": np.zeros(1, F32)}], r"row 0 is float64 \(\), row 1 is float32 \(\)"),
        ([0, {"x": ["a"]}], [1, {"x": np.zeros(1)}], r"row 0 is not an array, row 1 is float64 \(\)"),
        ([0, {"x": np.zeros(1)}], [1, {"x": (np.zeros(1),)}], r"row 0 is float64 \(\), row 1 is not an array"),
        ([0, {"x": ["a"]}], [1, {"x": (np.zeros(1),)}], "row 0 is not an array, row 1 is not an array"),
        ([1, {"x": packed(BytesColumn)}], [0, {"x": packed(TextColumn)}], "'x': row 0 is str, row 1 is bytes; give it"),
    ],
)
def test_scatter_columns_names_parts_that_differ(first, second, message):
    with pytest.raises(ConfigError, match=message):
        scatter_columns([(rows(row), columns) for row, columns in (first, second)], 3)


def test_scatter_columns_takes_many_objects_and_reaches_into_dicts():
    found = scatter_columns([(np.arange(200_000)[::-1], np.arange(200_000).astype(object))], 200_000)
    assert (found.dtype, found[:2].tolist()) == (object, [199_999, 199_998])
    parts = [
        (rows(2, 0), {"n": {"x": np.array([5, 3]), "t": ["c", "a"]}, "y": np.array([1, 2])}),
        (rows(1), {"n": {"x": np.array([4]), "t": ["b"]}, "y": np.array([7])}),
    ]
    equal(scatter_columns(parts, 3), {"n": {"x": np.array([3, 4, 5]), "t": ["a", "b", "c"]}, "y": np.array([2, 7, 1])})
    with pytest.raises(ConfigError, match=r"field 'n': row 2 is not an array, row 1 is int64 \(\)"):
        scatter_columns([parts[0], (rows(1), {"n": np.array([1]), "y": np.array([7])})], 3)
    with pytest.raises(SourceError, match="field 'x' has 1 values for 2 records"):
        scatter_columns([(rows(0), {"x": rows(1)}), (rows(1, 2), {"x": rows(1)})], 3)


def test_empty_like_keeps_everything_but_the_rows():
    batch = {
        "x": np.ones((3, 2), F32),
        "t": ["a", "b"],
        "r": Ragged(np.ones((4, 2)), rows(0, 1, 4)),
        "rr": Ragged(Ragged(np.ones(4), rows(0, 1, 4)), rows(0, 1, 2)),
        "n": {"y": np.ones(3)},
        "p": Pair(np.ones(2), ["a"]),
    }
    equal(
        empty_like(batch),
        {
            "x": np.ones((0, 2), F32),
            "t": [],
            "r": Ragged(np.ones((0, 2)), rows(0)),
            "rr": Ragged(Ragged(np.ones(0), rows(0)), rows(0)),
            "n": {"y": np.ones(0)},
            "p": Pair(np.ones(0), []),
        },
    )


def test_an_error_names_the_field_as_its_key():
    for sample, key in ((lambda n: {"x": np.zeros(n)}, "x"), (np.zeros, None)):
        with pytest.raises(ConfigError) as caught:
            default_collate([sample(1), sample(2)])
        assert caught.value.key == key
