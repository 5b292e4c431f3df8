"""Decode WAV, FLAC, MP3 and Ogg (Vorbis, Opus, FLAC) by soundfile."""

import io
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from dataload._util.arrays import MAX_RECORD_BYTES, check_size
from dataload._util.lazy import load_optional
from dataload.errors import CorruptFileError, UnsupportedFormatError
from dataload.types import Array

AUDIO_EXTENSIONS = ("wav", "flac", "mp3", "ogg")

_MAGIC = re.compile(rb"RIFF.{4}WAVE|fLaC|OggS|ID3|\xff[\xe2-\xff]", re.DOTALL)  # not all that libsndfile opens
_ITEM = np.dtype(np.float32).itemsize
_UNKNOWN_FRAMES = 1 << 62
_STREAMED_BYTES = 0x7FFF0000  # in a WAV file that was written to a pipe, the size is this or more


def rate_field(name: str) -> str:
    return "sample_rate" if name == "audio" else f"{name}.sample_rate"


def decode_audio(data: bytes | memoryview, *, limit: int = MAX_RECORD_BYTES) -> Array:
    """Decode all samples, (frames, channels) float32 in [-1, 1], or as stored if the file holds floats.

    Values are exact for files of up to 24 bits, and may take `limit` bytes. A truncated file is a CorruptFileError,
    except an MP3 file, whose length is an estimate.
    """
    with _opened(data) as file:
        _check_whole(data)
        frames, channels = file.frames, file.channels
        if frames >= _UNKNOWN_FRAMES:
            message = "a FLAC file does not say how many frames it has, because it was written to a pipe"
            raise UnsupportedFormatError(f"{message}: write it to a file, or decode it with a function of your own")
        check_size(frames * channels * _ITEM, limit, f"audio of {frames:,} frames in {channels} channels")
        out = np.empty((frames, channels), np.float32)
        file.seek(0)  # as soundfile.read does, which changes the last bit of MP3
        found = file.read(out=out)
        return found if len(found) == frames else found.copy()  # an MP3 file may only estimate its length


def decode_rate(data: bytes | memoryview) -> int:
    """Return the number of frames per second, from the header."""
    with _opened(data) as file:
        return int(file.samplerate)


def no_audio() -> Array:
    """Return the audio of a missing file: no frames of one channel."""
    return np.empty((0, 1), np.float32)


@contextmanager
def _opened(data: bytes | memoryview) -> Generator[Any]:
    if not _MAGIC.match(data):
        begin = "it is empty" if not len(data) else f"it begins with {bytes(data[:8])!r}"
        raise CorruptFileError(f"audio cannot be decoded: {begin}; known are WAV, FLAC, MP3 and Ogg")
    soundfile = load_optional("soundfile", needed_by="decoding audio", extra="audio")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            yield file
    except (CorruptFileError, UnsupportedFormatError, MemoryError):
        raise
    except Exception as error:  # soundfile raises numpy's errors, too
        reason = getattr(error, "error_string", "") or str(error) or type(error).__name__
        raise CorruptFileError(f"audio cannot be decoded: {reason}") from error


def _check_whole(data: bytes | memoryview) -> None:
    """Raise if a file is shorter than its container says, which libsndfile ignores."""
    head = bytes(data[:8])
    if head[:4] == b"RIFF":
        size = int.from_bytes(head[4:], "little") + 8
        if len(data) < size < _STREAMED_BYTES:
            raise CorruptFileError(f"a WAV file of {size:,} bytes is cut after {len(data):,}")
    elif head[:4] == b"OggS":
        content = bytes(data)
        page = content.rfind(b"OggS")
        segments = content[page + 27 : page + 27 + content[page + 26]] if page + 26 < len(content) else b""
        end = page + 27 + len(segments) + sum(segments)
        if end > len(content):
            raise CorruptFileError(f"an Ogg file of {end:,} bytes or more is cut after {len(content):,}")
