"""The metadata of a LeRobot data set, version 3.0: features, episodes, tasks, and the files that hold them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload.errors import CorruptFileError, SourceError, UnsupportedFormatError
from dataload.sources.lerobot.format import INFO_NAME
from dataload.sources.registry import get_format
from dataload.storage import Remote, files_below, is_url, join, storage_of
from dataload.storage.backend import read_limited
from dataload.storage.paths import leads_elsewhere
from dataload.types import Array, Int64Array

_MOST_BYTES = 1 << 24
_PLACE = re.compile(r"\{(chunk_index|file_index|video_key)(?::0(\d)d)?\}")


@dataclass(frozen=True, slots=True)
class Camera:
    """The videos of a camera: files, and for each episode the number of its file and its first second in it."""

    files: tuple[str, ...]
    file: Int64Array
    start: Array


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set: `ends` are cumulative numbers of records, (episodes,), `tasks` the texts of tasks by number."""

    fps: float
    images: tuple[str, ...]  # fields in the table
    cameras: Mapping[str, Camera]
    tables: tuple[str, ...]
    ends: Int64Array
    tasks: Mapping[int, str]


def read_data_set(directory: str, remote: Remote | None) -> DataSet:
    """Read the metadata of a data set; an error that names the converter if it has another version."""
    path = join(directory, INFO_NAME)
    try:
        info = read_json(path, remote)
        version = info["codebase_version"]
        if version != "v3.0":
            raise UnsupportedFormatError(
                f"the data set has LeRobot's version {version!r}, and dataload reads 'v3.0': with lerobot 0.4, `python "
                "-m lerobot.datasets.v30.convert_dataset_v21_to_v30 --push-to-hub=false --repo-id=ORG/NAME "
                f"--root={directory}` converts version 2.1 in place",
                path=path,
            )
        kinds = {str(name): feature["dtype"] for name, feature in info["features"].items()}
        fps = float(info["fps"])
        if not 0 < fps < 1e6:
            raise ValueError(f"fps is {fps}")
        cameras = [name for name, kind in kinds.items() if kind == "video"]
        episodes = _read_episodes(directory, info, _columns(cameras), remote)
        order = np.argsort(episodes["episode_index"], kind="stable")
        episodes = {name: np.asarray(column)[order] for name, column in episodes.items()}
        ends = np.cumsum(episodes["length"], dtype=np.int64)
        if not (np.array_equal(episodes["episode_index"], np.arange(len(ends))) and (episodes["length"] > 0).all()):
            raise ValueError("episodes are not numbered from 0, or one has no records")
        if not np.array_equal(episodes["dataset_to_index"], ends):
            raise ValueError("the records of episodes do not follow one another")
        tables, _ = _places(directory, info["data_path"], episodes, "data")
        found = {}
        for name in cameras:
            files, numbers = _places(directory, info["video_path"], episodes, f"videos/{name}", name)
            found[name] = Camera(files, numbers, episodes[f"videos/{name}/from_timestamp"].astype(np.float64))
        names = _read_table([join(directory, "meta/tasks.parquet")], ["task_index", "__index_level_0__"], remote)
        tasks = dict(zip(map(int, names["task_index"]), map(str, names["__index_level_0__"]), strict=True))
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, SourceError):
            raise
        raise CorruptFileError(f"not a description of a LeRobot data set: {error!r}", path=path) from error
    images = tuple(name for name, kind in kinds.items() if kind == "image")
    return DataSet(fps, images, found, tables, ends, tasks)


def read_json(path: str, remote: Remote | None) -> Any:
    """Return what a file of metadata holds."""
    return json.loads(read_limited(storage_of(path, remote), path, _MOST_BYTES, "the description of a data set"))


def _columns(cameras: Sequence[str]) -> list[str]:
    places = [f"{of}/{name}" for of in ("data", *(f"videos/{each}" for each in cameras)) for name in _INDICES]
    times = [f"videos/{each}/from_timestamp" for each in cameras]
    return ["episode_index", "length", "dataset_to_index", *places, *times]


_INDICES = ("chunk_index", "file_index")


def _read_episodes(
    directory: str, info: Mapping[str, Any], fields: Sequence[str], remote: Remote | None
) -> dict[str, Any]:
    """Return the table of episodes, whose files are listed here, and numbered at URLs, where a list may be refused."""
    folder = join(directory, "meta/episodes")
    if not is_url(directory):
        files = sorted(join(folder, name) for name in files_below(folder) if name.endswith(".parquet"))
        return _read_table(files, fields, remote)
    parts, missing = list[dict[str, Any]](), int(info["total_episodes"])
    while missing > 0:
        chunk, file = divmod(len(parts), int(info["chunks_size"]))
        parts.append(_read_table([join(folder, f"chunk-{chunk:03d}/file-{file:03d}.parquet")], fields, remote))
        missing -= len(parts[-1]["length"])
    return {name: np.concatenate([part[name] for part in parts]) for name in fields}


def _read_table(files: Sequence[str], fields: Sequence[str], remote: Remote | None) -> dict[str, Any]:
    with closing(get_format("parquet").open(files, fields=fields, options={"remote": remote})) as source:
        return source.read_batch(np.arange(len(source)), fields)


def _places(
    directory: str, template: str, episodes: Mapping[str, Any], of: str, key: str = ""
) -> tuple[tuple[str, ...], Int64Array]:
    """Return the files of episodes, in order, and for each episode the number of its file."""
    pairs = np.stack([np.asarray(episodes[f"{of}/{name}"], np.int64) for name in _INDICES], axis=1)
    unique, numbers = np.unique(pairs, axis=0, return_inverse=True)
    files: list[str] = []
    for chunk, file in unique.tolist():
        values = {"chunk_index": chunk, "file_index": file, "video_key": key}
        name = _PLACE.sub(lambda match, values=values: _filled(values[match[1]], match[2]), template)
        if reason := leads_elsewhere(name):
            raise ValueError(reason)
        files.append(join(directory, name))
    return tuple(files), numbers.ravel().astype(np.int64)


def _filled(value: int | str, width: str | None) -> str:
    return f"{value:0{width}d}" if width and isinstance(value, int) else str(value)
