"""Parts of images, decoded and resized by a transform."""

import io

import numpy as np
import pytest
from PIL import Image

import dataload
from dataload.errors import ConfigError, CorruptFileError, WorkerError

cv2 = pytest.importorskip("cv2")
simplejpeg = pytest.importorskip("simplejpeg")


def pattern(height, width):
    """Waves of a few pixels and longer, in three colours."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 3) + np.sin(y / 50), np.sin(y / 4) + np.sin(x / 40), np.sin((x + y) / 30) * 2]
    return np.stack([64 * wave + 128 for wave in waves], -1).astype(np.uint8)


def coordinates(height, width):
    """Pixels that tell where they are: red is the row, green the column, out of 255."""
    y, x = np.mgrid[:height, :width]
    return np.stack([y * 255 / (height - 1), x * 255 / (width - 1), 0 * y], -1).round().astype(np.uint8)


def jpeg(pixels, **options):
    return simplejpeg.encode_jpeg(pixels, **{"quality": 95, **options})


def context(index=0):
    return dataload.SampleContext(index, 0, 0)


def whole(**options):
    """A crop that takes all of an image of the shape of its rows."""
    return dataload.RandomResizedCrop(**{"scale": (1.0, 1.0), "ratio": (4 / 3, 4 / 3), "mirrored": 0.0, **options})


@pytest.mark.parametrize(("side", "is_scaled"), [(160, True), (240, True), (336, False), (600, False)])
def test_the_pixels(side, is_scaled):
    """Full size unless half of it has enough pixels, and then nearer to what Pillow makes of the full size."""
    size = side * 3 // 4, side
    data = jpeg(pattern(480, 640))
    exact = cv2.resize(simplejpeg.decode_jpeg(data), size[::-1])
    np.testing.assert_array_equal(whole(size=size, exact=True)({"jpg": data}, context())["jpg"], exact)
    found = whole(size=size)({"jpg": data, "cls": 7}, context())
    assert found["cls"] == 7
    assert found["jpg"].shape == (*size, 3)
    np.testing.assert_array_equal(
        whole(size=size, mirrored=1.0)({"jpg": data}, context())["jpg"], found["jpg"][:, ::-1]
    )
    assert bool((found["jpg"] != exact).any()) is is_scaled
    pillow = np.asarray(Image.open(io.BytesIO(data)).resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)
    far, near = (np.abs(each.astype(int) - pillow).mean() for each in (exact, found["jpg"]))
    assert near <= far
    assert near < 4 or not is_scaled


def test_parts_begin_at_every_place_where_they_fit():
    image, size = coordinates(4, 4), (3, 3)
    crop = dataload.RandomResizedCrop(size=size, scale=(0.56, 0.56), ratio=(1.0, 1.0), mirrored=0.0)
    found = {tuple(crop({"jpg": image}, context(index))["jpg"][0, 0, :2].tolist()) for index in range(60)}
    assert found == {(0, 0), (0, 85), (85, 0), (85, 85)}


def test_parts_have_the_areas_and_the_ratios_of_the_settings():
    image = coordinates(256, 256)
    crop = dataload.RandomResizedCrop(size=2, scale=(0.1, 0.3), ratio=(0.5, 2.0), mirrored=0.0)
    found = np.array([crop({"jpg": image}, context(index))["jpg"] for index in range(300)], int)
    rows, columns = 2 * (found[:, 1, 0, 0] - found[:, 0, 0, 0]), 2 * (found[:, 0, 1, 1] - found[:, 0, 0, 1])
    for values, least, most in ((rows * columns / 2**16, 0.1, 0.3), (columns / rows, 0.5, 2.0)):
        np.testing.assert_allclose([values.min(), values.max()], [least, most], rtol=0.05)
        assert abs((values < (least + most) / 2 if most < 1 else values < 1).mean() - 0.5) < 0.1


def test_an_image_whose_shape_has_no_part_of_the_ratio():
    """The centre, as in torchvision."""
    crop = dataload.RandomResizedCrop(size=32, scale=(0.9, 1.0), mirrored=0.0)
    image = crop({"jpg": jpeg(coordinates(100, 1000))}, context())["jpg"].astype(int)
    assert abs(image[:, 0, 1].mean() / 255 - 0.5 + 100 * 4 / 3 / 2000) < 0.02
    assert abs(image[:, -1, 1].mean() / 255 - 0.5 - 100 * 4 / 3 / 2000) < 0.02


def test_the_centre():
    crop = dataload.CenterCrop(size=(64, 32), share=0.5)
    image = crop({"jpg": jpeg(coordinates(400, 400))})["jpg"].astype(float) / 255
    assert image.shape == (64, 32, 3)
    assert abs(image[0, :, 0].mean() - 0.25) < 0.02
    assert abs(image[-1, :, 0].mean() - 0.75) < 0.02
    assert abs(image[:, 0, 1].mean() - 0.375) < 0.02
    assert abs(image[:, -1, 1].mean() - 0.625) < 0.02
    for height, width in ((1, 9), (9, 1), (5, 5)):  # at least a pixel
        pixels = pattern(height, width)
        image = dataload.CenterCrop(size=4, share=0.1)({"jpg": pixels})["jpg"]
        assert image.tolist() == [[pixels[height // 2, width // 2].tolist()] * 4] * 4


def encoded(pixels, kind, **options):
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(options.pop("mode", "RGB")).save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        encoded(pattern(90, 120), "PNG"),
        encoded(pattern(90, 120), "JPEG", mode="L"),
        encoded(pattern(90, 120), "JPEG", mode="CMYK"),
        pattern(90, 120),
    ],
    ids=["PNG", "grey", "CMYK", "pixels"],
)
def test_other_images(data):
    image = whole(size=(30, 40), field="x")({"x": data}, context())["x"]
    full = data if isinstance(data, np.ndarray) else np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.abs(image.astype(int) - cv2.resize(full, (40, 30))).mean() < 12


def test_a_damaged_image(tmp_path):
    good = jpeg(pattern(300, 400))
    with dataload.create(tmp_path / "x.tar") as writer:
        for number, data in enumerate([good, good[: len(good) // 2], good]):
            writer.write({"__key__": f"{number:03}", "jpg": data, "cls": number})
    source = dataload.open(tmp_path / "x.tar")
    crop = dataload.RandomResizedCrop(size=32)
    with (
        dataload.Loader(source, batch_size=3, transform=crop) as loader,
        pytest.raises(WorkerError, match="a JPEG image cannot be decoded"),
    ):
        next(iter(loader))
    with dataload.Loader(source, batch_size=3, transform=crop, on_error="skip", max_bad=2) as loader:
        assert [batch["cls"].tolist() for batch in loader] == [[0, 2]]


def test_too_many_pixels_and_a_field_that_is_missing():
    crop = dataload.RandomResizedCrop(size=32, max_record_bytes=12 * 100 * 100)
    with pytest.raises(CorruptFileError, match="an image of 101 x 100 pixels; the limit is 10000"):
        crop({"jpg": jpeg(pattern(101, 100))}, context())
    with pytest.raises(ConfigError, match="the sample has no field 'jpg': did you mean 'jpeg'"):
        dataload.CenterCrop(size=32)({"jpeg": b""})
    with pytest.raises(ConfigError, match="the sample has no field 'jpg': bytes"):
        dataload.CenterCrop(size=32)(b"")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"size": size}, "size must be a number of pixels") for size in (0, (1, 2, 3), True, (4, 0.5))),
        ({"scale": (0.5, 0.1)}, "scale must be two numbers that ascend"),
        ({"scale": (0.5, 1.5)}, "scale must be two numbers that ascend"),
        ({"scale": 0.5}, "scale must be two numbers that ascend, .* got 0.5"),
        ({"ratio": (0, 1)}, "ratio must be two numbers that ascend"),
        ({"mirrored": 1.5}, "mirrored must be a share"),
        ({"exact": "no"}, "exact must be"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ConfigError, match=message):
        dataload.RandomResizedCrop(**{"size": 32, **options})


@pytest.mark.parametrize("dtype", [">u2", ">f4", "uint8"])
def test_pixels_of_one_channel_and_of_another_byte_order(dtype):
    image = np.arange(24 * 32).reshape(24, 32, 1).astype(dtype)
    expected = cv2.resize(image.astype(image.dtype.newbyteorder("=")), (4, 3))[..., None]
    found = whole(size=(3, 4), field="image")({"image": image}, context())["image"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            np.zeros((3, 24, 32), np.uint8),
            r"pixels as an array \(height, .*'jpg' holds a ndarray of shape \(3, 24, 32\)",
        ),
        (np.zeros((24, 32, 3), bool), "of uint8, .* and bool"),
        ("a.jpg", "'jpg' holds a str"),
        (None, "no image in field 'jpg'"),
        (np.zeros((0, 0, 3), np.uint8), "no image in field 'jpg'"),
    ],
)
def test_what_is_no_image(image, message):
    for crop in (lambda sample: whole(size=8)(sample, context()), dataload.CenterCrop(size=8)):
        with pytest.raises((ConfigError, CorruptFileError), match=message):
            crop({"jpg": image})
