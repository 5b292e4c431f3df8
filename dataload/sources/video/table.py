"""The table of a video: the times of its frames, and where decoding can begin, found without decoding the frames."""

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from dataload._util.arrays import MAX_RECORD_BYTES, check_size
from dataload.catalog.arrays import require
from dataload.errors import CorruptFileError, UnsupportedFormatError
from dataload.sources.video import DEMUXERS, VIDEO
from dataload.storage import absolute
from dataload.storage.kept import CachedTable
from dataload.types import Int64Array

UNKNOWN = np.iinfo(np.int64).min
"""A decoding time that the file does not give."""

_RGB = 3
_fraction = lru_cache(Fraction)  # thousands of files have one time base


@dataclass(frozen=True, slots=True, eq=False)
class VideoTable:
    """The frames of a video, in the order in which they are shown; all times are in units of `time_base` seconds.

    A group of pictures begins at a keyframe, from which a decoder can begin.
    """

    times: Int64Array  # (frames,), ascending, when each frame is shown
    starts: Int64Array  # (groups,), ascending, the number of the first frame of each group
    key_times: Int64Array  # (groups,), when the keyframe of each group is shown
    key_decoding_times: Int64Array  # (groups,), when it is decoded; `UNKNOWN` if the file does not say it
    time_base: Fraction
    height: int  # of a frame as it is stored, in pixels
    width: int
    rotation: int | None  # quarter turns, counterclockwise, to show the first frame; None if it was not decoded
    sample_rate: int  # samples of sound per second; 0 without sound
    channels: int

    def seconds(self, numbers: Int64Array) -> Any:
        """Return when frames are shown, (n,) float64 seconds."""
        return self.times[numbers] * self.time_base.numerator / self.time_base.denominator

    def pack(self) -> CachedTable:
        """Return the table for the cache."""
        arrays = {name: getattr(self, name) for name in ("times", "starts", "key_times", "key_decoding_times")}
        numbers = {name: getattr(self, name) for name in ("height", "width", "rotation", "sample_rate", "channels")}
        return CachedTable(arrays, numbers | {"time_base": [self.time_base.numerator, self.time_base.denominator]})

    @classmethod
    def unpack(cls, found: CachedTable) -> "VideoTable":
        """Return the table that was packed, which must be one."""
        extras = dict(found.extras)
        time_base = _fraction(*map(int, extras.pop("time_base")))
        table = cls(**found.arrays, **extras, time_base=time_base)
        require(len(table.starts) == len(table.key_times) == len(table.key_decoding_times) > 0)
        require(table.times[1:] > table.times[:-1], table.starts[1:] > table.starts[:-1])
        require(table.starts[0] == 0, table.starts[-1] < len(table.times), table.time_base.numerator > 0)
        require(min(table.height, table.width) > 0)
        return table


@contextmanager
def opened_video(
    path: str, file: str, kind: str = "video", limit: int = MAX_RECORD_BYTES, **options: str
) -> Generator[tuple[Any, Any]]:
    """Open a local file of a video at `path`, and yield PyAV's container and stream; its errors name the path.

    No frame takes more than `limit` bytes as RGB; the decoder gets `options`.
    """
    av = VIDEO.require("av")
    demuxer = DEMUXERS[f".{path.lower().rpartition('.')[2]}"]
    options["max_pixels"] = str(limit // _RGB)
    # No other protocol and no other file: a container may name some, and `file:` keeps a name from being one.
    rules = {"protocol_whitelist": "file"} | ({"enable_drefs": "0"} if demuxer == "mov" else {})
    with (
        video_errors(path),
        av.open(
            f"file:{absolute(file)}",
            format=demuxer,
            options=options,  # FFmpeg decodes while it looks for streams, too
            container_options=rules,
            metadata_errors="replace",
        ) as container,
    ):
        pictures = av.stream.Disposition.attached_pic
        streams = [each for each in container.streams if each.type == kind and not each.disposition & pictures]
        if not streams:
            found = ", ".join(stream.type for stream in container.streams) or "none"
            raise UnsupportedFormatError(f"{path} has no {kind}, only streams of these types: {found}", path=path)
        if streams[0].codec_context is None:
            raise UnsupportedFormatError(f"{path} has a codec that FFmpeg cannot decode here", path=path)
        streams[0].codec_context.options = options
        yield container, streams[0]


@contextmanager
def video_errors(
    path: str, offset: int | None = None, index: int | None = None, seconds: float | None = None
) -> Generator[None]:
    """Raise errors of FFmpeg about a file, or its frame shown at `seconds`, as a CorruptFileError."""
    av = VIDEO.require("av")
    try:
        yield
    except av.error.FFmpegError as error:
        if isinstance(error, MemoryError):
            raise
        where = "this video" if seconds is None else f"the frame at {seconds:.3f} s"
        message = f"FFmpeg cannot read {where}: {error.strerror}"
        raise CorruptFileError(message, path=path, offset=offset, index=index) from error


def build_table(path: str, file: str, limit: int, decodes: bool) -> VideoTable:
    """Return the table of a video, by reading its packets once; `limit` is the most bytes of a frame.

    Frames that cannot be decoded because the file begins after their keyframe are left out, as decoders do. Only a
    frame tells of a rotation, so if the caller needs it, the first one `decodes`.
    """
    times, keys, packets = list[int](), list[tuple[int, int]](), 0
    first: Any = None
    with opened_video(path, file, limit=limit) as (container, stream):
        context, time_base = stream.codec_context, stream.time_base
        context.thread_type = "NONE"  # to start threads takes longer than one frame
        check_size(
            context.height * context.width * _RGB, limit, f"a frame of {context.width} x {context.height}", path=path
        )
        for packet in container.demux(stream):
            if packet.size:
                packets, at, shown = packets + 1, packet.pts, not packet.is_discard
                if packet.is_corrupt or at is None:
                    problem = "has no time" if at is None else f"is damaged, at {float(at * time_base):.3f} s"
                    raise CorruptFileError(f"packet {len(times)} of the video {problem}", path=path, offset=packet.pos)
                if shown:
                    times.append(at)
                if packet.is_keyframe:
                    keys.append((at, UNKNOWN if packet.dts is None else packet.dts))
            if decodes and first is None and keys:
                found = packet.decode()
                if packet.is_keyframe and not found:
                    # Decoders keep frames back that they reorder: the first comes at once if nothing is to follow.
                    found = context.decode(None)
                    context.flush_buffers()
                    found = found or packet.decode()
                first = next(iter(found), None)
        check_end(path, container, stream, packets)
        if not keys or max(times, default=-math.inf) < min(keys)[0] or (decodes and first is None):
            raise CorruptFileError("the video has no frame that can be decoded", path=path)
        shape = (context.height, context.width, None)
        if first is not None:
            shape = (first.height, first.width, quarter_turns(first, path))
        sounds = [each.codec_context for each in container.streams.audio if each.codec_context is not None]
        sound = (sounds[0].sample_rate, sounds[0].channels) if sounds else (0, 0)
    ordered, at_keys = np.sort(np.array(times, np.int64)), np.array(sorted(keys), np.int64)
    if repeated := int((ordered[1:] == ordered[:-1]).sum()):
        raise CorruptFileError(f"{repeated} frames have the same time as others", path=path)
    # Several keyframes before the same frame: only the last one counts.
    ordered = ordered[ordered.searchsorted(at_keys[0, 0]) :]
    starts = ordered.searchsorted(at_keys[:, 0])
    last = starts != np.append(starts[1:], len(ordered))
    at_keys, starts = at_keys[last], starts[last]
    return VideoTable(ordered, starts, at_keys[:, 0], at_keys[:, 1], time_base, *shape, *sound)


def check_end(path: str, container: Any, stream: Any, packets: int) -> None:
    """Raise a CorruptFileError if frames of the file's index lie beyond its end: FFmpeg leaves them out in silence."""
    entries = getattr(stream, "index_entries", ())  # PyAV 15 does not show them
    if packets < len(entries) and max(each.pos + each.size for each in entries) > container.size:
        message = f"the video is cut off: it ends after {packets:,} of {len(entries):,} frames"
        raise CorruptFileError(message, path=path)


def quarter_turns(frame: Any, path: str) -> int:
    """Return by how many quarter turns, counterclockwise, a frame has to be turned to be shown."""
    matrix = frame.side_data.get("DISPLAYMATRIX") if len(frame.side_data) else None
    if matrix is None:
        return 0
    (a, b, _), (c, d, _), _ = np.frombuffer(matrix, np.int32).reshape(3, 3).tolist()
    if a * d <= b * c or frame.rotation % 90:
        message = f"{path} has to be mirrored, or turned by {frame.rotation} degrees; dataload makes quarter turns only"
        raise UnsupportedFormatError(f"{message}: encode it again, as `ffmpeg -i OLD NEW` does", path=path)
    return frame.rotation // 90 % 4
