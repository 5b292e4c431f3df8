"""What would take more memory than `max_record_bytes` is refused before it is allocated."""

import io
import itertools
import os
import struct
import subprocess
import sys
import tracemalloc
import zlib

import msgpack
import numpy as np
import PIL.Image
import pytest

from dataload.codecs import example, tensorprotos
from dataload.codecs import msgpack as msgpack_codec
from dataload.codecs.codec import decode_records, resolve_codec
from dataload.codecs.decoders import DECODERS, decode_image, decode_images, find_decoder, for_extension
from dataload.codecs.wire import build_field
from dataload.errors import CorruptFileError, MachineError
from dataload.sources.array_record.tfds import FeaturesCodec, parse_features

TOO_LARGE = r"takes [\d,]+ bytes of memory, and max_record_bytes is {:,}: the file is damaged or malicious; if you "


def image(kind: str, side: int = 1_000) -> bytes:
    stream = io.BytesIO()
    *lossless, kind = kind.split()
    PIL.Image.fromarray(np.zeros((side, side, 3), np.uint8)).save(stream, kind, **dict.fromkeys(lossless, True))
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["jpeg", "png", "gif", "webp", "lossless webp", "tiff", "bmp", "ppm"])
def test_images(kind):
    data, each = image(kind), 24 if kind.endswith("webp") else 12
    limit = 1_000_000 * each
    told = f"an image of 1000 x 1000 pixels; the limit is 999999, with max_record_bytes={limit - 1:,} and {each} bytes"
    with pytest.raises(CorruptFileError, match=told):
        decode_image(data, limit=limit - 1)
    assert decode_images([data, data], limit=limit - 1) is None
    assert decode_image(data, limit=limit).shape == (1_000, 1_000, 3)


PEAKS = """
import io, os, sys, PIL.Image, simplejpeg
from dataload.codecs.decoders import decode_image
from dataload.errors import CorruptFileError
PIL.Image.init()
def peak():
    return int(next(line for line in open("/proc/self/status") if "VmHWM" in line).split()[1]) << 10
def measure(name, data, limit):
    open("/proc/self/clear_refs", "w").write("5")  # the peak is what is in use now
    before = peak()
    try:
        decode_image(data, limit=limit)
    except CorruptFileError:
        assert name == "large"
    print(name, peak() - before)
for path in sys.argv[1:]:
    measure(os.path.basename(path), open(path, "rb").read(), 1 << 30)
stream = io.BytesIO()
PIL.Image.new('P', (9_000, 9_000)).save(stream, 'gif')
assert len(stream.getvalue()) < 200_000
measure("large", stream.getvalue(), 64 << 20)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the peak of a process is in /proc")
def test_decoding_takes_no_more_than_the_limit(tmp_path):
    side = 700
    for mode, kind in itertools.product(("RGB", "RGBA", "P", "CMYK"), ("jpeg", "png", "gif", "webp", "tiff", "bmp")):
        path = tmp_path / f"{mode}.{kind}"
        try:
            image = PIL.Image.new("RGB", (side, side)).convert(mode)
            image.save(path, kind, **({"lossless": True} if kind == "webp" else {}))
        except (OSError, ValueError):
            path.unlink(missing_ok=True)  # this format has no such pictures
    command = [sys.executable, "-c", PEAKS, *sorted(tmp_path.iterdir())]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back, and counts again
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    peaks = {name: int(peak) for name, peak in map(str.split, done.stdout.splitlines())}
    assert peaks.pop("large") < 1 << 24, "a small file of a large picture"
    assert len(peaks) == len(list(tmp_path.iterdir())) >= 18
    most = {name: (24 if name.endswith("webp") else 12.7) * side**2 for name in peaks}
    assert {name: peak for name, peak in peaks.items() if peak >= most[name]} == {}


def test_images_that_claim_a_large_canvas_or_large_tiles_are_not_opened(monkeypatch):
    entries = [(256, 4, 8), (257, 4, 8), (258, 3, 8), (259, 3, 8), (262, 3, 1), (277, 3, 1), (322, 4, 60_000)]
    entries += [(323, 4, 30_000), (324, 4, 200), (325, 4, 10)]
    table = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    data = b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(100)
    with pytest.raises(CorruptFileError, match="an image of 30000 x 60000 pixels; the limit is 89478485"):
        decode_image(data)
    chunk = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + (16_000).to_bytes(3, "little") * 2
    monkeypatch.setattr(PIL.Image, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(CorruptFileError, match="an image of 16001 x 16001 pixels"):
        decode_image(b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk)


def test_json_and_lists_of_msgpack():
    data = b"[" + b"[]," * 10_000 + b"1]"
    with pytest.raises(CorruptFileError, match=r"JSON of 30,003 bytes " + TOO_LARGE.format(900_000)):
        for_extension(DECODERS["json"], "json", 900_000).decode(data)
    assert len(for_extension(DECODERS["json"], "json", 32 * len(data)).decode(data)) == 10_001
    tracemalloc.start()
    DECODERS["json"].decode(data)
    assert tracemalloc.get_traced_memory()[1] < 32 * len(data)
    tracemalloc.stop()
    record = {"x": list(range(300_000)), "y": [[i] for i in range(1_000)]}
    assert msgpack_codec.decode(msgpack.packb(record)) == record
    assert msgpack_codec.decode(msgpack.packb({"x": {1: 2}}), 20_000) == {"x": {1: 2}}
    assert msgpack_codec.decode(msgpack.packb(record), 10_000_000) == record
    data = b"\x81\xa1x" + (b"\xdd" + struct.pack(">I", 500_000)) * 500 + bytes(500_000)
    tracemalloc.start()
    with pytest.raises(CorruptFileError, match="invalid msgpack"):
        msgpack_codec.decode(data, 10_000_000)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000, "they only claim to be long"
    tracemalloc.stop()


@pytest.mark.parametrize("module", [example, tensorprotos])
def test_integers_of_one_byte(module):
    data = module.encode({"x": np.zeros(10_000, np.int64)})
    match = r"a list of 10,000 integers " + TOO_LARGE.format(79_999)
    with pytest.raises(CorruptFileError, match=match):
        module.decode(data, 79_999)
    assert module.decode_batch([data] * 4, None, 79_999) is None
    assert module.decode_batch([data] * 4, None, 80_000)["x"].shape == (4, 10_000)
    assert len(module.decode(data, 80_000)["x"]) == 10_000


def test_tensors_texts_and_features():
    with pytest.raises(CorruptFileError, match=r"a record of 196 tensors and more " + TOO_LARGE.format(100_000)):
        tensorprotos.decode(b"\n\0" * 10_000, 100_000)
    text = build_field(tensorprotos.STRING_DATA, b"")
    with pytest.raises(CorruptFileError, match=r"a tensor of 521 texts and more " + TOO_LARGE.format(100_000)):
        tensorprotos.decode(build_field(tensorprotos.TENSOR, text * 10_000), 100_000)
    data = example.encode({str(i): b"" for i in range(200)})
    with pytest.raises(CorruptFileError, match=r"an Example of 200 features " + TOO_LARGE.format(100_000)):
        example.decode(data, 100_000)
    assert len(example.decode(data, 102_400)) == 200


def zipped(value: bytes) -> bytes:
    return example.encode({"x": zlib.compress(value)})


FEATURES = """{"featuresDict": {"features": {"x": {"pythonClassName": "Tensor", "tensor": {
    "shape": {"dimensions": ["-1"]}, "dtype": "uint8", "encoding": "zlib"}}}}}"""


def test_compressed_tensors_of_tensorflow_datasets():
    codec = parse_features(FEATURES, "features.json", limit=1_000_000)
    assert len(codec.decode(zipped(bytes(1_000_000)))["x"]) == 1_000_000
    tracemalloc.start()
    with pytest.raises(
        CorruptFileError, match="feature 'x': the first part of a compressed array " + TOO_LARGE.format(10**6)
    ):
        codec.decode(zipped(bytes(50_000_000)))
    tracemalloc.stop()
    with pytest.raises(CorruptFileError, match="incomplete or truncated stream"):
        codec.decode(example.encode({"x": zlib.compress(bytes(1_000))[:-5]}))
    assert repr(codec) == repr(FeaturesCodec(codec.features)), "fingerprints contain it"


def test_memory_that_there_is_not(monkeypatch):
    def fail(data):
        raise MemoryError

    message = "a.bin, record 7: decoding it needs more memory than this process may have: use fewer workers, or lower"
    with pytest.raises(MachineError, match=message):
        decode_records(resolve_codec(fail), [b""], [7], "a.bin")
    monkeypatch.setattr(tensorprotos, "scan_record", lambda *_: fail(b""))
    with pytest.raises(MachineError, match=message):
        decode_records(resolve_codec("tensorprotos"), [b""], [7], "a.bin")
    own = find_decoder(len, "x.npz")
    assert for_extension(own, "x.npz", 1) is own, "decoders of the user have no limit"
