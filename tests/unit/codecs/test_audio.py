"""Audio as soundfile decodes it; what is cut, damaged, or claims too much."""

import io
import struct
import sys
from itertools import count

import numpy as np
import pytest
import soundfile

from dataload.codecs.audio import decode_audio, decode_rate
from dataload.codecs.decoders import DECODERS, for_extension, known_extension
from dataload.errors import CorruptFileError, MissingDependencyError, UnsupportedFormatError

TONE = (np.random.default_rng(0).standard_normal((3000, 2)) * 0.1).cumsum(0).clip(-0.9, 0.9).astype(np.float32)


def encoded(kind: str, subtype: str | None = None, samples: np.ndarray = TONE, rate: int = 16_000) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, format=kind, subtype=subtype)
    return stream.getvalue()


KINDS = [("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("WAVEX", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", None)]
KINDS += [("OGG", "OPUS"), ("MP3", None)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_are_those_of_soundfile(kind, channels):
    data = encoded(*kind, TONE[:, :channels])
    wanted, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    found = decode_audio(memoryview(data))
    assert (found.dtype, found.shape) == (np.float32, (3000, channels))
    assert found.flags.writeable
    np.testing.assert_array_equal(found, wanted)
    assert decode_rate(memoryview(data)) == rate == 16_000
    if kind[1] == "FLOAT":
        np.testing.assert_array_equal(found, TONE[:, :channels])


def test_extensions():
    for extension in ("wav", "a.FLAC", "mp3", "ogg"):
        assert known_extension(extension) is DECODERS["audio"]
    assert DECODERS["audio"].empty().shape == (0, 1)


def flac(high, low):
    """A file whose header says another number of frames, of 36 bits."""
    data = bytearray(encoded("FLAC"))
    data[21] = data[21] & 0xF0 | high
    data[22:26] = bytes([low]) * 4
    return data


def wav(channels):
    data = bytearray(encoded("WAV"))
    data[22:24] = struct.pack("<H", channels)
    return data


UNKNOWN = "audio cannot be decoded: .*{}.*known are WAV, FLAC, MP3 and "


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (flac(0, 0), UnsupportedFormatError, "does not say how many frames it has, because it was written to a"),
        (
            *(flac(15, 255), CorruptFileError),
            r"audio of 68,719,476,735 frames in 2 channels takes 549,755,813,880 bytes of memory, and max_record_bytes",
        ),
        (wav(60_000), CorruptFileError, r"audio cannot be decoded: .*channels"),
        (encoded("WAV")[:12_000], CorruptFileError, r"a WAV file of 12,044 bytes is cut after 12,000"),
        (encoded("OGG")[:-1], CorruptFileError, r"an Ogg file of [\d,]+ bytes or more is cut after [\d,]+"),
        (b"", CorruptFileError, UNKNOWN.format("it is empty")),
        (b"fLaX1234", CorruptFileError, UNKNOWN.format("it begins with b'fLaX1234'")),
        (b"FORM\0\0\0\0AIFF", CorruptFileError, UNKNOWN.format("FORM")),
        (b"ID3\x04\0\0\0\0\0\0" + encoded("AIFF"), CorruptFileError, "audio cannot be decoded: "),  # behind a tag
        *(
            (encoded(kind)[: int(part * len(encoded(kind)))], CorruptFileError, r"is cut after|cannot be decoded")
            for kind in ("WAV", "FLAC", "OGG")
            for part in (0.4, 0.99)
        ),
    ],
    ids=count(),
)
def test_what_is_not_decoded(data, error, message):
    with pytest.raises(error, match=message):
        decode_audio(data)


def test_limits_headers_and_a_missing_package(monkeypatch):
    limited = for_extension(DECODERS["audio"], "wav", 23_999)
    with pytest.raises(CorruptFileError, match="audio of 3,000 frames in 2 channels takes 24,000 bytes of memory"):
        limited.decode(encoded("WAV"))
    assert for_extension(DECODERS["audio"], "wav", 24_000).decode(encoded("WAV")).shape == (3000, 2)
    with pytest.raises(CorruptFileError, match="audio cannot be decoded: "):
        decode_rate(b"fLaC" + bytes(50))
    piped = bytearray(encoded("WAV"))
    piped[4:8] = piped[piped.index(b"data") + 4 :][:4] = b"\xff" * 4
    np.testing.assert_array_equal(decode_audio(piped), decode_audio(encoded("WAV")))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(
        MissingDependencyError, match=r"decoding audio needs soundfile: pip install 'dataload\[audio\]'"
    ):
        decode_audio(encoded("WAV"))
