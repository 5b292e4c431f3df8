"""ArrayRecord: compressed and uncompressed files beside what the package itself reads, damage, and the writer."""

import functools
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from array_records import PLAIN, write_records
from command_line import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses

from dataload._util.caches import DecodedCache
from dataload.codecs import example
from dataload.codecs.codec import resolve_codec
from dataload.codecs.wire import encode_varint, parse_varint
from dataload.collate import default_collate
from dataload.errors import (
    ChangedFileError,
    ConfigError,
    CorruptFileError,
    MachineError,
    MissingDependencyError,
    SourceError,
    SourceNotFoundError,
    UnsupportedFormatError,
)
from dataload.sources.array_record import ArrayRecordOptions
from dataload.sources.array_record.layout import HASH_KEY, Decompressor, group_size
from dataload.sources.array_record.package import ArrayRecordWriter
from dataload.sources.array_record.reader import ArrayRecordSource, FileInstruction, _ArrayRecordFile
from dataload.storage.core import core
from dataload.types import BytesColumn


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(0)
    return [b"%d:" % index + rng.bytes(int(rng.integers(0, 300))) for index in range(3000)]


@pytest.fixture(scope="module")
def path(tmp_path_factory, records):
    return write_records(tmp_path_factory.mktemp("array_record") / "x.array_record", records)


def fields(index):
    return {"x": np.arange(index, index + 3, dtype=np.float32), "label": np.array([index % 300])}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "e.array_record"
    return write_records(path, (example.encode(fields(index)) for index in range(700)))


def test_groups_are_read_with_a_warning_for_each_file(tmp_path, records):
    files = [write_records(tmp_path / f"{name}.array_record", records[:200], "group_size:16") for name in "ab"]
    source = ArrayRecordSource([files[0], f"{files[0]}[3:9]", files[1]])
    with pytest.warns(UserWarning, match="was written with group_size:16: .* group_size:1 ") as warned:
        assert source.read([5, 199, 200, 206]) == [records[5], records[199], records[3], records[0]]
    assert [str(w.message).partition(" was ")[0] for w in warned] == files
    assert pickle.loads(pickle.dumps(source)).read(range(50)) == records[:50]  # has said it
    texts = (None, "", "zstd:3", "zstd:3,group_size:16", "group_size:16,zstd", "my_group_size:16")
    assert [group_size(text) for text in texts] == [1, 1, 1, 16, 16, 1]


def test_slices_and_instructions_select_without_opening(tmp_path, path, records):
    instruction = SimpleNamespace(filename=path, skip=10, take=3, examples_in_shard=5)
    assert isinstance(instruction, FileInstruction)
    paths = [instruction, f"{path}[100:102]", f"{path}[0:0]", path]
    source = ArrayRecordSource(paths)
    assert source.paths == (f"{path}[10:13]", f"{path}[100:102]", f"{path}[0:0]", path)
    assert source.shard_lengths == (3, 2, 0, 3000)
    assert source.read([0, 4, 5, 2]) == [records[10], records[101], records[0], records[12]]
    assert ArrayRecordSource(instruction).read([2]) == [records[12]]
    assert len({ArrayRecordSource(p).fingerprint() for p in paths}) == 4
    ArrayRecordSource(tmp_path / "not there[3:4]")
    instruction.take = -1
    with pytest.raises(ConfigError, match=r"x.array_record: skip=10, take=-1: neither may be negative"):
        ArrayRecordSource(instruction)


def test_every_truncation_is_noticed_when_the_file_is_opened(tmp_path, path):
    data = Path(path).read_bytes()
    assert len(data) >= 4 * 65536
    cut = tmp_path / "cut.array_record"
    for size in {*range(0, len(data), 65536), *range(7, len(data), 60013), 64, 65535, len(data) - 1}:
        cut.write_bytes(data[:size])
        with pytest.raises(CorruptFileError, match=r"cut.array_record.*(truncated|never closed|Corrupted|Failed)"):
            len(ArrayRecordSource(cut))
    cut.write_bytes(data + bytes(65536))
    with pytest.raises(CorruptFileError, match=r"no valid end: Corrupted Riegeli/records"):
        len(ArrayRecordSource(cut))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("x.array_record[5:2]", {}, ConfigError, r"x.array_record\[5:2\]: the slice ends at record 2, before its star"),
        ("x.array_record[2000:3001]", {}, ConfigError, r"x.array_record\[2000:3001\] .* 2000 to 3001; the file has 30"),
        ("x.array_record[99999999999999999999:99999999999999999999]", {}, ConfigError, "the file has 3000"),
        ("other", {}, UnsupportedFormatError, r"is not an ArrayRecord file, .*: byte 0 has b'GS"),
        ("y.array_record", {}, SourceNotFoundError, r"there is no .*y.array_record: the directory .* exists"),
        (".", {}, SourceError, r"cannot read .*: Is a directory"),
        ("x.array_record", {"reader_options": "fast"}, ConfigError, "'fast': Unknown option fast, valid opt.*: .*read"),
        ("x.array_record", {"codec": "example", "fields": ["lable"]}, ConfigError, "has no field 'lable'"),
        ("x.array_record", {"fields": ["label"]}, ConfigError, "fields were given, but the records are plain bytes: g"),
    ],
)
def test_what_does_not_fit(path, examples, name, options, error, message):
    directory = Path(path).parent
    (directory / "other").write_bytes(b"GS\0\0" + bytes(200_000))
    with pytest.raises(error, match=message) as caught:
        len(ArrayRecordSource(examples if "lable" in message else directory / name, **options))
    assert "[" not in name or caught.value.key == "paths"


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (RuntimeError("odd"), CorruptFileError, r"x.array_record: odd$"),
        (MemoryError("std::bad_alloc"), MachineError, "reading 2 records at once needs more memory"),
    ],
)
def test_errors_of_the_package_that_no_single_record_repeats(path, monkeypatch, raised, kind, message):
    class Flaky(ArrayRecordReader):
        def read(self, *request):
            if len(request) == 1 or request[1] - request[0] > 1:
                raise type(raised)(*raised.args)
            return super().read(*request)

    monkeypatch.setattr("array_record.python.array_record_module.ArrayRecordReader", Flaky)
    with ArrayRecordSource(path, reader_options=PACKAGE) as source:
        len(source)
        with pytest.raises(kind, match=message):
            source.read([1, 2])
        monkeypatch.undo()
        assert source.read([1, 2])[0].startswith(b"1:")  # by another reader


def test_a_file_cut_while_it_is_open(tmp_path, records):
    """The original gives empty records, without an error."""
    path = write_records(tmp_path / "x", [os.urandom(4000) for _ in range(100)], PLAIN)
    size = os.path.getsize(path)
    with ArrayRecordSource(path) as mapped, ArrayRecordSource(path, reader_options="") as source:
        mapped.read([1, 2])
        source.read([1, 2])
        os.truncate(path, 65536)
        message = f"had {size} bytes when it was opened and has 65536 now|rewri|overwri"
        for request in ([99], range(100), [0, 98, 99]):
            for cut in (source, mapped):
                refuses(cut, request, message, ChangedFileError)


RECORDS = [b"", b"a", bytes(range(256)) * 300, b"last"]


@pytest.fixture
def new(tmp_path):
    return tmp_path / "x.array_record"


@pytest.mark.parametrize("options", ["group_size:1", "group_size:1,uncompressed", "group_size:3,brotli:4", ""])
def test_the_original_reads_what_is_written(new, options):
    with ArrayRecordWriter(new, options=options) as writer:
        writer.extend([*RECORDS[:2], bytearray(RECORDS[2]), memoryview(RECORDS[3])])
        assert len(writer) == 4
    reader = ArrayRecordReader(str(new))
    assert reader.ok()
    assert reader.read_all() == RECORDS
    reader.close()


def test_what_the_writer_refuses(new, tmp_path):
    with pytest.raises(ConfigError, match=r"options 'group_size:1,fast': Unknown option fast, valid options: .*zstd"):
        ArrayRecordWriter(new, options="group_size:1,fast")
    assert os.listdir(tmp_path) == []
    text = type("Text", (), {"name": "text", "decode": len, "encode": lambda self, record: str(record)})
    writer = ArrayRecordWriter(new, codec=text())
    with pytest.raises(ConfigError, match="codec text encoded a record as str, not bytes"):
        writer.write({"x": 1})
    writer.abort()
    with ArrayRecordWriter(new) as writer:
        writer.write(b"good")
        with pytest.raises(ConfigError, match="stores bytes, got a record of type dict: choose a codec"):
            writer.write({"x": 1})
    assert list(ArrayRecordSource(new)) == [b"good"]


def test_a_package_that_fails_to_write(new, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("write() failed: No space left on device")

    full = type("Full", (), {"write": fail, "close": fail, "ok": lambda self: True, "__init__": lambda *_: None})
    monkeypatch.setattr("array_record.python.array_record_module.ArrayRecordWriter", full)
    for act in (lambda: ArrayRecordWriter(new).write(b"a"), lambda: ArrayRecordWriter(new).close()):
        with pytest.raises(
            MachineError, match=r"cannot write .*x.array_record: No space left on device; .* bytes are free"
        ):
            act()
    assert os.listdir(tmp_path) == []


BLOCK = 65536
write_plain = functools.partial(write_records, options=PLAIN)
PACKAGE = "readahead_buffer_size:0"
CHUNK_OF_4096 = 40 + 1 + 1 + 2 + 4096


@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_record_is_the_packages(tmp_path, data):
    size = st.one_of(
        st.integers(0, 300),
        st.sampled_from([0, 1, 127, 128, 4096, 16_384, 63 << 10, 64 << 10, (64 << 10) + 1, 200 << 10]),
        # chunks that end at, or a few bytes off, the first two boundaries of blocks
        st.integers(-70, 70).map(lambda off: BLOCK - 64 - 45 + off),
        st.integers(-70, 70).map(lambda off: 2 * BLOCK - 24 - 64 - 45 + off),
    )
    sizes = data.draw(
        st.one_of(st.lists(size, max_size=12), st.tuples(size, st.integers(1, 40)).map(lambda n: [n[0]] * n[1]))
    )
    padded = data.draw(st.sampled_from(["", ",pad_to_block_boundary", ",max_parallelism:1"]))
    seed = np.random.default_rng(len(sizes))
    path = write_plain(tmp_path / "x", [seed.bytes(size) for size in sizes], options=f"{PLAIN}{padded}")
    reader = ArrayRecordReader(path)
    wanted = reader.read_all() if sizes else []
    through_map = _ArrayRecordFile(path, ArrayRecordOptions(), Decompressor(DecodedCache(0)))
    if through_map.whole:  # the first releases of 0.8 do pad; their package reads such files
        assert "pad" in padded
        return
    assert len(through_map) == len(sizes) == reader.num_records()
    assert list(map(len, wanted)) == sizes
    if sizes:
        request = np.array(data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=30)))
        for indices in (np.arange(len(sizes)), request):
            assert through_map.read(indices, None) == [wanted[index] for index in indices]
            assert through_map.read_batch(indices, None) == [wanted[index] for index in indices]
        for index, record in enumerate(wanted):
            assert through_map.read(np.array([index]), None) == [record]


def test_the_package_is_not_needed(no_package, tmp_path):
    rng = np.random.default_rng(0)
    plain_records = [b"%d:" % index + rng.bytes(int(size)) for index, size in enumerate(rng.integers(0, 9000, 400))]
    plain_path = write_plain(tmp_path / "x.array_record", plain_records)
    with ArrayRecordSource([plain_path, f"{plain_path}[3:9]"]) as source:
        assert source.read([400, 0, 399]) == [plain_records[3], plain_records[0], plain_records[399]]
        batch = source.read_batch([5, 402])
        assert (type(batch), batch) == (BytesColumn, [plain_records[5], plain_records[5]])
        assert source.locate(402).offset == source.locate(5).offset
        assert not source.reads_in_order
    assert list(ArrayRecordSource(write_plain(tmp_path / "none", []))) == []
    with ArrayRecordSource(plain_path, codec=lambda data: data) as source:  # a function gets bytes of its own
        assert source.read([5, 6]) == plain_records[5:7]
        assert {type(record) for record in source.read([5, 6])} == {bytes}
    values = [b"", b"a", b"", b"b" * 200_000]
    few = write_plain(tmp_path / "few", values)
    assert list(ArrayRecordSource([plain_path, few], verify=True)) == [*plain_records, *values]
    message = r"format 'array_record' needs array_record: pip install 'dataload\[arrayrecord\]'"
    with pytest.raises(MissingDependencyError, match=message):
        len(ArrayRecordSource(plain_path, reader_options=""))


VALUES = {
    "tensorprotos": lambda i: {"x": np.arange(i, i + 1200, dtype=np.float32), "n": np.array([i], np.int32)},
    "example": lambda i: {"x": np.arange(i, i + 1200, dtype=np.float32), "n": np.array([i])},
    "msgpack": lambda i: {"x": np.arange(i, i + 1200, dtype=np.float32), "n": i, "b": b"%d" % i},
    "npz": lambda i: {"x": np.arange(i, i + 1200, dtype=np.float32), "n": np.array([i])},
}


@pytest.mark.parametrize("codec", VALUES)
def test_codecs_give_what_they_give_through_the_package(tmp_path, codec):
    """And what they give is the caller's own, though they are shown the map."""
    encode = resolve_codec(codec).encode
    path = write_plain(tmp_path / "x", [encode(VALUES[codec](index)) for index in range(100)])
    before = (tmp_path / "x").read_bytes()
    request = np.random.default_rng(0).integers(0, 100, 300)
    with (
        ArrayRecordSource(path, codec=codec) as source,
        ArrayRecordSource(path, codec=codec, reader_options=PACKAGE) as package,
    ):
        assert source.fields == package.fields == ArrayRecordSource([path, f"{path}[3:9]"], codec=codec).fields
        found, batch = source.read(request), source.read_batch(request)
        np.testing.assert_equal(found, package.read(request))
        np.testing.assert_equal(batch, package.read_batch(request))
        np.testing.assert_equal(batch, default_collate(found))
        np.testing.assert_equal(source.read_batch(request, fields=["n"]), {"n": batch["n"]})
        batch["x"][:] = 0
        for record in found:
            record["x"][:] = 0
        np.testing.assert_equal(source.read(request[:1]), [VALUES[codec](int(request[0]))])
    assert (tmp_path / "x").read_bytes() == before


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """Records of 4096 bytes, number 15 lies across the first boundary of blocks."""
    rng = np.random.default_rng(1)
    wanted = [rng.bytes(4096) for _ in range(40)]
    return write_plain(tmp_path_factory.mktemp("alike") / "x", wanted), wanted


def damaged(tmp_path, path, byte):
    data = bytearray(Path(path).read_bytes())
    data[byte] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    return str(tmp_path / "damaged")


@pytest.mark.parametrize(
    ("byte", "index", "part"),
    [
        # bytes of data, type, records, bytes of the record; compression, bytes of the size
        *((64 + 3 * CHUNK_OF_4096 + byte, 3, "chunk header") for byte in (8, 24, 25, 32)),
        *((64 + 3 * CHUNK_OF_4096 + byte, 3, "chunk data") for byte in (40, 41)),
        *((BLOCK + byte, 15, "block header") for byte in (8, 16)),
    ],
)
def test_what_is_not_as_the_footer_says_is_for_the_package(tmp_path, alike, byte, index, part, request):
    path, wanted = alike
    path = damaged(tmp_path, path, byte)
    with ArrayRecordSource(path) as source:
        for rows in ([index], [0, index, 1], range(40)):
            refuses(source, rows, f"record {index}: .*{part} hash mismatch", path=path, index=index)
        assert source.read([0, 1, 39]) == [wanted[0], wanted[1], wanted[39]]
    request.getfixturevalue("no_package")
    with ArrayRecordSource(path) as source, pytest.raises(MissingDependencyError, match="needs array_record"):
        source.read([index])


@pytest.mark.parametrize(("byte", "part"), [(44, "data"), (17, "header")])
def test_hashes_are_compared_if_asked(tmp_path, alike, byte, part, request):
    path, wanted = alike
    path = damaged(tmp_path, path, start := 64 + 2 * CHUNK_OF_4096 + byte)
    with ArrayRecordSource(path) as source:
        assert source[2] == (bytes([wanted[2][0] ^ 1]) + wanted[2][1:] if part == "data" else wanted[2])
    with ArrayRecordSource(path, verify=True) as source:
        message = rf"record 2: the hash of the chunk's {part} is 0x[0-9a-f]+, but the chunk says 0x[0-9a-f]+"
        for indices in ([2], [1, 2, 3], range(40)):
            refuses(source, indices, message, index=2, offset=start - byte)
        assert source.read([0, 15, 39]) == [wanted[0], wanted[15], wanted[39]]
    with ArrayRecordSource(path, reader_options=PACKAGE) as package:
        refuses(package, range(40), rf"record 2: .*chunk {part} hash mismatch")
    request.getfixturevalue("no_package")
    for verified, code, shown in (
        (alike[0], 0, "40 records in 1 file: all can be read\n"),
        (path, 1, "record 2: the hash of"),
    ):
        done = run("verify", f"array_record:{verified}")
        assert (done.exit_code, shown in done.stdout) == (code, True)


SIZES = {
    "small": range(300),
    "alike": [4096] * 100,
    "large": [0, 70_000, 1, 200_000, 0, 65_536, 3],
    "in threads": range(150_000, 250_000, 10_000),
    "empty": [0] * 20,
}


@pytest.fixture(params=SIZES)
def values(request):
    rng = np.random.default_rng(5)
    return [rng.integers(0, 20, size, np.uint8).tobytes() for size in SIZES[request.param]]


@pytest.mark.filterwarnings("ignore:.*group_size")
@pytest.mark.parametrize("group", [1, 7, 1000])
def test_compressed_files_are_read_without_the_package(no_package, tmp_path, values, group):
    count = len(values)
    files = [write_records(tmp_path / name, values, f"group_size:{group}") for name in "abc"]
    rng = np.random.default_rng(group)
    requests = rng.integers(0, count, 40), np.arange(count), np.arange(count)[::-1], np.array([count - 1] * 3)
    with ArrayRecordSource(files[0]) as source:
        for request in requests:
            wanted = [values[index] for index in request]
            assert source.read(request) == source.read_batch(request) == wanted
    several = [*files, f"{files[0]}[2:{count - 1}]"]
    with ArrayRecordSource(several, cached_bytes=100) as source:
        assert len(source) == 4 * count - 3
        everything = [*values, *values, *values, *values[2 : count - 1]]
        for request in (*requests, rng.integers(0, len(everything), 200), np.arange(len(everything))):
            assert source.read(request) == source.read_batch(request) == [everything[index] for index in request]


@pytest.mark.filterwarnings("ignore:.*group_size")
def test_groups_are_kept_until_all_their_records_are_read(tmp_path, records, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    opened, count = [], zstandard.frame_content_size
    monkeypatch.setattr(zstandard, "frame_content_size", lambda frame: opened.append(len(frame)) or count(frame))
    with ArrayRecordSource(write_records(tmp_path / "x", records[:64], "group_size:16")) as source:
        assert len(source) == 64
        for request, frames in (([3, 19], 4), ([4, 30, 5], 0), (range(32, 64), 4), (range(32, 64), 4)):
            opened.clear()
            assert source.read(request) == [records[index] for index in request]
            assert len(opened) == frames


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize(("count", "at"), [(1, 0), (40, 0), (40, 39)])  # many are expanded in threads
def test_large_chunks_that_state_another_length(tmp_path, more, count, at):
    """Their hashes fit, and the frames do not tell their length: only what they expand to does."""
    path = Path(write_records(tmp_path / "x", [b"a" * 200_000] * count))
    data = bytearray(path.read_bytes())
    size = 40 + int.from_bytes(data[72:80], "little")
    begin = 64 + at * size
    chunk = data[begin : begin + size]
    length_of_sizes, after = parse_varint(bytes(chunk), 41)
    stated = 200_000 + more
    assert parse_varint(bytes(chunk), after + length_of_sizes)[0] == 200_000
    chunk[after + length_of_sizes : after + length_of_sizes + 3] = encode_varint(stated)
    chunk[32:40] = stated.to_bytes(8, "little")
    chunk[16:24] = hash_of(bytes(chunk[40:]))
    chunk[:8] = hash_of(bytes(chunk[8:40]))
    data[begin : begin + size] = chunk
    path.write_bytes(data)
    with ArrayRecordSource(path) as source:
        refuses(source, range(count), f"record {at}: ", path=str(path), index=at)


@pytest.mark.filterwarnings("ignore:.*group_size")
@pytest.mark.parametrize("options", ["group_size:1", "group_size:5"])
def test_files_are_read_alike_without_zstandard(tmp_path, records, options, monkeypatch):
    path = write_records(tmp_path / "x", records[:50], options)
    with ArrayRecordSource(path) as source:
        wanted = source.read(range(50)), source.fingerprint(), source.reads_in_order
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with ArrayRecordSource(path) as source:
        assert (source.read(range(50)), source.fingerprint(), source.reads_in_order) == wanted


def hash_of(data):
    found = np.empty(1, np.uint64)
    core().hash_ranges(found, data, np.zeros(1, np.int64), np.array([len(data)]), HASH_KEY, -1)
    return found.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda chunk: chunk.__setitem__(slice(32, 40), (1 << 40).to_bytes(8, "little")), "record 0: "),  # bytes
        (lambda chunk: chunk.__setitem__(slice(32, 40), (1 << 22).to_bytes(8, "little")), "takes 4,194,312 bytes"),
        (lambda chunk: chunk.__setitem__(24, ord("t")), "record 0: "),  # a transposed chunk
        (lambda chunk: chunk.__setitem__(41, 0x7F), "record 0: "),  # bytes of the sizes
        (lambda chunk: chunk.__setitem__(slice(41, 53), b"\xff" * 12), "record 0: "),
        (lambda chunk: chunk.__setitem__(61, chunk[61] ^ 1), "record 0: "),  # bytes that the frame tells
    ],
)
def test_chunks_that_no_writer_writes(tmp_path, change, message):
    """Their hashes fit, so it is the package that refuses most of them."""
    path = Path(write_records(tmp_path / "x", [b"a" * 300, b"b" * 300]))
    data = bytearray(path.read_bytes())
    size = 40 + int.from_bytes(data[72:80], "little")
    chunk = data[64 : 64 + size]
    assert chunk[40:42] == b"z\x0c"
    change(chunk)
    chunk[16:24] = hash_of(bytes(chunk[40:]))
    chunk[:8] = hash_of(bytes(chunk[8:40]))
    data[64 : 64 + size] = chunk
    path.write_bytes(data)
    with ArrayRecordSource(path, max_record_bytes=1 << 20) as source:
        assert source.read([1]) == [b"b" * 300]
        refuses(source, [1, 0], message, path=str(path), index=0)
