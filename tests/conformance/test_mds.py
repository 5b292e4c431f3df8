import json
import struct

import numpy as np
from format_suite import FormatSuite

from dataload.sources.mds.reader import MDSSource
from dataload.testing import SourceTraits

CODES = {"uint8": 8, "float32": 34, "int64": 65}
ENCODINGS = {bytes: "bytes", str: "str", int: "int", float: "float64"}
SIZES = {"int": 8, "float64": 8}


def encode(value, encoding):
    if encoding == "ndarray":
        extents = b"".join(struct.pack("<I", extent) for extent in value.shape)
        return bytes([CODES[value.dtype.name], value.ndim << 2 | 2]) + extents + value.tobytes()
    if isinstance(value, (bytes, str)):
        return value if isinstance(value, bytes) else value.encode()
    return struct.pack("<q" if encoding == "int" else "<d", value)


def write_shard(directory, records, name="shard.00000.mds"):
    """By the description of the format; records have the same fields."""
    columns = {key: ENCODINGS.get(type(value), "ndarray") for key, value in (records[0] if records else {}).items()}
    samples = []
    for record in records:
        data = [encode(record[key], encoding) for key, encoding in columns.items()]
        variable = [len(part) for part, encoding in zip(data, columns.values(), strict=True) if encoding not in SIZES]
        samples.append(np.array(variable, "<u4").tobytes() + b"".join(data))
    start = 4 * (len(records) + 2)
    offsets = np.cumsum([start, *map(len, samples)])
    content = np.array([len(records), *offsets], "<u4").tobytes() + b"".join(samples)
    (directory / name).write_bytes(content)
    return {
        "column_encodings": [*columns.values()],
        "column_names": [*columns],
        "column_sizes": [SIZES.get(encoding) for encoding in columns.values()],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
        "samples": len(records),
        "size_limit": None,
        "version": 2,
        "zip_data": None,
    }


class TestMDS(FormatSuite):
    traits = SourceTraits(
        several_paths=True, corruptions=("cut_shard", "other_count", "offset_beyond", "other_index", "no_shard")
    )

    def write(self, path, records):
        path.mkdir()
        index = {"shards": [write_shard(path, records)], "version": 2}
        (path / "index.json").write_text(json.dumps(index, sort_keys=True))

    source = MDSSource

    def expected(self, records):
        return [{k: np.array(v) if type(v) is float else v for k, v in record.items()} for record in records]

    def corrupt(self, path, kind):
        shard, index = min(path.glob("*.mds")), path / "index.json"
        data = bytearray(shard.read_bytes())
        if kind == "cut_shard":
            del data[-1]
        elif kind == "no_shard":
            shard.unlink()
            return
        elif kind == "other_index":
            index.write_text(index.read_text().replace('"samples": 12', '"samples": 13'))
        else:
            data[0 if kind == "other_count" else 10] ^= 1
        shard.write_bytes(data)
