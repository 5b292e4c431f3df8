"""Decodes frames of a video by PyAV, from keyframes on, and spans of its sound, from a little before each."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, islice
from math import gcd
from typing import Any

import numpy as np

from dataload.catalog.arrays import require
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.video import VIDEO, VideoOptions
from dataload.sources.video.table import UNKNOWN, VideoTable, opened_video, quarter_turns, video_errors
from dataload.storage.backend import LeasedFile
from dataload.storage.kept import CachedTable
from dataload.types import Array, BytesArray, Int64Array


class Decoder:
    """Decodes a video that one thread at a time reads. Another one, of a GPU, would have the same two methods.

    It has `decoded` so many frames. The frame `next` comes next, -1 before the first. `path` is for messages.
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
                with video_errors(self._path, None, self.next, self._seconds(self.next)):
                    frame = next(frames, None)
                self._check(frame)
                number = self.next
                self.next += 1
                self.decoded += 1
                if number >= first:
                    yield number, frame
        except GeneratorExit:  # the next frame may be asked for later
            raise
        except BaseException:
            self._frames = None
            raise

    def _check(self, frame: Any) -> None:
        """Raise a CorruptFileError unless this is the next frame, whole."""
        expected = int(self._table.times[self.next])
        if frame is not None and frame.pts == expected and not frame.is_corrupt:
            return
        at = f"{self._seconds(self.next):.3f} s"
        found = "it is damaged" if frame is not None and frame.pts == expected else "it is missing"
        if frame is not None and frame.pts is not None and frame.pts != expected:
            found += f", and FFmpeg gives the one at {float(frame.pts * self._table.time_base):.3f} s"
        raise CorruptFileError(f"the frame at {at} cannot be decoded: {found}", path=self._path, index=self.next)

    def _seconds(self, number: int) -> float:
        """Return when a frame is shown; for one after the last, when the last one is."""
        return float(int(self._table.times[min(number, len(self._table.times) - 1)]) * self._table.time_base)

    def _decoded(self, group: int, *, goes_on: bool = False) -> Generator[Any]:
        """Yield the frames of a group, and of all after it if it `goes_on`, in the order in which they are shown."""
        table, context, self._is_open = self._table, self._stream.codec_context, False
        key, end, stop = int(table.key_times[group]), None, len(table.times)
        if group + 1 < len(table.starts):
            end, stop = int(table.key_times[group + 1]), int(table.starts[group + 1])
        left = stop - int(table.starts[group])
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
                with video_errors(self._path, packet.pos, self.next, self._seconds(self.next)):
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
            message = f"a frame has {shown[0]} x {shown[1]} pixels, and others another size: pass size=(height, width)"
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


# Decoded before a span and left out of it, because codecs overlap packets and borrow bits from those before: in
# seconds, and in packets, which MP3 needs.
_PREROLL_SECONDS, _PREROLL_PACKETS = 0.5, 16
_MOST_SHIFT = 0.005  # seconds by which times may differ from counted samples: units of some files are that coarse
_TAPS = 64  # of swresample's filter at the lower of two rates, which has 32
# Decoders with a random generator, or with states that fade slowly, begin anew for each span: then a span has the same
# samples whatever was read before it.
_REMEMBER = frozenset({"aac", "ac3", "eac3", "opus", "libopus"})


@dataclass(frozen=True, slots=True, eq=False)
class AudioTable:
    """The samples that each packet of a file gives when the file is decoded from its start.

    Sample k is the one at k / `rate` seconds. Samples are counted, and silence is between them only where the times
    of the file leave a gap.
    """

    times: Int64Array  # (packets,), in the order of the file, when each is presented, in the stream's unit
    starts: Int64Array  # (packets,), the first sample of each
    counts: Int64Array  # (packets,), how many it gives
    rate: int  # samples per second
    channels: int

    def pack(self) -> CachedTable:
        """Return the table for the cache."""
        arrays = {name: getattr(self, name) for name in ("times", "starts", "counts")}
        return CachedTable(arrays, {"rate": self.rate, "channels": self.channels})

    @classmethod
    def unpack(cls, found: CachedTable) -> "AudioTable":
        """Return the table that was packed, which must be one."""
        table = cls(**found.arrays, **found.extras)
        require(len(table.times) == len(table.starts) == len(table.counts), table.rate > 0 < table.channels)
        require(table.counts >= 0)
        return table


def build_audio_table(path: str, file: str) -> AudioTable:
    """Return the table of a video's sound, which is decoded once: many files do not say how many samples they have."""
    rows = list[tuple[int, int, int]]()
    with opened_video(path, file, "audio") as (container, stream), video_errors(path):
        rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
        at: int | None = None
        for packet in container.demux(stream):
            count, start = 0, 0 if at is None else at
            for frame in packet.decode():
                if (frame.sample_rate, frame.layout.nb_channels) != (rate, channels):
                    message = f"the sound changes from {rate} Hz and {channels} channels in between"
                    raise CorruptFileError(message, path=path, offset=packet.pos)
                if frame.pts is not None:
                    said = round(frame.pts * frame.time_base * rate)
                    at = said if at is None or abs(said - at) > _MOST_SHIFT * rate else at
                start = start if count else at or 0
                count, at = count + frame.samples, (at or 0) + frame.samples
            time = packet.dts if packet.pts is None else packet.pts
            rows.append((rows[-1][0] + 1 if time is None and rows else time or 0, start, count))
    table = np.array(rows, np.int64).reshape(-1, 3)
    return AudioTable(*table.T.copy(), rate=rate, channels=channels)


def to_samples(frame: Any) -> Array:
    """Return the samples of a frame, (channels, n) float32, from -1 to 1, as swresample converts them."""
    found = frame.to_ndarray()
    if not frame.format.is_planar:
        found = found.reshape(-1, frame.layout.nb_channels).T
    if found.dtype.kind == "f":
        return found.astype(np.float32)
    zero = np.float32(128 if found.dtype == np.uint8 else 0)
    return (found.astype(np.float32) - zero) / np.float32(1 << 8 * found.dtype.itemsize - 1)


class AudioDecoder:
    """Decodes the sound of a video that one thread at a time reads; `next` is a packet, `decoded` counts samples."""

    def __init__(self, path: str, lease: LeasedFile, table: AudioTable) -> None:
        self._path, self._lease, self._table = path, lease, table
        self._rises = bool((np.diff(table.times) > 0).all())
        self._open = ExitStack()
        self.next: int = 0
        self.decoded: int = 0
        self._start()

    def _start(self) -> None:
        self._open.close()
        self._container, self._stream = self._open.enter_context(opened_video(self._path, self._lease.path, "audio"))
        self._context = self._stream.codec_context
        self._packets: Any = self._container.demux(self._stream)
        self.next = 0

    def read(self, start: int, count: int, rate: int) -> Array:
        """Return the samples [start, start + count) at `rate`, (channels, count) float32, zero where there are none."""
        table = self._table
        common = gcd(rate, table.rate)
        step, given = rate // common, table.rate // common  # that many samples here, and there, take the same time
        if step == given:
            return self._samples(start, count)
        # swresample begins at a sample of both rates, some samples before. It begins and ends with the file, though.
        margin = -(-_TAPS * max(1, table.rate // rate) // given)
        begin, end = int(table.starts.min(initial=0)), int((table.starts + table.counts).max(initial=0))
        low = max(start // step - margin, begin // given)
        stop = min(end, (-(-(start + count) // step) + margin) * given)
        out = np.zeros((table.channels, count), np.float32)
        if stop > low * given:
            found = self._resampled(self._samples(low * given, stop - low * given), rate)
            at = low * step - start  # of its first sample in `out`
            found = found[:, max(0, -at) : max(0, count - at)]
            out[:, max(0, at) : max(0, at) + found.shape[1]] = found
        return out

    def _resampled(self, samples: Array, rate: int) -> Array:
        frames, layout = VIDEO.require("av.audio.frame", package="av"), self._stream.codec_context.layout.name
        convert = VIDEO.require("av.audio.resampler", package="av").AudioResampler("fltp", layout, rate)
        frame = frames.AudioFrame.from_ndarray(np.ascontiguousarray(samples), "fltp", layout)
        frame.sample_rate = self._table.rate
        return np.concatenate([made.to_ndarray() for made in chain(convert.resample(frame), convert.resample(None))], 1)

    def _samples(self, start: int, count: int) -> Array:
        table, stop = self._table, start + count
        out = np.zeros((table.channels, count), np.float32)
        wanted = np.flatnonzero((table.starts < stop) & (table.starts + table.counts > start) & (table.counts > 0))
        if not len(wanted):
            return out
        first, last = int(wanted[0]), int(wanted[-1])
        before = int(np.searchsorted(table.starts, table.starts[first] - int(_PREROLL_SECONDS * table.rate)))
        self._seek(max(0, min(before, first - _PREROLL_PACKETS)))
        while self.next <= last:
            number, at = self.next, int(table.starts[self.next])
            found = self._decode(is_before=number < first)
            if number < first:
                continue
            if found.shape[1] != table.counts[number]:
                message = f"the sound at {at / table.rate:.3f} s has {found.shape[1]} samples, not"
                raise CorruptFileError(f"{message} {table.counts[number]}", path=self._path)
            low, high = max(at, start), min(at + found.shape[1], stop)
            if low < high:
                out[:, low - start : high - start] = found[:, low - at : high - at]
        return out

    def _decode(self, *, is_before: bool) -> Array:
        """Return the samples of the next packet; one before a span may lack what it refers to."""
        parts = [np.zeros((self._table.channels, 0), np.float32)]
        with video_errors(self._path):
            packet = next(self._packets, None)
        if packet is None:
            raise CorruptFileError("the sound ends too early", path=self._path)
        self.next += 1
        with suppress(CorruptFileError) if is_before else nullcontext(), video_errors(self._path, packet.pos):
            parts += map(to_samples, self._context.decode(packet))
        self.decoded += sum(part.shape[1] for part in parts)
        return np.concatenate(parts, 1)

    def _seek(self, number: int) -> None:
        """Begin at a packet or before it, with a decoder that has seen none before."""
        times, unit, back = self._table.times, float(self._stream.time_base), 0.0
        while number and self._rises and back <= (times[number] - times[0]) * unit:
            self._container.seek(int(times[number] - back / unit), stream=self._stream)
            self._packets = self._container.demux(self._stream)
            packet = next(self._packets, None)
            found = number + 1 if packet is None or packet.pts is None else int(np.searchsorted(times, packet.pts))
            if found <= number:
                self._packets, self.next = islice(chain([packet], self._packets), number - found, None), number
                self._context = self._fresh()
                return
            back = 2 * back + 1
        self._start()

    def _fresh(self) -> Any:
        context = self._stream.codec_context
        name = context.codec.name
        if name not in _REMEMBER:
            return context  # which `seek` has flushed
        made = VIDEO.require("av").CodecContext.create(name, "r")
        made.extradata, made.sample_rate, made.layout = context.extradata, context.sample_rate, context.layout.name
        return made

    def close(self) -> None:
        """Close the file."""
        self._open.close()
