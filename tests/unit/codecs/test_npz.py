"""The npz codec against numpy and the zip reader of the standard library, and single arrays."""

import io
import struct
import tracemalloc
import zipfile
import zlib
from itertools import count

import numpy as np
import pytest

from dataload.codecs.npz import decode, encode, parse_npy
from dataload.errors import ConfigError, CorruptFileError
from dataload.testing.compare import difference

ARRAYS = {
    "x": np.arange(6, dtype=np.float32).reshape(2, 3),
    "zero": np.array(7),
    "empty": np.zeros((0, 4), np.uint16),
    "big": np.array([1, 258], ">i4"),
    "text": np.array(["ab", ""]),
    "bytes": np.array([b"ab", b""]),
    "time": np.array(["2020-01-02T03"], "M8[h]"),
    "half": np.array([1.5], np.float16),
    "complex": np.array([1 + 2j], np.complex64),
    "flag": np.array([True, False]),
    "ümlaut": np.arange(2),
    "a.npy": np.arange(3),
}


def saved(save=np.savez, **arrays):
    stream = io.BytesIO()
    save(stream, **arrays)
    return stream.getvalue()


def archive(members, compression=zipfile.ZIP_STORED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as out:
        for name, content in members:
            out.writestr(name, content)
    return stream.getvalue()


def npz(header, content=b"", version=1):
    text = header.encode() if isinstance(header, str) else header
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return archive([("a.npy", b"\x93NUMPY" + bytes((version, 0)) + length + text + content)])


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_saves(save):
    found = decode(saved(save, **ARRAYS))
    assert difference(found, ARRAYS, "record") is None
    assert all(value.flags.writeable and value.flags.c_contiguous for value in found.values())
    assert difference(decode(memoryview(saved(save, **ARRAYS))), ARRAYS, "record") is None
    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    found = decode(saved(save, x=fortran))
    assert found["x"].flags.c_contiguous
    assert difference(found, {"x": np.ascontiguousarray(fortran)}, "record") is None
    assert decode(saved(save)) == {}


@pytest.mark.parametrize("arrays", [ARRAYS, {}], ids=["some", "none"])
def test_what_is_not_compressed_needs_no_zipfile(arrays, monkeypatch):
    archives = saved(**arrays), encode(arrays)
    described = zipfile.ZipInfo("a.bin")
    described.extra, described.comment = b"ab\0\0", b"comment"
    other = archive([(described, b"x"), ("b.bin", b"y")])
    monkeypatch.setattr(zipfile, "ZipFile", None)
    assert [difference(decode(data), arrays, "record") for data in archives] == [None, None]
    assert decode(other) == {"a": b"x", "b": b"y"}


@pytest.mark.parametrize(
    ("field", "change", "found"),
    [
        ("aXb", lambda data: data.replace(b"aXb", b"a\0b"), "a"),
        ("é", lambda data: data.replace(b"\0\x08\0\0", bytes(4)), "├⌐"),  # without the flag for UTF-8
        ("a", lambda data: data[:-14] + b"\2\0\2\0" + data[-10:], "a"),  # says that it has two members
    ],
)
def test_what_only_zipfile_reads(field, change, found):
    """`_stored` leaves these to `zipfile`, whose answer is that of other programs."""
    data = change(encode({field: b"x"}))
    assert decode(data) == {found: b"x"}


def test_numpy_loads_what_is_encoded():
    with np.load(io.BytesIO(encode({**ARRAYS, "b": b"\0\0", "s": "ü\0"})), allow_pickle=False) as found:
        names = [name for name in ARRAYS if name != "a.npy"]
        assert difference({n: found[n] for n in names}, {n: ARRAYS[n] for n in names}, "record") is None
        assert (found["b.bin"], found["s.txt"]) == (b"\0\0", "ü\0".encode())


def test_equal_records_give_equal_bytes():
    crc, name = zlib.crc32(b"xy").to_bytes(4, "little").hex(), b"ab.bin".hex()
    shared = f"1400 0000 0000 0000 2100 {crc} 02000000 02000000 0600 0000"
    entry = f"504b0102 1400 {shared} 0000 0000 0000 00000000 00000000 {name}"
    end = "504b0506 0000 0000 0100 0100 34000000 26000000 0000"
    assert encode({"ab": b"xy"}) == bytes.fromhex(f"504b0304 {shared} {name} 7879 {entry} {end}")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", np.array([object()]), "field 'x': an array of object would have to be pickled"),
        ("x", object(), "field 'x': an array of object would have to be pickled"),
        ("x", [[1], [2, 3]], "field 'x': list is not an array: setting an array element with a sequence"),
        ("x", np.zeros(2, "f4,i4"), "field 'x': an array of .* is not supported"),
        ("x", [b"a\0"], "field 'x': list is not an array: numpy makes text of numbers among text, and cuts zeros off"),
        ("x", ([1, "a"],), "field 'x': tuple is not an array: numpy makes text of numbers"),
        ("x", None, "field 'x': an array of object would have to be pickled"),
        ("a\0b", 1, "field '.*: a name in a zip archive must have no NUL and at most 16000 characters$"),
        ("x" * 16_001, 1, "field '.*: a name in a zip archive must have no NUL and at most 16000 characters$"),
    ],
)
def test_what_it_lacks(name, value, message):
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        encode({name: value})
    assert caught.value.key == name


def test_a_dtype_of_another_package_is_refused():
    with pytest.raises(ConfigError, match="an array of float8_e5m2 is not supported"):
        encode({"x": np.zeros(2, pytest.importorskip("ml_dtypes").float8_e5m2)})


def test_records_that_are_too_large(monkeypatch):
    encode(dict.fromkeys(map(str, range(65_534)), b""))
    with pytest.raises(ConfigError, match=r"a record of 65535 fields; codec 'npz' supports 65534$"):
        encode(dict.fromkeys(map(str, range(65_535)), b""))
    assert decode(encode({"x" * 16_000: b"a"})) == {"x" * 16_000: b"a"}
    monkeypatch.setattr("dataload.codecs.npz._MAX_BYTES", 200)  # which is 4 GB
    assert decode(encode({"a": bytes(100), "b": bytes(65)}))["b"] == bytes(65)
    with pytest.raises(ConfigError, match="a record of more than 200 bytes, the limit of codec 'npz'"):
        encode({"a": bytes(100), "b": bytes(66)})


def objects():
    stream = io.BytesIO()
    np.savez(stream, x=np.array([{}], object), allow_pickle=True)
    return stream.getvalue()


def claims(size):
    """An archive of one deflated member whose directory claims `size` bytes."""
    data = bytearray(archive([("a.npy", bytes(100))], zipfile.ZIP_DEFLATED))
    place = data.index(b"PK\1\2")
    struct.pack_into("<I", data, place + 24, size)
    return bytes(data)


def overlapping(count):
    """An archive whose `count` entries all mean the same large member."""
    data = encode({"a": bytes(100_000)})
    place = data.index(b"PK\1\2")
    entry, end = data[place:-22], bytearray(data[-22:])
    struct.pack_into("<HHII", end, 8, count, count, len(entry) * count, place)
    return data[:place] + entry * count + bytes(end)


def moved(data):
    """An archive whose directory has a member near the end of the data."""
    name = data.index(b"PK\1\2") + 46
    return data[: name - 4] + (len(data) - 10).to_bytes(4, "little") + data[name:]


def encrypted():
    data = encode({"a": bytes(100)})
    place = data.index(b"PK\1\2")
    return data[:6] + b"\1" + data[7 : place + 8] + b"\1" + data[place + 9 :]


SHARED = "the directory of the archive contradicts the header of a member at byte 0: other programs"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"not an .npz archive \(0 bytes\): File is not a zip file"),
        (b"PK\3\4" * 50, "not an .npz archive .*not a zip file"),
        (encode(ARRAYS)[:-30], "not an .npz archive"),
        (encode(ARRAYS).replace(b"\0\0\x80\x3f", b"\0\0\x81\x3f"), "not an .npz archive .*Bad CRC-32 for file 'x.npy'"),
        (encode(ARRAYS).replace(b"PK\1\2", b"PK\1\3"), "not an .npz archive .*Bad magic number for central directory"),
        (encode({"ü": b""}).replace("ü".encode(), b"\xff\xff"), "not an .npz archive .*invalid start byte"),
        (encode({"a": b""}).replace(b"PK\5\6", b"PK\5\7"), "not an .npz archive .*not a zip file"),
        (moved(encode({"a": b"xyz"})), "not an .npz archive"),
        (encode({"a": b"xyz"}).replace(b"\0\0\0\0\0\0\x21", b"\0\0\x08\0\0\0\x21"), "not an .npz archive"),
        (encrypted(), "not an .npz archive .* is encrypted, password required"),
        (objects(), r"member 'x.npy' of the archive: an array of dtype '\|O': objects would have to be unpickled"),
        (archive([("a.npy", b"x"), ("a.bin", b"y")]), "member 'a.npy' of the archive: a .npy file must start with"),
        (archive([("a.bin", b"x"), ("a.txt", b"y")]), "the archive has two members for field 'a'"),
        (archive([("a.txt", b"\xff")]), "member 'a.txt' of the archive: 'utf-8' codec can't decode"),
        (archive([("a.bin", b"x")], zipfile.ZIP_BZIP2), "member 'a.bin' of the archive claims 1 bytes by compression "),
        (claims(1032 * len(claims(0))), "contradicts the header of a member at byte 0"),
        (claims(1032 * len(claims(0)) + 1), "member 'a.npy' of the archive claims"),
        (claims(2**31), "member 'a.npy' of the archive claims 2147483648 bytes by compression method 8; the record"),
        (
            npz(HEADER, b"12345"),
            r"member 'a.npy' of the archive: a .npy file of float32 \(1,\) has 4 bytes of items",
        ),
        (npz(HEADER.replace("'<f4'", "[('a', '<f4')]"), b"1234"), "a structured array, .*, which is not supported"),
        (overlapping(2000), SHARED),
    ],
    ids=count(),
)
def test_bytes_that_are_no_record(data, message):
    with pytest.raises(CorruptFileError, match=message):
        decode(data)


THREE = {"a": np.arange(2), "b": np.arange(3), "c": np.arange(4)}


def edit(data, change):
    """Replace the directory of an archive of three members by `change(entries)`."""
    place = data.index(b"PK\1\2")
    entries = [b"PK\1\2" + entry for entry in data[place:-22].split(b"PK\1\2")[1:]]
    assert len(entries) == 3
    entries = change(entries)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(entries), len(entries), sum(map(len, entries)), place, 0)
    return data[:place] + b"".join(entries) + end


CONTRADICTIONS = {
    "the first is missing": lambda data: edit(data, lambda entries: entries[1:]),
    "one is missing": lambda data: edit(data, lambda entries: [entries[0], entries[2]]),
    "the last is missing": lambda data: edit(data, lambda entries: entries[:2]),
    "all are missing": lambda data: edit(data, lambda _: []),
    "one is renamed": lambda data: edit(data, lambda entries: [entries[0].replace(b"a.npy", b"z.npy"), *entries[1:]]),
    "two are exchanged": lambda data: edit(
        data, lambda e: [e[0].replace(b"a.npy", b"b.npy"), e[1].replace(b"b.npy", b"a.npy"), e[2]]
    ),
    "bytes before": lambda data: b"GIF89a" + data,
    "another size": lambda data: data.replace(data[18:22], bytes(4), 1),
    "another checksum": lambda data: data.replace(data[14:18], bytes(4), 1),
}  # fmt: skip


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, lambda stream, **arrays: stream.write(encode(arrays))])
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_directories_that_contradict_the_members(save, name):
    data = saved(save, **THREE)
    assert difference(decode(data), THREE, "record") is None
    if name == "another size" and data[18:22] == b"\xff" * 4:
        return  # numpy writes sizes elsewhere
    told = r"directory of the archive contradicts the header of a member at byte|File name in directory"
    with pytest.raises(CorruptFileError, match=told):
        decode(CONTRADICTIONS[name](data))


def peak(function):
    tracemalloc.start()
    try:
        function()
    finally:
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found


def test_what_would_expand_beyond_the_limit_is_refused_before_it_does():
    data = saved(np.savez_compressed, a=np.zeros(200_000), b=np.zeros(200_000))
    told = "an archive of 2 members takes 3,200,256 bytes of memory, and max_record_bytes is 1,000,000: the file is "

    def refused(limit, message):
        with pytest.raises(CorruptFileError, match=message):
            decode(data, limit)

    assert peak(lambda: refused(1_000_000, told)) < 1_000_000
    refused(3_200_255, "max_record_bytes is 3,200,255")
    assert len(decode(data, 3_200_256)["b"]) == 200_000


def test_a_member_that_claims_less_than_it_has_is_not_expanded():
    data = bytearray(archive([("a.bin", bytes(5_000_000))], zipfile.ZIP_DEFLATED))
    for place, at in ((0, 22), (data.index(b"PK\1\2"), 24)):
        struct.pack_into("<I", data, place + at, 100)

    def refused():
        with pytest.raises(CorruptFileError, match="Bad CRC-32"):
            decode(bytes(data))

    assert peak(refused) < 1_000_000


def npy(header: str, items: bytes = b"", version: int = 1) -> bytes:
    text = header.encode()
    return b"\x93NUMPY" + bytes((version, 0)) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + items


GOOD = "{'descr': '<i4', 'fortran_order': False, 'shape': (2,)}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a .npy file must start with .*, found b''"),
        (b"\x93NUMPY\x01", "a .npy file must start with"),
        (b"PK\3\4 not an array", "a .npy file must start with .*, found b'PK"),
        (npy(GOOD, bytes(8), 4), "a .npy file of version 4.0; supported are 1.0, 2.0 and 3.0"),
        (npy(GOOD)[:9], "a .npy file must start with"),
        (npy(GOOD)[:10], "the header of a .npy file claims to end at byte 65 of 10"),
        (npy(GOOD)[:40], "the header of a .npy file claims to end at byte 65 of 40"),
        (npy(f"{GOOD:10003}", bytes(8)), "the header of a .npy file claims to end at byte 10013"),
        (npy(GOOD, bytes(7)), r"a .npy file of int32 \(2,\) has 8 bytes of items, found 7"),
        (npy(GOOD, bytes(9)), r"has 8 bytes of items, found 9"),
        (npy("{'descr': '<i4'"), "the header of a .npy file is invalid"),
        (npy("7"), "the header of a .npy file is invalid"),
        (npy("{}"), r"the header of a .npy file has the keys \[\]"),
        (npy(GOOD.replace("}", ", 'more': 1}")), r"has the keys \['descr', 'fortran_order', 'more', 'shape'\]"),
        (npy(GOOD).replace(b"NUMPY\1\0", b"NUMPY\1\xff"), "a .npy file of version 1.255; supported are"),
        (npy("(" * 9000), "the header of a .npy file is invalid"),
        (npy(GOOD.replace("(2,)", "(-1,)")), "the header of a .npy file is invalid: negative dimensions"),
        (npy(GOOD.replace("(2,)", "(2**70,)")), "the header of a .npy file is invalid"),
        (npy(GOOD.replace("(2,)", f"({2**70},)")), "the header of a .npy file is invalid"),
        (npy(GOOD.replace("(2,)", f"({2**40}, {2**40})")), "the header of a .npy file is invalid"),
        (npy(GOOD.replace("(2,)", str((1,) * 99))), "the header of a .npy file is invalid"),
        (npy(GOOD.replace("(2,)", "[2]"), bytes(8)), r"gives the shape \[2\], order False"),
        (npy(GOOD.replace("False", "0"), bytes(8)), r"gives the shape \(2,\), order 0"),
        (npy(GOOD.replace("<i4", "|O"), bytes(16)), "dtype '|O': objects would have to be unpickled"),
        (npy(GOOD.replace("<i4", "what"), bytes(8)), "dtype 'what': not a plain dtype"),
        (npy(GOOD.replace("<i4", "<f3"), bytes(8)), "an array of dtype '<f3': "),
        (npy(GOOD.replace("<i4", "<M8[x]"), bytes(8)), r"an array of dtype '<M8\[x\]': "),
        (npy(GOOD.replace("<i4", "<U0")), "an array of dtype '<U0': items of zero bytes"),
        (npy(GOOD.replace("'<i4'", "[('a', '|O')]"), bytes(16)), "objects would have to be unpickled"),
    ],
)
def test_what_is_no_array(data, message):
    with pytest.raises(CorruptFileError, match=message):
        parse_npy(data)


@pytest.mark.parametrize(("version", "name"), [(1, "Ã¼"), (2, "Ã¼"), (3, "ü")])
def test_versions(version, name):
    assert parse_npy(npy(f"{GOOD:10000}", b"\1\0\0\0\2\0\0\0", version)).tolist() == [1, 2]
    assert parse_npy(npy(GOOD.replace("2", "0"), version=version)).shape == (0,)
    assert parse_npy(npy(GOOD.replace("'<i4'", "[('ü', '<i4')]"), bytes(8), version)).dtype.names == (name,)
