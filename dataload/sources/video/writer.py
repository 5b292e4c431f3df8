"""The writer of video files: H.264 by PyAV."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, ClassVar, cast

import numpy as np

from dataload.errors import ConfigError, SourceError
from dataload.sources.video import MUXERS, VIDEO, VideoWriterOptions
from dataload.sources.video.file import KEY, LABEL
from dataload.sources.writer import Writer, require_fields
from dataload.storage import is_url
from dataload.storage.paths import leads_elsewhere
from dataload.types import BytesArray

_TICKS = 90_000  # per second, in which the usual rates are exact


class VideoWriter(Writer):
    """Writes frames as H.264: one video at a path with its suffix, else a directory with one for each video.

    A record is a frame, (height, width, 3) uint8, and optionally its time in seconds. In a directory, the records of a
    video follow one another. Its name is their folder in ``__key__``, such as ``run/a`` of ``run/a/17``, or the
    number or text in their field ``video``.

    Options: `VideoWriterOptions`.
    """

    options_type: ClassVar[Any] = VideoWriterOptions

    def _begin(self, options: VideoWriterOptions) -> None:
        VIDEO.require("av")
        self._options = options
        self._video: _Encoder | None = None
        self._names: set[str] = set()  # of videos
        suffix = _suffix(self.path)
        self._is_file = bool(suffix)
        if suffix and suffix not in MUXERS:
            message = f"H.264 is not written to files {suffix!r}: choose one of {', '.join(MUXERS)}"
            raise ConfigError(message, key="path", value=self.path)
        if self._is_file:
            self._part.create().close()
        elif is_url(self.path):
            message = f"a directory of videos is not written to a URL: name a file, with a suffix {', '.join(MUXERS)}"
            raise ConfigError(message, key="path", value=self.path)

    def _write(self, record: Any) -> None:
        values = require_fields(record, "video")
        image, ticks, name = self._image(values), self._ticks(values), "" if self._is_file else self._name(values)
        video = self._video
        if video is None or name != video.name:
            if name in self._names:
                message = f"record {len(self)} is of the video {name!r}, whose records do not follow one another"
                raise ConfigError(f"{message}: sort them by video", key=self._options.video)
            self._check_size(image)
            self._close_video()
            file = self._part.temporary if self._is_file else self._part.inside(f"{name}.mp4")
            self._video = video = _Encoder(name, file, image.shape, self._options, timed=ticks is not None)
            self._names.add(name)
        self.stored_bytes += video.write(image, ticks, len(self))

    def _image(self, values: Mapping[str, Any]) -> BytesArray:
        own, image = self._options, values.get(self._options.frame)
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            shown = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
            found = "missing" if own.frame not in values else f"of {shown}"
            message = f"a video takes images, (height, width, 3) uint8, and the field {own.frame!r} is {found}"
            raise ConfigError(f"{message}: name the field with the option frame=", key="frame", value=own.frame)
        stored = {own.frame, own.time, own.video, KEY}
        if not self._is_file and str(values.get(KEY, "")).count("/") > 1:
            stored.add(LABEL)  # a folder
        if lost := [name for name in values if name not in stored]:
            message = f"a video stores frames and their times, and not the fields {', '.join(map(repr, lost))}"
            raise ConfigError(f"{message}: open the source with fields= of those to store", key=lost[0])
        return cast("BytesArray", image)

    def _ticks(self, values: Mapping[str, Any]) -> int | None:
        if (time := values.get(self._options.time)) is None:
            return None
        if not 0 <= float(time) < 1e9:  # also of NaN
            raise ConfigError(f"the time of record {len(self)} is {time} s, not 0 or later", key=self._options.time)
        return round(float(time) * _TICKS)

    def _name(self, values: Mapping[str, Any]) -> str:
        folder, number = str(values.get(KEY, "")).rpartition("/")[0], values.get(self._options.video, 0)
        name = folder or (number if isinstance(number, str) else f"{int(number):06d}")
        if reason := leads_elsewhere(name):
            raise ConfigError(f"record {len(self)} cannot name its video: {reason}", key=KEY, value=name)
        return name

    def _check_size(self, image: BytesArray) -> None:
        height, width, _ = image.shape
        if self._options.pixel_format == "yuv420p" and (height % 2 or width % 2):
            message = f"frames of record {len(self)} have an odd size, {height} x {width}, which yuv420p cannot have"
            raise ConfigError(
                f"{message}: pass pixel_format='yuv444p', or cut a row or column off",
                key="pixel_format",
                value="yuv420p",
            )

    def _close_video(self) -> None:
        if self._video is not None:
            video, self._video = self._video, None
            self.stored_bytes += video.close()

    def _finish(self) -> None:
        if not self._count:
            raise ConfigError(f"{self.path}: a video needs at least one frame, and no record was written", key="path")
        self._close_video()

    def _discard(self) -> None:
        if self._video is not None:
            self._video.abort()


def _suffix(path: str) -> str:
    """Return the suffix of a path to a video; an empty text if it has none of them."""
    return next((suffix for suffix in VIDEO.suffixes if path.lower().endswith(suffix)), "")


class _Encoder:
    """A video that is being written."""

    def __init__(self, name: str, path: str, shape: Sequence[int], options: VideoWriterOptions, *, timed: bool) -> None:
        self.name: str = name
        self._av, self._path, self._shape, self._is_timed = VIDEO.require("av"), path, tuple(shape), timed
        self._last = -1
        rate = Fraction(options.fps).limit_denominator(1 << 16)
        is_rgb = options.pixel_format == "rgb24"
        with self._errors():
            self._container = self._av.open(f"file:{path}", "w", format=MUXERS[_suffix(path)])
            stream = self._container.add_stream("libx264rgb" if is_rgb else "libx264", rate=rate)
            stream.height, stream.width, stream.pix_fmt = shape[0], shape[1], options.pixel_format
            stream.gop_size = options.gop
            self._unit = Fraction(1, _TICKS) if timed else 1 / rate
            stream.time_base = stream.codec_context.time_base = self._unit
            # One thread writes the same bytes on every machine.
            settings = f"keyint={options.gop}:min-keyint={options.gop}:scenecut=0:threads=1"
            matrix = "" if is_rgb else ":colormatrix=smpte170m"  # of swscale's conversion
            stream.options = {"crf": str(options.crf), "preset": options.preset, "x264-params": settings + matrix}
        self._stream = stream

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except self._av.error.FFmpegError as error:
            if isinstance(error, (MemoryError, OSError)):
                raise
            raise SourceError(f"FFmpeg cannot write this video: {error.strerror}", path=self._path) from error

    def write(self, image: BytesArray, ticks: int | None, index: int) -> int:
        """Encode a frame; return how many bytes of the file were made."""
        if image.shape != self._shape or (ticks is not None) != self._is_timed:
            found = f"{image.shape}, with {'a' if ticks is not None else 'no'} time"
            first = f"{self._shape}, with {'a' if self._is_timed else 'no'} time"
            message = f"the frame of record {index} is {found}, and the first of its video {first}"
            raise ConfigError(message, key="frame")
        at = self._last + 1 if ticks is None else ticks
        if at <= self._last:
            message = f"record {index}: a frame must be later than the frame before it in the same video"
            raise ConfigError(
                f"{message}: write to a directory for several videos, or leave the time out to have `fps`", key="time"
            )
        with self._errors():
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base, self._last = at, self._unit, at
            return self._mux(frame)

    def _mux(self, frame: Any) -> int:
        packets = self._stream.encode(frame)
        self._container.mux(packets)
        return sum(packet.size for packet in packets)

    def close(self) -> int:
        """Complete the file; return the bytes of the last frames."""
        try:
            with self._errors():
                return self._mux(None)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the file."""
        with self._errors():
            self._container.close()
