"""Uncompressed files read through the map, each record compared with what the package reads."""

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from array_records import PLAIN, write_records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses
from typer.testing import CliRunner

from dataload.cli.app import app
from dataload.codecs.codec import resolve_codec
from dataload.collate import default_collate
from dataload.errors import MissingDependencyError
from dataload.sources.array_record.map import MappedRecords
from dataload.sources.array_record.reader import ArrayRecordSource
from dataload.storage.core import can_map
from dataload.storage.local import mapped

BLOCK = 65536
PACKAGE = "readahead_buffer_size:0"
CHUNK_OF_4096 = 40 + 1 + 1 + 2 + 4096
write_plain = functools.partial(write_records, options=PLAIN)


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(0)
    return [b"%d:" % index + rng.bytes(int(size)) for index, size in enumerate(rng.integers(0, 9000, 400))]


@pytest.fixture(scope="module")
def path(tmp_path_factory, records):
    return write_plain(tmp_path_factory.mktemp("mapped") / "x.array_record", records)


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
    through_map = MappedRecords.open(path)
    if through_map is None:  # the first releases of 0.8 do pad; their package reads such files
        assert "pad" in padded
        return
    assert len(through_map) == len(sizes) == reader.num_records()
    assert list(map(len, wanted)) == sizes
    if sizes:
        request = np.array(data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=30)))
        for indices in (np.arange(len(sizes)), request):
            assert through_map.read(indices) == [wanted[index] for index in indices]
            assert through_map.read_together(indices) == [wanted[i] for i in indices]
        for index, record in enumerate(wanted):
            assert through_map.read(np.array([index])) == [record]


@pytest.mark.parametrize("off", [*range(-52, 3, 2)])
def test_chunks_around_the_start_of_a_block(tmp_path, off):
    """Each byte of a header at the boundary, and a chunk of several blocks that starts with one."""
    sizes = (BLOCK - 64 - 45 + off, 140_000, 3, 0)
    path = write_plain(tmp_path / "x", [bytes([number]) * size for number, size in enumerate(sizes)])
    wanted = ArrayRecordReader(path).read_all()
    for read in (MappedRecords.open(path).read, MappedRecords.open(path).read_together):
        assert read(np.array([0, 1, 2, 3, 1])) == [*wanted, wanted[1]]


def test_the_package_is_not_needed(no_package, path, records, tmp_path):
    with ArrayRecordSource([path, f"{path}[3:9]"]) as source:
        assert source.read([400, 0, 399]) == [records[3], records[0], records[399]]
        assert source.read_batch([5, 402]) == [records[5], records[5]]
        assert not source.reads_in_order
    assert list(ArrayRecordSource(write_plain(tmp_path / "x", []))) == []
    with ArrayRecordSource(path, codec=lambda data: data) as source:  # a function gets bytes of its own
        assert source.read([5, 6]) == records[5:7]
        assert {type(record) for record in source.read([5, 6])} == {bytes}
    few = write_plain(tmp_path / "few", [b"", b"a", b"", b"b" * 200_000])
    assert list(ArrayRecordSource([path, few], verify_hashes=True)) == [*records, b"", b"a", b"", b"b" * 200_000]
    message = r"format 'array_record' needs array_record: pip install 'dataload\[arrayrecord\]'"
    with pytest.raises(MissingDependencyError, match=message):
        len(ArrayRecordSource(path, reader_options=""))


def test_the_fingerprint_does_not_tell_how_it_is_read(path):
    """It tells options, so a source whose file went through the package before is compared."""
    with ArrayRecordSource(path) as source, pytest.MonkeyPatch.context() as patch:
        found = source.fingerprint()
        patch.setattr(MappedRecords, "open", lambda path, **_: None)
        assert ArrayRecordSource(path).fingerprint() == found


@pytest.mark.skipif(not can_map(), reason="files are not mapped")
def test_cold_data_are_asked_for_first(path, records, monkeypatch):
    asked = []
    monkeypatch.setattr(mapped, "is_cold", lambda *_: True)
    monkeypatch.setattr(mapped, "will_need", lambda _, offsets, lengths: asked.append((offsets, lengths)))
    with ArrayRecordSource(path) as source:
        assert source.read([7, 3]) == [records[7], records[3]]
    offsets, lengths = asked[0]
    with open(path, "rb") as stream:
        content = stream.read()
    for offset, length, record in zip(offsets, lengths, (records[7], records[3]), strict=True):
        assert offset < content.find(record[:9]) < content.find(record[:9]) + len(record) <= offset + length + 24


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
        assert source.fields == package.fields
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
    with ArrayRecordSource(path, verify_hashes=True) as source:
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
        done = CliRunner().invoke(app, ["verify", f"array_record:{verified}"])
        assert (done.exit_code, shown in done.stdout) == (code, True)
