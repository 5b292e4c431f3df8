import os

import lmdb
import numpy as np
import pytest

from dataload.codecs.tensorprotos import decode
from dataload.errors import ConfigError, MachineError, SourceError
from dataload.sources.lmdb import write_environment as lmdb_environment
from dataload.sources.lmdb.reader import LMDBSource
from dataload.sources.lmdb.writer import LMDBWriter


def stored(path):
    """What lmdb itself reads, with its locks and default settings."""
    with lmdb.open(str(path), readonly=True, lock=False) as environment, environment.begin() as txn:
        return list(txn.cursor())


def test_what_lmdb_reads(tmp_path):
    path = tmp_path / "out.lmdb"
    with LMDBWriter(path) as writer:
        for n in range(25):
            writer.write(b"value" * n)
        assert len(writer) == 25
        assert not path.exists()
    assert stored(path) == [(b"%010d" % n, b"value" * n) for n in range(25)]
    assert os.listdir(path) == ["data.mdb"]
    assert os.listdir(tmp_path) == ["out.lmdb"]


def test_bytes_of_any_kind(tmp_path):
    with LMDBWriter(tmp_path / "o") as writer:
        writer.extend([bytearray(b"a"), memoryview(b"b"), b""])
    assert [value for _, value in stored(tmp_path / "o")] == [b"a", b"b", b""]


def test_the_map_grows(tmp_path, monkeypatch):
    """From one that holds nothing, over many transactions, and within one."""
    monkeypatch.setattr(lmdb_environment, "_FIRST_MAP_BYTES", 1 << 15)
    monkeypatch.setattr(lmdb_environment, "_BATCH_BYTES", 1 << 17)
    rng = np.random.default_rng(0)
    values = [rng.bytes(int(n)) for n in rng.integers(0, 9000, 400)] + [bytes(3_000_000)]
    path = tmp_path / "o"
    with LMDBWriter(path) as writer:
        writer.extend(values)
    assert [value for _, value in stored(path)] == values
    pages = sum(-(-(len(value) + 16) // 4096) for value in values)
    assert (path / "data.mdb").stat().st_size < 1.2 * 4096 * pages  # no larger than the data need


@pytest.mark.parametrize("call", ["begin", "sync", "open"])
def test_a_full_disk_is_said_with_the_space_that_is_needed(tmp_path, monkeypatch, call):
    """LMDB calls it an input/output error, because less was written than it asked for."""
    message = (
        r"cannot write .*: mdb_txn_commit: Input/output error; the records of the next transaction take "
        rf"{'0' if call == 'open' else '1,010'} bytes, and [\d,]+ bytes are free in /"
    )

    def fail(*_, **__):
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    def write():
        with LMDBWriter(tmp_path / "o") as writer:
            environment = writer._environment
            if call == "sync":
                monkeypatch.setattr(type(environment), "flush", lambda self: None)
            if call != "open":
                failing = type("Failing", (), {call: fail, "close": lambda self: None})
                monkeypatch.setattr(environment, "_environment", failing())
            writer.write(bytes(1000))

    if call == "open":
        monkeypatch.setattr(lmdb, "open", fail)
    with pytest.raises(MachineError, match=message):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_codec(tmp_path):
    records = [{"x": np.full(3, n), "n": n} for n in range(5)]
    with LMDBWriter(tmp_path / "o", codec="tensorprotos") as writer:
        writer.extend(records)
    assert [int(decode(value)["n"]) for _, value in stored(tmp_path / "o")] == [0, 1, 2, 3, 4]
    with LMDBSource(tmp_path / "o", codec="tensorprotos") as source:
        assert source.read_batch(range(5))["n"].tolist() == [0, 1, 2, 3, 4]


def test_keys_of_ones_own(tmp_path):
    path = tmp_path / "o"
    with LMDBWriter(path, keys=lambda index, record: f"{record.decode()}-{index}" if index % 2 else record) as writer:
        writer.extend([b"c", b"b", b"a", b"d"])
    assert stored(path) == [(b"a", b"a"), (b"b-1", b"b"), (b"c", b"c"), (b"d-3", b"d")]


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_a_key_that_comes_twice(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(lmdb_environment, "_BATCH_RECORDS", batch)
    writer = LMDBWriter(tmp_path / "o", keys=lambda index, record: record)
    with pytest.raises(ConfigError, match="two records have the key b'b'"), writer:
        writer.extend([b"a", b"b", b"c", b"b", b"d"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("key", "message"),
    [(b"", "LMDB keys have 1 to 511 bytes, got 0: b''"), (b"k" * 512, "LMDB keys have 1 to 511 bytes, got 512: b'kkk")],
)
def test_keys_that_lmdb_does_not_hold(tmp_path, key, message):
    with LMDBWriter(tmp_path / "o", keys=lambda index, record: record) as writer:
        writer.write(b"good")
        with pytest.raises(ConfigError, match=message):
            writer.write(key)
        writer.write(b"k" * 511)
    assert [key for key, _ in stored(tmp_path / "o")] == [b"good", b"k" * 511]


def test_values_that_lmdb_does_not_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_environment, "_MAX_VALUE_BYTES", 10)
    with LMDBWriter(tmp_path / "o") as writer:
        with pytest.raises(ConfigError, match="an LMDB value has at most 10 bytes, got 11"):
            writer.write(bytes(11))
        writer.write(bytes(10))
    assert stored(tmp_path / "o") == [(b"0000000000", bytes(10))]


def test_records_that_are_no_bytes(tmp_path):
    writer = LMDBWriter(tmp_path / "o")
    with pytest.raises(ConfigError, match="format 'lmdb' stores bytes, got a record of type str: choose a codec"):
        writer.write("text")
    writer.write(b"data")
    with pytest.raises(ConfigError, match="got a record of type dict"):
        writer.write({"x": 1})
    writer.abort()
    with pytest.raises(ConfigError, match="there is no codec 'jpeg'"):
        LMDBWriter(tmp_path / "o", codec="jpeg")


def test_what_is_there_is_kept_or_replaced(tmp_path):
    path = tmp_path / "o"
    with LMDBWriter(path) as writer:
        writer.write(b"old")
    with pytest.raises(ConfigError, match="exists: choose another name, or pass overwrite=True"):
        LMDBWriter(path)
    with pytest.raises(ZeroDivisionError), LMDBWriter(path, overwrite=True) as writer:
        writer.write(1 // 0)
    assert stored(path) == [(b"0000000000", b"old")]
    with LMDBSource(path) as source:
        assert source[0] == b"old"
        with LMDBWriter(path, overwrite=True) as writer:
            writer.write(b"new")
        with LMDBSource(path) as other:
            assert (source[0], other[0]) == (b"old", b"new")
    assert os.listdir(tmp_path) == ["o"]


def test_errors_of_the_disk(tmp_path, monkeypatch):
    writer = LMDBWriter(tmp_path / "o")
    writer.write(b"a")
    environment = writer._environment

    def fail(*_, **__):
        raise lmdb.DiskError("no space left")

    monkeypatch.setattr(environment, "_write", fail)
    with pytest.raises(SourceError, match=r"cannot write .*\.o\..*: .*no space left"):
        writer.close()
    assert os.listdir(tmp_path) == []


def test_errors_of_the_disk_at_the_end(tmp_path, monkeypatch):
    writer = LMDBWriter(tmp_path / "o")
    real = writer._environment._environment

    class Failing:
        def __getattr__(self, name):
            return getattr(real, name)

        def sync(self, force):
            raise lmdb.DiskError("input/output error")

    monkeypatch.setattr(writer._environment, "_environment", Failing())
    with pytest.raises(SourceError, match=r"cannot write .*: .*input/output error"):
        writer.close()
    assert os.listdir(tmp_path) == []
