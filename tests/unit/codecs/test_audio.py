"""Audio as soundfile decodes it; what is cut, damaged, or claims too much."""

from __future__ import annotations

import io
import struct
import sys

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


def test_files_that_were_written_to_a_pipe():
    flac = bytearray(encoded("FLAC"))
    flac[21] &= 0xF0  # 36 bits of the number of frames
    flac[22:26] = bytes(4)
    with pytest.raises(
        UnsupportedFormatError, match="does not say how many frames it has, because it was written to a"
    ):
        decode_audio(flac)
    wav = bytearray(encoded("WAV"))
    wav[4:8] = wav[wav.index(b"data") + 4 :][:4] = b"\xff" * 4
    np.testing.assert_array_equal(decode_audio(wav), decode_audio(encoded("WAV")))


def test_a_header_that_claims_too_much():
    flac = bytearray(encoded("FLAC"))
    flac[21] |= 0x0F
    flac[22:26] = b"\xff" * 4
    message = (
        r"audio of 68,719,476,735 frames in 2 channels takes 549,755,813,880 bytes of memory, and max_record_bytes"
    )
    with pytest.raises(CorruptFileError, match=message):
        decode_audio(flac)
    limited = for_extension(DECODERS["audio"], "wav", 23_999)
    with pytest.raises(CorruptFileError, match="audio of 3,000 frames in 2 channels takes 24,000 bytes of memory"):
        limited.decode(encoded("WAV"))
    wav = bytearray(encoded("WAV"))
    wav[22:24] = struct.pack("<H", 60_000)
    with pytest.raises(CorruptFileError, match=r"audio cannot be decoded: .*channels"):
        decode_audio(wav)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
@pytest.mark.parametrize("part", [0.4, 0.99])
def test_a_file_that_is_cut(kind, part):
    data = encoded(kind)
    with pytest.raises(CorruptFileError, match=r"is cut after|cannot be decoded"):
        decode_audio(data[: int(part * len(data))])


def test_messages():
    wav, ogg = encoded("WAV"), encoded("OGG")
    with pytest.raises(CorruptFileError, match=r"a WAV file of 12,044 bytes is cut after 12,000"):
        decode_audio(wav[:12_000])
    with pytest.raises(CorruptFileError, match=r"an Ogg file of [\d,]+ bytes or more is cut after [\d,]+"):
        decode_audio(ogg[:-1])
    for data, begin in (
        (b"", "it is empty"),
        (b"fLaX1234", "it begins with b'fLaX1234'"),
        (b"FORM\0\0\0\0AIFF", "FORM"),
    ):
        with pytest.raises(
            CorruptFileError, match=f"audio cannot be decoded: .*{begin}.*known are WAV, FLAC, MP3 and "
        ):
            decode_audio(data)
    with pytest.raises(CorruptFileError, match="audio cannot be decoded: "):
        decode_rate(b"fLaC" + bytes(50))


def test_another_format_behind_a_tag():
    tagged = b"ID3\x04\0\0\0\0\0\0" + encoded("AIFF")
    with pytest.raises(CorruptFileError, match="audio cannot be decoded: "):
        decode_audio(tagged)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(
        MissingDependencyError, match=r"decoding audio needs soundfile: pip install 'dataload\[audio\]'"
    ):
        decode_audio(encoded("WAV"))
