import os
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

import dataload
from dataload.catalog.arrays import IndexKey, store_cached
from dataload.codecs.example import SequenceExample
from dataload.codecs.wire import build_field
from dataload.convert import convert
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.tfrecord import records
from dataload.storage.kept import CachedTable


def build(path, lengths):
    with dataload.create(path) as writer:
        writer.extend(bytes([number % 256]) * length for number, length in enumerate(lengths))
    os.utime(path, (1, 1))  # younger files have no table in the cache
    return str(path)


def test_checksums_are_those_of_the_library():
    rows = np.random.default_rng(0).integers(0, 256, (50, 9), np.uint8)
    assert records.crc_of_rows(rows).tolist() == [google_crc32c.value(row.tobytes()) for row in rows]


CRC = "the masked CRC-32C of the record"
CUT = "the file ends at byte {}, within this"


@pytest.mark.parametrize(
    ("old", "new", "offset", "index", "message"),
    [
        (slice(26, 34), struct.pack("<Q", 1 << 60), 26, 1, f"{CRC}'s length, 115292150"),
        (slice(107, None), b"", 62, 2, CUT.format(107)),
        (slice(70, None), b"", 62, 2, CUT.format(70)),
        (slice(30, None), b"", 26, 1, CUT.format(30)),
        (slice(3, None), b"", 0, 0, CUT.format(3)),
        (slice(40, 41), b"\7", 38, 1, f"{CRC} differs"),
    ],
)
def test_damage(tmp_path, old, new, offset, index, message):
    path = Path(build(tmp_path / "x.tfrecord", [10, 20, 30]))
    data = bytearray(path.read_bytes())
    data[old] = new
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match=rf"x\.tfrecord, byte {offset}, record {index}: {message}"):
        dataload.open(path, format="tfrecord", verify=True).read_batch([0, index])
    if "differs" in message:
        assert dataload.open(path, verify=True).read([0, 2]) == [bytes(10), b"\2" * 30]
        assert len(dataload.open(path)[1]) == 20
        with pytest.raises(CorruptFileError, match=r"x\.tfrecord, record 2: the record takes 30 bytes of memory"):
            dataload.open(path, max_record_bytes=29)[2]


@pytest.mark.parametrize(
    ("length", "reads"),
    [
        (1000, [(0, 4096), (5 * 1016, 1016)]),
        (32_751, [(0, 4096), (32_767, 5 * 32_767)]),
        (32_752, [(0, 4096), *((number * 32_768, 12) for number in range(1, 6))]),
    ],
)
def test_reads_are_of_blocks_where_records_are_small_and_of_heads_elsewhere(tmp_path, length, reads):
    data, found = Path(build(tmp_path / "x.tfrecord", [length] * 6)).read_bytes(), []
    edges = records.find_records(lambda *read: found.append(read) or data[read[0] : sum(read)], len(data), "x")
    assert edges.tolist() == [*range(0, len(data) + 1, length + 16)]
    assert found == reads


def test_records_are_found_once(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_LEAST_CACHED", 5)
    path = build(tmp_path / "x.tfrecord", range(20))
    first = list(dataload.open(path))
    monkeypatch.setattr(records, "find_records", lambda *_: pytest.fail("found again"))
    assert list(dataload.open(path)) == first


@pytest.mark.parametrize("edges", [[], [0], [16, 52], [0, 52, 40, 84], [0, 16, 99]])
def test_an_invalid_table_is_not_used(tmp_path, edges):
    path = build(tmp_path / "x.tfrecord", [10, 36])
    store_cached(IndexKey.of("tfrecord", (path,)), CachedTable({"edges": np.array(edges, np.int64)}, {}))
    assert len(dataload.open(path)) == len(dataload.open(path, cache=False)) == 2


def test_fields_become_examples(tmp_path):
    report = convert(
        dataload.MemorySource({"x": np.arange(12, dtype=np.float32).reshape(4, 3)}), tmp_path / "x.tfrecord", shards=2
    )
    assert "records are encoded with the codec 'example'" in report.notes[0]
    with dataload.open(tmp_path) as source:  # its manifest names the codec
        np.testing.assert_equal(source.read_batch([3, 0])["x"], [[9, 10, 11], [0, 1, 2]])


def test_sequence_examples_that_are_refused():
    maps = build_field(1, build_field(1, b"a"))
    twice = build_field(1, maps) + build_field(2, maps)
    with pytest.raises(CorruptFileError, match="'a' is a feature of the context and a feature list: decode such"):
        SequenceExample.decode(twice)
    with pytest.raises(CorruptFileError, match=r"not a tf\.train\.SequenceExample \(3 bytes\)"):
        SequenceExample.decode(b"\xff\xff\xff")
    steps = build_field(2, build_field(1, build_field(1, b"a") + build_field(2, build_field(1, b"") * 1000)))
    assert SequenceExample.decode(steps) == {"a": [[]] * 1000}
    with pytest.raises(CorruptFileError, match="a SequenceExample of 1,001 features takes 512,512 bytes of memory"):
        SequenceExample.decode(steps, 100_000)
    with pytest.raises(ConfigError, match="codec 'sequence_example' only reads: write records with example"):
        SequenceExample.encode({})


class Bytes:
    """A codec of the first byte of bytes, not of views, which counts the records that it decodes one by one."""

    alone = 0

    def decode(self, data):
        self.alone += 1
        return {"x": data[0]}

    def encode(self, record):
        return bytes([record["x"]])

    def decode_batch(self, buffers, fields):
        assert set(map(type, buffers)) == {bytes}
        return {"x": np.array([buffer[0] for buffer in buffers])}


@pytest.mark.parametrize("name", ["x.tfrecord", "x.array_record"])
def test_a_codec_decodes_the_records_of_a_batch_together(tmp_path, name):
    codec = Bytes()
    source = dataload.open(build(tmp_path / name, [4, 4, 4]), codec=codec)
    assert list(source.fields) == ["x"]
    before = codec.alone
    assert source.read_batch([2, 0])["x"].tolist() == [2, 0]
    assert codec.alone == before
