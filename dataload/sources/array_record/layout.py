"""Parts of the ArrayRecord format that matter outside of the records, and numbers and hashes of many chunks."""

import re
from typing import NamedTuple

import numpy as np

from dataload.codecs.wire import parse_varint
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.format import describe_head
from dataload.storage.core import core
from dataload.types import BytesArray, Int64Array

SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f0000000000000000400000000000000091bac23c9287e1a9"  # header of the first block
    "0000000000000000e19f13c0e9b1c37273000000000000000000000000000000"  # a chunk without data
)
"""The first 64 bytes of every file."""

BLOCK_SIZE = 65536
"""A file is a whole number of blocks. The last one holds the postscript, which says where the footer starts."""

CHUNK_HEADER_BYTES = 40
HASH_BYTES = 8
"""Bytes of the hash with which a chunk header begins, the hash of the rest."""

HASH_KEY = b"Riegeli/records\nRiegeli/records\n"
MOST_VARINT_BYTES = 9
"""Bytes of a varint of 63 bits, as positions and sizes have at most."""

_SMALLEST_FILE = 2 * BLOCK_SIZE
_POSTSCRIPT = 24 + 40 + 5  # after the block header, the chunk header, the compression and the sizes of three records
_SLICE = re.compile(r"(.+)\[(\d+):(\d+)\]", re.ASCII | re.DOTALL)
_GROUP_SIZE = re.compile(r"(?:^|,)group_size:(\d+)(?:,|$)", re.ASCII)


class Selection(NamedTuple):
    """The records [start, stop) of a file; all of them if `stop` is None."""

    path: str
    start: int
    stop: int | None


def parse_selection(path: str) -> Selection:
    """Parse ``"path[start:stop]"``. Only digits make a slice; anything else is part of the file name."""
    match = _SLICE.fullmatch(path)
    if match is None:
        return Selection(path, 0, None)
    start, stop = int(match[2]), int(match[3])
    if stop < start:
        raise ConfigError(f"{path}: the slice ends at record {stop}, before its start", key="paths", value=path)
    return Selection(match[1], start, stop)


def file_of(path: str) -> str:
    """Return the file of ``"path[start:stop]"``."""
    return parse_selection(path).path


def check_head(head: bytes, size: int, path: str) -> None:
    """Check the first 64 bytes of a file of `size` bytes; `head` is shorter if the file is."""
    if not head:
        raise CorruptFileError("the file is empty, as a writer leaves it that was never closed", path=path, offset=0)
    if head != SIGNATURE[: len(head)]:
        raise UnsupportedFormatError(
            f"{path} is not an ArrayRecord file, which starts with {SIGNATURE[:8]!r}: {describe_head(head)}", path=path
        )
    if size < _SMALLEST_FILE or len(head) < len(SIGNATURE):
        raise CorruptFileError(
            f"the file has {size} bytes, the smallest ArrayRecord {_SMALLEST_FILE}: it was truncated, or its writer "
            "was never closed",
            path=path,
            offset=size,
        )


def footer_offset(block: bytes) -> int | None:
    """Return the offset of the footer from the first bytes of the last block; None without a valid postscript."""
    if block[_POSTSCRIPT : _POSTSCRIPT + 1] != b"\x08":  # protobuf: field 1, a varint
        return None
    try:
        return parse_varint(block, _POSTSCRIPT + 1)[0]
    except (IndexError, CorruptFileError):
        return None


def group_size(options: str | None) -> int:
    """Return the records per compressed group, from the writer's options in the file; 1 if they don't say."""
    match = _GROUP_SIZE.search(options or "")
    return int(match[1]) if match else 1


def find_damage(block: BytesArray, starts: Int64Array, lengths: Int64Array) -> tuple[int, str] | None:
    """Return the number of a chunk in `block` whose hashes differ from its header's, and how; None if none does."""
    found, stored = np.empty(len(starts), np.uint64), np.empty((len(starts), 3), np.uint64)
    core().gather(stored, block, 0, 1, starts, stored.itemsize * 3, -1)
    headers = np.full_like(starts, CHUNK_HEADER_BYTES - HASH_BYTES)
    parts = ("header", 0, HASH_BYTES, headers), ("data", 2, CHUNK_HEADER_BYTES, lengths - CHUNK_HEADER_BYTES)
    for part, column, ahead, sizes in parts:
        core().hash_ranges(found, block, starts + ahead, sizes, HASH_KEY, -1)
        if (differ := found != stored[:, column]).any():
            row = int(np.argmax(differ))
            said = f"{int(found[row]):#x}, but the chunk says {int(stored[row, column]):#x}"
            return row, f"the hash of the chunk's {part} is {said}"
    return None


def parse_numbers(data: BytesArray, starts: Int64Array, lasts: Int64Array) -> Int64Array | None:
    """Decode the varints with these first and last bytes, (n,) int64; None if one has more than 63 bits."""
    lengths = lasts - starts + 1
    longest = int(lengths.max(initial=0))
    if longest > MOST_VARINT_BYTES:
        return None
    values = (data[starts] & 0x7F).astype(np.int64)
    for byte in range(1, longest):
        longer = np.flatnonzero(lengths > byte)
        rows = slice(None) if len(longer) == len(starts) else longer  # a slice takes a third of the time
        values[rows] |= (data[starts[rows] + byte] & 0x7F).astype(np.int64) << 7 * byte
    return values
