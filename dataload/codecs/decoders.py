"""Decoders of components of a record, such as files in a tar archive, chosen by extension.

Decoders take the component's bytes and never unpickle. Their CorruptFileErrors have no path, which the caller adds.
"""

import functools
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dataload._util.arrays import MAX_RECORD_BYTES, check_size, pooled_empty
from dataload._util.lazy import load_optional
from dataload.codecs import npz
from dataload.codecs.audio import AUDIO_EXTENSIONS, decode_audio, decode_rate, no_audio
from dataload.codecs.npz import parse_npy
from dataload.errors import ConfigError, CorruptFileError, MissingDependencyError, UnsupportedFormatError, closest
from dataload.types import Array, FieldSpec

_PIXEL_BYTES = 12
"""Most that decoding takes: Pillow's pixels, a copy of them as bytes, and ours. Pillow's own limit has it, too."""

_WEBP_PIXEL_BYTES = 24
"""The same for WebP, whose decoder has two pictures of its own."""

_JSON_BYTES = 32
"""Maximum memory of JSON values per byte of text: an empty list or table, and its item in a list."""

_GREATEST_BATCH = 1 << 30  # bytes: beyond, one image must decode before memory is allocated for all


@dataclass(frozen=True, slots=True)
class Decoder:
    """A function from the bytes of a component to a value."""

    name: str  # as in ``decode={"jpg": "image"}``
    decode: Callable[[Any], Any]  # takes bytes or a memoryview, and keeps no reference to the latter
    extensions: tuple[str, ...] = ()  # last suffixes of its file extensions, in lower case
    empty: Callable[[], Any] | None = None  # makes the value of a missing component, if it may miss
    small: bool = False  # whether contents are short or kept, so that bytes cost less than a view
    own: bool = False  # whether it is the user's function
    limited: bool = False  # whether it takes `limit`, bytes of a record, as values outgrow their bytes
    spec: FieldSpec | None = None  # of all its values; None if they vary
    kind: str | None = None  # the format of images that the extension names; None for any of `IMAGE_KINDS`


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"text is not UTF-8: {error.reason} at byte {error.start} of it") from error


def _integer(data: bytes) -> int:
    try:
        if b"_" in data:  # which Python accepts
            raise ValueError
        return int(data)  # refuses more than 4,300 digits
    except ValueError:
        raise CorruptFileError(f"expected a number as text, found {data[:40]!r}") from None


def _json(data: bytes, limit: int = MAX_RECORD_BYTES) -> Any:
    check_size(_JSON_BYTES * len(data), limit, f"JSON of {len(data):,} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"invalid JSON: {error}") from error


IMAGE_KINDS = {
    **dict.fromkeys(("jpg", "jpeg"), "JPEG"),
    "png": "PNG",
    **dict.fromkeys(("ppm", "pgm", "pbm", "pnm"), "PPM"),
    "bmp": "BMP",
    "webp": "WEBP",
    "gif": "GIF",
    **dict.fromkeys(("tif", "tiff"), "TIFF"),
}
"""Extension -> format, as Pillow calls it. Pillow decodes no other: for EPS, it would start a program."""

_MAGIC = re.compile(
    rb"(?P<JPEG>\xff\xd8)|(?P<PNG>\x89PNG\r\n\x1a\n)|(?P<PPM>P[0-6fy])|(?P<BMP>BM)|(?P<WEBP>RIFF.{4}WEBP)"
    rb"|(?P<GIF>GIF8[79]a)|(?P<TIFF>II[*+]\0|II\0\*|MM\0[*+]|MM\*\0)|(?P<EPS>%!PS|\xc5\xd0\xd3\xc6)|(?P<PDF>%PDF)",
    re.DOTALL,
)


def decode_image(
    data: bytes | memoryview, out: Array | None = None, *, kind: str | None = None, limit: int = MAX_RECORD_BYTES
) -> Array:
    """Decode an image to RGB, (height, width, 3) uint8. Transparency is dropped, and grey is repeated.

    The pixels are Pillow's, bit for bit. simplejpeg, which releases the GIL, decodes JPEG in YCbCr and grey; Pillow
    decodes the rest. Both use libjpeg-turbo's slow integer DCT and smooth ("fancy") upsampling: the fast variants save
    5 to 30% of the time, but change pixels by up to 120 of 255. Of more than 8 bits per channel, colours keep the upper
    8, as in Pillow; grey images are an UnsupportedFormatError. EXIF orientation is not applied: see `decode_upright`.

    `out` is C-contiguous memory to decode into. `kind` is the format that the image must have, in Pillow's words; None
    for any of `IMAGE_KINDS`. Decoding may take `limit` bytes of memory: 12 for each pixel, 24 in WebP.
    """
    kind = _kind_to_decode(data, kind)
    if kind == "JPEG":
        image = _decode_jpeg(data, out, limit)
        if image is not None:
            return image
    return _decode_with_pillow(data, out, kind, limit)


def _kind_to_decode(data: bytes | memoryview, kind: str | None) -> str:
    """Return the format of an image's content; raise if it is unknown, or not the expected one."""
    magic = _MAGIC.match(data)
    found = None if magic is None else magic.lastgroup
    if found in _KINDS and kind in (None, found):
        return found
    begin = f"it begins with {bytes(data[:8])!r}" if found is None else f"its content is {found}"
    if kind is None:
        raise CorruptFileError(f"an image cannot be decoded: {begin}; known are {', '.join(_KINDS)}")
    hint = "" if found is None else ": rename it by its format, or decode it with your own function"
    raise CorruptFileError(f"an image that is named as {kind} cannot be decoded as such: {begin}{hint}")


def decode_images(
    contents: Sequence[bytes | memoryview], kind: str | None = None, limit: int = MAX_RECORD_BYTES
) -> Array | None:
    """Decode JPEG or PNG images of one size to (rows, height, width, 3) uint8; None if `decode_image` must be used."""
    size = size_in_header(contents[0])
    if size is None or any(size_in_header(content) != size for content in contents[1:]):
        return None
    shape = (len(contents), *size, 3)
    if math.prod(shape) > _GREATEST_BATCH:
        return None
    try:
        out = pooled_empty(shape, np.uint8)
        for row, content in zip(out, contents, strict=True):
            decode_image(content, row, kind=kind, limit=limit)
    except (CorruptFileError, UnsupportedFormatError, MissingDependencyError, MemoryError):
        return None
    return out


def is_jpeg(data: bytes | memoryview) -> bool:
    return bytes(data[:2]) == _JPEG


def size_in_header(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return height and width of a PNG or a JPEG that simplejpeg decodes; None otherwise."""
    if is_jpeg(data):
        try:
            height, width, colorspace, _ = load_simplejpeg().decode_jpeg_header(data)
        except (ImportError, ValueError):
            return None
        return None if colorspace in _FOR_PILLOW else (height, width)
    if bytes(data[:16]) == _PNG and len(data) >= 24:
        return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
    return None


_JPEG = b"\xff\xd8"
_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"  # width and height follow, 4 bytes each
_FOR_PILLOW = ("CMYK", "YCCK")
_KINDS = tuple(dict.fromkeys(IMAGE_KINDS.values()))


def load_simplejpeg() -> Any:
    return load_optional("simplejpeg", needed_by="decoding JPEG", extra="tar")


def _decode_jpeg(data: bytes | memoryview, out: Array | None, limit: int) -> Array | None:
    try:
        simplejpeg = load_simplejpeg()
    except ImportError:
        return None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:  # a rare subsampling, or damage
        return None
    check_pixels(height, width, limit)
    if colorspace in _FOR_PILLOW:
        return None
    _check_out(out, height, width)
    try:
        return simplejpeg.decode_jpeg(data, "RGB", buffer=out)
    except ValueError as error:
        raise CorruptFileError(f"a JPEG image cannot be decoded: {error}") from error


def _decode_with_pillow(data: bytes | memoryview, out: Array | None, kind: str, limit: int) -> Array:
    pillow = load_optional("PIL.Image", needed_by="decoding images", extra="tar", package="pillow")
    try:
        if kind == "WEBP":  # whose frames are allocated when it is opened
            check_pixels(*_webp_size(data), limit, _WEBP_PIXEL_BYTES)
        with pillow.open(io.BytesIO(data), formats=(kind,)) as image:
            check_pixels(image.height, image.width, limit)
            tags = getattr(image, "tag_v2", {}) if kind == "TIFF" else {}
            check_pixels(tags.get(_TILE_LENGTH, 1), tags.get(_TILE_WIDTH, 1), limit)
            if image.mode not in _EIGHT_BITS:
                raise UnsupportedFormatError(
                    f"a {image.format} image of mode {image.mode!r} does not fit in 8 bits per channel: decode it with "
                    "a function of your own"
                )
            _check_out(out, image.height, image.width)
            pixels = image
            if image.mode != "RGB":
                pixels = image.convert("RGB")
                image.close()  # frees its pixels
            if out is None:
                return np.array(pixels)
            out[:] = np.asarray(pixels)
            return out
    except (CorruptFileError, UnsupportedFormatError, MemoryError):
        raise
    except Exception as error:  # Pillow's plug-ins raise various errors
        raise CorruptFileError(f"an image cannot be decoded: {str(error) or type(error).__name__}") from error


_ORIENTATION = 274  # the EXIF tag
_TURNS: Mapping[int, Callable[[Array], Array]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90,
}


def decode_upright(data: bytes | memoryview, *, kind: str | None = None, limit: int = MAX_RECORD_BYTES) -> Array:
    """Decode an image as `decode_image` does, and turn it as its EXIF orientation says. Pillow always turns TIFF."""
    pixels = decode_image(data, kind=kind, limit=limit)
    pillow = load_optional("PIL.Image", needed_by="EXIF orientation", extra="tar", package="pillow")
    try:
        with pillow.open(io.BytesIO(data), formats=tuple(IMAGE_KINDS.values())) as image:  # reads the header only
            turn = None if image.format == "TIFF" else _TURNS.get(image.getexif().get(_ORIENTATION))
    except Exception as error:  # Pillow's plug-ins raise various errors
        raise CorruptFileError(f"EXIF data cannot be read: {str(error) or type(error).__name__}") from error
    return pixels if turn is None else np.ascontiguousarray(turn(pixels))


_EIGHT_BITS = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr"))


_TILE_WIDTH, _TILE_LENGTH = 322, 323  # tags of TIFF: a tile is allocated whole, even if the image is smaller


def _webp_size(head: bytes | memoryview) -> tuple[int, int]:
    if head[12:16] == b"VP8X":
        return 1 + int.from_bytes(head[27:30], "little"), 1 + int.from_bytes(head[24:27], "little")
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    return int.from_bytes(head[28:30], "little") & 0x3FFF, int.from_bytes(head[26:28], "little") & 0x3FFF


def check_pixels(height: int, width: int, limit: int, each: int = _PIXEL_BYTES) -> None:
    if height * width > limit // each:
        raise CorruptFileError(
            f"an image of {height} x {width} pixels; the limit is {limit // each}, with max_record_bytes={limit:,} and "
            f"{each} bytes for each"
        )


def _check_out(out: Array | None, height: int, width: int) -> None:
    if out is not None and out.shape != (height, width, 3):
        raise CorruptFileError(f"an image of {height} x {width} pixels; its batch has {out.shape[0]} x {out.shape[1]}")


def _no_pixels() -> Array:
    return np.empty((0, 0, 3), np.uint8)


DECODERS: Mapping[str, Decoder] = {
    decoder.name: decoder
    for decoder in (
        Decoder(
            "audio", decode_audio, AUDIO_EXTENSIONS, no_audio, limited=True, spec=FieldSpec("float32", (None, None))
        ),
        Decoder("bytes", bytes, empty=bytes, small=True, spec=FieldSpec("bytes", ())),
        Decoder("cls", _integer, ("cls", "cls2"), small=True, spec=FieldSpec("int64", ())),
        Decoder(
            "image",
            decode_image,
            tuple(IMAGE_KINDS),
            _no_pixels,
            limited=True,
            spec=FieldSpec("uint8", (None, None, 3)),
        ),
        Decoder("json", _json, ("json",), small=True, limited=True),
        Decoder("npy", parse_npy, ("npy",)),
        Decoder("npz", npz.decode, ("npz",), limited=True, spec=FieldSpec("unknown")),
        Decoder("sample_rate", decode_rate, spec=FieldSpec("int64", ())),
        Decoder("upright", decode_upright, (), _no_pixels, limited=True, spec=FieldSpec("uint8", (None, None, 3))),
        Decoder("txt", _text, ("txt", "text"), str, small=True, spec=FieldSpec("str", ())),
    )
}

_BY_EXTENSION = {extension: decoder for decoder in DECODERS.values() for extension in decoder.extensions}


def known_extension(extension: str) -> Decoder | None:
    """Return the decoder for the last suffix of an extension, such as ``left.png``, or None."""
    return _BY_EXTENSION.get(extension.rpartition(".")[2].lower())


def find_decoder(what: str | Callable[[bytes], Any], extension: str) -> Decoder:
    if callable(what):
        return Decoder(getattr(what, "__qualname__", type(what).__qualname__), what, small=True, own=True)
    if what not in DECODERS:
        raise ConfigError(
            f"decode[{extension!r}] is {what!r}: {closest(what, DECODERS)}, or pass a function of bytes",
            key=f"decode.{extension}",
            value=what,
        )
    return DECODERS[what]


def plan_decoders(
    decode: str | Mapping[str, str | Callable[[bytes], Any]] | None, *, case_sensitive: bool = True
) -> dict[str, Decoder]:
    """Return decoders by extension or last suffix, as `decode` names them; none for None and names such as "auto"."""
    table = {} if decode is None or isinstance(decode, str) else decode
    return {(n if case_sensitive else n.lower()): find_decoder(what, n) for n, what in table.items()}


def for_extension(decoder: Decoder, extension: str, limit: int) -> Decoder:
    if not decoder.limited:
        return decoder
    return _limited(decoder, image_kind(extension) if decoder.name in ("image", "upright") else None, limit)


def image_kind(name: str) -> str | None:
    """Return the image format that a name or an extension such as ``left.png`` stands for, or None."""
    return IMAGE_KINDS.get(name.rpartition(".")[2].lower())


@functools.cache  # so that extensions with equal decoders have the same one
def _limited(decoder: Decoder, kind: str | None, limit: int) -> Decoder:
    options: dict[str, Any] = {"limit": limit} if kind is None else {"limit": limit, "kind": kind}
    return replace(decoder, decode=functools.partial(decoder.decode, **options), kind=kind)
