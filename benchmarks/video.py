"""Frames of videos in a shuffled order, and clips, beside PyAV: how much more CPU time they take than decoding does."""

import os
import subprocess
import sys
import time

import av
import numpy as np

import dataload
from benchmarks.harness import ROOT, VERSION, aim
from dataload.samplers import GlobalShuffle, PoolShuffle, ShardSequential

FILES = {"224p": ((224, 224), 2000, 400, (2, 12, 60, 250)), "720p": ((720, 1280), 1800, 150, (12, 60))}
CLIPS, CLIP, STRIDE = 40, 16, 4
MANY = 1000
HELD = 350  # frames of 720p, of which 1 GiB holds 388


def write(path, frames, size, gop):
    """A scene that moves and changes, by libx264 with its usual B-frames."""
    height, width = size
    rng = np.random.default_rng(0)
    scene = rng.integers(0, 256, (height // 8, width // 4, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"preset": "veryfast", "x264-params": "scenecut=0"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, "yuv420p", gop
        for number in range(frames):
            at = 3 * number % width
            image = np.ascontiguousarray(scene[:height, at : at + width]) // 2 + number % 64
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))


def made(name, gop):
    size, frames, *_ = FILES[name]
    path = ROOT / f"v{VERSION}-video-{name}-{frames}-{gop}.mp4"
    if not path.exists():
        ROOT.mkdir(exist_ok=True)
        write(path, frames, size, gop)
    return path


def timed(function):
    """CPU and wall seconds of a call, the best of three."""
    found = []
    for _ in range(3):
        begun = time.process_time(), time.perf_counter()
        function()
        found.append((time.process_time() - begun[0], time.perf_counter() - begun[1]))
    return tuple(map(min, zip(*found, strict=True)))


def in_order(path, wanted=None):
    """Decode by PyAV with one thread, and convert those frames that are wanted."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        for number, frame in enumerate(container.decode(stream)):
            if wanted is None or number in wanted:
                frame.to_ndarray(format="rgb24")


def served(source, order, **settings):
    with dataload.Loader(source, batch_size=16, sampler=order, epochs=1, **settings) as loader:
        for _ in loader:
            pass


def from_keyframes(path, clips, starts, times):
    """Decode clips by PyAV, each from its keyframe to its last frame."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        for clip in clips:
            key = starts[np.searchsorted(starts, clip[0], side="right") - 1]
            container.seek(int(times[key]), stream=stream)
            wanted = {*clip}
            for number, frame in enumerate(container.decode(stream), int(key)):
                if number in wanted:
                    frame.to_ndarray(format="rgb24")
                if number == clip[-1]:
                    break


def shuffled():
    rows, title = [], "frames through a pool, CPU time"
    for name, (_, frames, pool, gops) in FILES.items():
        for gop in gops:
            path = made(name, gop)
            base, _ = timed(lambda path=path: in_order(path))
            with dataload.open(path) as source:
                order = PoolShuffle(ShardSequential(source.groups, 0), pool, 0)
                settings = {"num_workers": 2, "prefetch": 2}
                spent, _ = timed(
                    lambda source=source, order=order, settings=settings: served(source, order, **settings)
                )
                decoded = source.frames_decoded / 3 / frames
            more = {"in_order": base, "ours": spent}
            rows.append(aim(title, f"{name}, groups of {gop}: of PyAV in order", spent / base, most=1.25, **more))
            rows.append(aim(title, f"{name}, groups of {gop}: decoded", decoded, most=1.02))
    return rows


def clips():
    path = made("224p", 60)
    span = range(0, CLIP * STRIDE, STRIDE)
    with dataload.open(path) as source:
        windows = dataload.windows(source, dataload.sequence_lengths(source), offsets={"frame": list(span)})
        chosen = GlobalShuffle(len(windows), 0).indices(np.arange(CLIPS), epoch=0)
        groups, times = np.concatenate(([0], np.cumsum(source.groups))), source.read_batch(range(len(source)), ["time"])
        with av.open(str(path)) as container:
            units = np.round(times["time"] / float(container.streams.video[0].time_base)).astype(np.int64)
        every = [[int(start) + offset for offset in span] for start in chosen]
        base, _ = timed(lambda: from_keyframes(path, every, groups, units))
        spent, _ = timed(lambda: [windows.read_batch([int(index)], ["frame"]) for index in chosen])
    title = f"{CLIPS} random clips of {CLIP} frames at stride {STRIDE}, CPU time"
    return [aim(title, "of PyAV from the keyframes", spent / base, most=1.1, base=base, ours=spent)]


def threads():
    """Decode ahead of a loader what fits in memory. It decodes what is late by itself, so its own gain is less."""
    path, ahead, whole = made("720p", 12), {}, {}
    for count in (1, 2):
        with dataload.open(path, decoder_threads=count, fields=["frame"]) as source:
            order = PoolShuffle(ShardSequential(source.groups, 0), 150, 0)

            def decoded(source=source, order=order):
                before = source.frames_decoded
                with dataload.Loader(source, batch_size=16, sampler=order, prefetch=1) as loader:
                    batches = iter(loader)
                    next(batches)
                    while source.frames_decoded < before + HELD:
                        time.sleep(0.002)  # nothing tells when a frame is decoded

            ahead[count] = timed(decoded)[1]
            whole[count] = timed(lambda source=source, order=order: served(source, order, prefetch=1))[1]
    more = {"ahead": ahead[2], "loader": whole[2], "loader_ratio": whole[1] / whole[2]}
    return [aim("decoding ahead, by the clock", "two threads", ahead[1] / ahead[2], 1.8, **more)]


def opening():
    folder = ROOT / f"v{VERSION}-videos"
    if not folder.exists():
        write(ROOT / "one.mp4", 60, (64, 64), 12)
        folder.mkdir(parents=True)
        for number in range(MANY):
            path = folder / f"{number:04d}.mp4"
            path.write_bytes((ROOT / "one.mp4").read_bytes())
            os.utime(path, (1_700_000_000, 1_700_000_000))

    def demuxed():
        for path in sorted(folder.glob("*.mp4")):
            with av.open(str(path)) as container:
                for _ in container.demux(container.streams.video[0]):
                    pass

    base = timed(demuxed)[0]
    (folder / "dataload.json").unlink(missing_ok=True)
    without = timed(lambda: len(dataload.open(folder, cache=False)))[0]
    len(dataload.open(folder))
    cached = timed(lambda: len(dataload.open(folder)))[0]
    subprocess.run(
        [sys.executable, "-m", "dataload", "index", "--manifest", folder], check=True, stdout=subprocess.DEVNULL
    )
    listed = timed(lambda: len(dataload.open(folder)))[0]
    title = f"opening {MANY:,} videos of 60 frames, CPU time"
    return [
        aim(title, "of demuxing them", without / base, most=1.2, base=base, ours=without),
        aim(title, "seconds with kept tables", cached, most=0.1),
        aim(title, "seconds with a manifest", listed, most=0.1),
    ]


def video():
    return [*shuffled(), *clips(), *threads(), *opening()]
