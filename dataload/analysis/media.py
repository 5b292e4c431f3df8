"""Images and audio in records, as small PNG and WAV files for pages. Nothing here trusts its input."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dataload.codecs.audio import decode_audio, decode_rate, rate_field
from dataload.codecs.decoders import decode_image
from dataload.errors import DataloadError
from dataload.types import Array

Pixels: TypeAlias = npt.NDArray[np.uint8]

_LEAST_SIDE = 8  # smaller arrays are read more easily as numbers
_IMAGE_LIMIT = 1 << 28  # bytes of memory to decode one image with: 22 megapixels
_AUDIO_LIMIT = 1 << 26
_AUDIO_SECONDS = 30
_LEAST_SECONDS = 0.01  # fewer numbers are features of a record
_RATES = range(1000, 400_001)


class Audio(NamedTuple):
    """Samples, (frames, channels) float32 in [-1, 1], and frames per second."""

    samples: npt.NDArray[np.float32]
    rate: int


def find_image(value: Any) -> Pixels | None:
    """Return a value as an image, (height, width, 3) uint8; None if it is none.

    Images are the bytes of an image file; and arrays of uint8, or of floats with three channels, of shape (height,
    width), (height, width, 1 or 3) or (1 or 3, height, width). Floats outside [0, 1] are scaled to their range.
    """
    if isinstance(value, (bytes, memoryview)):
        try:
            return decode_image(cast("bytes", value), limit=_IMAGE_LIMIT)
        except DataloadError:  # no image, a broken one, or no library to decode it
            return None
    if not isinstance(value, np.ndarray) or value.ndim not in (2, 3) or not value.size:
        return None
    array = cast("Array", value)
    if array.ndim == 3 and array.shape[2] not in (1, 3):
        array = np.moveaxis(array, 0, 2)
    channels = array.shape[2] if array.ndim == 3 else 1
    kinds = "uf" if channels == 3 else "u"
    if channels not in (1, 3) or min(array.shape[:2]) < _LEAST_SIDE or array.dtype.kind not in kinds:
        return None
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return None
    return np.broadcast_to(_to_bytes(array).reshape(*array.shape[:2], channels), (*array.shape[:2], 3))


def _to_bytes(array: Array) -> Pixels:
    if array.dtype.kind == "u":
        return array.astype(np.uint8, copy=False)
    floats = np.nan_to_num(array.astype(np.float32), posinf=0, neginf=0)
    low, high = float(floats.min()), float(floats.max())
    if low < 0 or high > 1:
        floats = (floats - low) / max(high - low, 1e-9)
    return (floats * 255).astype(np.uint8)


def find_audio(record: Any, name: str) -> Audio | None:
    """Return the audio in the field of a record; None if it is none.

    Audio is the bytes of an audio file, or a float array of shape (frames,) or (frames, channels), of 10 ms or more, in
    a record with its sample rate in the field that `dataload.codecs.audio.rate_field` names, or in `sample_rate`.
    """
    value: Any = record[name]
    if isinstance(value, (bytes, memoryview)):
        try:
            return Audio(decode_audio(cast("bytes", value), limit=_AUDIO_LIMIT), decode_rate(cast("bytes", value)))
        except DataloadError:
            return None
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.ndim not in (1, 2) or not value.size:
        return None
    fields = cast("Mapping[str, Any]", record)
    rate = next((fields[each] for each in (rate_field(name), "sample_rate") if each in fields), None)
    samples = cast("Array", value).reshape(len(value), -1)
    try:
        rate = int(np.asarray(rate).reshape(-1)[0]) if rate is not None else 0
    except (TypeError, ValueError):
        return None
    if rate not in _RATES or samples.shape[1] > 2 or len(samples) < _LEAST_SECONDS * rate:
        return None
    return Audio(samples.astype(np.float32), rate)


def thumbnail(image: Pixels, side: int) -> Pixels:
    """Return an image reduced by a whole factor, so that neither side is longer than `side`: means of its pixels."""
    factor = -(-max(image.shape[:2]) // side)
    if factor <= 1:
        return np.ascontiguousarray(image)
    factors = min(factor, image.shape[0]), min(factor, image.shape[1])
    height, width = image.shape[0] // factors[0], image.shape[1] // factors[1]
    tiles = image[: height * factors[0], : width * factors[1]].reshape(height, factors[0], width, factors[1], 3)
    return tiles.mean(axis=(1, 3)).astype(np.uint8)


def to_png(image: Pixels) -> bytes:
    """Return the PNG file of an image, (height, width, 3) uint8."""
    height, width, _ = image.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with the number of its filter: none
    lines[:, 1:] = image.reshape(height, 3 * width)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def to_wav(audio: Audio) -> bytes:
    """Return the WAV file of the first half minute of some audio, in 16 bits."""
    samples = np.nan_to_num(audio.samples[: _AUDIO_SECONDS * audio.rate])
    data = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
    channels = audio.samples.shape[1]
    form = struct.pack("<HHIIHH", 1, channels, audio.rate, audio.rate * channels * 2, channels * 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body
