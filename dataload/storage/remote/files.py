"""Open files of a remote store: read by ranges, or from the node's cache."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Self

import numpy as np

from dataload._util.caches import PerProcess
from dataload._util.clock import current_reader, downloading
from dataload.storage.errors import write_errors
from dataload.storage.local.atomic import AtomicFile, exists_error
from dataload.storage.local.record_files import FileIdentity, Handle, MappedFile, Mapping, ReopenedFile, UnmappedFile
from dataload.storage.paths import base_name
from dataload.storage.record_file import MergedReads, RecordFile, Runs, is_reading_tables
from dataload.storage.remote.cache import CacheFullError, Lease, ShardCache
from dataload.storage.remote.clients import client_of
from dataload.storage.remote.jobs import Shares
from dataload.storage.remote.requests import GAP, Chunk, cut
from dataload.storage.remote.settings import ObjectVersion, Remote, node_folder
from dataload.types import Array, BytesArray, Int64Array

_SECONDS_BETWEEN_TRIES = 1.0
_LONGEST_PAUSE = 1.0  # seconds between looks at all open shards


class RemoteFile(MergedReads):
    """One version of a file, read by ranges; another version is an error."""

    gap = GAP

    def __init__(self, url: str, version: ObjectVersion, remote: Remote) -> None:
        self.path = url
        self.size: int = version.size
        self._version = version
        self._remote = remote

    def _load(self, offsets: Int64Array, lengths: Int64Array | int) -> tuple[BytesArray, Int64Array]:
        data, positions = super()._load(offsets, lengths)
        if not self._ahead:
            wanted = lengths * len(offsets) if isinstance(lengths, int) else int(lengths.sum())
            self._remote.traffic.add(wasted_bytes=max(0, len(data) - wanted))
        return data, positions

    @property
    def _own(self) -> Sequence[Any]:
        """The range prefetchers of the loader for which this thread reads."""
        return self._remote.ranges.get(current_reader(), ())

    @property
    def _ahead(self) -> Sequence[Any]:
        """The range prefetchers to ask for what this thread reads: all, if its loader is not known."""
        return self._own or (() if current_reader() else [*chain.from_iterable([*self._remote.ranges.values()])])

    def _fill(self, buffer: BytesArray, runs: Runs) -> None:
        ahead, starts, stops = self._ahead, runs.starts.tolist(), runs.stops.tolist()
        if not ahead or is_reading_tables():
            fetch(self.path, self._version, self._remote, starts, stops, buffer)
            return
        with downloading():
            missing = ahead[0].fill(self.path, buffer, runs.starts, runs.stops, ahead[1:], waits=bool(self._own))
        lengths = runs.stops - runs.starts
        at, most = (np.cumsum(lengths) - lengths).tolist(), int(self._remote.options.part_bytes)
        pieces = (cut([starts[run]], [stops[run]], most, at[run]) for run in missing.tolist())
        _fetch_chunks(self.path, self._version, self._remote, [*chain.from_iterable(pieces)], buffer)

    def release(self) -> None:
        """Do nothing: no file is open."""


def fetch(
    url: str, version: ObjectVersion, remote: Remote, starts: list[int], stops: list[int], buffer: BytesArray
) -> None:
    _fetch_chunks(url, version, remote, cut(starts, stops, int(remote.options.part_bytes)), buffer)


def _fetch_chunks(
    url: str, version: ObjectVersion, remote: Remote, chunks: Sequence[Chunk], buffer: BytesArray
) -> None:
    def receive(chunk: Chunk, offset: int, data: Any) -> None:
        begin = chunk.at + offset - chunk.start
        buffer[begin : begin + len(data)] = np.frombuffer(data, np.uint8)

    if chunks:
        client, key = client_of(url, remote)
        with downloading():
            client.fetch(url, key, version, chunks, receive)


class RemoteStream:
    """A remote file that any number of threads may read at any offset, like `LocalFile`."""

    def __init__(self, url: str, version: ObjectVersion, remote: Remote) -> None:
        self.path = url
        self.size: int = version.size
        self._version = version
        self._remote = remote

    def read(self, offset: int, length: int) -> bytes:
        buffer = np.empty(max(0, min(length, self.size - offset)), np.uint8)
        self.read_into(offset, buffer.data)
        return buffer.tobytes()

    def read_into(self, offset: int, buffer: Any) -> int:
        target = np.frombuffer(buffer, np.uint8)
        count = max(0, min(len(target), self.size - offset))
        fetch(self.path, self._version, self._remote, [offset], [offset + count], target)
        return count

    def close(self) -> None:
        """Do nothing: no file is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OpenShards:
    """The cached shards that this process has open, least recently used first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[int, weakref.ref[Any]] = OrderedDict()

        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()  # of open files
        self._next_look = 0.0  # for deleted files

    def keep(self, lease: Lease, most: int) -> bool:
        """Release files until all leases, this one included, take at most `most` bytes; return whether they do."""
        with self._lock:
            self._leases.add(lease)
        while self._leased() > most:
            if not self.give_up():
                return False
        return True

    def _leased(self) -> int:
        with self._lock:
            return sum(lease.size for lease in self._leases)

    def touch(self, file: Any) -> None:
        with self._lock:
            self._files[id(file)] = weakref.ref(file)  # always: a dead file may have had the same id
            self._files.move_to_end(id(file))

    def release_deleted(self) -> None:
        """Release evicted files, whose space stays in use until then. Looks seldom enough to take 5% of the time."""
        begun = time.monotonic()
        if begun < self._next_look:
            return
        with self._lock:
            files = [reference() for reference in self._files.values()]
        for file in files:
            if file is not None and file.is_deleted():
                file.release()
        ended = time.monotonic()
        self._next_look = ended + min(_LONGEST_PAUSE, 20 * (ended - begun))

    def give_up(self) -> bool:
        with self._lock:
            for key in [key for key, reference in self._files.items() if reference() is None]:
                del self._files[key]
            files = [reference() for reference in self._files.values()]
        file = next((file for file in files if file is not None and file.is_open), None)
        if file is not None:
            file.release()
        return file is not None


_opened: PerProcess[_OpenShards] = PerProcess()
_shares: PerProcess[weakref.WeakValueDictionary[str, Shares]] = PerProcess()


def open_shards() -> _OpenShards:
    return _opened.get(_OpenShards)


def keep(cache: ShardCache, name: str, lease: Lease) -> Any:
    """Return a file's lease and its share of the cache, for files that no plan protects; None if they do not fit."""
    own = _shares.get(weakref.WeakValueDictionary)
    shares = own.get(cache.root) or own.setdefault(cache.root, Shares(cache.root, cache.limit, name))
    return (lease, shares) if open_shards().keep(lease, shares.budget()) else None


def local_copy(
    url: str,
    version: ObjectVersion,
    take: Callable[[], Lease],
    *,
    mapped: bool,
    listed: bool,
    keep: Callable[[Lease], Any],
) -> ReopenedFile[Any]:
    """Open a cached shard as a local file; `take` leases it at each opening, `keep` returns what the file holds."""
    # The file may have been evicted and downloaded again before it is reopened; its name tells the version.
    identity = FileIdentity(version.size, version.number)
    made: list[weakref.ref[ReopenedFile[Any]]] = []

    def opened(kind: Any) -> Any:
        lease = take()
        handle = kind(lease.path)
        if handle.identity.size == version.size:
            handle.identity = identity
        handle.lease = keep(lease)
        for file in filter(None, (reference() for reference in made)):
            open_shards().touch(file)
        return handle

    file = (
        MappedFile(url, lambda _: opened(_LeasedMapping))
        if mapped
        else UnmappedFile(url, lambda _: opened(_LeasedHandle))
    )
    file.may_be_written = True  # its mtime is the last use
    if listed:
        made.append(weakref.ref(file))
        open_shards().touch(file)
    return file


class _LeasedHandle(Handle):
    __slots__ = ("lease",)


class _LeasedMapping(Mapping):
    __slots__ = ("lease",)


class ShardFile(RecordFile):
    """A shard downloaded when its first record is read; tables, and all while the cache is full, are read by range."""

    def __init__(
        self,
        ranged: RemoteFile,
        find: Callable[[], ReopenedFile[Any] | None],
        take: Callable[[], ReopenedFile[Any] | None],
        wants: Callable[[], bool],
    ) -> None:
        self.path: str = ranged.path
        self.size: int = ranged.size
        self._ranged = ranged
        self._find = find
        self._take = take
        self._wants = wants
        self._local: ReopenedFile[Any] | None = None
        self._next_try = 0.0
        self._lock = threading.Lock()

    def copies(self, offsets: Int64Array, lengths: Int64Array) -> list[bytes]:
        return self._chosen().copies(offsets, lengths)

    def _gather(self, out: Array, start: int, stride: int, length: int, indices: Int64Array) -> None:
        self._chosen()._gather(out, start, stride, length, indices)  # pyright: ignore[reportPrivateUsage]

    def _gather_ranges(self, out: Array, offsets: Int64Array, lengths: Int64Array) -> None:
        self._chosen()._gather_ranges(out, offsets, lengths)  # pyright: ignore[reportPrivateUsage]

    def release(self) -> None:
        self._local = None

    @property
    def is_open(self) -> bool:
        return self._local is not None

    def is_deleted(self) -> bool:
        local = self._local
        return local is not None and local.is_deleted()

    def _chosen(self) -> RecordFile:
        local = (self._local or self._open()) if self._wants() else None
        if local is None:
            return self._ranged
        open_shards().touch(self)
        return local

    def _open(self) -> RecordFile | None:
        with downloading(), self._lock:
            if self._local is None and is_reading_tables():
                self._local = self._find()
            elif self._local is None and time.monotonic() >= self._next_try:
                try:
                    self._local = self._take()
                except CacheFullError:
                    self._next_try = time.monotonic() + _SECONDS_BETWEEN_TRIES
            return self._local


LARGEST_PUT = 64 << 20
"""Maximum size of an object written by one request; only such a write can demand that nothing is replaced."""

_SMALLEST_PART, _MOST_PARTS = 5 << 20, 9_000  # of a multipart upload; S3 takes at most 10,000 parts


class RemoteAtomicFile(AtomicFile):
    """An `AtomicFile` that `publish` uploads; until then it is in the node's cache or a temporary folder."""

    def __init__(self, url: str, remote: Remote, *, overwrite: bool) -> None:
        self._client, self._key = client_of(url, remote)
        name = hashlib.blake2b(url.encode(), digest_size=10).hexdigest()
        folder = node_folder(remote, "uploads", name)
        if folder is None:
            with write_errors(tempfile.gettempdir()):
                folder = tempfile.mkdtemp(prefix="dataload-")
        super().__init__(os.path.join(folder, base_name(url)), overwrite=True)
        self.path: str = url
        self._overwrite, self._remote = overwrite, remote

    def sync(self) -> None:
        """Do nothing: an object that exists is durable, and the file here is deleted after its upload."""

    def publish(self, *, durable: bool = True) -> None:  # noqa: ARG002 - see `sync`
        names = sorted(os.listdir(self.temporary)) if os.path.isdir(self.temporary) else [""]
        for name in names:
            url, key = (f"{part}/{name}".rstrip("/") for part in (self.path, self._key))
            self._remote.versions.pop(url, None)
            file = os.path.join(self.temporary, name).rstrip("/")
            try:
                version = self._upload(url, key, file)
            except FileExistsError:
                self._remote.listings.pop(url.rpartition("/")[0], None)
                raise exists_error(url) from None
            self._remote.add_name(url)
            if version is not None:
                self._remote.versions[url] = version
        self.abort()

    def _upload(self, url: str, key: str, path: str) -> ObjectVersion | None:
        size = os.path.getsize(path)
        if size <= LARGEST_PUT:
            with open(path, "rb") as file:
                return self._client.put(url, key, file.read(), "overwrite" if self._overwrite else "create")[0]
        part = max(_SMALLEST_PART, int(self._remote.options.part_bytes), -(-size // _MOST_PARTS))

        def parts() -> Iterator[bytes]:
            with open(path, "rb") as file:
                while data := file.read(part):
                    yield data

        return self._client.put_parts(url, key, parts, part, overwrite=self._overwrite)

    def abort(self) -> None:
        super().abort()
        with suppress(OSError):  # another write of this URL is in it, or it is gone
            os.rmdir(self.directory)
