import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from format_suite import FormatSuite, flip

from dataload.codecs.codec import resolve_codec
from dataload.sources.array_record.reader import ArrayRecordSource
from dataload.testing import SourceTraits

SHAPE = {"suffix": ".array_record", "several_paths": True}
CORRUPTIONS = ("flip_signature", "flip_record", "cut_at_block", "not_closed")


class ArrayRecordSuite(FormatSuite):
    """Files by the original's own writer."""

    source, codec, writing = ArrayRecordSource, None, "group_size:1"

    def __init_subclass__(cls, **more):
        super().__init_subclass__(**more)
        cls.options = {"codec": cls.codec}

    def write(self, path, records):
        codec = resolve_codec(self.codec)
        writer = ArrayRecordWriter(str(path), self.writing)
        for record in records:
            writer.write(record if codec is None else codec.encode(record))
        writer.close()

    def corrupt(self, path, kind):
        if kind.startswith("flip"):
            flip(path, 0 if kind == "flip_signature" else 150)  # behind the headers of file, block and chunk
        else:
            path.write_bytes(path.read_bytes()[:-65536] if kind == "cut_at_block" else b"")


class TestArrayRecord(ArrayRecordSuite):
    traits = SourceTraits(record_type=bytes, corruptions=CORRUPTIONS, **SHAPE)


class TestArrayRecordThroughPackage(ArrayRecordSuite):
    writing = "group_size:1,brotli:1"
    processes_together = False
    traits = SourceTraits(record_type=bytes, fork_safe=False, corruptions=CORRUPTIONS, **SHAPE)


@pytest.mark.filterwarnings("ignore:.*group_size")
@pytest.mark.slow_suite
class TestArrayRecordInGroups(ArrayRecordSuite):
    writing = "group_size:3"
    traits = SourceTraits(record_type=bytes, corruptions=CORRUPTIONS, **SHAPE)


class TestUncompressedArrayRecord(ArrayRecordSuite):
    """Read through a map, which does not show a flipped bit of a record."""

    writing = "group_size:1,uncompressed"
    traits = SourceTraits(record_type=bytes, corruptions=tuple({*CORRUPTIONS} - {"flip_record"}), **SHAPE)


@pytest.mark.slow_suite
class TestArrayRecordOfMsgpack(ArrayRecordSuite):
    codec = "msgpack"
    dtypes = ("float32", "int64", "bool", "float16", "complex64", "uint64")
    traits = SourceTraits(dtypes=dtypes, **SHAPE)


# Each codec is checked in another format, the format with another codec.


@pytest.mark.slow_suite
class TestArrayRecordOfNpz(ArrayRecordSuite):
    codec = "npz"
    traits = SourceTraits(value_types=(np.ndarray, bytes, str), **SHAPE)


@pytest.mark.slow_suite
class TestArrayRecordOfExample(ArrayRecordSuite):
    codec = "example"
    traits = SourceTraits(value_types=(bytes,), **SHAPE)


@pytest.mark.slow_suite
class TestArrayRecordOfTensorProtos(ArrayRecordSuite):
    codec = "tensorprotos"
    traits = SourceTraits(value_types=(np.ndarray, bytes, str), **SHAPE)
