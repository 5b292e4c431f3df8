"""What the pages of Parquet files claim: all files of pyarrow are understood, and what lies is refused."""

import io
import pickle
import weakref

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dataload
from dataload._util.caches import pickling_for_worker
from dataload.errors import CorruptFileError, WorkerError
from dataload.sources.arrow.parquet import claim_of, read_chunks
from dataload.sources.arrow.table import TableReader

ROWS = 3_000
TABLE = pa.table(
    {
        "number": pa.array(range(ROWS)),
        "truth": pa.array([n % 3 == 0 for n in range(ROWS)]),
        "text": pa.array([f"text {n}" for n in range(ROWS)]),
        "few": pa.array([f"text {n % 5}" for n in range(ROWS)]),
        "fixed": pa.array([b"abc"] * ROWS, pa.binary(3)),
        "lists": pa.array([[f"{n % 7}"] * (n % 4) for n in range(ROWS)]),
        "structs": pa.array([{"a": n, "b": f"{n % 3}"} for n in range(ROWS)]),
        "a.b": pa.array(range(ROWS)),
        "nothing": pa.nulls(ROWS),
    }
)


def claims(data, group=0):
    metadata = pq.read_metadata(io.BytesIO(data))
    columns = [metadata.schema.column(number) for number in range(metadata.num_columns)]

    def read(at, size):
        return data[at : at + size]

    chunks = read_chunks(read, len(data))[group]
    return {leaf.path: claim_of(read, chunk, leaf) for leaf, chunk in zip(columns, chunks, strict=True)}


def written(table=TABLE, **options):
    stream = io.BytesIO()
    pq.write_table(table, stream, **options)
    return stream.getvalue()


FEW = pa.DictionaryArray.from_arrays(pa.array(np.zeros(5_000, np.int8)), pa.array(["a" * 100_000]))
PREFIXED = {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}}


@pytest.mark.parametrize(
    ("column", "options", "size"),
    [
        (lambda: pa.array(["a" * 20_000] * 1_000), PREFIXED, ""),
        (lambda: FEW, {"store_schema": False}, "5[0-9]{2},"),
        (lambda: pa.array([["a" * 100_000] * 100] * 3), {}, "30,"),
    ],
)
def test_texts_that_repeat_are_counted_before_they_are_decoded(tmp_path, column, options, size):
    path, column = tmp_path / "a.parquet", column()
    path.write_bytes(written(pa.table({"x": column}), **options))
    assert path.stat().st_size < 100_000
    message = rf"field 'x' of row group 0 takes {size}[0-9,]+ bytes of memory, and max_record_bytes is 1,000,000"
    with pytest.raises(CorruptFileError, match=message):
        dataload.open(path, max_record_bytes=1_000_000)[0]
    if column is not FEW:  # which takes 500 MB
        assert dataload.open(path, max_record_bytes=40_000_000)[2] == {"x": column[2].as_py()}
    if options is PREFIXED:
        assert claims(path.read_bytes())["x"].prefixed >= 20_000


def test_a_damaged_header(tmp_path):
    data = bytearray(written(pa.table({"x": ["a", "a"]})))
    for damage in (b"\x00", b"\x1c\x18\xff\x7f", b"\xff" * 12, b"\x15\x04\x15\x01", b"\x1f"):
        data[4 : 4 + len(damage)] = damage
        (tmp_path / "a.parquet").write_bytes(data)
        source = dataload.open(tmp_path / "a.parquet")
        assert len(source) == 2
        with pytest.raises(CorruptFileError, match=r"record 0: row group 0: "):
            source[0]
    data = written(pa.table({"x": ["a", "a"]}))
    with pytest.raises(ValueError, match="negative"):
        claims(data[:7] + b"\x81\x01" + data[8:])  # -65 bytes


def test_columns_that_claim_the_same_bytes():
    data = written(pa.table({f"x{n}": range(10_000) for n in range(3)}), use_dictionary=False)
    cut = len(data) // 4
    with pytest.raises(ValueError, match=r"the columns claim more bytes than the file has"):
        read_chunks(lambda at, size: data[at + cut : at + cut + size], len(data) - cut)


def test_an_object_that_is_replaced_is_no_records_fault(object_server):
    bucket = object_server.bucket()
    object_server.put(bucket, "a.parquet", written(row_group_size=1000))
    options = {"storage_options": object_server.storage_options(), "remote": {"mode": "ranges"}}
    with dataload.open(f"{object_server.url(bucket)}/a.parquet", fields=["number"], **options) as source:
        assert source.read_batch([5])["number"] == [5]
        object_server.put(bucket, "a.parquet", written(TABLE.slice(1), row_group_size=1000))
        with pytest.raises(WorkerError, match=r"a\.parquet: the file has been rewritten since it was opened"):
            list(dataload.Loader(source, batch_size=100, epochs=1, on_error="skip", max_bad=1.0))


def test_groups_are_decoded_one_at_a_time(tmp_path, monkeypatch):
    """Records of many groups in one batch take the memory of a column of one group, in each thread."""
    table = pa.table({"x": list(range(40)), "t": [f"{row}" for row in range(40)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    real, seen = TableReader._load, []

    def load(*arguments):
        assert not [reference for reference in seen if reference() is not None]
        found = real(*arguments)
        seen.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(TableReader, "_load", load)
    monkeypatch.setattr("dataload.sources.arrow.blocks._SLOW_SECONDS", 99)  # each thread takes the memory of one
    with dataload.open(tmp_path / "a.parquet", cached_bytes=0) as source:
        batch = source.read_batch([38, 1, 12, 30])
    assert (batch["x"].tolist(), list(batch["t"])) == ([38, 1, 12, 30], ["38", "1", "12", "30"])
    assert len(seen) == 8


def test_groups_stay_at_hand_when_other_files_are_opened(tmp_path, monkeypatch):
    for number in range(5):
        pq.write_table(pa.table({"x": [number], "t": [f"{number}"]}), tmp_path / f"{number}.parquet")
    source = dataload.open(tmp_path)
    with pickling_for_worker():
        source = pickle.loads(pickle.dumps(source))  # which opens a file when it is read
    real, loads = TableReader.load, []
    monkeypatch.setattr(TableReader, "load", lambda self, *given: (loads.append(self), real(self, *given)))
    for number in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4):
        assert source.read_batch([number]) == {"x": [number], "t": [f"{number}"]}
    assert len(loads) == 5
