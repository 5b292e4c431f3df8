"""Items of LeRobot data sets beside `LeRobotDataset`, and frames beside torchcodec.

``LEROBOT_PYTHON=PATH`` names the Python of an environment with both; see the Makefile.
"""

import json
import os
import subprocess
import time
from pathlib import Path
from statistics import median

import numpy as np

import dataload
from benchmarks.harness import ROOT, VERSION, aim
from dataload.samplers import GlobalShuffle, PoolShuffle, ShardSequential

EPISODES, LENGTH, FPS, SIZE = 12, 250, 30, (240, 320)
CAMERA, POOL, BATCH, ROUNDS = "observation.images.top", 500, 16, 3
DELTAS = {CAMERA: [-0.1, 0.0], "action": [number / FPS for number in range(16)]}
GROUPS = {250: (10, 480), 2: (3, 960)}  # frames from keyframe to keyframe: the aim, and items of the peer
WORKERS = (0, 2, 4)


def made(gop):
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
        root = made(gop)
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
    from benchmarks import video

    rows, title = [], "frames of 224p beside torchcodec, CPU time"
    for gop in (2, 250):
        path = video.made("224p", gop)
        with dataload.open(path) as source:
            order = PoolShuffle(ShardSequential(source.groups, 0), 400, 0)
            spent, _ = video.timed(lambda source=source, order=order: video.served(source, order, num_workers=2))
            shuffled = GlobalShuffle(len(source), 0).indices(np.arange(60 if gop > 60 else 400), epoch=0).tolist()
            each = spent / len(source)
        in_order, random = asked(path=str(path), order=None), asked(path=str(path), order=shuffled)
        first, second = (found["seconds"] / found["rows"] for found in (in_order, random))
        more = {"ours": each, "in_order": first, "random": second}
        rows.append(aim(title, f"groups of {gop}: of torchcodec in order", each / first, most=1.25, **more))
        rows.append(aim(title, f"groups of {gop}: torchcodec at random, times ours", second / each, 1, **more))
    return rows
