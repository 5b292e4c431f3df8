"""Extents that files claim: of arrays in every codec and format that stores shapes, from none to more than 64 bits.

A shape is right for the bytes, or an error of dataload says that it is not; together, records end as they do alone.
"""

import functools
import io
import itertools
import json
import math
import struct
import zipfile

import bson
import msgpack
import numpy as np
import pyarrow as pa
import pytest
import tables  # noqa: F401 - starts what pyarrow keeps
from targets import TARGETS, read_all
from wire import field, varint

import dataload
from dataload.codecs import example
from dataload.errors import ConfigError, CorruptFileError, DataloadError
from dataload.sources.array_record.tfds import parse_features

EXTENTS = (0, 1, 2, -1, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64)
SHAPES = [shape for axes in (1, 2) for shape in itertools.product(EXTENTS, repeat=axes)] + [
    *((1 << 32, 1 << 31, 2), (0, 1 << 32, 1 << 31), (1 << 62, 2, 2), (3, 0, 1 << 60), (1 << 22, 1 << 21, 1 << 21)),
    *((-1, -1, 1), (1,) * 65, (0,) * 64, (2, 1, 1), (0, 1 << 58), (0, 1 << 41), (1 << 16,) * 4, (1 << 32, 1 << 32, 0)),
]
DATA = bytes(8)  # one int64, two float32


def sizes(shape):
    """How many int64 to store: none, one, and as many as an int64 that overflows would say."""
    return sorted({0, 1, 2, min(abs(math.prod(shape)) & 0xFFFFFFFFFFFFFFFF, 3)})


def npy_file(shape, items):
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape!r}, }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + DATA * items


def npz_file(shape, items):
    with zipfile.ZipFile(stream := io.BytesIO(), "w") as archive:
        archive.writestr("extents.npy", npy_file(shape, items))
    return stream.getvalue()


def tensor(shape, items, kind=10, number=10):
    dims = b"".join(b"\x08" + varint(extent) for extent in shape)
    return field(1, dims + b"\x10" + varint(kind) + field(number, bytes(items)) + field(7, b"x"))


def packed(shape, items):
    kept = [min(max(extent, -(1 << 63)), (1 << 64) - 1) for extent in shape]
    return msgpack.packb({"x": {b"nd": True, b"type": "<i8", b"kind": b"", b"shape": kept, b"data": DATA * items}})


def syrah_file(shape, items):
    fit = [extent for extent in shape if -(1 << 63) <= extent < 1 << 63]
    column = {"offset": table(22, 22), "size": table(8 * items, 8 * items), "dtype": "int64"}
    column["shape"] = {"ndim": table(len(fit)), "dims": table(*fit)}
    document = bson.encode({"x": column})
    return b"GS\0\0\2\0" + table(22 + 8 * items, len(document)) + DATA * items + document


def table(*numbers):
    return struct.pack(f"<{len(numbers)}q", *numbers)


@pytest.mark.parametrize(
    ("name", "build", "every"),
    [
        ("npy", npy_file, 1),
        ("npz", npz_file, 1),
        ("tensorprotos", tensor, 1),
        ("tensorprotos", functools.partial(tensor, kind=3, number=6), 1),
        ("msgpack", packed, 1),
        ("syrah", syrah_file, 7),
    ],
)
def test_extents_are_right_or_refused(name, build, every):
    for shape in SHAPES[::every]:
        for items in sizes(shape):
            TARGETS[name][0](build(shape, items))


def mds(folder, encoding, values):
    fixed = encoding.count(":") == 2
    samples = [(b"" if fixed else struct.pack("<I", len(value))) + value for value in values]
    edges = np.cumsum([4 * (len(values) + 2), *map(len, samples)])
    data = struct.pack(f"<{len(values) + 2}I", len(values), *edges.tolist()) + b"".join(samples)
    shard = {"format": "mds", "version": 2, "column_names": ["x"], "column_encodings": [encoding], "hashes": []}
    shard |= {"column_sizes": [len(values[0]) if fixed else None], "samples": len(values), "zip_data": None}
    shard |= {"compression": None, "raw_data": {"basename": "s.mds", "bytes": len(data), "hashes": {}}}
    folder.mkdir(exist_ok=True)
    (folder / "s.mds").write_bytes(data)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


def mds_shape(shape):
    code, width, letter = (3, 64, "Q") if max(shape) >= 1 << 32 else (2, 32, "I")
    extents = (struct.pack(f"<{letter}", extent & ((1 << width) - 1)) for extent in shape)
    return bytes([len(shape) << 2 & 0xFF | code]) + b"".join(extents)


def test_mds(tmp_path):
    for shape in [each for each in SHAPES if len(each) < 64][::13]:
        columns = [(f"ndarray:int64:{','.join(map(str, shape))}", DATA)]
        for items in sizes(shape):
            value = mds_shape(shape) + DATA * items
            columns += [("ndarray:int64", value), ("ndarray", bytes([65]) + value)]
        for encoding, value in columns:
            try:
                source = dataload.open(mds(tmp_path / "x", encoding, [value] * 3))
            except (ConfigError, CorruptFileError):
                continue
            read_all(source, 1000)
    # 2^32 x 2^32 are 2^64 items, of which an int64 sees none.
    with dataload.open(mds(tmp_path / "x", "ndarray:uint8", [mds_shape((1 << 32, 1 << 32))] * 2)) as source:
        for read in (lambda: source[0], lambda: source.read([0, 1]), lambda: source.read_batch([0, 1])):
            with pytest.raises(
                CorruptFileError, match=r"record 0: field 'x': .*\(4294967296, 4294967296\) has 0 bytes"
            ):
                read()


def test_features():
    features = "tensorflow_datasets.core.features"
    record = example.encode({"x": np.arange(1)})
    for shape in SHAPES:
        tensors = {"pythonClassName": f"{features}.tensor_feature.Tensor"}
        tensors["tensor"] = {"shape": {"dimensions": list(map(str, shape))}, "dtype": "int64", "encoding": "none"}
        top = {
            "pythonClassName": f"{features}.features_dict.FeaturesDict",
            "featuresDict": {"features": {"x": tensors}},
        }
        try:
            found = parse_features(json.dumps(top), "features.json").decode(record)
        except DataloadError:
            continue
        assert dataload.default_collate([found] * 3)["x"].size == 3


def test_tensors_of_arrow():
    """The shape of a tensor is text in the metadata of its column."""
    for shape in SHAPES[::29]:
        for permutation in (None, list(range(len(shape)))[::-1], [0] * len(shape), [7]):
            for items in (1, 2):
                metadata = {"shape": list(shape)} | ({} if permutation is None else {"permutation": permutation})
                kind = {"ARROW:extension:name": "arrow.fixed_shape_tensor"}
                kind["ARROW:extension:metadata"] = json.dumps(metadata)
                schema = pa.schema([pa.field("x", pa.list_(pa.int64(), items), metadata=kind)])
                column = pa.FixedSizeListArray.from_arrays(pa.array(range(2 * items)), items)
                options = pa.ipc.IpcWriteOptions(compression=(None, "zstd")[len(shape) % 2])
                with pa.ipc.new_file(stream := io.BytesIO(), schema, options=options) as writer:
                    writer.write_batch(pa.record_batch([column], schema=schema))
                TARGETS["arrow"][0](stream.getvalue())
