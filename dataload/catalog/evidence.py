"""Evidence about the files of a shard: their sizes, and hashes of their ends."""

from __future__ import annotations

import hashlib

from dataload.storage import Remote, join, storage_of

LOCK_FILE = "lock.mdb"
"""Name of a file in directories of LMDB, which rewrites it whenever the environment is opened."""

_ENDS_BYTES = 4096


def shard_bytes(path: str, remote: Remote | None = None) -> int:
    """Return the size of a shard: of a file, or of all visible files in a directory except LMDB's lock."""
    storage = storage_of(path, remote)
    if not storage.is_directory(path):
        return storage.size(path)
    return sum(storage.size(join(path, name)) for name in storage.list(path) if name != LOCK_FILE)


def ends_of_file(path: str, remote: Remote | None) -> tuple[int, str]:
    """Return the size of a file and a hash of its first and last 4 KiB, which distinguishes files of equal size."""
    with storage_of(path, remote).open(path) as file:
        ends = file.read(0, _ENDS_BYTES) + file.read(max(0, file.size - _ENDS_BYTES), _ENDS_BYTES)
        return file.size, hashlib.blake2b(ends, digest_size=8).hexdigest()
