"""The source of video files: a record for each frame."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, cast
from weakref import WeakMethod

import numpy as np

from dataload._util.arrays import pooled_empty, split_records
from dataload._util.caches import PerProcess, is_pickled_for_worker
from dataload._util.clock import decoding
from dataload._util.fingerprint import digest
from dataload._util.settings import check_fields
from dataload._util.system import IS_POSIX, usable_cpus
from dataload.catalog.arrays import IndexKey, recall, store_cached
from dataload.errors import ConfigError, SourceNotFoundError
from dataload.executors.transport import RowClient, RowServer
from dataload.sources.base import Span
from dataload.sources.file_source import FileSource
from dataload.sources.prefetch import ComponentPrefetch, shared_steps
from dataload.sources.shards import ListedShards, OpenShards, ShardReader
from dataload.sources.video import DEMUXERS, VideoOptions, is_video
from dataload.sources.video.file import AUDIO, FRAME, KEY, TIME, VIDEO, LentDecoders, VideoFile
from dataload.sources.video.frames import Convert, DecodedFrames
from dataload.sources.video.isolated import Children
from dataload.storage import base_name, files_below, is_url, join
from dataload.storage.kept import CachedTable
from dataload.storage.local.files import versions_of
from dataload.types import AheadReader, Array, Batch, BytesArray, FieldSpec, Int64Array, Record, StepsAhead

_MOST_NAMED = 5  # files in a message
_FEWEST_LISTED = 64  # files; the tables of fewer are loaded in a few milliseconds


class VideoSource(FileSource[Record]):
    """The frames of videos: MP4, MOV, Matroska, WebM and AVI files, decoded by PyAV.

    A record has the fields ``frame``, (height, width, 3) uint8; ``time``, when it is shown, in seconds; ``video``, the
    number of its file; and ``__key__``, the name of the file and the number of the frame in it. In a directory of
    folders, ``label`` is the number of the folder in the order of their names, its class. A frame is what PyAV gives
    when it decodes the file from its start, turned upright if the file says so.

    With ``fields=["frame", "audio"]``, `dataload.windows` by time have the sound of their span: (channels, n) float32,
    n = `sample_rate` times seconds, rounded. Sample k of a file is the one at k / `sample_rate` seconds, and a window
    begins with the sample nearest to the time of its first record. ``time`` comes with it.

    A decoder can only begin at a keyframe, so reading frames at random decodes many that are not wanted. A `Loader`
    knows its order, and has each group of pictures decoded once, in threads, before it is needed.

    Options: `VideoOptions`.
    """

    format_name = "video"
    options_type: ClassVar[Any] = VideoOptions

    def _prepare(self) -> None:
        self._names: dict[str, str] = {}
        paths: list[str] = []
        for path in self._paths:
            found = {path: base_name(path)}
            if not is_video(path):
                found = {join(path, name): name for name in sorted(filter(is_video, files_below(path, self._remote)))}
            if not found:
                raise SourceNotFoundError(f"{path} has no videos ({', '.join(DEMUXERS)})", path=path)
            self._names |= found
            paths += found
        self._paths = tuple(paths)
        folders = [name.partition("/")[0] for name in self._names.values() if "/" in name]
        self._class_names = tuple(sorted({*folders})) if len(folders) == len(self._names) else ()
        self._address = ""
        self._group_lengths: Int64Array | None = None  # once they are known
        self._decoders: PerProcess[LentDecoders] = PerProcess()
        self._sounds: PerProcess[LentDecoders] = PerProcess()
        self._children: PerProcess[Children] = PerProcess()
        self._frames: PerProcess[DecodedFrames] = PerProcess()
        self._server: PerProcess[RowServer] = PerProcess()
        self._client: PerProcess[RowClient] = PerProcess()

    @property
    def reads_in_order(self) -> bool:
        """True: a decoder begins at keyframes."""
        return True

    @property
    def groups(self) -> tuple[int, ...]:
        """Number of records per group of pictures, in index order: what a shuffle by shards should take together."""
        self._data_set()
        if self._group_lengths is None:
            key = self._list_key()
            found = recall(key, self._unpack_list)
            self._group_lengths = self._keep_list(key, self._readers()) if found is None else found[1]
        return tuple(self._group_lengths.tolist())

    @property
    def sequence_lengths(self) -> Int64Array:
        """(videos,) int64, number of records of each video."""
        return np.array(self.shard_lengths, np.int64)

    @property
    def frames_decoded(self) -> int:
        """Number of frames that this process has decoded so far."""
        return self._lent().decoded

    def _lent(self) -> LentDecoders:
        return self._decoders.get(partial(LentDecoders, VideoFile.decoder, self.options))

    def _video(self, shard: int) -> VideoFile:
        return cast(VideoFile, self._data_set().reader(shard))

    def _open_shard(self, path: str) -> ShardReader[Record]:
        name, hears = self._names.get(path) or base_name(path), AUDIO in (self._selected or ())
        children = self._children.get(Children) if self.options.decode_in == "process" else None
        is_first = path == self._paths[0]  # whose frames have the shape of all
        return VideoFile(path, name, self._class_names, self.options, children, is_first=is_first, hears=hears)

    def _open(self) -> OpenShards[Record]:
        key = self._list_key() if self._known is None and not self._closed else None
        if (found := recall(key, self._unpack_list)) is not None:
            first = self._open_reader(0)
            lengths, self._group_lengths = found
            self.open_on_first_use(ListedShards(lengths, self._known_fields([first], [first.fields]), listed=False))
        opened = super()._open()
        readers = [reader for reader in opened.readers if reader is not None]
        if AUDIO in (self._selected or ()):
            self._check_sound([cast(VideoFile, reader) for reader in readers])
        if key is not None and found is None:
            self._group_lengths = self._keep_list(key, readers)
        return opened

    def _list_key(self) -> IndexKey | None:
        """Return the key of lengths and groups of many files, so that a table is loaded when its video is read."""
        if not self.options.cache or len(self._paths) < _FEWEST_LISTED or any(map(is_url, self._paths)):
            return None
        self._versions = versions_of(self._paths) if self._versions is None else self._versions
        options = "video", digest(*self._paths), AUDIO in (self._selected or ()), *self._content.items()
        return IndexKey.of_filter([(path, None) for path in self._paths], options)

    def _keep_list(self, key: IndexKey | None, readers: Sequence[ShardReader[Record]]) -> Int64Array:
        """Return the groups of all files, which are kept."""
        groups = np.concatenate([cast(VideoFile, reader).group_lengths for reader in readers])
        if key is not None:
            store_cached(key, CachedTable({"lengths": np.array([*map(len, readers)]), "groups": groups}, {}))
        return groups

    def _unpack_list(self, found: CachedTable) -> tuple[tuple[int, ...], Int64Array] | None:
        """Return the lengths and the groups of files; None if they are of others."""
        lengths, groups = found.arrays["lengths"], found.arrays["groups"]
        rises = len(lengths) == len(self._paths) and int(lengths.min()) > 0 < int(groups.min())
        fits = rises and np.isin(lengths.cumsum(), groups.cumsum()).all() and lengths.sum() == groups.sum()
        return (tuple(lengths.tolist()), groups) if fits else None

    def _check_sound(self, videos: Sequence[VideoFile]) -> None:
        silent = [video.path for video in videos if not video.table.channels]
        if silent:
            named = ", ".join(silent[:_MOST_NAMED]) + (", ..." if len(silent) > _MOST_NAMED else "")
            message = f"{len(silent)} of {len(videos)} files have no audio: {named}: leave out the files, or the field"
            raise ConfigError(message, key="fields", value=AUDIO)
        for video in videos[1:]:
            if (found := video.sound_shape) != (expected := videos[0].sound_shape):
                message = f"{video.path} has {found[0]} channels at {found[1]} Hz, and {videos[0].path} {expected[0]}"
                raise ConfigError(f"{message} at {expected[1]} Hz: pass sample_rate=, or leave files out", key="fields")

    def _check_fields(self, known: Mapping[str, FieldSpec], path: str) -> None:
        super()._check_fields({**known, AUDIO: FieldSpec("float32", None)}, path)  # `_check_sound` names all files

    def _wanted(self, known: Mapping[str, FieldSpec]) -> tuple[str, ...] | None:
        chosen = super()._wanted(known)  # windows by time need it
        return chosen if chosen is None or AUDIO not in chosen or TIME in chosen else (*chosen, TIME)

    def _lasting(self, name: str, seconds: float) -> Span | None:
        if name != AUDIO:
            return None
        channels, rate = self._video(0).sound_shape
        shape = channels, round(seconds * rate)
        return FieldSpec("float32", shape), partial(self._read_sound, shape)

    def _read_sound(self, shape: tuple[int, int], indices: Int64Array) -> Array:
        opened, first = self._data_set(), self._video(0)
        rate, out = first.sound_shape[1], pooled_empty((len(indices), *shape), np.dtype(np.float32))
        shards = np.searchsorted(opened.ends, indices, side="right")
        sounds = self._sounds.get(partial(LentDecoders, VideoFile.audio_decoder, self.options))
        for row in np.argsort(indices, kind="stable").tolist():
            shard = int(shards[row])
            video, start = self._video(shard), int(opened.ends[shard - 1]) if shard else 0
            self._check_sound([first, video])
            time = Fraction(int(video.table.times[(indices[row] - start) * self.options.step])) * video.table.time_base
            with decoding(), self._not_overwritten(indices[row : row + 1]), sounds.at(video, 0) as decoder:
                out[row] = decoder.read(round(time * rate), out.shape[2], rate)
        return out

    def _read(self, indices: Int64Array) -> list[Record]:
        return split_records(self._read_columns(indices, None), len(indices))

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        opened = self._data_set()
        names = opened.fields if (chosen := self._choose(fields, opened)) is None else chosen
        shards = np.searchsorted(opened.ends, indices, side="right")
        local = indices - np.concatenate(([0], opened.ends))[shards]
        batch: Batch = {}
        for name in names:
            if name == FRAME:
                frames = self._frames.get(self._decoded_frames)
                batch[name] = pooled_empty((len(indices), *frames.shape), np.uint8)
                with decoding():
                    self._read_frames(indices, batch[name])
            elif name == VIDEO:
                batch[name] = shards
            elif name == AUDIO:
                message = "audio is read by windows: dataload.windows(source, lengths, seconds=2, fps=8), say"
                raise ConfigError(message, key="fields", value=name)
            else:
                values: list[Any] = [None] * len(indices)
                for shard in np.unique(shards).tolist():
                    rows = np.flatnonzero(shards == shard)
                    for row, value in zip(rows.tolist(), self._video(shard).values(name, local[rows]), strict=True):
                        values[row] = value
                batch[name] = values if name == KEY else np.array(values)
        return batch

    @contextmanager
    def _not_overwritten(self, indices: Int64Array) -> Generator[None]:
        """Raise an error after reading if a local file was written to since it was opened, in place of any other."""
        try:
            yield
        finally:
            for shard in np.unique(np.searchsorted(self._data_set().ends, indices, side="right")).tolist():
                self._video(shard).check_not_overwritten()

    def _read_frames(self, indices: Int64Array, out: BytesArray) -> None:
        """Write frames to the rows of `out`; those that the parent of a worker process decodes come from there."""
        client = self._client.get(partial(RowClient, self._address)) if self._address else None
        if client is None or not client.read(indices, out):
            with self._not_overwritten(indices):
                self._frames.get(self._decoded_frames).read(indices, out)

    def _serve_frames(self) -> RowServer:
        return RowServer(WeakMethod(self._read_frames), self._frames.get(self._decoded_frames).shape)

    def _decoded_frames(self) -> DecodedFrames:
        shape = self._video(0).shape
        most = self.options.frame_bytes // int(np.prod(shape))
        return DecodedFrames(np.cumsum(self.groups), shape, self._decode, most)

    def _decode(self, indices: Sequence[int]) -> Generator[tuple[int, Convert]]:
        """See `dataload.sources.video.frames.Decode`."""
        opened = self._data_set()
        shard = int(np.searchsorted(opened.ends, indices[0], side="right"))
        start, video, step = int(opened.ends[shard - 1]) if shard else 0, self._video(shard), self.options.step
        wanted, shape = {(index - start) * step: index for index in indices}, self._video(0).shape
        with self._lent().at(video, min(wanted)) as decoder:
            for number, frame in decoder.decode(min(wanted), max(wanted) + 1):
                if number in wanted:
                    yield wanted[number], partial(decoder.convert, frame, shape)

    def read_ahead(
        self, steps: Iterator[StepsAhead], fields: Sequence[str] | None, *, here: bool, share: float = 1.0
    ) -> AheadReader | None:
        """See `dataload.types.ReadsAhead`: frames are decoded here before they are read, by worker processes, too."""
        chosen = self._choose(check_fields(fields), self._data_set())
        if chosen is not None and FRAME not in chosen:
            return super().read_ahead(steps, fields, here=here, share=share)
        if not here and IS_POSIX:
            self._server.get(self._serve_frames)
        fetched, decoded = shared_steps(steps, 2)
        fetch = super().read_ahead(fetched, fields, here=here, share=share)
        del fetched  # whose steps would be kept
        frames = self._frames.get(self._decoded_frames)
        return ComponentPrefetch.of([fetch, frames.follow(decoded, self.options.decoder_threads or usable_cpus())])

    def close(self) -> None:
        super().close()
        self._frames.drop()
        for own in (self._server, self._client, self._decoders, self._sounds, self._children):
            if (value := own.drop()) is not None:
                value.close()

    def __getstate__(self) -> dict[str, Any]:
        server = self._server.peek() if is_pickled_for_worker() else None
        return {**super().__getstate__(), "_group_lengths": None, "_address": server.address if server else ""}
