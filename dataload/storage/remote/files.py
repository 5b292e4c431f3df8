"""Open files of a remote store: read by ranges, or from the node's cache."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from dataload._util.decoding import downloading
from dataload._util.per_process import PerProcess
from dataload.storage.local.mapped import MappedFile, Mapping
from dataload.storage.local.reopened import FileIdentity, Handle, ReopenedFile
from dataload.storage.local.unmapped import UnmappedFile
from dataload.storage.ranges import Runs
from dataload.storage.records import MergedReads, RecordFile, is_reading_tables
from dataload.storage.remote.cache import CacheFullError, Lease
from dataload.storage.remote.client import client_of
from dataload.storage.remote.requests import GAP, Piece, cut
from dataload.storage.remote.settings import ObjectVersion, Remote, parse_bytes
from dataload.types import Array, BytesArray, Int64Array

_SECONDS_BETWEEN_TRIES = 1.0


class RemoteFile(MergedReads):
    """A file that is read by ranges; see `RecordFile`.

    Args:
        url: The file.
        version: The version that is read; another one is an error.
        remote: How it is read.
    """

    gap = GAP

    def __init__(self, url: str, version: ObjectVersion, remote: Remote) -> None:
        self.path = url
        self.size: int = version.size
        self._version = version
        self._remote = remote

    def _load(self, offsets: Int64Array, lengths: Int64Array | int) -> tuple[BytesArray, Int64Array]:
        data, positions = super()._load(offsets, lengths)
        if self._remote.ranges.get("ahead") is None:
            wanted = lengths * len(offsets) if isinstance(lengths, int) else int(lengths.sum())
            self._remote.traffic.add(wasted_bytes=max(0, len(data) - wanted))
        return data, positions

    def _fill(self, buffer: BytesArray, runs: Runs) -> None:
        ahead = self._remote.ranges.get("ahead")
        if ahead is None or is_reading_tables():
            fetch(self.path, self._version, self._remote, runs.starts.tolist(), runs.stops.tolist(), buffer)
            return
        ends = np.cumsum(runs.stops - runs.starts)
        with downloading():
            missing = ahead.fill(self.path, buffer, runs.starts, runs.stops)
        for run in missing.tolist():
            start, stop, end = int(runs.starts[run]), int(runs.stops[run]), int(ends[run])
            fetch(self.path, self._version, self._remote, [start], [stop], buffer[end - (stop - start) : end])

    def release(self) -> None:
        """See `RecordFile`; nothing is open."""


def fetch(
    url: str, version: ObjectVersion, remote: Remote, starts: list[int], stops: list[int], buffer: BytesArray
) -> None:
    """Read ranges of an object one after another into `buffer`."""

    def receive(piece: Piece, data: Any) -> None:
        buffer[piece.at : piece.at + piece.stop - piece.start] = np.frombuffer(data, np.uint8)

    pieces = cut(starts, stops, parse_bytes("part_bytes", remote.options.part_bytes))
    if pieces:
        client, key = client_of(url, remote)
        with downloading():
            client.fetch(url, key, version, pieces, receive)


class RemoteStream:
    """A remote file that any number of threads may read at any offset, as `LocalFile`.

    Attributes:
        path: Its URL.
        size: Size in bytes.
    """

    def __init__(self, url: str, version: ObjectVersion, remote: Remote) -> None:
        self.path = url
        self.size: int = version.size
        self._version = version
        self._remote = remote

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes [offset, offset + length), or fewer at the end of the file."""
        buffer = np.empty(max(0, min(length, self.size - offset)), np.uint8)
        self.read_into(offset, buffer.data)
        return buffer.tobytes()

    def read_into(self, offset: int, buffer: Any) -> int:
        """Read from `offset` into a writable buffer, and return the number of bytes read."""
        target = np.frombuffer(buffer, np.uint8)
        count = max(0, min(len(target), self.size - offset))
        fetch(self.path, self._version, self._remote, [offset], [offset + count], target)
        return count

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OpenShards:
    """The shards of the cache that this process has open, the longest unused first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[int, weakref.ref[Any]] = OrderedDict()

    def touch(self, file: ReopenedFile[Any] | ShardFile) -> None:
        """Make a file the most recently used."""
        with self._lock:
            self._files[id(file)] = weakref.ref(file)  # always: the number may be that of a file that has gone
            self._files.move_to_end(id(file))

    def release_deleted(self) -> None:
        """Release the files that were evicted, whose space is free only then."""
        with self._lock:
            files = [reference() for reference in self._files.values()]
        for file in files:
            if file is not None and file.is_deleted():
                file.release()

    def give_up(self) -> bool:
        """Release the file that has been unused for longest; return whether there was one."""
        while True:
            with self._lock:
                if not self._files:
                    return False
                _, reference = self._files.popitem(last=False)
            file = reference()
            if file is not None:
                file.release()
                return True


_opened: PerProcess[_OpenShards] = PerProcess()


def open_shards() -> _OpenShards:
    """Return the shards that this process has open."""
    return _opened.get(_OpenShards)


def local_copy(
    url: str,
    version: ObjectVersion,
    take: Callable[[], Lease],
    *,
    mapped: bool,
    listed: bool,
    keeps_lease: Callable[[], bool],
) -> ReopenedFile[Any]:
    """Open a shard in the cache as a local file that is called by its URL.

    Args:
        url: The shard.
        version: Its version.
        take: Returns a lease of the shard, each time that the file is opened.
        mapped: Map it into memory.
        listed: Whether it is one of the `open_shards`, which are released when the cache is full.
        keeps_lease: Returns whether the open file keeps its lease. If not, it can be evicted, and still be read.
    """
    # The file may have been evicted and downloaded again before it is reopened: its name tells the version.
    identity = FileIdentity(version.size, version.number, (0, 0))
    made: list[weakref.ref[ReopenedFile[Any]]] = []

    def opened(kind: Any) -> Any:
        lease = take()
        handle = kind(lease.path)
        if handle.identity.size == version.size:
            handle.identity = identity
        if keeps_lease():
            handle.lease = lease
        for file in filter(None, (reference() for reference in made)):
            open_shards().touch(file)
        return handle

    file = (
        MappedFile(url, lambda _: opened(_LeasedMapping))
        if mapped
        else UnmappedFile(url, lambda _: opened(_LeasedHandle))
    )
    if listed:
        made.append(weakref.ref(file))
        open_shards().touch(file)
    return file


class _LeasedHandle(Handle):
    __slots__ = ("lease",)


class _LeasedMapping(Mapping):
    __slots__ = ("lease",)


class ShardFile(RecordFile):
    """A shard that is downloaded into the cache when its first record is read; see `RecordFile`.

    Tables, and all else while there is no room in the cache, are read by ranges.

    Args:
        ranged: The same file, read by ranges.
        find: Opens the local file if it is there.
        take: Downloads the file if it is not there, and opens it; None if it is to be read by ranges for now.
        wants: Returns whether files are read through the cache now.
    """

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
        """See `RecordFile`."""
        return self._chosen().copies(offsets, lengths)

    def _gather(self, out: Array, start: int, stride: int, length: int, indices: Int64Array) -> None:
        self._chosen()._gather(out, start, stride, length, indices)  # pyright: ignore[reportPrivateUsage]

    def _gather_ranges(self, out: Array, offsets: Int64Array, lengths: Int64Array) -> None:
        self._chosen()._gather_ranges(out, offsets, lengths)  # pyright: ignore[reportPrivateUsage]

    def release(self) -> None:
        """See `RecordFile`."""
        self._local = None

    def is_deleted(self) -> bool:
        """See `ReopenedFile`."""
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
                open_shards().release_deleted()
                try:
                    self._local = self._take()
                except CacheFullError:
                    self._next_try = time.monotonic() + _SECONDS_BETWEEN_TRIES
            return self._local
