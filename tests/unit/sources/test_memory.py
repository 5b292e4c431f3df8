import numpy as np
import pytest

from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.memory import MemorySource
from dataload.testing.compare import difference
from dataload.types import FieldSpec

RECORDS = [{"x": np.arange(3) + i, "t": f"text {i}", "b": bytes(i), "n": i, "f": i / 2} for i in range(5)]
COLUMNS = {
    "x": np.arange(3) + np.arange(5)[:, None],
    "t": [f"text {i}" for i in range(5)],
    "b": [bytes(i) for i in range(5)],
    "n": list(range(5)),
    "f": [i / 2 for i in range(5)],
}


def same(got, want):
    found = difference(got, want, "value")
    assert found is None, found


def test_columns_and_records_are_the_same_data():
    by_rows, by_columns = MemorySource(RECORDS), MemorySource(COLUMNS)
    same(list(by_rows), RECORDS)
    same(list(by_columns), RECORDS)
    same(by_columns.read_batch([4, 0, 4]), by_rows.read_batch([4, 0, 4]))
    assert by_rows.fields == by_columns.fields
    assert by_rows.fields["x"] == FieldSpec("int64", (3,))
    assert by_rows.fingerprint() == by_columns.fingerprint()


def test_numbers_of_a_column_are_arrays_as_from_a_file():
    same(MemorySource({"y": np.arange(3)})[1], {"y": np.array(1)})


@pytest.mark.parametrize("column", [np.array(["a", "b"]), np.array([b"a", b"b"]), np.array(["a", None], object)])
def test_text_in_an_array_is_text(column):
    source = MemorySource({"y": column})
    same(source[0], {"y": column.tolist()[0]})
    same(source.read_batch([1, 0]), {"y": column.tolist()[::-1]})


def test_fields_are_chosen_in_order():
    for source in (MemorySource(RECORDS, fields=["n", "t"]), MemorySource(COLUMNS, fields=["n", "t"])):
        assert list(source[0]) == ["n", "t"]
        assert list(source.fields) == ["n", "t"]
        assert list(source.read_batch([0, 1])) == ["n", "t"]
        assert list(source.read_batch([0, 1], fields=["t"])) == ["t"]
        assert source.read_batch([0, 1], fields=[]) == {}
        with pytest.raises(ConfigError, match="no field 'x'"):
            source.read_batch([0], fields=["x"])


@pytest.mark.parametrize("data", [RECORDS, COLUMNS])
def test_unknown_fields(data):
    with pytest.raises(ConfigError, match=r"there is no field 'tt': did you mean 't'\? Known: b, f, n, t, x") as caught:
        MemorySource(data, fields=["tt"])
    assert caught.value.key == "fields"
    with pytest.raises(ConfigError, match="there is no field 'tt'"):
        MemorySource(data).read_batch([0], fields=["tt"])


def test_columns_of_different_lengths():
    with pytest.raises(ConfigError, match=r"columns differ in length: \{'x': 3, 'y': 2\}"):
        MemorySource({"x": np.zeros(3), "y": [1, 2]})


@pytest.mark.parametrize("data", [[], {}, {"x": np.empty((0, 2))}])
def test_no_records(data):
    source = MemorySource(data)
    assert len(source) == 0
    assert list(source) == []
    assert source.fields == {}
    assert len(source.fingerprint()) == 32


def test_the_list_may_change_afterwards():
    records = [{"x": 1}]
    source = MemorySource(records)
    records.append({"x": 2})
    assert len(source) == 1


def test_fingerprints_tell_data_apart():
    data = [
        [b""], [b"\0"], [b"\0\0"], [b"", b""], [""], ["a", "b"], ["ab", ""], ["", "ab"], [{"x": b"a"}], [{"y": b"a"}],
        [{"x": 1}], [{"x": 2}], [{"x": 1.0}], [{"x": "1"}], [{"x": 2**70}], [{"x": 2**70 + 1}],
        [{"x": np.zeros(2)}], [{"x": np.zeros(2, np.float32)}], [{"x": np.zeros((2, 1))}], [{"x": np.zeros((0, 2))}],
        [{"x": np.zeros((0, 3))}], [{"x": -np.zeros(2)}], [{"x": np.zeros(4)[::2] + 1}], [{"x": np.array(1)}],
    ]  # fmt: skip
    fingerprints = [MemorySource(records).fingerprint() for records in data]
    assert len(set(fingerprints)) == len(data)
    assert fingerprints == [MemorySource(records).fingerprint() for records in data]


def test_fingerprint_does_not_depend_on_how_an_array_lies_in_memory():
    square = np.arange(9).reshape(3, 3)
    assert MemorySource([{"x": square.T}]).fingerprint() == MemorySource([{"x": square.T.copy()}]).fingerprint()


def test_plain_records_take_no_fields():
    assert MemorySource([b"a", b"b"]).read_batch([1, 0]) == [b"b", b"a"]
    with pytest.raises(ConfigError, match="there is no field 'x'"):
        MemorySource([b"a"]).read_batch([0], fields=["x"])


def test_repr():
    assert repr(MemorySource(COLUMNS)) == "MemorySource(5 records)"


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_table_of_another_library(library):
    columns = {"n": [3, 4, 5], "f": [0.5, None, 2.0], "t": ["a", "é", ""], "b": [b"x", b"", b"yz"], "l": [[1], [], [2]]}
    module = pytest.importorskip(library)
    table = module.table(columns) if library == "pyarrow" else module.DataFrame(columns)
    source = MemorySource(table)
    assert len(source) == 3
    assert list(source.fields) == ["n", "f", "t", "b", "l"]
    same(source[0], {"n": np.array(3), "f": np.array(0.5), "t": "a", "b": b"x", "l": np.array([1])})
    assert np.isnan(source[1]["f"])
    same(source.read_batch([2, 0], ["n", "t", "l"]), {"n": np.array([5, 3]), "t": ["", "a"], "l": np.array([[2], [1]])})
    source[0]["n"][...] = 7
    assert source[0]["n"] == 3
    assert list(MemorySource(table, fields=["t", "n"])[2]) == ["t", "n"]
    with pytest.raises(ConfigError, match=r"there is no field 'm': Known: b, f, l, n, t"):
        MemorySource(table, fields=["m"])
    with pytest.raises(CorruptFileError, match=r"record 1: field 't' is null, and only floats and times have a value"):
        MemorySource(module.table({"t": ["a", None]}) if library == "pyarrow" else module.DataFrame({"t": ["a", None]}))


def test_the_index_of_pandas_is_no_field():
    pandas = pytest.importorskip("pandas")
    assert MemorySource(pandas.DataFrame({"x": [1, 2]}, index=[7, 9])).fields.keys() == {"x"}


def test_columns_of_one_name_are_refused():
    pyarrow = pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match="the table has several columns 'x'"):
        MemorySource(pyarrow.table([[1], [2]], names=["x", "x"]))
