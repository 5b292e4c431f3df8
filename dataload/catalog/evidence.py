"""Evidence about the files of a shard: sizes and times, hashes of all bytes and of both ends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dataload._util.threads import DaemonThreads
from dataload.catalog.checks import ContentMark
from dataload.catalog.facts import Evidence, Found, ShardFacts, compare
from dataload.errors import SourceError, SourceNotFoundError
from dataload.storage import RecordFile, Remote, base_name, files_below, is_url, join, storage_of
from dataload.storage.backend import ReadableFile

LOCK_FILE = "lock.mdb"
"""Name of a file in directories of LMDB, which rewrites it whenever the environment is opened."""

MOST_THREADS = 8
"""Number of threads that look at shards, which mostly wait for a disk or a store."""

ENDS_BYTES = 4096
"""Bytes of each end of a file that identify it, with its size."""

_BLOCK_BYTES = 1 << 18


def files_of(path: str, remote: Remote | None = None) -> list[str]:
    """Return the files of a shard: itself, or all visible files below a directory except LMDB's lock, by name."""
    if not storage_of(path, remote).is_directory(path):
        return [path]
    return [join(path, name) for name in sorted(files_below(path, remote)) if name != LOCK_FILE]


def shard_bytes(path: str, remote: Remote | None = None) -> int:
    """Return the size of a shard."""
    return sum(storage_of(file, remote).size(file) for file in files_of(path, remote))


def find_shard(path: str, remote: Remote | None = None) -> Found | None:
    """Look at a shard without reading it; None if it is missing."""
    try:
        if is_url(path):
            return Found(shard_bytes(path, remote), Evidence(0, storage_of(path, remote).etag(path)))
        return look(files_of(path))
    except SourceNotFoundError:
        return None


def describe_files(name: str, files: Sequence[str], records: int, hashed: tuple[int, str] | None = None) -> ShardFacts:
    """Return the facts about local files of a shard; `hashed` are size and SHA-256 of as many bytes, if known."""
    size, evidence, _ = look(files)
    sha256 = hashed[1] if hashed is not None and hashed[0] == size else hash_files(files)
    return ShardFacts(name, size, records, sha256, evidence=evidence)


def as_published(facts: ShardFacts, path: str, remote: Remote | None) -> ShardFacts:
    """Return the facts about a copy of a local shard, as a manifest lists them: with the ETag of an object."""
    return replace(facts, name=base_name(path), evidence=Evidence(0, storage_of(path, remote).etag(path)))


def is_same(facts: ShardFacts, path: str, remote: Remote | None = None) -> bool:
    """Return whether a shard is still what is known of it; it is read only if a look does not tell."""
    try:
        found = find_shard(path, remote)
        verdict = compare(facts, found)
        if verdict != "unknown":
            return verdict == "same"
        if not is_url(path):
            return hash_files(files_of(path)) == facts.sha256
        return facts.content is not None and ends_of_file(path, remote) == facts.content[:2]
    except SourceError:
        return False


def ends_of_file(path: str, remote: Remote | None) -> tuple[int, str]:
    """Return the size of a file and a hash of its first and last 4 KiB, which distinguishes files of equal size."""
    with storage_of(path, remote).open(path) as file:
        return ends_of(file)


def ends_of(file: ReadableFile | RecordFile) -> tuple[int, str]:
    """Return what `ends_of_file` does for an open file."""
    length = min(ENDS_BYTES, file.size)
    return file.size, hash_ends(file.read(0, length) + file.read(file.size - length, length))


def find_changed(marks: Mapping[str, ContentMark]) -> list[str]:
    """Return the local shards whose files, at these paths, differ from their marks in size or at an end."""

    def has_changed(path: str) -> bool:
        return all(ends_of_file(file, None) != marks[path][:2] for file in files_of(path))

    known = [path for path, mark in marks.items() if mark.ends]  # folders have none
    with DaemonThreads(MOST_THREADS) as pool:
        return [path for path, changed in zip(known, pool.map(has_changed, known), strict=True) if changed]


def look(files: Sequence[str]) -> Found:
    """Look at the local files of a shard without reading them."""
    versions = [storage_of(file).identity(file) for file in files]
    times = max((version.changed for version in versions), default=0)
    return Found(sum(version.size for version in versions), Evidence(times))


def look_locally(path: str) -> Found:
    """Look at a local shard without reading it; of a shard at a URL, nothing is found."""
    return Found(0) if is_url(path) else look(files_of(path))


def hash_files(files: Sequence[str]) -> str:
    """Return the SHA-256 of all bytes of local files."""
    digest = hashlib.sha256()
    for path in files:
        with storage_of(path).open(path) as file:
            _hash(file, digest)
    return digest.hexdigest()


def read_marks(file: RecordFile) -> tuple[int, str, str]:
    """Return what `ends_of` does for an open file, and its SHA-256."""
    if file.size <= _BLOCK_BYTES:
        data = file.read(0, file.size)
        return file.size, hash_ends(data[:ENDS_BYTES] + data[-ENDS_BYTES:]), hashlib.sha256(data).hexdigest()
    return *ends_of(file), hash_file(file)[1]


def hash_file(file: ReadableFile | RecordFile) -> tuple[int, str]:
    """Return the size of an open file, and its SHA-256."""
    _hash(file, digest := hashlib.sha256())
    return file.size, digest.hexdigest()


def _hash(file: ReadableFile | RecordFile, digest: Any) -> None:
    for start in range(0, file.size, _BLOCK_BYTES):
        digest.update(file.read(start, min(_BLOCK_BYTES, file.size - start)))


def hash_ends(ends: bytes) -> str:
    """Return the hash of the first and the last `ENDS_BYTES` of a file."""
    return hashlib.blake2b(ends, digest_size=8).hexdigest()
