"""Parts of the ArrayRecord format that matter outside of the records, and the choice of how to read them."""

import re
from typing import NamedTuple

import numpy as np

from dataload.codecs.wire import parse_varint
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.format import describe_head
from dataload.types import Int64Array

SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f0000000000000000400000000000000091bac23c9287e1a9"  # header of the first block
    "0000000000000000e19f13c0e9b1c37273000000000000000000000000000000"  # a chunk without data
)
"""The first 64 bytes of every file."""

BLOCK_SIZE = 65536
"""A file is a whole number of blocks. The last one holds the postscript, which says where the footer starts."""

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


_LIST_BYTES_ALONE = 16384
_LIST_BYTES = 1024
_LIST_SHARE = 1024
_LONG_RUN = 8


def plan_reads(
    indices: Int64Array, records: int, size: int, group: int, *, alone: bool
) -> list[tuple[int, int]] | None:
    """Return the half-open runs of records to read one by one, None to read `indices`, (rows,) int64, as one list."""
    # The package has two calls. ``read([i, j, ...])`` walks the positions of all records of the file (5 ms for a
    # million), then decompresses on a thread pool, which pays off for large records. ``read(start, stop)`` goes
    # straight to a run of records in 3 us and with a third of the work, but releases the GIL each time, so that several
    # reading threads wait for each other: `alone` says that no other thread reads. Reading a record decompresses its
    # whole group.
    large = size >= (_LIST_BYTES_ALONE if alone else _LIST_BYTES) * records
    if large and records <= _LIST_SHARE * len(indices):
        return None
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    if group > 1 and (len(breaks) + 1) * _LONG_RUN > len(indices):
        return None
    starts = indices[np.concatenate(([0], breaks))]
    stops = indices[np.concatenate((breaks - 1, [-1]))] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
