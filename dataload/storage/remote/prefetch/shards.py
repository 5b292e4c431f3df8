"""Shards downloaded before they are read, in the order of the reads."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dataload._util.system import open_files_limit, write_at
from dataload._util.threads import Wait
from dataload.errors import ConfigError, SourceError
from dataload.storage.local.folders import trusted_folder
from dataload.storage.paths import base_name
from dataload.storage.remote.cache import CacheFullError, Lease, ShardCache
from dataload.storage.remote.clients import client_of
from dataload.storage.remote.files import open_shards
from dataload.storage.remote.jobs import Board, Coming, Shares, describe_jobs
from dataload.storage.remote.prefetch.plan import CachePlan, Download, Evict, Use, check_fit, rank_budget, step_bytes
from dataload.storage.remote.prefetch.ranges import DownloadThreads, Stopped
from dataload.storage.remote.requests import Chunk, cut
from dataload.storage.remote.settings import ObjectVersion, Remote

_ROOM_SECONDS = 2.0  # wait for room before reading by range
SHARDS_AT_ONCE = 4
"""Shards that a process downloads at once: the last chunks of one overlap the first of the next."""

_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between checks of the consumer's progress


@dataclass(frozen=True, slots=True)
class CachedShards:
    """URLs and versions of the shards read through the cache; `whole` has those that cannot be read by range."""

    urls: Sequence[str]
    versions: Sequence[ObjectVersion]
    whole: frozenset[int]


class _Dropped(Stopped):
    """The plan has evicted a shard before it arrived."""


class _Job:
    """The missing chunks of one shard. Writes end with the last of them, even into a deleted file."""

    def __init__(self, shard: int, descriptor: int, chunks: int, changed: threading.Condition) -> None:
        self.shard = shard
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.left = chunks
        self.changed = changed
        self.errors: list[BaseException] = []


class ShardPrefetcher(DownloadThreads[_Job]):
    """Downloads the shards that `uses` yields into the cache in the background, and evicts the ones needed last."""

    def __init__(
        self,
        shards: CachedShards,
        uses: Iterator[Sequence[Use]],
        remote: Remote,
        cache: ShardCache,
        share: float = 1.0,
        sharers: int = 1,
        ranks: int = 1,
    ) -> None:
        super().__init__(remote)
        self._shards = shards
        self._uses = uses
        self._cache = cache
        self._planner, self._shard = self._condition(), self._condition()
        self._received = 0
        self._wanted: deque[int] = deque()  # shards to download
        self._running: dict[int, None] = {}  # shards being downloaded, in the order of the plan
        self._asked: set[int] = set()  # running, and their chunks are queued
        self._dropped: set[int] = set()  # running, but evicted by the plan before they arrived
        self._failed: set[int] = set()
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        names = [cache.name(url, version) for url, version in zip(shards.urls, shards.versions, strict=True)]
        self._names = names
        present = cache.names()
        resident = [shard for shard, name in enumerate(names) if name in present]
        self._present = {*resident}  # in the cache before the plan wanted them
        self._arrived: set[int] = set()  # downloaded by this process, until `_keep`
        sizes = [version.size for version in shards.versions]
        soon = next(uses, ())
        need = step_bytes(soon, sizes, shards.whole)
        check_fit(need, rank_budget(cache.limit(), share, sharers, max(sizes)))
        named = base_name(shards.urls[0]) + (f" and {len(sizes) - 1} more" if len(sizes) > 1 else "")
        self._deletes = sharers == 1
        self._shares = Shares(cache.root, cache.limit, named, share, need, ranks=ranks, sharers=sharers)
        self._wait_for_share(need)
        self._plan = CachePlan(sizes, self._shares.budget(), resident, whole=shards.whole)
        board = remote.boards.get("board")
        if not isinstance(board, Board) or [*board.numbers] != [*shards.urls]:
            board = remote.boards["board"] = Board(trusted_folder(cache.root, "plans"), shards.urls)
        self._board = board  # the same for the life of the source, because worker processes know it
        self._extend(soon)
        self._start(
            "part", ("plan", self._run, 1), ("shard", self._fetch_shards, min(SHARDS_AT_ONCE, len(self._names)))
        )

    def _wait_for_share(self, need: int) -> None:
        wait = Wait(self._remote.options.timeout if need else 0)
        while need > (left := self._shares.left()):
            while open_shards().give_up():  # release room for the other jobs
                pass
            if not wait.goes_on(left):
                who = describe_jobs(self._cache.root)
                del self._shares
                raise ConfigError(
                    f"the shards of a step take {need:,} bytes and can only be read as a whole, and the other jobs in "
                    f"the cache {self._cache.root} leave {left:,}: raise remote.budget, wait for them, or set "
                    f"remote.cache to another directory ({who})",
                    key="remote.budget",
                    value=self._remote.options.budget,
                )

    def received(self) -> None:
        """Note that the consumer has received another step. Only one thread may call this."""
        self._received += 1

    def _release(self) -> None:
        self._board.clear()
        self._leases.clear()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._plan.receive(self._received)
                begun = time.monotonic()
                if self._plan.wants_more():
                    self._extend(next(self._uses, ()))
                elif (action := self._next()) is not None:
                    self._do(action)
                else:
                    spent = time.monotonic() - begun  # limits planning to a few percent of the time
                    with self._lock:
                        if not self._stopped:
                            self._planner.wait(min(_LONGEST_PAUSE, max(_PAUSE, 20 * spent)))
        except Stopped:
            pass
        except Exception as error:
            self._board.clear()  # readers download themselves, and meet the error at its step
            warnings.warn(f"prefetching has stopped: {error!r}", RuntimeWarning, stacklevel=2)
        finally:
            del self._shares  # no more plans

    def _next(self) -> Download | Evict | None:
        with self._lock:
            for shard in self._failed - self._running.keys():  # running ones must not start twice
                self._failed.remove(shard)
                self._plan.forget(shard)
            coming = {*self._running, *self._wanted}
        waiting = self._board.take_waiting()
        for shard in self._plan.resident.intersection(waiting) - coming:
            if not self._cache.holds(self._names[shard]):
                self._plan.lose(shard)
        self._plan.budget = self._shares.budget()
        if len(coming) >= SHARDS_AT_ONCE and not self._plan.exceeds_budget:
            return None
        return self._plan.next(waiting)

    def _do(self, action: Download | Evict) -> None:
        shard = action.shard
        if isinstance(action, Download):
            self._board.set(shard, Coming.SOON)
            with self._lock:
                self._wanted.append(shard)
                self._shard.notify_all()
            return
        self._board.set(shard, Coming.NEVER if action.by_range else Coming.SOON)
        with self._lock:
            if shard in self._wanted:
                self._wanted.remove(shard)
            while shard in self._running:
                self._check()
                self._dropped.add(shard)
                self._planner.wait()
            self._dropped.discard(shard)
            self._leases.pop(shard, None)
        self._present.discard(shard)
        if action.unread:
            self._remote.traffic.add(wasted_bytes=self._shards.versions[shard].size)
        if self._deletes and not self._shares.look():
            self._cache.evict(self._names[shard])

    def _extend(self, uses: Sequence[Use]) -> None:
        self._plan.extend(uses)
        for shard in {use.shard for use in uses}:
            if shard in self._present:
                self._present.remove(shard)
                self._remote.traffic.found(self._names[shard])
            if not self._plan.is_by_range(shard):
                self._board.set(shard, Coming.SOON)

    def _fetch_shards(self) -> None:
        with contextlib.suppress(Stopped):
            while True:
                with self._lock:
                    while not self._wanted:
                        self._check()
                        self._shard.wait()
                    self._check()
                    shard = self._wanted.popleft()
                    self._running[shard] = None
                try:
                    self._keep(shard, self._fetch_shard(shard))  # no name here may hold the lease
                finally:
                    with self._lock:
                        del self._running[shard]
                        self._asked.discard(shard)
                        self._shard.notify_all()
                        self._planner.notify()

    def _keep(self, shard: int, lease: Lease | None) -> None:
        if lease is not None:
            if shard in self._arrived:
                self._arrived.remove(shard)
            else:
                self._remote.traffic.found(self._names[shard])  # another process has downloaded it
        with self._lock:
            if lease is not None and not self._stopped:
                self._leases[shard] = lease
                while len(self._leases) > max(8, open_files_limit() // 8):
                    self._leases.popitem(last=False)

    def _fetch_shard(self, shard: int) -> Lease | None:
        """Return a lease of a shard; None if the download fails, which its reader then reports."""
        url, version, timeout = self._shards.urls[shard], self._shards.versions[shard], self._remote.options.timeout
        self._check()
        coming = Coming.UNKNOWN
        wait = Wait(
            timeout if shard in self._shards.whole else min(timeout, _ROOM_SECONDS),
            pause=lambda seconds: self._wait_for_room(shard, seconds),
        )
        try:
            return self._cache.fetch(
                url, version, lambda descriptor: self._download(shard, descriptor), open_shards().give_up, wait
            )
        except _Dropped:
            return None
        except CacheFullError:
            coming = coming if shard in self._shards.whole else Coming.NEVER
        except (OSError, SourceError):
            pass
        with self._lock:
            self._failed.add(shard)
        if not self._stopped:
            self._board.set(shard, coming)
        return None

    def _wait_for_room(self, shard: int, seconds: float) -> None:
        with self._lock:
            self._check()
            if shard in self._dropped:
                raise _Dropped
            self._shard.wait(seconds)

    def _download(self, shard: int, descriptor: int) -> None:
        chunks = cut([0], [self._shards.versions[shard].size], int(self._remote.options.part_bytes))
        job = _Job(shard, descriptor, len(chunks), threading.Condition(self._lock))
        with self._lock:
            # Requests follow the order of the plan, but never wait for a download of another process.
            self._shard.wait_for(lambda: self._stopped or self._is_next(shard), timeout=_LONGEST_PAUSE)
            self._asked.add(shard)
            self._shard.notify_all()
            self._chunks.extend((job, chunk) for chunk in chunks)
            self._queued.notify(len(chunks))
            while job.left and not job.errors:
                self._check()
                job.changed.wait(_LONGEST_PAUSE)
        if job.errors:
            raise job.errors.pop()
        self._arrived.add(shard)
        self._remote.traffic.downloaded(self._names[shard])

    def _is_next(self, shard: int) -> bool:
        return all(earlier in self._asked for earlier in itertools.takewhile(shard.__ne__, self._running))

    def _fetch_chunk(self, owner: _Job, chunk: Chunk) -> None:
        if owner.errors:
            return
        url, version = self._shards.urls[owner.shard], self._shards.versions[owner.shard]
        error: BaseException | None = None
        try:
            client, key = client_of(url, self._remote)
            client.stream(url, key, version, chunk, lambda at, data: write(owner.descriptor, at, data), self._check)
        except BaseException as found:  # raised in the thread that waits for the shard
            error = found
        with self._lock:
            if error is None:
                owner.left -= 1  # a shard that lacks a chunk is never complete
            # The traceback refers to this frame, so an unhandled error would keep the deleted file open.
            elif not (self._stopped or owner.errors):
                owner.errors.append(error)
            error = None
            owner.changed.notify()


def write(descriptor: int, offset: int, data: Any) -> None:
    view = memoryview(data)
    while len(view):
        count = write_at(descriptor, view, offset)
        view, offset = view[count:], offset + count
