"""Mutants of good inputs that know how formats are built: lengths, offsets, page numbers, varints, numbers as text.

A mutant is a pure function of its target's name and its number, so that any of them can be made again.
"""

import re
import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from dataload.sources.array_record.layout import HASH_KEY
from dataload.storage.core import core

Field = tuple[int, int]
"""Offset of a number in a file, and its bytes; 0 bytes for a varint."""

_PIECES = [b"\0", b"\xff", b"\x80", b"\x7f", b"\0" * 8, b"\xff" * 8, b"\xff" * 4 + b"\x7f", b"\n", b" ", b"..", b"/"]
_DIGITS = re.compile(rb"\d{1,20}")
_SHAPE = re.compile(rb"-?\d{1,20}(?:, ?-?\d{1,20}){1,8}|(?<=\[)\d{1,20}(?=\])")
_WORD = re.compile(rb"[A-Za-z_]{2,40}")
_EXTENTS = (0, 1, 2, -1, 1 << 31, 1 << 32, 1 << 33, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64)
_MOST_CHANGES = 3
_BLOCK = 65536  # of a Riegeli file


def make_mutant(name: str, number: int, seeds: Sequence[bytes]) -> bytes:
    """Return mutant `number` of a target's inputs."""
    random = Random(f"{name}/{number}")
    data = bytearray(random.choice(seeds))
    return change(name, data, random, seeds)


def change(name: str, data: bytearray, random: Random, seeds: Sequence[bytes]) -> bytes:
    """Change an input in one to three places, and mostly make its checksums right again."""
    find, repair = STRUCTURES.get(name, (None, None))
    fields = find(bytes(data)) if find is not None else []
    for _ in range(random.randint(1, _MOST_CHANGES)):
        if fields and random.random() < 0.6:
            set_number(data, random, *random.choice(fields))
        else:
            random.choice(_CHANGES)(data, random, seeds)
    if repair is not None and random.random() < 0.7:
        repair(data)
    return bytes(data)


def place_of(data: bytearray, random: Random) -> int:
    """Return an offset, mostly near the beginning, where headers are."""
    return random.randrange(min(len(data), random.choice((64, 512, 4096, 1 << 30))) or 1)


def number_for(data: bytearray, random: Random, old: int, bits: int) -> int:
    """Return a number that a careless parser may believe."""
    some = random.randrange(len(data) or 1)
    chosen = random.choice((
        0, 1, 2, old + 1, old - 1, 2 * old, old // 2, old ^ 1 << random.randrange(bits), old + 4096, len(data),
        len(data) + 1, len(data) - old, some, some // 4096, -1, 1 << bits - 1, (1 << bits - 1) - 1, -some,
        1 << random.randrange(bits),
    ))  # fmt: skip
    return chosen % (1 << bits)


def set_number(data: bytearray, random: Random, offset: int, width: int) -> None:
    """Replace a number, little-endian or a varint, unless an earlier change has cut it off."""
    if offset >= len(data):
        return
    if not width:
        set_varint(data, random, offset)
        return
    old = int.from_bytes(data[offset : offset + width], "little")
    new = number_for(data, random, old, 8 * width).to_bytes(width, "little")
    data[offset : offset + width] = new[: len(data) - offset]


def set_varint(data: bytearray, random: Random, offset: int) -> None:
    stop = offset
    while stop < len(data) - 1 and data[stop] & 0x80 and stop - offset < 9:
        stop += 1
    old = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(data[offset : stop + 1]))
    value = number_for(data, random, old, random.choice((7, 14, 32, 63, 64)))
    new = bytearray()
    while value > 0x7F:
        new.append(value & 0x7F | 0x80)
        value >>= 7
    new.append(value)
    if random.random() < 0.1:  # longer than it need be, or endless
        new[-1] |= 0x80
        new += b"\x80" * random.randrange(10) + random.choice((b"\0", b"\x01", b"\xff"))
    data[offset : stop + 1] = new


def _set_any_number(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    offset, width = place_of(data, random), random.choice((0, 1, 2, 4, 8))
    if random.random() < 0.5:
        offset -= offset % (width or 1)
    set_number(data, random, offset, width)


def _set_text_number(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    start = place_of(data, random)
    found = _DIGITS.search(data, start) or _DIGITS.search(data)
    if found is None:
        return
    text = b"%d" % number_for(data, random, int(found[0]), random.choice((8, 16, 32, 64)))
    if random.random() < 0.5:  # fields of a fixed width
        text = text[: len(found[0])].rjust(len(found[0]), b"0")
    data[found.start() : found.end()] = text if random.random() < 0.95 else b"9" * random.choice((20, 5000))


def _set_piece(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    offset, piece = place_of(data, random), random.choice(_PIECES)
    data[offset : offset + len(piece)] = piece


def _flip(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _insert(data: bytearray, random: Random, seeds: Sequence[bytes]) -> None:
    offset = place_of(data, random)
    other = random.choice(seeds)
    start = random.randrange(len(other) or 1)
    data[offset:offset] = random.choice((random.choice(_PIECES), other[start : start + random.choice((8, 64, 512))]))


def _delete(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    offset = place_of(data, random)
    del data[offset : offset + random.choice((1, 2, 8, 64, 512, 4096))]


def _cut(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    del data[random.randrange(len(data) or 1) :]


def _copy(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    """Copy a part over another of the same length, aligned as records or pages are."""
    unit = random.choice((1, 8, 512, 4096))
    source, target = (random.randrange(len(data) // unit or 1) * unit for _ in range(2))
    part = data[source : source + unit * random.randint(1, 4)]
    data[target : target + len(part)] = part


def _repeat(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    offset = place_of(data, random)
    data[offset:offset] = data[offset : offset + random.choice((1, 8, 64, 512))] * random.choice((1, 1, 1, 30))


def _set_extents(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    """Set numbers that follow each other, as those of a shape do, to some whose product overflows."""
    width, count = random.choice((4, 8)), random.choice((1, 2, 2, 3))
    new = [random.choice(_EXTENTS) for _ in range(count)]
    start = place_of(data, random)
    found = _SHAPE.search(data, start) or _SHAPE.search(data)
    if found is None or random.random() < 0.4:
        start -= start % random.choice((1, width))
        for place, extent in enumerate(new):
            at = start + place * width
            data[at : at + width] = (extent % (1 << 8 * width)).to_bytes(width, "little")[: max(0, len(data) - at)]
        return
    if random.random() < 0.5:  # where lengths are stored, too
        changed = b"".join(b"%d" % random.randrange(10) if 48 <= byte < 58 else bytes([byte]) for byte in found[0])
    else:
        changed = b", ".join(b"%d" % extent for extent in new)
    _replace(data, found, changed, everywhere=random.random() < 0.7)


def _spoil_text(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    """Replace a word by one of the same length that is not UTF-8, mostly in each copy of it."""
    start = place_of(data, random)
    found = _WORD.search(data, start) or _WORD.search(data)
    if found is not None:
        changed = bytearray(found[0])
        changed[random.randrange(len(changed))] = random.choice((0xFF, 0x80, 0xC3, 0xED, 0xF5))
        _replace(data, found, bytes(changed), everywhere=random.random() < 0.7)


def _replace(data: bytearray, found: re.Match[bytes], new: bytes, *, everywhere: bool) -> None:
    """Replace what was found there, or in all places: some files hold their metadata twice."""
    old = bytes(found[0])
    if everywhere:
        data[:] = data.replace(old, new)
    else:
        data[found.start() : found.end()] = new


_CHANGES = (
    _set_any_number, _set_any_number, _set_text_number, _set_piece, _flip, _insert, _delete, _cut, _copy, _repeat,
    _set_extents, _spoil_text,
)  # fmt: skip


# Where the numbers of a format are, and how its checksums are made right.


def lmdb_fields(data: bytes) -> list[Field]:
    """Return the fields of meta pages, page headers and nodes."""
    size, page = 16, 4096
    fields = [(start + size + at, 8) for start in (0, page) for at in range(0, 136, 8)]
    for start in range(0, len(data) - page + 1, page):
        fields += (start, 8), (start + size - 6, 2), (start + size - 4, 2), (start + size - 2, 2), (start + size - 4, 4)
        lower = struct.unpack_from("<H", data, start + size - 4)[0]
        for place in range(start + size, start + min(lower, size + 32), 2):
            node = start + struct.unpack_from("<H", data, place)[0]
            fields += (place, 2), (node, 4), (node + 4, 2), (node + 6, 2), (node + 8, 8), (node + 9, 8)
    return [(offset, width) for offset, width in fields if offset + width <= len(data)]


def riegeli_fields(data: bytes) -> list[Field]:
    """Return the fields of block headers, of the chunk headers behind them, and of the footer."""
    fields: list[Field] = []
    for start in _chunks_of(data):
        fields += [(start + at, 8) for at in range(0, 40, 8)]
        fields += [(start + 24, 1), (start + 25, 4), (start + 40, 0), (start + 41, 0), (start + 42, 0), (start + 43, 0)]
    fields += [(start + at, 8) for start in range(0, len(data), _BLOCK) for at in (0, 8, 16)]
    return [(offset, width) for offset, width in fields if offset + 8 <= len(data)]


def _chunks_of(data: bytes | bytearray) -> list[int]:
    found, at = [], 64  # after the block header and the signature
    while at + 40 <= len(data) and len(found) < 100:
        found.append(at)
        length = 40 + struct.unpack_from("<Q", data, at + 8)[0]
        while length > 0 and at < len(data):
            part = min(length, _BLOCK - at % _BLOCK)
            at += part
            length -= part
            at += 24 if at % _BLOCK == 0 else 0
    last = (len(data) - 1) // _BLOCK * _BLOCK + 24
    return [*found, last] if last not in found and 0 <= last <= len(data) - 40 else found


def riegeli_repair(data: bytearray) -> None:
    """Make the hashes of block headers, chunk headers and chunks right."""
    for start in _chunks_of(data):
        stop = start + 40 + struct.unpack_from("<Q", data, start + 8)[0]
        if stop <= len(data) and start // _BLOCK == (stop - 1) // _BLOCK:
            data[start + 16 : start + 24] = _hash(data[start + 40 : stop])
        data[start : start + 8] = _hash(data[start + 8 : start + 40])
    for start in range(0, len(data) - 24, _BLOCK):
        data[start : start + 8] = _hash(data[start + 8 : start + 24])


def _hash(data: bytearray) -> bytes:
    out = np.empty(1, np.uint64)
    core().hash_ranges(out, bytes(data), np.zeros(1, np.int64), np.array([len(data)]), HASH_KEY, -1)
    return out.tobytes()


def tar_fields(data: bytes) -> list[Field]:
    """Return the digits of sizes and the flags of types."""
    headers = [start for start in range(0, len(data) - 511, 512) if data[start + 257 : start + 262] == b"ustar"]
    return [(at + n, width) for at in headers for n, width in ((124, 8), (128, 4), (132, 2), (134, 1), (156, 1))]


def tar_repair(data: bytearray) -> None:
    """Make the checksums of headers right."""
    for start in range(0, len(data) - 511, 512):
        if data[start + 257 : start + 262] == b"ustar":
            data[start + 148 : start + 156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])


def syrah_fields(data: bytes) -> list[Field]:
    """Return the header's numbers, and lengths, types and items anywhere in the metadata, a BSON document."""
    start = min(max(int.from_bytes(data[6:14], "little"), 22), len(data))
    return [(6, 8), (14, 8), *((at, width) for at in range(start, min(len(data), start + 2000)) for width in (1, 4, 8))]


def zip_fields(data: bytes) -> list[Field]:
    """Return sizes, methods and offsets of local headers, of the directory, and of its end."""
    fields: list[Field] = []
    for magic, widths in _ZIP.items():
        for found in re.finditer(re.escape(magic), data):
            at = found.start() + 4
            for width in widths:
                fields.append((at, width))
                at += width
    return [(offset, width) for offset, width in fields if offset + width <= len(data)]


_ZIP = {
    b"PK\3\4": (2, 2, 2, 4, 4, 4, 4, 2, 2),
    b"PK\1\2": (4, 2, 2, 4, 4, 4, 4, 2, 2, 2, 2, 2, 4, 4),
    b"PK\5\6": (2, 2, 2, 2, 4, 4, 2),
}


def png_repair(data: bytearray) -> None:
    """Make the checksums of PNG right."""
    at = 8
    while data[:4] == b"\x89PNG" and at + 12 <= len(data):
        stop = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if stop + 4 > len(data):
            return
        data[stop : stop + 4] = zlib.crc32(data[at + 4 : stop]).to_bytes(4, "big")
        at = stop + 4


def image_fields(data: bytes) -> list[Field]:
    """Return numbers in the heads of images: sizes, lengths of segments, depths."""
    return [(at, width) for at in range(2, min(len(data), 200)) for width in (1, 2, 4)]


def message_fields(data: bytes) -> list[Field]:
    """Return every byte as the beginning of a varint."""
    return [(at, 0) for at in range(min(len(data), 300))]


Structure = tuple[Callable[[bytes], list[Field]] | None, Callable[[bytearray], None] | None]

STRUCTURES: dict[str, Structure] = {
    "lmdb_file": (lmdb_fields, None),
    "riegeli": (riegeli_fields, None),
    "array_record": (riegeli_fields, riegeli_repair),
    "array_record_library": (riegeli_fields, riegeli_repair),
    "tar": (tar_fields, tar_repair),
    "syrah": (syrah_fields, None),
    "npz": (zip_fields, None),
    "image": (image_fields, png_repair),
    "example": (message_fields, None),
    "tensorprotos": (message_fields, None),
    "caffe2": (message_fields, None),
}
"""By target; a target that is missing has numbers anywhere, and no checksums."""
