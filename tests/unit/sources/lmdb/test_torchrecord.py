import os

import lmdb
import numpy as np
import pytest
from lmdb_files import make
from made_files import same
from refusals import refuses

from dataload.codecs.tensorprotos import decode, encode
from dataload.collate import default_collate
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.lmdb import writer as torchrecord
from dataload.sources.lmdb.torchrecord import TorchRecordSource
from dataload.sources.lmdb.writer import TorchRecordWriter


def make_parts(path, parts, *, names=None, width=None, without=None, **flags):
    """An environment by lmdb itself: one list of records for each sub-database."""
    databases = {}
    for number, records in enumerate(parts):
        encoded = (record if isinstance(record, bytes) else encode(record) for record in records)
        digits = len(str(len(records))) if width is None else width
        name = names[number] if names else b"db%d" % number
        databases[name] = [
            (b"%0*d" % (digits, place), value) for place, value in enumerate(encoded) if (number, place) != without
        ]
    return make(path, databases, flags=flags)


def records(count, start=0):
    return [
        {"x": np.full((2, 3), n, np.float32), "y": np.array(n), "s": f"{n:04}"} for n in range(start, start + count)
    ]


def test_sub_databases_in_the_order_of_their_numbers(tmp_path):
    """db10 comes after db9, and every one has keys as wide as its own count is long."""
    counts = [3, 10, 0, 9, 100, 11, 1, 1, 1, 1, 2]
    parts = [records(count, start=1000 * number) for number, count in enumerate(counts)]
    expected = [record for part in parts for record in part]
    with TorchRecordSource(make_parts(tmp_path / "t", parts)) as source:
        assert len(source) == sum(counts)
        same(list(source), expected)
        indices = np.random.default_rng(0).integers(0, len(source), 300)
        wanted = [expected[index] for index in indices]
        same(source.read(indices), wanted)
        same(source.read_batch(indices), default_collate(wanted))


def test_records_of_different_fields(tmp_path):
    mixed = [{"a": 1}, {"a": 2, "b": b"x"}, {"b": b"y"}] * 4
    with TorchRecordSource(make_parts(tmp_path / "t", [mixed])) as source:
        assert [sorted(record) for record in source] == [sorted(record) for record in mixed]
        assert source.read_batch([0, 3])["a"].tolist() == [1, 1]
        with pytest.raises(ConfigError, match="samples in rows 0 and 1 have different fields"):
            source.read_batch(range(12))
        with pytest.raises(ConfigError, match="a record has no field 'a': "):
            source.read_batch(range(12), fields=["a"])


SHORT = "the first key of sub-database db0 is b'{}'; its {} records should have decimal keys, padded"


@pytest.mark.parametrize(
    ("parts", "made", "error", "message"),
    [
        ([[b"no database"]], {"names": [b"db00"]}, UnsupportedFormatError, "without a sub-database db0, .* format='lm"),
        ([records(3)] * 3, {"names": [b"db0", b"db1", b"db4"]}, CorruptFileError, "db2 is missing; the last one is db"),
        ([records(3)], {"dupsort": True}, CorruptFileError, "keys of the sub-database db0 may have several values"),
        ([records(12)], {"width": 1}, CorruptFileError, SHORT.format("0", 12)),
        ([records(101)], {"width": 2}, CorruptFileError, SHORT.format("00", 101)),
        ([], {}, CorruptFileError, SHORT.format("first", 1)),
    ],
)
def test_what_is_no_torchrecord(tmp_path, parts, made, error, message):
    path = make_parts(tmp_path / "t", parts or [[]], **made)
    if not parts:
        make(path, {b"db0": [(b"first", encode({"a": 1}))]})
    with pytest.raises(error, match=message) as caught:
        len(TorchRecordSource(path))
    assert caught.value.path in (str(path), str(path / "data.mdb"))


@pytest.mark.parametrize(
    ("parts", "without", "message"),
    [
        ([records(5), records(30)], (1, 7), "key '07' of sub-database db1 is missing, which has 29 records"),
        ([records(5), [*records(7), b"\x0f", *records(9)]], None, "key 07 of sub-database db1: invalid TensorProtos:"),
        ([[], [b"\x0f"] * 13], None, "key 12 of sub-database db1: invalid TensorProtos: wire type 7 at byte 0"),
    ],
)
def test_a_bad_record(tmp_path, parts, without, message):
    path = make_parts(tmp_path / "t", parts, without=without)
    with TorchRecordSource(path) as source:
        if parts[0]:
            assert source[11]["y"] == 6
        else:
            assert source.fields == {}  # the first is bad, too
        rows = [0, 11, 12, 13] if parts[0] else [12, 12]
        refuses(source, rows, rf"data\.mdb, record 12: {message}", index=12, path=str(path / "data.mdb"))


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
    with TorchRecordWriter(tmp_path / "o", num_records=3) as writer:
        writer.extend(map(record, range(3)))
        with pytest.raises(ConfigError, match="num_records is 3, but there are more records"):
            writer.write(record(3))
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
    monkeypatch.setattr("dataload.sources.lmdb.writer._MAX_VALUE_BYTES", 600)
    with TorchRecordWriter(tmp_path / "o", num_records=known) as writer:
        with pytest.raises(ConfigError):
            writer.extend([{"b": b"1"}, {"b": b"2"}, {"b": bytes(601)}])
        assert len(writer) == 2
        writer.extend([{"b": b"3"}])
    assert [record["b"] for record in TorchRecordSource(tmp_path / "o")] == [b"1", b"2", b"3"]
