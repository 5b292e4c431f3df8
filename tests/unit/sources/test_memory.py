import numpy as np
import pyarrow as pa
import pytest
from made_files import same

from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.memory import MemorySource
from dataload.types import FieldSpec

RECORDS = [{"x": np.arange(3) + i, "t": f"text {i}", "b": bytes(i), "n": i, "f": i / 2} for i in range(5)]
COLUMNS = {
    "x": np.arange(3) + np.arange(5)[:, None],
    "t": [f"text {i}" for i in range(5)],
    "b": [bytes(i) for i in range(5)],
    "n": list(range(5)),
    "f": [i / 2 for i in range(5)],
}


def test_columns_and_records_are_the_same_data():
    by_rows, by_columns = MemorySource(RECORDS), MemorySource(COLUMNS)
    same(list(by_rows), RECORDS)
    same(list(by_columns), RECORDS)
    same(by_columns.read_batch([4, 0, 4]), by_rows.read_batch([4, 0, 4]))
    assert by_rows.fields == by_columns.fields
    assert by_rows.fields["x"] == FieldSpec("int64", (3,))
    assert by_rows.fingerprint() == by_columns.fingerprint()


@pytest.mark.parametrize("column", [np.array(["a", "b"]), np.array([b"a", b"b"]), np.array(["a", None], object)])
def test_text_in_an_array_is_text(column):
    source = MemorySource({"y": column})
    same(source[0], {"y": column.tolist()[0]})
    same(source.read_batch([1, 0]), {"y": column.tolist()[::-1]})
    same(MemorySource({"y": np.arange(3)})[1], {"y": np.array(1)})  # an array as from a file


def test_fields_are_chosen_in_order():
    for source in (MemorySource(RECORDS, fields=["n", "t"]), MemorySource(COLUMNS, fields=["n", "t"])):
        assert list(source[0]) == list(source.fields) == list(source.read_batch([0, 1])) == ["n", "t"]
        assert list(source.read_batch([0, 1], fields=["t"])) == ["t"]
        assert source.read_batch([0, 1], fields=[]) == {}
        with pytest.raises(ConfigError):
            source.read_batch([0], fields=["x"])
    assert MemorySource([b"a", b"b"]).read_batch([1, 0]) == [b"b", b"a"]
    records = [{"x": 1}]
    source = MemorySource(records)
    records.append({"x": 2})
    assert (len(source), repr(source)) == (1, "MemorySource(1 records)")


UNKNOWN = r"there is no field 'tt': did you mean 't'\? Known: b, f, n, t, x"


@pytest.mark.parametrize(
    ("data", "fields", "chosen", "message"),
    [
        (RECORDS, ["tt"], None, UNKNOWN),
        (COLUMNS, ["tt"], None, UNKNOWN),
        (RECORDS, None, ["tt"], "there is no field 'tt'"),
        (COLUMNS, None, ["tt"], "there is no field 'tt'"),
        ([b"a"], None, ["x"], "there is no field 'x'"),
        ({"x": np.zeros(3), "y": [1, 2]}, None, None, r"columns differ in length: \{'x': 3, 'y': 2\}"),
        (pa.table([[1], [2]], names=["x", "x"]), None, None, "the table has several columns 'x'"),
    ],
)
def test_what_is_refused(data, fields, chosen, message):
    with pytest.raises(ConfigError, match=message) as caught:
        MemorySource(data, fields=fields).read_batch([0], fields=chosen)
    assert not fields or caught.value.key == "fields"


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
    square = np.arange(9).reshape(3, 3).T
    assert MemorySource([{"x": square}]).fingerprint() == MemorySource([{"x": square.copy()}]).fingerprint()


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_table_of_another_library(library):
    module = pytest.importorskip(library)
    table_of = module.table if library == "pyarrow" else module.DataFrame
    columns = {"n": [3, 4, 5], "f": [0.5, None, 2.0], "t": ["a", "é", ""], "b": [b"x", b"", b"yz"], "l": [[1], [], [2]]}
    table = table_of(columns)
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
        MemorySource(table_of({"t": ["a", None]}))
    if library == "pandas":  # its index is no field
        assert MemorySource(module.DataFrame({"x": [1, 2]}, index=[7, 9])).fields.keys() == {"x"}
