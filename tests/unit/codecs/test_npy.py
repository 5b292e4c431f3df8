import pytest

from dataload.codecs.npz import parse_npy
from dataload.errors import CorruptFileError


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
