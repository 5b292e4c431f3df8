"""Frames of videos in a shuffled order, and clips, beside PyAV: how much more CPU time they take than decoding does.

Items of LeRobot data sets beside `LeRobotDataset`, and frames beside torchcodec: ``LEROBOT_PYTHON=PATH`` names the
Python of an environment with both; see the Makefile.
"""

import json
import os
import subprocess
import time
from pathlib import Path
from statistics import median

import av
import numpy as np

import dataload
from benchmarks.harness import ROOT, VERSION, aim, cpu_seconds_of, seconds_of
from dataload.convert.indexing import index_shards
from dataload.samplers import GlobalShuffle, PoolShuffle, ShardSequential

FILES = {"224p": ((224, 224), 2000, 400, (2, 12, 60, 250)), "720p": ((720, 1280), 1800, 150, (12, 60))}
CLIPS, CLIP, STRIDE = 40, 16, 4
MANY = 1000
CALLS = 3  # of which the fastest counts
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


def in_order(path):
    """Decode by PyAV with one thread, and convert all frames."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        for frame in container.decode(stream):
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
    rows, title, settings = [], "frames through a pool, CPU time", {"num_workers": 2, "prefetch": 2}
    for name, (_, frames, pool, gops) in FILES.items():
        for gop in gops:
            path = made(name, gop)
            base = cpu_seconds_of(lambda path=path: in_order(path), CALLS)
            with dataload.open(path) as source:
                order = PoolShuffle(ShardSequential(source.groups, 0), pool, 0)
                spent = cpu_seconds_of(lambda source=source, order=order: served(source, order, **settings), CALLS)
                decoded = source.frames_decoded / CALLS / frames
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
        base = cpu_seconds_of(lambda: from_keyframes(path, every, groups, units), CALLS)
        spent = cpu_seconds_of(lambda: [windows.read_batch([int(index)], ["frame"]) for index in chosen], CALLS)
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

            ahead[count] = seconds_of(decoded, CALLS)
            whole[count] = seconds_of(lambda source=source, order=order: served(source, order, prefetch=1), CALLS)
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

    base = cpu_seconds_of(demuxed, CALLS)
    (folder / "dataload.json").unlink(missing_ok=True)
    without = cpu_seconds_of(lambda: len(dataload.open(folder, cache=False)), CALLS)
    len(dataload.open(folder))
    cached = cpu_seconds_of(lambda: len(dataload.open(folder)), CALLS)
    index_shards(str(folder))
    listed = cpu_seconds_of(lambda: len(dataload.open(folder)), CALLS)
    title = f"opening {MANY:,} videos of 60 frames, CPU time"
    return [
        aim(title, "of demuxing them", without / base, most=1.2, base=base, ours=without),
        aim(title, "seconds with kept tables", cached, most=0.1),
        aim(title, "seconds with a manifest", listed, most=0.1),
    ]


EPISODES, LENGTH, FPS, SIZE = 12, 250, 30, (240, 320)
CAMERA, POOL, BATCH, ROUNDS = "observation.images.top", 500, 16, 3
DELTAS = {CAMERA: [-0.1, 0.0], "action": [number / FPS for number in range(16)]}
GROUPS = {250: (10, 480), 2: (3, 960)}  # frames from keyframe to keyframe: the aim, and items of the peer
WORKERS = (0, 2, 4)


def made_robots(gop):
    """A data set as LeRobot 0.4 writes it, with one camera."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = ROOT / f"v{VERSION}-lerobot-{gop}"
    if (root / "meta/info.json").exists():
        return root
    rows, ends = EPISODES * LENGTH, np.arange(1, EPISODES + 1) * LENGTH
    rng = np.random.default_rng(0)
    scene = rng.integers(0, 256, (SIZE[0] // 8, SIZE[1] // 4, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    file = root / f"videos/{CAMERA}/chunk-000/file-000.mp4"
    with dataload.create(file, overwrite=True, gop=gop, crf=30, fps=FPS, preset="veryfast") as writer:
        for number in range(rows):
            at = 3 * number % SIZE[1]
            writer.write({"frame": scene[:, at : at + SIZE[1]] // 2 + np.uint8(number % 64)})
    frame = np.arange(rows) % LENGTH
    numbers = {"episode_index": np.arange(rows) // LENGTH, "index": np.arange(rows), "task_index": np.zeros(rows, int)}
    vectors = {name: rng.random((rows, 6), np.float32) for name in ("observation.state", "action")}
    lists = {name: pa.FixedSizeListArray.from_arrays(values.ravel(), 6) for name, values in vectors.items()}
    steps = {"timestamp": (frame / FPS).astype(np.float32), "frame_index": frame, **numbers}
    places = {f"{of}/{part}_index": [0] * EPISODES for of in ("data", f"videos/{CAMERA}") for part in ("chunk", "file")}
    episodes = {
        "episode_index": np.arange(EPISODES),
        "tasks": [["move"]] * EPISODES,
        "length": [LENGTH] * EPISODES,
        "dataset_from_index": ends - LENGTH,
        "dataset_to_index": ends,
        f"videos/{CAMERA}/from_timestamp": (ends - LENGTH) / FPS,
        f"videos/{CAMERA}/to_timestamp": ends / FPS,
        **places,
    }
    features = {
        **{name: {"dtype": "float32", "shape": [6], "names": None} for name in vectors},
        CAMERA: {"dtype": "video", "shape": [*SIZE, 3], "names": ["height", "width", "channels"]},
        **{name: {"dtype": str(value.dtype), "shape": [1], "names": None} for name, value in steps.items()},
    }
    info = {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": EPISODES,
        "total_frames": rows,
        "total_tasks": 1,
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{EPISODES}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": features,
    }
    tables = {"data/chunk-000": {**lists, **steps}, "meta/episodes/chunk-000": episodes}
    for folder, table in tables.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table), root / folder / "file-000.parquet")
    import pandas as pd

    pd.DataFrame({"task_index": [0]}, index=["move"]).to_parquet(root / "meta/tasks.parquet")
    (root / "meta/stats.json").write_text("{}")
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def asked(**given):
    """What the peer's Python says: seconds and rows."""
    script = Path(__file__).parent / "peers/lerobot_items.py"
    command = [os.environ["LEROBOT_PYTHON"], str(script), json.dumps(given)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def ours(source, order):
    """Items a second from the start, as tensors of floats, (channels, height, width), as LeRobot gives them."""
    from dataload.torch import to_tensors

    def as_floats(batch):
        tensors = to_tensors(batch)
        return {**tensors, CAMERA: tensors[CAMERA] / 255}

    settings = {"batch_size": BATCH, "num_workers": 2, "batch_transform": as_floats, "epochs": 1}
    begun = time.perf_counter()
    with dataload.Loader(source, sampler=order, **settings) as loader:
        return sum(len(batch["index"]) for batch in loader) / (time.perf_counter() - begun)


def robots():
    if not os.environ.get("LEROBOT_PYTHON"):
        print("  LEROBOT_PYTHON names no Python with LeRobot: see the Makefile")
        return []
    rows, title = [], f"LeRobot items with windows through a pool of {POOL}, by the clock"
    for gop, (floor, count) in GROUPS.items():
        root = made_robots(gop)
        with dataload.open(root, delta_timestamps=DELTAS, layout="chw") as source:
            order = PoolShuffle(ShardSequential(source.groups, 0), POOL, 0)
            indices = order.indices(np.arange(count + (4 * WORKERS[-1] + 1) * BATCH), epoch=0).tolist()
            best = {}
            found = []
            for round_ in range(ROUNDS):
                own = ours(source, order)
                for workers in WORKERS if not round_ else (max(best, key=best.get),):
                    peer = asked(root=str(root), order=indices, deltas=DELTAS, workers=workers, batch_size=BATCH)
                    best[workers] = max(best.get(workers, 0), peer["rows"] / peer["seconds"])
                found.append(own / best[max(best, key=best.get)])
        more = {"lerobot": max(best.values()), "workers": max(best, key=best.get), "ours": own}
        rows.append(aim(title, f"groups of {gop}: times LeRobotDataset", median(found), floor, **more))
        print(f"    ours {own:,.0f} items/s, LeRobotDataset {best}")
    return [*rows, *torchcodec()]


def torchcodec():
    rows, title = [], "frames of 224p beside torchcodec, CPU time"
    for gop in (2, 250):
        path = made("224p", gop)
        with dataload.open(path) as source:
            order = PoolShuffle(ShardSequential(source.groups, 0), 400, 0)
            spent = cpu_seconds_of(lambda source=source, order=order: served(source, order, num_workers=2), CALLS)
            shuffled = GlobalShuffle(len(source), 0).indices(np.arange(60 if gop > 60 else 400), epoch=0).tolist()
            each = spent / len(source)
        in_order, random = asked(path=str(path), order=None), asked(path=str(path), order=shuffled)
        first, second = (found["seconds"] / found["rows"] for found in (in_order, random))
        more = {"ours": each, "in_order": first, "random": second}
        rows.append(aim(title, f"groups of {gop}: of torchcodec in order", each / first, most=1.25, **more))
        rows.append(aim(title, f"groups of {gop}: torchcodec at random, times ours", second / each, 1, **more))
    return rows


def video():
    return [*shuffled(), *clips(), *threads(), *opening(), *robots()]
