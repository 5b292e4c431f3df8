import lmdb
import numpy as np
import pytest

from dataload.codecs.tensorprotos import encode
from dataload.collate import default_collate
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.lmdb.torchrecord import TorchRecordSource


def make(path, parts, *, names=None, width=None, **flags):
    """An environment written by lmdb itself: one list of records for each sub-database."""
    with lmdb.open(str(path), map_size=1 << 26, max_dbs=20, lock=False) as environment:
        for number, records in enumerate(parts):
            name = names[number] if names else b"db%d" % number
            handle = environment.open_db(name, **flags)
            digits = len(str(len(records))) if width is None else width
            with environment.begin(write=True, db=handle) as txn:
                for place, record in enumerate(records):
                    txn.put(b"%0*d" % (digits, place), record if isinstance(record, bytes) else encode(record))
    return path


def change(path, name, edit):
    with lmdb.open(str(path), max_dbs=2, lock=False) as environment:
        handle = environment.open_db(name)
        with environment.begin(write=True, db=handle) as txn:
            edit(txn)


def records(count, start=0):
    return [
        {"x": np.full((2, 3), n, np.float32), "y": np.array(n), "s": f"{n:04}"} for n in range(start, start + count)
    ]


def test_sub_databases_in_the_order_of_their_numbers(tmp_path):
    """db10 comes after db9, and every one has keys as wide as its own count is long."""
    counts = [3, 10, 0, 9, 100, 11, 1, 1, 1, 1, 2]
    parts = [records(count, start=1000 * number) for number, count in enumerate(counts)]
    expected = [record for part in parts for record in part]
    with TorchRecordSource(make(tmp_path / "t", parts)) as source:
        assert len(source) == sum(counts)
        assert [int(record["y"]) for record in source] == [int(record["y"]) for record in expected]
        rng = np.random.default_rng(0)
        indices = rng.integers(0, len(source), 300)
        batch = source.read_batch(indices)
        slow = default_collate([expected[index] for index in indices])
        assert batch["s"] == slow["s"]
        assert np.array_equal(batch["x"], slow["x"])
        assert [record["s"] for record in source.read(indices)] == slow["s"]
        assert [str(record["s"]) for record in (source[3], source[-1])] == ["1000", "10001"]


def test_fields(tmp_path):
    path = make(tmp_path / "t", [records(20)])
    with TorchRecordSource(path) as source:
        assert {name: str(spec) for name, spec in source.fields.items()} == {
            "x": "float32 (2, 3)",
            "y": "int64 ()",
            "s": "str ()",
        }
        assert list(source.read_batch(range(10), fields=["s", "x"])) == ["s", "x"]
        with pytest.raises(ConfigError, match="has no field 'z'"):
            source.read_batch(range(10), fields=["z"])
    with TorchRecordSource(path, fields=["y"]) as source:
        assert list(source.fields) == ["y"]
        assert source.read([1, 2, 3, 4, 5])[0] == source[1] == {"y": 1}
        assert repr(source).endswith("t', 1 fields)")
    with pytest.raises(ConfigError, match="has no field 'label': "):
        len(TorchRecordSource(path, fields=["label"]))


def test_records_of_different_fields(tmp_path):
    mixed = [{"a": 1}, {"a": 2, "b": b"x"}, {"b": b"y"}] * 4
    with TorchRecordSource(make(tmp_path / "t", [mixed])) as source:
        assert [sorted(record) for record in source] == [sorted(record) for record in mixed]
        assert source.read_batch([0, 3])["a"].tolist() == [1, 1]
        with pytest.raises(ConfigError, match="samples in rows 0 and 1 have different fields"):
            source.read_batch(range(12))
        with pytest.raises(ConfigError, match="a record has no field 'a': "):
            source.read_batch(range(12), fields=["a"])


def test_a_number_of_sub_databases_that_is_expected(tmp_path):
    path = make(tmp_path / "t", [records(2), records(2)])
    assert len(TorchRecordSource(path, db_num=2)) == 4
    with pytest.raises(ConfigError, match="has 2 sub-databases, but db_num is 3") as caught:
        len(TorchRecordSource(path, db_num=3))
    assert caught.value.key == "db_num"


def test_no_torchrecord(tmp_path):
    with lmdb.open(str(tmp_path / "plain"), lock=False) as environment, environment.begin(write=True) as txn:
        txn.put(b"db0", b"no database")
    for path in (tmp_path / "plain", make(tmp_path / "t", [records(2)], names=[b"db00"])):
        with pytest.raises(UnsupportedFormatError, match="without a sub-database db0, so it is not a TorchRecord; for"):
            len(TorchRecordSource(path))


def test_other_sub_databases_do_not_matter(tmp_path):
    path = make(tmp_path / "t", [records(3), [b"?"], [b"?"]], names=[b"db0", b"db", b"meta"])
    assert len(TorchRecordSource(path)) == 3


def test_a_missing_sub_database(tmp_path):
    path = make(tmp_path / "t", [records(3)] * 3, names=[b"db0", b"db1", b"db4"])
    with pytest.raises(CorruptFileError, match="the sub-database db2 is missing; the last one is db4") as caught:
        len(TorchRecordSource(path))
    assert caught.value.path == str(path / "data.mdb")


def test_several_values_of_a_key(tmp_path):
    path = make(tmp_path / "t", [records(3)], dupsort=True)
    with pytest.raises(CorruptFileError, match="keys of the sub-database db0 may have several values"):
        len(TorchRecordSource(path))


@pytest.mark.parametrize(("width", "count"), [(1, 12), (2, 101)])
def test_keys_that_are_too_short(tmp_path, width, count):
    path = make(tmp_path / "t", [records(count)], width=width)
    message = (
        f"the first key of sub-database db0 is b'{'0' * width}'; its {count} records should have decimal keys, padded"
    )
    with pytest.raises(CorruptFileError, match=message):
        len(TorchRecordSource(path))


def test_keys_that_are_no_numbers(tmp_path):
    path = tmp_path / "t"
    make(path, [[]])
    change(path, b"db0", lambda txn: txn.put(b"first", encode({"a": 1})))
    with pytest.raises(CorruptFileError, match="the first key of sub-database db0 is b'first'; its 1 records should"):
        len(TorchRecordSource(path))


def test_a_missing_record(tmp_path):
    path = make(tmp_path / "t", [records(5), records(30)])
    change(path, b"db1", lambda txn: txn.delete(b"07"))
    with TorchRecordSource(path) as source:
        assert len(source) == 34
        for read in (source.read, source.read_batch):
            message = r"data\.mdb, record 12: key '07' of sub-database db1 is missing, which has 29 records"
            with pytest.raises(CorruptFileError, match=message) as caught:
                read([0, 11, 12, 13])
            assert caught.value.index == 12


def test_a_corrupt_record(tmp_path):
    parts = [records(5), [*records(20), b"\x0f", *records(9)]]
    with TorchRecordSource(make(tmp_path / "t", parts)) as source:
        assert source[24]["y"] == 19
        for read in (source.read, source.read_batch):
            message = r"record 25: key 20 of sub-database db1: invalid TensorProtos: wire type 7 at byte 0"
            with pytest.raises(CorruptFileError, match=message) as caught:
                read(range(35))
            assert caught.value.index == 25
            assert caught.value.path == str(tmp_path / "t" / "data.mdb")


def test_a_first_record_that_is_corrupt_does_not_hide_the_others(tmp_path):
    with TorchRecordSource(make(tmp_path / "t", [[b"\x0f", *records(3)]])) as source:
        assert source.fields == {}
        assert source[1]["y"] == 0
