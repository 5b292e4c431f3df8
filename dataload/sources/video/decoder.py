"""Decodes frames of a video by PyAV, from keyframes on."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np

from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.video.format import VIDEO, VideoOptions
from dataload.sources.video.table import UNKNOWN, VideoTable, opened_video, quarter_turns, video_errors
from dataload.storage.backend import LeasedFile
from dataload.types import BytesArray


class Decoder:
    """Decodes a video that one thread at a time reads. Another one, of a GPU, would have the same two methods.

    Args:
        path: The video, for messages.
        lease: The local file.
        table: Its table.
        options: How frames are given.

    Attributes:
        decoded: How many frames it has decoded.
        next: The number of the frame that comes next, -1 before the first.
    """

    def __init__(self, path: str, lease: LeasedFile, table: VideoTable, options: VideoOptions) -> None:
        self._path, self._lease, self._table, self._options = path, lease, table, options
        self._reformatter = VIDEO.require("av.video.reformatter", package="av").VideoReformatter()
        # Its threads would contend with ours. Before version 17, PyAV has none there.
        self._threads = {"threads": 1} if int(VIDEO.require("av").__version__.split(".")[0]) >= 17 else {}
        self.decoded: int = 0
        self._is_strict = True
        self._open = ExitStack()
        self.next: int = -1
        self._start()

    def _start(self) -> None:
        self._open.close()
        limit, strict = self._options.max_record_bytes, {"err_detect": "explode"} if self._is_strict else {}
        self._container, self._stream = self._open.enter_context(
            opened_video(self._path, self._lease.path, limit=limit, **strict)
        )
        # Threads decode groups of pictures instead, which takes less time in all.
        self._stream.codec_context.thread_type = "NONE"
        self._frames: Iterator[Any] | None = None
        self._demuxed: Iterator[Any] = iter(())
        self._pending: Any = None  # a keyframe after the last group
        self._group = -1  # which is decoded
        self._is_open = False  # whether pictures of this group refer to ones before it
        self.next = -1

    def decode(self, first: int, last: int) -> Iterator[tuple[int, Any]]:
        """Yield the numbers in [first, last) of frames and the frames, which `convert` takes.

        Decoding goes on where it ended if that is nearer than the keyframe. The frames are of one group.
        """
        group = int(np.searchsorted(self._table.starts, first, side="right")) - 1
        try:
            yield from self._decode(group, first, last)
        except CorruptFileError:
            failed, self._frames = self.next, None
            is_open = self._is_open if not group else self._is_strict and self._is_intact(group - 1, failed)
            if not self._is_strict or not is_open:
                raise
            # FFmpeg complains of pictures before an open group, which it refers to and the decoder does not have.
            self._is_strict = False
            self._start()
            yield from self._decode(group, max(first, failed), last)

    def _is_intact(self, group: int, number: int) -> bool:
        """Return whether a frame is decoded without an error from the keyframe of an earlier group on."""
        self._group = group
        self.next = int(self._table.starts[group])
        self._frames = self._decoded(group, goes_on=True)
        try:
            for _ in self._decode(group, number, number + 1):
                pass
        except CorruptFileError:
            return False
        finally:
            self._frames = None
        return True

    def _decode(self, group: int, first: int, last: int) -> Iterator[tuple[int, Any]]:
        if self._frames is None or self._group != group or self.next > first:
            self._group = group
            self.next = int(self._table.starts[group])
            self._frames = self._decoded(group)
        frames = self._frames
        try:
            while self.next < last:
                with video_errors(self._path, index=self.next):
                    frame = next(frames, None)
                self._check(frame)
                number = self.next
                self.next += 1
                self.decoded += 1
                if number >= first:
                    yield number, frame
        except Exception:
            self._frames = None
            raise

    def _check(self, frame: Any) -> None:
        """Raise a CorruptFileError unless this is the next frame, whole."""
        expected = int(self._table.times[self.next])
        if frame is not None and frame.pts == expected and not frame.is_corrupt:
            return
        at = f"{float(expected * self._table.time_base):.3f} s"
        found = "it is damaged" if frame is not None and frame.pts == expected else "it is missing"
        if frame is not None and frame.pts is not None and frame.pts != expected:
            found += f", and FFmpeg gives the one at {float(frame.pts * self._table.time_base):.3f} s"
        raise CorruptFileError(f"the frame at {at} cannot be decoded: {found}", path=self._path, index=self.next)

    def _decoded(self, group: int, *, goes_on: bool = False) -> Generator[Any]:
        """Yield the frames of a group, and if it `goes_on` all others behind, in the order in which they are shown."""
        table, context, self._is_open = self._table, self._stream.codec_context, False
        key, left = int(table.key_times[group]), int(table.group_lengths[group])
        end = int(table.key_times[group + 1]) if group + 1 < len(table.starts) else None
        for packet in self._packets(group):
            if left <= 0 and packet.is_keyframe and not goes_on:
                # The decoder has all of the group, and would wait for more packets before it gives the last frames.
                self._pending = packet
                yield from context.decode(None)
                return
            if packet.pts is not None and packet.pts < key:  # needs frames of the group before, and belongs to it
                self._is_open = True
            else:
                left -= packet.pts is not None and not packet.is_discard and (end is None or packet.pts < end)
                with video_errors(self._path, packet.pos, self.next):
                    yield from packet.decode()

    def _packets(self, group: int) -> Iterator[Any]:
        """Return the packets from a keyframe on, wherever the container's index leads to."""
        key, back, pending = int(self._table.key_times[group]), 0, self._pending
        self._pending = None
        if pending is not None and pending.pts == key:
            self._stream.codec_context.flush_buffers()
            return chain([pending], self._demuxed)
        while True:
            target = max(0, group - back)
            at = int(self._table.key_decoding_times[target])
            self._container.seek(int(self._table.key_times[target]) if at == UNKNOWN else at, stream=self._stream)
            self._demuxed = self._container.demux(self._stream)
            for packet in self._demuxed:
                if packet.is_keyframe and packet.pts == key:
                    return chain([packet], self._demuxed)
                if packet.is_keyframe and packet.pts is not None and packet.pts > key:
                    break  # too far
            if not target:
                raise CorruptFileError("a keyframe is missing", path=self._path, index=self.next)
            back = 2 * back + 1

    def convert(self, frame: Any, wanted: tuple[int, ...]) -> BytesArray:
        """Return a frame as an array of the `wanted` shape, which may be a view of the frame's own memory."""
        kind, turns, shape = self._options.frames, quarter_turns(frame, self._path), (wanted[0], wanted[1])
        if kind == "yuv420p":
            shape = (shape[0] * 2 // 3, shape[1])
        shown = (frame.width, frame.height) if turns % 2 else (frame.height, frame.width)
        if self._options.size is None and shown != shape:
            message = f"a frame of {shown[0]} x {shown[1]} is among ones of other sizes: pass size=(height, width)"
            raise ConfigError(f"{self._path}: {message}", key="size")
        height, width = shape[::-1] if turns % 2 else shape
        made = self._reformatter.reformat(frame, width=width, height=height, format=kind, **self._threads)
        planes = [np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size) for plane in made.planes]
        if kind == "rgb24":
            image = planes[0][:, : width * 3].reshape(height, width, 3)
            return np.rot90(image, turns) if turns else image
        cut = (rows[: plane.height, : plane.width] for rows, plane in zip(planes, made.planes, strict=True))
        return np.concatenate([np.rot90(rows, turns).reshape(-1) for rows in cut]).reshape(wanted)

    def close(self) -> None:
        """Close the file."""
        self._frames = None
        self._open.close()
