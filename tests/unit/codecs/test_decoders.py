import io
import sys
import tracemalloc
import zlib
from itertools import product

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from dataload.codecs import decoders
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
    image = decoders.decode_image(memoryview(data))
    np.testing.assert_array_equal(image, reference(data))
    assert image.flags.writeable
    if kind != "gif":
        np.testing.assert_array_equal(image, PIXELS)


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (16, 16), (33, 47)])
def test_jpeg_equals_pillows_bit_for_bit(size):
    for subsampling, quality in product(["444", "422", "420", "440", "411", "Gray"], (5, 50, 95)):
        for pixels in (PIXELS, np.repeat(np.arange(96, dtype=np.uint8), 24).reshape(24, 32, 3)):
            tiled = np.tile(pixels, (2, 2, 1))[: size[0], : size[1]]
            kind = {"colorspace": "GRAY"} if subsampling == "Gray" else {"colorsubsampling": subsampling}
            grey = np.ascontiguousarray(tiled[..., :1] if subsampling == "Gray" else tiled)
            data = simplejpeg.encode_jpeg(grey, quality=quality, **kind)
            np.testing.assert_array_equal(decoders.decode_image(data), reference(data))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *(("RGB", {}), ("L", {}), ("CMYK", {}), ("RGB", {"progressive": True})),
        *(("RGB", {"optimize": True}), ("RGB", {"restart_marker_blocks": 2})),
    ],
)
def test_other_ways_to_code_jpeg_equal_pillows_too(mode, options):
    data = encoded("jpeg", mode, **options)
    image = decoders.decode_image(memoryview(data))
    assert (image.shape, image.dtype, image.flags.writeable) == ((24, 32, 3), np.uint8, True)
    np.testing.assert_array_equal(image, reference(data))


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_decoding_into_given_memory(kind):
    data, memory = encoded(kind), np.zeros((3, 24, 32, 3), np.uint8)
    assert np.shares_memory(decoders.decode_image(data, memory[1]), memory)
    np.testing.assert_array_equal(memory[1], decoders.decode_image(data))
    assert not memory[::2].any()
    with pytest.raises(CorruptFileError, match="an image of 24 x 32 pixels; its batch has 24 x 31"):
        decoders.decode_image(data, np.zeros((24, 31, 3), np.uint8))


IMAGES = {
    "jpeg": encoded("jpeg"),
    "grey": encoded("jpeg", "L"),
    "progressive": encoded("jpeg", progressive=True),
    "png": encoded("png"),
    "transparent": encoded("png", "RGBA"),
    "palette": encoded("png", "P"),
}
ODD = {
    "cmyk": encoded("jpeg", "CMYK"), "deep": encoded("png", "I;16"), "bmp": encoded("bmp"),
    "cut": IMAGES["jpeg"][:-200],
    "head": IMAGES["png"][:20], "cut png": IMAGES["png"][:60], "empty": b"",
    "smaller": simplejpeg.encode_jpeg(np.ascontiguousarray(PIXELS[:, 1:])),
}  # fmt: skip


@given(st.lists(st.sampled_from([*IMAGES]), min_size=1, max_size=5), st.sampled_from([None, *ODD]), st.integers(0, 5))
def test_images_of_a_batch_equal_those_decoded_one_by_one(names, odd, place):
    contents = [memoryview(IMAGES[name]) for name in names]
    if odd is not None:
        contents.insert(place, memoryview(ODD[odd]))
        assert decoders.decode_images(contents) is None or len(contents) == 1
        return
    images = decoders.decode_images(contents)
    assert (images.dtype, images.flags.writeable) == (np.uint8, True)
    np.testing.assert_array_equal(images, np.stack([decoders.decode_image(content) for content in contents]))


def test_the_size_of_a_png_needs_its_whole_header():
    assert decoders.size_in_header(IMAGES["png"][:24]) == PIXELS.shape[:2]
    assert decoders.size_in_header(IMAGES["png"][:23]) is None
    assert decoders.size_in_header(IMAGES["png"][:16] + b"\1\2\3\4\5\6\7\x08") == (0x05060708, 0x01020304)
    assert decoders.decode_images([memoryview(ODD["head"])] * 2) is None


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_upright_images_are_turned_as_pillow_turns_them(kind, orientation):
    stream = io.BytesIO()
    exif = PIL.Image.Exif()
    exif[274] = orientation
    pixels = np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(stream, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    image = PIL.Image.open(stream)
    upright = decoders.find_decoder("upright", "jpg").decode(memoryview(stream.getvalue()))
    stored = np.asarray(image)
    turned = stored if kind == "TIFF" else np.asarray(PIL.ImageOps.exif_transpose(image))
    np.testing.assert_array_equal(upright, turned)
    np.testing.assert_array_equal(decoders.decode_image(stream.getvalue()), stored)
    assert (turned.shape == (30, 20, 3)) == (orientation in (5, 6, 7, 8))


def test_exif_data_that_cannot_be_read_are_an_error(monkeypatch):
    def refuse(image):
        raise ValueError("no tags")

    monkeypatch.setattr(PIL.Image.Image, "getexif", refuse)
    with pytest.raises(CorruptFileError, match="EXIF data cannot be read: no tags"):
        decoders.find_decoder("upright", "png").decode(encoded("png"))


def test_headers_that_promise_too_much_allocate_nothing():
    png = bytearray(IMAGES["png"])
    png[16:24] = (9_000).to_bytes(4, "big") * 2
    for data in (bytes(png), large_jpeg(9_000)):
        tracemalloc.start()
        assert decoders.decode_images([data] * 5) is None
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


def test_without_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert decoders.decode_images([IMAGES["jpeg"]] * 2) is None
    np.testing.assert_array_equal(decoders.decode_image(IMAGES["jpeg"]), reference(IMAGES["jpeg"]))
    assert decoders.decode_images([IMAGES["png"]] * 2).shape == (2, 24, 32, 3)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert decoders.decode_images([IMAGES["png"]] * 2) is None
    with pytest.raises(MissingDependencyError, match=r"decoding images needs pillow.*pip install 'dataload\[tar\]'"):
        decoders.decode_image(IMAGES["jpeg"])


@pytest.mark.parametrize(
    ("extension", "name"),
    [
        *((name, "image") for name in ("jpg", "JPEG")),
        ("a.left.png", "image"),
        ("cls2", "cls"),
        ("x.text", "txt"),
        ("x.npz", "npz"),
    ],
)
def test_extensions(extension, name):
    assert decoders.known_extension(extension) is decoders.DECODERS[name]
    assert [decoders.known_extension(name) for name in ("", "mp4", "cls.mp4", "jpgx", "bytes")] == [None] * 5
    assert (decoders.DECODERS["image"].empty().shape, decoders.DECODERS["image"].empty().dtype) == ((0, 0, 3), np.uint8)


@pytest.mark.parametrize("kind", ["jpeg", "png", "bmp", "ppm", "webp"])
def test_an_image_that_is_cut_off_is_an_error_at_any_place(kind):
    data = encoded(kind)
    for length in (0, 1, 2, 3, 10, 30, len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(CorruptFileError, match="cannot be decoded"):
            decoders.decode_image(data[:length])


def damaged(kind):
    data = bytearray(encoded(kind, quality=95))
    if kind == "png":
        data[16:24] = (60_000).to_bytes(4, "big") * 2
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    else:
        data[len(data) // 2 : len(data) // 2 + 40] = b"\xff\xd9" * 20
    return bytes(data)


def large_jpeg(side):
    data = bytearray(IMAGES["jpeg"])
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = side.to_bytes(2, "big") * 2
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "kind", "error", "message"),
    [
        (encoded("png", "I;16"), None, UnsupportedFormatError, r"a PNG image of mode 'I(;16)?' does not fit in 8 bits"),
        (damaged("png"), None, CorruptFileError, "an image cannot be decoded"),  # Pillow counts pixels too
        (damaged("jpeg"), "JPEG", CorruptFileError, "a JPEG image cannot be decoded"),
        (large_jpeg(60_000), None, CorruptFileError, "an image of 60000 x 60000 pixels; the limit is 89478485"),
        (b"some text", None, CorruptFileError, "decoded: it begins with b'some tex'; known are JPEG, PNG, PPM,"),
        (b"%PDF-1.4", None, CorruptFileError, "decoded: its content is PDF; known are JPEG, PNG, PPM,"),
        (b"some text", "PNG", CorruptFileError, "named as PNG cannot be decoded as such: it begins with b'some tex'$"),
        (IMAGES["png"], "GIF", CorruptFileError, "named as GIF .* as such: its content is PNG: rename it"),
    ],
)
def test_what_is_not_decoded(data, kind, error, message):
    with pytest.raises(error, match=message):
        decoders.decode_image(data, kind=kind)


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
    found = decoders.DECODERS[name].decode(data)
    assert found == value
    assert type(found) is type(value)


def test_nothing_is_unpickled():
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}]), allow_pickle=True)
    with pytest.raises(CorruptFileError, match="unpickled"):
        decoders.DECODERS["npy"].decode(stream.getvalue())
    assert decoders.known_extension("pkl") is decoders.known_extension("pyd") is decoders.known_extension("pth") is None


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
        decoders.DECODERS[name].decode(data)


def test_decoders_by_name_or_function():
    assert decoders.find_decoder("image", "jpg") is decoders.DECODERS["image"]
    own = decoders.find_decoder(len, "mp4")
    assert (own.decode, own.own, own.name) == (len, True, "len")
    with pytest.raises(
        ConfigError,
        match=r"decode\['jpg'\] is 'imag': did you mean 'image'\? Choose from audio, .*, or pass a function",
    ):
        decoders.find_decoder("imag", "jpg")
