"""Decoded parts of files: which stay, and who decodes them; and records that are gathered span by span."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from made_files import same

import dataload
from dataload._util.caches import DecodedCache
from dataload.codecs.layout import RecordTable
from dataload.codecs.tensorprotos import decode_batch, encode
from dataload.sources.encoded import GatheredTable, LastLayout, gather_records
from dataload.storage import storage_of
from dataload.storage.core import can_map
from dataload.types import BytesColumn


def test_the_parts_used_last_stay_within_the_limit():
    cache, decoded = DecodedCache(10), []

    def get(key, size=5):
        return cache.get(key, lambda: decoded.append(key) or (key.upper(), size))

    assert [get(key) for key in "abacab"] == list("ABACAB")
    assert decoded == list("abcb")  # c takes the place of b, b that of c
    assert get("x", 99) == get("x", 99) == "X"  # one part stays, whatever its size
    assert decoded == list("abcbx")
    assert get("a") == "A"
    cache.clear()
    assert get("a") == "A"
    assert decoded == list("abcbxaa")
    assert len(data := pickle.dumps(cache)) < 200
    assert pickle.loads(data).get("a", lambda: ("B", 1)) == "B"  # has no parts


def test_a_stop_iteration_of_the_user_drops_no_record(tmp_path):
    def first(items):
        return next(iter(items))

    codec = SimpleNamespace(decode=first, encode=first)
    with dataload.create(tmp_path / "a.lmdb", codec=codec) as writer, pytest.raises(RuntimeError, match="the codec"):
        writer.extend([[b"a"], [b"b"], [], [b"d"]])
    with dataload.create(tmp_path / "a.tar") as writer:
        writer.extend([{"x.bin": b"a"}, {"x.bin": b""}, {"x.bin": b"c"}])
    with pytest.raises(RuntimeError, match="the decoder raised StopIteration"):
        dataload.open(tmp_path / "a.tar", decode={"bin": first}).read_batch([0, 1, 2])


LONG = np.arange(300.0)
RECORDS = {
    "short": lambda n: {"x": np.full(5, n, np.float32), "b": b"%04d" % n},
    "long": lambda n: {"x": LONG + n, "b": b"%04d" % n, "y": LONG * n},
    "two layouts": lambda n: {"x": LONG + n, "bb" if n % 2 else "b": b"7" * (8 - n % 2)},
    "two orders": lambda n: dict([("x", LONG + n), ("y", LONG)][:: 1 if n % 4 else -1]),
    "bytes": lambda n: {"b": bytes([n]) * 2000},
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_that_are_gathered_decode_as_those_in_one_array(tmp_path, name):
    data = [encode(RECORDS[name](n)) for n in range(20)]
    [length] = {len(record) for record in data}
    path = tmp_path / "data"
    path.write_bytes(b"xyz" + b"".join(data))
    rows = np.random.default_rng(0).integers(0, 20, 60)
    chosen = [data[row] for row in rows]
    file = storage_of(str(path)).map(str(path))
    gathered = GatheredTable(file, 3 + rows * length, length, LastLayout(1))
    table = RecordTable(np.frombuffer(b"".join(chosen), np.uint8).reshape(-1, length))
    assert (len(gathered), bytes(gathered[0]), [*map(bytes, gathered[5:9])]) == (60, chosen[0], chosen[5:9])
    assert [*map(bytes, table[5:9])] == chosen[5:9]
    for fields in (None, ["x"], ["b"]):
        for records in (gathered, GatheredTable(file, 3 + rows * length, length, LastLayout(1)), table):
            same(decode_batch(records, fields), decode_batch(chosen, fields), "batch")
    assert [*map(bytes, gathered)] == chosen


@pytest.mark.parametrize(
    ("lengths", "mapped", "kind"),
    [
        ([2, 2], True, GatheredTable if can_map() else RecordTable),
        ([2, 2], False, RecordTable),
        ([2, 3], True, BytesColumn),
        ([0, 0], True, BytesColumn),
    ],
)
def test_only_records_of_one_length_are_gathered_as_a_table(tmp_path, lengths, mapped, kind):
    (tmp_path / "data").write_bytes(b"abcdef")
    file = storage_of("").map(str(tmp_path / "data"), mapped=mapped)
    found = gather_records(file, np.array([1, 3]), np.array(lengths), LastLayout(1))
    assert type(found) is kind
    assert [*map(bytes, found)] == [b"bc"[: lengths[0]], b"def"[: lengths[1]]]
