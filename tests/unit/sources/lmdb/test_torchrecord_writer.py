import os

import lmdb
import numpy as np
import pytest

from dataload.codecs.tensorprotos import decode
from dataload.errors import ConfigError
from dataload.sources.lmdb import torchrecord_writer as torchrecord
from dataload.sources.lmdb.torchrecord import TorchRecordSource
from dataload.sources.lmdb.torchrecord_writer import TorchRecordWriter


def record(n):
    return {"x": np.full(5, n, np.float32), "y": n}


def original_reader(path, db_num):
    """What the original's reader would return, item by item, as tests/golden/torchrecord/README.md describes it.

    It pads with the digits of the largest sub-database, and takes the first key that is not smaller.
    """
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=db_num) as environment:
        handles = [environment.open_db(b"db%d" % number, create=False) for number in range(db_num)]
        with environment.begin() as txn:
            counts = [txn.stat(handle)["entries"] for handle in handles]
            width = len(str(max(counts)))
            items = []
            for handle, count in zip(handles, counts, strict=True):
                cursor = txn.cursor(handle)
                for place in range(count):
                    cursor.set_range(b"%0*d" % (width, place))
                    items.append(decode(cursor.value()))
    return counts, items


@pytest.mark.parametrize("db_num", [1, 3])
@pytest.mark.parametrize(("count", "known"), [(0, True), (0, False), (1, True), (10, False), (29, True), (301, False)])
def test_what_the_original_reads(tmp_path, db_num, count, known):
    path = tmp_path / "out.torchrecord"
    with TorchRecordWriter(path, db_num=db_num, num_records=count if known else None) as writer:
        writer.extend(map(record, range(count)))
        assert not path.exists()
    counts, items = original_reader(path, db_num)
    assert counts == [count * (n + 1) // db_num - count * n // db_num for n in range(db_num)]
    assert [int(item["y"]) for item in items] == list(range(count))
    with TorchRecordSource(path, db_num=db_num) as source:
        assert [int(record["y"]) for record in source] == list(range(count))
        assert list(source.fields) == (["x", "y"] if count else [])
    assert (os.listdir(path), os.listdir(tmp_path)) == (["data.mdb"], ["out.torchrecord"])


def test_more_records_than_the_spool_holds_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(torchrecord, "_SPOOL_BYTES", 1000)
    values = [np.random.default_rng(n).bytes(n * 37 % 5000) for n in range(200)]
    with TorchRecordWriter(tmp_path / "o") as writer:
        writer.extend({"b": value} for value in values)
        assert len(os.listdir(tmp_path)) == 1  # the spool has no name
    with TorchRecordSource(tmp_path / "o") as source:
        assert [item["b"] for item in source] == values


def test_another_number_of_records(tmp_path):
    writer = TorchRecordWriter(tmp_path / "o", num_records=3)
    writer.extend(map(record, range(3)))
    with pytest.raises(ConfigError, match="num_records is 3, but there are more records"):
        writer.write(record(3))
    writer.close()
    writer = TorchRecordWriter(tmp_path / "p", num_records=3)
    writer.extend(map(record, range(2)))
    with pytest.raises(ConfigError, match="num_records is 3, but 2 records were written"):
        writer.close()
    assert os.listdir(tmp_path) == ["o"]


def test_fields_may_differ_and_what_is_refused_leaves_no_trace(tmp_path):
    with TorchRecordWriter(tmp_path / "o") as writer:
        writer.write({"a": 1})
        with pytest.raises(ConfigError, match="field 'x' has dtype uint64; TensorProtos hold"):
            writer.write({"x": np.zeros(2, np.uint64)})
        with pytest.raises(ConfigError, match="format 'torchrecord' stores fields, got a record of type bytes"):
            writer.write(b"bytes")
        writer.extend([{}, {"b": "text", "a": b""}])
    with TorchRecordSource(tmp_path / "o") as source:
        assert list(source) == [{"a": 1}, {}, {"b": "text", "a": b""}]


@pytest.mark.parametrize("known", [3, None])
def test_records_before_one_that_is_too_large_are_counted(tmp_path, monkeypatch, known):
    monkeypatch.setattr("dataload.sources.lmdb.write_environment._MAX_VALUE_BYTES", 600)
    with TorchRecordWriter(tmp_path / "o", num_records=known) as writer:
        with pytest.raises(ConfigError):
            writer.extend([{"b": b"1"}, {"b": b"2"}, {"b": bytes(601)}])
        assert len(writer) == 2
        writer.extend([{"b": b"3"}])
    assert [record["b"] for record in TorchRecordSource(tmp_path / "o")] == [b"1", b"2", b"3"]
