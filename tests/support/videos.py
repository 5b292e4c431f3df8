"""Videos written by PyAV, and their frames as PyAV decodes them from the start."""

import os
from fractions import Fraction

import av
import numpy as np
import pytest

MILLISECOND = Fraction(1, 1000)


def write_video(
    path, frames=40, *, codec="libx264", size=(32, 48), gop=12, b_frames=2, pixels="yuv420p", times=None, rotation=0,
    hflip=False, audio=0.0, options=(), images=None,
):  # fmt: skip
    """Write moving noise, at 30 frames a second or at `times` in ms, behind `audio` seconds of a tone if above 0."""
    height, width = size
    noise = np.random.default_rng(len(os.path.basename(path))).integers(0, 255, (height, width, 3), np.uint8)
    with av.open(str(path), "w") as container:
        tone = container.add_stream("aac", rate=16_000) if audio else None
        stream = container.add_stream(codec, rate=30, options=dict(options))
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        stream.gop_size, stream.max_b_frames = gop, b_frames
        if rotation:
            if not hasattr(stream, "set_display_rotation"):
                pytest.skip("PyAV before 17.1 does not write rotations")
            stream.set_display_rotation(rotation, hflip=hflip)
        if times is not None:
            stream.time_base = stream.codec_context.time_base = MILLISECOND
        if tone is not None:
            waves = np.sin(np.arange(int(audio * 16_000)) / 16_000 * 2 * np.pi * 440).astype(np.float32)
            for start in range(0, len(waves), 1024):
                part = av.AudioFrame.from_ndarray(waves[None, start : start + 1024], format="fltp", layout="mono")
                part.sample_rate, part.pts, part.time_base = 16_000, start, Fraction(1, 16_000)
                container.mux(tone.encode(part))
            container.mux(tone.encode(None))
        for number in range(frames):
            image = np.roll(noise, 3 * number, 1)
            image[:, : width * number // frames] = number * 5 % 256
            frame = av.VideoFrame.from_ndarray(image if images is None else images[number], format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], MILLISECOND
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def decoded(path, **reformat):
    """Return all frames, (frames, height, width, 3), and their times in seconds."""
    with av.open(str(path)) as container:
        frames = [*container.decode(container.streams.video[0])]
        images = [frame.to_ndarray(**(reformat or {"format": "rgb24"})) for frame in frames]
        return np.stack(images), np.array([frame.time for frame in frames])


def write_sound(
    path, seconds=4, *, codec="aac", rate=44_100, layout="stereo", fps=10, gop=20, options=(), late=0
):  # fmt: skip
    """Write a small video with a sweep, `late` samples after it begins; noise would hide an error of a codec."""
    count = int(seconds * rate)
    at = np.arange(count) / rate
    waves = np.stack([0.4 * np.sin(2 * np.pi * (150 + 300 * at / seconds) * at + n) for n in range(2)])
    waves = waves[: 1 if layout == "mono" else 2].astype(np.float32)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 48, 32, "yuv420p", gop
        sound = container.add_stream(codec, rate=rate, options=dict(options))
        sound.layout = layout
        convert = av.AudioResampler(sound.codec_context.format.name, layout, rate)
        for number in range(int(seconds * fps)):
            image = np.full((32, 48, 3), number % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            for start in range(number * rate // fps, (number + 1) * rate // fps, 1000):
                part = waves[:, start : min(start + 1000, (number + 1) * rate // fps)]
                frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(part), "fltp", layout)
                frame.sample_rate, frame.pts, frame.time_base = rate, start + late, Fraction(1, rate)
                for made in convert.resample(frame):
                    container.mux(sound.encode(made))
        container.mux(sound.encode(None))
        container.mux(stream.encode(None))
    return path


def heard(path, rate=None, seconds=0):
    """Return all samples from time 0 on, (channels, n), by PyAV from the start, with silence up to `seconds`."""
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        convert = av.AudioResampler("fltp", stream.layout.name, rate or stream.rate)
        frames = [*container.decode(stream)]
        begin = round(frames[0].time * stream.rate)
        for frame in frames:
            frame.pts = None  # the samples follow one another
        parts = [made.to_ndarray() for frame in [*frames, None] for made in convert.resample(frame)]
    samples = np.concatenate(parts, 1)
    assert begin <= 0 or rate is None
    early = max(0, -begin) * (rate or stream.rate) // stream.rate  # FFmpeg before 8 gives what precedes time 0
    samples = samples[:, early:]
    after = max(0, int(seconds * (rate or stream.rate)) - samples.shape[1])
    return np.pad(samples, ((0, 0), (max(0, begin), after)))
