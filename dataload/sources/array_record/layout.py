"""Parts of the ArrayRecord format that matter outside of the records, hashes of many chunks, and Zstandard."""

import re
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dataload._util.arrays import pooled_empty
from dataload._util.caches import DecodedCache
from dataload._util.clock import decoding
from dataload._util.system import usable_cpus
from dataload._util.threads import DaemonThreads
from dataload.codecs.wire import parse_varint
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.format import describe_head
from dataload.storage.core import core
from dataload.types import BytesArray, BytesColumn, Int64Array

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
        raise CorruptFileError("the file is empty: its writer was never closed", path=path, offset=0)
    if head != SIGNATURE[: len(head)]:
        message = f"{path} is not an ArrayRecord file, which starts with {SIGNATURE[:8]!r}: {describe_head(head)}"
        raise UnsupportedFormatError(message, path=path)
    if size < _SMALLEST_FILE or len(head) < len(SIGNATURE):
        message = f"the file has {size} bytes, the smallest ArrayRecord {_SMALLEST_FILE}"
        raise CorruptFileError(f"{message}: it was truncated, or its writer was never closed", path=path, offset=size)


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


class UnlikeError(Exception):
    """A chunk has another layout than is read here. The package array_record may read it, or say what is wrong."""


def check(*holds: Any) -> None:
    """Raise an UnlikeError unless all of these arrays are true everywhere."""
    if not all(map(np.all, holds)):
        raise UnlikeError


def parse_numbers(data: BytesArray, starts: Int64Array, lasts: Int64Array) -> Int64Array:
    """Decode the varints with these first and last bytes, (n,) int64; an UnlikeError if one has more than 63 bits."""
    lengths = lasts - starts + 1
    longest = int(lengths.max(initial=0))
    check(longest <= MOST_VARINT_BYTES)
    values = (data[starts] & 0x7F).astype(np.int64)
    for byte in range(1, longest):
        longer = np.flatnonzero(lengths > byte)
        rows = slice(None) if len(longer) == len(starts) else longer  # a slice takes a third of the time
        values[rows] |= (data[starts[rows] + byte] & 0x7F).astype(np.int64) << 7 * byte
    return values


ZSTD = 0x7A
"""The compression, in the first byte of a chunk's data."""

MOST_EXPANSION_BITS = 16
"""Four bytes of a frame expand to 128 KiB at most."""

_BYTES_IN_THREADS = 1 << 22  # decompressed; fewer take as long as threads to start
_LARGE_FRAME = 96 << 10  # bytes; starting a stream takes 7 us


class Decompressor:
    """Decompresses chunks in a block of memory, which begin at `starts` and end at `stops`, (n,) int64.

    One serves all files of a source, because a context takes up to 2 MB; `cached` keeps groups of records.
    """

    def __init__(self, cached: DecodedCache) -> None:
        self.cached: DecodedCache = cached
        self._idle: list[Any] = []  # contexts; each serves one thread at a time

    def __reduce__(self) -> Any:
        return Decompressor, (self.cached,)

    def records(self, block: BytesArray, starts: Int64Array, stops: Int64Array, sizes: Int64Array) -> BytesColumn:
        """Return the records of chunks that have one each, of `sizes` bytes, (n,) int64."""
        first = _numbers_at(block, starts + CHUNK_HEADER_BYTES + 1)
        found, frames = _numbers_at(block, _end(*first, stops))
        check(found == sizes, frames <= stops)
        out = pooled_empty((int(sizes.sum()),), np.uint8)
        self._expand(_cut(out, sizes), block, frames, stops)
        return BytesColumn.packed(out, np.cumsum(sizes))

    def groups(
        self, block: BytesArray, starts: Int64Array, stops: Int64Array, sizes: Int64Array, counts: Int64Array
    ) -> list[tuple[BytesArray, Int64Array]]:
        """Return all records of each chunk, and their edges; they are `counts`, and take `sizes` bytes, (n,) int64."""
        first = _numbers_at(block, starts + CHUNK_HEADER_BYTES + 1)
        middle = _end(*first, stops)
        found, frames = _numbers_at(block, middle)
        check(found == sizes, frames <= stops)
        expanded, heads = _numbers_at(block, first[1])
        check(heads <= middle, expanded // MOST_VARINT_BYTES <= counts)
        numbers = np.empty(int(expanded.sum()), np.uint8)
        records = [np.empty(size, np.uint8) for size in sizes.tolist()]  # they are kept one by one
        self._expand(_cut(numbers, expanded), block, heads, middle)
        self._expand([each.data for each in records], block, frames, stops)
        lasts, ends = np.flatnonzero(numbers < 0x80), np.cumsum(counts)
        check(len(lasts) == ends[-1])
        check(lasts[ends - 1] + 1 == np.cumsum(expanded))
        lengths = parse_numbers(numbers, np.concatenate(([0], lasts[:-1] + 1)), lasts)
        check(lengths <= np.repeat(sizes, counts))
        edges = np.concatenate(([0], np.cumsum(lengths)))
        check(edges[ends] == np.cumsum(sizes))
        spans = zip((ends - counts).tolist(), ends.tolist(), records, strict=True)
        return [(data, edges[begin : end + 1] - edges[begin]) for begin, end, data in spans]

    def _expand(self, targets: list[memoryview], block: BytesArray, starts: Int64Array, stops: Int64Array) -> None:
        """Decompress a frame into each target; an UnlikeError if its content has another length."""
        ends = np.cumsum([len(target) for target in targets])
        total, compressed = int(ends[-1]), int((stops - starts).sum())
        large = total >= len(ends) * _LARGE_FRAME
        # Threads that expand small frames wait for the GIL, and a frame that did not become smaller is only copied.
        count = _threads() if large and total >= max(_BYTES_IN_THREADS, compressed) else 1
        cuts = sorted({0, *np.searchsorted(ends, np.arange(1, count) * (total // count)).tolist(), len(ends)})
        first, *others = ((targets[i:j], block, starts[i:j], stops[i:j], large) for i, j in pairwise(cuts))
        with decoding():
            if not others:
                self._expand_part(*first)
                return
            with DaemonThreads(count) as pool:
                pending = [pool.submit(self._expand_part, *other) for other in others]
                self._expand_part(*first)
                for each in pending:
                    each.result()

    def _expand_part(
        self, targets: list[memoryview], block: BytesArray, starts: Int64Array, stops: Int64Array, large: bool
    ) -> None:
        try:
            package = import_module("zstandard")
        except ImportError as error:
            raise UnlikeError from error
        context, view = self._idle.pop() if self._idle else package.ZstdDecompressor(), block.data
        told, decompress, stream = package.frame_content_size, context.decompress, context.stream_reader
        for target, start, stop in zip(targets, starts.tolist(), stops.tolist(), strict=True):
            frame, size = view[start:stop], len(target)
            try:
                if large:  # without the GIL, and without new memory, which threads give back each time
                    reader = stream(frame)
                    length = reader.readinto(target) + len(reader.read(1))
                elif (length := told(frame)) in (size, -1):  # so much memory is taken
                    data = decompress(frame, size)
                    length = len(data)
                    target[:length] = data
            except package.ZstdError as error:
                raise UnlikeError from error
            if length != size:
                raise UnlikeError
        self._idle.append(context)


@cache
def _threads() -> int:
    return usable_cpus()  # asking the system takes longer than starting a thread


def _cut(block: BytesArray, lengths: Int64Array) -> list[memoryview]:
    """Return consecutive pieces of a block."""
    ends, data = np.cumsum(lengths), block.data
    return [data[start:end] for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]


def _end(lengths: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
    """Return the ends of what has these lengths, if they are in the chunks."""
    check(lengths < stops - starts)
    return starts + lengths


def _numbers_at(data: BytesArray, starts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the varints at positions, (n,) int64, and the positions after them."""
    lasts = starts.copy()
    for _ in range(MOST_VARINT_BYTES):
        check(lasts < len(data))
        longer = data[lasts] > 0x7F
        if not longer.any():
            break
        lasts += longer
    return parse_numbers(data, starts, lasts), lasts + 1
