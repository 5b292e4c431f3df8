import os
from types import SimpleNamespace

import lmdb
import numpy as np
import pytest
from lmdb_files import stored

from dataload.errors import ConfigError, MachineError
from dataload.sources.lmdb import write_environment as lmdb_environment
from dataload.sources.lmdb.reader import LMDBSource
from dataload.sources.lmdb.writer import LMDBWriter


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


@pytest.mark.parametrize(("call", "needed"), [("begin", "1,010"), ("sync", "0"), ("open", "0")])
def test_a_full_disk_is_said_with_the_space_that_is_needed(tmp_path, monkeypatch, call, needed):
    """LMDB calls it an input/output error, because less was written than it asked for."""

    def fail(*_, **__):
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    def full(*given, real=lmdb.open, **options):
        environment = real(*given, **options)
        methods = {name: getattr(environment, name) for name in ("open_db", "begin", "sync", "close")}
        return SimpleNamespace(**{**methods, call: fail})

    monkeypatch.setattr(lmdb, "open", fail if call == "open" else full)
    message = (
        r"cannot write .*: mdb_txn_commit: Input/output error; the records of the next transaction take "
        rf"{needed} bytes, and [\d,]+ bytes are free in /"
    )
    with pytest.raises(MachineError, match=message), LMDBWriter(tmp_path / "o") as writer:
        writer.write(bytes(1000))
    assert list(tmp_path.iterdir()) == []


def test_keys_of_ones_own(tmp_path):
    path = tmp_path / "o"
    with LMDBWriter(path, keys=lambda index, record: f"{record.decode()}-{index}" if index % 2 else record) as writer:
        writer.extend([b"c", b"b", b"a", b"d"])
    assert stored(path) == [(b"a", b"a"), (b"b-1", b"b"), (b"c", b"c"), (b"d-3", b"d")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"", "LMDB keys have 1 to 511 bytes, got 0: b''"),
        (b"k" * 512, "LMDB keys have 1 to 511 bytes, got 512: b'kkk"),
        (bytes(601), "an LMDB value has at most 600 bytes, got 601"),
        ("text", "format 'lmdb' stores bytes, got a record of type str: choose a codec"),
        ({"x": 1}, "got a record of type dict"),
    ],
)
def test_what_lmdb_does_not_hold(tmp_path, monkeypatch, record, message):
    monkeypatch.setattr(lmdb_environment, "_MAX_VALUE_BYTES", 600)
    keys = (lambda index, record: record) if isinstance(record, bytes) and len(record) < 600 else None
    with LMDBWriter(tmp_path / "o", keys=keys) as writer:
        writer.write(b"good")
        with pytest.raises(ConfigError, match=message):
            writer.write(record)
        with pytest.raises(ConfigError, match=message):
            writer.extend([b"and more", record])
        writer.write(b"k" * 511 if keys else bytes(600))
    kept = [b"good", b"and more", b"k" * 511 if keys else bytes(600)]
    assert sorted(value for _, value in stored(tmp_path / "o")) == sorted(kept)


def test_a_reader_keeps_the_environment_that_is_replaced(tmp_path):
    for value in (b"old", b"new"):
        with LMDBWriter(tmp_path / "o", overwrite=value == b"new") as writer:
            writer.write(value)
        if value == b"old":
            source = LMDBSource(tmp_path / "o")
            assert source[0] == b"old"
    assert (source[0], LMDBSource(tmp_path / "o")[0]) == (b"old", b"new")
    source.close()
    with pytest.raises(ConfigError, match="there is no codec 'jpeg'"):
        LMDBWriter(tmp_path / "p", codec="jpeg")


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_a_key_that_comes_twice(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(lmdb_environment, "_BATCH_RECORDS", batch)
    writer = LMDBWriter(tmp_path / "o", keys=lambda index, record: record)
    with pytest.raises(ConfigError, match="two records have the key b'b'"), writer:
        writer.extend([b"a", b"b", b"c", b"b", b"d"])
    assert os.listdir(tmp_path) == []
