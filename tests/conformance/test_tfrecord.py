import struct
from contextlib import suppress

import google_crc32c
import numpy as np
import pytest
from format_suite import FormatSuite, flip

from dataload.codecs.codec import resolve_codec
from dataload.errors import CorruptFileError, UnsupportedFormatError
from dataload.sources.tfrecord.records import TFRecordSource
from dataload.testing import SourceTraits


def masked(data):
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def frame(data):
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


class TestTFRecord(FormatSuite):
    """Files by the description of the format; a file that was cut between two records is one of fewer records."""

    codec = None
    source, options = TFRecordSource, {"verify": True}
    traits = SourceTraits(
        record_type=bytes,
        suffix=".tfrecord",
        several_paths=True,
        notices_cuts=False,
        has_checksums=True,
        corruptions=("flip_length", "flip_record", "cut_in_a_record"),
    )
    expected_failures = {"check_damaged_files": "a file of no bytes is a data set without records"}  # noqa: RUF012

    def write(self, path, records):
        codec = resolve_codec(self.codec)
        path.write_bytes(b"".join(frame(record if codec is None else codec.encode(record)) for record in records))

    def corrupt(self, path, kind):
        if kind == "cut_in_a_record":
            path.write_bytes(path.read_bytes()[:-1])
        else:
            flip(path, 0 if kind == "flip_length" else 14)


@pytest.mark.slow_suite
class TestTFRecordOfExample(TestTFRecord):
    """Without checksums, through the layouts that Examples share."""

    codec = "example"
    options = {"codec": "example"}  # noqa: RUF012
    traits = SourceTraits(
        suffix=".tfrecord", several_paths=True, value_types=(bytes,), corruptions=("flip_length", "cut_in_a_record")
    )


def test_a_damaged_file_is_refused_or_ends_early(tmp_path):
    """As `check_damaged_files`, but for the file of no bytes."""
    records = [bytes([number]) * number for number in range(12)]
    data = b"".join(map(frame, records))
    damages = [data[:stop] for stop in range(1, len(data))] + [bytes(len(data)), b"text\n" * 60]
    found = []
    for damaged in damages:
        (tmp_path / "x.tfrecord").write_bytes(damaged)
        with suppress(CorruptFileError, UnsupportedFormatError):
            found.append(len(TFRecordSource(tmp_path / "x.tfrecord")))
    edges = np.cumsum([len(frame(record)) for record in records])[:-1]
    assert found == list(range(1, len(edges) + 1))
