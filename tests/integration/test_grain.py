"""Our sources in Grain's own loaders, with two worker processes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from videos import write_video

import dataload
from dataload.sources.registry import built_in_formats

pytestmark = [pytest.mark.train, pytest.mark.timeout(180)]

GOLDEN = Path(__file__).parents[1] / "golden"
DEMO = GOLDEN / "tfds" / "demo" / "1.0.0"
SCRIPT = Path(__file__).parents[1] / "children" / "grain_loader.py"


def small_sets(directory):
    """A path and the options to open it for each format that has paths."""
    (directory / "images" / "cat").mkdir(parents=True)
    (directory / "images" / "cat" / "1.jpg").write_bytes(b"no image")
    (directory / "x.csv").write_text("x,text\n1,one\n2,two\n3,three\n")
    (directory / "x.txt").write_text("one\ntwo\nthree\n")
    sets = {
        "text": (directory / "x.txt", {"format": "text", "records": "line"}),
        "csv": (directory / "x.csv", {}),
        "folder": (directory / "images", {"format": "folder", "decode": None}),
        "hugging_face": (GOLDEN / "hugging_face" / "saved", {}),
        "lerobot": (GOLDEN / "lerobot" / "images", {}),
        "mds": (GOLDEN / "mds" / "all", {}),
        "range": ("range:9", {}),
        "tfds": (DEMO, {"split": "train"}),
        "tokens": (GOLDEN / "tokens" / "u16.bin", {"format": "tokens", "window": 8}),
        "video": (write_video(directory / "x.mp4", 7), {}),
        "wids": (GOLDEN / "wids" / "shards.json", {}),
    }
    for name in ("syrah", "torchrecord", "lmdb", "tar", "array_record", "tfrecord", "parquet", "arrow", "jsonl"):
        path = directory / f"{name}.data"
        with dataload.create(path, format=name) as writer:
            for i in range(7):
                writer.write({"x": np.arange(3, dtype=np.float32) + i, "n": np.int64(i)})
        sets[name] = (path, {"format": name})
    return {name: (str(path), options) for name, (path, options) in sets.items()}


def test_every_format_is_read_by_grains_workers(tmp_path):
    pytest.importorskip("grain", reason="grain is not installed")
    path = tmp_path / "x.array_record"
    with dataload.create(path) as writer:
        for i in range(100):
            writer.write(b"%03d" % i)
    sets = small_sets(tmp_path)
    assert sets.keys() | {"memory"} == {entry.name for entry in built_in_formats()}
    # In a process of its own: Grain starts threads and processes that it does not end before its process does.
    command = [sys.executable, SCRIPT, path, DEMO, json.dumps(sets)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all read\n")
