"""A small data set of every format."""

from pathlib import Path

import numpy as np
from videos import write_video
from written import written

GOLDEN = Path(__file__).parents[1] / "golden"
ARRAYS = ("syrah", "torchrecord", "lmdb", "tar", "array_record", "tfrecord", "parquet", "arrow", "jsonl")


def small_sets(directory):
    """Return a path and the options to open it for each format that has paths."""
    (directory / "images" / "cat").mkdir(parents=True)
    (directory / "images" / "cat" / "1.jpg").write_bytes(b"no image")
    (directory / "x.csv").write_text("x,text\n1,one\n2,two\n3,three\n")
    (directory / "x.txt").write_text("one\ntwo\nthree\n")
    records = [{"x": np.arange(3, dtype=np.float32) + i, "n": np.int64(i)} for i in range(7)]
    sets = {
        "text": (directory / "x.txt", {"format": "text", "records": "line"}),
        "csv": (directory / "x.csv", {}),
        "folder": (directory / "images", {"format": "folder", "decode": None}),
        "hugging_face": (GOLDEN / "hugging_face" / "saved", {}),
        "lerobot": (GOLDEN / "lerobot" / "images", {}),
        "mds": (GOLDEN / "mds" / "all", {}),
        "range": ("range:9", {}),
        "tfds": (GOLDEN / "tfds" / "demo" / "1.0.0", {"split": "train"}),
        "tokens": (GOLDEN / "tokens" / "u16.bin", {"format": "tokens", "window": 8}),
        "video": (write_video(directory / "x.mp4", 7), {}),
        "wids": (GOLDEN / "wids" / "shards.json", {}),
        **{name: (written(directory / f"{name}.data", records, format=name), {"format": name}) for name in ARRAYS},
    }
    return {name: (str(path), options) for name, (path, options) in sets.items()}
