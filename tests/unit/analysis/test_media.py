"""Images and sound that are found in records."""

import io
import wave

import numpy as np
import pytest

from dataload.analysis.page import Audio, find_audio, find_image, thumbnail, to_png, to_wav

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("shape", "dtype", "found"),
    [
        ((10, 12), np.uint8, (10, 12)),
        ((10, 12, 1), np.uint8, (10, 12)),
        ((3, 10, 12), np.float32, (10, 12)),
        ((1, 10, 12), np.uint8, (10, 12)),
        ((10, 12, 3), np.float64, (10, 12)),
        ((10, 12), np.float32, None),  # any matrix
        ((10, 12, 4), np.uint8, None),
        ((7, 12, 3), np.uint8, None),
        ((10, 12, 3), np.int64, None),
        ((10, 12, 3), np.uint16, None),
        ((0, 12, 3), np.uint8, None),
    ],
)
def test_arrays_that_are_images(shape, dtype, found):
    image = find_image(np.ones(shape, dtype))
    assert (None if image is None else image.shape) == (None if found is None else (*found, 3))


def test_floats_beyond_one_are_scaled_and_others_are_not():
    unit = np.linspace(0, 1, 300, dtype=np.float32).reshape(10, 10, 3)
    assert np.array_equal(find_image(unit), (unit * 255).astype(np.uint8))
    image = find_image(unit * 6 - 3)
    assert (image.min(), image.max()) == (0, 255)
    unit[0, 0] = np.nan, np.inf, -np.inf
    assert find_image(unit).shape == (10, 10, 3)


def test_png_is_what_pillow_reads():
    Image = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(0).integers(0, 256, (13, 7, 3), np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(to_png(image)))), image)


@pytest.mark.parametrize("shape", [(10, 900), (900, 10), (200, 200), (1, 5000), (30, 40)])
def test_thumbnails_fit(shape):
    small = thumbnail(np.full((*shape, 3), 7, np.uint8), 64)
    assert max(small.shape[:2]) <= 64
    assert min(small.shape[:2]) >= 1
    assert (small == 7).all()


def test_sound_is_cut_clipped_and_readable():
    samples = np.full((40 * 1000, 2), 3.0, np.float32)
    samples[0] = np.nan, -9
    with wave.open(io.BytesIO(to_wav(Audio(samples, 1000)))) as played:
        assert (played.getnchannels(), played.getframerate(), played.getnframes()) == (2, 1000, 30_000)
        assert np.frombuffer(played.readframes(2), np.int16).tolist() == [0, -32767, 32767, 32767]


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"audio": np.zeros(900, np.float32), "sample_rate": 8000}, (900, 1)),
        ({"audio": torch.zeros(900, 2), "sample_rate": torch.tensor([8000])}, (900, 2)),
        ({"speech": np.zeros(900, np.float32), "speech.sample_rate": 8000, "sample_rate": 0}, (900, 1)),
        ({"audio": np.zeros(900, np.float32)}, None),
        ({"audio": np.zeros(70, np.float32), "sample_rate": 8000}, None),
        ({"audio": np.zeros((900, 80), np.float32), "sample_rate": 8000}, None),
        ({"audio": np.zeros(900, np.int64), "sample_rate": 8000}, None),
        ({"audio": np.zeros(900, np.float32), "sample_rate": 10**9}, None),
        ({"audio": np.zeros(900, np.float32), "sample_rate": "8000 Hz"}, None),
        ({"audio": b"RIFF----WAVE", "sample_rate": 8000}, None),
    ],
)
def test_values_that_are_sound(record, found):
    audio = find_audio(record, next(iter(record)))
    assert (None if audio is None else audio.samples.shape) == found
