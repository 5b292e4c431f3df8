"""Extents that files claim: of arrays in every codec and format that stores shapes, from none to more than 64 bits.

A shape is right for the bytes, or an error of dataload says that it is not; together, records end as they do alone.
"""

from __future__ import annotations

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

import dataload
from dataload.codecs import msgpack as msgpack_codec
from dataload.codecs import npy, npz, tensorprotos
from dataload.errors import DataloadError
from dataload.sources.array_record.tfds import parse_features
from dataload.sources.arrow.reader import ArrowSource
from dataload.sources.mds.columns import array_head, parse_array, parse_column
from dataload.sources.mds.reader import MDSSource
from dataload.sources.syrah.layout import build_header
from dataload.sources.syrah.reader import SyrahSource

EXTENTS = (0, 1, 2, -1, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64)
SHAPES = [shape for axes in (1, 2) for shape in itertools.product(EXTENTS, repeat=axes)] + [
    (1 << 32, 1 << 31, 2), (0, 1 << 32, 1 << 31), (1 << 62, 2, 2), (3, 0, 1 << 60), (1 << 22, 1 << 21, 1 << 21), (-1,
    -1, 1),
    (1,) * 65, (0,) * 64, (2, 1, 1), (0, 1 << 58), (0, 1 << 41), (1 << 16,) * 4, (1 << 32, 1 << 32, 0),
]  # fmt: skip
DATA = bytes(8)  # one int64, two float32


def sizes(shape):
    """How many int64 to store: none, one, and as many as an int64 that overflows would say."""
    return sorted({0, 1, 2, min(abs(math.prod(shape)) & 0xFFFFFFFFFFFFFFFF, 3)})


def varint(number):
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out + bytes([number]))


def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def npy_file(shape, items):
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape!r}, }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + DATA * items


def npz_file(shape, items):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x.npy", npy_file(shape, items))
    return stream.getvalue()


def tensor(shape, items):
    dims = b"".join(b"\x08" + varint(extent) for extent in shape)
    return field(1, dims + b"\x10" + varint(10) + field(10, bytes(items)) + field(7, b"x"))


def byte_tensor(shape, items):
    dims = b"".join(b"\x08" + varint(extent) for extent in shape)
    return field(1, dims + b"\x10" + varint(3) + field(6, bytes(items)) + field(7, b"x"))


def packed(shape, items):
    kept = [min(max(extent, -(1 << 63)), (1 << 64) - 1) for extent in shape]
    return msgpack.packb({"x": {b"nd": True, b"type": "<i8", b"kind": b"", b"shape": kept, b"data": DATA * items}})


CODECS = {
    "npy": (npy_file, npy.parse_npy, None),
    "npz": (npz_file, npz.decode, None),
    "tensorprotos": (tensor, tensorprotos.decode, tensorprotos.decode_batch),
    "tensorprotos of bytes": (byte_tensor, tensorprotos.decode, tensorprotos.decode_batch),
    "msgpack": (packed, msgpack_codec.decode, None),
}


def outcome(call):
    """The result, or that it is refused; any other error fails the test."""
    try:
        return call()
    except DataloadError:
        return None


@pytest.mark.parametrize("name", CODECS)
def test_codecs(name):
    build, decode, decode_batch = CODECS[name]
    for shape in SHAPES:
        for items in sizes(shape):
            data = build(shape, items)
            alone = outcome(lambda data=data: decode(data))
            if alone is not None:
                records = [{"x": alone}] * 3 if isinstance(alone, np.ndarray) else [alone] * 3
                assert outcome(lambda records=records: dataload.default_collate(records)) is not None, (shape, items)
            if decode_batch is not None:
                together = outcome(lambda data=data: decode_batch([data] * 3, None))
                assert (together is None) >= (alone is None), (shape, items)


def read_everything(make, path, **options):
    with make(path, **options) as source:
        length = len(source)
        together = outcome(lambda: source.read(range(length)))
        alone = [outcome(lambda index=index: source[index]) for index in range(length)]
        batch = outcome(lambda: source.read_batch(range(length)))
        assert (together is None) == (None in alone), "read"
        assert (batch is None) == (together is None), "read_batch"
        _ = source.fields


def mds(folder, encoding, values):
    """An MDS data set of one column."""
    fixed = parse_column("x", encoding).size
    samples = [(b"" if fixed is not None else struct.pack("<I", len(value))) + value for value in values]
    start = 4 * (len(values) + 2)
    edges = np.cumsum([start, *map(len, samples)])
    data = struct.pack(f"<{len(values) + 2}I", len(values), *edges.tolist()) + b"".join(samples)
    shard = {"format": "mds", "version": 2, "column_names": ["x"], "column_encodings": [encoding]}
    shard |= {"column_sizes": [fixed], "samples": len(values), "zip_data": None, "compression": None, "hashes": []}
    shard["raw_data"] = {"basename": "s.mds", "bytes": len(data), "hashes": {}}
    folder.mkdir(exist_ok=True)
    (folder / "s.mds").write_bytes(data)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return str(folder)


def mds_shape(shape):
    code = 3 if max(shape) >= 1 << 32 else 2
    kept = [extent & ((1 << 64) - 1) for extent in shape]
    return bytes([len(shape) << 2 & 0xFF | code]) + b"".join(
        struct.pack("<Q" if code == 3 else "<I", n & ((1 << 64 if code == 3 else 1 << 32) - 1)) for n in kept
    )


def test_mds(tmp_path):
    for shape in [each for each in SHAPES if len(each) < 64][::3]:
        head = mds_shape(shape)
        for items in sizes(shape):
            value = head + DATA * items
            outcome(lambda value=value: parse_array(np.dtype("int64"), None, memoryview(value)))
            outcome(lambda value=value: array_head(np.dtype("int64"), None, value))
            outcome(lambda value=value: read_everything(MDSSource, mds(tmp_path / "a", "ndarray:int64", [value] * 3)))
            outcome(
                lambda value=value: read_everything(
                    MDSSource, mds(tmp_path / "b", "ndarray", [bytes([65]) + value] * 2)
                )
            )
        encoding = f"ndarray:int64:{','.join(map(str, shape))}"
        with np.errstate(all="raise"):
            try:
                path = mds(tmp_path / "c", encoding, [DATA] * 2)
            except ValueError:  # what the index is refused for
                continue
            outcome(lambda path=path: read_everything(MDSSource, path))


def test_mds_of_more_than_64_bits(tmp_path):
    """2^32 x 2^32 are 2^64 items, of which an int64 sees none."""
    value = mds_shape((1 << 32, 1 << 32))
    with dataload.open(mds(tmp_path / "x", "ndarray:uint8", [value] * 2)) as source:
        for read in (lambda: source[0], lambda: source.read([0, 1]), lambda: source.read_batch([0, 1])):
            with pytest.raises(
                dataload.CorruptFileError,
                match=r"s\.mds, .*record 0: field 'x': an array of uint8 \(4294967296, 4294967296\) has 0 bytes",
            ):
                read()


def test_syrah(tmp_path):
    for shape in SHAPES[::3]:
        fit = [extent for extent in shape if -(1 << 63) <= extent < 1 << 63]
        for items in sizes(shape):

            def table(*numbers):
                return struct.pack(f"<{len(numbers)}q", *numbers)

            column = {"offset": table(22, 22), "size": table(8 * items, 8 * items), "dtype": "int64"}
            column["shape"] = {"ndim": table(len(fit)), "dims": table(*fit)}
            document = bson.encode({"x": column})
            path = tmp_path / "x.syr"
            path.write_bytes(build_header(22 + 8 * items, len(document)) + DATA * items + document)
            outcome(lambda path=path: read_everything(SyrahSource, path))
            del column["shape"]
            document = bson.encode({"x": column})
            path.write_bytes(build_header(22 + 8 * items, len(document)) + DATA * items + document)
            outcome(lambda path=path, shape=shape: read_everything(SyrahSource, path, shapes={"x": shape}))


def test_features():
    example = dataload.codecs.example.encode({"x": np.arange(1, dtype=np.int64)})
    for shape in SHAPES:
        tensors = {"pythonClassName": "tensorflow_datasets.core.features.tensor_feature.Tensor"}
        tensors["tensor"] = {"shape": {"dimensions": list(map(str, shape))}, "dtype": "int64", "encoding": "none"}
        top = {"pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict"}
        text = json.dumps({**top, "featuresDict": {"features": {"x": tensors}}})
        codec = outcome(lambda text=text: parse_features(text, "features.json"))
        if codec is not None:
            record = outcome(lambda codec=codec: codec.decode(example))
            if record is not None:
                assert dataload.default_collate([record] * 3)["x"].shape[0] == 3


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_tensors_of_arrow(tmp_path, compression):
    """The shape of a tensor is text in the metadata of its column."""
    for shape in SHAPES[::9]:
        for permutation in (None, list(range(len(shape)))[::-1], [0] * len(shape), [7]):
            for items in (1, 2):
                metadata = {"shape": list(shape)} | ({} if permutation is None else {"permutation": permutation})
                kind = {
                    b"ARROW:extension:name": b"arrow.fixed_shape_tensor",
                    b"ARROW:extension:metadata": json.dumps(metadata).encode(),
                }
                storage = pa.field("x", pa.list_(pa.int64(), items), metadata=kind)
                column = pa.FixedSizeListArray.from_arrays(pa.array(range(2 * items)), items)
                path = tmp_path / "x.arrow"
                with pa.OSFile(str(path), "wb") as file:
                    options = pa.ipc.IpcWriteOptions(compression=compression)
                    with pa.ipc.new_file(file, pa.schema([storage]), options=options) as writer:
                        writer.write_batch(pa.record_batch([column], schema=pa.schema([storage])))
                outcome(lambda path=path: read_everything(ArrowSource, path))
