"""The columns of an MDS data set: what their bytes mean. Pure (no I/O).

| encoding | value |
|---|---|
| ``bytes``, ``str``, ``json`` | bytes, text, what the JSON says |
| ``int``; ``str_int``, ``str_float``; ``str_decimal`` | int; int, float; the number as text |
| ``int8`` to ``uint64``, ``float16`` to ``float64`` | an array without axes |
| ``ndarray``, ``ndarray:DTYPE``, ``ndarray:DTYPE:SHAPE`` | an array; what the encoding leaves open, the value says |
| ``jpeg``, ``png``, ``pil`` | (height, width, 3) uint8 |
| ``list[jpeg]``, ``list[png]``, ``list[pil]``, ``jpeg_array`` | a list of images |
| ``pkl`` | refused, unless the user trusts the author |

Numbers are little-endian. Names and layouts: `streaming/base/format/mds/encodings.py` of
https://github.com/mosaicml/streaming.
"""

import functools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload._util.arrays import FIELD_BYTES, check_size, fits
from dataload.codecs.decoders import DECODERS, decode_image
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.types import Array, FieldSpec

_NUMBERS = {
    f"{kind}{bits}": np.dtype(f"{kind}{bits}")
    for kind, sizes in (("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)), ("float", (16, 32, 64)))
    for bits in sizes
}
_DTYPE_CODES = {8 * dtype.itemsize + "uif".index(dtype.kind): dtype for dtype in _NUMBERS.values()}
_EXTENTS = tuple(np.dtype(f"<u{1 << code}") for code in range(4))
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4, "RGBX": 4, "LA": 2}
_MOST_ITEMS = (1 << 32) - 1  # offsets in a shard have 32 bits
_WORD = np.dtype("<u4")

Decode = Callable[[memoryview], Any]
Head = tuple[np.dtype[Any], tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Column:
    """A column; `encoding` is without dtype and shape, `size` is in bytes.

    `size`, `dtype` and `shape` are None if each value has its own; `dtype` also if values are not numbers.
    """

    name: str
    encoding: str
    size: int | None = None
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None

    @property
    def spec(self) -> FieldSpec:
        """Facts about all values."""
        if self.dtype is not None:
            return FieldSpec(str(self.dtype), self.shape)
        return _SPECS.get(self.encoding, FieldSpec("unknown"))

    def decoder(self, *, images: bool, allow_pickle: bool, limit: int) -> Decode | None:
        """Return the function that decodes one value; None for plain bytes, and for values of a known size."""
        if self.encoding == "pkl":
            if allow_pickle:
                return _unpickle
            message = f"column {self.name!r} holds pickles, which can run any code: name the other columns in fields="
            raise ConfigError(f"{message}, or pass allow_pickle=True if you trust the data", key="allow_pickle")
        if self.size is not None or self.encoding == "bytes" or (not images and self.encoding in ("jpeg", "png")):
            return None
        if self.encoding == "ndarray":
            return functools.partial(parse_array, self.dtype, self.shape)
        element = _LISTS.get(self.encoding)
        if element is not None:
            ahead, kind = element
            return functools.partial(_parse_list, _image_decoder(kind, limit), ahead, limit)
        if self.encoding in _TEXTS:
            return _TEXTS[self.encoding]
        return functools.partial(_json, limit) if self.encoding == "json" else _image_decoder(self.encoding, limit)


_IMAGE = FieldSpec("uint8", (None, None, 3))
_SPECS = {
    **dict.fromkeys(("jpeg", "png", "pil"), _IMAGE),
    "bytes": FieldSpec("bytes", ()),
    "str": FieldSpec("str", ()),
    "str_int": FieldSpec("int64", ()),
    "str_float": FieldSpec("float64", ()),
    "str_decimal": FieldSpec("str", ()),
}
_LISTS = {
    **{f"list[{kind}]": (4, kind) for kind in ("jpeg", "png", "pil")},  # a word for the future comes first
    **dict.fromkeys(("jpeg_array", "jpegarray"), (0, "jpeg")),
}


def parse_column(name: str, encoding: str) -> Column:
    """Return the column of a name and an encoding, such as ``"ndarray:float32:3,4"``; ValueError for an unknown one."""
    kind, *rest = encoding.split(":")
    if encoding == "int":
        return Column(name, "int", 8, np.dtype(np.int64), ())
    if encoding in _NUMBERS:
        return Column(name, "number", _NUMBERS[encoding].itemsize, _NUMBERS[encoding], ())
    if kind == "ndarray" and len(rest) <= 2 and (not rest or rest[0] in _NUMBERS):
        dtype = _NUMBERS[rest[0]] if rest else None
        shape = tuple(map(int, rest[1].split(","))) if len(rest) == 2 else None
        if shape is not None and not (fits(shape, math.prod(shape)) and 1 <= math.prod(shape) <= _MOST_ITEMS):
            raise ValueError(f"column {name[:80]!r} has the shape {shape}")
        size = None if shape is None or dtype is None else math.prod(shape) * dtype.itemsize
        return Column(name, kind, size, dtype, shape)
    if encoding not in {*_SPECS, *_LISTS, "json", "pkl"}:
        raise ValueError(f"column {name[:80]!r} has the encoding {encoding[:80]!r}, which is unknown")
    return Column(name, encoding)


def array_head(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: Any) -> Head:
    """Return the dtype and the shape of an array, and the bytes before its numbers, given what the column says."""
    at = 0
    try:
        if dtype is None:
            dtype, at = _DTYPE_CODES[data[0]], 1
        if shape is None:
            axes, extent = data[at] >> 2, _EXTENTS[data[at] & 3]
            stop = at + 1 + axes * extent.itemsize
            shape, at = tuple(np.frombuffer(data[at + 1 : stop], extent).tolist()), stop
            if len(shape) != axes:
                raise ValueError
    except (IndexError, KeyError, ValueError) as error:
        raise CorruptFileError("an array does not begin with its dtype and shape") from error
    return dtype, shape, at


def parse_array(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: memoryview) -> Array:
    """Return the array that a value holds."""
    dtype, shape, at = array_head(dtype, shape, data)
    if (len(data) - at) % dtype.itemsize or not fits(shape, (len(data) - at) // dtype.itemsize):
        raise CorruptFileError(f"an array of {dtype} {shape} has {len(data) - at} bytes")
    return np.frombuffer(bytearray(data[at:]), dtype).reshape(shape)


def _text(data: memoryview) -> str:
    return DECODERS["txt"].decode(bytes(data))


def _integer(data: memoryview) -> int:
    return DECODERS["cls"].decode(bytes(data))


def _float(data: memoryview) -> float:
    try:
        return float(bytes(data))
    except ValueError as error:
        raise CorruptFileError(f"expected a number as text, found {bytes(data[:40])!r}") from error


_TEXTS: dict[str, Decode] = {"str": _text, "str_decimal": _text, "str_int": _integer, "str_float": _float}


def _json(limit: int, data: memoryview) -> Any:
    return DECODERS["json"].decode(bytes(data), limit=limit)  # pyright: ignore[reportCallIssue]


def _unpickle(data: memoryview) -> Any:
    try:
        return pickle.loads(data)  # noqa: S301 - the user has passed allow_pickle=True
    except Exception as error:
        raise CorruptFileError(f"a pickle cannot be loaded: {type(error).__name__} {error}") from error


def _image_decoder(kind: str, limit: int) -> Decode:
    if kind == "pil":
        return functools.partial(_parse_pixels, limit)
    return functools.partial(decode_image, kind=kind.upper(), limit=limit)


def _parse_pixels(limit: int, data: memoryview) -> Array:
    """Return an image stored as width, height, length of the mode, the mode, and the pixels."""
    words = np.frombuffer(data[:12], _WORD).tolist() if len(data) >= 12 else [0, 0, 0]
    width, height, length = words
    mode, pixels = bytes(data[12 : 12 + min(length, 8)]).decode(errors="replace"), data[12 + length :]
    channels = _CHANNELS.get(mode)
    if channels is None:
        raise UnsupportedFormatError(f"a PIL image of mode {mode!r}; supported are {', '.join(_CHANNELS)}")
    if len(pixels) != width * height * channels:
        raise CorruptFileError(f"a PIL image of {height} x {width} pixels of mode {mode} has {len(pixels)} bytes")
    check_size(3 * width * height, limit, "an image")
    image = np.frombuffer(pixels, np.uint8).reshape(height, width, channels)
    return np.repeat(image[..., :1], 3, axis=2) if channels < 3 else image[..., :3].copy()


def _parse_list(decode: Decode, ahead: int, limit: int, data: memoryview) -> list[Any]:
    """Return a list, stored as the number of elements and their sizes, after `ahead` bytes, and the elements."""
    start = ahead + 4
    count = int(np.frombuffer(data[ahead:start], _WORD)[0]) if len(data) >= start else 1
    start += 4 * count
    if start > len(data):
        raise CorruptFileError(f"a list of {count} elements has {len(data)} bytes")
    check_size(FIELD_BYTES * count, limit, f"a list of {count:,} elements")
    ends = start + np.cumsum(np.frombuffer(data[ahead + 4 : start], _WORD), dtype=np.int64)
    if count and ends[-1] != len(data):
        raise CorruptFileError(f"the elements of a list end at byte {ends[-1]}, and the list at byte {len(data)}")
    stops = ends.tolist()
    return [decode(data[first:stop]) for first, stop in zip([start, *stops], stops, strict=False)]
