from __future__ import annotations

import io
import sys
import zlib

import numpy as np
import PIL.Image
import pytest
import simplejpeg

from dataload.codecs.decoders import DECODERS, decode_image, find_decoder, known_extension
from dataload.errors import ConfigError, CorruptFileError, MissingDependencyError, UnsupportedFormatError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (24, 32, 3), dtype=np.uint8)


def encoded(kind: str, mode: str = "RGB", **options) -> bytes:
    stream = io.BytesIO()
    image = PIL.Image.fromarray(PIXELS).convert("L" if mode.startswith("I;") else mode)
    (image.convert("I").convert(mode) if mode.startswith("I;") else image).save(stream, kind, **options)
    return stream.getvalue()


def reference(data: bytes) -> np.ndarray:
    return np.array(PIL.Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("kind", ["png", "ppm", "bmp", "gif", "tiff", "webp"])
def test_images_are_those_of_pillow(kind):
    data = encoded(kind, lossless=True)
    image = decode_image(memoryview(data))
    np.testing.assert_array_equal(image, reference(data))
    assert image.flags.writeable
    if kind != "gif":
        np.testing.assert_array_equal(image, PIXELS)


@pytest.mark.parametrize(("kind", "mode"), [("png", "L"), ("png", "1"), ("png", "P"), ("png", "RGBA"), ("png", "LA")])
def test_other_modes_become_red_green_blue(kind, mode):
    data = encoded(kind, mode)
    np.testing.assert_array_equal(decode_image(data), reference(data))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg(mode):
    data = encoded("jpeg", mode)
    image = decode_image(memoryview(data))
    assert (image.shape, image.dtype) == ((24, 32, 3), np.uint8)
    assert image.flags.writeable
    # decoders differ by rounding
    assert np.abs(image.astype(int) - reference(data)).max() <= 3
    if mode != "CMYK":
        np.testing.assert_array_equal(image, simplejpeg.decode_jpeg(data, "RGB"))


def test_jpeg_without_simplejpeg(monkeypatch):
    data = encoded("jpeg")
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    np.testing.assert_array_equal(decode_image(data), reference(data))


def test_no_package_at_all(monkeypatch):
    data = encoded("jpeg")
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingDependencyError, match=r"decoding images needs pillow.*pip install 'dataload\[tar\]'"):
        decode_image(data)


def test_the_content_counts_and_not_the_name():
    assert decode_image(encoded("png")).shape == (24, 32, 3)


@pytest.mark.parametrize("kind", ["jpeg", "png", "bmp", "ppm", "webp"])
def test_an_image_that_is_cut_off_is_an_error_at_any_place(kind):
    data = encoded(kind)
    for length in (0, 1, 2, 3, 10, 30, len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(CorruptFileError, match="cannot be decoded"):
            decode_image(data[:length])


@pytest.mark.parametrize("mode", ["I;16"])
def test_more_than_eight_bits_are_refused(mode):
    with pytest.raises(UnsupportedFormatError, match=r"a PNG image of mode 'I;16' does not fit in 8 bits per channel"):
        decode_image(encoded("png", mode))


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded():
    png = bytearray(encoded("png"))
    png[16:24] = (60_000).to_bytes(4, "big") * 2
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    with pytest.raises(CorruptFileError, match="an image cannot be decoded"):  # Pillow counts too
        decode_image(bytes(png))
    jpeg = bytearray(encoded("jpeg"))
    start = jpeg.index(b"\xff\xc0") + 5
    jpeg[start : start + 4] = (60_000).to_bytes(2, "big") * 2
    with pytest.raises(CorruptFileError, match="an image of 60000 x 60000 pixels; the limit is 89478485"):
        decode_image(bytes(jpeg))


def test_jpeg_whose_middle_is_damaged():
    data = bytearray(encoded("jpeg", quality=95))
    data[len(data) // 2 : len(data) // 2 + 40] = b"\xff\xd9" * 20
    with pytest.raises(CorruptFileError, match="a JPEG image cannot be decoded"):
        decode_image(bytes(data))


@pytest.mark.parametrize(
    ("name", "data", "value"),
    [
        ("bytes", b"ab", b"ab"),
        ("cls", b"7", 7),
        ("cls", b" -7\n", -7),
        ("txt", "żółć".encode(), "żółć"),
        ("json", b'{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ("json", b"7", 7),
    ],
)
def test_values(name, data, value):
    found = DECODERS[name].decode(data)
    assert found == value
    assert type(found) is type(value)


def test_npz():
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(3), b=np.eye(2))
    found = DECODERS["npz"].decode(memoryview(stream.getvalue()))
    assert {name: array.tolist() for name, array in found.items()} == {"a": [0, 1, 2], "b": [[1, 0], [0, 1]]}
    with pytest.raises(CorruptFileError):
        DECODERS["npz"].decode(stream.getvalue()[:-30])


def test_nothing_is_unpickled():
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}]), allow_pickle=True)
    with pytest.raises(CorruptFileError, match="unpickled"):
        DECODERS["npy"].decode(stream.getvalue())
    assert known_extension("pkl") is known_extension("pyd") is known_extension("pth") is None


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("cls", b"", "expected a number as text, found b''"),
        ("cls", b"1_0", "expected a number as text"),
        ("cls", b"cat", "expected a number as text, found b'cat'"),
        ("cls", b"9" * 5000, "expected a number as text, found b'9{40}'"),
        ("txt", b"ab\xff", "text is not UTF-8: invalid start byte at byte 2 of it"),
        ("json", b"{", "invalid JSON"),
        ("json", b"\xff", "invalid JSON"),
        ("json", b"[" * 100_000, "invalid JSON"),
    ],
)
def test_what_does_not_decode(name, data, message):
    with pytest.raises(CorruptFileError, match=message):
        DECODERS[name].decode(data)


@pytest.mark.parametrize(
    ("extension", "name"),
    [
        ("jpg", "image"),
        ("JPEG", "image"),
        ("seg.left.png", "image"),
        ("cls2", "cls"),
        ("x.text", "txt"),
        ("x.npz", "npz"),
    ],
)
def test_known_extensions(extension, name):
    assert known_extension(extension) is DECODERS[name]


def test_unknown_extensions():
    assert [known_extension(name) for name in ("", "mp4", "cls.mp4", "jpgx", "bytes")] == [None] * 5


def test_decoders_by_name_or_function():
    assert find_decoder("image", "jpg") is DECODERS["image"]
    own = find_decoder(len, "mp4")
    assert (own.decode, own.own, own.name) == (len, True, "len")
    with pytest.raises(
        ConfigError,
        match=r"decode\['jpg'\] is 'imag': did you mean 'image'\? Known: bytes, cls, .*, or pass a function",
    ):
        find_decoder("imag", "jpg")
