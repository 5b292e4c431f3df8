"""The sound of a video: spans of samples, decoded by PyAV from a little before each."""

from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, islice
from math import gcd
from typing import Any

import numpy as np

from dataload.errors import CorruptFileError
from dataload.sources.video.format import VIDEO
from dataload.sources.video.table import opened_video, video_errors
from dataload.storage.backend import LeasedFile
from dataload.storage.kept import CachedTable
from dataload.types import Array, Int64Array

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

    Attributes:
        times: (packets,) int64, in the order of the file, when each is presented, in the stream's unit.
        starts: (packets,) int64, the first sample of each.
        counts: (packets,) int64, how many it gives.
        rate: Samples per second.
        channels: Samples at a time.
    """

    times: Int64Array
    starts: Int64Array
    counts: Int64Array
    rate: int
    channels: int

    def pack(self) -> CachedTable:
        """Return the table for the cache."""
        arrays = {name: getattr(self, name) for name in ("times", "starts", "counts")}
        return CachedTable(arrays, {"rate": self.rate, "channels": self.channels})

    @classmethod
    def unpack(cls, found: CachedTable) -> "AudioTable | None":
        """Return the table that was packed; None if it is not one."""
        table = cls(**found.arrays, **found.extras)
        fits = len(table.times) == len(table.starts) == len(table.counts) and table.rate > 0 < table.channels
        return table if fits and (table.counts >= 0).all() else None


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
    """Decodes the sound of a video that one thread at a time reads.

    Attributes:
        next: The number of the packet that comes next.
        decoded: How many samples it has decoded.
    """

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
        with suppress(CorruptFileError) if is_before else nullcontext(), video_errors(self._path):
            packet = next(self._packets, None)
            if packet is None:
                raise CorruptFileError("the sound ends too early", path=self._path)
            self.next += 1
            with video_errors(self._path, packet.pos):
                parts += map(to_samples, self._context.decode(packet))
        self.decoded += sum(part.shape[1] for part in parts)
        return np.concatenate(parts, 1)

    def _seek(self, number: int) -> None:
        """Begin at a packet, with a decoder that has seen none before."""
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
        for _ in range(number):
            self._decode(is_before=True)

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
