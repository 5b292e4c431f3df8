"""Records that are gathered span by span decode as those in one array."""

import numpy as np
import pytest

from dataload.codecs.layout import RecordTable
from dataload.codecs.tensorprotos import decode_batch, encode
from dataload.sources.gathered import GatheredTable
from dataload.storage import storage_of
from dataload.testing.compare import difference

LONG = np.arange(300.0)
RECORDS = {
    "short": [{"x": np.full(5, n, np.float32), "b": b"%04d" % n} for n in range(20)],
    "long": [{"x": LONG + n, "b": b"%04d" % n, "y": LONG * n} for n in range(20)],
    "two layouts": [{"x": LONG + n, "bb" if n % 2 else "b": b"7" * (8 - n % 2)} for n in range(20)],
    "two orders": [dict([("x", LONG + n), ("y", LONG)][:: 1 if n % 4 else -1]) for n in range(20)],
    "bytes": [{"b": bytes([n]) * 2000} for n in range(20)],
}


@pytest.mark.parametrize("name", RECORDS)
def test_columns(tmp_path, name):
    data = [encode(record) for record in RECORDS[name]]
    assert len({len(record) for record in data}) == 1
    path, length = tmp_path / "data", len(data[0])
    path.write_bytes(b"xyz" + b"".join(data))
    rows = np.random.default_rng(0).integers(0, 20, 60)
    file = storage_of(str(path)).map(str(path))
    gathered = GatheredTable(file, 3 + rows * length, length)
    table = RecordTable(np.frombuffer(b"".join(data[row] for row in rows), np.uint8).reshape(-1, length))
    assert [len(gathered), bytes(gathered[0]), [*map(bytes, gathered[5:9])]] == [
        60,
        data[rows[0]],
        [*map(bytes, table[5:9])],
    ]
    for fields in (None, ["x"], ["b"]):
        fresh = GatheredTable(file, 3 + rows * length, length)
        expected = decode_batch([*map(bytes, table)], fields)
        for records in (gathered, fresh, table):
            found = decode_batch(records, fields)
            assert (found is None) == (expected is None)
            assert found is None or not difference(found, expected, "the batch")
    assert [*map(bytes, gathered)] == [data[row] for row in rows]
