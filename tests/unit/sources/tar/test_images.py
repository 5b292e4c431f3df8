"""Images and audio in archives: batches equal single records, and count as decoding."""

import io

import numpy as np
import PIL.EpsImagePlugin
import PIL.Image
import pytest
import simplejpeg
import soundfile
from made_files import clip, image, pack
from refusals import refuses

import dataload
from dataload.collate import default_collate
from dataload.errors import CorruptFileError
from dataload.sources.tar.reader import TarSource
from dataload.testing.compare import difference

COUNT = 6
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 96, 160, 3), np.uint8)


def jpeg(index, width=160):
    return simplejpeg.encode_jpeg(np.ascontiguousarray(PIXELS[index, :, :width]))


def assert_same(source, indices):
    batch = source.read_batch(indices)
    assert difference(batch, default_collate(source.read(indices)), "batch") is None
    return batch


def test_a_batch_of_one_size(tmp_path):
    files = {f"{i}.{e}": jpeg(i) if e == "jpg" else b"1" for i in range(6) for e in ("jpg", "cls")}
    path = pack(tmp_path / "x.tar", files)
    assert assert_same(TarSource(path, decode="auto"), [4, 1, 1, 0])["jpg"].shape == (4, 96, 160, 3)
    paths = [pack(tmp_path / f"{i}.tar", {f"{i}.jpg": jpeg(i), f"{i}b.jpg": jpeg(i + 1)}) for i in range(3)]
    assert_same(TarSource(paths, decode="auto"), [5, 0, 3, 2, 0])
    for decode in (None, {"cls": "cls"}):
        assert TarSource(path, decode=decode).read_batch([1])["jpg"] == [jpeg(1)]
    assert TarSource(path, decode={"jpg": len}).read_batch([1])["jpg"].tolist() == [len(jpeg(1))]


@pytest.mark.parametrize("options", [{}, {"fields": ["jpg"], "missing": "empty"}])
def test_sizes_that_differ_and_damage(tmp_path, options):
    path = pack(tmp_path / "x.tar", {"a.jpg": jpeg(0), "b.jpg": jpeg(1, 100), "c.jpg": jpeg(1)[:-400]})
    source = TarSource(path, decode="auto", **options)
    assert_same(source, [1])
    message = r"cannot stack field 'jpg': row 0 is uint8 \(96, 160, 3\), row 1 is uint8 \(96, 100, 3\)"
    with pytest.raises(ValueError, match=message):
        source.read_batch([0, 1])
    with pytest.raises(CorruptFileError, match=r"record 2: field 'jpg' of 'c': a JPEG image cannot be decoded"):
        source.read_batch([0, 2])


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
SUFFIXES = {"jpg": "jpeg", "JPEG": "jpeg", "png": "png", "ppm": "ppm", "pgm": "ppm", "bmp": "bmp", "webp": "webp",
            "gif": "gif", "tif": "tiff", "tiff": "tiff"}  # fmt: skip


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs that Pillow may start, each of which leaves a file; returns a function that tells which were started."""
    for name in ("gs", "djpeg", "gswin32c", "gswin64c"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\ntouch '{tmp_path}/started-{name}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setattr(PIL.EpsImagePlugin, "gs_binary", None, raising=False)
    return lambda: [found.name for found in tmp_path.glob("started-*")]


def test_pillow_would_start_a_program(programs):
    with pytest.raises(OSError), PIL.Image.open(io.BytesIO(EPS)) as opened:
        opened.load()
    assert programs() == ["started-gs"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_image_is_decoded_as_its_name_says_and_never_by_a_program(tmp_path, programs, suffix):
    kinds = {SUFFIXES[suffix]: None, **dict.fromkeys(SUFFIXES.values())}  # that of the suffix is first
    pictures = {kind.upper(): image(np.zeros((8, 8, 3), np.uint8), kind) for kind in kinds}
    contents = [
        *pictures.items(),
        *(("EPS", EPS), ("EPS", b"\xc5\xd0\xd3\xc6" + EPS), ("PDF", b"%PDF-1.4"), (None, b"text")),
    ]
    files = {f"{number}.{suffix}": data for number, (_, data) in enumerate(contents)}
    for decode in ("auto", dict.fromkeys(SUFFIXES, "image")):
        source = TarSource(pack(tmp_path / "a.tar", files), decode=decode)
        assert source[0][suffix].shape == (8, 8, 3)
        message = f"an image that is named as {SUFFIXES[suffix].upper()} cannot be decoded as such: "
        for number, (name, _) in [*enumerate(contents)][1:]:
            found = "it begins with b'text'" if name is None else f"its content is {name}: rename it by its format, or"
            refuses(source, [0, number], f"field '{suffix}' of '{number}': {message}{found}")
    assert programs() == []


def test_samples_and_rates(tmp_path):
    records = [{"audio.wav": clip(40), "cls": b"1"}, {"audio.flac": clip(40, 16_000, "FLAC"), "cls": b"2"}]
    with dataload.create(tmp_path / "a.tar") as writer:
        writer.extend(records)
    source = dataload.open(tmp_path / "a.tar", decode="auto")
    assert {name: str(spec) for name, spec in source.fields.items()} == {
        "__key__": "str ()", "audio": "float32 (?, ?)", "cls": "int64 ()", "sample_rate": "int64 ()",
    }  # fmt: skip
    for record, value in zip(source, records, strict=True):
        wanted, rate = soundfile.read(io.BytesIO(next(iter(value.values()))), dtype="float32", always_2d=True)
        np.testing.assert_array_equal(record["audio"], wanted)
        assert record["sample_rate"] == rate
    batch = source.read_batch([1, 0], ["sample_rate", "audio"])
    assert batch["sample_rate"].tolist() == [16_000, 8_000]
    assert batch["audio"].shape == (2, 40, 1)
