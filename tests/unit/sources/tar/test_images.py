"""Batches of images, decoded into one array, equal those of single records, and count as decoding."""

import io
import pickle
import tarfile

import numpy as np
import PIL.EpsImagePlugin
import PIL.Image
import pytest
import simplejpeg

from dataload import CorruptFileError, Loader
from dataload._util import decoding as decoding_module
from dataload.codecs.decoders import decode_images
from dataload.collate import default_collate
from dataload.executors import WorkerStatus
from dataload.loader import fetch as fetch_module
from dataload.loader.fetch import Fetcher
from dataload.loader.recorder import Recorder
from dataload.loader.step import StepRange, StepWork
from dataload.samplers import BatchSampler, Sequential
from dataload.sources.tar import shard
from dataload.sources.tar.reader import TarSource
from dataload.testing.compare import difference
from dataload.transforms import compose
from dataload.types import FieldSpec

COUNT = 6
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 96, 160, 3), np.uint8)


def jpeg(index, width=160):
    return simplejpeg.encode_jpeg(np.ascontiguousarray(PIXELS[index, :, :width]))


def pack(path, files):
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def path(tmp_path):
    return pack(
        tmp_path / "x.tar", {f"{i}.{e}": jpeg(i) if e == "jpg" else b"1" for i in range(6) for e in ("jpg", "cls")}
    )


def assert_same(source, indices):
    batch = source.read_batch(indices)
    assert difference(batch, default_collate(source.read(indices)), "batch") is None
    return batch


def test_a_batch_of_one_size(path):
    batch = assert_same(TarSource(path, decode="auto"), [4, 1, 1, 0])
    assert batch["jpg"].shape == (4, 96, 160, 3)


def test_several_archives(tmp_path):
    paths = [pack(tmp_path / f"{i}.tar", {f"{i}.jpg": jpeg(i), f"{i}b.jpg": jpeg(i + 1)}) for i in range(3)]
    assert_same(TarSource(paths, decode="auto"), [5, 0, 3, 2, 0])


@pytest.mark.parametrize("options", [{}, {"fields": ["jpg"], "missing": "empty"}])
def test_sizes_that_differ_are_the_error_of_collation(tmp_path, options):
    path = pack(tmp_path / "x.tar", {"a.jpg": jpeg(0), "b.jpg": jpeg(1, 100)})
    source = TarSource(path, decode="auto", **options)
    assert_same(source, [1])
    with pytest.raises(
        ValueError, match=r"cannot stack field 'jpg': row 0 is uint8 \(96, 160, 3\), row 1 is uint8 \(96, 100, 3\)"
    ):
        source.read_batch([0, 1])


def test_a_missing_image_is_an_empty_one(tmp_path):
    path = pack(tmp_path / "x.tar", {"a.cls": b"1", "b.jpg": jpeg(0)})
    source = TarSource(path, decode="auto", fields=["jpg"], missing="empty")
    assert_same(source, [1])
    assert assert_same(source, [0])["jpg"].shape == (1, 0, 0, 3)


def test_a_damaged_image_is_named(tmp_path):
    path = pack(tmp_path / "x.tar", {"a.jpg": jpeg(0), "b.jpg": jpeg(1)[:-400]})
    with pytest.raises(
        CorruptFileError, match=r"byte \d+, record 1: field 'jpg' of 'b': a JPEG image cannot be decoded"
    ):
        TarSource(path, decode="auto").read_batch([0, 1])


def test_only_what_is_to_be_decoded_is(path):
    assert TarSource(path).read_batch([1])["jpg"] == [jpeg(1)]
    assert TarSource(path, decode={"cls": "cls"}).read_batch([1])["jpg"] == [jpeg(1)]
    mine = TarSource(path, decode={"jpg": len}).read_batch([1])["jpg"]
    assert mine.tolist() == [len(jpeg(1))]


def test_memory_is_used_again_by_all_archives(tmp_path):
    paths = [pack(tmp_path / f"{i}.tar", {f"{k}.jpg": jpeg(k) for k in range(COUNT)}) for i in range(2)]
    source = TarSource(paths, decode="auto", fields=["jpg"])
    rows = np.arange(COUNT)
    parts = [source._data_set().reader(i).read_batch(rows, None)["jpg"].ctypes.data for i in (0, 1)]
    assert parts[0] == parts[1]


@pytest.mark.parametrize(
    "options", [{"decode": "auto"}, {"decode": {"jpg": lambda data: simplejpeg.decode_jpeg(data)}}]
)
@pytest.mark.parametrize("transform", [None, dict])
def test_images_in_memory_are_limited_by_decoding(path, options, transform, monkeypatch):
    now = [0.0]
    for module in (fetch_module, decoding_module):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def slow(data, *arguments, **settings):
        now[0] += 1
        return decode(data, *arguments, **settings)

    decode = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", slow)
    source = TarSource(path, fields=["jpg"], **options)
    settings = {"fields": None, "collate": default_collate, "batch_transform": None, "seed": 0}
    fetch = Fetcher(source=source, transform=compose(transform), **settings)
    work = StepWork(fetch, BatchSampler(sampler=Sequential(COUNT), batch_size=2))
    made = Recorder(clock=lambda: now[0], cpu_clock=lambda: now[0])
    made.resume()
    for step in range(3):
        made.begin_wait()
        (loaded,) = work(StepRange(0, 0, step, step + 1), WorkerStatus()).loaded
        assert loaded.spans[:2] == [("read", 2 * step, 2 * step), ("decode", 2 * step, 2 * step + 2)]
        made.end_wait(loaded)
    assert made.snapshot(0).verdict.startswith("limit: decode (100% of the work); the consumer waits 100% of the time")


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_workers_report_decoding_too(path, executor):
    source = TarSource(path, fields=["jpg"], decode="auto")
    with Loader(source, batch_size=2, num_workers=1, executor=executor) as loader:
        assert len(list(loader)) == 3
        stages = loader.statistics().stages
    assert {name: stage.runs for name, stage in stages.items()} == {"read": 3, "decode": 3}


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
SUFFIXES = {"jpg": "jpeg", "JPEG": "jpeg", "png": "png", "ppm": "ppm", "pgm": "ppm", "bmp": "bmp", "webp": "webp",
            "gif": "gif", "tif": "tiff", "tiff": "tiff"}  # fmt: skip


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs that Pillow may start, each of which leaves a file; returns a function that tells which were started."""
    for name in ("gs", "djpeg", "gswin32c", "gswin64c"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started-{name}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setattr(PIL.EpsImagePlugin, "gs_binary", None, raising=False)
    return lambda: [found.name for found in tmp_path.glob("started-*")]


def test_pillow_would_start_a_program(programs):
    with pytest.raises(OSError), PIL.Image.open(io.BytesIO(EPS)) as image:
        image.load()
    assert programs() == ["started-gs"]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("decode", ["auto", dict.fromkeys(SUFFIXES, "image")])
def test_an_image_is_decoded_as_its_name_says_and_never_by_a_program(tmp_path, programs, suffix, decode):
    stream = io.BytesIO()
    PIL.Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, SUFFIXES[suffix])
    for content, name in ((EPS, "EPS"), (b"\xc5\xd0\xd3\xc6" + EPS, "EPS"), (b"%PDF-1.4", "PDF"), (b"text", None)):
        path = pack(tmp_path / "a.tar", {f"0.{suffix}": stream.getvalue(), f"1.{suffix}": content})
        source = TarSource(path, decode=decode)
        assert source[0][suffix].shape == (8, 8, 3)
        found = "it begins with b'text'" if name is None else f"its content is {name}: name it as what it is, or decode"
        kind = SUFFIXES[suffix].upper()
        with pytest.raises(
            CorruptFileError,
            match=f"field '{suffix}' of '1': an image that is named as {kind} cannot be decoded as such: {found}",
        ):
            source.read_batch([0, 1])
    assert programs() == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_image_of_another_format_than_its_name_says(tmp_path, suffix):
    files = {}
    for i, kind in enumerate(dict.fromkeys(SUFFIXES.values())):
        stream = io.BytesIO()
        PIL.Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, kind)
        files[f"{i}.{suffix}"] = stream.getvalue()
    source = TarSource(pack(tmp_path / "a.tar", files), decode="auto")
    for i, kind in enumerate(dict.fromkeys(SUFFIXES.values())):
        if kind == SUFFIXES[suffix]:
            assert source[i][suffix].shape == (8, 8, 3)
        else:
            match = f"an image that is named as {SUFFIXES[suffix].upper()} cannot be decoded as such: its content is "
            with pytest.raises(CorruptFileError, match=match + kind.upper()):
                source[i]
            with pytest.raises(CorruptFileError, match=match + kind.upper()):
                source.read_batch([i, i])


def test_a_field_of_several_formats(tmp_path):
    files = {}
    for i, kind in enumerate(["jpg", "png", "jpg", "png"]):
        stream = io.BytesIO()
        PIL.Image.fromarray(np.full((8, 8, 3), 50 * i, np.uint8)).save(stream, SUFFIXES[kind])
        files[f"{i}.view.{kind}"] = stream.getvalue()
    source = TarSource(pack(tmp_path / "a.tar", files), decode="auto")
    assert source.fields["view"] == FieldSpec("uint8", (None, None, 3))
    assert source.read_batch([0, 1, 2, 3])["view"][:, 0, 0, 0].tolist() == [0, 50, 100, 150]
    files["1.view.png"] = files["0.view.jpg"]
    with pytest.raises(CorruptFileError, match="named as PNG cannot be decoded as such: its content is JPEG"):
        TarSource(pack(tmp_path / "b.tar", files), decode="auto").read_batch([0, 1])


def test_batches_are_decoded_at_once_after_pickling(path, monkeypatch):
    source = pickle.loads(pickle.dumps(TarSource(path, decode={"jpg": "image"})))
    called = []
    monkeypatch.setattr(shard, "decode_images", lambda *given: called.append(given[1:]) or decode_images(*given))
    source.read_batch([0, 1])
    assert called == [("JPEG", 1 << 30)]
