"""The chunk layout, against the package's writer and a walk over a file chunk by chunk."""

import pickle
import struct

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from array_records import PLAIN, write_records
from hypothesis import given, settings
from hypothesis import strategies as st

from dataload._util.caches import DecodedCache
from dataload.codecs.wire import encode_varint
from dataload.errors import CorruptFileError
from dataload.sources.array_record.layout import (
    BLOCK_SIZE,
    SIGNATURE,
    Decompressor,
    Selection,
    check_head,
    footer_offset,
    group_size,
    parse_selection,
)
from dataload.sources.array_record.riegeli import BLOCK_HEADER_BYTES, HEAD_BYTES, parse_chunks, pieces

MAGIC = 0x71930E704FDAE05E
LAST = 3 * BLOCK_SIZE  # where the last block of a made file starts
# On both sides of where a record's size takes another byte.
SIZES = (0, 1, 127, 128, 5, 16_383, 16_384, 63 << 10, 64 << 10, 200 << 10, (1 << 21) - 1, 1 << 21, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("riegeli")


def written(folder, records, options=PLAIN):
    write_records(folder / "x.array_record", records, options)
    return (folder / "x.array_record").read_bytes()


def parsed(data):
    return parse_chunks(lambda at, length: data[at : at + length], len(data), Decompressor(DecodedCache(0)))


def is_file_byte(position):
    return position % BLOCK_SIZE >= BLOCK_HEADER_BYTES


def stream_of(data):
    """The file without its block headers, and where in the file each byte of that is."""
    where = np.array([at for at in range(len(data)) if is_file_byte(at)])
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


@settings(max_examples=30)
@given(start=st.integers(0, 3 * BLOCK_SIZE).filter(is_file_byte), length=st.integers(0, 200_000))
def test_pieces_are_all_bytes_but_the_block_headers(start, length):
    wanted = [at for at in range(start, start + length + 200) if is_file_byte(at)][:length]
    assert [at for part in pieces(start, length) for at in range(part.start, part.stop)] == wanted


@pytest.mark.parametrize("sizes", [SIZES, (60,) * 3000, (4096,) * 100, (70_000,) * 9, (7,), (0,) * 50])
def test_spans_are_those_of_a_walk_over_the_file(folder, sizes):
    records = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    data = written(folder, records)
    chunks = parsed(data)
    assert len(chunks) == len(sizes)
    spans = chunks.spans(np.arange(len(sizes)))
    walked = [chunk for chunk in walk_chunks(data) if chunk[0] == ord("r")][: len(sizes)]
    assert spans.starts.tolist() == [start for _, start, _ in walked]
    assert spans.lengths.tolist() == [len(chunk) for _, _, chunk in walked]
    assert [chunk[ahead:] for (_, _, chunk), ahead in zip(walked, spans.ahead.tolist(), strict=True)] == records
    heads = b"".join(chunk[:HEAD_BYTES].ljust(HEAD_BYTES, b"?") for *_, chunk in walked)
    assert not spans.differ(np.frombuffer(heads, np.uint8).reshape(-1, HEAD_BYTES))
    some = chunks.spans(np.array([len(sizes) - 1, 0]))
    assert some.starts.tolist() == [walked[-1][1], walked[0][1]]


@pytest.mark.parametrize("size", [0, 100, 128, 70_000])
@pytest.mark.parametrize("other", [[], [9]], ids=["alike", "mixed"])
def test_every_flipped_bit_of_a_head_is_seen_but_of_hashes_and_size(folder, size, other):
    data = written(folder, [bytes(n) for n in (size, *other)])
    spans = parsed(data).spans(np.zeros(1, np.int64))
    head = data[64 : 64 + HEAD_BYTES]
    for bit in range(8 * HEAD_BYTES):
        flipped = bytearray(head)
        flipped[bit // 8] ^= 1 << bit % 8
        seen = spans.differ(np.frombuffer(flipped, np.uint8).reshape(1, HEAD_BYTES))
        in_hash = bit // 8 in {*range(8), *range(16, 24)}
        assert seen == (not in_hash and bit // 8 < 42)


@pytest.mark.parametrize(
    "options", ["1,snappy", "1,brotli", "1,uncompressed,transpose", "1,transpose", "2,uncompressed", "2,brotli"]
)
def test_files_for_the_package(folder, options):
    data = written(folder, [b"a" * 100, b"b" * 200, b"c"], f"group_size:{options}")
    assert ArrayRecordReader(str(folder / "x.array_record")).num_records() == 3
    assert parsed(data) is None
    for size in (0, 1, 64, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE):
        assert parsed(bytes(size)) is None


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
    for part in pieces(1000, len(body)):
        file[part] = body[at : at + part.stop - part.start]
        at += part.stop - part.start
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
    ("path", "selection"),
    [
        *(("a[2:5]", ("a", 2, 5)), ("a[00:02]", ("a", 0, 2)), ("a\nb[1:2]", ("a\nb", 1, 2))),
        ("a[1:2][3:3]", ("a[1:2]", 3, 3)),
        # the last digits are none that the original takes
        *((path, (path, 0, None)) for path in ("a", "a[1:]", "a[:3]", "a[-3:2]", "a[1:2]b", "[1:2]", "a[٣:٤]")),
    ],
)
def test_only_digits_make_a_slice(path, selection):
    assert parse_selection(path) == Selection(*selection)


def test_heads():
    check_head(SIGNATURE, 1 << 17, "x")
    with pytest.raises(CorruptFileError, match="x, byte 0: the file is empty"):
        check_head(b"", 0, "x")
    for size in (1, 10, 64, 65536):
        with pytest.raises(CorruptFileError, match=f"x, byte {size}: the file has {size} bytes, the smalles") as caught:
            check_head(SIGNATURE[:size], size, "x")
        assert pickle.loads(pickle.dumps(caught.value)).offset == size


def test_group_sizes():
    written = "group_size:1,transpose:false", "transpose:false,group_size:16,zstd:3", "group_size:65536"
    assert [group_size(options) for options in written] == [1, 16, 65536]
    assert [group_size(options) for options in ("transpose_group_size:3", "", None)] == [1, 1, 1]


@given(st.binary(max_size=200))
def test_any_block_is_a_postscript_or_none(block):
    assert footer_offset(block) is None or block[69] == 8
