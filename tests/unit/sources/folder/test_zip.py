"""ZIP archives as `zipfile` writes them, and those that nobody should."""

import re
import struct
import zipfile

import made_files
import numpy as np
import pytest
from made_files import image
from refusals import refuses

import dataload
from dataload.errors import CorruptFileError, UnsupportedFormatError


def pack(path, files, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("mapped", [True, False])
def test_content_is_that_of_zipfile(tmp_path, mapped):
    rng = np.random.default_rng(0)
    files = {f"{i:03d}.bin": rng.bytes(int(size)) for i, size in enumerate(rng.integers(0, 5000, 50))}
    path = pack(tmp_path / "a.zip", files, zipfile.ZIP_STORED)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = b"PK" * 100
        archive.writestr("zeros.bin", bytes(100_000))
        with archive.open("streamed.bin", "w", force_zip64=True) as stream:
            stream.write(b"abc" * 1000)
    with dataload.open(path, pattern="{key}.bin", map=mapped) as source, zipfile.ZipFile(path) as archive:
        assert len(source) == 52
        for record in source.read([*range(52), 3]):
            assert record["bin"] == archive.read(f"{record['__key__']}.bin")


def test_the_end_record_of_zip64(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    path = pack(tmp_path / "a.zip", {f"{i}.x": b"" for i in range(3)}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    change(8, b"\xff" * 12, entry=False)(data)  # numbers and sizes that do not fit
    path.write_bytes(data)
    with dataload.open(path, pattern="{key}.x") as source:
        assert len(source) == 3
    place = data.rindex(b"PK\6\7") + 8
    for offset, message in ((1 << 40, "the end record of ZIP64 lies outside"), (0, "expected the end record of ZIP64")):
        made_files.change(path, place, struct.pack("<Q", offset))
        with pytest.raises(CorruptFileError, match=message):
            dataload.open(path, pattern="{key}.x")


def test_large_numbers_are_in_the_extra_field(tmp_path):
    path = pack(tmp_path / "a.zip", {"a.x": b"hello"}, zipfile.ZIP_STORED)
    data = path.read_bytes()
    at = data.index(b"PK\1\2")
    entry = bytearray(data[at : at + 46 + 3])
    entry[20:28] = b"\xff" * 8
    entry[30:32] = struct.pack("<H", 20 + 5)
    extra = struct.pack("<HHB", 7, 1, 0) + struct.pack("<HHQQ", 1, 16, 5, 5)
    end = bytearray(data[at + 49 :])
    end[12:16] = struct.pack("<I", len(entry) + len(extra))
    path.write_bytes(data[:at] + entry + extra + end)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("a.x") == b"hello"
    with dataload.open(path, pattern="{key}.x") as source:
        assert source[0]["x"] == b"hello"
    path.write_bytes(data[:at] + entry + b"\2" + extra[1:5] + b"\2" + extra[6:] + end)
    with pytest.raises(CorruptFileError, match="a member lacks its sizes of ZIP64"):
        dataload.open(path, pattern="{key}.x")


def test_a_bomb_is_refused_before_it_is_inflated(tmp_path):
    path = pack(tmp_path / "a.zip", {"a.x": bytes(1_000_000)})
    message = r"the member 'a\.x' takes 1,000,000 bytes of memory"
    for _ in range(2):
        with dataload.open(path, pattern="{key}.x", max_record_bytes=999_999) as source:
            refuses(source, [0], message, path=str(path), index=0)
        damage(path, change(24, struct.pack("<I", 999_999)))
        message = r"the member 'a\.x': it should have 999,999 bytes and has more"


def change(at, value, entry=True):
    def apply(data):
        start = data.index(b"PK\1\2") if entry else data.rindex(b"PK\5\6")
        data[start + at : start + at + len(value)] = value

    return apply


UTF_8 = change(8, struct.pack("<H", 0x800))


def cut(data):
    del data[-30:]


def shift(data):
    data[data.rindex(b"PK\5\6") + 16] ^= 1


def damage(path, *changes):
    data = bytearray(path.read_bytes())
    for each in changes:
        each(data)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "no ZIP archive ends here: the file is truncated, or no archive"),
        (shift, "expected the entry of member 0|a directory of 2 members .* is impossible: the file is truncated"),
        (change(16, b"\0\0\1\0", entry=False), "a directory of 2 members in .* bytes at 65536 is impossible"),
        (change(8, b"\1\0\1\0", entry=False), "the number of members differs from the end record"),
        (change(28, b"\xff"), "the entry of member 0 ends outside"),
        *((change(at, b"\xff\xff\0\0"), r"the sizes or the offset of 'b/x\.png' are impossible") for at in (24, 42)),
        *((change(46, name), "is not the name of a file below this directory") for name in (b"../", b"/", b"a\\")),
        (change(46, b"\xff"), r"the name b'\\xff/x.png' is not UTF-8"),
        (change(46, b"c"), "two members are called 'c/x.png'"),
        (change(8, b"\1\0"), "'b/x.png' is encrypted: pack the files without a password"),
        (change(10, b"\x0c\0"), "'b/x.png' is compressed by method 12: pack the files stored or deflated"),
        (change(4, b"\1\0", entry=False), "is one of several parts of a ZIP archive: join them first"),
    ],
)
def test_damaged_directories(tmp_path, change, message):
    path = pack(tmp_path / "a.zip", {"b/x.png": image(0), "c/x.png": image(1)}, zipfile.ZIP_STORED)
    changes = [UTF_8, change] if "UTF-8" in message else [change]
    error = UnsupportedFormatError if re.search("encrypted|method|several", message) else CorruptFileError
    with pytest.raises(error, match=message) as caught:
        dataload.open(damage(path, *changes))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "it has no header"),
        (37, b"\xff\xff", "it cannot be inflated: "),
        (None, bytes(4), "its checksum is wrong: it is d"),
    ],
)
def test_damaged_members(tmp_path, offset, value, message):
    path = pack(tmp_path / "a.zip", {"a.txt": b"", "b/x.png": image(0), "b/y.png": image(1)})
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("b/x.png")
    start = member.header_offset
    checksum = path.read_bytes().rindex(struct.pack("<I", member.CRC))
    made_files.change(path, checksum if offset is None else start + offset, value)
    with dataload.open(path) as source:
        refuses(source, [1, 0], f"the member 'b/x.png': {message}", path=str(path), index=0, offset=start)
        assert source[1]["__key__"] == "b/y"
