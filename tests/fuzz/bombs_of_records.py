"""Bombs of the other formats, and of what records hold: text, headers, compression, nesting, images, audio."""

import gzip
import io
import itertools
import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from bombs import Bomb
from bombs_of_parquet import bombs_of_parquet
from bombs_of_tables import bombs_of_arrow
from mutants import STRUCTURES
from targets import TARGETS
from wire import field, varint

import dataload

MANY = 48 << 20  # bytes of text, three times the limit
CLAIMS = (1 << 31) - 1, (1 << 32) - 1, 1 << 40, (1 << 62) + 1, (1 << 63) - 1, (1 << 64) - 1


def put(name: str, data: Callable[[], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data())
        return folder / name

    return make


# Text.

LINES = {"empty": b"\n", "of Windows": b"\r\n", "blank": b" \n", "short": b"1\n", "objects": b"{}\n", "no end": b" "}
VALUES = {
    "lists": (b"[", b"[],", b"0]"),
    "objects": (b"[", b"{},", b"0]"),
    "numbers": (b"[", b"0,", b"0]"),
    "long numbers": (b"[", b"1e9,", b"0]"),
    "texts": (b"[", b'"",', b"0]"),
    "different texts": (b"[", b'"\xf0\x9f\x98\x80",', b"0]"),
    "nested": (b"", b"[", b""),
    "nested and closed": (b"", b"[[[[[[[]]]]]]]", b""),
    "digits": (b"", b"9", b""),
    "a text with one wide letter": (b'"\xf0\x9f\x98\x80', b"x", b'"'),
    "escapes": (b'"', b"\\u0000", b'"'),
}


def zst(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


def compressions(name: str, data: Callable[[], bytes]) -> Iterator[tuple[str, Callable[[Path], Path]]]:
    yield name, put(name, data)
    yield f"{name}.gz", put(f"{name}.gz", lambda: gzip.compress(data(), 6))
    yield f"{name}.zst", put(f"{name}.zst", lambda: zst(data()))


def value(parts: tuple[bytes, bytes, bytes], size: int) -> bytes:
    first, again, last = parts
    return first + again * (size // len(again)) + last


def bombs_of_jsonl() -> Iterator[Bomb]:
    for name, line in LINES.items():
        for file, make in compressions("x.jsonl", lambda line=line: line * (MANY // len(line))):
            yield Bomb(f"{file} {name} lines", make, {"cache": False})
        yield Bomb(
            f"fewer {name} lines", put("x.jsonl.gz", lambda line=line: gzip.compress(line * (MANY // 5 // len(line))))
        )
    for name, parts in VALUES.items():
        for size in (1 << 19, MANY):
            for file, make in compressions("x.jsonl", lambda p=parts, s=size: b'{"a":' + value(p, s) + b"}\n"):
                yield Bomb(f"{file} {name} {size >> 10} KiB", make, {"cache": False})
    keys = b",".join(b'"%d":0' % n for n in range(60_000))
    yield Bomb("many keys", put("x.jsonl", lambda: b"{" + keys + b"}\n"), {"cache": False})


def bombs_of_csv() -> Iterator[Bomb]:
    texts: dict[str, Callable[[], bytes]] = {
        **{f"{name} lines": lambda line=line: b"x\n" + line * (MANY // len(line)) for name, line in LINES.items()},
        "empty values": lambda: b"a,b,c,d\n" + b",,,\n" * (MANY // 4),
        "few empty values": lambda: b"a,b,c,d\n" + b",,,\n" * (MANY // 16),
        "columns": lambda: b"," * MANY,
        "fewer columns": lambda: b"," * (1 << 18) + b"\n",
        "columns and a row": lambda: b",".join(b"%d" % n for n in range(30_000)) + b"\n" + b"," * 29_999 + b"\n",
        "a text": lambda: b'x\n"' + b"x" * MANY,
        "numbers": lambda: b"x\n" + b"1\n" * (MANY // 8),
        "texts": lambda: b"x\n" + b"a\n" * (MANY // 8),
        "truths": lambda: b"x,y\n" + b"true,1\n" * (MANY // 24),
    }
    for name, data in texts.items():
        for file, make in compressions("x.csv", data):
            yield Bomb(f"{file} {name}", make)


# Arrays and archives.


def npy_header(shape: object, dtype: str = "<f8", extra: str = "") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, {extra}}}".encode()
    text = text.ljust(-(-(len(text) + 11) // 64) * 64 - 11) + b"\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text


ARRAYS = {
    **{f"shape {claim}": npy_header((claim,)) for claim in CLAIMS},
    "product": npy_header((1 << 16,) * 4),
    "nothing times much": npy_header((1 << 62, 0)),
    "much times nothing": npy_header((0, 1 << 62)),
    "axes": npy_header((1,) * 60),
    "wide text": npy_header((1 << 20,), "<U4096"),
    "text without length": npy_header((1 << 40,), "<U0"),
    "nothing of bytes": npy_header((1 << 40,), "|S0"),
    "large header": b"\x93NUMPY\x02\0" + struct.pack("<I", (1 << 32) - 1),
}


def npz(members: dict[str, bytes], claim: int | None = None) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    data = bytearray(stream.getvalue())
    if claim is not None:
        at = data.index(b"PK\1\2")
        data[at + 24 : at + 28] = struct.pack("<I", claim)
    return bytes(data)


def bombs_of_zip() -> Iterator[Bomb]:
    zeros = bytes(MANY)
    files = {
        "deflated": lambda: npz({"a/1.txt": zeros}),
        "deflated below the limit": lambda: npz({f"a/{n}.txt": zeros[: 12 << 20] for n in range(16)}),
        "claims more": lambda: npz({"a/1.txt": b"x"}, (1 << 32) - 2),
        "claims less": lambda: npz({"a/1.txt": zeros}, 100),
        "many members": lambda: npz({f"{n}.txt": b"" for n in range(20_000)}),
    }
    for name, make in files.items():
        yield Bomb(name, put("x.zip", make), {"pattern": "{key}.*"})
    yield from claims_of("npz", "x.zip", {"pattern": "{key}.*"})


def bombs_of_tar() -> Iterator[Bomb]:
    for name, data in {**ARRAYS}.items():
        yield Bomb(f"npy {name}", tar({"a.npy": data}), {"decode": "auto"})
    members = {
        "deflated": npz({"x.npy": npy_header((MANY // 8,)) + bytes(MANY)}),
        "claims more": npz({"x.npy": npy_header((1,)) + bytes(8)}, (1 << 32) - 2),
        "claims less": npz({"x.npy": npy_header((MANY // 8,)) + bytes(MANY)}, 100),
        "many members": npz({f"{n}.npy": npy_header((0, 1 << 62)) for n in range(2000)}),
        "many deflated members": npz({f"{n}.npy": npy_header((1 << 17,)) + bytes(1 << 20) for n in range(64)}),
    }
    for name, data in members.items():
        yield Bomb(f"npz {name}", tar({"a.npz": data}), {"decode": "auto"})
    for name, parts in VALUES.items():
        for size in (1 << 19, MANY // 16):
            yield Bomb(f"json {name} {size}", tar({"a.json": value(parts, size)}), {"decode": "auto"})
    yield Bomb("txt", tar({"a.txt": "😀".encode() + b"x" * (8 << 20)}), {"decode": "auto"})
    yield Bomb("cls", tar({"a.cls": b"9" * (1 << 20)}), {"decode": "auto"})
    for name, data in images():
        yield Bomb(f"image {name}", tar({f"a.{name.split()[0]}": data}), {"decode": "auto"})
        yield Bomb(f"images {name}", tar({f"{n}.{name.split()[0]}": data for n in range(8)}), {"decode": "auto"})
    for name, data in sounds():
        yield Bomb(f"audio {name}", tar({f"a.{name.split()[0]}": data}), {"decode": "auto"})
    for name, data in headers():
        yield Bomb(f"header {name}", put("x.tar", lambda data=data: data), {"cache": False})
    yield from claims_of("tar", "x.tar", {"cache": False})


def tar(members: dict[str, bytes]) -> Callable[[Path], Path]:
    def data() -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for name, content in members.items():
                found = tarfile.TarInfo(name)
                found.size = len(content)
                archive.addfile(found, io.BytesIO(content))
        return stream.getvalue()

    return put("x.tar", data)


def header(name: bytes, size: int, kind: bytes, content: bytes = b"", *, base256: bool = False) -> bytes:
    field = b"\x80" + size.to_bytes(11, "big") if base256 else b"%011o\0" % size
    head = name.ljust(100, b"\0") + b"0000644\0" + bytes(16) + field + bytes(12) + b" " * 8 + kind + bytes(100)
    head = bytearray((head + b"ustar\x0000").ljust(512, b"\0"))
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + content.ljust(-(-len(content) // 512) * 512, b"\0")


def headers() -> Iterator[tuple[str, bytes]]:
    end = bytes(1024)
    another = header(b"a.txt", 1, b"0", b"x") + end
    kinds = {"file": b"0", "long name": b"L", "long link": b"K", "pax": b"x", "global pax": b"g", "sparse": b"S"}
    for (kind, words), size in itertools.product(kinds.items(), (1 << 20, 1 << 30, 1 << 62)):
        yield f"{kind} of {size}", header(b"b.txt", size, words, base256=size > 1 << 32) + another
    for size in (0, 1 << 30, 1 << 40):
        record = b"size=%d\n" % size
        record = b"%d " % (len(record) + 3) + record
        yield f"pax size {size}", header(b"p", len(record), b"x", record) + another
    record = b"GNU.sparse.realsize=%d\n" % (1 << 40)
    yield "pax sparse", header(b"p", len(record) + 3, b"x", b"35 " + record) + another
    name = b"n" * (8 << 20)
    yield "a name of 8 MiB", header(b"l", len(name), b"L", name) + another
    text = b"".join(b"%d %s=%s\n" % (10, b"abc", b"xyz") for _ in range(200_000))
    yield "many words of pax", header(b"p", len(text), b"x", text) + another
    yield "many members of nothing", b"".join(header(b"%d.txt" % n, 0, b"0") for n in range(10_000)) + end
    yield "many members of a sample", b"".join(header(b"a.%d" % n, 0, b"0") for n in range(5_000)) + end
    yield "names with many parts", b"".join(header(b"a" + b".b" * 49, 0, b"0") for n in range(10_000)) + end


# Images and sounds.


def images() -> Iterator[tuple[str, bytes]]:
    from PIL import Image

    side = 5000  # 75 MB as RGB
    large = Image.new("RGB", (side, side))
    for kind in ("png", "jpg", "gif", "webp", "tiff", "bmp"):
        stream = io.BytesIO()
        options = {"compression": "tiff_lzw"} if kind == "tiff" else {}
        shown = Image.new("1", (side, side)) if kind == "bmp" else large
        shown.save(stream, {"jpg": "JPEG"}.get(kind, kind), **options)
        yield f"{kind} large", stream.getvalue()
    stream = io.BytesIO()
    large.save(stream, "JPEG", progressive=True)
    yield "jpg progressive", stream.getvalue()
    yield "jpg scans", scans(stream.getvalue(), 2000)
    for kind in ("gif", "webp", "png", "tiff"):
        stream = io.BytesIO()
        frames = [Image.new("RGB", (200, 200), (n, 0, 0)) for n in range(100)]
        frames[0].save(stream, kind, save_all=True, append_images=frames[1:])
        yield f"{kind} frames", stream.getvalue()
    for width, height in ((1 << 16, 1 << 16), ((1 << 31) - 1, 1), ((1 << 31) - 1, (1 << 31) - 1)):
        chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        data = png_chunk(b"IDAT" + zlib.compress(bytes(1000)))
        yield f"png {width} x {height}", b"\x89PNG\r\n\x1a\n" + png_chunk(chunk) + data
        yield f"ppm {width} x {height}", b"P6\n%d %d\n255\n" % (width, height)
        numbers = 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0
        yield f"bmp {width} x {height}", b"BM" + struct.pack("<IHHIIiiHHIIiiII", *numbers)
    text = b"tEXt" + b"a\0" + b"x" * (1 << 20)
    words = b"zTXt" + b"a\0\0" + zlib.compress(bytes(MANY))
    profile = b"iCCP" + b"a\0\0" + zlib.compress(bytes(MANY))
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "PNG")
    small = stream.getvalue()
    for name, chunk in {"text": text, "compressed text": words, "profile": profile}.items():
        yield f"png {name}", small[:33] + png_chunk(chunk) * 4 + small[33:]


def png_chunk(content: bytes) -> bytes:
    return struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))


def scans(data: bytes, count: int) -> bytes:
    """Repeat the last scan of a progressive JPEG."""
    at = data.rindex(b"\xff\xda")
    return data[:at] + data[at:-2] * count + data[-2:]


def sounds() -> Iterator[tuple[str, bytes]]:
    import soundfile

    for kind, subtype in (("FLAC", None), ("OGG", None), ("OGG", "OPUS")):
        stream = io.BytesIO()
        with soundfile.SoundFile(stream, "w", 48_000, 1, subtype, format=kind) as file:
            for _ in range(240):  # libsndfile crashes if it writes much at once
                file.write(np.zeros(48_000, np.float32))
        yield f"{kind.lower()} silence {subtype or ''}", stream.getvalue()
    for size in ((1 << 31) - 1, (1 << 32) - 1):
        for channels in (1, 1024, 65535):
            rate = 8000 * channels * 2 & 0xFFFFFFFF
            words = struct.pack("<HHIIHH", 1, channels, 8000, rate, channels * 2 & 0xFFFF, 16)
            length = struct.pack("<I", size)
            head = b"RIFF" + length + b"WAVEfmt " + struct.pack("<I", 16)
            yield f"wav {size} {channels}", head + words + b"data" + length + bytes(64)
    stream = io.BytesIO()
    soundfile.write(stream, np.zeros(400, np.float32), 8000, format="FLAC")
    data = bytearray(stream.getvalue())
    data[21:26] = bytes([data[21] | 15]) + b"\xff" * 4  # the number of samples
    yield "flac claims", bytes(data)


# Messages.


def nested(number: int, depth: int) -> bytes:
    found = b""
    for _ in range(depth):
        found = field(number, found)
    return found


def tensor(dims: Iterable[int], kind: int, content: bytes) -> bytes:
    head = b"".join(varint(1 << 3) + varint(dim) for dim in dims) + varint(2 << 3) + varint(kind)
    return field(1, head + content)


def messages() -> dict[str, dict[str, bytes]]:
    return {
        "example": {
            "empty features": field(1, field(1, b"") * 500_000),
            "features": field(1, b"".join(field(1, field(1, b"%d" % n) + field(2, b"")) for n in range(100_000))),
            "bytes": field(1, field(1, field(1, b"a") + field(2, field(1, field(1, b"") * 500_000)))),
            "packed": field(1, field(1, field(1, b"a") + field(2, field(3, field(1, bytes(4 << 20)))))),
            "not packed": field(1, field(1, field(1, b"a") + field(2, field(3, b"\x08\0" * (2 << 20))))),
            "floats": field(1, field(1, field(1, b"a") + field(2, field(2, field(1, b"") * (1 << 20))))),
            "nested": nested(1, 50_000),
            "unknown": b"\x53" * 500_000 + b"\x54" * 500_000,
        },
        "sequence_example": {
            "lists": field(2, field(1, field(1, b"a") + field(2, field(1, b"") * 500_000))),
            "lists of lists": field(
                2, field(1, field(1, b"a") + field(2, field(1, field(3, field(1, b"\0"))) * 200_000))
            ),
            "nested": nested(2, 50_000),
        },
        "tensorprotos": {
            **{f"dims {claim}": tensor([claim], 1, b"") for claim in CLAIMS},
            "product": tensor([1 << 20] * 4, 1, b""),
            "nothing": tensor([0, 1 << 62], 1, b""),
            "many dims": tensor([1] * 200_000, 1, b""),
            "tensors": field(1, b"") * 500_000,
            "texts": tensor([500_000], 4, field(6, b"") * 500_000),
            "numbers": tensor([2 << 20], 2, field(4, bytes(2 << 20))),
            "nested": nested(1, 50_000),
        },
        "msgpack": {
            "list claim": b"\xdd\xff\xff\xff\xff",
            "map claim": b"\xdf\xff\xff\xff\xff",
            "bytes claim": b"\xc6\xff\xff\xff\xff",
            "ext claim": b"\xc9\xff\xff\xff\xff\x05",
            "nested lists": b"\x91" * 500_000,
            "nested claims": b"\xdd\x00\x80\x00\x00" * 400,
            "empty lists": b"\x81\xa1a\xdd" + struct.pack(">I", 1 << 20) + b"\x90" * (1 << 20),
            "empty maps": b"\x81\xa1a\xdd" + struct.pack(">I", 1 << 20) + b"\x80" * (1 << 20),
            "texts": b"\x81\xa1a\xdd" + struct.pack(">I", 1 << 20) + b"\xa0" * (1 << 20),
            "floats": b"\x81\xa1a\xdd" + struct.pack(">I", 1 << 18) + (b"\xca" + bytes(4)) * (1 << 18),
        },
        "npz": {f"npz {n}": npz({"x.npy": data}) for n, data in ARRAYS.items()},
    }  # fmt: skip


def tfrecord(*records: bytes) -> bytes:
    out = bytearray()
    for data in records:
        out += struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)
    return bytes(out)


def bombs_of_tfrecord() -> Iterator[Bomb]:
    for codec, named in messages().items():
        for name, data in named.items():
            yield Bomb(f"{codec} {name}", put("x.tfrecord", lambda data=data: tfrecord(data)), {"codec": codec})
    for claim in CLAIMS:
        data = struct.pack("<Q", claim & (1 << 64) - 1) + bytes(20)
        yield Bomb(f"length {claim}", put("x.tfrecord", lambda data=data: data))
    yield Bomb("records of nothing", put("x.tfrecord", lambda: tfrecord(b"") * 500_000))
    yield Bomb("compressed", put("x.tfrecord.gz", lambda: gzip.compress(tfrecord(b"") * 500_000)))


# Files whose numbers the fuzzer knows.


def claims_of(target: str, name: str, options: dict[str, object], most: int = 60) -> Iterator[Bomb]:
    """Give files with a number that is huge, at each place where the format keeps one."""
    find, repair = STRUCTURES[target if target in STRUCTURES else "npz"]
    for which, seed in enumerate(sorted(TARGETS[target][1](), key=len)[:3] if target in TARGETS else []):
        places = [at for at in (find(seed) if find else []) if at[1]]
        for at, width in places[:: max(1, len(places) // most)]:
            claim = {1: 255, 2: 65535, 4: 0x7FFFFFF0}.get(width, (1 << 62) - 1)
            data = bytearray(seed)
            data[at : at + width] = claim.to_bytes(width, "little")
            if repair is not None:
                repair(data)
            yield Bomb(f"claim at {at} of seed {which}", put(name, lambda data=bytes(data): data), options)


def bson(content: bytes) -> bytes:
    return struct.pack("<i", len(content) + 5) + content + b"\0"


ELEMENTS = {
    "nulls": b"\x0a\0",
    "numbers": b"\x10\0" + bytes([1, 2, 3, 4]),
    "texts": b"\x02\0" + struct.pack("<i", 1) + b"\0",
    "documents": b"\x03\0" + bson(b""),
    "lists": b"\x04\0" + bson(b""),
}


def bombs_of_syrah() -> Iterator[Bomb]:
    table = b"\0" + struct.pack("<iB", 0, 0)
    fields = b"\x05offset" + table + b"\x05size" + table + b"\x02dtype\0" + struct.pack("<i", 5) + b"bool\0"

    def key(number: int, more: bytes = b"") -> bytes:
        return b"\x03%d\0" % number + bson(fields + more)

    documents = {"keys": lambda: bson(b"".join(map(key, range(500_000))))}
    for name, element in ELEMENTS.items():
        many = element * (MANY // len(element))
        documents[f"{name} in a list"] = lambda many=many: bson(b"\x04a\0" + bson(many))
        documents[f"{name} in a document"] = lambda many=many: bson(b"\x03a\0" + bson(many))
        documents[f"{name} beside entries"] = lambda many=many: bson(key(1, b"\x04b\0" + bson(many)))
        documents[f"{name} in a shape"] = lambda many=many: bson(key(1, b"\x03shape\0" + bson(many)))
        documents[name] = lambda many=many: bson(many)

    def nested(kind: bytes) -> bytes:
        found = b""
        for _ in range(20_000):
            found = kind + bson(found)
        return bson(found)

    documents |= {
        f"nested {name}": lambda kind=kind: nested(kind)
        for name, kind in {"lists": b"\x040\0", "documents": b"\x03a\0", "shapes": b"\x03shape\0"}.items()
    }
    for name, document in documents.items():

        def data(document=document) -> bytes:
            content = document()
            return b"GS\0\0\2\0" + struct.pack("<qq", 22, len(content)) + content

        yield Bomb(f"metadata: {name}", put("x.syr", data), {"cache": False})
    yield from claims_of("syrah", "x.syr", {})


def bombs_of_lmdb() -> Iterator[Bomb]:
    yield from claims_of("lmdb_file", "x.lmdb", {"format": "lmdb"}, 150)
    yield from claims_of("lmdb_file", "x.lmdb", {"format": "torchrecord"}, 50)


def bombs_of_array_record() -> Iterator[Bomb]:
    size, count = MANY // 2, 4
    for group, compression in itertools.product((1, 16), ("zstd", "brotli", "snappy")):

        def write(folder: Path, group=group, compression=compression) -> Path:
            path = folder / "x.array_record"
            with dataload.create(path, options=f"group_size:{group},{compression}") as writer:
                writer.extend(bytes(size) for _ in range(count))
            return path

        # The package decompresses what is read together before anybody else knows its size.
        yield Bomb(f"{compression}, groups of {group}", write, more=3 * count * size)
    # The seeds are written by the package, after which it refuses to work in forks.
    yield from claims_of("array_record", "x.array_record", {"cache": False})


# Indexes as JSON.


def bombs_of_mds() -> Iterator[Bomb]:
    golden = Path(__file__).parents[1] / "golden" / "mds" / "all"
    index = json.loads((golden / "index.json").read_text())
    for place, claim in itertools.product(("bytes", "samples", "zip"), CLAIMS):

        def write(folder: Path, place=place, claim=claim) -> Path:
            for file in golden.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
            changed = json.loads(json.dumps(index))
            shard = changed["shards"][0]
            if place == "samples":
                shard["samples"] = claim
            elif place == "bytes":
                shard["raw_data"]["bytes"] = claim
            else:
                shard["zip_data"] = {"basename": shard["raw_data"]["basename"], "bytes": claim, "hashes": {}}
                shard["raw_data"]["bytes"] = claim
                shard["compression"] = changed["shards"][0]["compression"] or "zstd"
            (folder / "index.json").write_text(json.dumps(changed))
            return folder

        yield Bomb(f"{place} {claim}", write)

    def unpacks(folder: Path) -> Path:
        zeros = zst(bytes(MANY))
        (folder / "shard.00000.mds.zstd").write_bytes(zeros)
        shard = dict(index["shards"][0], compression="zstd", samples=1)
        shard["raw_data"] = {"basename": "shard.00000.mds", "bytes": MANY, "hashes": {}}
        shard["zip_data"] = {"basename": "shard.00000.mds.zstd", "bytes": len(zeros), "hashes": {}}
        (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))
        return folder

    yield Bomb("zstd", unpacks)
    yield from of_json("index.json", {})


def of_json(name: str, options: dict[str, object]) -> Iterator[Bomb]:
    """Give texts of 4 MiB as an index."""
    for what, parts in VALUES.items():
        for key in ("shards", "_data_files", "data_sets", "shardlist"):

            def write(folder: Path, parts=parts, key=key) -> Path:
                (folder / name).write_bytes(b'{"version":1,"%s":' % key.encode() + value(parts, 1 << 22) + b"}")
                return folder

            yield Bomb(f"{key} of {what}", write, options, 24)


def bombs_of_wids() -> Iterator[Bomb]:
    for bomb in of_json("x.json", {"format": "wids"}):
        yield Bomb(bomb.name, lambda folder, bomb=bomb: bomb.make(folder) / "x.json", bomb.options, 24)


def bombs_of_tokens() -> Iterator[Bomb]:
    for name, data in ARRAYS.items():
        yield Bomb(
            name, put("x.npy", lambda data=data: data.replace(b"<f8", b"<u2")), {"format": "tokens", "window": 3}
        )
    pad = {"end_token": 0, "ends": "pad"}
    for options in ({"window": 1 << 40}, {"window": 3, **pad}, {"window": 1 << 20, **pad}):
        of_tokens = {"format": "tokens", "dtype": "uint8", **options}
        yield Bomb(f"ends {options}", put("x.bin", lambda: bytes(4 << 20)), of_tokens, 48)


FORMATS = {
    "jsonl": bombs_of_jsonl,
    "csv": bombs_of_csv,
    "zip": bombs_of_zip,
    "tar": bombs_of_tar,
    "tfrecord": bombs_of_tfrecord,
    "syrah": bombs_of_syrah,
    "lmdb": bombs_of_lmdb,
    "array_record": bombs_of_array_record,
    "mds": bombs_of_mds,
    "hugging_face": lambda: of_json("state.json", {"format": "hugging_face"}),
    "manifest": lambda: of_json("dataload.json", {}),
    "wids": bombs_of_wids,
    "tokens": bombs_of_tokens,
    "arrow": bombs_of_arrow,
    "parquet": bombs_of_parquet,
}
