"""The storage backend for URLs."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from dataload._util.clock import current_reader, downloading
from dataload._util.threads import DaemonThreads, Wait
from dataload.errors import ConfigError, SourceError, SourceNotFoundError, StoreError
from dataload.storage.core import can_map
from dataload.storage.errors import cache_errors
from dataload.storage.local.atomic import AtomicFile, exists_error
from dataload.storage.local.files import LocalFile, lock_file
from dataload.storage.local.record_files import FileIdentity, ReopenedFile
from dataload.storage.paths import base_name, has_wildcards, is_hub_url, is_web_url, join, parent
from dataload.storage.record_file import RecordFile
from dataload.storage.remote.cache import CacheFullError, Lease, ShardCache
from dataload.storage.remote.clients import client_of, hub_error
from dataload.storage.remote.files import (
    LARGEST_PUT,
    RemoteAtomicFile,
    RemoteFile,
    RemoteStream,
    ShardFile,
    fetch,
    keep,
    local_copy,
    open_shards,
)
from dataload.storage.remote.jobs import BoardReader, Coming, wait_for
from dataload.storage.remote.prefetch.plan import Use
from dataload.storage.remote.prefetch.shards import CachedShards, ShardPrefetcher, write
from dataload.storage.remote.requests import cut, split_url
from dataload.storage.remote.settings import ObjectVersion, Remote, node_directory, node_folder
from dataload.types import Int64Array

_ROOM_SECONDS = 5.0  # wait for room for a shard read as a whole, before reading it by range
_MOST_TURNS = 10  # times the time-out that a thread waits for room while others take turns
_FEWEST_LISTED = 100  # a LIST answers for 1,000 objects
_SHARE_OF_HOME = 1 / 10  # of its free bytes, for the default cache directory

T = TypeVar("T")


class RemoteStorage:
    """Files at URLs. Adds the versions and listings that it learns to `remote`."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def exists(self, path: str) -> bool:
        return self._version(path) is not None or self.is_directory(path)

    def is_directory(self, path: str) -> bool:
        if self._version(path) is not None or is_web_url(path) or self._remote.lacks(path):
            return False
        return bool(self._names(path))

    def list(self, path: str) -> list[str]:
        names = self._names(path)
        if not names:
            raise SourceNotFoundError(f"there is no {path}", path=path)
        return [name for name in names if not name.startswith(".")]

    def glob(self, pattern: str) -> list[str]:
        base, key = split_url(pattern)
        found, parts = [base], key.split("/")
        for part in parts:
            if not has_wildcards(part):
                found = [join(path, part) for path in found]
                continue
            matches = re.compile(fnmatch.translate(part)).fullmatch
            hidden = part.startswith(".")
            found = [path for path in found if self._remote.versions.get(path) is None]  # objects are no directories
            found = [
                join(path, name)
                for path, names in zip(found, self._each(self._names, found), strict=True)
                for name in names
                if matches(name) and (hidden or not name.startswith("."))
            ]
        if not has_wildcards(parts[-1]):
            found = [path for path, exists in zip(found, self._each(self.exists, found), strict=True) if exists]
        return sorted(found)

    def _each(self, call: Callable[[str], T], paths: Sequence[str]) -> list[T]:
        """Return what a call returns for each path, concurrently for several."""
        if len(paths) < 2:
            return [*map(call, paths)]
        with DaemonThreads(min(len(paths), self._remote.options.connections)) as pool:
            return [*pool.map(call, paths)]

    def size(self, path: str) -> int:
        if self.is_directory(path):
            found = (self._version(join(path, name)) for name in self._names(path))
            return sum(version.size for version in found if version is not None)
        return self.version(path).size

    def identity(self, path: str) -> FileIdentity:
        version = self.version(path)
        return FileIdentity(version.size, version.number)

    def read(self, path: str) -> bytes:
        with self.open(path) as file:
            return file.read(0, file.size)

    def read_ranges(self, path: str, offsets: Int64Array, lengths: Int64Array) -> Sequence[bytes]:
        if len(offsets) == 1 and offsets[0] == 0 and self._is_unknown(path):
            client, key = client_of(path, self._remote)
            try:  # in one request
                data, self._remote.versions[path], _ = client.read(path, key, int(lengths[0]))
            except SourceNotFoundError:
                self._remote.versions[path] = None
                raise
            return [data]
        version = self.version(path)
        starts = np.clip(offsets, 0, version.size)
        stops = np.clip(offsets + lengths, starts, version.size)
        buffer = np.empty(int((stops - starts).sum()), np.uint8)
        fetch(path, version, self._remote, starts.tolist(), stops.tolist(), buffer)
        ends = np.cumsum(stops - starts).tolist()
        return [buffer[start:end].tobytes() for start, end in zip([0, *ends], ends, strict=False)]

    def open(self, path: str, *, whole: bool = False) -> RemoteStream | LocalFile:
        version = self.version(path)
        cached = self._uses_shards(whole=False)
        if whole:
            self._check_scan(path, version, cached=cached)
        if cached:
            with suppress(CacheFullError):  # then by ranges
                seconds = min(_ROOM_SECONDS, self._remote.options.timeout)
                name = ShardCache.name(path, version)
                lease = self._take(path, version, seconds=seconds) if whole else self._find(name)
                if lease is not None:
                    return LocalFile(lease.path, name=path)  # stays open if it is evicted
        return RemoteStream(path, version, self._remote)

    def map(self, path: str, *, mapped: bool = True, whole: bool = False) -> RecordFile:
        version = self.version(path)
        ranged = RemoteFile(path, version, self._remote)
        if self._never_uses_shards(whole=whole, path=path):
            return ranged
        if self._uses_shards(whole=whole):
            self._shards.check_size(path, version.size)
        mapped = mapped and can_map()
        name = ShardCache.name(path, version)
        kept = functools.partial(self._keep, path)
        if whole:
            return local_copy(path, version, lambda: self._wait(path, version), mapped=mapped, listed=True, keep=kept)

        def local(lease: Lease | None) -> ReopenedFile[Any] | None:
            leases = [] if lease is None else [lease]  # the file is opened only once
            del lease
            return local_copy(path, version, leases.pop, mapped=mapped, listed=False, keep=kept) if leases else None

        return ShardFile(
            ranged,
            lambda: local(self._find(name)),
            lambda: local(self._take(path, version, seconds=0, by_range=True)),
            lambda: self._uses_shards(whole=False),
        )

    def lease(self, path: str) -> Lease:
        self._never_uses_shards(whole=True, path=path)
        return self._wait(path, self.version(path))

    def lend(self, path: str, holder: Any) -> tuple[Lease, Any]:
        lease = self.lease(path)
        open_shards().touch(holder)
        return lease, self._keep(path, lease)

    def create(self, path: str, *, overwrite: bool = False) -> AtomicFile:
        if is_hub_url(path):
            raise hub_error(path)
        if not overwrite and self.exists(path):
            raise exists_error(path)
        if not overwrite and is_web_url(path):
            message = f"cannot write {path}: a web server can replace files, but not check that there is none"
            raise StoreError(f"{message}: pass overwrite=True, or write to a store or a local directory", path=path)
        return RemoteAtomicFile(path, self._remote, overwrite=overwrite)

    def load(self, path: str) -> tuple[bytes, Any] | None:
        client, key = client_of(path, self._remote)
        try:
            data, _, condition = client.read(path, key, LARGEST_PUT)
        except SourceNotFoundError:
            return None
        return data, condition

    def replace(self, path: str, data: bytes, version: Any) -> Any:
        client, key = client_of(path, self._remote)
        self._remote.versions.pop(path, None)
        try:
            condition = client.put(path, key, data, "create" if version is None else version)[1]
        except FileExistsError:
            self._remote.listings.pop(path.rpartition("/")[0], None)
            raise
        self._remote.add_name(path)
        return condition

    def etag(self, path: str) -> str | None:
        """Return the ETag of an object, or the joined ETags of the objects in a directory."""
        objects = [join(path, name) for name in self.list(path)] if self.is_directory(path) else [path]
        versions = [self.version(url) for url in objects]
        return " ".join(version.tag for version in versions) if all(each.has_etag for each in versions) else None

    def remove(self, path: str) -> None:
        client, key = client_of(path, self._remote)
        if self._version(path) is not None:
            client.delete(path, [key])
        elif self.is_directory(path):
            client.delete(path, [f"{key}/{name}" for name in self._names(path)])
        self._remote.versions.pop(path, None)
        self._remote.listings.clear()

    @contextmanager
    def lock(self, path: str) -> Generator[None]:
        directory = node_folder(self._remote, "locks")
        if directory is None:
            yield
            return
        name = hashlib.blake2b(path.encode(), digest_size=10).hexdigest()
        with lock_file(os.path.join(directory, f"{name}.lock"), path):
            yield

    def version(self, path: str) -> ObjectVersion:
        """Return the version of a file; SourceNotFoundError if the URL is missing or a directory."""
        version = self._version(path)
        if version is None:
            raise SourceNotFoundError(f"there is no {path}", path=path)
        return version

    def _version(self, path: str) -> ObjectVersion | None:
        known = self._remote.versions
        if path not in known:
            client, key = client_of(path, self._remote)
            absent = not key or path.endswith("/") or self._remote.lacks(path)
            known[path] = None if absent else client.head(path, key)
        return known[path]

    def _is_unknown(self, path: str) -> bool:
        """Return whether neither the object nor a listing of its directory has been looked up."""
        known = self._remote
        return path not in known.versions and path.rpartition("/")[0] not in known.listings and bool(split_url(path)[1])

    def _names(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a directory, and remember the versions of its objects."""
        url = path.rstrip("/")
        if url not in self._remote.listings:
            client, key = client_of(path, self._remote)
            if is_web_url(path):
                raise ConfigError(f"{path}: web servers do not list files, so name them: {{000..127}}", key="paths")
            directories, objects = client.list(path, key)
            for name, version in objects:
                if self._remote.versions.get(join(url, name)) is None:  # known versions stay
                    self._remote.versions[join(url, name)] = version
            self._remote.listings[url] = tuple(sorted({*directories, *(name for name, _ in objects)}))
        return self._remote.listings[url]

    def _uses_shards(self, *, whole: bool) -> bool:
        options, known = self._remote.options, self._remote.boards.get("mode", "auto")
        mode = self._remote.modes.get(current_reader(), known) if options.mode == "auto" else options.mode
        return whole or mode == "shards" or (mode == "auto" and options.cache is not None)

    def _never_uses_shards(self, *, whole: bool, path: str) -> bool:
        if whole and self._remote.options.mode == "ranges":
            raise ConfigError(
                f"{path} can only be read as a whole: set remote.mode to 'shards' or 'auto'", key="remote.mode"
            )
        return self._remote.options.mode == "ranges"

    def _wait(self, path: str, version: ObjectVersion) -> Lease:
        self._check_scan(path, version, cached=True)
        lease = self._take(path, version, seconds=self._remote.options.timeout)
        assert lease is not None, "only a shard that may be read by range needs no lease"
        return lease

    def _check_scan(self, path: str, version: ObjectVersion, *, cached: bool) -> None:
        """Refuse to read whole shards only to count their records if that takes too many bytes."""
        opening, limit = self._remote.opening, int(self._remote.options.scan)
        if not opening or (cached and self._shards.holds(ShardCache.name(path, version))):  # before adding up thousands
            return
        found = (self._remote.versions.get(url) or version for url in opening)  # the rest have about this size
        total = sum(each.size for each in found)
        if total <= limit:
            return
        raise ConfigError(
            f"only the whole of {path} tells its number of records, and all {len(opening)} shards take up to {total:,} "
            f"bytes, more than the {limit:,} that remote.scan allows: run `dataload index "
            f"--manifest` for {parent(path)} once, or raise remote.scan",
            key="remote.scan",
            value=limit,
        )

    def _find(self, name: str) -> Lease | None:
        with cache_errors(self._shards.root):
            return self._shards.find(name)

    def _take(self, path: str, version: ObjectVersion, *, seconds: float, by_range: bool = False) -> Lease | None:
        """Return a lease, waiting `seconds` for room; None if the prefetch plan says to read by range."""
        name, traffic = ShardCache.name(path, version), self._remote.traffic

        def download(descriptor: int) -> None:
            client, key = client_of(path, self._remote)
            chunks = cut([0], [version.size], int(self._remote.options.part_bytes))
            client.fetch(path, key, version, chunks, lambda _, offset, data: write(descriptor, offset, data))
            traffic.downloaded(name)

        with downloading(), cache_errors(self._shards.root):
            open_shards().release_deleted()
            board = self._remote.boards.get("board")
            if board is not None:
                found = wait_for(board, path, lambda: self._shards.find(name), lambda: self._shards.progress(name))
                if isinstance(found, Lease):
                    return found
                if found is Coming.NEVER and by_range:
                    return None
            wait = Wait(seconds, _MOST_TURNS * seconds)
            lease = self._shards.fetch(path, version, download, open_shards().give_up, wait)
        if not traffic.knows(name):
            traffic.found(name)
        return lease

    def _keep(self, path: str, lease: Lease) -> Any:
        """Return what an open shard keeps: nothing if a plan protects the shard from eviction."""
        board = self._remote.boards.get("board")
        planned = isinstance(board, BoardReader) or (board is not None and board.look(path) is not Coming.UNKNOWN)
        with cache_errors(self._shards.root):
            return None if planned else keep(self._shards, base_name(path), lease)

    def versions(self, paths: Sequence[str]) -> list[ObjectVersion]:
        """Return the versions of files, concurrently for a few, by listing the directory for many."""
        unknown = [path for path in paths if path not in self._remote.versions]
        for directory, count in Counter(map(parent, unknown)).items():
            if count >= _FEWEST_LISTED and not is_web_url(directory):
                self._names(directory)
        unknown = [path for path in unknown if path not in self._remote.versions]
        self._each(self._version, unknown)
        return [self.version(path) for path in paths]

    def budget(self) -> int:
        """Return the bytes that shards may take in the cache; 0 if no default cache is possible."""
        try:
            with cache_errors(self._shards.root):
                return self._shards.limit()
        except (ConfigError, SourceError):
            if self._remote.options.cache is not None:
                raise
            return 0

    def check_sizes(self, paths: Sequence[str]) -> None:
        largest = max(paths, key=lambda path: self.version(path).size)
        with cache_errors(self._shards.root):
            size, limit = self.version(largest).size, self._shards.most()
        if size > limit:
            raise self._shards.too_small(largest, size, limit)

    def read_ahead(
        self, shards: CachedShards, uses: Iterator[Sequence[Use]], share: float, sharers: int, ranks: int
    ) -> ShardPrefetcher:
        """Download shards into a share of the cache before they are read; see `ShardPrefetcher`."""
        cache = self._shards
        with cache_errors(cache.root):
            return ShardPrefetcher(shards, uses, self._remote, cache, share, sharers, ranks)

    @cached_property
    def _shards(self) -> ShardCache:
        return node_cache(self._remote)


def node_cache(remote: Remote) -> ShardCache:
    """Return the configured cache; ConfigError if none is configured and there is no home directory."""
    directory = node_directory(remote)
    if directory is None:
        raise ConfigError("there is no home directory to keep shards in: set remote.cache", key="remote.cache")
    options = remote.options
    budget, share = options.budget, _SHARE_OF_HOME if options.cache is None else 1
    return ShardCache(directory, None if budget is None else int(budget), share=share, timeout=options.timeout)
