import io
import tarfile
from unittest.mock import Mock

import pytest

from dataload.errors import ChangedFileError, CorruptFileError, UnsupportedFormatError
from dataload.sources.tar.header import BLOCK, END, build_header, is_plainly, is_tar, padded, parse_header, scan


def members(data: bytes, **options):
    reads: list[tuple[int, int]] = []

    def read(offset, length):
        reads.append((offset, length))
        return data[offset : offset + length]

    found = list(scan(read, len(data), "x.tar", **options))
    return found, reads


def archive(*files: tuple[str, bytes], kind=tarfile.USTAR_FORMAT, **info) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as tar:
        for name, data in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            for key, value in info.items():
                setattr(entry, key, value)
            tar.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def header(name: bytes = b"a.txt", size: int = 0, kind: bytes = b"0", **fields: bytes) -> bytes:
    """A header with other bytes at ``at_<offset>``, and the checksum that belongs to them."""
    block = bytearray(build_header(name, size))
    block[156:157] = kind
    for place, data in fields.items():
        start = int(place.removeprefix("at_"))
        block[start : start + len(data)] = data
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        (b"x" * 100, 1),
        (b"x" * 101, 3),
        (b"d" * 155 + b"/" + b"x" * 100, 1),
        (b"d" * 156 + b"/x", 3),
        (b"d" * 50 + b"/" + b"x" * 101, 3),
        (b"d" * 50 + b"/" + b"x" * 100, 1),
        (b"/" + b"x" * 100, 3),
        (b"d" * 120 + b"/", 3),
        (b"\xff.b", 1),
        (b"\xff" * 155 + b"/" + b"\xff" * 100, 1),
    ],
)
def test_long_names_take_more_blocks(name, blocks):
    built = build_header(name, 5)
    assert len(built) == blocks * BLOCK
    if blocks > 1:
        assert parse_header(built[:BLOCK], "x", 0).name == b"PaxHeaders/" + name[:80]
        assert parse_header(built[-BLOCK:], "x", 0).name == name[:100]
    assert members(built + b"hello".ljust(BLOCK, b"\0") + END)[0] == [(name, blocks * BLOCK, 5)]
    info = tarfile.TarInfo.frombuf(built[-BLOCK:], "utf-8", "surrogateescape")
    assert (info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode) == (0, 0, 0, "", "", 0o644)


def test_sizes_beyond_eleven_octal_digits_stand_in_a_record():
    size = 8**11
    assert len(build_header(b"big.bin", size - 1)) == BLOCK
    built = build_header(b"big.bin", size)
    assert parse_header(built[-BLOCK:], "x", 0).size == 0
    with tarfile.open(fileobj=io.BytesIO(built + END)) as tar:
        assert tar.next().size == size
    found = next(scan(lambda offset, length: built[offset : offset + length], len(built) + size, "x"))
    assert found == (b"big.bin", len(built), size)


@pytest.mark.parametrize("name", [b"\xff\x80\x7f.txt", b"plain.txt"])
def test_sums_of_unsigned_and_of_signed_bytes(name):
    """Some old programs have written the latter."""
    block = header(name)
    before, after = block[:148], block[156:]
    bytes_summed = before + b" " * 8 + after
    sums = {sum(bytes_summed), sum(byte - 256 if byte > 127 else byte for byte in bytes_summed)}
    assert {total for total in range(8_000) if is_tar(before + b"%06o\0 " % total + after)} == sums
    assert all(is_tar(before + digits % max(sums) + after) for digits in (b"%07o\0", b"%08o"))
    assert not is_tar(block[:-1])


@pytest.mark.parametrize(
    ("field", "size"),
    [
        *((b"%011o\0" % 5, 5), (b"         17 ", 15), (b"17\0 garbage  ", 15), (bytes(12), 0)),
        *((b"\x80" + (300).to_bytes(11, "big"), 300), (b"\x80" + bytes(3) + (1 << 62).to_bytes(8, "big"), 1 << 62)),
    ],
)
def test_octal_and_binary_sizes(field, size):
    assert parse_header(header(at_124=field), "x", 0).size == size


def test_an_archive_without_an_end_may_have_been_cut_off():
    with pytest.warns(UserWarning, match=r"^x.tar ends without blocks of zeros: it may have been cut off"):
        found, _ = members(header())
    assert len(found) == 1
    assert len(members(header() + bytes(BLOCK))[0]) == 1


def test_what_is_plainly_a_regular_file():
    assert all(is_plainly(header(b"a.x", 5, kind), b"a.x", 5) for kind in (b"0", b"\0", b"7"))
    others = header(b"a.x", 5, b"2"), header(b"a.x", 5, at_345=b"d"), header(b"a.x", 5, at_257=b"other")
    assert not any(is_plainly(each, b"a.x", 5) for each in (*others, header(b"a.xy", 5), header(b"a.x", 6)))


@pytest.mark.parametrize(("size", "length"), [((1 << 17) - 1024, 1 << 18), ((1 << 17) - 512, 1 << 12)])
def test_reads_are_long_where_headers_are_near(size, length):
    """Of four headers beside each other, the first read finds all; then a member has `size` bytes."""
    data = b"".join([header(b"a")] * 4 + [header(b"b", size), bytes(size), header(b"c"), END])
    found, reads = members(data)
    after = 5 * BLOCK + size
    assert [member.name for member in found] == [*[b"a"] * 4, b"b", b"c"]
    assert reads == [(0, 1 << 12), (after, length)]
    name = b"n" * 10_000
    _, reads = members(header(b"x", 10_000, b"L") + name.ljust(padded(10_000), b"\0") + header() + END)
    assert reads[:2] == [(0, 1 << 12), (BLOCK, 1 << 18)]


def test_only_regular_files_are_members():
    regular = [b"0", b"\0", b"7", b"V"]
    kinds = [*regular, b"1", b"2", b"3", b"4", b"5", b"6"]
    # A size in the header of a link or directory counts for nothing.
    data = b"".join(header(kind + b".txt", 0 if kind in regular else 700, kind) for kind in kinds)
    data += header(b"old directory/", 700, b"\0")
    found, _ = members(data + END)
    assert [member.name for member in found] == [b"0.txt", b"", b"7.txt"]


def pax(kind: bytes, *records: bytes) -> bytes:
    data = b"".join(records)
    return header(b"PaxHeaders/x", len(data), kind) + data.ljust(padded(len(data)), b"\0")


def test_pax_records_of_one_member_and_of_all():
    data = b"".join(
        (
            pax(b"g", b"19 comment=a = b c\n", b"13 path=all\n\n"),
            header(b"a"),
            pax(b"x", b"17 path=only this"[:16] + b"\n", b"10 size=5\n"),
            header(b"b", 700) + b"hello".ljust(BLOCK, b"\0"),
            header(b"c"),
            END,
        )
    )
    found, _ = members(data)
    assert [(member.name, member.size) for member in found] == [(b"all\n", 0), (b"only thi", 5), (b"all\n", 0)]


@pytest.mark.parametrize("record", [b"6 a=b\n", b"00000000016 a=b\n", b"27 size=000000000000000003\n"])
def test_the_shortest_and_the_longest_numbers_of_pax_records(record):
    """Of bytes up to 11 digits are read, of a member up to 18."""
    data = pax(b"x", record) + header(b"a", 3) + b"abc".ljust(BLOCK, b"\0") + END
    assert [member.size for member in members(data)[0]] == [3]


def bit_flipped(bit):
    block = bytearray(header())
    block[bit // 8] ^= 1 << bit % 8
    return bytes(block)


NOT_PAX = (
    b"no number|0 \n|5 a=b|99 path=a\n|9 path=ab\n|7 path\n|-5 a=b\n|12|1234567890123 a=b\n|000000000017 a=b\n".split(
        b"|"
    )
)
NOT_SIZES = (
    b"\xff" * 12,
    b"\x81" + bytes(11),
    b"00000000009\0",
    b"-0000000005\0",
    b"0x5\0".ljust(12, b"\0"),
    b"1_000".ljust(12, b"\0"),
)
MAGIC = {"gzip": b"\x1f\x8b\x08", "bzip2": b"BZh9", "xz": b"\xfd7zXZ\0", "zstd": b"\x28\xb5\x2f\xfd"}
DAMAGE = [
    (b"", "byte 0: the file is empty"),
    (bytes(10_752), "byte 0: the archive begins with zeros, its end, but has 10752 bytes"),
    (b"junk", "byte 0: the archive is cut off in a header: only 4 bytes of it are left"),
    (header() + b"junk", "byte 512: the archive is cut off in a header"),
    (header(size=700) + bytes(600), "byte 0: 'a.txt' has 700 bytes in whole blocks of 512, .* is cut off after 600"),
    (header(size=3) + b"abc", "byte 0: 'a.txt' has 3 bytes in whole blocks of 512, but the archive is cut off after 3"),
    (header(size=1), "byte 0: 'a.txt' has 1 bytes in whole blocks of 512, but the archive is cut off after 0"),
    (header() + b"j" * BLOCK, "byte 512: expected a tar header here, found a block whose checksum"),
    *((bit_flipped(bit), "byte 0: expected a tar header here") for bit in (0, 8 * 130 + 1, 8 * 156)),
    *((header(at_124=size), "byte 0: a tar header has the size b'.*', which is not a number") for size in NOT_SIZES),
    *((pax(b"x", each) + header() + END, "byte 0: the PAX records of an extended header are in") for each in NOT_PAX),
    (pax(b"x", b"11 size=5x\n") + header(), "byte 1024: a PAX record gives the size b'5x', which is not a number"),
    (pax(b"x", b"28 size=0000000000000000003\n") + header(), "byte 1024: a PAX record gives the size b'0{18}3', which"),
    (header(b"x", 9000, b"x"), ".*an extended header has 9000 bytes, but 0 are left in the file, and at most 1048576"),
    (
        header(b"x", 40, b"L") + bytes(100),
        ".*an extended header has 40 bytes, but 100 are left .*in whole blocks of 512",
    ),
    (header(b"x", 2_000_000, b"L") + bytes(2_000_000), ".*an extended header has 2000000 bytes"),
    (pax(b"x", b"12 path=abc\n") + END, ".*the archive ends after an extended header, without its member"),
]


@pytest.mark.parametrize(("data", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_damage_is_an_error_with_its_place(data, message):
    with pytest.raises(CorruptFileError, match=f"^x.tar, {message}"):
        members(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(b"a.bin", 0, b"S"), r"x.tar, byte \d+: 'a.bin' is stored as a sparse file"),
        (pax(b"x", b"22 GNU.sparse.major=1\n") + header(b"a.bin"), r"x.tar, byte \d+: 'a.bin' is stored as a sparse"),
        *(
            (magic + bytes(more), f"x.tar: the archive is compressed with {name} .*decompress it")
            for name, magic in MAGIC.items()
            for more in (0, 2000)
        ),
    ],
)
def test_what_is_not_supported(data, message):
    with pytest.raises(UnsupportedFormatError, match=message):
        members(data)


def test_a_file_that_has_changed_does_not_end_its_archive():
    data = archive(("a", bytes(1 << 20)), ("b", b"x"))
    read = Mock(side_effect=[data[: 1 << 12], ChangedFileError("the file has been rewritten")])
    with pytest.raises(ChangedFileError):
        list(scan(read, len(data), "x.tar", on_damage="stop"))
