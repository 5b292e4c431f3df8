"""The sound of videos in windows by time: samples as PyAV decodes them from the start of the file."""

import itertools
import os

import numpy as np
import pytest
from samples import sampled
from videos import heard, write_sound, write_video

import dataload
from dataload.errors import ConfigError, CorruptFileError

# AAC as most programs write it: FFmpeg's encoder stores noise as its loudness, and decoders draw another one.
AAC = {"codec": "aac", "options": {"aac_pns": "0"}}
FILES = {
    "aac.mp4": AAC,
    "aac.mkv": AAC | {"rate": 48_000},
    "opus.mkv": {"codec": "libopus", "rate": 48_000},
    "opus.mp4": {"codec": "libopus", "rate": 48_000, "layout": "mono"},
    "vorbis.mkv": {"codec": "vorbis", "options": {"strict": "experimental"}},
    "pcm.mov": {"codec": "pcm_s16le", "rate": 48_000},
    "pcm.avi": {"codec": "pcm_u8", "rate": 22_050, "layout": "mono"},
    "deep.mkv": {"codec": "pcm_s24le", "rate": 16_000},
    "mp3.mp4": {"codec": "libmp3lame"},
    "mp3.avi": {"codec": "libmp3lame"},
    "flac.mkv": {"codec": "flac", "rate": 48_000},
}
CASES = [*itertools.product([None, 16_000], FILES)]
INEXACT = 1e-6  # Opus begins with slightly other states


def opened(path, **options):
    source = dataload.open(path, fields=["frame", "audio"], **options)
    return source, dataload.sequence_lengths(source)


@pytest.mark.parametrize(("rate", "name"), sampled(CASES, CASES[:14]))
def test_samples_are_those_of_the_whole_stream(tmp_path, name, rate):
    path = write_sound(tmp_path / name, **FILES[name])
    whole = heard(path, rate, 5)
    source, lengths = opened(path, sample_rate=rate)
    windows = dataload.windows(source, lengths, seconds=0.7, fps=10)
    rate = rate or FILES[name].get("rate", 44_100)
    count = round(0.7 * rate)
    assert windows.fields["audio"].shape == (len(whole), count)
    chosen = np.random.default_rng(0).permutation(len(windows))[:5].tolist()
    for index in [0, *chosen, len(windows) - 1]:
        record = windows[index]
        start = round(record["time"][0] * rate)
        assert record["audio"].dtype == np.float32
        limit = INEXACT if name.startswith("opus") else 0
        assert np.abs(record["audio"] - whole[:, start : start + count]).max() <= limit
        assert record["frame"].shape == (7, 32, 48, 3)
    batch = windows.read_batch(chosen, ["audio"])
    for row, index in zip(batch["audio"], chosen, strict=True):
        assert (row == windows[index]["audio"]).all()  # whatever was read before


def test_a_decoder_that_draws_noise_draws_the_same_again(tmp_path):
    source, lengths = opened(write_sound(tmp_path / "a.mp4"))
    windows = dataload.windows(source, lengths, seconds=0.5, fps=10)
    first = [windows[index]["audio"] for index in range(30)]
    for index in (20, 3, 29, 4):
        assert (windows[index]["audio"] == first[index]).all()


def test_sound_alone_decodes_no_pictures(tmp_path):
    for name in "ab":
        write_sound(tmp_path / f"{name}.mp4", **AAC)
    source, lengths = opened(tmp_path, sample_rate=16_000)
    windows = dataload.windows(source, lengths, seconds=0.5, fps=10, ends="pad", stride=4)
    with dataload.Loader(windows, batch_size=5, shuffle=True, num_workers=2, epochs=1, fields=["audio"]) as loader:
        batches = [*loader]
    assert {batch["audio"].shape[1:] for batch in batches} == {(2, 8000)}
    assert source.frames_decoded == 0
    with dataload.Loader(windows, batch_size=5, shuffle=True, num_workers=2, epochs=1) as loader:
        for sound, batch in zip(batches, loader, strict=True):
            assert (sound["audio"] == batch["audio"]).all()
            assert batch["frame"].shape[1:] == (5, 32, 48, 3)
            assert batch["is_pad"].shape[1:] == (5,)
    assert source.frames_decoded == len(source)


def test_windows_of_some_videos(tmp_path):
    for name in "abc":
        write_sound(tmp_path / f"{name}.mkv", codec="flac")
    source, _ = opened(tmp_path)
    later = source[40:]
    windows = dataload.windows(later, [40, 40], seconds=0.5, fps=10)
    expected = heard(tmp_path / "b.mkv")[:, round(0.3 * 44_100) :][:, :22_050]
    assert (windows[3]["audio"] == expected).all()
    joined = dataload.concat([opened(tmp_path / f"{name}.mkv")[0] for name in "ab"])
    windows = dataload.windows(joined, [40, 40], seconds=0.5, fps=10)
    batch = windows.read_batch([len(windows) // 2 + 3, 0], ["audio"])
    assert (batch["audio"][0] == expected).all()
    assert (batch["audio"][1] == heard(tmp_path / "a.mkv")[:, :22_050]).all()


def drift(path, seconds):
    source, lengths = opened(path)
    windows = dataload.windows(source, lengths, seconds=1, fps=1)
    rate, whole = 16_000, heard(path)
    for index in (0, 1, len(windows) // 2, len(windows) - 2):
        start = round(windows[index]["time"][0] * rate)
        assert start == index * rate
        assert (windows[index]["audio"] == whole[:, start : start + rate]).all()
    assert len(windows) == seconds


SPARSE = {"rate": 16_000, "layout": "mono", "fps": 1, "gop": 60, "options": {"aac_pns": "0", "aac_coder": "fast"}}


@pytest.mark.slow_suite
def test_no_drift(tmp_path):
    for name in ("a.mp4", "a.mkv"):
        drift(write_sound(tmp_path / name, 60, **SPARSE), 60)


@pytest.mark.slow_suite
@pytest.mark.timeout(300)
def test_no_drift_in_an_hour(tmp_path):
    drift(write_sound(tmp_path / "a.mkv", 3600, **SPARSE), 3600)  # whose times are in milliseconds


def test_files_without_sound_are_named(tmp_path):
    write_sound(tmp_path / "a.mp4")
    for name in "bc":
        write_video(tmp_path / f"{name}.mp4", 4)
    with pytest.raises(ConfigError, match=r"2 of 3 files have no audio: .*b\.mp4, .*c\.mp4: leave out the files, or"):
        len(dataload.open(tmp_path, fields=["audio"]))
    with pytest.raises(ConfigError, match=r"1 of 1 files have no audio: .*c\.mp4"):
        len(dataload.open(tmp_path / "c.mp4", fields=["audio"]))
    assert "audio" not in dataload.open(tmp_path / "a.mp4").fields


@pytest.mark.slow_suite
def test_files_of_several_rates(tmp_path):
    write_sound(tmp_path / "a.mp4", **AAC)
    write_sound(tmp_path / "b.mp4", rate=48_000, **AAC)
    with pytest.raises(ConfigError, match=r"b\.mp4 has 2 channels at 48000 Hz, and .*a\.mp4 2 at 44100 Hz: pass"):
        len(dataload.open(tmp_path, fields=["audio"]))
    source, lengths = opened(tmp_path, sample_rate=24_000)
    windows = dataload.windows(source, lengths, seconds=0.5, fps=10)
    assert (windows[-1]["audio"] == heard(tmp_path / "b.mp4", 24_000, 5)[:, round(3.5 * 24_000) :][:, :12_000]).all()


def test_sound_needs_windows_by_time(tmp_path):
    source, lengths = opened(write_sound(tmp_path / "a.mp4"))
    for read in (lambda: source[0], lambda: source.read_batch([1], ["audio"])):
        with pytest.raises(ConfigError, match=r"audio is read by windows: dataload\.windows\(source, lengths, seconds"):
            read()
    with pytest.raises(ConfigError, match=r"'audio' has the time span of a window: pass seconds= and fps="):
        dataload.windows(source, lengths, 3)
    with pytest.raises(ConfigError, match="and no offsets for it"):
        dataload.windows(source, lengths, offsets={"audio": [0, 1]}, fps=10)
    with pytest.raises(ConfigError, match="sample_rate"):
        dataload.open(tmp_path / "a.mp4", sample_rate=0)


@pytest.mark.parametrize(("name", "message"), [("a.mkv", "the sound ends too early"), ("a.mp4", "FFmpeg cannot read")])
def test_a_file_that_is_cut_off_behind_our_back(tmp_path, name, message):
    path = write_sound(tmp_path / name)
    os.utime(path, (0, 0))
    windows = dataload.windows(*opened(path), seconds=0.5, fps=10)
    before = windows[3]["audio"]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 6 // 10] + bytes(len(data) - len(data) * 6 // 10))
    os.utime(path, (0, 0))
    for index in (30, len(windows) - 1, 30):
        with pytest.raises(CorruptFileError, match=message):
            windows.read_batch([index], ["audio"])
    path.write_bytes(data)
    os.utime(path, (0, 0))
    assert (windows[3]["audio"] == before).all()


def test_damaged_sound(tmp_path):
    path = write_sound(tmp_path / "a.mkv", codec="flac", rate=48_000)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 3000] = bytes(3000)
    path.write_bytes(data)
    windows = dataload.windows(*opened(path), seconds=0.5, fps=10)
    with pytest.raises(CorruptFileError, match=r"a\.mkv.*: (FFmpeg cannot read this video|the sound)"):
        windows.read_batch(range(len(windows)), ["audio"])
