from contextlib import suppress

import bson
import numpy as np
import pytest
from format_suite import FormatSuite

from dataload.errors import DataloadError
from dataload.sources.syrah.layout import DTYPES
from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.syrah.writer import SyrahWriter
from dataload.testing import SourceTraits

_DTYPES = tuple(name for name in DTYPES if name != "float128")  # its padding has no fixed bytes


class TestSyrah(FormatSuite):
    """Files with shapes, by our writer; tests/golden/syrah has what the original tool wrote."""

    traits = SourceTraits(
        suffix=".syr",
        several_paths=True,
        value_types=(np.ndarray, bytes, str),
        dtypes=("float32", *_DTYPES),
        corruptions=("index_disagrees", "flip_header", "not_closed"),
    )

    def write(self, path, records):
        with SyrahWriter(path) as writer:
            writer.extend(records)

    source = SyrahSource

    def corrupt(self, path, kind):
        data = bytearray(path.read_bytes())
        offset = int.from_bytes(data[6:14], "little")
        if kind == "flip_header":
            data[0] ^= 1
        elif kind == "not_closed":
            data[:22] = bytes(22)
        else:
            metadata = bson.decode(bytes(data[offset:]))
            first = next(iter(metadata.values()))
            first["size"] = (2**62).to_bytes(8, "little") + first["size"][8:]
            data[offset:] = bson.encode(metadata)
            data[14:22] = (len(data) - offset).to_bytes(8, "little")
        path.write_bytes(data)


@pytest.mark.slow_suite
class TestUnmappedSyrah(TestSyrah):
    """The same, read with `pread`."""

    source, options = SyrahSource, {"map": False}


class TestSyrahByHand(FormatSuite):
    """Files assembled here byte by byte, as the original lays them out: arrays of one dimension, odd offsets."""

    traits = SourceTraits(suffix=".syr", several_paths=True, value_types=(np.ndarray, str))

    def write(self, path, records):
        data, entries = bytearray(b"GS\0\0\2\0" + bytes(16)), {}
        for record in records:
            for name, value in record.items():
                encoded = value.encode() if isinstance(value, str) else value.tobytes()
                dtype = "str" if isinstance(value, str) else value.dtype.name
                entry = entries.setdefault(name, {"offset": b"", "size": b"", "dtype": dtype})
                data += b"\xee"  # a gap, which also puts every array at an odd place
                entry["offset"] += len(data).to_bytes(8, "little")
                entry["size"] += len(encoded).to_bytes(8, "little")
                data += encoded
        metadata = bson.encode(entries or {"x": {"offset": b"", "size": b"", "dtype": "float32"}})
        data[6:14], data[14:22] = len(data).to_bytes(8, "little"), len(metadata).to_bytes(8, "little")
        path.write_bytes(data + metadata)

    source = SyrahSource

    def expected(self, records):
        """The original format keeps no shapes."""
        return [{n: v if type(v) is str else v.ravel() for n, v in record.items()} for record in records]


@pytest.mark.slow_suite
class TestSyrahOfSomeFields(FormatSuite):
    traits = SourceTraits(suffix=".syr", several_paths=True, value_types=(np.ndarray, str))

    def write(self, path, records):
        with SyrahWriter(path) as writer:
            writer.extend([{"unread": b"?" * (index % 5), **record} for index, record in enumerate(records)])

    def open(self, path):
        fields = None
        with SyrahSource(path) as known, suppress(DataloadError):  # let the source under test find out
            fields = [name for name in known.fields if name != "unread"]
        return SyrahSource(path, fields=fields)
