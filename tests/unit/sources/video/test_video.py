"""Video files: frames as PyAV decodes them, options, folders, shuffles that decode each group once, damage."""

import os
import pickle
import shutil
from contextlib import nullcontext
from fractions import Fraction
from unittest.mock import Mock

import av
import numpy as np
import pytest
from command_line import ok
from samples import sampled
from videos import decoded, write_video

import dataload
import dataload.sources.video.file as file
from dataload._util.caches import pickling_for_worker
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError, UnsupportedFormatError
from dataload.samplers import PoolShuffle, ShardSequential
from dataload.sources.video import VideoOptions
from dataload.sources.video.table import VideoTable, build_table
from dataload.storage.kept import INVALID, CachedTable, Place, read_arrays, read_key, write_arrays
from dataload.streams import MultiStreamLoader, StreamSampler

FRAME = 32 * 48 * 3

# libx265 writes beyond its memory where frames are smaller than 64 x 64.
FILES = {
    "b_frames.mp4": {},
    "closed_groups_of_two.mp4": {"gop": 2},
    "open_groups.mp4": {"options": {"x264-params": "open-gop=1"}, "b_frames": 3, "frames": 60},
    "hevc_open_groups.mp4": {
        "codec": "libx265",
        "size": (96, 128),
        "options": {"x265-params": "open-gop=1:log-level=none"},
    },
    "matroska.mkv": {},
    "vp9.webm": {"codec": "libvpx-vp9", "b_frames": 0},
    "mpeg4.avi": {"codec": "mpeg4", "frames": 60},
    "quicktime.mov": {"codec": "mjpeg", "pixels": "yuvj420p", "b_frames": 0},
    "variable_rate.mp4": {"times": np.cumsum(np.random.default_rng(0).integers(5, 90, 40)).tolist()},
    "starts_late.mkv": {"times": [5000 + 40 * number for number in range(40)]},
    "odd_size.mp4": {"size": (31, 47), "pixels": "yuv444p"},
    "ten_bits.mp4": {"pixels": "yuv420p10le"},
    "alpha.mkv": {"codec": "ffv1", "pixels": "bgra", "b_frames": 0},
    "audio_first.mp4": {"audio": 1.5},
}


@pytest.mark.parametrize("name", FILES)
def test_frames_are_those_of_pyav(tmp_path, name):
    path = write_video(tmp_path / name, **FILES[name])
    images, times = decoded(path)
    source = dataload.open(path)
    assert len(source) == len(images)
    batch = source.read_batch(range(len(source)))
    assert (batch["frame"] == images).all()
    assert batch["time"].tolist() == pytest.approx(times.tolist(), abs=1e-9)
    indices = np.random.default_rng(1).integers(0, len(source), 50)
    assert (source.read_batch(indices)["frame"] == images[indices]).all()
    for index in indices[:8].tolist():
        assert (source[index]["frame"] == images[index]).all()
    assert sum(source.groups) == len(source)
    assert source.fields["frame"].shape == images.shape[1:]


def test_the_first_of_two_pictures_is_read(tmp_path):
    with av.open(str(tmp_path / "a.mp4"), "w") as out:
        streams = [out.add_stream("mpeg4", 25) for _ in range(2)]
        for number, stream in enumerate(streams):
            stream.width, stream.height = 48 + 16 * number, 32
        for stream in streams:
            out.mux(stream.encode(av.VideoFrame(stream.width, 32, "yuv420p")))
        for stream in streams:
            out.mux(stream.encode())
    assert dataload.open(tmp_path / "a.mp4")[0]["frame"].shape == (32, 48, 3)


def test_records(tmp_path):
    for folder in ("run", "jump", "jump/more"):
        (tmp_path / folder).mkdir()
        write_video(tmp_path / folder / "a.mp4", 4)
    (tmp_path / "run" / "notes.txt").write_text("no video")
    source = dataload.open(tmp_path)
    assert source.shard_lengths == (4, 4, 4)
    assert source.fields["label"].classes == ("jump", "run")
    batch = source.read_batch([11, 0, 5], ["__key__", "label", "video", "time"])
    assert batch["__key__"] == ["run/a/3", "jump/a/0", "jump/more/a/1"]
    assert batch["label"].tolist() == [1, 0, 0]
    assert batch["video"].tolist() == [2, 0, 1]
    assert batch["label"].dtype == batch["video"].dtype == np.int64
    assert str(source.locate(11)) == f"{tmp_path / 'run' / 'a.mp4'}, record 3, key 'run/a/3'"
    flat = dataload.open(tmp_path / "jump" / "*.mp4")
    assert set(flat.fields) == {"frame", "time", "video", "__key__"}
    assert flat[0]["__key__"] == "a/0"
    assert dataload.open(tmp_path, fields=["time"])[0].keys() == {"time"}
    with pytest.raises(ConfigError, match=r"a\.mp4 has no field 'labels': did you mean 'label'"):
        dataload.open(tmp_path, fields=["time", "labels"])
    twice = dataload.open([tmp_path / "jump" / "a.mp4"] * 2)
    assert np.array_equal(twice[1]["frame"], twice[5]["frame"])
    other = dataload.open(tmp_path / "jump" / "a.mp4")
    assert len({each.fingerprint() for each in (source, flat, other, dataload.open(tmp_path))}) == 2


def test_a_fingerprint_tells_which_label_a_video_has(tmp_path):
    for name, labels in (("one", "aab"), ("two", "abb")):
        for label in labels:
            (tmp_path / name / label).mkdir(parents=True, exist_ok=True)
        for number, label in enumerate(labels):
            write_video(tmp_path / name / label / f"{number}.mp4", 2)
    one, two = (dataload.open(tmp_path / name) for name in ("one", "two"))
    assert one.fields["label"].classes == two.fields["label"].classes
    assert one.fingerprint() != two.fingerprint()


def test_options(tmp_path):
    path = write_video(tmp_path / "a.mp4", 30)
    small = decoded(path, width=20, height=10, format="rgb24")[0]
    assert (dataload.open(path, size=(10, 20)).read_batch(range(30))["frame"] == small).all()
    assert (dataload.open(path, frames="gray").read_batch(range(30))["frame"] == decoded(path, format="gray")[0]).all()
    planes = dataload.open(path, frames="yuv420p").read_batch(range(30))["frame"]
    assert (planes == decoded(path, format="yuv420p")[0]).all()
    assert dataload.open(path, size=(1, 1)).fields["frame"].shape == (1, 1, 3)
    every = dataload.open(path, step=7)
    assert len(every) == 5
    assert every.groups == (2, 2, 1)
    assert (every.read_batch(range(5))["frame"] == decoded(path)[0][::7]).all()
    assert every[1]["__key__"] == "a/7"
    assert every.fingerprint() != dataload.open(path).fingerprint() == dataload.open(path, frame_bytes=5).fingerprint()
    for option, value in {"size": (0, 5), "step": 0, "frames": "bgr"}.items():
        with pytest.raises(ConfigError, match=option):
            dataload.open(path, **{option: value})
    odd = write_video(tmp_path / "odd.mp4", 2, size=(31, 48), pixels="yuv444p")
    with pytest.raises(ConfigError, match=r"odd size, 31 x 48, which yuv420p cannot have: pass size="):
        dataload.open(odd, frames="yuv420p")


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_frames_are_turned_upright(tmp_path, degrees):
    path = write_video(tmp_path / "a.mp4", 5, rotation=degrees)
    stored = decoded(path)[0]
    turned = np.rot90(stored, degrees // 90, axes=(1, 2))
    assert (dataload.open(path).read_batch(range(5))["frame"] == turned).all()
    shutil.copy(path, tmp_path / "b.mp4")
    assert (dataload.open(tmp_path).read_batch([1, 7])["frame"] == turned[1:3]).all()
    gray = np.rot90(decoded(path, format="gray")[0], degrees // 90, axes=(1, 2))
    assert (dataload.open(path, frames="gray").read_batch(range(5))["frame"] == gray).all()
    scaled = dataload.open(path, size=(12, 20)).read_batch([0])["frame"]
    assert scaled.shape == (1, 12, 20, 3)


def test_mirrored_frames_are_refused(tmp_path):
    path = write_video(tmp_path / "a.mp4", 2, rotation=180, hflip=True)
    with pytest.raises(UnsupportedFormatError, match=r"has to be mirrored, .*encode it again"):
        dataload.open(path)


def test_each_video_of_a_source_is_turned_as_it_says(tmp_path):
    turns = {"a.mp4": {}, "b.mp4": {"rotation": 90}, "c.mp4": {"rotation": 180, "hflip": True}}
    for name, turn in turns.items():
        os.utime(write_video(tmp_path / name, 3, **turn), (1_700_000_000, 1_700_000_000))
    for _ in range(2):  # also with kept tables
        source, scaled = dataload.open(tmp_path), dataload.open(tmp_path, size=(24, 20))
        assert source[2]["frame"].shape == (32, 48, 3)
        with pytest.raises(
            ConfigError, match=r"b\.mp4: a frame has 48 x 32 pixels, and others another size: pass size="
        ):
            source[3]
        with pytest.raises(UnsupportedFormatError, match=r"c\.mp4 has to be mirrored"):
            scaled[6]
        alone = dataload.open(tmp_path / "b.mp4")
        assert (alone[1]["frame"] == np.rot90(decoded(tmp_path / "b.mp4")[0][1])).all()
        assert (scaled[4]["frame"] == dataload.open(tmp_path / "b.mp4", size=(24, 20))[1]["frame"]).all()


def test_a_file_that_begins_with_an_open_group(tmp_path):
    options = {"x264-params": "open-gop=1:scenecut=0:b-adapt=0"}
    path = write_video(tmp_path / "ab.mkv", 60, gop=20, b_frames=2, options=options)  # of which FFmpeg complains
    cut = tmp_path / "cut.mkv"
    with av.open(str(path)) as source, av.open(str(cut), "w") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(video=0) if packet.size]
        for packet in packets[[packet.is_keyframe for packet in packets].index(True, 1) :]:
            packet.stream = stream
            container.mux(packet)
    images, times = decoded(cut)
    batch = dataload.open(cut).read_batch(range(len(images)))
    assert (batch["frame"] == images).all()
    assert batch["time"] == pytest.approx(times)


def test_frames_that_become_larger(tmp_path):
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        first = container.add_stream("libx264", rate=30, options={"x264-params": "repeat-headers=1"})
        first.width, first.height = 48, 32
        other = av.CodecContext.create("libx264", "w")
        other.width, other.height, other.pix_fmt, other.time_base = 640, 480, "yuv420p", Fraction(1, 30)
        other.options = {"x264-params": "repeat-headers=1"}
        for number, encoder in enumerate((first, first, other, other)):
            image = np.zeros((encoder.height, encoder.width, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = number
            packets = encoder.encode(frame)
            container.mux(packets if encoder is first else [])
            if number % 2:
                for packet in encoder.encode(None):
                    packet.stream = first
                    container.mux(packet)
    source = dataload.open(path, size=(32, 32), max_record_bytes=1 << 19)
    assert source[1]["frame"].shape == (32, 32, 3)
    with pytest.raises(CorruptFileError, match=r"record 2: FFmpeg cannot read the frame at 0\.\d+ s: "):
        source[2]
    assert dataload.open(path, size=(32, 32))[2]["frame"].shape == (32, 32, 3)


@pytest.mark.parametrize("executor", ["threads", pytest.param("processes", marks=pytest.mark.slow_suite)])
def test_a_pool_shuffle_decodes_each_group_once(tmp_path, executor):
    for name in "abc":
        write_video(tmp_path / f"{name}.mp4", 60, gop=20)
    images = np.concatenate([decoded(tmp_path / f"{name}.mp4")[0] for name in "abc"])
    expected, least = None, 0 if executor == "threads" else 2
    for workers, frame_bytes in ((least, 1 << 30), (2, 1 << 30), (2, 20 * FRAME), (least, 0)):
        source = dataload.open(tmp_path, frame_bytes=frame_bytes)
        order = PoolShuffle(ShardSequential(source.groups, 0), 50, 0)
        settings = {"num_workers": workers} | ({"executor": executor} if workers else {})
        warned = r"a pool of 50, and the option frame_bytes holds (19|0) decoded ones, .* raise frame_bytes to \d+,\d+"
        with nullcontext() if frame_bytes == 1 << 30 else pytest.warns(UserWarning, match=warned):
            loader = dataload.Loader(source, batch_size=8, sampler=order, epochs=1, **settings)
        with loader:
            batches = [*loader]
        keys = [key for batch in batches for key in batch["__key__"]]
        assert sorted(keys) == sorted({*keys})
        assert expected in (None, keys)
        expected = keys
        for batch in batches:
            rows = [60 * "abc".index(key[0]) + int(key[2:]) for key in batch["__key__"]]
            assert (batch["frame"] == images[rows]).all()
        assert (source.frames_decoded == len(source)) == (frame_bytes == 1 << 30)
        source.close()
        with pytest.raises(dataload.errors.ClosedSourceError):
            source[0]


def test_a_global_shuffle_of_many_frames_warns(tmp_path):
    source = dataload.open(write_video(tmp_path / "a.mp4", 60, gop=20, options={"x264-params": "scenecut=0"}))
    large = dataload.open(tmp_path / "a.mp4", size=(4000, 4000))
    with pytest.warns(UserWarning, match=r"groups of 20, .*: shuffle='shards' .* in a pool of 11 records"):
        dataload.Loader(large, batch_size=2, shuffle="global")
    dataload.Loader(source, batch_size=2, shuffle="global")  # what fits in memory is decoded once
    dataload.Loader(large, batch_size=2, shuffle=True)


def test_a_video_that_is_read_in_order_is_decoded_once(tmp_path):
    source = dataload.open(write_video(tmp_path / "a.mp4", 60, gop=20))
    assert [record["__key__"] for record in source] == [f"a/{number}" for number in range(60)]
    assert source.frames_decoded == 60
    source.read([3])
    source.read([7])  # goes on from there
    assert source.frames_decoded == 68
    windows = dataload.windows(source, dataload.sequence_lengths(source), 6, 3)
    assert (windows[5]["frame"] == source.read_batch(range(15, 21))["frame"]).all()


class Lent:
    """A decoder without a video."""

    decoded, next, is_closed = 0, -1, False

    def close(self):
        self.is_closed = True


def test_the_decoder_that_is_nearest_before_a_frame_is_lent_and_closed_at_the_end():
    lent, first, other = file.LentDecoders(lambda _: Lent(), VideoOptions()), object(), object()
    with lent.at(first, 0) as one, lent.at(first, 0) as two, lent.at(other, 0) as third:
        one.next, two.next, third.next, two.decoded = 10, 20, 14, 5
    assert lent.decoded == 5
    for number, wanted in ((10, one), (19, one), (20, two), (15, one)):
        with lent.at(first, number) as chosen:
            assert chosen is wanted
    with pytest.raises(ValueError, match="damaged"), lent.at(other, 15):
        raise ValueError("damaged")
    assert third.is_closed, "it may have no open file"
    with lent.at(first, 5):
        lent.close()
        assert [each.is_closed for each in (one, two, third)].count(False) == 1
    assert [each.is_closed for each in (one, two, third)] == [True] * 3


def test_windows_decode_the_frames_that_they_read_and_no_others(tmp_path):
    source = dataload.open(write_video(tmp_path / "a.mp4", 60, gop=60, options={"x264-params": "scenecut=0"}))
    clips = dataload.windows(source, [60], offsets={"time": [0, 40]})
    with dataload.Loader(clips[:10], batch_size=5, shuffle=False, epochs=1) as loader:
        assert [batch["time"].shape for batch in loader] == [(5, 2)] * 2
    assert source.frames_decoded == 10


def test_resumed_shuffles_and_split_sources(tmp_path):
    source = dataload.open(write_video(tmp_path / "a.mp4", 60, gop=6))
    train, held_out = source.split(0.8)
    assert sum(train.groups) == len(train)
    assert sum(held_out.groups) == len(held_out)
    settings = {"batch_size": 5, "shuffle": True, "num_workers": 2}
    with dataload.Loader(train, **settings) as loader, dataload.Loader(held_out, **settings, epochs=1) as other:
        wanted = iter(loader)
        first = [next(wanted) for _ in range(4)]
        state = loader.state_dict()
        assert sum(len(batch["frame"]) for batch in other) == len(held_out)
        rest = [next(wanted) for _ in range(5)]
    with dataload.Loader(train, **settings) as resumed:
        resumed.load_state_dict(state)
        for expected, batch in zip(rest, resumed, strict=False):
            assert batch["__key__"] == expected["__key__"]
            assert (batch["frame"] == expected["frame"]).all()
    assert first[0]["frame"].shape == (5, 32, 48, 3)


@pytest.fixture
def four(tmp_path):
    """Four videos of 60 frames, in groups of 30."""
    for name in "abcd":
        write_video(tmp_path / f"{name}.mp4", 60, gop=30, options={"x264-params": "scenecut=0"})
    return tmp_path


def stream_order(source):
    lengths = dataload.sequence_lengths(source)
    return StreamSampler(sequence_lengths=lengths, rows=2, chunk=3, mode="pack", ends="next", seed=0)


@pytest.mark.parametrize(
    ("executor", "workers"), sampled([("threads", 0), ("threads", 2), ("processes", 2)], [("threads", 2)])
)
def test_streams_follow_videos(four, executor, workers):
    source = dataload.open(four)
    settings = {"num_workers": workers, "executor": executor} if workers else {"num_workers": 0}
    with dataload.Loader(source, sampler=stream_order(source), epochs=1, **settings) as loader:
        batches = [*loader]
    videos = [source[60 * number : 60 * (number + 1)] for number in range(4)]
    assert source.frames_decoded == len(source)
    with MultiStreamLoader(iter, videos, batch_size=2, mode="split", shuffle=False) as loader:
        streamed = [batch for batch, _ in zip(loader, range(120), strict=False)]
    assert source.frames_decoded == 2 * len(source)
    images = {name: decoded(four / f"{name}.mp4")[0] for name in "abcd"}
    for found in (batches, streamed):
        followed = np.hstack([np.reshape(batch["__key__"], (2, -1)) for batch in found]).tolist()
        assert sorted([*followed[0], *followed[1]]) == sorted(f"{name}/{n}" for name in "abcd" for n in range(60))
        for keys in followed:
            assert [key[2:] for key in keys] == [f"{number}" for number in range(60)] * 2
        for batch in found:
            frames = np.asarray(batch["frame"]).reshape(-1, 32, 48, 3)
            for key, frame in zip(np.array(batch["__key__"]).ravel().tolist(), frames, strict=True):
                assert (frame == images[key[0]][int(key[2:])]).all()


@pytest.mark.parametrize("room", [20, 8, 0])
def test_groups_that_do_not_fit_are_decoded_once_if_they_are_read_in_order(four, room):
    for follows in (False, True):
        source = dataload.open(four, frame_bytes=room * FRAME)
        order = {"sampler": stream_order(source)} if follows else {"batch_size": 4, "shuffle": False}
        with dataload.Loader(source, num_workers=0, epochs=1, **order) as loader:
            assert sum(np.array(batch["__key__"]).size for batch in loader) == 240
        assert source.frames_decoded == 240


def test_workers_decode_by_themselves_when_their_parent_does_not(tmp_path):
    source = dataload.open(write_video(tmp_path / "a.mp4", 24))
    source.read_ahead(iter([]), ["frame"], here=False).close()
    with pickling_for_worker():
        worker = pickle.loads(pickle.dumps(source))
    copied = pickle.loads(pickle.dumps(source))
    for reader, expected in ((worker, 0), (copied, 24)):
        with reader:
            assert (reader.read_batch(range(24))["frame"] == source.read_batch(range(24))["frame"]).all()
            assert reader.frames_decoded == expected
    with dataload.Loader(source, batch_size=6, num_workers=2, executor="processes", epochs=1) as loader:
        batches = iter(loader)
        first = next(batches)
        source.close()
        frames = np.concatenate([first["frame"], *[batch["frame"] for batch in batches]])
    assert (frames == decoded(tmp_path / "a.mp4")[0]).all()


def test_what_is_no_video(tmp_path):
    (tmp_path / "playlist.mp4").write_text("#EXTM3U\n#EXTINF:1,\n/etc/passwd\n")
    (tmp_path / "empty.mkv").write_bytes(b"")
    for name in ("playlist.mp4", "empty.mkv"):
        with pytest.raises(CorruptFileError, match=rf"{name}: FFmpeg cannot read this video: "):
            dataload.open(tmp_path / name)
    sound = tmp_path / "sound.mp4"
    write_video(sound, 0, audio=1.0)
    with pytest.raises((UnsupportedFormatError, CorruptFileError), match=r"has no video|no frame that can be decoded"):
        dataload.open(sound)
    (tmp_path / "none").mkdir()
    with pytest.raises(SourceNotFoundError, match="has no files with a suffix of format 'video'"):
        dataload.open(tmp_path / "none", format="video")
    big = write_video(tmp_path / "big.mp4", 2)
    with pytest.raises(CorruptFileError, match="a frame of 48 x 32 takes 4,608 bytes of memory"):
        dataload.open(big, max_record_bytes=4000)


def test_a_damaged_frame_says_when_it_is_shown(tmp_path):
    # Not H.264: its encoder's bytes vary, and some damage in them is no error of FFmpeg's.
    path = write_video(tmp_path / "a.avi", 40, codec="mpeg4", b_frames=0, gop=10)
    images = decoded(path)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 60] = bytes(60)
    path.write_bytes(data)
    source = dataload.open(path)
    wrong = list[int]()
    for index in range(40):
        try:
            assert (source[index]["frame"] == images[index]).all()
        except CorruptFileError:
            wrong.append(index)
    with pytest.raises(
        CorruptFileError, match=r"a\.avi, byte \d+, record \d+: FFmpeg cannot read the frame at 0\.\d+ s"
    ):
        source.read(wrong)
    assert 0 < len(wrong) <= 10
    assert wrong == [*range(wrong[0], wrong[-1] + 1)]
    with dataload.Loader(source, batch_size=4, epochs=1, on_error="skip", shuffle=True) as loader:
        assert sum(len(batch["frame"]) for batch in loader) == 40 - len(wrong)


def test_a_file_without_its_end_says_where_it_is_cut_off(tmp_path):
    whole, path = write_video(tmp_path / "whole.mp4"), tmp_path / "a.mp4"
    with av.open(str(whole)) as container, av.open(str(path), "w", options={"movflags": "faststart"}) as moved:
        stream = moved.add_stream_from_template(container.streams.video[0])
        packets = [packet for packet in container.demux(container.streams.video[0]) if packet.size]
        for packet in packets:
            packet.stream = stream
            moved.mux(packet)
    data, last = path.read_bytes(), packets[-1].size
    cuts = {last - 1: r"a\.mp4, byte \d+: packet 39 of the video is damaged, at 1\.\d+ s$"}
    if hasattr(av.stream.Stream, "index_entries"):  # not in PyAV 15
        cuts[last] = r"a\.mp4: the video is cut off: it ends after 39 of 40 frames$"
    for cut, message in cuts.items():
        path.write_bytes(data[:-cut])
        with pytest.raises(CorruptFileError, match=message):
            dataload.open(path)


def test_frames_that_are_not_where_the_table_has_them_say_where_they_are(tmp_path):
    path = write_video(tmp_path / "a.mkv", 20, gop=10, b_frames=0)
    data, missing = path.read_bytes(), "s cannot be decoded: it is missing"
    at, later = (data.index(b"\x81" + time.to_bytes(2, "big")) for time in (167, 500))  # in ms, of track 1
    left = len(data) - later - 7
    for changed, index, message in [
        (data[:at] + b"\x81\0\xaa" + data[at + 3 :], 5, f"0.167 {missing}, and FFmpeg gives the one at 0.170 s"),
        (data[: later - 2] + b"\xec\x01" + left.to_bytes(7, "big") + bytes(left), 15, f"0.500 {missing}"),
    ]:
        path.write_bytes(data)
        os.utime(path, (0, 0))
        with dataload.open(path) as source:
            assert len(source) == 20
            path.write_bytes(changed)
            os.utime(path, (0, 0))
            source[index - 1]
            for wanted in (index, index + 1):
                with pytest.raises(CorruptFileError) as caught:
                    source[wanted]
                assert str(caught.value) == f"{path}, record {index}: the frame at {message}"


def test_a_read_that_is_interrupted_can_be_repeated(tmp_path, monkeypatch):
    source = dataload.open(write_video(tmp_path / "a.mp4", 8))
    with monkeypatch.context() as patch:
        patch.setattr("dataload.sources.video.decoder.Decoder._check", Mock(side_effect=[None, KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            source[3]
    assert np.array_equal(source[3]["frame"], dataload.open(tmp_path / "a.mp4")[3]["frame"])


def test_a_file_that_changes(tmp_path):
    path = write_video(tmp_path / "a.mp4", 20)
    source = dataload.open(path)
    source.close()
    again = dataload.open(path)
    len(again)
    write_video(tmp_path / "b.mp4", 30)
    (tmp_path / "b.mp4").rename(path)
    with pytest.raises(dataload.errors.ChangedFileError):
        again[3]


@pytest.mark.parametrize("decode_in", ["thread", "process"])
@pytest.mark.parametrize("other", ["video", "zeros"])
def test_a_file_that_is_overwritten_is_no_records_fault(tmp_path, decode_in, other):
    raw = {"codec": "rawvideo", "b_frames": 0, "gop": 1, "images": np.zeros((40, 32, 48, 3), np.uint8)}
    path = write_video(tmp_path / "a.mkv", 40, **raw)
    new = write_video(tmp_path / "b.mkv", 40, **{**raw, "images": raw["images"] + 9}).read_bytes()
    os.utime(path, (1_700_000_000, 1_700_000_000))
    with dataload.open(path, decode_in=decode_in, frame_bytes=20_000) as source:
        assert len(source.read_batch([0])["frame"]) == 1
        with path.open("r+b") as file:
            file.write(new if other == "video" else bytes(len(new)))
        with pytest.raises(dataload.WorkerError, match="the file was overwritten while it was in use"):
            list(dataload.Loader(source, batch_size=4, epochs=1, on_error="skip", max_bad=1.0))


def test_tables_are_kept(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", 20)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    first = dataload.open(path)[7]
    monkeypatch.setattr(file, "build_table", lambda *_: pytest.fail("the table was made again"))
    assert (dataload.open(path)[7]["frame"] == first["frame"]).all()


@pytest.mark.slow_suite
def test_lengths_and_groups_of_many_files_are_kept_together(tmp_path, monkeypatch):
    paths = [tmp_path / f"{number:02}.mp4" for number in range(64)]
    for number, path in enumerate(paths):
        shutil.copy(paths[number % 2], path) if number > 1 else write_video(path, 30 - 5 * number, gop=10)
        os.utime(path, (1_700_000_000, 1_700_000_000))

    def opened(*, kept=True):
        for path in tmp_path.glob(".*.dataload-index"):
            path.unlink()  # so that a table that is needed is built
        built.clear()
        source = dataload.open(tmp_path, step=2, cache=kept)
        return source, (source.shard_lengths, source.groups, source.fields)

    built, build = [], file.build_table
    monkeypatch.setattr(file, "build_table", lambda path, *more: (built.append(path), build(path, *more))[1])
    before, facts = opened()
    assert (len(built), facts[0], facts[1][:6]) == (64, (15, 13) * 32, (5, 5, 5, 5, 5, 3))
    again, found = opened()
    assert (built, found) == ([str(paths[0])], facts)
    assert (again[len(again) - 1]["frame"] == before[len(before) - 1]["frame"]).all()
    assert built == [str(paths[0]), str(paths[63])]
    assert again.fingerprint() == before.fingerprint()
    (kept,) = tmp_path.glob(".dataload.filter-*")
    place = Place(str(tmp_path), kept.name, data=str(paths[0]))
    sound = read_arrays(place, read_key(place.path)).arrays
    lengths, groups = sound["lengths"], sound["groups"]
    fewer = {"lengths": lengths[1:], "groups": groups[3:]}
    for lie in ({"lengths": lengths - 15}, {"groups": groups[1:]}, {"groups": groups[::-1]}, fewer):
        assert write_arrays(place, read_key(place.path), CachedTable({**sound, **lie}, {}))
        assert (opened()[1], len(built)) == (facts, 64)
    copied = pickle.dumps(opened()[0])
    shutil.copy(paths[1], paths[0])  # of another time
    assert opened()[1] == opened(kept=False)[1] != facts
    assert pickle.loads(copied).shard_lengths == (13, 13, *facts[0][2:])


def test_a_table_that_cannot_be_true_is_not_believed(tmp_path):
    path = str(write_video(tmp_path / "a.mp4", 12, gop=4))
    table = build_table(path, path, 1 << 20, decodes=True)
    assert (table.starts.tolist(), len(table.times)) == ([0, 4, 8], 12)

    def unpacked(arrays=(), **extras):
        found = table.pack()
        return VideoTable.unpack(CachedTable({**found.arrays, **dict(arrays)}, {**found.extras, **extras}))

    packed = unpacked().pack()
    assert (packed.extras, {name: each.tolist() for name, each in packed.arrays.items()}) == (
        table.pack().extras,
        {name: each.tolist() for name, each in table.pack().arrays.items()},
    )
    assert unpacked({"starts": np.array([0, 4, 11])}, height=1, width=1) is not None
    seconds = unpacked(time_base=[3, 100]).seconds(np.array([5, 2]))
    assert seconds.tolist() == pytest.approx((table.times[[5, 2]] * 0.03).tolist())
    twice = np.maximum(table.times, table.times[1])
    lies = [
        *({name: getattr(table, name)[1:]} for name in ("starts", "key_times", "key_decoding_times")),
        *({"times": each} for each in (table.times[::-1], table.times[:8], twice)),
        *({"starts": np.array(each)} for each in ([1, 4, 8], [0, 4, 4], [0, 8, 4], [0, 4, 12])),
    ]
    for each in lies:
        with pytest.raises(INVALID):
            unpacked(each)
    wrong = [{"height": 0}, {"width": 0}, {"time_base": [0, 1]}, {"time_base": [-1, 25]}]
    for each in wrong:
        with pytest.raises(INVALID):
            unpacked(**each)


def test_a_manifest_opens_videos_when_they_are_read(tmp_path):
    for name in "abc":
        write_video(tmp_path / f"{name}.mp4", 20)
    before = dataload.open(tmp_path)
    ok("index", "--manifest", tmp_path)
    source = dataload.open(tmp_path)
    assert len(source) == 60
    assert source.fingerprint() == before.fingerprint()
    assert (source[45]["frame"] == before[45]["frame"]).all()
    ok("verify", tmp_path)
    assert "frame" in ok("inspect", tmp_path)


def test_videos_at_urls(tmp_path, object_server):
    bucket = object_server.bucket()
    for name in "ab":
        object_server.put(bucket, f"{name}.mp4", write_video(tmp_path / f"{name}.mp4", 30, gop=10).read_bytes())
    local = dataload.open(tmp_path)
    far = dataload.open(object_server.url(bucket), storage_options=object_server.storage_options())
    order = PoolShuffle(ShardSequential(local.groups, 0), 25, 0)
    loaders = [dataload.Loader(each, batch_size=5, sampler=order, num_workers=2, epochs=1) for each in (local, far)]
    for ours, theirs in zip(*loaders, strict=True):
        assert ours["__key__"] == theirs["__key__"]
        assert (ours["frame"] == theirs["frame"]).all()
    assert far.frames_decoded == 60
