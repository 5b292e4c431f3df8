"""JSON Lines: lines in any text, damage, limits, the table of offsets, and the writer."""

import gzip
import itertools
import json
import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

import dataload
from dataload.errors import ChangedFileError, ConfigError, CorruptFileError
from dataload.sources.jsonl.records import JsonlSource, find_lines, unpack
from dataload.storage.kept import INVALID, CachedTable


@given(text=st.text("a\r\n", max_size=30), size=st.integers(1, 7))
def test_lines_are_those_of_the_text_however_it_is_cut(text, size):
    data = text.encode()
    edges = find_lines((data[start : start + size] for start in range(0, len(data), size)), len(data))
    lines = [data[start:stop] for start, stop in itertools.pairwise(edges.tolist())]
    filled = [line for line in data.split(b"\n") if line not in (b"", b"\r")]
    assert [line.split(b"\n")[0] for line in lines] == filled
    assert all(not line[len(first) :].strip() for line, first in zip(lines, filled, strict=True))


def write(path, data):
    path.write_bytes(data)
    return path


def zst(data):
    return pa.compress(data, "zstd", asbytes=True)


def gz(data):
    return gzip.compress(data, mtime=0)


PACK = {".jsonl": bytes, ".gz": gz, ".zst": zst}


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("mapped", [True, False])
def test_records_are_what_json_says(tmp_path, name, mapped):
    text = b'{"a": 1, "t": "\xc3\xa9"}\r\n\n\r\n{"a": 2.5, "t": null, "l": [1, [2]]}\n{"a": true}'
    path = write(tmp_path / name, PACK[(tmp_path / name).suffix](text))
    source = dataload.open(path, map=mapped)
    assert list(source) == [{"a": 1, "t": "é"}, {"a": 2.5, "t": None, "l": [1, [2]]}, {"a": True}]
    assert source.read([2, 0, 2]) == [{"a": True}, {"a": 1, "t": "é"}, {"a": True}]
    assert [str(spec) for spec in source.fields.values()] == ["int64 ()", "str ()"]
    assert JsonlSource(path, fields=["a"]).read_batch([0])["a"].tolist() == [1]
    assert (source.reads_in_order, JsonlSource([path] * 2).reads_in_order) == (False, path.suffix != ".jsonl")
    with pytest.raises(ConfigError, match="a record has no field 't'"):
        JsonlSource(path, fields=["t"])[2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', r"byte 9, record 1: invalid JSON: Expecting ',' delimiter"),
        (b"\xff", "byte 9, record 1: invalid JSON: "),
        (b"{", "invalid JSON: .*: a record is one line: write each by json.dumps, or load the whole by json.load"),
        (b"[" * 3000, "byte 9, record 1: invalid JSON: |maximum recursion"),
        (b"[1]", r"byte 9, record 1: expected a JSON object, found b'\[1\]'"),
        (b'{"a": "' + b"x" * 1000 + b'"}', "record 1: the record takes 32,320 bytes of memory, and max_record_bytes"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_bad_line_names_its_record_and_offset(tmp_path, name, line, message):
    path = write(tmp_path / name, PACK[(tmp_path / name).suffix](b'{"a": 0}\n' + line + b'\n{"a": 2}\n'))
    source = JsonlSource(path, max_record_bytes=20_000 if b"xx" in line else 1 << 30)
    assert source.read([0, 2]) == [{"a": 0}, {"a": 2}]
    refuses(source, [2, 1], message, path=str(path), index=1)


NO_TEXT = "the file cannot be decompressed: "
LARGE = "the text of the file takes 1,048,576 bytes of memory, and max_"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", r"byte 0: the file is empty: its writer did not finish \(a file without records has an emp"),
        ("a.jsonl.gz", gz(b""), "byte 0: the file is empty"),
        ("a.jsonl.gz", gz(b'{"a": 1}\n')[:-3], f"{NO_TEXT}Compressed file ended"),
        ("a.jsonl.gz", b"{}", f"{NO_TEXT}Not a gzipped file"),
        ("a.jsonl.zst", zst(b'{"a": 1}\n' * 99)[:-3], NO_TEXT),
        ("a.jsonl.gz", gz(bytes(1 << 20)), LARGE),
        ("a.jsonl.zst", zst(bytes(1 << 20)), LARGE),
    ],
)
def test_a_bad_file(tmp_path, name, data, message):
    with pytest.raises(CorruptFileError, match=message):
        len(JsonlSource(write(tmp_path / name, data), max_record_bytes=1000))


def test_a_compressed_file_that_changes(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl.gz", gz(b"{}\n")) for name in "ab"]
    source = JsonlSource(paths, cached_bytes=0)
    assert source[0] == {}
    write(paths[0], gz(b"{}\n{}\n"))
    assert source[1] == {}  # one text is kept
    with pytest.raises(ChangedFileError):
        source[0]


def test_numbers_of_several_files_make_one_column(tmp_path):
    paths = [write(tmp_path / f"{x}.jsonl.gz", gz(b'{"x": %s}\n' % x.encode())) for x in ("1", "0.5", "null")]
    for source in (dataload.open(paths), dataload.concat([*map(dataload.open, paths)])):
        assert source.read_batch([1, 0, 1])["x"].tolist() == [0.5, 1.0, 0.5]
        assert source.read_batch([1, 0], ["x"])["x"].tolist() == [0.5, 1.0]
    plain = [write(tmp_path / name, text) for name, text in (("a.jsonl", b'{"x": null}\n'), ("b.jsonl", b'{"x": 1}\n'))]
    for source, null in ((dataload.open(paths), "null.jsonl.gz"), (dataload.open(plain), "a.jsonl")):
        with pytest.raises(
            CorruptFileError, match=rf"{null}, record 0: field 'x' is null, and other records have numb"
        ):
            source.read_batch([*range(len(source))])
    write(tmp_path / "c.jsonl", b'{"x": "a"}\n{"x": null}\n')
    write(tmp_path / "d.jsonl", b'{"x": 1}\n{"x": null}\n')
    parts = [dataload.open(tmp_path / f"{name}.jsonl", nulls="mask") for name in "cd"]
    assert [record["x"] for record in dataload.concat(parts).read([1, 3])] == ["", 0]


def test_only_lines_of_the_file_are_taken_from_the_cache(tmp_path):
    data = b"1234\n" * 60_000
    edges = find_lines([data], len(data))
    assert (edges.dtype, edges.tolist()) == (np.uint32, [*range(0, len(data) + 1, 5)])
    packed = CachedTable({"edges": edges}, {})
    assert unpack(packed, len(data)) is edges
    with pytest.raises(INVALID):
        unpack(packed, len(data) - 1)
    of_0_2 = CachedTable({"lengths": np.full(60_000, 4, np.uint32)}, {"first": 0})
    with pytest.raises(INVALID):
        unpack(of_0_2, len(data))
    below = edges.astype(np.int64)
    below[0] = -1
    for wrong in (edges[::-1].copy(), edges[:-1], edges.repeat(2), edges[:0], edges.astype(np.uint16), below):
        with pytest.raises(INVALID):
            unpack(CachedTable({"edges": wrong}, {}), len(data))
    few = write(tmp_path / "few.jsonl", b"{}\n" * 49_999)
    os.utime(few, (1, 1))
    assert len(JsonlSource(few)) == 49_999
    few.unlink()
    path = write(tmp_path / "a.jsonl", b"{}\n" * 50_000)
    os.utime(path, (1, 1))  # younger files have no table in the cache
    for cache in (False, True):
        assert len(JsonlSource(path, cache=cache)) == 50_000
        assert len(os.listdir(tmp_path)) == 1 + cache


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_what_is_written_is_json(tmp_path, name):
    records = [{"n": np.array(i), "x": np.arange(i), "t": "é", "f": np.float32(0.5), "d": {"a": [i]}} for i in range(3)]
    with dataload.create(tmp_path / name) as writer:
        writer.extend(records)
    want = [{"n": i, "x": list(range(i)), "t": "é", "f": 0.5, "d": {"a": [i]}} for i in range(3)]
    with pa.input_stream(str(tmp_path / name), compression="detect") as stream:
        lines = stream.read().splitlines()
    assert [*map(json.loads, lines)] == want
    assert all("é".encode() in line for line in lines), "escaped, it takes more bytes"
    assert list(dataload.open(tmp_path / name)) == want
    if name.endswith(".gz"):
        assert (tmp_path / name).read_bytes()[3:8] == bytes(5), "no name and no time"
    dataload.create(tmp_path / f"none{name}").close()
    assert len(dataload.open(tmp_path / f"none{name}")) == 0


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"b": b"x"}, "record 0 cannot be written as JSON: bytes has no form in JSON: decode or drop this field, or "),
        ({"x": np.zeros(2, np.longdouble)}, r"record 0 cannot be written as JSON: an array of \w+ has no form in JSON"),
        ({"t": np.array(0, "datetime64[s]")}, r"an array of datetime64\[s\] has no form in JSON"),
        (b"x", "format 'jsonl' stores fields, got a record of type bytes"),
    ],
)
def test_what_json_cannot_hold(tmp_path, record, message):
    with pytest.raises(ConfigError, match=message), dataload.create(tmp_path / "a.jsonl") as writer:
        writer.write(record)
    assert not [*tmp_path.iterdir()]


HOLES = [
    {"n": 1, "f": 0.5, "t": "a", "l": [1], "d": {"x": 1, "y": None}},
    {"n": None, "f": None, "t": None, "l": None, "d": None, "later": 3},
    {"n": 3, "t": "c", "l": []},
]


def test_nulls_are_errors_of_batches_unless_something_stands_for_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in HOLES))
    source = dataload.open(path)
    assert source.read([1])[0]["n"] is None
    for name in ("n", "f", "t"):
        with pytest.raises(CorruptFileError, match=f"record 1: field '{name}' is null, and other records have numbers"):
            source.read_batch([0, 1], [name])
        with pytest.raises(CorruptFileError, match=f"record 1: field '{name}' is null"):
            source.read_batch([1], [name])  # also where no other record of the batch has a value
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, HOLES[1::-1])))
    with pytest.raises(CorruptFileError, match="record 0: field 'n' is null"):
        dataload.open([tmp_path / "c.jsonl"] * 2).read_batch([0, 2], ["n"])
    assert source.read_batch([0, 2], ["n", "t"])["t"] == ["a", "c"]
    source = dataload.open(path, nulls="mask")
    masks = ["n_is_null", "t_is_null", "l_is_null", "d_is_null", "later_is_null"]
    assert [name for name in source.fields if name.endswith("_is_null")] == masks
    batch = source.read_batch([0, 1, 2], ["n", *masks, "f", "t", "later"])
    assert {name: batch[name].tolist() for name in ("n", *masks, "later")} == {
        "n": [1, 0, 3],
        "n_is_null": [False, True, False],
        "t_is_null": [False, True, False],
        "l_is_null": [False, True, False],
        "d_is_null": [False, True, True],
        "later": [0, 3, 0],
        "later_is_null": [True, False, True],
    }
    assert np.isnan(batch["f"]).tolist() == [False, True, True]
    assert batch["t"] == ["a", "", "c"]
    for name, chosen in (("n", [1]), ("d", [1, 2])):
        for condition in (dataload.field(f"{name}_is_null"), dataload.field(name).is_null()):
            assert source.filter(condition).indices.tolist() == chosen
    empty = source[1]
    assert (empty["l"], empty["d"]) == ([], {"x": 0, "y": None})
    empty["l"].append(1)
    assert source[1]["l"] == []
    first, *lines = path.read_text().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_text("".join([first, *lines, "{\n"]))
    damaged = dataload.open(tmp_path / "b.jsonl", nulls="mask")  # what stands for nulls is found in the other lines
    assert [repr(damaged[index]) for index in range(3)] == [*map(repr, source)]
    (tmp_path / "d.jsonl").write_text(
        '{"n": null, "f": null, "l": [], "d": null}\n'
    )  # of a type that another file tells
    several = dataload.open([tmp_path / "d.jsonl", path], nulls="mask")
    assert several.read_batch([0, 1, 3], ["n", "n_is_null", "later"])["n"].tolist() == [0, 1, 3]
    assert (several[0]["t"], several[0]["d"]) == ("", {"x": 0, "y": None})
    with dataload.Loader(several, batch_size=2, fields=["n"], num_workers=2, executor="processes") as loader:
        assert [batch["n"].tolist() for batch in loader] == [[0, 1], [0, 3]]
    source = dataload.open([path, path], nulls={"n": "mask", "t": "?", "f": 0}, fields=["t", "n", "f"])
    assert [*source.read_batch([1, 3])] == ["t", "n", "n_is_null", "f"]
    record = source.read([4])[0]
    assert record == {"t": "?", "n": 0, "n_is_null": True, "f": 0}
    assert type(record["f"]) is float  # as in other records
    assert dataload.open(path, nulls=0, fields=["n", "t"])[1] == {"n": 0, "t": None}


@pytest.mark.parametrize(
    ("nulls", "message"),
    [
        ({"q": 0}, r"nulls names 'q', which .*a\.jsonl does not have: .*"),
        ({"n": "?"}, r"nulls replaces nulls of 'n' by '\?', and .*a\.jsonl has 1 there"),
        ("mask", r"nulls='mask' adds 'n_is_null', a field that .*a\.jsonl has: .*"),
    ],
)
def test_nulls_that_do_not_fit(tmp_path, nulls, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1, "n_is_null": 2}\n')
    with pytest.raises(ConfigError, match=f"^{message}$"):
        dataload.open(path, nulls=nulls)
