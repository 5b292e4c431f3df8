import json
import pickle
import shutil
import struct
from pathlib import Path

import pytest
from made_files import change
from refusals import refuses

import dataload
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.mds import columns
from dataload.sources.mds.reader import parse_index

GOLDEN = Path(__file__).parents[3] / "golden/mds"
LIMIT = 1 << 30


@pytest.fixture
def small(tmp_path):
    """Seven samples in four shards, compressed by zstd, and the options to read them."""
    shutil.copytree(GOLDEN / "zstd", tmp_path / "data")
    return tmp_path / "data", {"remote": {"cache": tmp_path / "cache", "budget": "1MB"}}


def changed(**changes):
    index = json.loads((GOLDEN / "all/index.json").read_text())
    index["shards"][0].update(changes)
    return json.dumps(index).encode()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "JSONDecodeError"),
        (b"[]", "TypeError"),
        (b'{"shards": []}', "it lists no shard"),
        (b'{"shards": 3}', "'3' is not list"),
        (changed(samples=-1), r"-1 is not in \[0, 4294967295\]"),
        (changed(samples=True), "'True' is not int"),
        (changed(samples=1 << 40), "1099511627776 is not in"),
        (changed(column_sizes=[1]), r"column_sizes \[1\] contradict column_encodings"),
        (changed(column_names=["a"], column_encodings=["number"]), "'a' has the encoding 'number', which is unknown"),
        (changed(column_names=["a", "a"], column_encodings=["int", "int"]), "two columns have the same name"),
        (bytes((64 << 20) + 1), "an index has at most 67,108,864 bytes"),
        (changed(format="json"), "a shard is 'json' of version 2; only 'mds' of version 2"),
        (changed(version=3), "a shard is 'mds' of version 3; only 'mds' of version 2"),
        (changed(column_names=["a"], column_encodings=["ndarray:int8:0"]), r"column 'a' has the shape \(0,\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_a_damaged_index(data, match):
    error = UnsupportedFormatError if "only 'mds'" in match else CorruptFileError
    with pytest.raises(error, match=f"^d/index.json: .*{match}"):
        parse_index(data, "d/index.json")


@pytest.mark.parametrize(
    ("encoding", "data", "match"),
    [
        *(("ndarray", head, "an array does not begin with its dtype and shape") for head in (b"\x07", b"\x08\x08\x01")),
        ("ndarray", b"\x08\x04\x05abc", r"an array of uint8 \(5,\) has 3 bytes"),
        ("ndarray:int16", b"\x07" + b"\xff" * 8 + b"ab", r"an array of int16 \(18446744073709551615,\) has 2 bytes"),
        ("str", b"\xff", "text is not UTF-8"),
        ("str_int", b"1.5", "expected a number as text, found b'1.5'"),
        ("str_float", b"one", "expected a number as text, found b'one'"),
        ("json", b"{", "invalid JSON"),
        ("jpeg", b"\x89PNG\r\n\x1a\n", "an image that is named as JPEG cannot be decoded as such: its content is PNG"),
        ("pil", struct.pack("<3I", 5, 2, 1) + b"L" + b"abc", "a PIL image of 2 x 5 pixels of mode L has 3 bytes"),
        ("list[png]", b"\0" * 7, "a list of 1 elements has 7 bytes"),
        ("list[png]", struct.pack("<2I", 0, 1 << 30), "a list of 1073741824 elements has 8 bytes"),
        ("jpeg_array", struct.pack("<2I", 1, 9) + b"ab", "elements of a list end at byte 17, and the list at byte 10"),
        ("jpeg_array", struct.pack("<3I", 2, 0, 0), "a list of 2 elements takes 1,024 bytes of memory"),
        ("pil", struct.pack("<3I", 1, 1, 4) + b"CMYK1234", "a PIL image of mode 'CMYK'; supported are L, RGB, RGBA, R"),
        ("pil", struct.pack("<3I", 20, 20, 1) + b"L" + bytes(400), "an image takes 1,200 bytes of memory"),
        ("pkl", b"", "a pickle cannot be loaded: EOFError"),
    ],
)
def test_a_damaged_value(encoding, data, match):
    error = UnsupportedFormatError if "supported" in match else CorruptFileError
    limit = 1000 if "takes 1," in match else LIMIT
    decode = columns.parse_column("x", encoding).decoder(images=True, allow_pickle=True, limit=limit)
    with pytest.raises(error, match=match):
        decode(memoryview(data))


def test_damage_names_file_offset_record_and_field(tmp_path):
    shutil.copytree(GOLDEN / "all", tmp_path / "data")
    shard = tmp_path / "data/shard.00000.mds"
    data = shard.read_bytes()
    begin, end = struct.unpack_from("<2I", data, 8)  # of the second sample
    first = struct.unpack_from("<I", data, 4)[0]
    for place, value, offset, index, message in (
        (data.index(b'{"a"', begin, end), b"\xff", begin, 1, "field 'json': invalid JSON"),
        (begin, struct.pack("<I", 1), begin, 1, "the sizes of the fields do not add up to the size of the sample"),
        (8, struct.pack("<I", first + 5), first, 0, "the sample has fewer than 96 bytes"),
    ):
        shard.write_bytes(data)
        change(shard, place, value)
        message = rf"00000\.mds, byte {offset}, record {index}: {message}"
        refuses(dataload.open(tmp_path / "data"), [index], message, offset=offset, index=index)
    for name, limit, message in (
        ("images", 3600, r"shard\.00000\.mds, record 0: the record takes .* bytes of memory"),
        ("all", 5000, "a sample of 21 columns takes 10,752 bytes of memory"),
    ):
        with pytest.raises(CorruptFileError, match=message):
            dataload.open(GOLDEN / name, max_record_bytes=limit)[0]


def test_a_shard_that_is_not_that_of_the_index(small, tmp_path):
    directory, options = small
    shard, other = directory / "shard.00000.mds.zstd", directory / "shard.00003.mds.zstd"
    content = shard.read_bytes()
    for damaged, match in (
        (content[:-5], "cannot be decompressed to the 415 bytes that the index gives: incomplete frame"),
        (b"", "415"),
        (other.read_bytes(), "the shard has 309 bytes, and 415 in the index"),
    ):
        shard.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match=rf"shard\.00000\.mds\.zstd.*{match}"):
            dataload.open(directory, **options)[0]
    index = directory / "index.json"
    index.write_text(index.read_text().replace('"zstd:7"', '"lz4"'))
    with pytest.raises(UnsupportedFormatError, match="is compressed as 'lz4'; supported are br, bz2, gz, snappy, zstd"):
        dataload.open(directory, **options)[0]


def test_a_shard_is_decompressed_once_by_all_processes_and_again_if_it_changes(small, tmp_path, monkeypatch):
    import cramjam

    directory, options = small
    with dataload.open(directory, **options) as source:
        expected = list(source)
        source[0:0]
        copy = pickle.loads(pickle.dumps(source))
    monkeypatch.setattr(cramjam.zstd, "decompress_into", lambda *_: pytest.fail("again"))
    assert list(copy) == expected
    monkeypatch.undo()
    (directory / "shard.00000.mds.zstd").write_bytes(b"changed")
    with pytest.raises(CorruptFileError, match="cannot be decompressed"):
        dataload.open(directory, **options)[0]


def test_an_index_that_has_changed_since_the_source_was_pickled(small):
    directory, options = small
    data = pickle.dumps(dataload.open(directory, **options))
    index = directory / "index.json"
    index.write_text(index.read_text().replace("shard.00000", "shard.00009"))
    with pytest.raises(CorruptFileError, match=r"index\.json: the file has been rewritten since it was opened"):
        pickle.loads(data)[0]


def test_fields_and_names(tmp_path):
    index = shutil.copy(GOLDEN / "all/index.json", tmp_path)
    assert len(dataload.open(index)) == 9, "no shard is opened yet"
    source = dataload.open(GOLDEN / "all")
    assert [str(source.fields[name]) for name in ("fixed", "any", "str")] == ["int16 (2, 3)", "unknown", "str ()"]
    with pytest.raises(ConfigError, match=r"index\.json has no field 'labl'"):
        dataload.open(GOLDEN / "all", fields=["labl"])
    assert [*dataload.open(GOLDEN / "all", fields=["str", "int"])[1]] == ["str", "int"]
    with pytest.raises(SourceNotFoundError):
        dataload.open("mds:" + str(GOLDEN / "nothing"))
    twice = dataload.open([GOLDEN / "all"] * 2, fields=["int"])
    assert (len(twice), twice.read_batch([0, 9])["int"].tolist()) == (18, [-(2**40)] * 2)
