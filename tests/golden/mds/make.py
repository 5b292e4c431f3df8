"""Write the data sets of this folder: python make.py, with mosaicml-streaming 0.13.0."""

import json
import os
import shutil
from decimal import Decimal

import numpy as np
from PIL import Image
from streaming import LocalDataset, MDSWriter

HERE = os.path.dirname(os.path.abspath(__file__))
RNG = np.random.default_rng(17)
SCALARS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)] + ["float16", "float32", "float64"]
ALL = {
    **{name: name for name in SCALARS},
    **{name: name for name in ("bytes", "str", "int", "str_int", "str_float", "str_decimal", "json")},
    "any": "ndarray",
    "typed": "ndarray:float32",
    "fixed": "ndarray:int16:2,3",
}
SMALL = {"data": "bytes", "label": "int"}
IMAGES = {name: name for name in ("jpeg", "png", "pil", "list[jpeg]", "list[png]", "list[pil]", "jpeg_array")}


def sample(number):
    record = {name: np.dtype(name).type(3 * number + 0.5 * name.startswith("f")) for name in SCALARS}
    return record | {
        "bytes": RNG.bytes(number * 5),
        "str": "é" * number,
        "int": number - 2**40,
        "str_int": 10**number,
        "str_float": number / 3,
        "str_decimal": Decimal(f"{number}.10"),
        "json": {"a": [number, None], "b": "x"},
        "any": RNG.integers(0, 100, (number % 3 + 1, 300)[: number % 2 + 1]).astype(
            "uint8" if number % 2 else "float64"
        ),
        "typed": RNG.random((2, number + 1), np.float32),
        "fixed": RNG.integers(-100, 100, (2, 3)).astype("int16"),
    }


def image(number, mode="RGB"):
    pixels = Image.fromarray(RNG.integers(0, 256, (4 + number, 5, 3)).astype("uint8"))
    return pixels.convert(mode)


def images(number):
    several = [image(1), image(2)]
    files = []
    for one in several:
        one.save(os.path.join(HERE, "tmp.jpg"), "JPEG", quality=95)
        with open(os.path.join(HERE, "tmp.jpg"), "rb") as stream:
            files.append(bytearray(stream.read()))
        os.remove(os.path.join(HERE, "tmp.jpg"))
    record = dict.fromkeys(("list[jpeg]", "list[png]", "list[pil]"), several)
    return record | {
        "jpeg": image(number),
        "png": image(number, "L" if number else "RGB"),
        "pil": image(number, ("RGB", "L", "RGBA")[number]),
        "jpeg_array": files,
    }


def as_json(value):
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Image.Image):
        value = np.asarray(value.convert("RGB"))
    if isinstance(value, (np.ndarray, np.generic)):
        return {"dtype": str(value.dtype), "shape": value.shape, "values": value.ravel().tolist()}
    if isinstance(value, list) and value and isinstance(value[0], Image.Image):
        return list(map(as_json, value))
    return {"value": str(value) if isinstance(value, Decimal) else value}


def write(name, columns, records, **options):
    out = os.path.join(HERE, name)
    shutil.rmtree(out, ignore_errors=True)
    with MDSWriter(out=out, columns=columns, **options) as writer:
        for record in records:
            writer.write(record)
    if "compression" in options or "pkl" in columns.values():
        return [{key: as_json(value) for key, value in record.items()} for record in records]
    return [{key: as_json(value) for key, value in record.items()} for record in LocalDataset(out)]


def main():
    small = [{"data": RNG.bytes(30) * 3, "label": number} for number in range(7)]
    expected = {
        "all": write("all", ALL, map(sample, range(9)), size_limit=3_000),
        "images": write("images", IMAGES, map(images, range(3))),
        "pickles": write("pickles", {"label": "int", "object": "pkl"}, [{"label": 1, "object": [1, 2]}]),
    }
    for compression in ("zstd:7", "gz", "bz2", "br:4", "snappy"):
        name = compression.partition(":")[0]
        expected[name] = write(name, SMALL, small, compression=compression, size_limit=500, hashes=["sha1"])
    with open(os.path.join(HERE, "expected.json"), "w") as stream:
        json.dump(expected, stream)


main()
