import os
import struct
import sys
from types import SimpleNamespace

import lmdb
import numpy as np
import pytest
from lmdb_files import make, stored
from made_files import change

from dataload.errors import ConfigError, CorruptFileError, MachineError, MissingDependencyError, UnsupportedFormatError
from dataload.sources.lmdb import writer as lmdb_environment
from dataload.sources.lmdb.reader import LMDBSource
from dataload.sources.lmdb.writer import LMDBWriter


def model(items):
    """The order that is promised: by number where all keys are decimal, else by bytes."""
    if all(key.isdigit() and len(key) <= 18 for key, _ in items):
        return [value for _, value in sorted(items, key=lambda item: (int(item[0]), len(item[0])))]
    return [value for _, value in sorted(items)]


def numbers(count, width=0, start=0, step=1):
    return [(b"%0*d" % (width, n), b"value %d" % n) for n in range(start, start + count * step, step)]


DECIMAL = [
    *([], numbers(1), numbers(1, 8), numbers(20, 19), numbers(500, 9, step=3), numbers(500, step=3)),
    *(numbers(count) for count in (10, 11, 100, 1000, 1234)),
    *(numbers(1234, width) for width in (4, 8)),
    *(numbers(1000, width, start=1) for width in (0, 6)),
    numbers(10, 3)[:5] + numbers(10, 3)[6:],
    [*numbers(6, 2)[:2], *numbers(1, 3, start=7), *numbers(6, 2)[4:]],  # as many as the last says
    [*numbers(20, 2), *numbers(20, 3), *numbers(20, 7)],
    numbers(20, start=10**18 - 20),
]
NAMES = [
    *([(key % n, b"%d" % n) for n in range(700)] for key in (b"image-%09d", b"%015dx", b"k%d", b"%0511x")),
    [(b"%064x" % (n * 7919**9), b"%d" % n) for n in range(700)],
    [(b"k" * (n % 90 + 1) + b"%d" % n, b"%d" % n) for n in range(700)],
    [(b"k" + bytes(n), b"%d" % n) for n in range(9)],
    [(struct.pack(">H", n), b"%d" % n) for n in range(0, 3000, 2)],
]


@pytest.mark.parametrize("items", [*DECIMAL, *NAMES], ids=lambda items: f"{len(items)}-{items[:1]}"[:40])
def test_order_of_keys(tmp_path, items):
    expected = model(items)
    with LMDBSource(make(tmp_path / "e", {None: items})) as source:
        assert list(source) == expected
        indices = np.random.default_rng(0).integers(0, len(items), 500) if items else []
        assert source.read(indices) == [expected[index] for index in indices]
        assert all(source[index] == expected[index] for index in indices[:20])
        decimal = all(key.isdigit() and len(key) <= 18 for key, _ in items)
        assert source.key_order == ("number" if decimal else "bytes")


def test_keys_that_are_integers_of_the_machine(tmp_path):
    items = [(struct.pack("=Q", n), b"%d" % n) for n in range(0, 1000, 3)]
    path = make(tmp_path / "e", {b"numbers": items}, flags={"integerkey": True})
    assert list(LMDBSource(path, subdatabase="numbers")) == [value for _, value in items]


def test_numbers_with_other_keys_among_them(tmp_path):
    """First, last, count and most of the keys look like all numbers from 0."""
    items = [(key, value) for key, value in numbers(50, 3) if key not in (b"005", b"033")]
    items += [(b"005x", b"a"), (b"033x", b"b")]
    with LMDBSource(make(tmp_path / "e", {None: items})) as source:
        assert source.key_order == "bytes"
        assert list(source) == [value for _, value in sorted(items)]
        assert [source.locate(index).key for index in (4, 5, 33)] == ["004", "005x", "033x"]
        change(tmp_path / "e" / "data.mdb", 2 * 4096 + 16, b"\xff" * 200)  # a page, without LMDB
        assert source.locate(3).key is None


def duplicates(path):
    for page in (0, 4096):
        change(path / "data.mdb", page + 16 + 76, struct.pack("=H", 4))


def broken(path):
    for page in range(2, (path / "data.mdb").stat().st_size // 4096):
        change(path / "data.mdb", page * 4096 + 10, b"\xff" * 6)  # flags and bounds of each page


NO_INDEX = r"may have several values \(DUPSORT\), so values have no index"


@pytest.mark.parametrize(
    ("made", "damage", "options", "error", "message"),
    [
        (b"train", None, {}, ConfigError, "the sub-databases test, train: choose .* subdatabase='tes"),
        (b"db1", None, {"subdatabase": "tset"}, ConfigError, "has no sub-database 'tset': did you mean 'test'"),
        (b"db0", None, {}, ConfigError, "this is a TorchRecord, which format='torchrecord' reads as"),
        (b"several", None, {"subdatabase": "several"}, UnsupportedFormatError, NO_INDEX),
        (None, duplicates, {}, UnsupportedFormatError, "so values have no index"),
        (None, broken, {}, CorruptFileError, r"data\.mdb, byte \d+: page \d+ is not a page of a tree"),
    ],
)
def test_what_is_refused(tmp_path, made, damage, options, error, message):
    path = make(tmp_path / "e", {None: numbers(500)})
    if made is not None:
        path = make(tmp_path / "f", {b"test": numbers(3)})
        make(path, {made: numbers(5)}, flags={"dupsort": made == b"several"})
    if damage is not None:
        damage(path)
    with pytest.raises(error, match=message):
        LMDBSource(path, **options)[0]


def test_sub_databases(tmp_path):
    path = make(tmp_path / "e", {b"train": numbers(5), b"test": numbers(3)})
    with LMDBSource(path, subdatabase="train") as source, LMDBSource(path, subdatabase="test") as other:
        assert (len(source), len(other)) == (5, 3)
        assert source.fingerprint() != other.fingerprint()
        assert repr(source).endswith("e', subdatabase='train')")


def test_reading_needs_no_lmdb(tmp_path, monkeypatch):
    path = make(tmp_path / "e", {None: numbers(2)})
    monkeypatch.setitem(sys.modules, "lmdb", None)
    assert list(LMDBSource(path)) == [b"value 0", b"value 1"]
    with pytest.raises(MissingDependencyError, match=r"format 'lmdb' needs lmdb.*: pip install 'dataload\[lmdb\]'"):
        LMDBWriter(tmp_path / "f")


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
        writer.extend(values[:97])
        writer.extend(values[97:])
    assert [value for _, value in stored(path)] == values
    pages = sum(-(-(len(value) + 16) // 4096) for value in values)
    assert (path / "data.mdb").stat().st_size < 1.2 * 4096 * pages  # no larger than the data need
    with LMDBWriter(tmp_path / "p") as writer:
        for value in values:
            writer.write(value)
    assert (tmp_path / "p/data.mdb").read_bytes() == (path / "data.mdb").read_bytes(), "in the same transactions"


@pytest.mark.parametrize(("call", "needed"), [("begin", "1,010"), ("open", "0")])
def test_a_full_disk_is_said_with_the_space_that_is_needed(tmp_path, monkeypatch, call, needed):
    """LMDB calls it an input/output error, because less was written than it asked for."""

    def fail(*_, **__):
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    def full(*given, real=lmdb.open, **options):
        environment = real(*given, **options)
        methods = {name: getattr(environment, name) for name in ("open_db", "begin", "close")}
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


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_a_key_that_comes_twice(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(lmdb_environment, "_BATCH_RECORDS", batch)
    writer = LMDBWriter(tmp_path / "o", keys=lambda index, record: record)
    with pytest.raises(ConfigError, match="two records have the key b'b'"), writer:
        writer.extend([b"a", b"b", b"c", b"b", b"d"])
    assert os.listdir(tmp_path) == []
