"""The chunk layout, against the package's writer and a walk over a file chunk by chunk."""

import struct

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from array_records import PLAIN, write_records

from dataload._util.caches import DecodedCache
from dataload.codecs.wire import encode_varint
from dataload.sources.array_record.layout import BLOCK_SIZE, Decompressor, footer_offset
from dataload.sources.array_record.riegeli import BLOCK_HEADER_BYTES, Spans, parse_chunks

MAGIC = 0x71930E704FDAE05E
LAST = 3 * BLOCK_SIZE  # where the last block of a made file starts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("riegeli")


def written(folder, records, options=PLAIN):
    write_records(folder / "x.array_record", records, options)
    return (folder / "x.array_record").read_bytes()


def parsed(data):
    return parse_chunks(lambda at, length: data[at : at + length], len(data), Decompressor(DecodedCache(0)))


def stream_of(data):
    """The file without its block headers, and where in the file each byte of that is."""
    where = np.array([at for at in range(len(data)) if at % BLOCK_SIZE >= BLOCK_HEADER_BYTES])
    return np.frombuffer(data, np.uint8)[where].tobytes(), where


def walk_chunks(data):
    """(type, position of the first byte, whole chunk) of each chunk, found from its header alone."""
    stream, where = stream_of(data)
    at, found = 0, []
    while at < len(stream):
        size, kind = struct.unpack_from("<8xQ8xQ", stream, at)
        found.append((kind & 0xFF, int(where[at]), stream[at : at + 40 + size]))
        at += 40 + size
    return found


@pytest.mark.parametrize(
    "options", ["1,snappy", "1,brotli", "1,uncompressed,transpose", "1,transpose", "2,uncompressed", "2,brotli"]
)
def test_files_for_the_package(folder, options):
    data = written(folder, [b"a" * 100, b"b" * 200, b"c"], f"group_size:{options}")
    assert ArrayRecordReader(str(folder / "x.array_record")).num_records() == 3
    assert parsed(data) is None
    for size in (0, 1, 64, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE):
        assert parsed(bytes(size)) is None


@pytest.mark.slow_suite
def test_no_flipped_bit_of_the_footer_makes_another_table(folder):
    data = written(folder, [b"x" * size for size in (0, 50, 200, 30, 1, 70)])
    good = parsed(data)
    start = [at for kind, at, _ in walk_chunks(data) if kind == ord("r")][-2]  # the last is the postscript
    postscript = len(data) - BLOCK_SIZE
    survived = 0
    for byte in [*range(start, start + 210), *range(postscript, postscript + 120)]:
        for bit in range(8):
            flipped = bytearray(data)
            flipped[byte] ^= 1 << bit
            found = parsed(flipped)
            if found is not None:
                survived += 1
                assert found.edges.tolist() == good.edges.tolist()
    assert survived > 300  # those of hashes


def message(*numbers):
    return b"".join(bytes([8 * (field + 1)]) + encode_varint(number) for field, number in enumerate(numbers))


def simple_chunk(messages):
    sizes = b"".join(encode_varint(len(each)) for each in messages)
    data = b"\0" + encode_varint(len(sizes)) + sizes + b"".join(messages)
    kind = ord("r") | len(messages) << 8
    return struct.pack("<8xQ8xQQ", len(data), kind, sum(map(len, messages))) + data


def file_of(entries, *, said=1000, about=None, magic=MAGIC):
    """A file with any footer at byte 1000, or where it is said to be; hashes are zeros."""
    count = len(entries)
    about = message(1, count, count) if about is None else about
    body = simple_chunk([b"\x0a" + encode_varint(len(about)) + about, *entries])
    file = bytearray(4 * BLOCK_SIZE)
    at = 0
    pieces = Spans(np.array([1000]), np.array([len(body)]), None).pieces()
    for start, size in zip(pieces.offsets.tolist(), pieces.lengths.tolist(), strict=True):
        file[start : start + size] = body[at : at + size]
        at += size
    last = simple_chunk([message(said, magic)] * 3)
    file[LAST + 24 : LAST + 24 + len(last)] = last
    return bytes(file)


GOOD = [message(64, 100, 1), message(207, 749, 1)]
MANY = message(1, 2, 2) + b"\x22\x80\x80\x04" + bytes(1 << 16)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        ([GOOD[0], message(207, 750, 1)], {}),  # one byte too long
        ([GOOD[0], message(208, 748, 1)], {}),
        ([GOOD[0], message(207, 749, 2)], {}),  # two records
        ([GOOD[0], message(207, 749)], {}),  # nothing about records
        ([GOOD[0], GOOD[1] + b"\x20\x01"], {}),  # another field
        ([GOOD[0], b"\x10" + GOOD[1][1:]], {}),  # another tag
        ([message(64, 2**63, 1), GOOD[1]], {}),  # ten bytes
        ([message(64, 2**63 - 1, 1), GOOD[1]], {}),
        ([message(2**62, 100, 1), GOOD[1]], {}),
        ([message(10, 946, 1)], {}),  # within a block header
        ([message(24, 932, 1)], {}),  # right behind it
        (GOOD[::-1], {}),
        *((GOOD, {"about": about}) for about in (message(1, 2, 3), message(1, 3, 2), message(2, 2, 2), b"", MANY)),
        (GOOD, {"magic": MAGIC ^ 1}),
        *(([], {"said": said}) for said in (20, 5 * BLOCK_SIZE, 2**63)),
        ([b"x" * 128], {}),  # a size of two bytes
    ],
)
def test_footers_that_no_writer_writes(made, options):
    # 43 bytes before the first record, 44 before the second
    assert parsed(file_of(GOOD)).edges.tolist() == [64, 207, 1000]
    assert parsed(file_of(made, **options)) is None


@pytest.mark.parametrize(
    ("end", "offset"),
    [
        (b"\x08\5", 5),
        (b"\x08\x85\1", 133),
        *((end, None) for end in (b"\x10\5", b"", b"\x08\xff", b"\x08" + 11 * b"\xff")),
    ],
)
def test_the_offset_of_the_footer(end, offset):
    assert footer_offset(bytes(69) + end) == offset
