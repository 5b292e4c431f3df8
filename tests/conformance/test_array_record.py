from __future__ import annotations

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from format_suite import FormatSuite

from dataload.codecs.codec import resolve_codec
from dataload.sources.array_record.reader import ArrayRecordSource
from dataload.testing import SourceTraits

_BLOCK = 65536


class ArrayRecordSuite(FormatSuite):
    """Files by the original's own writer."""

    codec = None
    options = "group_size:1"

    def write(self, path, records):
        codec = resolve_codec(self.codec)
        writer = ArrayRecordWriter(str(path), self.options)
        for record in records:
            writer.write(record if codec is None else codec.encode(record))
        writer.close()

    def open(self, path):
        return ArrayRecordSource(path, codec=self.codec)

    def corrupt(self, path, kind):
        data = bytearray(path.read_bytes())
        if kind == "flip_signature":
            data[0] ^= 1
        elif kind == "flip_record":
            data[150] ^= 1  # behind the headers of the file, the first block and the first chunk
        elif kind == "cut_at_block":
            data = data[:-_BLOCK]
        else:
            data = bytearray()
        path.write_bytes(data)


_CORRUPTIONS = ("flip_signature", "flip_record", "cut_at_block", "not_closed")


class TestArrayRecord(ArrayRecordSuite):
    processes_together = False
    traits = SourceTraits(
        record_type=bytes, suffix=".array_record", several_paths=True, fork_safe=False, corruptions=_CORRUPTIONS
    )


class TestUncompressedArrayRecord(ArrayRecordSuite):
    """Read through a map, which does not show a flipped bit of a record."""

    options = "group_size:1,uncompressed"
    traits = SourceTraits(
        record_type=bytes,
        suffix=".array_record",
        several_paths=True,
        corruptions=("flip_signature", "cut_at_block", "not_closed"),
    )


class TestArrayRecordOfMsgpack(ArrayRecordSuite):
    codec = "msgpack"
    traits = SourceTraits(
        suffix=".array_record",
        several_paths=True,
        fork_safe=False,
        dtypes=("float32", "int64", "bool", "float16", "complex64", "uint64"),
        corruptions=_CORRUPTIONS,
    )


@pytest.mark.slow_suite  # the codec is checked in another format, the format with another codec
class TestArrayRecordOfNpz(ArrayRecordSuite):
    codec = "npz"
    traits = SourceTraits(
        suffix=".array_record", several_paths=True, fork_safe=False, value_types=(np.ndarray, bytes, str)
    )


@pytest.mark.slow_suite  # the codec is checked in another format, the format with another codec
class TestArrayRecordOfExample(ArrayRecordSuite):
    codec = "example"
    traits = SourceTraits(suffix=".array_record", several_paths=True, fork_safe=False, value_types=(bytes,))


@pytest.mark.slow_suite  # the codec is checked in another format, the format with another codec
class TestArrayRecordOfTensorProtos(ArrayRecordSuite):
    codec = "tensorprotos"
    traits = SourceTraits(
        suffix=".array_record", several_paths=True, fork_safe=False, value_types=(np.ndarray, bytes, str)
    )
