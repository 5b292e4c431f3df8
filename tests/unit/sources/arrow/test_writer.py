"""What pyarrow reads of our Parquet and Arrow files, and which records are refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_files import same

import dataload
from dataload.errors import ConfigError

RECORDS = [
    {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3) + i,
        "tokens": np.arange(i % 4, dtype=np.uint16),
        "label": np.array(i, np.int16),
        "n": i,
        "text": f"é{i}",
        "data": bytes(i % 5),
        "words": ["a"] * (i % 2),
        "place": {"x": i},
        "day": np.array(i, "datetime64[ms]"),
        "ok": i % 2 == 0,
    }
    for i in range(50)
]


def read(path):
    return pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(str(path)).read_all()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_pyarrow_reads_what_we_write(tmp_path, name, compression):
    with dataload.create(tmp_path / name, group_bytes=500, compression=compression) as writer:
        for record in RECORDS:
            writer.write(record)
            record = {**record, "matrix": None}  # the writer keeps no reference to arrays
    table = read(tmp_path / name)
    assert table.column("matrix").type == pa.fixed_shape_tensor(pa.float32(), [2, 3])
    assert table.column("tokens").type == pa.large_list(pa.uint16())
    assert len(table.column("n").chunks) > 1 or name == "a.parquet"
    for field in ("n", "text", "data", "words", "place", "ok"):
        assert table.column(field).to_pylist() == [record[field] for record in RECORDS]
    source = dataload.open(tmp_path / name)
    numbers = {"n": np.array, "ok": np.array, "place": lambda place: {"x": np.array(place["x"])}}
    want = [{n: numbers[n](v) if n in numbers else v for n, v in record.items()} for record in RECORDS]
    same(list(source), want)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_no_records_and_reused_arrays(tmp_path, name):
    with dataload.create(tmp_path / name):
        pass
    assert len(dataload.open(tmp_path / name)) == 0
    x = np.zeros(3)
    with dataload.create(tmp_path / f"b{name}") as writer:
        for i in range(3):
            x[:] = i
            writer.write({"x": x})
    assert dataload.open(tmp_path / f"b{name}").read_batch([0, 1, 2])["x"][:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"x": 1}, {"x": "a"}], {}, r"field 'x' of record 1 is str, and int in the first record: a table has columns"),
        ([{"x": 1}, {"y": 1}], {}, r"field 'y' of record 1 is int, and missing in the first record"),
        ([{"x": np.zeros((2, 2))}, {"x": np.zeros((2, 3))}], {}, r"record 1 has the shape \(2, 3\), and \(2, 2\) in t"),
        ([{"x": np.zeros(2)}, {"x": np.zeros(3)}], {"group_bytes": 1}, r"shape \(3,\), and \(2,\) .*: pass ragged=\['"),
        ([{"x": np.zeros(1, np.complex64)}], {}, "field 'x' is an array of complex64, which a table cannot store"),
        ([{"x": np.zeros((0, 3))}], {}, r"field 'x' cannot be stored in a table: an array of shape \(0, 3\) has no it"),
        ([{"x": 1 << 70}], {}, "field 'x' cannot be stored in a table"),
        ([{"x": [1, "a"]}], {}, "field 'x' cannot be stored in a table"),
        ([{"x": 1}], {"ragged": ["y"]}, "ragged names the field 'y': Known: x"),
        ([b"x"], {}, "format 'tables' stores fields, got a record of type bytes"),
    ],
)
def test_what_a_table_cannot_store(tmp_path, records, options, message):
    writer = dataload.create(tmp_path / "a.arrow", **options)
    with pytest.raises(ConfigError, match=message), writer:
        writer.extend(records)
    assert not [*tmp_path.iterdir()]


def test_ragged_fields_are_lists(tmp_path):
    with dataload.create(tmp_path / "a.parquet", ragged=["x"], group_bytes=1) as writer:
        writer.extend([{"x": np.zeros(2)}, {"x": np.zeros(2)}, {"x": np.zeros(3)}])
    assert [len(record["x"]) for record in dataload.open(tmp_path / "a.parquet")] == [2, 2, 3]


@pytest.mark.parametrize(("name", "codec"), [("a.parquet", "zip"), ("a.arrow", "snappy")])
def test_an_unknown_compression(tmp_path, name, codec):
    with pytest.raises(ConfigError, match=f"compression is '{codec}', which this pyarrow does not offer here"):
        dataload.create(tmp_path / name, compression=codec)


def test_the_same_records_give_the_same_bytes(tmp_path):
    for name in ("a.parquet", "b.parquet"):
        with dataload.create(tmp_path / name) as writer:
            writer.extend(RECORDS)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
