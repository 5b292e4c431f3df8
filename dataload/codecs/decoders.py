"""What the extension of a tar member says of its content, and how that becomes a value.

Decoders take the member's bytes and never unpickle. A payload that does not decode is a `CorruptFileError`
without a place, which the caller adds.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload._util.optional import load_optional
from dataload.codecs import npz
from dataload.codecs.npy import parse_npy
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError, closest
from dataload.types import Array

__all__ = ["DECODERS", "Decoder", "decode_image", "find_decoder", "known_extension"]

GREATEST_IMAGE = (1 << 30) // 12
"""Pixels that an image may have, 89 million, beyond which Pillow warns: a damaged header, or a file made to fill
the memory."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Turns the bytes of a component into a value.

    Attributes:
        name: As in ``decode={"jpg": "image"}``.
        decode: Takes bytes or a memoryview and keeps no reference to the latter.
        extensions: Last parts of extensions that mean it, in lower case.
        empty: Makes what stands for a missing component; None where there is no such value.
        small: Contents are short, or kept: it gets bytes, which cost less than a view then.
        own: The user's function.
    """

    name: str
    decode: Callable[[Any], Any]
    extensions: tuple[str, ...] = ()
    empty: Callable[[], Any] | None = None
    small: bool = False
    own: bool = False


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"text that is not UTF-8: {error.reason} at byte {error.start} of it") from error


def _integer(data: bytes) -> int:
    try:
        if b"_" in data:  # Python's own spelling
            raise ValueError
        return int(data)  # which refuses more than 4,300 digits
    except ValueError:
        raise CorruptFileError(f"expected a number as text, found {data[:40]!r}") from None


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"JSON that does not parse: {error}") from error


def decode_image(data: bytes | memoryview) -> Array:
    """An image as (height, width, 3) uint8, red, green and blue; transparency is dropped, grey repeated.

    JPEG goes through simplejpeg, which lets other threads run; all else, and JPEG in other colours than YCbCr and
    grey, through Pillow.

    Raises:
        CorruptFileError: It does not decode to its end.
        UnsupportedFormatError: Its pixels hold more than 8 bits a channel.
        MissingDependencyError: Neither package is installed.
    """
    if bytes(data[:2]) == b"\xff\xd8":
        image = _decode_jpeg(data)
        if image is not None:
            return image
    return _decode_with_pillow(data)


def _decode_jpeg(data: bytes | memoryview) -> Array | None:
    """By simplejpeg; None where only Pillow can tell."""
    try:
        simplejpeg = load_optional("simplejpeg", needed_by="decoding JPEG", extra="tar")
    except ImportError:
        return None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:  # a rare subsampling, or damage
        return None
    _check_pixels(height, width)
    if colorspace in ("CMYK", "YCCK"):
        return None
    try:
        return simplejpeg.decode_jpeg(data, "RGB")
    except ValueError as error:
        raise CorruptFileError(f"a JPEG image that does not decode: {error}") from error


def _decode_with_pillow(data: bytes | memoryview) -> Array:
    pillow = load_optional("PIL.Image", needed_by="decoding images", extra="tar", package="pillow")
    try:
        with pillow.open(io.BytesIO(data)) as image:
            _check_pixels(image.height, image.width)
            if image.mode not in _EIGHT_BITS:
                raise UnsupportedFormatError(
                    f"a {image.format} image of mode {image.mode!r} does not fit into 8 bits a channel: decode it with "
                    "a function of your own"
                )
            return np.array(image.convert("RGB"))
    except (CorruptFileError, UnsupportedFormatError):
        raise
    except Exception as error:  # what its plug-ins raise depends on where the damage is
        raise CorruptFileError(f"an image that does not decode: {error}") from error


_EIGHT_BITS = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr"))


def _check_pixels(height: int, width: int) -> None:
    if height * width > GREATEST_IMAGE:
        raise CorruptFileError(f"an image of {height} x {width} pixels, {GREATEST_IMAGE} are accepted")


def _no_pixels() -> Array:
    return np.empty((0, 0, 3), np.uint8)


DECODERS: Mapping[str, Decoder] = {
    decoder.name: decoder
    for decoder in (
        Decoder("bytes", bytes, empty=bytes, small=True),
        Decoder("cls", _integer, ("cls", "cls2"), small=True),
        Decoder(
            "image",
            decode_image,
            ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "bmp", "webp", "gif", "tif", "tiff"),
            _no_pixels,
        ),
        Decoder("json", _json, ("json",), small=True),
        Decoder("npy", parse_npy, ("npy",)),
        Decoder("npz", npz.decode, ("npz",)),
        Decoder("txt", _text, ("txt", "text"), str, small=True),
    )
}

_BY_EXTENSION = {extension: decoder for decoder in DECODERS.values() for extension in decoder.extensions}


def known_extension(extension: str) -> Decoder | None:
    """The decoder that the last part of an extension means, if any: ``left.png`` is an image."""
    return _BY_EXTENSION.get(extension.rpartition(".")[2].lower())


def find_decoder(what: str | Callable[[bytes], Any], extension: str) -> Decoder:
    """The decoder called `what`, or one that calls it.

    Raises:
        ConfigError: There is no decoder of that name.
    """
    if callable(what):
        return Decoder(getattr(what, "__qualname__", type(what).__qualname__), what, small=True, own=True)
    if what not in DECODERS:
        raise ConfigError(
            f"decode[{extension!r}] is {what!r}: {closest(what, DECODERS)}, or a function of bytes",
            key=f"decode.{extension}",
            value=what,
        )
    return DECODERS[what]
