import os
import re

import bson
import numpy as np
import pytest
from made_files import same

from dataload.errors import ConfigError
from dataload.sources.syrah import writer as syrah
from dataload.sources.syrah.layout import DTYPES
from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.syrah.writer import SyrahWriter
from dataload.storage.local import parts


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.syr"


def write(path, records, **options):
    with SyrahWriter(path, **options) as writer:
        writer.extend(records)
    return path.read_bytes()


def parts_of(data):
    offset, length = (int.from_bytes(data[i : i + 8], "little") for i in (6, 14))
    return data[22:offset], bson.decode(data[offset : offset + length]), offset + length


def int64s(data):
    return np.frombuffer(data, "<i8").tolist()


def test_layout_byte_by_byte(path):
    data = write(path, [{"x": np.array([1, 2], np.int16), "t": "é"}, {"t": "", "x": np.array([3], np.int16)}])
    arrays, metadata, end = parts_of(data)
    assert (data[:6], arrays, end) == (b"GS\0\0\2\0", b"\1\0\2\0\xc3\xa9\3\0", len(data))
    assert list(metadata) == ["x", "t"]
    assert {k: (int64s(e["offset"]), int64s(e["size"]), e["dtype"]) for k, e in metadata.items()} == {
        "x": ([22, 28], [4, 2], "int16"), "t": ([26, 30], [2, 0], "str"),
    }  # fmt: skip
    assert set(metadata["x"]) == {"offset", "size", "dtype"}  # one dimension is what the original reads anyway
    records = [{"a": np.zeros((2, 3)), "s": np.zeros(()), "v": np.zeros((i, 2))} for i in range(3)]
    _, metadata, _ = parts_of(write(path, records, overwrite=True))  # entries that the original does not look at
    assert {k: (int64s(e["shape"]["ndim"]), int64s(e["shape"]["dims"])) for k, e in metadata.items()} == {
        "a": ([2], [2, 3]), "s": ([0], []), "v": ([2, 2, 2], [0, 2, 1, 2, 2, 2]),
    }  # fmt: skip
    _, metadata, _ = parts_of(write(path, [{"b": b"abc", "u": np.zeros(3, np.uint8)}], overwrite=True))
    assert (metadata["b"]["kind"], metadata["b"]["dtype"], metadata["u"]["dtype"]) == ("bytes", "uint8", "uint8")
    assert "kind" not in metadata["u"]
    names = ["a.b", "", " ", "é", "$x", "a/b", "0", "x" * 200]  # all that the original allows
    write(path, [dict.fromkeys(names, np.zeros(1))], overwrite=True)
    assert list(SyrahSource(path)[0]) == names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["<", ">"])
def test_every_dtype_in_either_byte_order(path, dtype, order):
    values = np.array([0, 1, 2, 100]).astype(np.dtype(dtype).newbyteorder(order)).reshape(2, 2)
    write(path, [{"x": values}, {"x": values.T}])
    expected = values.astype(dtype)
    same(SyrahSource(path).read([0, 1]), [{"x": expected}, {"x": expected.T.copy()}])


def test_values_that_are_no_arrays(path):
    values = {
        "i": 3,
        "f": 2.5,
        "b": True,
        "l": [1, 2],
        "n": np.float32(1),
        "m": memoryview(b"ab"),
        "y": bytearray(b"c"),
    }
    write(path, [values])
    expected = {name: np.array(value) for name, value in values.items()} | {"m": b"ab", "y": b"c"}
    same(SyrahSource(path)[0], expected)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"x": np.zeros(2)}, "record 1 has the fields 'x'; the first one has 'x', 't'"),
        ({"x": np.zeros(2), "t": "a", "more": 1}, "record 1 has the fields 'x', 't', 'more'; the first one has"),
        ({"x": np.zeros(2, np.int8), "t": "a"}, "field 'x' of record 1 is int8; in the first record it was float64"),
        ({"x": np.zeros(2), "t": b"a"}, r"field 't' of record 1 is bytes \(uint8\); in the first record it was str"),
        ({"x": np.zeros(2), "t": np.array(["a"])}, "field 't': an array of text, whose elements the format would join"),
        ({"x": np.zeros(2, complex), "t": "a"}, "field 'x' has dtype complex128; supported are bool, int8, .*, text a"),
        ({"x": None, "t": "a"}, "field 'x' has dtype object"),
        ({"x": 2**70, "t": "a"}, "field 'x' has dtype object"),
        ({"x": np.zeros(2), "t": "\ud800"}, "field 't': text cannot be encoded as UTF-8: surrogates not allowed"),
        (b"abc", "format 'syrah' stores fields, got a record of type bytes"),
        ({"x": np.zeros(2), 3: "a"}, "field names must be text, got 3"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_and_leaves_no_trace(path, record, message):
    good = {"x": np.arange(2.0), "t": "a"}
    with SyrahWriter(path) as writer:
        writer.write(good)
        with pytest.raises(ConfigError, match=message):
            writer.write(record)
        writer.write(good)
    same(list(SyrahSource(path)), [good, good])
    arrays, _, _ = parts_of(path.read_bytes())
    assert len(arrays) == 2 * (16 + 1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "format 'syrah' does not store records without fields"),
        ({"a\0b": 1}, r"format 'syrah' does not allow zero bytes in field names: 'a\\x00b'"),
        ({"\ud800": 1}, "text cannot be encoded as UTF-8"),
    ],
)
def test_a_first_record_that_does_not_fit(path, record, message):
    with SyrahWriter(path) as writer:
        with pytest.raises(ConfigError, match=message):
            writer.write(record)
        writer.write({"x": 1})
    assert len(SyrahSource(path)) == 1


def test_metadata_end_at_two_gibibytes(path, monkeypatch):
    monkeypatch.setattr(syrah, "BSON_LIMIT", 4096 + 16 * 2 * 3)
    with SyrahWriter(path) as writer:
        writer.extend([{"x": 1, "y": 2}] * 3)
        with pytest.raises(ConfigError, match=r"a Syrah file can have 3 records of 2 fields .*: write several shards"):
            writer.write({"x": 1, "y": 2})
    assert len(SyrahSource(path)) == 3


def test_the_file_is_flushed_before_it_is_renamed(path, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    for name in ("_rename_new", "_replace"):
        rename = getattr(parts, name)
        monkeypatch.setattr(parts, name, lambda a, b, rename=rename: (done.append(f"to {b}"), rename(a, b)))
    for overwrite in (False, True):
        done.clear()
        write(path, [{"x": 1}], overwrite=overwrite)
        temporary, *rest = done
        assert re.fullmatch(rf"{path.parent}/\..*\.tmp/{path.name}", temporary)
        assert rest == [f"to {path}", str(path.parent)]  # the directory, where the new name stands
