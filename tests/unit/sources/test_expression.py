"""Conditions: evaluated on columns, by pyarrow, and on statistics, all compared with Python."""

import itertools
import json
import operator as op
from datetime import date, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import tables  # noqa: F401 - starts what pyarrow keeps
from hypothesis import example, given
from hypothesis import strategies as st

import dataload
from dataload import ConfigError, MemorySource, RangeSource, field
from dataload.sources import ConcatSource
from dataload.sources.arrow import parquet
from dataload.sources.views.split import parse

ROWS = {
    "n": [3, 4, None, 3, 7, 1],
    "m": [3, 1, 2, None, 9, 1],
    "x": [0.5, float("nan"), None, 2.5, -1.0, 3.0],
    "t": ["a", None, "c", "bb", "", "a"],
    "b": [True, None, False, True, True, False],
}
COMPARE = {"==": op.eq, "!=": op.ne, "<": op.lt, "<=": op.le, ">": op.gt, ">=": op.ge}


def leaves():
    numbers = st.tuples(st.sampled_from(["n", "m"]), st.sampled_from([*COMPARE]), st.integers(0, 8))
    floats = st.tuples(st.just("x"), st.sampled_from([*COMPARE]), st.sampled_from([0.5, 2.5, 9.0]))
    texts = st.tuples(st.just("t"), st.sampled_from([*COMPARE]), st.sampled_from(["a", "b", ""]))
    among = st.tuples(st.just("n"), st.just("in"), st.lists(st.integers(0, 8), max_size=3))
    nulls = st.tuples(st.sampled_from([*ROWS]), st.just("null"), st.none())
    return st.one_of(numbers, floats, texts, among, nulls, st.just(("b", "is", None)))


CONDITIONS = st.recursive(
    leaves(),
    lambda inner: st.tuples(st.just("~"), inner) | st.tuples(inner, st.sampled_from("&|"), inner),
    max_leaves=4,
)


def built(tree):
    if tree[0] == "~":
        return ~built(tree[1])
    one, sign, other = tree
    if sign in ("&", "|"):
        return built(one) & built(other) if sign == "&" else built(one) | built(other)
    if sign in COMPARE:
        return COMPARE[sign](field(one), other)
    return field(one).isin(other) if sign == "in" else field(one).is_null() if sign == "null" else field(one)


def truth(tree, row):
    """True, False or None, as in SQL."""
    if tree[0] == "~":
        inner = truth(tree[1], row)
        return None if inner is None else not inner
    one, sign, other = tree
    if sign in ("&", "|"):
        sides = [truth(one, row), truth(other, row)]
        ends = sign == "|"
        return ends if ends in sides else None if None in sides else not ends
    value = ROWS[one][row]
    if sign == "null":
        return value is None
    if value is None:
        return None
    return value if sign == "is" else value in other if sign == "in" else COMPARE[sign](value, other)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    directory, table = tmp_path_factory.mktemp("tables"), pa.table(ROWS)
    pq.write_table(table, directory / "a.parquet", row_group_size=2)
    pyarrow.feather.write_feather(table, directory / "a.arrow", compression="uncompressed", chunksize=4)
    pyarrow.feather.write_feather(table, directory / "b.arrow", compression="zstd", chunksize=4)
    opened = [dataload.open(directory / name, nulls="error") for name in ("a.parquet", "a.arrow", "b.arrow")]
    records = [{name: values[row] for name, values in ROWS.items()} for row in range(6)]
    (directory / "a.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    opened.append(dataload.open(directory / "a.jsonl"))
    opened += [dataload.open(directory / "a.jsonl", nulls="mask"), MemorySource(table, nulls="mask")]
    for source in opened:
        source.read([0])  # maps its file, which takes a descriptor
    return opened


@given(tree=CONDITIONS)
@example(tree=("~", (("n", "==", 3), "&", ("b", "is", None))))
@example(tree=("~", (("n", "==", 3), "|", ("b", "is", None))))
def test_every_source_selects_what_python_does(sources, tree):
    condition = built(tree)
    want = [row for row in range(6) if truth(tree, row) is True]
    assert pa.table(ROWS).append_column("row", [[*range(6)]]).filter(condition.to_arrow())["row"].to_pylist() == want
    for source in sources:
        assert source.filter(condition).indices.tolist() == want, source


NUMBERS = {
    "int64": [2**53 + 1, 1, 2**60 + 1, -3, 2**63 - 1, -(2**63)],
    "uint64": [0, 1, 2**63, 2**64 - 1, 2**53 + 1, 5],
    "int8": [-128, 127, 0, 1, 2, 3],
    "double": [0.0, -0.0, float("nan"), float("inf"), 1e300, 2.0**53],
    "float": [0.0, float(np.float32(0.1)), float("nan"), float("-inf"), -0.0, 1.5],
}
CONSTANTS = [0, -129, 255, 2**53, 2**53 + 1, 2**60, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1]
CONSTANTS += [10**400, -(10**400)]
CONSTANTS += [-0.0, 0.5, 1.0, 2.0**53, 2.0**60, 1e20, -1e20, 1e300, float("inf"), float("-inf"), float("nan"), 0.1]


def test_numbers_are_compared_exactly(tmp_path):
    table = pa.table({kind: pa.array(values, kind) for kind, values in NUMBERS.items()})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    source, columns = dataload.open(tmp_path / "a.parquet"), {kind: table[kind].to_numpy() for kind in NUMBERS}
    cases = itertools.product(NUMBERS, [*COMPARE, "in"], CONSTANTS)
    for case, (kind, sign, other) in enumerate(cases):
        condition = built((kind, sign, [other, 7, 2**63 + 5] if sign == "in" else other))
        want = [other == one if sign == "in" else COMPARE[sign](one, other) for one in NUMBERS[kind]]
        assert condition.matches_arrow(table.column).tolist() == want, condition
        assert condition.matches(columns.__getitem__).tolist() == want, condition
        if case % 8 == 0:  # by the statistics of row groups
            assert source.filter(condition, num_workers=0).indices.tolist() == np.flatnonzero(want).tolist(), condition


def test_times_are_compared_exactly(tmp_path):
    kinds = {"t": pa.timestamp("ns"), "d": pa.date32(), "u": pa.duration("s")}
    table = pa.table({name: pa.array([0, 1, -1, None], kind) for name, kind in kinds.items()})
    pq.write_table(table, tmp_path / "a.parquet")
    months = MemorySource({"m": np.array(["1970-01", "1970-02", "1969-12", "NaT"], "M8[M]")})
    sources = dataload.open(tmp_path / "a.parquet"), MemorySource(table)
    for condition, want in (
        (field("t") < np.datetime64("9999-12-31"), [0, 1, 2]),
        (field("t") > np.datetime64("0001-01"), [0, 1, 2]),
        (field("t") == datetime(1970, 1, 1), [0]),
        (field("t") >= datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), [0, 1]),
        (field("t").isin([date(1970, 1, 1), np.datetime64("NaT"), np.datetime64("9999-12-31")]), [0]),
        (field("d") < datetime(1970, 1, 2), [0, 2]),
        (field("d") != np.datetime64(1, "as"), [0, 1, 2]),
        (field("u") <= timedelta(microseconds=1), [0, 2]),
        (field("u") < np.timedelta64(2**62, "W"), [0, 1, 2]),
        (field("m") < date(1970, 1, 2), [0, 2]),
    ):
        for source in [months] if condition.fields == ("m",) else sources:
            assert source.filter(condition).indices.tolist() == want, (source, condition)
    for name, other in (("t", 0), ("t", "1970-01-01"), ("t", np.timedelta64(1, "s")), ("u", np.timedelta64(1))):
        with pytest.raises(ConfigError, match="does not fit the fields"):
            sources[1].filter(field(name) == other)


def test_what_no_value_equals(tmp_path):
    table = pa.table({"x": [0.0, -0.0, float("nan"), None], "t": ["", "\0", "a", None]})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps({'t': text})}\n" for text in table["t"].to_pylist()))
    texts = [dataload.open(tmp_path / name, nulls="error") for name in ("a.parquet", "a.jsonl")]
    for condition, want in (
        (field("x").isin([]), []),
        (~field("x").isin([]), [0, 1, 2]),
        (field("x").isin([float("nan")]), []),
        (field("x").isin([0.0]), [0, 1]),
        (field("x").isin([0]), [0, 1]),
        (field("t").isin([]), []),
        (field("t") == "\0", [1]),
        (field("t") > "", [1, 2]),
    ):
        assert table.append_column("row", [[*range(4)]]).filter(condition.to_arrow())["row"].to_pylist() == want
        for source in texts if condition.fields == ("t",) else texts[:1]:
            assert source.filter(condition).indices.tolist() == want, (source, condition)


def test_values_of_every_type_of_arrow_find_themselves(tmp_path):
    numbers = pa.array([5, None, 7])
    times = ["date32", "time32[s]", "timestamp[s]", pa.timestamp("us", "Europe/Berlin"), "duration[ns]"]
    text = pa.array(["a", None, "b"], pa.string_view())  # as Polars writes text
    columns = [*(numbers.cast("int32" if kind in times[:2] else "int64").cast(kind) for kind in times), text]
    columns += [
        pa.DictionaryArray.from_arrays(pa.array([0, None, 1]), pa.array(["a", "b"], text.type)),
        pa.array(np.array([1, 0, 2], np.float16), mask=np.array([False, True, False])),
    ]
    table, path = pa.table(columns, [*"abcdefgh"]), tmp_path / "a.arrow"
    pyarrow.feather.write_feather(table, path, compression="uncompressed")
    sources = dataload.open(path, nulls="error"), MemorySource(table, nulls="error")
    first, last = sources[0][0], sources[0][2]
    for name in sources[0].fields:
        one, other = (value if isinstance(value, str) else value[()] for value in (first[name], last[name]))
        for condition, want in (
            (field(name) == one, [0]),
            (field(name) > one, [2]),
            (~field(name).isin([]) & ~field(name).isin([other]), [0]),
            (field(name).isin([one, other]), [0, 2]),
        ):
            assert [source.filter(condition).indices.tolist() for source in sources] == [want] * 2, condition


def test_views_ask_their_parents(sources):
    condition = field("n") == 3
    for source in sources:
        assert source[1:].filter(condition).indices.tolist() == [2]
        assert source[[5, 3, 0]].filter(condition).indices.tolist() == [1, 2]
        assert dataload.concat([source, source[2:]]).filter(condition).indices.tolist() == [0, 3, 7]
        assert dataload.concat([source, source[2:]])[[7, 1, 3, 8, 0]].filter(condition).indices.tolist() == [0, 2, 4]
    two = dataload.open([sources[0].paths[0]] * 2, nulls="error")
    assert two.filter(condition).indices.tolist() == [0, 3, 6, 9]
    assert two[7:].filter(condition).indices.tolist() == [2]
    with_source = ConcatSource([MemorySource({"n": [3, 4]}), MemorySource({"n": [5, 3]})], with_source=True)
    assert with_source.filter((field("source") == 1) & condition).indices.tolist() == [3]
    assert dataload.concat([MemorySource([]), MemorySource({"n": [5, 3]})]).filter(condition).indices.tolist() == [1]
    part = MemorySource(pa.table({"n": [1, None, 3], "t": [0, 1, 2]}), nulls=0)
    twice = ConcatSource([part, part], with_source=True)
    assert twice.filter(~((field("n") < 3) | (field("source") == 0))).indices.tolist() == [5]
    found = dataload.windows(part, [3], offsets={"t": [0]})
    assert found.filter(field("n") < 3).indices.tolist() == [0]
    assert found[::-1].filter(field("n").is_null()).indices.tolist() == [1]
    assert len(MemorySource({"n": np.arange(200_000) % 10}).filter(condition)) == 20_000


def test_groups_without_a_match_are_not_read(tmp_path, monkeypatch):
    table = pa.table(
        {"n": np.arange(100), "t": [f"{i:03d}" for i in range(100)], "u": np.arange(100, dtype=np.uint64) + (1 << 63)}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    source, real, read = dataload.open(tmp_path / "a.parquet"), parquet._ParquetFile._raw, []
    monkeypatch.setattr(parquet._ParquetFile, "_raw", lambda *given: read.append(given[1]) or real(*given))
    for condition, groups, count in (
        (field("n") == 33, {3}, 1),
        (field("n").isin([5, 95]), {0, 9}, 2),
        (~(field("n") < 85), {8, 9}, 15),
        ((field("t") >= "090") & (field("n") < 95), {9}, 5),
        (field("u") > (1 << 63) + 97, {9}, 2),
        (field("u") == 1 << 63, {0}, 1),
        (field("n") != 5, {*range(10)}, 99),
    ):
        read.clear()
        assert len(source.filter(condition, num_workers=0)) == count
        assert {*read} == groups


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("label == 3", "field('label') == 3"),
        ("3 < x <= 5", "(field('x') > 3) & (field('x') <= 5)"),
        ("not name in ['a', 'b'] or is_null(y)", "~(field('name') in ('a', 'b')) | field('y').is_null()"),
        ("field('a b') != -1 and flag", "(field('a b') != -1) & field('flag')"),
        ("name not in ('a',)", "~(field('name') in ('a',))"),
        ("x in {'c', 'a', 'd', 'b'}", "field('x') in ('a', 'b', 'c', 'd')"),
    ],
)
def test_conditions_as_text(text, expected):
    assert repr(parse(text)) == expected


@pytest.mark.parametrize(
    "text",
    ["3", "label ==", "f(x) == 1", "x == y", "a.b == 2", "label == None", "x is 3", "x + 1 == 2", "__import__('os')"],
)
def test_texts_that_are_no_conditions(text):
    with pytest.raises(ConfigError, match=r"(is not a condition|names no field)"):
        parse(text)


@pytest.mark.parametrize("name", ["a.tfrecord", "a.parquet", "a.arrow", "memory"])
def test_an_array_of_one_value_is_compared_as_the_value(tmp_path, name):
    columns = {"v": np.arange(6)[:, None] % 4, "x": np.arange(6, dtype=np.float32)[:, None]}
    codec = {"codec": "example"} if name == "a.tfrecord" else {}
    if name != "memory":
        with dataload.create(tmp_path / name, **codec) as writer:
            for v, x in zip(*columns.values(), strict=True):
                writer.write({"v": v, "x": x})
    source = MemorySource(columns) if name == "memory" else dataload.open(tmp_path / name, **codec)
    assert source.filter(field("v") == 1).indices.tolist() == [1, 5]
    assert source.filter(field("v").isin([0, 3]) & (field("x") < 3.5)).indices.tolist() == [0, 3]
    rows = pa.array([[1], None, [3]], pa.list_(pa.int64(), 1))
    nulls = MemorySource(pa.table({"v": rows}), nulls={"v": 1})
    assert nulls.filter(field("v") == 1).indices.tolist() == [0]
    assert nulls.filter(field("v").is_null()).indices.tolist() == [1]


def test_what_does_not_fit(sources):
    for condition in (field("t") == 3, field("n"), field("n").isin(["a"])):
        for source in sources:
            with pytest.raises(ConfigError, match="does not fit the fields"):
                source.filter(condition)
    with pytest.raises(ConfigError, match="has no field 'q'"):
        sources[0].filter(field("q") == 1)
    with pytest.raises(ConfigError, match="a condition compares single values, and 'v' has several in a record"):
        MemorySource({"v": np.zeros((3, 2))}).filter(field("v") == 1)
    with pytest.raises(ConfigError, match="must be a function of a record or a condition"):
        RangeSource(3).filter("index == 1")
    for wrong, message in (
        (lambda: (field("x") == 1) and (field("y") == 2), "join conditions by &, | and ~"),
        (lambda: field("x") == None, "a comparison with None never holds"),  # noqa: E711
        (lambda: (field("x") > 1) & 3, "& joins conditions, got 3: put each comparison in parentheses"),
        (lambda: field("x").isin("abc"), "isin takes a list of values"),
    ):
        with pytest.raises(TypeError, match=message):
            wrong()


def test_indices_and_masks():
    source = RangeSource(6)
    mask = np.arange(6) % 2 == 1
    for chosen in (mask, mask.tolist()):
        assert [record["index"] for record in source[chosen]] == [1, 3, 5]
    given = np.array([4, 5, 4, 0])
    some = source[given]
    given[:] = 9  # shuffled, for example
    assert [record["index"] for record in some] == [4, 5, 4, 0]
    assert some.shard_lengths == (4,)
    assert source[np.array([1, 2])].fingerprint() == source[[1, 2]].fingerprint() != some.fingerprint()
    assert len(source[[]]) == 0
    with pytest.raises(IndexError, match="a mask has a value for each record: this one has 5 for 6 records"):
        source[mask[:5]]
    with pytest.raises(IndexError, match="index 6 is out of range for 6 records"):
        source[[6]]
    with dataload.Loader(some, batch_size=2) as loader:
        assert [batch["index"].tolist() for batch in loader] == [[4, 5], [4, 0]]
