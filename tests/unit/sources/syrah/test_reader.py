import os
import sys

import bson
import numpy as np
import pytest
from made_files import same

from dataload.errors import ConfigError, CorruptFileError, MissingDependencyError
from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.syrah.writer import SyrahWriter
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


def write(path, records):
    with SyrahWriter(path) as writer:
        writer.extend(records)
    return path


def test_fields_say_what_is_known(path):
    records = [
        {
            "fixed": np.zeros((2, 3), np.float32), "long": np.zeros(i), "wide": np.zeros((i, 2), np.int8),
            "any": np.zeros((1,) * i), "scalar": np.array(i), "text": "a" * i, "bytes": b"b" * i,
        }
        for i in range(3)
    ]  # fmt: skip
    assert {name: str(spec) for name, spec in SyrahSource(write(path, records)).fields.items()} == {
        "fixed": "float32 (2, 3)", "long": "float64 (?)", "wide": "int8 (?, ?)", "any": "float64",
        "scalar": "int64 ()", "text": "str ()", "bytes": "bytes ()",
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


LAYOUTS = {
    "end to end": ([22, 26, 30], [4, 4, 4]),
    "with gaps": ([22, 30, 38], [4, 4, 4]),
    "at odd places": ([23, 31, 35], [4, 4, 4]),
    "backwards": ([38, 30, 22], [4, 4, 4]),
    "shared": ([22, 22, 30], [4, 4, 4]),
    "overlapping": ([22, 23, 24], [4, 4, 4]),
    "of many lengths": ([22, 26, 23], [4, 12, 8]),
    "empty": ([22, 42, 30], [0, 0, 0]),
    "some empty": ([22, 42, 30], [4, 0, 8]),
    "one": ([27], [8]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_arrays_may_lie_anywhere(path, name, dtype):
    offsets, sizes = LAYOUTS[name]
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


def test_metadata_may_stand_first(path):
    document = bson.encode({"x": key([200], [8])})
    values = np.arange(2, dtype=np.float32)
    data = b"GS\0\0\2\0" + int64s(30, len(document)) + bytes(8) + document
    path.write_bytes(data.ljust(200, b"?") + values.tobytes() + b"junk")
    same(SyrahSource(path)[0], {"x": values})


E16 = bytes(16)
CORRUPT = {
    "empty document": ({}, "the metadata have no keys"),
    "a key that is a number": ({"x": 3}, "key 'x' has no document"),
    "no offset": ({"x": {"size": int64s(8), "dtype": "float32"}}, "key 'x' has no entry 'offset'"),
    "no size": ({"x": {"offset": int64s(22), "dtype": "float32"}}, "key 'x' has no entry 'size'"),
    "no dtype": ({"x": {"offset": int64s(22), "size": int64s(8)}}, "key 'x' has no entry 'dtype'"),
    "unknown dtype": ({"x": key(dtype="complex64")}, "key 'x' has dtype 'complex64'; the format supports bool, int8"),
    "a dtype that is a document": ({"x": key(dtype={"a": 1})}, r"key 'x' has dtype None"),
    "a dtype that is a list": ({"x": key(dtype=["str"])}, r"key 'x' has dtype None"),
    "a table that is text": ({"x": {**key(), "offset": "22"}}, "offset of key 'x' is not a table of int64: str"),
    "a table of odd length": ({"x": {**key(), "size": b"1234567"}}, "size of key 'x' is not a table of int64: 7 bytes"),
    "tables of two lengths": ({"x": key([22, 22], [8])}, "key 'x' has 2 offsets and 1 sizes"),
    "keys of two lengths": ({"x": key(), "y": key([22, 22], [8, 8])}, "key 'x' has 1 records, key 'y' has 2"),
    "negative size": ({"x": key([22], [-8])}, "key 'x' has -8 bytes at 22: a negative size"),
    "least size": ({"x": key([22], [-(2**63)])}, "a negative size"),
    "offset in the header": ({"x": key([18])}, "key 'x' has 8 bytes at 18: inside the header"),
    "negative offset": ({"x": key([-(2**63)])}, "inside the header"),
    "offset past the end": ({"x": key([10**6])}, "key 'x' has 8 bytes at 1000000: the file has"),
    "size past the end": ({"x": key([22], [10**6])}, "key 'x' has 1000000 bytes at 22: the file has"),
    "a sum that overflows": ({"x": key([2**63 - 8], [2**63 - 8])}, "the file has"),
    "inside the metadata": ({"x": key([30], [12])}, "key 'x' has 12 bytes at 30: inside the metadata"),
    "half an item": ({"x": key([22], [7])}, "key 'x' has 7 bytes at 22: not a multiple of the 4 bytes of float32"),
    "a shape of another size": ({"x": key(**shape([2], [3, 2]))}, "the shapes of key 'x' do not fit its sizes"),
    "a negative extent": ({"x": key(**shape([2], [-1, -2]))}, "the shapes of key 'x' do not fit"),
    "too few dims": ({"x": key(**shape([3], [2, 1]))}, "the shapes of key 'x' do not fit"),
    "too many dims": ({"x": key(**shape([1], [2, 1]))}, "the shapes of key 'x' do not fit"),
    "negative ndim": ({"x": key(**shape([-1], []))}, "the shapes of key 'x' do not fit"),
    "huge ndim": ({"x": key(**shape([2**62], []))}, "the shapes of key 'x' do not fit"),
    "a product that wraps": ({"x": key(**shape([3], [2**31 - 1] * 3))}, "the shapes of key 'x' do not fit"),
    "a product that wraps to the size": ({"x": key([22], [8], "uint8", **shape([4], [2**16] * 4))}, "do not fit"),
    "a zero that hides the others": ({"x": key([22], [0], **shape([4], [2**31 - 1] * 3 + [0]))}, "do not fit"),
    "a shape of no table": ({"x": key(shape={"ndim": 1, "dims": b""})}, "shape of key 'x' is not a table of int64"),
    "half a shape": ({"x": key(shape={"ndim": int64s(1)})}, "shape of key 'x' is not a table of int64: NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPT)
def test_metadata_that_contradict_the_file(path, name):
    metadata, message = CORRUPT[name]
    assemble(path, E16, metadata)
    with pytest.raises(CorruptFileError, match=message) as caught:
        len(SyrahSource(path))
    assert caught.value.path == str(path)
    assert caught.value.offset is not None


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
    *((GS + int64s(38, len(document)) + E16 + document, NO_DOCUMENT) for document in DOCUMENTS),
]


@pytest.mark.parametrize(("content", "message"), HEADERS, ids=lambda value: value if isinstance(value, str) else "")
def test_headers_and_documents_that_are_none(path, content, message):
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=message):
        len(SyrahSource(path))


def test_text_that_is_not_utf8_concerns_one_record_and_a_file_that_shrinks_all(path):
    source = SyrahSource(assemble(path, b"ok\xffbad", {"t": key([22, 24, 22], [2, 4, 2], "str")}))
    assert source[0] == source[2] == {"t": "ok"}
    with pytest.raises(CorruptFileError, match=r"byte 24, record 1: text is not UTF-8: invalid start byte") as caught:
        source.read([0, 1])
    assert (caught.value.offset, caught.value.index) == (24, 1)
    os.truncate(path, 23)
    for read in (source.read, source.read_batch):
        with pytest.raises(CorruptFileError, match="was changed while in use"):
            read([0])


def test_only_writing_needs_pymongo(path, monkeypatch):
    write(path, [{"x": 1}])
    monkeypatch.setitem(sys.modules, "bson", None)
    assert len(SyrahSource(path)) == 1
    with pytest.raises(MissingDependencyError, match=r"format 'syrah' needs pymongo: pip install 'dataload\[syrah\]'"):
        SyrahWriter(path, overwrite=True)  # before a record is written
