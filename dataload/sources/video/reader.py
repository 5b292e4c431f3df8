"""The source of video files: a record for each frame."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cached_property
from threading import Lock
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast
from weakref import WeakMethod

import numpy as np

from dataload._util.arrays import pooled_empty, split_records
from dataload._util.caches import PerProcess, is_pickled_for_worker
from dataload._util.clock import decoding
from dataload._util.limits import check_size
from dataload._util.machine import usable_cpus
from dataload._util.settings import check_fields
from dataload._util.system import IS_POSIX
from dataload.catalog.arrays import IndexKey, remember
from dataload.errors import ConfigError, SourceNotFoundError
from dataload.sources.file_source import FileSource
from dataload.sources.prefetch import ComponentPrefetch, shared_steps
from dataload.sources.shards import OpenShards, ShardReader
from dataload.sources.video.audio import AudioDecoder, AudioTable, build_audio_table
from dataload.sources.video.decoder import Decoder, shape_of
from dataload.sources.video.format import DEMUXERS, VideoOptions, is_video
from dataload.sources.video.frames import Convert, DecodedFrames
from dataload.sources.video.shared import FrameClient, FrameServer
from dataload.sources.video.table import VideoTable, build_table
from dataload.storage import base_name, files_below, join, storage_of
from dataload.storage.backend import LeasedFile
from dataload.storage.errors import rewritten_error
from dataload.types import AheadReader, Array, Batch, BytesArray, FieldSpec, Int64Array, Record, StepsAhead

_FRAME, _TIME, _VIDEO, _LABEL, _KEY, _AUDIO = "frame", "time", "video", "label", "__key__", "audio"
_MOST_OPEN = 16  # decoders, each with the memory of several frames
_MOST_NAMED = 5  # files in a message
_PER_PROCESS = ("_decoders", "_sounds", "_frames", "_server", "_client")


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
        for path in self._paths:
            if is_video(path) and not storage_of(path, self._remote).is_directory(path):
                self._names[path] = base_name(path)
                continue
            videos = sorted(filter(is_video, files_below(path, self._remote)))
            if not videos:
                raise SourceNotFoundError(f"{path} has no videos ({', '.join(DEMUXERS)})", path=path)
            self._names |= {join(path, name): name for name in videos}
        self._paths = tuple(self._names)
        folders = [name.partition("/")[0] for name in self._names.values() if "/" in name]
        self._class_names = tuple(sorted({*folders})) if len(folders) == len(self._names) else ()
        self._address = ""
        self._forget()

    def _forget(self) -> None:
        """Set what each process has by itself."""
        self._decoders: PerProcess[_Lent[Decoder]] = PerProcess()
        self._sounds: PerProcess[_Lent[AudioDecoder]] = PerProcess()
        self._frames: PerProcess[DecodedFrames] = PerProcess()
        self._server: PerProcess[FrameServer] = PerProcess()
        self._client: PerProcess[FrameClient] = PerProcess()

    @property
    def reads_in_order(self) -> bool:
        """True: a decoder begins at keyframes."""
        return True

    @property
    def groups(self) -> tuple[int, ...]:
        """Number of records per group of pictures, in index order: what a shuffle by shards should take together."""
        counts = [cast("_Video", reader).group_lengths for reader in self._readers()]
        return tuple(np.concatenate(counts).tolist())

    @property
    def sequence_lengths(self) -> Int64Array:
        """(videos,) int64, number of records of each video."""
        return np.array(self.shard_lengths, np.int64)

    @property
    def frames_decoded(self) -> int:
        """Number of frames that this process has decoded so far."""
        return self._lent_decoders().decoded

    def _lent_decoders(self) -> "_Lent[Decoder]":
        return self._decoders.get(_open_decoders)

    def _video(self, shard: int) -> "_Video":
        return cast("_Video", self._data_set().reader(shard))

    def _open_shard(self, path: str) -> ShardReader[Record]:
        name, hears = self._names.get(path, base_name(path)), _AUDIO in (self._selected or ())
        return _Video(path, name, self._class_names, self.options, hears=hears)

    def _open(self) -> OpenShards[Record]:
        opened = super()._open()
        if _AUDIO in (self._selected or ()):
            self._check_sound([cast("_Video", reader) for reader in opened.readers if reader is not None])
        return opened

    def _check_sound(self, videos: Sequence["_Video"]) -> None:
        silent = [video.path for video in videos if not video.table.channels]
        if silent:
            named = ", ".join(silent[:_MOST_NAMED]) + (", ..." if len(silent) > _MOST_NAMED else "")
            message = f"{len(silent)} of {len(videos)} files have no audio: {named}: leave out the files, or the field"
            raise ConfigError(message, key="fields", value=_AUDIO)
        for video in videos[1:]:
            if (found := video.sound_shape) != (expected := videos[0].sound_shape):
                message = f"{video.path} has {found[0]} channels at {found[1]} Hz, and {videos[0].path} {expected[0]}"
                raise ConfigError(f"{message} at {expected[1]} Hz: pass sample_rate=, or leave files out", key="fields")

    def _check_fields(self, known: Mapping[str, FieldSpec], path: str) -> None:
        super()._check_fields({**known, _AUDIO: FieldSpec("float32", None)}, path)  # `_check_sound` names all files

    def _wanted(self, known: Mapping[str, FieldSpec]) -> tuple[str, ...] | None:
        chosen = super()._wanted(known)  # windows by time need it
        return chosen if chosen is None or _AUDIO not in chosen or _TIME in chosen else (*chosen, _TIME)

    def _span_spec(self, name: str, seconds: float) -> FieldSpec | None:
        if name != _AUDIO:
            return None
        channels, rate = self._video(self._first_shard()).sound_shape
        return FieldSpec("float32", (channels, round(seconds * rate)))

    def _read_spans(self, name: str, indices: Int64Array, seconds: float) -> Array:  # noqa: ARG002 - audio alone
        opened, first = self._data_set(), self._video(self._first_shard())
        channels, rate = first.sound_shape
        out = pooled_empty((len(indices), channels, round(seconds * rate)), np.dtype(np.float32))
        shards, sounds = np.searchsorted(opened.ends, indices, side="right"), self._sounds.get(_open_sounds)
        for row in np.argsort(indices, kind="stable").tolist():
            shard = int(shards[row])
            video, start = self._video(shard), int(opened.ends[shard - 1]) if shard else 0
            self._check_sound([first, video])
            time = Fraction(int(video.table.times[(indices[row] - start) * self.options.step])) * video.table.time_base
            with decoding(), sounds.at(video, 0) as decoder:
                out[row] = decoder.read(round(time * rate), out.shape[2], rate)
        return out

    def _read(self, indices: Int64Array) -> list[Record]:
        return split_records(self._read_columns(indices, None), len(indices))

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        opened = self._data_set()
        names = self._choose(fields, opened) or tuple(opened.fields)
        shards = np.searchsorted(opened.ends, indices, side="right")
        local = indices - np.concatenate(([0], opened.ends))[shards]
        batch: Batch = {}
        for name in names:
            if name == _FRAME:
                frames = self._frames.get(self._decoded_frames)
                batch[name] = pooled_empty((len(indices), *frames.shape), np.uint8)
                with decoding():
                    self._read_frames(indices, batch[name])
            elif name == _VIDEO:
                batch[name] = shards
            elif name == _AUDIO:
                message = "audio is read by windows: dataload.windows(source, lengths, seconds=2, fps=8), say"
                raise ConfigError(message, key="fields", value=name)
            else:
                values: list[Any] = [None] * len(indices)
                for shard in np.unique(shards).tolist():
                    rows = np.flatnonzero(shards == shard)
                    for row, value in zip(rows.tolist(), self._video(shard).values(name, local[rows]), strict=True):
                        values[row] = value
                batch[name] = values if name == _KEY else np.array(values)
        return batch

    def _read_frames(self, indices: Int64Array, out: BytesArray) -> None:
        """Write frames to the rows of `out`; those that the parent of a worker process decodes come from there."""
        client = self._client.get(self._connect) if self._address else None
        if client is None or not client.read(indices, out):
            self._frames.get(self._decoded_frames).read(indices, out)

    def _connect(self) -> FrameClient:
        return FrameClient(self._address)

    def _serve_frames(self) -> FrameServer:
        return FrameServer(WeakMethod(self._read_frames), self._frames.get(self._decoded_frames).shape)

    def _decoded_frames(self) -> DecodedFrames:
        shape = self._video(self._first_shard()).shape
        return DecodedFrames(np.cumsum(self.groups), shape, self._decode, self.options.frame_bytes)

    def _first_shard(self) -> int:
        return int(np.searchsorted(self._data_set().ends, 0, side="right"))

    def _decode(self, indices: Sequence[int]) -> Iterator[tuple[int, Convert]]:
        """See `dataload.sources.video.frames.Decode`."""
        opened = self._data_set()
        shard = int(np.searchsorted(opened.ends, indices[0], side="right"))
        start, video, step = int(opened.ends[shard - 1]) if shard else 0, self._video(shard), self.options.step
        wanted = {(index - start) * step: index for index in indices}
        with self._lent_decoders().at(video, min(wanted)) as decoder:
            for number, frame in decoder.decode(min(wanted), max(wanted) + 1):
                if number in wanted:
                    yield wanted[number], lambda out, frame=frame: decoder.convert(frame, out)

    def read_ahead(
        self, steps: Iterator[StepsAhead], fields: Sequence[str] | None, *, here: bool, share: float = 1.0
    ) -> AheadReader | None:
        """See `dataload.types.ReadsAhead`: frames are decoded here before they are read, by worker processes, too."""
        chosen = self._choose(check_fields(fields), self._data_set())
        if chosen is not None and _FRAME not in chosen:
            return super().read_ahead(steps, fields, here=here, share=share)
        if not here and IS_POSIX:
            self._server.get(self._serve_frames)
        fetched, decoded = shared_steps(steps, 2)
        readers = [super().read_ahead(fetched, fields, here=here, share=share)]
        del fetched  # whose steps would be kept
        frames = self._frames.get(self._decoded_frames)
        readers.append(frames.follow(decoded, self.options.decoder_threads or usable_cpus()))
        return ComponentPrefetch([reader for reader in readers if reader is not None])

    def close(self) -> None:
        super().close()
        self._frames.drop()
        for own in (self._server, self._client, self._decoders, self._sounds):
            if (value := own.drop()) is not None:
                value.close()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in super().__getstate__().items() if name not in _PER_PROCESS}
        server = self._server.peek() if is_pickled_for_worker() else None
        return state | {"_address": server.address if server else ""}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


class _Video(ShardReader[Record]):
    """The table of one video, and the values that are not frames."""

    whole = True

    def __init__(
        self, path: str, name: str, classes: tuple[str, ...], options: VideoOptions, *, hears: bool = False
    ) -> None:
        self.path, self.options, self._hears = path, options, hears
        self._name, self._classes = name.rpartition(".")[0], classes
        self._storage = storage_of(path, options.remote_settings)
        self._identity = self._storage.identity(path)
        self._building, self._sound = Lock(), cast("AudioTable | None", None)

        def build() -> VideoTable:
            lease = self._storage.lease(path)
            return build_table(path, lease.path, options.max_record_bytes)

        key = IndexKey.of("video", (path,), remote=options.remote_settings) if options.cache else None
        self.table = remember(key, VideoTable.unpack, build, VideoTable.pack)
        self.shape = shape_of(self.table, options, path)
        check_size(int(np.prod(self.shape)), options.max_record_bytes, "a frame", path=path)

    @property
    def sound_shape(self) -> tuple[int, int]:
        """Channels, and samples per second."""
        return self.table.channels, self.options.sample_rate or self.table.sample_rate

    @cached_property
    def group_lengths(self) -> Int64Array:
        """(groups,) int64, number of records in each group of pictures that has any."""
        counts = np.diff(-(-np.append(self.table.starts, len(self.table.times)) // self.options.step))
        return counts[counts > 0]

    def __len__(self) -> int:
        return (len(self.table.times) + self.options.step - 1) // self.options.step

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        fields = {_FRAME: FieldSpec("uint8", self.shape), _TIME: FieldSpec("float64", ())}
        if self._classes:
            fields[_LABEL] = FieldSpec("int64", (), self._classes)
        if self._hears and self.table.channels:
            fields[_AUDIO] = FieldSpec("float32", None)
        return fields | {_VIDEO: FieldSpec("int64", ()), _KEY: FieldSpec("str", ())}

    def values(self, name: str, indices: Int64Array) -> Sequence[Any]:
        """Return the values of a field of some records."""
        numbers = indices * self.options.step
        if name == _TIME:
            return self.table.seconds(numbers).tolist()
        if name == _LABEL:
            return [self._classes.index(self._name.partition("/")[0])] * len(indices)
        return [f"{self._name}/{number}" for number in numbers.tolist()]

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        raise NotImplementedError("the source reads frames, whose groups of pictures it shares among batches")

    def key(self, index: int) -> str:
        return self.values(_KEY, np.array([index]))[0]

    def identity(self) -> Any:
        return self._name if self._classes else None

    def decoder(self) -> Decoder:
        """Open a decoder of the file, which must be unchanged."""
        return Decoder(self.path, self._lease(), self.table, self.options)

    def audio_decoder(self) -> AudioDecoder:
        """Open a decoder of the sound, whose table is made the first time."""
        lease = self._lease()
        cached = self.options.cache
        key = IndexKey.of("video", (self.path,), (_AUDIO,), remote=self.options.remote_settings) if cached else None

        def build() -> AudioTable:
            return build_audio_table(self.path, lease.path)

        with self._building:
            if self._sound is None:
                self._sound = remember(key, AudioTable.unpack, build, AudioTable.pack)
        return AudioDecoder(self.path, lease, self._sound)

    def _lease(self) -> LeasedFile:
        lease = self._storage.lease(self.path)
        if self._storage.identity(self.path) != self._identity:
            raise rewritten_error(self.path)
        return lease


class _Lendable(Protocol):
    next: int
    decoded: int

    def close(self) -> None: ...


_D = TypeVar("_D", bound=_Lendable)


class _Lent(Generic[_D]):
    """The open decoders of a source in this process, and how much they have decoded."""

    def __init__(self, open_one: Callable[[_Video], _D]) -> None:
        self._open_one = open_one
        self._lock = Lock()
        self._idle = list[tuple[_Video, _D]]()  # those used last are last
        self._closed = False
        self.decoded = 0

    @contextmanager
    def at(self, video: _Video, number: int) -> Generator[_D]:
        """Lend a decoder of a video, the one that is nearest before a frame."""
        with self._lock:
            own = [each for each in self._idle if each[0] is video]
            chosen = max(own, key=lambda each: each[1].next if each[1].next <= number else -2, default=None)
            if chosen is not None:
                self._idle.remove(chosen)
        decoder = self._open_one(video) if chosen is None else chosen[1]
        before = decoder.decoded
        try:
            yield decoder
        finally:
            with self._lock:
                self.decoded += decoder.decoded - before
                self._idle.append((video, decoder))
                most = 0 if self._closed else _MOST_OPEN
                spare = [self._idle.pop(0)[1] for _ in range(len(self._idle) - most)]
            for each in spare:
                each.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            spare, self._idle = self._idle, []
        for _, decoder in spare:
            decoder.close()


def _open_decoders() -> _Lent[Decoder]:
    return _Lent(_Video.decoder)


def _open_sounds() -> _Lent[AudioDecoder]:
    return _Lent(_Video.audio_decoder)
