"""What our writers record in their files about how to read them."""

import json

import lmdb
import numpy as np
import pytest
from written import written

import dataload
from dataload.convert import convert
from dataload.sources.array_record.layout import BLOCK_SIZE
from dataload.sources.array_record.package import build_padding
from dataload.sources.options import build_recorded, parse_recorded
from dataload.sources.registry import find_destination

RECORDS = [{"features": np.full(3, i, np.float32), "label": i} for i in range(5)]
IMAGE = {"image.png": b"no image", "label": 3, "caption.txt": "cat"}
bytes_formats = pytest.mark.parametrize("suffix", ["array_record", "lmdb"])


def write(path, records=RECORDS, **options):
    return written(path, records, **options)


def recorded(path):
    entry, name = find_destination(str(path))
    return dict(entry.find_recorded([name]))


@bytes_formats
@pytest.mark.parametrize("codec", ["npz", "msgpack"])
def test_a_codec_is_recorded_and_the_caller_comes_first(tmp_path, suffix, codec):
    path = write(tmp_path / f"train.{suffix}", [{"x": [1, 2]}], codec=codec)
    assert recorded(path) == {"codec": codec}
    assert list(dataload.open(path)[0]["x"]) == [1, 2]
    for chosen in (None, "raw"):
        assert isinstance(dataload.open(path, codec=chosen)[0], bytes)
    assert dataload.open(path).fingerprint() == dataload.open(path, codec=codec).fingerprint()
    assert list(dataload.open([write(tmp_path / f"empty.{suffix}", []), path])[0]["x"]) == [1, 2]
    if suffix == "lmdb":  # keeps it when others write
        with lmdb.open(str(path), lock=False) as environment, environment.begin(write=True) as txn:
            assert [key for key, _ in txn.cursor()] == [b"0000000000"]
            txn.put(b"0000000001", dataload.open(path, codec="raw")[0])
        assert recorded(path) == {"codec": codec}
        assert len(dataload.open(path)) == 2


@bytes_formats
def test_bytes_and_codecs_of_users_are_not_recorded(tmp_path, suffix):
    class Own:
        name = "npz"  # not the built-in one

        def decode(self, data):
            return {"x": data}

        def encode(self, record):
            return bytes(3)

    for number, (records, options) in enumerate([([b"abc"], {}), ([{"x": 1}], {"codec": Own()}), ([], {})]):
        assert recorded(write(tmp_path / f"{number}.{suffix}", records, **options)) == {}


@pytest.mark.parametrize(
    "options", ["group_size:1", "group_size:1,uncompressed", "group_size:4", "group_size:1,brotli:9"]
)
def test_padding_is_built_as_the_package_does(tmp_path, options):
    path = write(tmp_path / "a.array_record", [b"abc" * 50_000] * 9, options=options)
    block = path.read_bytes()[-BLOCK_SIZE:]
    start, padding = build_padding(block, b"")
    assert block[start:] == padding, "with the hashes of the package"
    assert build_padding(block[:-1], b"") is build_padding(b"", b"") is build_padding(bytes(BLOCK_SIZE), b"") is None
    assert build_padding(block, bytes(BLOCK_SIZE)) is None


def test_conversions_keep_what_is_recorded(tmp_path):
    path, copy = write(tmp_path / "a.tar", [IMAGE]), tmp_path / "out" / "b.tar"
    copy.parent.mkdir()
    convert(dataload.open(path), copy)
    assert copy.read_bytes() == path.read_bytes()
    assert dataload.open(copy)[0] == dataload.open(copy.parent)[0] == dataload.open(path)[0]
    convert(dataload.open(write(tmp_path / "a.array_record", codec="npz")), tmp_path / "b.lmdb")
    assert recorded(tmp_path / "b.lmdb") == {"codec": "npz"}


def test_hostile_records_are_ignored():
    assert parse_recorded(build_recorded({"codec": "npz"}) + b"\0\0x", ("codec",)) == {"codec": "npz"}
    texts = [
        *('{"codec": "pickle"}', '{"codec": 1}', '{"index": "/etc/passwd"}', '{"codec": "npz"', "[]", "null", ""),
        *("[" * 200, '{"codec": "' + "x" * 300 + '"}'),
    ]
    for data in (*(b"dataload: " + text.encode() for text in texts), b"dataload: \xff"):
        assert parse_recorded(data, ("codec",)) == {}
    assert parse_recorded(json.dumps({"codec": "npz"}).encode(), ("codec",)) == {}


@pytest.mark.parametrize("head", [b"", bytes(1024), b"garbage" * 200])
@pytest.mark.parametrize("suffix", ["tar", "array_record", "mdb"])
def test_files_of_others_record_nothing(tmp_path, suffix, head):
    path = tmp_path / f"x.{suffix}"
    assert recorded(path) == {}
    path.write_bytes(head)
    assert recorded(path) == {}
