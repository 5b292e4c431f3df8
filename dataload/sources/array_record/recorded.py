"""The reader options that our writer records in the padding after an ArrayRecord's last message.

The last block is that message and a chunk of padding up to its end, whose content no reader looks at. Its hashes are
renewed, so the file stays valid in every detail.
"""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from dataload.sources.array_record.layout import BLOCK_SIZE
from dataload.sources.array_record.riegeli import BLOCK_HEADER_BYTES, CHUNK_HEADER_BYTES, HASH_BYTES, HASH_KEY
from dataload.sources.recorded import MOST_BYTES, parse_recorded
from dataload.storage import Remote, storage_of
from dataload.storage.core import core

_PADDING = 0x70  # the type of a chunk
_SIZE = struct.Struct("<8xQ")  # in a chunk header
_REST = struct.Struct("<QQQQ")  # of a chunk header, after its hash: size and hash of the data; type and records; bytes
_MOST_MESSAGE = 256  # bytes


def find_recorded(path: str, remote: Remote | None) -> Mapping[str, Any]:
    """Return the reader options that are recorded in a file."""
    with storage_of(path, remote).open(path) as file:
        block = file.read(max(0, file.size - BLOCK_SIZE), _MOST_MESSAGE + 2 * CHUNK_HEADER_BYTES + MOST_BYTES)
    start = _padding(block)
    return {} if start is None else parse_recorded(block[start + CHUNK_HEADER_BYTES :], ("codec",))


def build_padding(block: bytes, text: bytes) -> tuple[int, bytes] | None:
    """Return padding that begins with `text`, and its offset in the last `block`; None if there is none to replace."""
    start = _padding(block)
    room = len(block) - (start or 0) - CHUNK_HEADER_BYTES
    if start is None or len(block) != BLOCK_SIZE or len(text) > room:
        return None
    data = text.ljust(room, b"\0")
    rest = _REST.pack(room, _hash(data), _PADDING, 0)
    return start, struct.pack("<Q", _hash(rest)) + rest + data


def _padding(block: bytes) -> int | None:
    """Return the offset of the chunk of padding in the last block."""
    if len(block) < BLOCK_HEADER_BYTES + _SIZE.size:
        return None
    start = BLOCK_HEADER_BYTES + CHUNK_HEADER_BYTES + _SIZE.unpack_from(block, BLOCK_HEADER_BYTES)[0]
    if start > _MOST_MESSAGE or len(block) < start + CHUNK_HEADER_BYTES:
        return None
    size, _, kind, _ = _REST.unpack_from(block, start + HASH_BYTES)
    return start if kind == _PADDING and size == BLOCK_SIZE - start - CHUNK_HEADER_BYTES else None


def _hash(data: bytes) -> int:
    found = np.empty(1, np.uint64)
    core().hash_ranges(found, np.frombuffer(data, np.uint8), np.zeros(1, np.int64), np.array([len(data)]), HASH_KEY, -1)
    return int(found[0])
