"""One video of a source: its table, the values that are not frames, and its decoders."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from math import prod
from threading import Lock
from typing import Any, cast

import numpy as np

from dataload._util.arrays import check_size
from dataload._util.system import usable_cpus
from dataload.catalog.arrays import IndexKey, remember
from dataload.errors import ConfigError
from dataload.sources.shards import ShardReader
from dataload.sources.video import VideoOptions
from dataload.sources.video.decoder import AudioDecoder, AudioTable, Decoder, build_audio_table
from dataload.sources.video.isolated import Children, IsolatedAudioDecoder, IsolatedDecoder
from dataload.sources.video.table import VideoTable, build_table
from dataload.storage import is_url, storage_of
from dataload.storage.backend import LeasedFile
from dataload.storage.errors import rewritten_error
from dataload.storage.kept import CachedTable
from dataload.storage.local.files import check_not_overwritten, versions_of
from dataload.types import FieldSpec, Int64Array, Record

FRAME, TIME, VIDEO, LABEL, KEY, AUDIO = "frame", "time", "video", "label", "__key__", "audio"
_MOST_OPEN = 16  # decoders


class VideoFile(ShardReader[Record]):
    """The table of one video, and the values that are not frames."""

    whole = True

    def __init__(
        self,
        path: str,
        name: str,
        classes: tuple[str, ...],
        options: VideoOptions,
        children: Children | None,
        *,
        is_first: bool,
        hears: bool,
    ) -> None:
        self.path: str = path
        self.options: VideoOptions = options
        self._children, self._hears = children, hears
        self._name, self._classes = name.rpartition(".")[0], classes
        self._storage = storage_of(path, options.remote_settings)
        self._identity = self._storage.identity(path)
        self._version = None if is_url(path) else versions_of((path,))
        self._building, self._sound = Lock(), cast("AudioTable | None", None)

        def unpack(found: CachedTable) -> VideoTable | None:
            table = VideoTable.unpack(found)
            return None if is_first and table.rotation is None else table

        limit = options.max_record_bytes
        self.table: VideoTable = self._remembered(VideoTable, (), unpack, build_table, limit, is_first)
        check_size(prod(self.shape), options.max_record_bytes, "a frame", path=path)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a frame as it is given, if it is not turned; a turn is only known of the first video of a source."""
        table, kind = self.table, self.options.frames
        turned = (table.width, table.height) if (table.rotation or 0) % 2 else (table.height, table.width)
        height, width = self.options.size or turned
        if kind != "yuv420p":
            return (height, width, 3) if kind == "rgb24" else (height, width)
        if height % 2 or width % 2:
            message = f"frames of {self.path} have an odd size, {height} x {width}, which yuv420p cannot have"
            raise ConfigError(f"{message}: pass size=", key="frames", value=kind)
        return (height * 3 // 2, width)

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
        fields = {FRAME: FieldSpec("uint8", self.shape), TIME: FieldSpec("float64", ())}
        if self._classes:
            fields[LABEL] = FieldSpec("int64", (), self._classes)
        if self._hears and self.table.channels:
            fields[AUDIO] = FieldSpec("float32", None)
        return fields | {VIDEO: FieldSpec("int64", ()), KEY: FieldSpec("str", ())}

    def values(self, name: str, indices: Int64Array) -> Sequence[Any]:
        """Return the values of a field of some records."""
        if name == TIME:
            return self.table.seconds(indices * self.options.step).tolist()
        if name == LABEL:
            return [self._classes.index(self._name.partition("/")[0])] * len(indices)
        return [*map(self.key, indices.tolist())]

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        raise NotImplementedError("the source reads frames, whose groups of pictures it shares among batches")

    def key(self, index: int) -> str:
        return f"{self._name}/{index * self.options.step}"

    def identity(self) -> Any:
        return self._name if self._classes else None

    def check_not_overwritten(self) -> None:
        """Raise ChangedFileError if the file is local and was written to since it was opened."""
        if self._version is not None:
            check_not_overwritten((self.path,), self._version)

    def decoder(self) -> Decoder | IsolatedDecoder:
        """Open a decoder of the file, which must be unchanged."""
        given = self.path, self._lease(), self.table, self.options
        return Decoder(*given) if self._children is None else IsolatedDecoder(self._children, *given)

    def audio_decoder(self) -> AudioDecoder | IsolatedAudioDecoder:
        """Open a decoder of the sound, whose table is made the first time."""
        lease = self._lease()
        with self._building:
            if self._sound is None:
                self._sound = self._remembered(AudioTable, (AUDIO,), AudioTable.unpack, build_audio_table)
        given = self.path, lease, self._sound
        return AudioDecoder(*given) if self._children is None else IsolatedAudioDecoder(self._children, *given)

    def _remembered(self, kind: Any, of: tuple[str, ...], unpack: Any, build: Callable[..., Any], *args: Any) -> Any:
        """Return a table of the file that is kept, or built from `args`."""
        remote, known = self.options.remote_settings, self._identity
        key = IndexKey.of("video", (self.path,), of, remote=remote, known=known) if self.options.cache else None

        def make() -> Any:
            lease = self._storage.lease(self.path)
            chosen = build if self._children is None else partial(self._children.build, kind)
            return chosen(self.path, lease.path, *args)

        return remember(key, unpack, make, kind.pack)

    def _lease(self) -> LeasedFile:
        lease = self._storage.lease(self.path)
        if self._storage.identity(self.path) != self._identity:
            raise rewritten_error(self.path)
        return lease


class LentDecoders:
    """The open decoders of a source in this process, of pictures or of sound, and how much they have decoded."""

    def __init__(self, open_one: Callable[[VideoFile], Any], options: VideoOptions) -> None:
        self._open_one = open_one
        # Some take the memory of several frames, others a process.
        self._most = _MOST_OPEN if options.decode_in == "thread" else options.decoder_threads or usable_cpus()
        self._lock = Lock()
        self._idle = list[tuple[VideoFile, Any]]()  # those used last are last
        self._closed = False
        self.decoded: int = 0

    @contextmanager
    def at(self, video: VideoFile, number: int) -> Generator[Any]:
        """Lend a decoder of a video, the one that is nearest before a frame."""
        with self._lock:
            own = [each for each in self._idle if each[0] is video]
            chosen = max(own, key=lambda each: each[1].next if each[1].next <= number else -2, default=None)
            if chosen is not None:
                self._idle.remove(chosen)
        decoder = self._open_one(video) if chosen is None else chosen[1]
        before, spare = decoder.decoded, [decoder]
        is_sound = True
        try:
            yield decoder
        except Exception:
            is_sound = False  # it may have no open file
            raise
        finally:
            with self._lock:
                self.decoded += decoder.decoded - before
                if is_sound:
                    self._idle.append((video, decoder))
                    most = 0 if self._closed else self._most
                    spare = [self._idle.pop(0)[1] for _ in range(len(self._idle) - most)]
            for each in spare:
                each.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            spare, self._idle = self._idle, []
        for _, decoder in spare:
            decoder.close()
