"""Audio in archives: decoded samples, and their rate in a field of its own."""

import io

import numpy as np
import pytest
import soundfile

import dataload
from dataload.errors import CorruptFileError
from dataload.types import FieldSpec


def clip(frames, rate=8_000, kind="WAV"):
    stream = io.BytesIO()
    soundfile.write(stream, np.linspace(-0.5, 0.5, frames, dtype=np.float32), rate, format=kind)
    return stream.getvalue()


def archive(path, records):
    with dataload.create(path) as writer:
        for record in records:
            writer.write(record)
    return path


def test_samples_and_rates(tmp_path):
    records = [{"audio.wav": clip(40), "cls": b"1"}, {"audio.flac": clip(40, 16_000, "FLAC"), "cls": b"2"}]
    source = dataload.open(archive(tmp_path / "a.tar", records), decode="auto")
    assert {name: str(spec) for name, spec in source.fields.items()} == {
        "__key__": "str ()", "audio": "float32 (?, ?)", "cls": "int64 ()", "sample_rate": "int64 ()",
    }  # fmt: skip
    first, second = source.read([0, 1])
    for record, value in zip((first, second), records, strict=True):
        wanted, rate = soundfile.read(io.BytesIO(next(iter(value.values()))), dtype="float32", always_2d=True)
        np.testing.assert_array_equal(record["audio"], wanted)
        assert record["sample_rate"] == rate
    batch = source.read_batch([1, 0], ["sample_rate", "audio"])
    assert batch["sample_rate"].tolist() == [16_000, 8_000]
    assert batch["audio"].shape == (2, 40, 1)


def test_samples_with_different_files(tmp_path):
    records = [{"wav": clip(10)}, {"wav": clip(20), "txt": "a"}, {"txt": "b"}]
    source = dataload.open(archive(tmp_path / "a.tar", records), decode="auto")
    found = source.read([0, 1, 2])
    assert [sorted(record) for record in found] == [
        ["__key__", "wav", "wav.sample_rate"], ["__key__", "txt", "wav", "wav.sample_rate"], ["__key__", "txt"],
    ]  # fmt: skip
    assert found[1]["wav.sample_rate"] == 8_000
    with dataload.open(tmp_path / "a.tar", decode={"wav": "bytes"}) as plain:
        assert plain.fields["wav"] == FieldSpec("bytes", ())
        assert "wav.sample_rate" not in plain.fields


def test_a_damaged_clip_is_named(tmp_path):
    path = archive(tmp_path / "a.tar", [{"wav": clip(10)}, {"wav": clip(10)[:-4]}])
    with dataload.open(path, decode="auto") as source, pytest.raises(CorruptFileError, match="is cut after") as caught:
        source.read_batch([0, 1])
    assert (caught.value.path, caught.value.index) == (str(path), 1)
