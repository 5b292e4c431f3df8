"""Video files, a record for each frame: the format and its options."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dataload._util.settings import Above, Least
from dataload.errors import ConfigError
from dataload.sources.format import Format
from dataload.sources.options import FileOptions, ReadOptions
from dataload.storage import files_below

DEMUXERS = {".mp4": "mov", ".m4v": "mov", ".mov": "mov", ".mkv": "matroska", ".webm": "matroska", ".avi": "avi"}
"""FFmpeg's demuxer for each suffix; no other may open a file."""

MUXERS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska"}
"""FFmpeg's muxer for each suffix of files that are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoOptions(ReadOptions):
    """Options for reading video files.

    Attributes:
        size: Height and width to which frames are scaled, antialiased, by FFmpeg's swscale (bilinear); None keeps
            theirs.
        frames: How a frame is given: ``"rgb24"``, (height, width, 3) uint8; ``"gray"``, (height, width) uint8; or
            ``"yuv420p"``, (height * 3 / 2, width) uint8, the three planes one after another.
        step: Every how many frames of a file one is a record.
        sample_rate: Samples per second to which the field ``audio`` is resampled, by FFmpeg's swresample; None keeps
            the file's.
        frame_bytes: Most bytes of decoded frames that wait for later steps of a loader, in this process.
        decoder_threads: Threads that decode ahead of a loader, each a group of pictures at a time; 0 means one per CPU.
        decode_in: ``"process"`` reads and decodes files of strangers in child processes, one per thread: what crashes
            one, or makes it run out of memory, is a CorruptFileError of the file.
        cache: Keep the times of the frames in a hidden file for later runs; see `dataload.catalog.arrays`.
        max_record_bytes: Most bytes of memory that a frame may take; a larger one is a CorruptFileError.
    """

    size: tuple[int, int] | None = None
    frames: Literal["rgb24", "gray", "yuv420p"] = "rgb24"
    step: Annotated[int, Least(1)] = 1
    sample_rate: Annotated[int, Least(1)] | None = None
    frame_bytes: Annotated[int, Least(0)] = field(default=1 << 30, metadata={"content": False})
    decoder_threads: Annotated[int, Least(0)] = field(default=0, metadata={"content": False})
    decode_in: Literal["thread", "process"] = field(default="thread", metadata={"content": False})
    cache: bool = field(default=True, metadata={"content": False})

    def __post_init__(self) -> None:
        ReadOptions.__post_init__(self)
        if self.size is not None:
            size: Any = self.size
            if not isinstance(size, (list, tuple)) or [type(n) is int and n > 0 for n in size] != [True, True]:
                message = f"size is a height and a width of at least 1, such as (224, 224), got {size!r}"
                raise ConfigError(message, key="size", value=size)
            object.__setattr__(self, "size", tuple(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoWriterOptions(FileOptions):
    """Options for writing videos, as H.264.

    Attributes:
        gop: Frames from one keyframe to the next. A reader at random decodes half as many for one; small groups make
            large files.
        crf: Quality, from 0, without loss, to 51; 6 more halve the file.
        pixel_format: ``"yuv420p"``, which every player knows, has a colour for four pixels, and even sizes;
            ``"yuv444p"`` one for each. ``"rgb24"`` with ``crf=0`` keeps every pixel exactly.
        fps: Frames per second of records without a time.
        preset: How long x264 looks for a smaller file.
        frame: Field with the images, (height, width, 3) uint8.
        time: Field with the times in seconds, which rise within a video; without it, `fps` holds.
        video: Field with the number or name of the video, for records without a folder in their key; see `VideoWriter`.
    """

    gop: Annotated[int, Least(1)] = 12
    crf: Annotated[int, Least(0)] = 20
    pixel_format: Literal["yuv420p", "yuv444p", "rgb24"] = "yuv420p"
    fps: Annotated[float, Above(0, noun="a number a second")] = 30
    preset: Literal["ultrafast", "veryfast", "fast", "medium", "slow", "veryslow"] = "medium"
    frame: str = "frame"
    time: str = "time"
    video: str = "video"


def is_video(path: str) -> bool:
    """Return whether a file has the suffix of a video."""
    return path.lower().endswith(tuple(DEMUXERS))


def holds_videos(directory: str) -> bool:
    """Return whether there are videos in a local directory or below."""
    return any(map(is_video, files_below(directory)))


VIDEO = Format(
    name="video",
    source="dataload.sources.video.reader:VideoSource",
    writer="dataload.sources.video.writer:VideoWriter",
    reader_options=VideoOptions,
    writer_options=VideoWriterOptions,
    suffixes=tuple(DEMUXERS),
    is_data_set_without_shards=holds_videos,
    extra="video",
    content="images",
    key_field="__key__",
)
