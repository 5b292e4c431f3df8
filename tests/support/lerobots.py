"""LeRobot data sets without videos, written by pyarrow."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_lerobot(path, lengths, columns, *, fps=10, info=(), episodes=()):
    """Write episodes of these lengths: `columns` by name, (records, n) float32 each, two episodes in a file."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    features = {name: {"dtype": "float32", "shape": [values.shape[1]]} for name, values in columns.items()}
    described = {
        "codebase_version": "v3.0",
        "fps": fps,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {**features, "task_index": {"dtype": "int64", "shape": [1]}},
    }
    files = np.arange(len(lengths)) // 2
    table = {
        "episode_index": np.arange(len(lengths)),
        "length": np.array(lengths),
        "data/chunk_index": np.zeros(len(lengths), np.int64),
        "data/file_index": files,
        "dataset_to_index": ends,
        **dict(episodes),
    }
    for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
        (path / folder).mkdir(parents=True, exist_ok=True)
    (path / "meta/info.json").write_text(json.dumps({**described, **dict(info)}))
    pq.write_table(pa.table(table), path / "meta/episodes/chunk-000/file-000.parquet")
    tasks = {"task_index": [0, 1], "__index_level_0__": ["walk", "stand"]}
    pq.write_table(pa.table(tasks), path / "meta/tasks.parquet")
    for file in np.unique(files).tolist():
        rows = slice(starts[files == file][0], ends[files == file][-1])
        data = {name: pa.FixedSizeListArray.from_arrays(v[rows].ravel(), v.shape[1]) for name, v in columns.items()}
        data["task_index"] = np.repeat(np.arange(len(lengths)) % 2, lengths)[rows]
        pq.write_table(pa.table(data), path / f"data/chunk-000/file-{file:03d}.parquet")
