import hashlib
import os
import sys

import bson
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_files import same
from refusals import refuses

from dataload.errors import ConfigError, CorruptFileError, MissingDependencyError
from dataload.sources.syrah import writer as syrah
from dataload.sources.syrah.layout import DTYPES
from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.syrah.writer import SyrahWriter
from dataload.storage.core import can_map
from dataload.types import FieldSpec


def int64s(*numbers):
    return np.array(numbers, "<i8").tobytes()


def assemble(path, arrays, metadata, *, header=b"GS\0\0\2\0"):
    """A file byte by byte; `metadata` is the document, or its bytes."""
    document = metadata if isinstance(metadata, bytes) else bson.encode(metadata)
    offset = 22 + len(arrays)
    path.write_bytes(header + int64s(offset, len(document)) + arrays + document)
    return str(path)


def key(offsets=(22,), sizes=(8,), dtype="float32", **more):
    return {"offset": int64s(*offsets), "size": int64s(*sizes), "dtype": dtype, **more}


def shape(ndim, dims):
    return {"shape": {"ndim": int64s(*ndim), "dims": int64s(*dims)}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data.syr"


def write(path, records, **options):
    with SyrahWriter(path, **options) as writer:
        writer.extend(records)
    return path


def test_fields_say_what_is_known(path):
    records = [
        {
            "fixed": np.zeros((2, 3), np.float32), "long": np.zeros(i), "wide": np.zeros((i, 2), np.int8),
            "any": np.zeros((1,) * i), "scalar": np.array(i), "text": "a" * i, "bytes": b"b" * i,
            "word": "of one length", "code": b"code",
        }
        for i in range(3)
    ]  # fmt: skip
    assert {name: str(spec) for name, spec in SyrahSource(write(path, records)).fields.items()} == {
        "fixed": "float32 (2, 3)", "long": "float64 (?)", "wide": "int8 (?, ?)", "any": "float64",
        "scalar": "int64 ()", "text": "str ()", "bytes": "bytes ()", "word": "str ()", "code": "bytes ()",
    }  # fmt: skip
    same(list(SyrahSource(path)), records)
    none = SyrahSource(path, fields=[])
    assert (list(none), none.read_batch([0, 1])) == ([{}, {}, {}], {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [((2, 3), (2, 3)), ((3, -1), (3, 2)), ((-1,), (6,)), ((6, 1), (6, 1)), ((1, -1, 2), (1, 3, 2))],
)
def test_shapes_that_the_file_lacks(path, given, expected):
    records = [{"x": np.arange(6) + i} for i in range(3)]
    source = SyrahSource(write(path, records), shapes={"x": given})
    assert source.fields["x"].shape == expected
    same(source[1], {"x": records[1]["x"].reshape(expected)})
    same(source.read_batch([2, 0])["x"], np.stack([records[2]["x"], records[0]["x"]]).reshape(2, *expected))


SIX = {"x": np.arange(6)}
NO_FIT = r"shapes: \[.*\] does not fit field 'x' of .*data\.syr, whose records have 6 values"


@pytest.mark.parametrize(
    ("records", "shapes", "message"),
    [
        *(([SIX, SIX], {"x": given}, NO_FIT) for given in ((4,), (2, 2), (-1, -1), (-2, 3), (4, -1), (0, -1), ())),
        ([{"x": np.arange(2)}, {"x": np.arange(3)}], {"x": (-1, 2)}, "whose records have different numbers of values"),
        ([{"x": 1, "y": 1}], {"z": (1,)}, r"shapes names 'z'; .*data\.syr has x, y"),
    ],
)
def test_shapes_that_do_not_fit(path, records, shapes, message):
    write(path, records)
    with pytest.raises(ConfigError, match=message) as caught:
        len(SyrahSource(path, shapes=shapes))
    assert caught.value.key in ("shapes.x", "shapes.z", "shapes")


def test_shapes_of_records_of_different_lengths_and_of_bytes(path):
    records = [{"x": np.arange(2 * i), "image": bytes(range(6))} for i in range(4)]
    source = SyrahSource(write(path, records), shapes={"x": (-1, 2), "image": (2, 3)})
    assert source.fields["x"] == FieldSpec("int64", (None, 2))
    image = np.arange(6, dtype=np.uint8).reshape(2, 3)
    same(list(source), [{"x": record["x"].reshape(-1, 2), "image": image} for record in records])
    same(source.read_batch([3, 3])["x"], np.arange(6).reshape(1, 3, 2).repeat(2, 0))


SPANS = st.sampled_from([0, 4, 8, 12]).flatmap(lambda size: st.tuples(st.integers(22, 42 - size), st.just(size)))
ALIKE = SPANS.flatmap(lambda span: st.lists(st.integers(22, 42 - span[1]).map(lambda at: (at, span[1])), min_size=1))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spans=st.lists(SPANS, min_size=1, max_size=4) | ALIKE, dtype=st.sampled_from(["uint8", "int16", "float32"]))
def test_arrays_may_lie_anywhere(path, spans, dtype):
    offsets, sizes = zip(*spans, strict=True)
    arrays = bytes(range(1, 21))
    source = SyrahSource(assemble(path, arrays, {"x": key(offsets, sizes, dtype)}, header=b"GS\xff\xff\xff\xff"))
    content = path.read_bytes()
    expected = [np.frombuffer(content[o : o + n], dtype) for o, n in zip(offsets, sizes, strict=True)]
    rows = [*range(len(expected)), *reversed(range(len(expected)))]
    found = source.read(rows)
    same(found, [{"x": expected[row]} for row in rows])
    assert all(record["x"].flags.aligned and record["x"].flags.writeable for record in found)
    if len(set(sizes)) == 1:
        batch = source.read_batch(rows)["x"]
        same(batch, np.stack([expected[row] for row in rows]))
        assert batch.flags.aligned


CORRUPT = [
    ({}, "the metadata have no keys"),
    ({"x": 3}, "key 'x' has no document"),
    *(
        ({"x": {name: value for name, value in key().items() if name != part}}, f"key 'x' has no entry '{part}'")
        for part in ("offset", "size", "dtype")
    ),
    ({"x": key(dtype="complex64")}, "key 'x' has dtype 'complex64'; the format supports bool, int8"),
    *(({"x": key(dtype=dtype)}, "key 'x' has dtype None") for dtype in ({"a": 1}, ["str"])),
    (bson.encode({"x": key()}).replace(b"float", b"flo\xffz"), "the metadata are not a BSON document: 'utf-8' codec"),
    ({"x": {**key(), "offset": "22"}}, "offset of key 'x' is not a table of int64: str"),
    ({"x": {**key(), "size": b"1234567"}}, "size of key 'x' is not a table of int64: 7 bytes"),
    ({"x": key([22, 22], [8])}, "key 'x' has 2 offsets and 1 sizes"),
    ({"x": key(), "y": key([22, 22], [8, 8])}, "key 'x' has 1 records, key 'y' has 2"),
    ({"x": key([22], [-8])}, "key 'x' has -8 bytes at 22: a negative size"),
    ({"x": key([22], [-(2**63)])}, "a negative size"),
    *(({"x": key([at])}, f"key 'x' has 8 bytes at {at}: inside the header") for at in (18, -(2**63))),
    ({"x": key([10**6])}, "key 'x' has 8 bytes at 1000000: the file has"),
    ({"x": key([22], [10**6])}, "key 'x' has 1000000 bytes at 22: the file has"),
    ({"x": key([2**63 - 8], [2**63 - 8])}, "the file has"),  # the sum overflows
    ({"x": key([30], [12])}, "key 'x' has 12 bytes at 30: inside the metadata"),
    ({"x": key([22], [7])}, "key 'x' has 7 bytes at 22: not a multiple of the 4 bytes of float32"),
    *(
        ({"x": key(**shape(ndim, dims))}, "the shapes of key 'x' do not fit its sizes")
        for ndim, dims in (
            *(([2], [3, 2]), ([2], [-1, -2]), ([3], [2, 1]), ([1], [2, 1]), ([-1], []), ([2**62], [])),
            ([3], [2**31 - 1] * 3),  # the product wraps
        )
    ),
    ({"x": key([22], [8], "uint8", **shape([4], [2**16] * 4))}, "do not fit"),  # it wraps to the size
    ({"x": key([22], [0], **shape([4], [2**31 - 1] * 3 + [0]))}, "do not fit"),  # a zero hides the others
    ({"x": key(shape={"ndim": 1, "dims": b""})}, "shape of key 'x' is not a table of int64"),
    ({"x": key(shape={"ndim": int64s(1)})}, "shape of key 'x' is not a table of int64: NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "message"), CORRUPT)
def test_metadata_that_contradict_the_file(path, metadata, message):
    assemble(path, bytes(16), metadata)
    with pytest.raises(CorruptFileError, match=message) as caught:
        len(SyrahSource(path))
    assert caught.value.path == str(path)
    assert caught.value.offset is not None


def test_documents_have_a_limit_of_elements(path):
    most = dict.fromkeys(map(str, range((1 << 16) - len(key()))))
    assert len(SyrahSource(assemble(path, bytes(16), {"x": {**key(), **most}}))) == 1
    assemble(path, bytes(16), {"x": {**key(), **most, "more": None}})
    with pytest.raises(CorruptFileError, match="a document of the metadata has more than 65536 elements"):
        len(SyrahSource(path))


def nested(depth):
    heads = [(5 + 8 * level).to_bytes(4, "little") + b"\x03a\0" for level in range(depth, 0, -1)]
    return b"".join([*heads, b"\5\0\0\0\0", b"\0" * depth])


NO_DOCUMENT = r"data\.syr, byte \d+: (the metadata are not a BSON document|key|the header says)"
DOCUMENTS = b"", bytes(4), b"\xff" * 40, b"\xff\xff\xff\x7f\0", nested(5), nested(100_000), b"\x06\0\0\0\x10\0"
GS = b"GS\0\0\2\0"
HEADERS = [
    (b"", r"byte 0: a Syrah header has 22 bytes, it is empty \(a writer that was never closed\?\)"),
    (b"GS\0\0", "byte 0: a Syrah header has 22 bytes, the file has 4"),
    (bytes(30), r"expected the magic bytes b'GS', found b'\\x00\\x00' \(a writer that was never closed\?\)"),
    (b"SG" + bytes(30), "expected the magic bytes b'GS', found b'SG'$"),
    (GS + int64s(10, 5), "byte 6: the header says that the metadata start at byte 10; the file has 22"),
    (GS + int64s(23, 5), "byte 6: the header says that the metadata start at byte 23"),
    (GS + int64s(22, 5), "byte 14: the header says that the metadata have 5 bytes; 0 are left for them"),
    (GS + int64s(22, -1) + bytes(9), "the metadata have -1 bytes; 9 are left"),
    (GS + int64s(22, 4) + bytes(9), "the metadata have 4 bytes"),
    (GS + int64s(22, 11) + b"\x0b\0\0\0\x04a\0\x03\0\0\0", "BSON document: element 4 of kind 4 is invalid"),
    *((GS + int64s(38, len(document)) + bytes(16) + document, NO_DOCUMENT) for document in DOCUMENTS),
]


@pytest.mark.parametrize(("content", "message"), HEADERS, ids=lambda value: value if isinstance(value, str) else "")
def test_headers_and_documents_that_are_none(path, content, message):
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=message):
        len(SyrahSource(path))


def test_text_that_is_not_utf8_concerns_one_record_and_a_file_that_shrinks_all(path):
    source = SyrahSource(assemble(path, b"ok\xffbad", {"t": key([22, 24, 22], [2, 4, 2], "str")}))
    assert source[0] == source[2] == {"t": "ok"}
    refuses(source, [0, 1], r"byte 24, record 1: text is not UTF-8: invalid start byte", offset=24, index=1)
    os.truncate(path, 23)
    refuses(source, [0], "was changed while in use")


def test_only_writing_needs_pymongo(path, monkeypatch):
    write(path, [{"x": 1}])
    monkeypatch.setitem(sys.modules, "bson", None)
    assert len(SyrahSource(path)) == 1
    with pytest.raises(MissingDependencyError, match=r"format 'syrah' needs pymongo: pip install 'dataload\[syrah\]'"):
        SyrahWriter(path, overwrite=True)  # before a record is written


def numbers(table):
    return np.frombuffer(table, "<i8").tolist()


def parts_of(path):
    data = path.read_bytes()
    offset, length = (int.from_bytes(data[i : i + 8], "little") for i in (6, 14))
    return data[22:offset], bson.decode(data[offset : offset + length]), offset + length


def test_layout_byte_by_byte(path):
    write(path, [{"x": np.array([1, 2], np.int16), "t": "é"}, {"t": "", "x": np.array([3], np.int16)}])
    arrays, metadata, end = parts_of(path)
    data = path.read_bytes()
    assert (data[:6], arrays, end) == (b"GS\0\0\2\0", b"\1\0\2\0\xc3\xa9\3\0", len(data))
    assert list(metadata) == ["x", "t"]
    assert {k: (numbers(e["offset"]), numbers(e["size"]), e["dtype"]) for k, e in metadata.items()} == {
        "x": ([22, 28], [4, 2], "int16"), "t": ([26, 30], [2, 0], "str"),
    }  # fmt: skip
    assert set(metadata["x"]) == {"offset", "size", "dtype"}  # one dimension is what the original reads anyway
    records = [{"a": np.zeros((2, 3)), "s": np.zeros(()), "v": np.zeros((i, 2))} for i in range(3)]
    _, metadata, _ = parts_of(write(path, records, overwrite=True))  # entries that the original does not look at
    assert {k: (numbers(e["shape"]["ndim"]), numbers(e["shape"]["dims"])) for k, e in metadata.items()} == {
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
        *(
            [({"x": np.zeros(2), "t": np.array(["a"], "T")}, "field 't': an array of text, whose elements the format")]
            if hasattr(np.dtypes, "StringDType")  # from numpy 2
            else []
        ),
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
    arrays, _, _ = parts_of(path)
    assert len(arrays) == 2 * (16 + 1)


def test_a_first_record_that_does_not_fit(path):
    with SyrahWriter(path) as writer:
        for record, message in (
            ({}, "format 'syrah' does not store records without fields"),
            ({"a\0b": 1}, r"format 'syrah' does not allow zero bytes in field names: 'a\\x00b'"),
            ({"\ud800": 1}, "text cannot be encoded as UTF-8"),
        ):
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
    with SyrahWriter(path, overwrite=True) as writer, pytest.raises(ConfigError):
        writer.extend([{"x": np.zeros(2), "y": np.zeros(3)}] * 5)  # at once, or as many as have room
    assert len(SyrahSource(path)) == 3


FIELDS = st.lists(st.sampled_from(["<f4", "<i8", "u1", "<f4 3", "<f2 2 2", "bytes", "text", "ragged"]), max_size=8)


@given(FIELDS, st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=9), st.booleans(), st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_fields_read_together_are_those_read_one_by_one(tmp_path, kinds, records, rows, mapped, several):
    rng = np.random.default_rng(records)

    def value(kind, row):
        if kind == "bytes":
            return rng.bytes(row)
        if kind == "text":
            return "é" * row
        dtype, *dims = ["u1", row] if kind == "ragged" else kind.split()
        return rng.integers(0, 99, [*map(int, dims)]).astype(dtype)

    paths = [tmp_path / f"{number}.syr" for number in range(1 + several)]
    for path in paths:
        with SyrahWriter(path, overwrite=True) as writer:
            for row in range(records):
                writer.write({"x": np.float32(row)} | {f"{n}": value(kind, row) for n, kind in enumerate(kinds)})
    source = SyrahSource(paths, map=mapped)
    rows = [row % len(source) for row in rows]
    if "ragged" in kinds and len({row % records for row in rows}) > 1:
        rows = rows[:1]
    whole, names = source.read_batch(rows), [*source.fields][::-1]
    assert [*source.read_batch(rows, names)] == names
    for name in names:
        one = source.read_batch(rows, [name])[name]
        assert type(whole[name]) is type(one)
        same(whole[name], one)
        same([record[name] for record in source.read(rows)], [source[row][name] for row in rows])


def test_files_with_equal_metadata_share_tables_and_others_do_not(tmp_path):
    kinds = {
        "plain": lambda n: {"x": np.full(3, n, np.float32), "y": np.array(n)},
        "shaped": lambda n: {"x": np.full((3, 1), n, np.float32), "y": np.array(n)},
        "varying": lambda n: {"x": np.full(1 + n % 3, n, np.float32), "y": np.array(n)},
        "text": lambda n: {"x": f"{n:03}", "y": np.array(n)},
    }
    order = ["plain", "plain", "shaped", "shaped", "plain", "varying", "text", "text", "plain", "shaped"]
    written = [[kinds[kind](10 * file + row) for row in range(4)] for file, kind in enumerate(order)]
    paths = [str(write(tmp_path / f"{file}.syr", records)) for file, records in enumerate(written)]
    source = SyrahSource(paths)
    same([*source], [record for records in written for record in records])
    for file, records in enumerate(written):
        facts = source.look_at(paths[file])
        digest = hashlib.sha256((tmp_path / f"{file}.syr").read_bytes()).hexdigest()
        assert (facts.records, facts.sha256) == (4, digest if can_map() else None)
        assert facts.evidence.mtime_ns == os.stat(paths[file]).st_mtime_ns
        same([source[4 * file + row] for row in range(4)], records)
