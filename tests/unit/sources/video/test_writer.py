"""Videos that are written: what comes back, names, times, and what is refused."""

import os
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from videos import decoded, write_video

import dataload
from dataload.convert import convert
from dataload.errors import ConfigError, SourceError

EXACT = {"pixel_format": "rgb24", "crf": 0}


def moving(frames=30, size=(32, 48), seed=0):
    noise = np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)
    return np.stack([np.roll(noise, 3 * number, 1) for number in range(frames)])


def write(path, records, **options):
    with dataload.create(path, format="video", **options) as writer:
        writer.extend(records)


@pytest.mark.parametrize("suffix", [".mp4", ".m4v", ".mov", ".mkv"])
def test_without_loss_every_pixel_comes_back(tmp_path, suffix):
    images = moving(size=(31, 47))
    path = tmp_path / f"a{suffix}"
    write(path, [{"frame": image} for image in images], gop=7, fps=25, **EXACT)
    with dataload.open(path) as source:
        batch = source.read_batch(range(len(source)))
        assert np.array_equal(batch["frame"], images)
        assert batch["time"] == pytest.approx(np.arange(30) / 25, abs=1e-3 if suffix == ".mkv" else 1e-12)
        assert source.groups == (7, 7, 7, 7, 2)


def test_quality_and_pixels(tmp_path):
    images = np.broadcast_to(np.arange(0, 256, 4, np.uint8)[:, None], (20, 64, 64))[..., None].repeat(3, -1)
    sizes = {}
    for crf in (10, 40):
        write(tmp_path / f"{crf}.mp4", [{"frame": image} for image in images], crf=crf, pixel_format="yuv444p")
        sizes[crf] = (tmp_path / f"{crf}.mp4").stat().st_size
        found, _ = decoded(tmp_path / f"{crf}.mp4")
        assert np.abs(found.astype(int) - images).mean() < (2 if crf == 10 else 12)
    assert sizes[10] > sizes[40]
    with av.open(str(tmp_path / "10.mp4")) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt, context.colorspace) == ("h264", "yuv444p", 6)


def test_times_are_kept(tmp_path):
    times = np.cumsum(np.random.default_rng(0).integers(5, 90, 40)) / 1000 + 5
    images = moving(40)
    records = [{"frame": image, "time": time} for image, time in zip(images, times, strict=True)]
    for suffix in (".mp4", ".mkv"):
        path = tmp_path / f"a{suffix}"
        write(path, records, **EXACT)
        with dataload.open(path) as source:
            batch = source.read_batch(range(40))
            assert batch["time"] == pytest.approx(times, abs=1e-9)
            assert np.array_equal(batch["frame"], images)


def test_a_folder_of_videos_comes_back_from_a_conversion(tmp_path):
    for name in ("run/a", "run/b", "jump/c.1"):
        path = tmp_path / "in" / f"{name}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_video(path, 9, times=np.cumsum([7, 40, 33, 12, 90, 33, 33, 33, 33]).tolist())
    with dataload.open(tmp_path / "in") as source:
        report = convert(source, tmp_path / "out", format="video", writer_options=EXACT)
        assert report.records == 27
        expected = source.read_batch(range(27))
        with dataload.open(tmp_path / "out") as written:
            found = written.read_batch(range(27))
            assert written.fields["label"].classes == ("jump", "run")
        with pytest.raises(ConfigError, match=r"exists"):
            convert(source, tmp_path / "out", format="video")
    for name in ("frame", "time", "label", "video", "__key__"):
        assert np.array_equal(found[name], expected[name]), name
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "dataload.json",
        "in",
        "out",
    ]


def test_videos_by_a_field(tmp_path):
    records = [{"frame": image, "episode": number // 5} for number, image in enumerate(moving(15))]
    write(tmp_path / "out", records, video="episode")
    assert sorted(os.listdir(tmp_path / "out")) == ["000000.mp4", "000001.mp4", "000002.mp4"]
    assert dataload.open(tmp_path / "out").shard_lengths == (5, 5, 5)
    write(tmp_path / "one", [{"frame": image} for image in moving(2)])
    assert os.listdir(tmp_path / "one") == ["000000.mp4"]


FRAME = np.zeros((32, 48, 3), np.uint8)
BEHIND = "record 1: a frame must be later than the frame before it.*write to a directory"


@pytest.mark.parametrize(
    ("name", "records", "message"),
    [
        ("a.mp4", [{"frame": FRAME[:31]}], "odd size, 31 x 48.*pass pixel_format='yuv444p'"),
        ("a.mp4", [{"frame": FRAME.astype(np.float32)}], r"uint8, and the field 'frame' is of float32 \(32, 48, 3\)"),
        ("a.mp4", [{"image": FRAME}], "'frame' is missing: name the field with the option frame="),
        ("a.mp4", [{"frame": FRAME, "action": 1, "time": 0}], "not the fields 'action': open the source with fields="),
        ("a.mp4", [{"frame": FRAME, "label": 1}], "not the fields 'label'"),
        ("a.mp4", [{"frame": FRAME, "time": 1.0}, {"frame": FRAME, "time": 1.0}], BEHIND),
        ("a.mp4", [{"frame": FRAME, "time": 1.0}, {"frame": FRAME}], "no time, and the first of its video .* a time"),
        ("a.mp4", [{"frame": FRAME, "time": float("nan")}], "the time of record 0 is nan s, not 0 or later"),
        ("a.mp4", [{"frame": FRAME}, {"frame": FRAME[:16]}], r"record 1 is \(16, 48, 3\).* video \(32, 48, 3\)"),
        ("a.mp4", [{"frame": np.zeros((2, 20_000, 3), np.uint8)}], "FFmpeg cannot write this video: "),
        ("a.mp4", [], "a video needs at least one frame"),
        ("a.webm", [], "H.264 is not written to files '.webm': choose one of .mp4"),
        ("out", [{"frame": FRAME, "video": "../x"}], "record 0 cannot name its video"),
        ("out", [{"frame": FRAME, "video": v} for v in (0, 1, 0)], "video '000000', whose records do not follow"),
    ],
)  # fmt: skip
def test_what_is_refused_leaves_nothing(tmp_path, name, records, message):
    with pytest.raises(SourceError if "FFmpeg" in message else ConfigError, match=message):
        write(tmp_path / name, records)
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(sys.platform != "linux", reason="lists open files")
def test_a_writer_that_is_aborted_keeps_no_file_open(tmp_path):
    def opened():
        return [each for each in Path("/proc/self/fd").iterdir() if each.resolve().name == "a.mp4"]

    writer = dataload.create(tmp_path / "a.mp4", format="video", gop=1)
    while not opened():  # FFmpeg opens the file when it has frames
        writer.write({"frame": FRAME})
    writer.abort()
    assert not opened()
