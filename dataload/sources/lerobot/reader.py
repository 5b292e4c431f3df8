"""The source of LeRobot data sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from typing import Any, ClassVar

import numpy as np

from dataload._util.arrays import split_records
from dataload._util.fingerprint import digest
from dataload._util.settings import check_fields
from dataload.catalog.fields import require_known
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.base import ViewSource
from dataload.sources.lerobot.format import LeRobotOptions
from dataload.sources.lerobot.meta import DataSet, read_data_set, read_json
from dataload.sources.prefetch import ComponentPrefetch, shared_steps
from dataload.sources.registry import get_format
from dataload.sources.shards import Location
from dataload.storage import join
from dataload.types import AheadReader, Batch, FieldSpec, Int64Array, ReadsAhead, Record, StepsAhead

_TASK, _TASK_INDEX, _PAD = "task", "task_index", "_is_pad"
_TOLERANCE = 0.1  # of the time between two frames


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
        self._data: DataSet = read_data_set(self._path)
        decode = dict.fromkeys(self._data.images, "image")
        table = get_format("parquet").open(self._data.tables, options={"decode": decode} if decode else {})
        cameras = self._data.cameras
        share = self.options.frame_bytes // max(1, len(cameras))
        settings = {"frame_bytes": share, "decoder_threads": self.options.decoder_threads, **(self.options.video or {})}
        videos = {name: get_format("video").open(each.files, options=settings) for name, each in cameras.items()}
        self._table, self._videos = table, videos
        self._parents = (table, *videos.values())
        if len(table) != self._data.ends[-1]:
            message = f"the tables have {len(table):,} records, and the episodes {self._data.ends[-1]:,}"
            raise CorruptFileError(message, path=self._path)
        self._starts = np.append(0, self._data.ends[:-1])
        self._episodes = self._choose_episodes()
        self._find_rows()
        self._offsets = {name: self._find_offsets(name) for name in self.options.delta_timestamps or {}}
        self._selected = check_fields(fields)
        require_known(self._selected or (), self._all_fields(), self)

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
        found = read_json(join(self._path, "meta/stats.json"))
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

    def _find_offsets(self, name: str) -> Int64Array:
        require_known([name], {**self._table.fields, **self._videos}, self, key="delta_timestamps")
        times = np.array((self.options.delta_timestamps or {})[name], np.float64) * self._data.fps
        offsets = np.rint(times)
        if times.ndim != 1 or not times.size or not (np.abs(times - offsets) <= _TOLERANCE).all():
            message = f"delta_timestamps of {name!r} must be multiples of 1/{self._data.fps:g} s, at least one"
            raise ConfigError(message, key="delta_timestamps", value=(self.options.delta_timestamps or {})[name])
        return offsets.astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of records of each episode."""
        return tuple(self.sequence_lengths.tolist())

    @property
    def groups(self) -> tuple[int, ...]:
        """Number of records per group of pictures of the first camera, in index order; episodes without one."""
        if not self._videos:
            return self.shard_lengths
        name, video = next(iter(self._videos.items()))
        group = np.searchsorted(np.cumsum(video.groups), self._frames_of(name)[self._rows], side="right")
        ends = np.cumsum(self.sequence_lengths)
        cuts = np.union1d(np.flatnonzero(np.diff(group)) + 1, ends)
        return tuple(np.diff(cuts, prepend=0).tolist())

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The selected fields, by default all."""
        known = self._all_fields()
        return known if self._selected is None else {name: known[name] for name in self._selected}

    def _all_fields(self) -> dict[str, FieldSpec]:
        plain = {**self._table.fields, **{name: video.fields["frame"] for name, video in self._videos.items()}}
        found: dict[str, FieldSpec] = {}
        for name, spec in plain.items():
            if self._is_image(name) and spec.shape is not None and self.options.layout == "chw":
                spec = replace(spec, shape=(*spec.shape[-1:], *spec.shape[:-1]))
            offsets = self._offsets.get(name)
            if offsets is not None:
                spec = replace(spec, shape=None if spec.shape is None else (len(offsets), *spec.shape))
                found[name + _PAD] = FieldSpec("bool", (len(offsets),))
            found[name] = spec
        return found | {_TASK: FieldSpec("str", ())}

    def _is_image(self, name: str) -> bool:
        return name in self._videos or name in self._data.images

    def _read(self, indices: Int64Array) -> list[Record]:
        return split_records(self._read_columns(indices, None), len(indices))

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        names = fields or tuple(self.fields)
        require_known(names, self._all_fields(), self)
        rows, batch = self._rows[indices], dict[str, Any]()
        plain = [name for name in names if name in self._table.fields and name not in self._offsets]
        wanted = plain if _TASK not in names or _TASK_INDEX in plain else [*plain, _TASK_INDEX]
        read: Batch = self._table.read_batch(rows, wanted) if wanted else {}
        for name in names:
            if name == _TASK:
                batch[name] = [self._task(number) for number in read[_TASK_INDEX].tolist()]
            elif name in plain:
                batch[name] = self._laid_out(name, read[name])
            elif name.removesuffix(_PAD) in self._offsets and name not in self._offsets:
                batch[name] = self._window(name.removesuffix(_PAD), rows)[1]
            else:
                batch[name] = self._read_window(name, rows)
        return batch

    def _read_window(self, name: str, rows: Int64Array) -> Any:
        """Return a field at the rows of its window, (rows, times, ...), or at the rows alone."""
        windows = self._window(name, rows)[0] if name in self._offsets else rows
        flat = windows.ravel()
        if name in self._videos:
            values = self._videos[name].read_batch(self._frames_of(name)[flat], ["frame"])["frame"]
        else:
            values = self._table.read_batch(flat, [name])[name]
        values = self._laid_out(name, values)
        return values if windows.ndim == 1 else values.reshape(*windows.shape, *values.shape[1:])

    def _window(self, name: str, rows: Int64Array) -> tuple[Int64Array, Any]:
        """Return the rows at a field's times, (rows, times), inside the episode, and where those are outside it."""
        episode = np.searchsorted(self._data.ends, rows, side="right")
        wanted = rows[:, None] + self._offsets[name]
        inside = np.clip(wanted, self._starts[episode][:, None], self._data.ends[episode][:, None] - 1)
        return inside, wanted != inside

    def _laid_out(self, name: str, values: Any) -> Any:
        moves = self.options.layout == "chw" and self._is_image(name)
        return np.ascontiguousarray(np.moveaxis(values, -1, 1)) if moves else values

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
        wanted = self.fields if fields is None else fields
        names = [name for name in self._videos if name in wanted]
        found: list[AheadReader] = []
        try:
            for name, own in zip(names, shared_steps(steps, len(names)), strict=True):
                video, blocks = self._videos[name], map(partial(self._frames_ahead, name), own)
                if isinstance(video, ReadsAhead):
                    reader = video.read_ahead(blocks, ["frame"], here=here, share=share / len(names))
                    found += [] if reader is None else [reader]
        except BaseException:
            ComponentPrefetch(found).close()
            raise
        return ComponentPrefetch(found) if found else None

    def _frames_ahead(self, name: str, block: StepsAhead) -> StepsAhead:
        rows, times = self._rows[block.indices], 1
        if name in self._offsets:
            rows, times = self._window(name, rows)[0].ravel(), len(self._offsets[name])
        return replace(block, indices=self._frames_of(name)[rows], ends=block.ends * times)

    def _locate(self, index: int) -> Location:
        return self._table.locate(int(self._rows[index]))

    def fingerprint(self) -> str:
        parents = [parent.fingerprint() for parent in self._parents]
        options = [self.options.episodes, sorted((self.options.delta_timestamps or {}).items()), self.options.layout]
        return digest("lerobot", *parents, self._selected, options, sorted(self._data.tasks.items()))

    def __repr__(self) -> str:
        return f"LeRobotSource({self._path!r}, {len(self.sequence_lengths)} episodes)"
