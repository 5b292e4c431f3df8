"""Parquet and Arrow: every type beside pyarrow's own values, nulls, damage, limits, and the writer."""

import datetime
import decimal
import io
import itertools
import json
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from made_files import change, image, same
from refusals import refuses
from written import written

import dataload
from dataload._util.caches import Memo
from dataload.codecs.arrow import without_views
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.arrow.ipc import parse_layout
from dataload.sources.arrow.parquet import ParquetSource
from dataload.sources.arrow.reader import ArrowSource

PYARROW = int(pa.__version__.split(".")[0])
ROWS = 60


def file_of(value):
    return {"bytes": b"x" * value, "path": None}


def tensors_of(values, shape, order=None):
    items = pa.FixedSizeListArray.from_arrays(pa.array(values), int(np.prod(shape)))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(items.type.value_type, shape, permutation=order), items)


def write_arrow(path, table, new=pa.ipc.new_file, compression=None, rows=7, deltas=True):
    options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=deltas)
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


DAYS = np.arange(ROWS).astype("datetime64[D]")
COLUMNS = {
    "int": pa.array(np.arange(ROWS, dtype=np.int16)),
    "half": pa.array(np.arange(ROWS).astype(np.float16)),
    "maybe": pa.array([None if i % 7 == 0 else i / 2 for i in range(ROWS)]),
    "bool": pa.array([i % 3 == 0 for i in range(ROWS)]),
    "text": pa.array([f"é{i}" for i in range(ROWS)], pa.large_string()),
    "bytes": pa.array([bytes(i % 10) for i in range(ROWS)]),
    "four": pa.array([b"%04d" % i for i in range(ROWS)], pa.binary(4)),
    "word": pa.array(["x", "y", "z"] * (ROWS // 3)).dictionary_encode(),
    "day": pa.array(DAYS),
    "time": pa.array(np.arange(ROWS).astype("datetime64[us]"), pa.timestamp("us", tz="UTC")),
    "maybe_time": pa.array([None, datetime.datetime(2020, 1, 2)] * (ROWS // 2)),
    "span": pa.array(np.arange(ROWS).astype("timedelta64[ms]")),
    "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4.0 * ROWS)), 4),
    "matrix": tensors_of(np.arange(6 * ROWS, dtype=np.int32), [2, 3]),
    "list": pa.array([list(range(i % 5)) for i in range(ROWS)]),
    "vectors": pa.array([[[float(i), 1.0]] * (i % 3) for i in range(ROWS)], pa.list_(pa.list_(pa.float32(), 2))),
    "struct": pa.array([{"a": i, "t": {"b": str(i)}} for i in range(ROWS)]),
    "file": pa.array([file_of(i) for i in range(ROWS)], pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    "words": pa.array([["a"] * (i % 3) for i in range(ROWS)]),
    "chat": pa.array([[{"role": "user", "n": i}] for i in range(ROWS)]),
    "lists": pa.array([[[1.0, 2.0], [3.0]] for _ in range(ROWS)]),
    "pairs": pa.array([[("k", i)] for i in range(ROWS)], pa.map_(pa.string(), pa.int64())),
    "decimal": pa.array([decimal.Decimal(i) for i in range(ROWS)]),
    "words_of_word": pa.array([["u", "v"]] * ROWS, pa.list_(pa.dictionary(pa.int8(), pa.string()))),
}
TABLE = pa.table(COLUMNS)
SPECS = {
    "int": "int16 ()", "half": "float16 ()", "maybe": "float64 ()", "bool": "bool ()", "text": "str ()",
    "bytes": "bytes ()", "four": "bytes ()", "word": "str ()", "day": "datetime64[D] ()", "time": "datetime64[us] ()",
    "maybe_time": "datetime64[us] ()", "span": "timedelta64[ms] ()", "vector": "float64 (4)", "matrix": "int32 (2, 3)",
    "list": "int64 (?)", "vectors": "float32 (?, 2)", "file": "bytes ()",
    **dict.fromkeys(("struct", "words", "chat", "lists", "pairs", "decimal", "words_of_word"), "unknown"),
}  # fmt: skip
STACKED = [name for name in COLUMNS if name not in ("list", "vectors")]


def sources_of(directory, table):
    pq.write_table(table, directory / "a.parquet", row_group_size=7)
    yield ParquetSource(directory / "a.parquet")
    for name, new, compression in (
        ("a.arrow", pa.ipc.new_file, None),
        ("b.arrow", pa.ipc.new_stream, None),
        ("c.arrow", pa.ipc.new_file, "lz4"),
        ("d.arrow", pa.ipc.new_stream, "zstd"),
    ):
        yield ArrowSource(write_arrow(directory / name, table, new, compression))
    yield ArrowSource(directory / "a.arrow", map=False)


def model(row):
    """A record by way of pyarrow's Python values."""
    record = {name: column[row].as_py() for name, column in COLUMNS.items() if name != "matrix"}
    for name, value in record.items():
        dtype = SPECS[name].split()[0]
        if dtype not in ("str", "bytes", "unknown"):
            value = value.replace(tzinfo=None) if isinstance(value, datetime.datetime) else value
            if value is None:
                value = "NaT" if dtype.startswith("datetime") else np.nan
            record[name] = np.array(value, dtype)
    if not len(record["vectors"]):
        record["vectors"] = np.empty((0, 2), np.float32)
    record["struct"] = {"a": np.array(record["struct"]["a"]), "t": record["struct"]["t"]}
    record["file"] = record["file"]["bytes"]
    record["matrix"] = np.arange(6, dtype=np.int32).reshape(2, 3) + 6 * row
    return {name: record[name] for name in COLUMNS}


def test_every_type_gives_the_values_of_pyarrow(tmp_path):
    indices = np.random.default_rng(0).integers(0, ROWS, 40)
    expected = [model(row) for row in indices.tolist()]
    in_order = []
    for source in sources_of(tmp_path, TABLE):
        in_order.append(source.reads_in_order)
        assert {name: str(spec) for name, spec in source.fields.items()} == SPECS
        same(source.read(indices), expected, str(source))
        want = dataload.default_collate([{name: record[name] for name in STACKED} for record in expected])
        same(source.read_batch(indices, STACKED), want, str(source))
        with pytest.raises(ConfigError, match="cannot stack field 'list'"):
            source.read_batch([1, 2], ["list"])
    assert in_order == [True, False, False, True, True, False]  # where groups are decoded
    for source in sources_of(tmp_path, TABLE.slice(0, 0)):
        assert (len(source), source.fields.keys(), source.read_batch([])) == (0, COLUMNS.keys(), {})


@pytest.fixture(scope="module")
def polars():
    module = pytest.importorskip("polars")
    module.DataFrame({"x": [1]}).write_ipc(io.BytesIO())  # starts what lives as long as the process
    return module


def test_tables_of_polars_with_views(tmp_path, polars):
    text = ["a", "long enough to be no part of a view", ""]
    kind = polars.Series(["u", "v", "u"], dtype=polars.Categorical)
    both = polars.DataFrame({"a": kind, "b": kind.reverse()}).to_struct("both")  # share a dictionary in IPC files
    frame = polars.DataFrame({"both": both, "kind": kind, "t": text, "n": [1, 2, 3], "l": [["x"], [], []]})
    frame.write_ipc(tmp_path / "a.arrow")
    frame.write_ipc_stream(tmp_path / "b.arrow")
    frame.write_parquet(tmp_path / "a.parquet")
    for path in ("a.arrow", "b.arrow", "a.parquet"):
        source = dataload.open(tmp_path / path)
        assert [record["t"] for record in source] == frame["t"].to_list()
        assert source.read_batch([2, 1], ["kind"])["kind"] == ["u", "v"]
        assert source.read_batch([1, 0], ["both"])["both"] == {"a": ["v", "u"], "b": ["v", "u"]}
        assert source.read_batch([2, 0], ["n", "l"])["l"] == [[], ["x"]]


@pytest.mark.parametrize(
    ("order", "compression"),
    [(order, [None, "zstd"][n % 2]) for n, order in enumerate(itertools.permutations(range(3)))],
)
def test_permuted_tensors_beside_dictionaries_and_inside_of_others(tmp_path, order, compression):
    """pyarrow cannot make an empty array of such a type, which a file with dictionaries needed."""
    physical = np.arange(5 * 24, dtype=np.int32).reshape(5, 2, 3, 4)
    tensors, want = tensors_of(physical.ravel(), (2, 3, 4), order), physical.transpose(0, *(axis + 1 for axis in order))
    word = pa.array(["a", "b", "a", "b", "a"]).dictionary_encode()
    structs = pa.StructArray.from_arrays([tensors, word], names=["t", "word"])
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 2, 3, 4, 5]), tensors)
    pairs = pa.FixedSizeListArray.from_arrays(pa.concat_arrays([tensors, tensors]), 2)
    table = pa.table({"x": tensors, "word": word, "in": structs, "list": lists, "pair": pairs})
    path = write_arrow(tmp_path / "x.arrow", table, compression=compression, rows=3, deltas=False)
    doubled = np.concatenate([want, want]).reshape(5, 2, *want.shape[1:])
    with dataload.open(path) as source:
        assert (source.fields["x"].shape, source.fields["pair"].shape) == (want.shape[1:], doubled.shape[1:])
        rows = [4, 0, 2]
        batch = source.read_batch(rows, ["x", "word", "in", "pair"])
        for found in (batch["x"], batch["in"]["t"], np.stack([each["x"] for each in source.read(rows)])):
            np.testing.assert_array_equal(found, want[rows])
        np.testing.assert_array_equal(batch["pair"], doubled[rows])
        assert [each["word"] for each in source.read(rows)] == ["a", "a", "a"]
        assert [len(each["list"]) for each in source] == [2, 0, 1, 1, 1]
        np.testing.assert_array_equal(source[0]["list"], want[:2])
        dataload.convert.convert(source[:], tmp_path / "y.syr", map=lambda record: {"x": record["x"]})
    np.testing.assert_array_equal(dataload.open(tmp_path / "y.syr").read_batch(range(5))["x"], want)
    for source in sources_of(tmp_path, pa.table({"x": tensors})):
        np.testing.assert_array_equal(source.read_batch(range(5))["x"], want)


@pytest.mark.parametrize(
    "metadata",
    [
        *({"shape": [2, 3], "permutation": order} for order in ([0, 0], [1], [0, 2], [-1, 0])),
        *({"shape": shape} for shape in ([1 << 32, 1 << 32], [3], [-2, -3], "x")),
        {},
    ],
    ids=str,
)
@pytest.mark.skipif(PYARROW < 24, reason="pyarrow before 24 crashes")
def test_tensors_of_impossible_shapes(tmp_path, metadata):
    kind = {"ARROW:extension:name": "arrow.fixed_shape_tensor", "ARROW:extension:metadata": json.dumps(metadata)}
    schema = pa.schema([pa.field("x", pa.list_(pa.int32(), 6), metadata=kind)])
    table = pa.Table.from_arrays([tensors_of(np.arange(6, dtype=np.int32), (2, 3)).storage], schema=schema)
    for suffix, write in ((".arrow", pa.feather.write_feather), (".parquet", pq.write_table)):
        path = tmp_path / f"x{suffix}"
        write(table, path)
        with pytest.raises(CorruptFileError, match=rf"x\{suffix}: "):
            len(dataload.open(path))


NAMED = pa.StructArray.from_arrays([COLUMNS["int"][:3]], names=["SPOILED"])


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(
    "column",
    [
        NAMED,
        pa.StructArray.from_arrays([NAMED], names=["inner"]),
        pa.ListArray.from_arrays(pa.array([0, 1, 2, 3]), NAMED),
        pa.FixedSizeListArray.from_arrays(NAMED, 1),
        pa.MapArray.from_arrays(pa.array([0, 1, 2, 3]), pa.array(list("abc")), NAMED),
        pa.StructArray.from_arrays([COLUMNS["word"][:3]], names=["SPOILED"]),
        pa.array([[1], [2], [3]], pa.list_(pa.field("SPOILED", pa.int8()))),
    ],
    ids=lambda column: str(column.type)[:40],
)
def test_names_in_types_that_are_not_utf8(tmp_path, column, compression):
    """pyarrow decodes a name when it is asked for, long after the file was opened."""
    table = pa.table({"n": COLUMNS["int"][:3], "x": column})
    path = write_arrow(tmp_path / "x.arrow", table, compression=compression, deltas=False)
    path.write_bytes(path.read_bytes().replace(b"SPOILED", b"SPO\xffLED"))
    with pytest.raises(CorruptFileError, match=r"x\.arrow: a name in column 1 is not UTF-8: b'SPO\\xffLED'"):
        len(dataload.open(path))
    for source in sources_of(tmp_path, pa.table({"SPOILED": [1]})):
        path = Path(source.paths[0])
        path.write_bytes(path.read_bytes().replace(b"SPOILED", b"SPO\xffLED"))
        with pytest.raises(CorruptFileError, match=r"(not UTF-8|utf-8)"):
            len(dataload.open(path))


@pytest.mark.parametrize(
    "column",
    [
        *(pa.array([1, 2, None]), pa.array(["a", "b", None]), pa.array([[1], [2], None]), pa.array([[1], [2], [None]])),
        *(pa.array([{"x": 1}, {"x": 2}, None]), pa.array([True, False, None])),
        pa.array([[1, 2], [3, 4], [None, 5]], pa.list_(pa.int8(), 2)),
        pytest.param(
            pa.array([[0.5], [1.5], None], pa.list_(pa.float32(), 1)),
            marks=pytest.mark.skipif(PYARROW < 25, reason="pyarrow before 25 does not read it from Parquet"),
        ),
    ],
)
def test_a_null_is_an_error_of_its_record_only(tmp_path, column):
    message = (
        r"record 2: field 'x' is null, and only floats and times have a value for that \(NaN, NaT\): "
        r"pass nulls=\"mask\" to mark nulls in a field of their own, nulls=\{field: value\} to replace them, or "
        r"fields=\[\.\.\.\] without this field"
    )
    for warned in sources_of(tmp_path, pa.table({"x": column, "y": [1, 2, 3]})):
        source = type(warned)(warned.paths, nulls="error")  # without a warning
        assert len(source.read([0, 1, 0])) == 3
        assert source.read_batch([2, 0], ["y"])["y"].tolist() == [3, 1]
        refuses(source, [0, 2, 2], message, path=source.paths[0], index=2)


def test_lists_without_views_keep_their_type():
    for make in (pa.list_, pa.large_list):
        assert without_views(make(pa.int8())) == make(pa.int8())
        assert without_views(make(pa.string_view())) == make(pa.large_string())
    assert without_views(pa.map_(pa.string_view(), pa.int8())) == pa.map_(pa.large_string(), pa.int8())
    assert without_views(pa.map_("int8", "int8", keys_sorted=True)) == pa.map_("int8", "int8", keys_sorted=True)


def test_only_chosen_columns_are_decoded_and_a_bounded_number_of_groups_is_kept(tmp_path, monkeypatch):
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=10)
    decoded = []
    original = pq.ParquetFile.iter_batches

    def iter_batches(self, rows, *, row_groups, columns, **options):
        decoded.append((*row_groups, *columns))
        return original(self, rows, row_groups=row_groups, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    source = ParquetSource(tmp_path / "a.parquet", fields=["int", "text"], cached_bytes=2 * 10 * 2)
    source.read_batch([0, 1, 11], ["int"])
    assert decoded == [(0, "int"), (1, "int")]
    for index in (0, 10, 1, 20, 2, 11):  # 20 evicts the group of 10
        source.read_batch([index], ["int"])
    assert decoded[2:] == [(2, "int"), (1, "int")]
    source.read_batch([5, 6], ["text"])
    assert decoded[4:] == [(0, "text")]
    with pytest.raises(ConfigError, match="has no field 'word'"):
        source.read_batch([0], ["word"])


@pytest.mark.parametrize("offset", [-1, 1000, 2**31 - 1])
@pytest.mark.parametrize("values", [[b"ab", b"cd", b"ef"], [[1, 2], [3, 3], [4, 5]], ["ab", "cd", "ef"]])
def test_a_value_outside_of_its_batch(tmp_path, values, offset):
    path = write_arrow(tmp_path / "a.arrow", pa.table({"x": values}))
    place = path.read_bytes().index(np.array([0, 2, 4, 6], np.int32).tobytes())  # the ends of the records
    change(path, place + 8, offset.to_bytes(4, "little", signed=True))
    source = ArrowSource(path)
    assert len(source.read([0, 0])) == 2
    for index in (1, 2):
        message = r"a value begins at -?\d+ and ends at -?\d+ of \d+"
        refuses(source, [0, index], message, index=index, offset=place + 4 * index)


@pytest.mark.parametrize(
    ("new", "old", "damage", "message"),
    [
        (pa.ipc.new_stream, b"\xff{4}\0{4}$", b"", "the stream has no end: it was truncated"),
        (pa.ipc.new_file, b"OW1$", b"", "byte [0-9]+: the file has no valid end: it was truncated"),
        (pa.ipc.new_file, b"(?<!^)\xff{4}", b"\xff\xff\xff\xfe", "expected a mess"),
        (pa.ipc.new_file, b"\3" + bytes(7), b"\4" + bytes(7), "a batch has less than it"),
        (pa.ipc.new_file, b"\3" + bytes(7), b"\xff" * 8, "a negative number of rows"),
        (
            pa.ipc.new_file,
            bytes(8) + b"\6" + bytes(7),
            bytes(8) + b"\6\1" + bytes(6),
            "a buffer or an array is outside",
        ),
        (pa.ipc.new_stream, b"\3" + bytes(15), b"\3" + bytes(7) + b"\xff" * 8, "a buffer or an array is outside"),
    ],
)
def test_damaged_metadata_of_arrow(tmp_path, new, old, damage, message):
    path = write_arrow(tmp_path / "a.arrow", pa.table({"x": pa.array([1, 2, 3], pa.int16())}), new)
    path.write_bytes(re.sub(old, damage, path.read_bytes()))
    with pytest.raises(CorruptFileError, match=message):
        len(ArrowSource(path))


def field_of(data, table, number):
    """Return where a table of Flatbuffers has the place of a field, and where the field's value is."""
    place = table - struct.unpack_from("<i", data, table)[0] + 4 + 2 * number
    return place, table + struct.unpack_from("<H", data, place)[0]


def target_of(data, at):
    return at + struct.unpack_from("<I", data, at)[0]


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_big_endian_values_are_refused(tmp_path, new):
    path = write_arrow(tmp_path / "a.arrow", pa.table({"x": pa.array([1, 2, 3], pa.int16())}), new)
    data = bytearray(path.read_bytes())
    footer = len(data) - 10 - struct.unpack_from("<i", data, len(data) - 10)[0]
    start, header = (footer, 1) if new is pa.ipc.new_file else (8, 2)  # the field of the schema
    schema = target_of(data, field_of(data, target_of(data, start), header)[1])
    one = next(at for at in range(schema + 4, len(data), 2) if data[at : at + 2] == b"\1\0")
    struct.pack_into("<H", data, field_of(data, schema, 0)[0], one - schema)  # its byte order
    path.write_bytes(data)
    with pytest.raises(UnsupportedFormatError, match=r"a\.arrow has big-endian values: write it anew, with pyarrow"):
        len(ArrowSource(path))


def test_text_that_is_not_utf8(tmp_path):
    column = pa.array([b"good", b"b\xffd"]).view(pa.string())
    for source in sources_of(tmp_path, pa.table({"t": column})):
        if source.paths[0].endswith(("c.arrow", "d.arrow")):  # pyarrow notices first
            match = "record 1: row group 0: In column 0: Invalid: Invalid UTF8"
        else:
            match = "record 1: field 't' is not UTF-8: invalid start byte at byte 1 of it"
            assert source[0]["t"] == "good"
        with pytest.raises(CorruptFileError, match=match):
            source[1]


def test_more_than_the_limit(tmp_path):
    for table in (pa.table({"x": [b"a" * 2000]}), pa.table({"x": ["a" * 200] * 50})):
        pq.write_table(table, tmp_path / "a.parquet")
        write_arrow(tmp_path / "a.arrow", table, compression="zstd")
        for path, what in (("a.parquet", "field 'x' of row group 0"), ("a.arrow", r"the batch at byte \d+")):
            with pytest.raises(CorruptFileError, match=rf"{what} takes [\d,]+ bytes"):
                dataload.open(tmp_path / path, max_record_bytes=1000)[0]
    words = pa.table({"x": pa.array(["a" * 2000]).dictionary_encode()})
    with pytest.raises(CorruptFileError, match=r"the batch at byte \d+ takes 2,0"):
        ArrowSource(write_arrow(tmp_path / "c.arrow", words, compression="zstd"), max_record_bytes=1000)[0]
    numbers = pa.StructArray.from_arrays([pa.array([[7] * 100], pa.list_(pa.int64(), 100))], ["n"])
    write_arrow(tmp_path / "d.arrow", pa.table({"x": numbers}))  # 800 bytes, and more as objects
    assert dataload.open(tmp_path / "d.arrow", max_record_bytes=1000)[0]["x"]["n"].tolist() == [7] * 100
    write_arrow(tmp_path / "b.arrow", pa.table({"x": [b"", b"a" * 2000]}))
    source = dataload.open(tmp_path / "b.arrow", max_record_bytes=1000)
    assert source[0]["x"] == b""
    with pytest.raises(CorruptFileError, match="record 1: the record takes 2,000 bytes of memory"):
        source[1]


def test_what_pyarrow_cannot_give(tmp_path):
    pq.write_table(pa.table([[1], [2]], names=["x", "x"]), tmp_path / "a.parquet")
    with pytest.raises(UnsupportedFormatError, match=r"a\.parquet has several columns called 'x'"):
        len(ParquetSource(tmp_path / "a.parquet"))
    batches = [pa.record_batch({"x": pa.array([word]).dictionary_encode()}) for word in "ab"]
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), batches[0].schema) as writer:
        for batch in batches:
            writer.write(batch)
    with pytest.raises(UnsupportedFormatError, match="replaces its dictionaries between batches: write it as an Arrow"):
        ArrowSource(tmp_path / "a.arrow")[0]
    runs = pa.RunEndEncodedArray.from_arrays([2, 3], [1, 2])
    with pytest.raises(UnsupportedFormatError, match=r"a\.arrow: field 'x' is run-end encoded, .* `run_end_decode`"):
        len(ArrowSource(write_arrow(tmp_path / "a.arrow", pa.table({"x": runs}))))
    table = pa.table({"x": runs, "s": pa.StructArray.from_arrays([runs], ["x"]), "y": [1, 2, 3]})
    others = ArrowSource(write_arrow(tmp_path / "a.arrow", table), fields=["y"])
    assert others.read([2, 0]) == [{"y": 3}, {"y": 1}]
    assert others.filter(dataload.field("y") > 1).read_batch([1])["y"].tolist() == [3]
    for name in ("x", "s"):
        with pytest.raises(UnsupportedFormatError, match=r"a\.arrow: field 'x' is run-end encoded, .* by fields="):
            len(ArrowSource(tmp_path / "a.arrow", fields=[name]))
    # A struct of a union: pyarrow ends the process if it flattens one.
    union = pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [pa.array(["a", "b"])])
    table = pa.table({"x": pa.StructArray.from_arrays([union], ["u"])})
    assert ArrowSource(write_arrow(tmp_path / "a.arrow", table)).read([1, 0]) == [{"x": {"u": "b"}}, {"x": {"u": "a"}}]


def test_values_are_decoded_where_asked(tmp_path):
    path = tmp_path / "a.parquet"
    pictures = [image(np.full((2, 3, 3), value, np.uint8)) for value in (1, 2)]
    pq.write_table(pa.table({"picture": [*pictures, b"none"], "n": [1, 2, 3]}), path)
    source = ParquetSource(path, decode={"picture": "image"})
    assert source.read_batch([1, 0])["picture"][:, 0, 0, 0].tolist() == [2, 1]
    with pytest.raises(CorruptFileError, match=r"record 2: field 'picture': an image cannot be decoded"):
        source[2]
    assert ParquetSource(path, decode={"picture": len})[2]["picture"] == 4
    for name, message in (("pictur", r"did you mean 'picture'\?"), ("n", r"it is int64 \(\), and decoders take bytes")):
        with pytest.raises(ConfigError, match=rf"decode names the field '{name}' of .*: {message}"):
            len(ParquetSource(path, decode={name: "image"}))


RECORDS = [
    {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3) + i,
        "tokens": np.arange(i % 4, dtype=np.uint16),
        "label": np.array(i, np.int16),
        "n": i,
        "text": f"é{i}",
        "data": bytes(i % 5),
        "words": ["a"] * (i % 2),
        "place": {"x": i},
        "day": np.array(i, "datetime64[ms]"),
        "ok": i % 2 == 0,
    }
    for i in range(50)
]


def read(path):
    return pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(str(path)).read_all()


def test_a_footer_without_a_list_of_dictionaries(tmp_path):
    """pyarrow writes an empty one."""
    path = write_arrow(tmp_path / "a.arrow", pa.table({"n": range(10)}))
    data = bytearray(path.read_bytes())
    footer = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    root = footer + struct.unpack_from("<I", data, footer)[0]
    struct.pack_into("<H", data, root - struct.unpack_from("<i", data, root)[0] + 4 + 2 * 2, 0)
    path.write_bytes(data)
    assert ArrowSource(path).read_batch([9, 2])["n"].tolist() == [9, 2]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_pyarrow_reads_what_we_write(tmp_path, name, compression):
    with dataload.create(tmp_path / name, group_bytes=500, compression=compression) as writer:
        for record in RECORDS:
            writer.write(record)
            record = {**record, "matrix": None}  # the writer keeps no reference to arrays
    table = read(tmp_path / name)
    assert table.column("matrix").type == pa.fixed_shape_tensor(pa.float32(), [2, 3])
    assert table.column("tokens").type == pa.large_list(pa.uint16())
    if name == "a.parquet":
        found = pq.read_metadata(tmp_path / name).row_group(0).column(0).compression
        assert found == (compression or "uncompressed").upper()
    else:
        assert len(table.column("n").chunks) > 1
    for field in ("n", "text", "data", "words", "place", "ok"):
        assert table.column(field).to_pylist() == [record[field] for record in RECORDS]
    source = dataload.open(tmp_path / name)
    numbers = {"n": np.array, "ok": np.array, "place": lambda place: {"x": np.array(place["x"])}}
    want = [{n: numbers[n](v) if n in numbers else v for n, v in record.items()} for record in RECORDS]
    same(list(source), want)
    day = {
        "day": np.datetime64("2024-01-01"),
        "in": {"day": np.array("2024-01-01", "M8[D]"), "n": np.array(1, np.int8)},
    }
    written(tmp_path / f"again-{name}", [{**record, **day} for record in source])
    again = read(tmp_path / f"again-{name}")
    assert again.column("place").to_pylist() == [record["place"] for record in RECORDS]
    date = datetime.date(2024, 1, 1)
    assert again.select(["day", "in"]).slice(0, 1).to_pylist() == [{"day": date, "in": {"day": date, "n": 1}}]
    assert again.column("in").type.field("n").type == pa.int8()


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"x": 1}, {"x": "a"}], {}, r"field 'x' of record 1 is str, and int in the first record: a table has columns"),
        ([{"x": 1}, {"y": 1}], {}, r"field 'y' of record 1 is int, and missing in the first record"),
        ([{"x": np.zeros((2, 2))}, {"x": np.zeros((2, 3))}], {}, r"record 1 has the shape \(2, 3\), and \(2, 2\) in t"),
        ([{"x": np.zeros(2)}, {"x": np.zeros(3)}], {"group_bytes": 1}, r"shape \(3,\), and \(2,\) .*: pass ragged=\['"),
        ([{"x": np.zeros(1, np.complex64)}], {}, "field 'x' is an array of complex64, which a table cannot store"),
        ([{"x": np.zeros((0, 3))}], {}, r"field 'x' cannot be stored in a table: an array of shape \(0, 3\) has no it"),
        ([{"x": 1 << 70}], {}, "field 'x' cannot be stored in a table"),
        (
            [{"x": [1]}, {"x": [1.5]}],
            {"group_bytes": 1},
            "'x' .*: it is list<item: double> here, and list<item: int64>",
        ),
        (
            [{"x": {"a": [1]}}, {"x": {"a": [1], "b": 2}}],
            {"group_bytes": 1},
            "int64>, b: int64> here, and struct<a: lis",
        ),
        ([{"x": [1, "a"]}], {}, "field 'x' cannot be stored in a table"),
        ([{"x": 1}], {"ragged": ["y"]}, "ragged names the field 'y': choose from x"),
        ([{"x": "\ud800"}], {}, "field 'x' cannot be stored in a table: .* surrogates not allowed"),
        ([{"\ud800": 1}], {}, "cannot be stored in a table: .* surrogates not allowed"),
        ([{}], {}, "a table does not store records without fields"),
        ([{"x": {}}], {}, "a.parquet cannot store this table: .* struct type 'x' with no child field"),
        ([b"x"], {}, "format 'tables' stores fields, got a record of type bytes"),
    ],
)
def test_what_a_table_cannot_store(tmp_path, records, options, message):
    writer = dataload.create(tmp_path / ("a.parquet" if "a.parquet" in message else "a.arrow"), **options)
    with pytest.raises(ConfigError, match=message), writer:
        writer.extend(records)
    assert not [*tmp_path.iterdir()]


SIZED = [7, 0.5, "abcdefgh", b"abcdefgh", np.float64(1), np.zeros((2, 2), np.int16)]
SIZED += ["äöüß", [3], [["abc", "defgh"]], {"role": "user", "content": ["abcd"]}]  # which are 8 bytes, too


@pytest.mark.parametrize("value", SIZED, ids=str)
def test_groups_have_the_bytes_that_were_asked_for(tmp_path, value):
    for group_bytes, rows in ((16, [2, 2, 1]), (17, [3, 2]), (8, [1] * 5)):
        written(tmp_path / "a.parquet", [{"x": value}] * 5, group_bytes=group_bytes, overwrite=True)
        metadata = pq.read_metadata(tmp_path / "a.parquet")
        assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == rows


def test_pages_that_we_write_have_checksums_that_are_compared(tmp_path):
    path = written(tmp_path / "a.parquet", [{"x": 1 << 40}], compression=None)
    data = path.read_bytes()
    change(path, data.index(bytes([0, 0, 0, 0, 0, 1, 0, 0])), b"\1")
    with dataload.open(path) as source, pytest.raises(CorruptFileError, match="CRC checksum"):
        source.read([0])


def test_files_that_differ_in_their_values_share_a_layout(tmp_path):
    known, found = Memo(1), []
    for values in ([1, 2], [3, 4], [5, None]):
        column = pa.array(["a", "b"] if values[0] < 5 else ["b", "a"]).dictionary_encode()
        path = write_arrow(tmp_path / "a.arrow", pa.table({"x": pa.array(values), "word": column}), deltas=False)
        data = path.read_bytes()
        found.append(parse_layout(lambda offset, length, data=data: data[offset:][:length], len(data), "", known))
    assert found[0] is found[1]
    assert found[2] != found[0], "one has a null"


def test_ragged_fields_are_lists(tmp_path):
    with dataload.create(tmp_path / "a.parquet", ragged=["x"], group_bytes=1) as writer:
        writer.extend([{"x": np.zeros(2)}, {"x": np.zeros(2)}, {"x": np.zeros(3)}])
    assert [len(record["x"]) for record in dataload.open(tmp_path / "a.parquet")] == [2, 2, 3]


@pytest.mark.parametrize(("name", "codec"), [("a.parquet", "zip"), ("a.arrow", "snappy")])
def test_an_unknown_compression(tmp_path, name, codec):
    with pytest.raises(ConfigError, match=f"compression is '{codec}', which this pyarrow does not offer here"):
        dataload.create(tmp_path / name, compression=codec)


@pytest.mark.parametrize("cached_bytes", [1 << 20, 4000, 0])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_many_columns_read_together_are_those_read_one_by_one(tmp_path, suffix, cached_bytes):
    rng = np.random.default_rng(0)
    kinds = ["f4", "i8", "u1", "bool", "f8", "i2"]
    columns = {f"{n}": pa.array(rng.integers(0, 2, 50).astype(kinds[n % 6])) for n in range(40)}
    columns["null"] = pa.array([None if row == 33 else row / 2 for row in range(50)])
    columns["int"] = pa.array([None if row == 34 else row for row in range(50)])  # the group with 34 is read by column
    columns["text"] = pa.array([f"t{row}" for row in range(50)])
    columns |= {"time": pa.array([*range(50)], pa.timestamp("ms")), "list": pa.array([[row, 1] for row in range(50)])}
    path, table = tmp_path / f"a{suffix}", pa.table(columns)
    if suffix == ".parquet":
        pq.write_table(table, path, row_group_size=20)
    else:
        pa.feather.write_feather(table, path, compression="lz4", chunksize=20)
    source = dataload.open(path, cached_bytes=cached_bytes, nulls="error")
    for rows in ([3, 1, 3], [45, 2, 30, 21, 2], [49], range(34)):
        whole, names = source.read_batch(rows), [*source.fields][::-1]
        assert [*whole] == names[::-1]
        assert [*source.read_batch(rows, names)] == names
        for name in names[::3]:
            same(whole[name], source.read_batch(rows, [name])[name])
    refuses(source, [0, 34], "field 'int' is null")


def test_files_of_equal_layout_have_values_and_dictionaries_of_their_own(tmp_path):
    texts, paths = (["aa", "bb"], ["cc", "dddd"], ["e", "f" * 5000]), []
    for number, values in enumerate(texts):
        column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int8()), values)
        table = pa.table({"n": np.arange(3) + 3 * number, "text": column})
        paths.append(tmp_path / f"{number}.arrow")
        with pa.ipc.new_file(str(paths[-1]), table.schema) as writer:
            writer.write_table(table)
    with dataload.open(paths) as source:
        batch = source.read_batch(range(9))
        assert batch["n"].tolist() == list(range(9))
        assert list(batch["text"]) == [values[at] for values in texts for at in (0, 1, 1)]
        assert [record["n"] for record in source.read(range(9))] == list(range(9))
    with dataload.open(paths, max_record_bytes=4000) as source:
        source.read(range(7))
        with pytest.raises(CorruptFileError, match="max_record_bytes"):
            source.read([8])


@pytest.mark.parametrize(("columns", "compression"), [(3, None), (33, "zstd")])
def test_another_thread_may_read_other_columns_between_any_two_lines(tmp_path, columns, compression):
    table = pa.table({f"c{number}": range(ROWS) for number in range(columns)})
    source = ArrowSource(write_arrow(tmp_path / "a.arrow", table, rows=ROWS, compression=compression))
    other_name, *names = table.column_names
    source.read_batch([5], names)
    turns = []

    def other(frame, event, _):
        if "/sources/arrow/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            sys.settrace(None)
            turns.append(source.read_batch([3], [other_name])[other_name].tolist())
            sys.settrace(other)
        return other

    before = sys.gettrace()
    sys.settrace(other)
    try:
        found = source.read_batch([5], names)
    finally:
        sys.settrace(before)
    assert {name: column.tolist() for name, column in found.items()} == {name: [5] for name in names}
    assert len(turns) > 20
    assert turns == [[3]] * len(turns)


@pytest.mark.parametrize("rows", [ROWS, 7])
@pytest.mark.parametrize(("files", "mapped"), [(1, True), (3, True), (1, False)])
def test_many_numbers_of_few_kinds_are_pyarrows(tmp_path, rows, files, mapped):
    kinds = ("i4", "f4", "i8", "f8", "u1", "f4")
    table = pa.table({f"f{n}": np.arange(n, n + ROWS).astype(kinds[n % 6]) for n in range(30)})
    table = table.append_column("pair", pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * ROWS, dtype="f4")), 2))
    for number in range(files):
        write_arrow(tmp_path / f"{number}.arrow", table.slice(number * ROWS // files, ROWS // files), rows=rows)
    source = dataload.open(tmp_path, map=mapped)
    for indices in ([5, 0, 59, 5, 31], [59, 58], [3, 4, 30]):  # batches of fewer rows, with others, alone, and none
        taken, batch = table.take(indices), source.read_batch(indices)
        assert batch["pair"].tolist() == taken["pair"].to_pylist()
        for name in table.column_names[:30]:
            expected = taken[name].to_numpy()
            assert batch[name].dtype == expected.dtype
            assert batch[name].tolist() == expected.tolist()
    batch = source.read_batch(np.arange(4), ["f3", "f1"])
    assert [*batch] == ["f3", "f1"]
    batch["f1"][:] = 0
    assert batch["f3"].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("value", [["b" * 5000], [[1] * 1000]])
def test_what_lists_hold_counts_for_their_record(tmp_path, value):
    path = write_arrow(tmp_path / "a.arrow", pa.table({"x": [value[:0], value, value[:0]]}))
    with ArrowSource(path, max_record_bytes=4000) as source:
        assert source.read_batch([0, 2])["x"] is not None
        with pytest.raises(CorruptFileError, match="max_record_bytes") as caught:
            source.read_batch([2, 1])
    assert caught.value.index == 1


@pytest.mark.slow_suite
@pytest.mark.timeout(120)
def test_a_batch_may_take_more_than_arrows_offsets_hold(tmp_path):
    numbers = pa.array([*[0] * (1 << 11), 1], pa.int32())
    column = pa.DictionaryArray.from_arrays(numbers, pa.array([b"x" * (1 << 20), b"y"]))
    with ArrowSource(write_arrow(tmp_path / "a.arrow", pa.table({"x": column}))) as source:
        found = source.read_batch(range(len(column)))["x"]
    assert (len(found), len(found[0]), found[-1]) == (len(column), 1 << 20, b"y")
