"""JSON Lines: lines in any text, damage, limits, the table of offsets, and the writer."""

import gzip
import json
import os
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dataload
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.jsonl import reader
from dataload.sources.jsonl.lines import find_lines, pack, unpack
from dataload.sources.jsonl.reader import JsonlSource
from dataload.storage.table_cache import CachedTable


@given(text=st.text("a\r\n", max_size=30), size=st.integers(1, 7))
def test_lines_are_those_of_the_text_however_it_is_cut(text, size):
    data = text.encode()
    found = find_lines(data[start : start + size] for start in range(0, len(data), size))
    starts, lengths = found.spans(np.arange(len(found)))
    lines = [data[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
    filled = [line for line in data.split(b"\n") if line not in (b"", b"\r")]
    assert [line.split(b"\n")[0] for line in lines] == filled
    assert all(not line[len(first) :].strip() for line, first in zip(lines, filled, strict=True))


def test_lines_take_two_bytes_each():
    data = b"1\n\n22\n" * 100_000
    found = find_lines(data[start : start + 1000] for start in range(0, len(data), 1000))
    assert found.places.nbytes + found.firsts.nbytes < len(found) * 2 + 200
    starts, lengths = found.spans(np.array([199_999, 0, 1]))
    assert starts.tolist() == [600_000 - 3, 0, 3]
    assert lengths.tolist() == [3, 3, 3]


def write(path, data):
    path.write_bytes(data)
    return path


def compressed(name, data):
    return {
        "": lambda: data,
        ".gz": lambda: gzip.compress(data),
        ".zst": lambda: pa.compress(data, "zstd", asbytes=True),
    }[os.path.splitext(name)[1] if name.endswith((".gz", ".zst")) else ""]()


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("mapped", [True, False])
def test_records_are_what_json_says(tmp_path, name, mapped):
    text = b'{"a": 1, "t": "\xc3\xa9"}\r\n\n\r\n{"a": 2.5, "t": null, "l": [1, [2]]}\n{"a": true}'
    source = dataload.open(write(tmp_path / name, compressed(name, text)), map=mapped)
    assert list(source) == [{"a": 1, "t": "é"}, {"a": 2.5, "t": None, "l": [1, [2]]}, {"a": True}]
    assert source.read([2, 0, 2]) == [{"a": True}, {"a": 1, "t": "é"}, {"a": True}]
    assert [str(spec) for spec in source.fields.values()] == ["int64 ()", "str ()"]
    assert JsonlSource(tmp_path / name, fields=["a"]).read_batch([0])["a"].tolist() == [1]
    assert not source.reads_in_order
    with pytest.raises(ConfigError, match="a record has no field 't'"):
        JsonlSource(tmp_path / name, fields=["t"])[2]


def test_compressed_files_of_several_are_read_in_order(tmp_path):
    paths = [write(tmp_path / f"{i}.jsonl.gz", gzip.compress(b'{"a": 1}\n')) for i in range(2)]
    assert JsonlSource(paths).reads_in_order


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', r"byte 9, record 1: invalid JSON: Expecting ',' delimiter"),
        (b"\xff", "byte 9, record 1: invalid JSON: "),
        (b"[" * 3000, "byte 9, record 1: invalid JSON: |maximum recursion"),
        (b"[1]", r"byte 9, record 1: expected a JSON object, found b'\[1\]'"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_bad_line_names_its_record_and_offset(tmp_path, name, line, message):
    source = JsonlSource(write(tmp_path / name, compressed(name, b'{"a": 0}\n' + line + b'\n{"a": 2}\n')))
    assert source.read([0, 2]) == [{"a": 0}, {"a": 2}]
    for read in (source.read, source.read_batch):
        with pytest.raises(CorruptFileError, match=message) as caught:
            read([2, 1])
        assert (caught.value.path, caught.value.index) == (str(tmp_path / name), 1)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", r"byte 0: the file is empty: it was not written to its end \(one without records has an empt"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "byte 0: the file is empty"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n', mtime=0)[:-3], "the file cannot be decompressed: Compressed file"),
        ("a.jsonl.gz", b"{}", "the file cannot be decompressed: Not a gzipped file"),
        ("a.jsonl.zst", pa.compress(b'{"a": 1}\n' * 99, "zstd", asbytes=True)[:-3], "the file cannot be decompressed:"),
        ("a.jsonl.gz", gzip.compress(bytes(1 << 20), mtime=0), "the text of the file takes 1,048,576 bytes of memory,"),
        ("a.jsonl.zst", pa.compress(bytes(1 << 20), "zstd", asbytes=True), "the text of the file takes 1,048,576 byte"),
    ],
)
def test_a_bad_file(tmp_path, name, data, message):
    with pytest.raises(CorruptFileError, match=message):
        len(JsonlSource(write(tmp_path / name, data), max_record_bytes=1000))


def test_a_line_beyond_the_limit(tmp_path):
    source = JsonlSource(write(tmp_path / "a.jsonl", b'{}\n{"a": "' + b"x" * 100 + b'"}\n'), max_record_bytes=1000)
    assert source[0] == {}
    with pytest.raises(CorruptFileError, match="record 1: the record takes 3,520 bytes of memory, and max_record_byte"):
        source[1]


def test_a_compressed_file_that_changes(tmp_path):
    source = JsonlSource(write(tmp_path / "a.jsonl.gz", gzip.compress(b"{}\n")))
    assert source[0] == {}
    write(tmp_path / "a.jsonl.gz", gzip.compress(b"{}\n{}\n"))
    source._cache.clear()
    with pytest.raises(CorruptFileError, match="the file has been rewritten since it was opened"):
        source[0]


def test_offsets_of_a_large_file_are_found_once(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", b"\n" + b"".join(b'{"a": %d}\n' % i for i in range(60_000)))
    os.utime(path, (time.time() - 60,) * 2)
    assert JsonlSource(path)[59_999] == {"a": 59_999}
    monkeypatch.setattr(reader, "find_lines", lambda _: pytest.fail("read again"))
    assert JsonlSource(path)[59_999] == {"a": 59_999}
    with open(path, "ab") as stream:
        stream.write(b'{"a": -1}\n')
    monkeypatch.undo()
    assert JsonlSource(path)[-1] == {"a": -1}


def test_only_lines_of_the_file_are_taken_from_the_cache():
    data = b"1234\n" * 60_000
    lines = find_lines([data])
    packed = pack(lines)
    assert packed is not None
    found = unpack(packed, len(data))
    assert found is not None
    every = np.arange(60_000)
    assert all((ours == theirs).all() for ours, theirs in zip(found.spans(every), lines.spans(every), strict=True))
    assert unpack(packed, len(data) - 1) is None
    of_0_2 = CachedTable({"lengths": np.full(60_000, 4, np.uint32)}, {"first": 0})
    assert unpack(of_0_2, len(data)) is None
    places, firsts = packed.arrays["places"], packed.arrays["firsts"]
    for wrong in (
        {"places": places[::-1].copy(), "firsts": firsts},
        {"places": places, "firsts": firsts[::-1].copy()},
        {"places": places, "firsts": firsts[:-1]},
        {"places": places[:-1], "firsts": firsts},
        {"places": places.astype(np.int64), "firsts": firsts},
    ):
        assert unpack(CachedTable(wrong, packed.extras), len(data)) is None
    assert pack(find_lines([data[:50]])) is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_what_is_written_is_json(tmp_path, name):
    records = [{"n": np.array(i), "x": np.arange(i), "t": "é", "f": np.float32(0.5), "d": {"a": [i]}} for i in range(3)]
    with dataload.create(tmp_path / name) as writer:
        writer.extend(records)
    data = (tmp_path / name).read_bytes()
    text = {".jsonl": lambda: data, ".gz": lambda: gzip.decompress(data), ".zst": lambda: zst(data)}[
        os.path.splitext(name)[1]
    ]()
    want = [{"n": i, "x": list(range(i)), "t": "é", "f": 0.5, "d": {"a": [i]}} for i in range(3)]
    assert [json.loads(line) for line in text.splitlines()] == want
    assert list(dataload.open(tmp_path / name)) == want
    with dataload.create(tmp_path / f"none{name}"):
        pass
    assert len(dataload.open(tmp_path / f"none{name}")) == 0


def zst(data):
    return pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"b": b"x"}, "record 0 cannot be written as JSON: bytes has no form in JSON: decode or drop this field, or "),
        ({"t": np.array(0, "datetime64[s]")}, r"an array of datetime64\[s\] has no form in JSON"),
        (b"x", "format 'jsonl' stores fields, got a record of type bytes"),
    ],
)
def test_what_json_cannot_hold(tmp_path, record, message):
    with pytest.raises(ConfigError, match=message), dataload.create(tmp_path / "a.jsonl") as writer:
        writer.write(record)
    assert not [*tmp_path.iterdir()]
