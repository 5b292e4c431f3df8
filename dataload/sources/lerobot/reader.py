"""The source of LeRobot data sets, version 3.0: features, episodes, tasks, and the files that hold them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from typing import Any, ClassVar, TypeAlias

import numpy as np

from dataload._util.arrays import split_records
from dataload._util.fingerprint import digest
from dataload._util.indexing import distinct
from dataload._util.settings import check_fields
from dataload.catalog.facts import require_known
from dataload.errors import ConfigError, CorruptFileError, SourceError, UnsupportedFormatError
from dataload.sources.base import Source, ViewSource
from dataload.sources.lerobot import INFO_NAME, LeRobotOptions
from dataload.sources.prefetch import ComponentPrefetch, shared_steps
from dataload.sources.registry import get_format
from dataload.sources.shards import Location
from dataload.sources.views.windows import WindowSource, windows
from dataload.storage import Remote, files_below, is_url, join, storage_of
from dataload.storage.backend import read_limited
from dataload.storage.paths import leads_elsewhere
from dataload.types import AheadReader, Array, Batch, FieldSpec, Int64Array, ReadsAhead, Record, StepsAhead

_MOST_BYTES = 1 << 24
_INDICES = ("chunk_index", "file_index")
_PLACE = re.compile(r"\{(chunk_index|file_index|video_key)(?::(0\dd))?\}")


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
        videos = [f"videos/{name}" for name in cameras]
        columns = ["episode_index", "length", "dataset_to_index", *(f"{each}/from_timestamp" for each in videos)]
        columns += [f"{of}/{name}" for of in ("data", *videos) for name in _INDICES]
        episodes = _read_episodes(directory, info, columns, remote)
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
        names = _read_table([join(directory, "meta/tasks.parquet")], None, remote)
        texts = names["task" if "task" in names else "__index_level_0__"]  # LeRobot named this column later
        tasks = dict(zip(map(int, names["task_index"]), map(str, texts), strict=True))
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, SourceError):
            raise
        raise CorruptFileError(f"not a description of a LeRobot data set: {error!r}", path=path) from error
    images = tuple(name for name, kind in kinds.items() if kind == "image")
    return DataSet(fps, images, found, tables, ends, tasks)


def read_json(path: str, remote: Remote | None) -> Any:
    """Return what a file of metadata holds."""
    return json.loads(read_limited(storage_of(path, remote), path, _MOST_BYTES, "the description of a data set"))


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


def _read_table(files: Sequence[str], fields: Sequence[str] | None, remote: Remote | None) -> dict[str, Any]:
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
        name = _PLACE.sub(lambda match, values=values: f"{values[match[1]]:{match[2] or ''}}", template)
        if reason := leads_elsewhere(name):
            raise ValueError(reason)
        files.append(join(directory, name))
    return tuple(files), numbers.ravel().astype(np.int64)


_FRAME, _TASK, _TASK_INDEX = "frame", "task", "task_index"
_TOLERANCE = 0.1  # of the time between two frames

_Part: TypeAlias = tuple[Source[Any], list[str], list[str], Callable[[Int64Array], Int64Array]]
"""A source, the fields of time steps read from it, its own fields, and its records by index."""


class LeRobotSource(ViewSource[Record]):
    """A record for each time step of a LeRobot data set, version 3.0: its features, the ``task`` as text, and images.

    Images and frames of videos are (height, width, 3) uint8. A frame is found by its time in the video, which holds
    many episodes.

    Options: `LeRobotOptions`.
    """

    format_name = "lerobot"
    options_type: ClassVar[Any] = LeRobotOptions

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        several = [paths] if isinstance(paths, (str, PathLike)) else [*paths]
        if len(several) != 1:
            message = "a LeRobot data set is one directory: join several with dataload.concat"
            raise ConfigError(message, key="paths", value=paths)
        self._path = fspath(several[0])
        self.options: LeRobotOptions = LeRobotOptions.parse(options, "format 'lerobot'")
        self._data: DataSet = read_data_set(self._path, self.options.remote_settings)
        self._open()
        self._starts = np.append(0, self._data.ends[:-1])
        self._episodes = self._choose_episodes()
        self._find_rows()
        self._windows: WindowSource | None = None
        self._selected: tuple[str, ...] | None = None
        if given := self.options.delta_timestamps:
            offsets = {name: self._offsets(name, times) for name, times in given.items()}
            self._windows = windows(copy(self), self.sequence_lengths, ends="pad", offsets=offsets)
        self._selected = check_fields(fields)
        require_known(self._selected or (), self._known(), self)

    def _open(self) -> None:
        cameras, chosen = self._data.cameras, self.options
        files: dict[str, Any] = {name: getattr(chosen, name) for name in ("remote", "verify", "max_record_bytes")}
        decode = dict.fromkeys(self._data.images, "image") or None
        share = chosen.frame_bytes // max(1, len(cameras))
        settings = {**files, "frame_bytes": share, "decoder_threads": chosen.decoder_threads, **(chosen.video or {})}
        self._table = get_format("parquet").open(self._data.tables, options={**files, "decode": decode})
        self._videos = {name: get_format("video").open(each.files, options=settings) for name, each in cameras.items()}
        self._parents = (self._table, *self._videos.values())
        if len(self._table) != self._data.ends[-1]:
            message = f"the tables have {len(self._table):,} records, and the episodes {self._data.ends[-1]:,}"
            raise CorruptFileError(message, path=self._path)

    def _find_rows(self) -> None:
        """Set what has a number for each record, which pickles do not have."""
        spans = zip(self._starts[self._episodes].tolist(), self._data.ends[self._episodes].tolist(), strict=True)
        self._rows: Int64Array = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in spans])
        self._frames: dict[str, Int64Array] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_rows", "_frames")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._find_rows()

    @property
    def stats(self) -> Mapping[str, Mapping[str, Any]]:
        """Statistics of ``meta/stats.json`` as arrays, by field and name: ``stats["action"]["mean"]``."""
        found = read_json(join(self._path, "meta/stats.json"), self.options.remote_settings)
        return {name: {kind: np.array(value) for kind, value in each.items()} for name, each in found.items()}

    @property
    def sequence_lengths(self) -> Int64Array:
        """(episodes,) int64, number of records of each episode."""
        return (self._data.ends - self._starts)[self._episodes]

    def _choose_episodes(self) -> Int64Array:
        given, count = self.options.episodes, len(self._data.ends)
        if given is None:
            return np.arange(count)
        if not len(given) or not all(type(each) is int and 0 <= each < count for each in given):
            message = f"episodes are numbers below {count}, at least one, got {given!r}"
            raise ConfigError(message, key="episodes", value=given)
        return np.array(given, np.int64)

    def _offsets(self, name: str, given: Any) -> list[int]:
        require_known([name], self._known(), self, key="delta_timestamps")
        times = np.array(given, np.float64) * self._data.fps
        offsets = np.rint(times)
        if times.ndim != 1 or not times.size or not (np.abs(times - offsets) <= _TOLERANCE).all():
            message = f"delta_timestamps of {name!r} must be multiples of 1/{self._data.fps:g} s, at least one"
            raise ConfigError(message, key="delta_timestamps", value=given)
        return offsets.astype(np.int64).tolist()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of records of each episode."""
        return tuple(self.sequence_lengths.tolist())

    @property
    def shard_names(self) -> list[str]:
        """Names of the episodes, in index order."""
        return [f"episode {number}" for number in self._episodes.tolist()]

    @property
    def groups(self) -> tuple[int, ...]:
        """Number of records per group of pictures of the first camera, in index order; episodes without one."""
        if not self._videos:
            return self.shard_lengths
        name, video = next(iter(self._videos.items()))
        group = np.searchsorted(np.cumsum(video.groups), self._frames_of(name)[self._rows], side="right")
        ends = np.cumsum(self.sequence_lengths)
        cuts = distinct(np.concatenate([np.flatnonzero(np.diff(group)) + 1, ends]))
        return tuple(np.diff(cuts, prepend=0).tolist())

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The selected fields, by default all."""
        known = self._known()
        return known if self._selected is None else {name: known[name] for name in self._selected}

    def _known(self) -> Mapping[str, FieldSpec]:
        if self._windows is not None:
            return self._windows.fields
        found = {**self._table.fields, **{name: video.fields[_FRAME] for name, video in self._videos.items()}}
        for name, spec in found.items():
            if self._is_chw(name) and spec.shape is not None:
                found[name] = replace(spec, shape=(*spec.shape[-1:], *spec.shape[:-1]))
        return found | {_TASK: FieldSpec("str", ())}

    def _is_chw(self, name: str) -> bool:
        has_channels = (self.options.video or {}).get("frames", "rgb24") == "rgb24"
        return self.options.layout == "chw" and (name in self._data.images or (has_channels and name in self._videos))

    def _read(self, indices: Int64Array) -> list[Record]:
        return split_records(self._read_columns(indices, None), len(indices))

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        names, found = tuple(self.fields) if fields is None else fields, dict[str, Any]()
        require_known(names, self._known(), self)
        if self._windows is not None:
            return self._windows.read_batch(indices, names)
        for source, own, read, places in self._parts(names):
            batch: Batch = source.read_batch(places(indices), read)
            for name in own:
                values: Any = batch[_TASK_INDEX if name == _TASK else name if source is self._table else _FRAME]
                if name == _TASK:
                    values = [self._task(number) for number in values.tolist()]
                found[name] = np.ascontiguousarray(np.moveaxis(values, -1, 1)) if self._is_chw(name) else values
        return {name: found[name] for name in names}

    def _parts(self, names: Sequence[str]) -> list[_Part]:
        own = [name for name in names if name in self._table.fields or name == _TASK]
        columns = [*dict.fromkeys(_TASK_INDEX if name == _TASK else name for name in own)]
        cameras = [name for name in names if name in self._videos]
        return [
            *([(self._table, own, columns, self._rows.__getitem__)] if own else []),
            *((self._videos[name], [name], [_FRAME], partial(self._frame, name)) for name in cameras),
        ]

    def _frame(self, camera: str, indices: Int64Array) -> Int64Array:
        return self._frames_of(camera)[self._rows[indices]]

    def _task(self, number: int) -> str:
        if number not in self._data.tasks:
            raise CorruptFileError(f"meta/tasks.parquet has no task {number}", path=self._path)
        return self._data.tasks[number]

    def _frames_of(self, name: str) -> Int64Array:
        """Return the frame of a camera's videos for each row of the table, (rows,) int64."""
        if name not in self._frames:
            camera, video = self._data.cameras[name], self._videos[name]
            times = np.asarray(video.read_batch(np.arange(len(video)), ["time"])["time"])
            ends = np.cumsum(video.shard_lengths)
            found = np.empty(len(self._table), np.int64)
            for episode, (start, stop) in enumerate(zip(self._starts.tolist(), self._data.ends.tolist(), strict=True)):
                file = int(camera.file[episode])
                first, last = int(ends[file - 1]) if file else 0, int(ends[file])
                wanted = camera.start[episode] + np.arange(stop - start) / self._data.fps
                tolerance = _TOLERANCE / self._data.fps
                frames = first + np.searchsorted(times[first:last], wanted - tolerance)
                if frames[-1] >= last or not (np.abs(times[frames] - wanted) <= tolerance).all():
                    message = f"no frame of the camera {name!r} is within {tolerance:.3g} s of a record of episode"
                    raise CorruptFileError(f"{message} {episode}", path=camera.files[file])
                found[start:stop] = frames
            self._frames[name] = found
        return self._frames[name]

    def read_ahead(
        self, steps: Iterator[StepsAhead], fields: Sequence[str] | None, *, here: bool, share: float = 1.0
    ) -> AheadReader | None:
        """See `dataload.types.ReadsAhead`: each camera's frames are decoded before they are read."""
        names = tuple(self.fields) if fields is None else tuple(fields)
        if self._windows is not None:
            return self._windows.read_ahead(steps, names, here=here, share=share)
        parts = self._parts(names)

        def start(part: _Part, steps: Iterator[StepsAhead]) -> AheadReader | None:
            source, _, read, places = part
            if not isinstance(source, ReadsAhead):
                return None
            blocks = (replace(block, indices=places(block.indices)) for block in steps)
            return source.read_ahead(blocks, read, here=here, share=share / len(parts))

        return ComponentPrefetch.of(map(start, parts, shared_steps(steps, len(parts))))

    def _locate(self, index: int) -> Location:
        return self._table.locate(int(self._rows[index]))

    def fingerprint(self) -> str:
        parents = [parent.fingerprint() for parent in self._parents]
        options = [self.options.episodes, sorted((self.options.delta_timestamps or {}).items()), self.options.layout]
        return digest("lerobot", *parents, self._selected, options, sorted(self._data.tasks.items()))

    def __repr__(self) -> str:
        return f"LeRobotSource({self._path!r}, {len(self.sequence_lengths)} episodes)"
