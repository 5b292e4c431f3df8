"""Nulls in columns: masks, values in their place, warnings and errors, compared with pyarrow's Python values."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import tables  # noqa: F401 - starts what pyarrow keeps

import dataload
from dataload import ConfigError, CorruptFileError
from dataload.testing import check_source

DAY = np.datetime64("2024-02-29", "us")
COLUMNS = {
    "n": pa.array([1, None, 3, 4, None, 6], pa.int16()),
    "u": pa.array([None, 2, 3, 4, 5, 6], pa.uint8()),
    "b": pa.array([True, None, False, None, True, True]),
    "f": pa.array([0.5, None, 1.5, float("nan"), 2.5, 3.5]),
    "when": pa.array([DAY, None, None, DAY, DAY, DAY], pa.timestamp("us")),
    "t": pa.array(["a", None, "", "d", "e", None]),
    "word": pa.array(["x", "y", None, "x", None, "y"]).dictionary_encode(),
    "raw": pa.array([b"a", None, b"", b"d", b"e", b"f"]),
    "list": pa.array([[1, 2], None, [], [None, 3], [4], [5]], pa.list_(pa.int32())),
    "pair": pa.array([[1, 2], None, [3, None], [4, 5], [6, 7], [8, 9]], pa.list_(pa.int32(), 2)),
    "vector": pa.array([[0.5, 1], None, [1.5, None], [4, 5], [6, 7], [8, 9]], pa.list_(pa.float32(), 2)),
    "struct": pa.array(
        [{"a": 1, "s": "x"}, None, {"a": None, "s": "y"}, {"a": 3, "s": None}, *[{"a": 4, "s": "z"}] * 2]
    ),
    "none": pa.nulls(6),
}
if int(pa.__version__.split(".")[0]) < 25:  # which cannot write nulls among lists of one length to Parquet
    del COLUMNS["pair"], COLUMNS["vector"]
TABLE = pa.table(COLUMNS)
NEUTRAL = {
    "n": [1, 0, 3, 4, 0, 6],
    "u": [0, 2, 3, 4, 5, 6],
    "b": [True, False, False, False, True, True],
    "t": ["a", "", "", "d", "e", ""],
    "word": ["x", "y", "", "x", "", "y"],
    "raw": [b"a", b"", b"", b"d", b"e", b"f"],
    "pair": [[1, 2], [0, 0], [3, 0], [4, 5], [6, 7], [8, 9]],
}
FILLED = {"pair": [1, 2], "list": [1, 3], "vector": [1], "struct": [1, 2, 3]}  # rows, also by nulls inside
ERROR = "is null, and only floats and times have a value for that (NaN, NaT): pass nulls="


def paths_of(directory, table=TABLE):
    pq.write_table(table, directory / "a.parquet", row_group_size=4)
    pyarrow.feather.write_feather(table, directory / "a.arrow", compression="uncompressed", chunksize=4)
    pyarrow.feather.write_feather(table, directory / "b.arrow", compression="zstd", chunksize=4)
    return [directory / name for name in ("a.parquet", "a.arrow", "b.arrow")]


@pytest.fixture(params=["a.parquet", "a.arrow", "b.arrow"])
def path(tmp_path, request):
    paths_of(tmp_path)
    return tmp_path / request.param


def test_masks_mark_neutral_values(path):
    fields = [name for name in COLUMNS if name != "none"]
    source = dataload.open(path, nulls="mask", fields=fields)
    masked = [name for name in fields if name not in ("f", "when")]
    assert [name for name in source.fields if name.endswith("_is_null")] == [f"{name}_is_null" for name in masked]
    assert str(source.fields["t_is_null"]) == "bool ()"
    rows = np.array([5, 1, 3, 1, 0, 2, 4])
    records = source.read(rows)
    with pytest.raises(CorruptFileError, match=r"'none' has only nulls and no type: pass nulls=\{'none': value\} to"):
        dataload.open(path, nulls="mask", fields=["none"])[0]
    if path.name == "a.parquet":
        assert [check for check in check_source(source, source.read(range(6))) if check.status == "failed"] == []
    for name in masked:
        expected = COLUMNS[name].is_null().to_numpy(zero_copy_only=False)
        expected[FILLED.get(name, [])] = True
        chosen = source.filter(dataload.field(f"{name}_is_null")).indices
        assert chosen.tolist() == np.flatnonzero(expected).tolist(), name
        if name == "vector":  # an item that is null stays NaN, as in other floats
            assert np.isnan(records[1]["vector"]).all()
            assert np.isnan(records[5]["vector"][1])
        assert [bool(record[f"{name}_is_null"]) for record in records] == expected[rows].tolist(), name
        if name in NEUTRAL:
            found = [value if isinstance(value := record[name], (str, bytes)) else value.tolist() for record in records]
            assert found == [NEUTRAL[name][row] for row in rows]
    assert [record["list"].tolist() for record in records] == [[5], [], [0, 3], [], [1, 2], [], [4]]
    assert records[1]["struct"] == {"a": 0, "s": ""}
    assert np.isnan([record["f"] for record in records]).tolist() == [False, True, True, True, False, False, False]
    assert np.isnat([record["when"] for record in records]).tolist() == [False, True, False, True, False, True, False]


def test_masks_of_lists_that_parquet_does_not_have(tmp_path):
    views, empty = pa.array([[1], None], pa.list_view(pa.int64())), pa.array([[], None], pa.list_(pa.int64(), 0))
    numbers = pa.ListArray.from_arrays([0, 2, 3], pa.array([7, 8, 7]).dictionary_encode())
    words = pa.DictionaryArray.from_arrays(pa.array([0, None]), pa.array(["x"], pa.string_view()))  # as Polars writes
    inner = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["x", None]))  # a null of the dictionary's
    path, table = tmp_path / "a.arrow", pa.table({"v": views, "e": empty, "n": numbers, "w": words, "i": inner})
    pyarrow.feather.write_feather(table, path, compression="uncompressed")
    source = dataload.open(path, nulls="mask")
    batch = source.read_batch([0, 1])
    assert (batch["i"], batch["i_is_null"].tolist()) == (["x", ""], [False, True])
    assert (batch["v"], batch["e"].shape, batch["n"]) == ([[1], []], (2, 0), [[7, 8], [7]])
    assert batch["v_is_null"].tolist() == batch["e_is_null"].tolist() == [False, True]
    assert (batch["w"], batch["w_is_null"].tolist(), str(source.fields["n"])) == (["x", ""], [False, True], "unknown")


def test_nulls_are_counted_before_one_is_read(path):
    found = "2 of 'n', 1 of 'u', 2 of 'b', 2 of 't', 2 of 'word'"
    with pytest.warns(UserWarning, match=re.escape(f"has nulls ({found}) in 6 records, and reading one is an error")):
        dataload.open(path)
    with pytest.warns(UserWarning, match=re.escape("has nulls (2 of 'u') in 12 records")):
        dataload.open([path, path], fields=["f", "u"])
    dataload.open(path, fields=["raw", "f"])


def test_values_replace_nulls_of_their_type_and_of_named_fields(path):
    source = dataload.open(path, nulls=7, fields=["n", "f", *({"pair"} & COLUMNS.keys())])
    batch = source.read_batch([1, 2])
    assert batch["n"].tolist() == [7, 3]
    assert np.isnan(batch["f"][0])
    assert "pair" not in batch or batch["pair"].tolist() == [[7, 7], [3, 7]]
    with pytest.raises(CorruptFileError, match=re.escape(f"field 't' {ERROR}")):
        dataload.open(path, nulls=7).read_batch([1], ["t"])
    named = {"n": -1, "f": 0, "t": "?", "b": "mask", "none": 3, "when": "mask", "u": "error"}
    source = dataload.open(path, nulls=named, fields=[*named])
    batch = source.read_batch([1, 5])
    assert [*batch] == ["n", "f", "t", "b", "b_is_null", "none", "when", "when_is_null", "u"]
    assert {name: batch[name].tolist() for name in ("n", "f", "b", "b_is_null", "none", "when_is_null")} == {
        "n": [-1, 6],
        "f": [0, 3.5],
        "b": [False, True],
        "b_is_null": [True, False],
        "none": [3, 3],
        "when_is_null": [True, False],
    }
    assert batch["t"] == ["?", "?"]
    assert source.read_batch([0], ["b_is_null"])["b_is_null"].tolist() == [False]
    with pytest.raises(CorruptFileError, match=re.escape(f"record 0: field 'u' {ERROR}")):
        source.read([0])


@pytest.mark.parametrize(
    ("nulls", "message"),
    [
        ({"m": 1}, r"nulls names 'm', which .*a\.parquet does not have: .*"),
        ({"u": -100}, r"nulls replaces nulls of 'u' by -100, which does not fit its type, uint8, which holds 0 to 255"),
        ({"n": 1.5}, r"nulls replaces nulls of 'n' by 1.5, which does not fit its type, int16, .*"),
        ({"n": True}, r"nulls replaces nulls of 'n' by True, .*"),
        ({"b": 0}, r"nulls replaces nulls of 'b' by 0, which does not fit its type, bool"),
        ({"t": 0}, r"nulls replaces nulls of 't' by 0, which does not fit its type, string"),
        ({"when": "today"}, r"nulls replaces nulls of 'when' by 'today', which does not fit .*"),
        ([1], r"format 'parquet': nulls must be text, an integer, .* got \[1\]"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, nulls, message):
    path = paths_of(tmp_path)[0]
    with pytest.raises(ConfigError, match=f"^{message}$"):
        dataload.open(path, nulls=nulls)


def test_many_columns_and_many_files(tmp_path):
    """Other code reads them: rows of numbers side by side, and one gather of all files."""
    numbers = np.arange(600).reshape(100, 6)
    columns = {f"c{i}": pa.array([None if i % 9 == n else n for n in row]) for i, row in enumerate(numbers % 7)}
    table = pa.table(columns)
    for path in paths_of(tmp_path, table):
        source = dataload.open([path, path], nulls="mask")
        batch, want = source.read_batch([7, 0, 10]), table.take([1, 0, 4]).to_pydict()
        assert len(batch) == 200
        for name, values in want.items():
            assert batch[name].tolist() == [value or 0 for value in values]
            assert batch[f"{name}_is_null"].tolist() == [value is None for value in values]
    whole = pa.table({"x": [1, 2, 3]})
    for path in paths_of(tmp_path, whole):
        batch = dataload.open([path, path], nulls="mask").read_batch([5, 0])
        assert (batch["x"].tolist(), batch["x_is_null"].tolist()) == ([3, 1], [False, False])


def test_csv_and_loaders(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("n,t\n1,a\n,b\n3,\n")
    with pytest.warns(UserWarning, match=r"nulls \(1 of 'n'\) in 3 records"):
        source = dataload.open(path)
    assert source[2] == {"n": 3, "t": ""}
    config = {"source": {"path": str(path), "nulls": {"n": "mask"}}, "loader": {"batch_size": 3}}
    with dataload.from_config(config) as loader:
        (batch,) = loader
    assert (batch["n"].tolist(), batch["n_is_null"].tolist()) == ([1, 0, 3], [False, True, False])
    with dataload.from_config(config, overrides=["source.nulls=-1"]) as loader:
        assert next(iter(loader))["n"].tolist() == [1, -1, 3]
