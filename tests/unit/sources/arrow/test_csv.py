"""CSV: types, damage, and limits."""

import gzip
import tarfile

import numpy as np
import pytest
import tables  # noqa: F401 - starts what pyarrow keeps

import dataload
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.arrow.reader import CsvSource
from dataload.types import FieldSpec


def write(path, text):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_values_decide_the_types_unless_dtypes_do(tmp_path):
    path = write(tmp_path / "a.csv", "n,f,t,d\n1,,a,2020-01-02\n2,0.5,,2020-01-03\n")
    source = dataload.open(path)
    assert [spec.dtype for spec in source.fields.values()] == ["int64", "float64", "str", "datetime64[D]"]
    assert np.isnan(source[0]["f"])
    assert source[1]["t"] == ""
    chosen = CsvSource(path, dtypes={"n": "float32", "d": "str"})
    assert chosen.fields["n"] == FieldSpec("float32", ())
    assert chosen[0]["d"] == "2020-01-02"
    assert not source.reads_in_order
    assert CsvSource([path, path]).reads_in_order


def test_integers_that_would_be_rounded_warn(tmp_path):
    path = write(tmp_path / "a.csv", "id,x,y\n18446744073709551615,1e300,inf\n7,0.5,2\n")
    rounded = r"a\.csv: column 'id' has integers beyond int64, .*: pass dtypes={'id': 'uint64'}, or 'str'"
    with pytest.warns(UserWarning, match=rounded) as told:
        assert dataload.open(path).fields["id"].dtype == "float64"
    assert len(told) == 1
    assert dataload.open(path, dtypes={"id": "uint64"})[0]["id"] == 2**64 - 1


def test_a_table_whose_delimiter_was_not_given_warns(tmp_path):
    path = write(tmp_path / "a.csv", "n;t\n1;a\n2;b\n")
    with pytest.warns(UserWarning, match=r"a\.csv has one column, 'n;t': pass delimiter=';'"):
        assert list(dataload.open(path).fields) == ["n;t"]
    assert dataload.open(path, delimiter=";")[1] == {"n": 2, "t": "b"}


@pytest.mark.parametrize("names", ["1,2.5", "5.1,3.5,-1.4e-3", "2,3,4"])
def test_a_table_without_names_warns(tmp_path, names):
    path = write(tmp_path / "a.csv", f"{names}\n{names}\n")
    with pytest.warns(UserWarning, match=rf"a\.csv has numbers as column names: write names above '{names}'"):
        assert len(dataload.open(path)) == 1
    assert list(dataload.open(write(tmp_path / "b.csv", "0,1,2\n5,6,7\n")).fields) == ["0", "1", "2"]  # as of pandas


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": {"m": "str"}}, r"dtypes names 'm', which .*a\.csv does not have: "),
        ({"delimiter": "||"}, r"delimiter must be one character of ASCII that is not a quote, got '\|\|'"),
        ({"delimiter": "\n"}, "delimiter must be one character"),
        ({"dtypes": {"n": "number"}}, "dtypes: 'number' is not the dtype of a column; expected one such as"),
    ],
)
def test_wrong_options(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        len(CsvSource(write(tmp_path / "a.csv", "n\n1\n"), **options))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", b"", "Empty CSV file"),
        ("a.csv", b"x,y\n1,2\n3\n", "Expected 2 columns, got 1"),
        ("a.csv", b"x\na\n\xff\n", "the column 'x' is not UTF-8"),
        ("a.csv", b"x\n" + b"1\n" * 1000, "the text of the file takes 2,002 bytes of memory"),
        ("a.csv", b"x\n" + b"1\n" * 200, "the table takes 1,600 bytes of memory"),
        ("a.csv.gz", gzip.compress(b"x\n1\n", mtime=0)[:-9], "the file cannot be decompressed: "),
        ("a.csv.gz", gzip.compress(bytes(1 << 20), mtime=0), "the text of the file takes 1,048,576 bytes of memory"),
        ("a.csv.zst", b"x\n1\n", "the file cannot be decompressed: "),
    ],
)
def test_damage(tmp_path, name, data, message):
    path = write(tmp_path / name, data)
    with pytest.raises(CorruptFileError, match=message) as caught:
        len(CsvSource(path, max_record_bytes=1000))
    assert caught.value.path == str(path)


def test_a_row_may_be_longer_than_what_is_parsed_at_once(tmp_path):
    long = "x" * (3 << 20)
    for text, lengths in ((f"a,b\n1,{long}\n2,y\n", [len(long), 1]), (f"a{long},b\n1,y\n", [1])):
        assert [len(record["b"]) for record in dataload.open(write(tmp_path / "a.csv", text))] == lengths
    with pytest.raises(CorruptFileError, match="Expected 2 columns, got 3: 1,2,3"):
        dataload.open(write(tmp_path / "a.csv", f"a,b\n1,{long}\n1,2,3\n"))


def test_columns_that_differ_in_type_warn(tmp_path):
    texts = "n,t,u\n1,1,1\n", "n,t,u\n0.5,a,1\n", "n,t,u\n,,1\n", "n,t,u\n"
    paths = [write(tmp_path / f"{number}.csv", text) for number, text in enumerate(texts)]
    types = {"n": "float64", "t": "str"}
    with pytest.warns(UserWarning, match=f"'n' is float64 in 1.csv, .* pass dtypes={types}$"):
        dataload.open(paths)
    source = dataload.open(paths, dtypes=types)
    np.testing.assert_array_equal(source.read_batch(range(3))["n"], [1, 0.5, np.nan])
    assert len(dataload.open(paths, fields=["u"])) == 3


def test_a_table_beside_shards_is_no_shard(tmp_path):
    write(tmp_path / "labels.csv", "x\n1\n")
    assert len(dataload.open(tmp_path)) == 1
    with tarfile.open(tmp_path / "a.tar", "w"):
        pass
    assert dataload.open(tmp_path).paths == (str(tmp_path / "a.tar"),)
    assert dataload.open(tmp_path, format="csv").paths == (str(tmp_path / "labels.csv"),)
