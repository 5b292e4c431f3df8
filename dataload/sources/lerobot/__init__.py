"""LeRobot data sets, a table of time steps and the videos of cameras: the format and its options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dataload._util.settings import Least
from dataload.sources.format import Format
from dataload.sources.options import ReadOptions
from dataload.storage import join, storage_of

INFO_NAME = "meta/info.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeRobotOptions(ReadOptions):
    """Options for reading LeRobot data sets.

    Attributes:
        episodes: Numbers of the episodes to read; None means all.
        delta_timestamps: Seconds from a record's own time by field, such as ``{"action": [0.0, 0.1, 0.2]}``. The field
            then holds the values at these times, and ``<field>_is_pad`` is True for those outside the episode, where
            its first or last value stands.
        layout: ``"hwc"`` for images of (height, width, channels), ``"chw"`` as LeRobot has them.
        frame_bytes: Most bytes of decoded frames of all cameras that wait for later steps of a loader, in this process.
        decoder_threads: Threads per camera that decode ahead of a loader; 0 means one per CPU.
        video: Other options for the videos, such as ``{"size": (224, 224)}``; see
            `dataload.sources.video.VideoOptions`.
    """

    episodes: Sequence[int] | None = None
    delta_timestamps: Mapping[str, Sequence[float]] | None = None
    layout: Literal["hwc", "chw"] = "hwc"
    frame_bytes: Annotated[int, Least(0)] = field(default=1 << 30, metadata={"content": False})
    decoder_threads: Annotated[int, Least(0)] = field(default=0, metadata={"content": False})
    video: Mapping[str, Any] | None = field(default=None, metadata={"content": False})  # sources of videos identify it


LEROBOT = Format(
    name="lerobot",
    source="dataload.sources.lerobot.reader:LeRobotSource",
    reader_options=LeRobotOptions,
    magic=lambda head: b'"codebase_version"' in head,
    directory_file=INFO_NAME,
    is_data_set_without_shards=lambda directory: storage_of(directory).exists(join(directory, INFO_NAME)),
    extra="video",
)
