"""Threads that fetch chunks before they are read, and ranges that they fetch, a bounded number of bytes ahead."""

from __future__ import annotations

import functools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from dataload._util.clock import current_reader
from dataload._util.threads import LONGEST_SLEEP
from dataload.errors import DataloadError, MachineError, StoreError
from dataload.storage.record_file import Runs, merge_ranges
from dataload.storage.remote.clients import client_of
from dataload.storage.remote.requests import GAP, Chunk, cut
from dataload.storage.remote.settings import ObjectVersion, Remote
from dataload.types import BytesArray, Int64Array

T = TypeVar("T")

_CLOSE_SECONDS = 1.0


class Stopped(DataloadError):
    """Prefetching has ended. This error is never raised to users."""


class DownloadThreads(ABC, Generic[T]):
    """Fetches queued chunks in as many daemon threads as there are connections, until it is closed."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards everything below, and the state of subclasses
        self._queued = threading.Condition(self._lock)
        self._conditions = [self._queued]  # that threads wait for
        self._stopped = False
        self._chunks: deque[tuple[T, Chunk]] = deque()
        self._threads: list[threading.Thread] = []

    def _condition(self) -> threading.Condition:
        self._conditions.append(threading.Condition(self._lock))
        return self._conditions[-1]

    def _start(self, name: str, *others: tuple[str, Callable[[], None], int]) -> None:
        """Start the threads that fetch chunks, and others: (name, target, number). Names are for people."""
        kinds = [*others, (name, self._fetch_chunks, self._remote.options.connections)]
        named = [(f"dataload-ahead-{kind}-{n}", target) for kind, target, count in kinds for n in range(count)]
        for title, target in named:
            thread = threading.Thread(target=target, name=title, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.close()  # or readers would wait for what no thread fetches
                message = "the machine starts no more threads for downloads: lower remote.connections or num_workers"
                raise MachineError(message) from error
            self._threads.append(thread)

    def close(self) -> None:
        """Stop fetching. May be called twice, and in a forked child."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._stopped = True
            self._chunks.clear()
            self._release()
            for condition in self._conditions:
                condition.notify_all()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline - time.monotonic())

    @abstractmethod
    def _release(self) -> None:
        """Let go of everything, and wake the readers that wait. Called by `close`, with the lock."""

    @abstractmethod
    def _fetch_chunk(self, owner: T, chunk: Chunk) -> None:
        """Fetch a chunk on behalf of `owner`, which keeps the errors."""

    def _fetch_chunks(self) -> None:
        while True:
            with self._lock:
                while not (self._chunks or self._stopped):
                    self._queued.wait()
                if self._stopped:
                    return
                owner, chunk = self._chunks.popleft()
            self._fetch_chunk(owner, chunk)
            del owner  # it may hold memory, or a file

    def _check(self) -> None:
        if self._stopped:
            raise Stopped


_MOST_BYTES = 1 << 28  # fetched and not yet received by the consumer
_GROUP_BYTES, _GROUP_STEPS = 1 << 23, 32  # steps whose ranges are merged


StepRanges: TypeAlias = Sequence[tuple[str, Int64Array, Int64Array]]
"""The ranges of one step: URLs, each with (n,) int64 offsets and lengths in bytes."""


class _Fetched:
    """The ranges of one file for some steps, merged into runs, one after another in a buffer."""

    def __init__(self, url: str, runs: Runs, part_bytes: int, last: int) -> None:
        self.url = url
        self.last = last  # step that reads them
        self.starts, self.stops = runs.starts, runs.stops
        lengths = runs.stops - runs.starts
        self.begins = np.cumsum(lengths) - lengths
        self.buffer = np.empty(int(lengths.sum()), np.uint8)
        self.chunks = cut(runs.starts.tolist(), runs.stops.tolist(), part_bytes)
        self.left = np.zeros(len(lengths), np.int64)  # missing chunks, by run
        for chunk in self.chunks:
            self.left[self._run_of(chunk)] += 1
        self.errors: list[Exception] = []  # of requests

    def _run_of(self, chunk: Chunk) -> int:
        return int(np.searchsorted(self.starts, chunk.start, side="right")) - 1

    def write(self, chunk: Chunk, offset: int, data: Any) -> None:
        at = chunk.at + offset - chunk.start
        self.buffer[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def end(self, chunk: Chunk) -> None:
        self.left[self._run_of(chunk)] -= 1

    def copy(self, runs: Int64Array, starts: Int64Array, stops: Int64Array, targets: list[BytesArray]) -> None:
        """Copy ranges, each inside one of `runs`, into `targets`."""
        begins = self.begins[runs] + starts - self.starts[runs]
        for target, begin, size in zip(targets, begins.tolist(), (stops - starts).tolist(), strict=True):
            target[:] = self.buffer[begin : begin + size]


class RangePrefetcher(DownloadThreads[_Fetched]):
    """Fetches ranges of several steps in the background; looks farther ahead whenever a read had to wait."""

    def __init__(self, versions: Mapping[str, ObjectVersion], steps: Iterator[StepRanges], remote: Remote) -> None:
        super().__init__(remote)
        self._versions = versions
        self._steps = steps
        self._part_bytes = int(remote.options.part_bytes)
        self._planner, self._arrived = self._condition(), self._condition()
        self._ended = False
        self._received = self._planned = 0  # steps
        self._window = 0  # bytes
        self._held: dict[str, deque[_Fetched]] = {}
        self._bytes = 0  # in `_held`
        self._reader = current_reader()
        remote.ranges.setdefault(self._reader, []).append(self)
        self._start("range", ("ranges", self._run, 1))

    def received(self) -> None:
        with self._lock:
            self._received += 1
            self._planner.notify()

    def _release(self) -> None:
        others = [each for each in self._remote.ranges.pop(self._reader, ()) if each is not self]
        if others:
            self._remote.ranges[self._reader] = others
        self._held.clear()

    def fill(
        self,
        url: str,
        buffer: BytesArray,
        starts: Int64Array,
        stops: Int64Array,
        others: Sequence[RangePrefetcher] = (),
        *,
        waits: bool = True,
    ) -> Int64Array:
        """Copy runs of a file into `buffer`, waiting for those that this one or `others` have requested.

        If it `waits`, the runs are of a step that one of them will plan: wait for that, too.

        Returns (n,) int64, the runs not requested.
        """
        ends = np.cumsum(stops - starts)
        targets = [buffer[end - size : end] for end, size in zip(ends.tolist(), (stops - starts).tolist(), strict=True)]
        missing = np.arange(len(starts))
        failed: list[Int64Array] = []
        seen = dict[RangePrefetcher, int].fromkeys((self, *others), -1)  # steps that each had planned
        while len(missing) and seen:
            # All prefetchers of a loader plan the same steps: ask the one that has planned least.
            ahead = min(seen, key=seen.__getitem__)
            planned = ahead._plan_beyond(seen.pop(ahead), waits=waits)
            if planned is None:
                continue
            seen[ahead] = planned
            with ahead._lock:
                held = [fetched for fetched in ahead._held.get(url, ()) if len(fetched.starts)]
            for fetched in held:
                runs = np.searchsorted(fetched.starts, starts[missing], side="right") - 1
                inside = (runs >= 0) & (stops[missing] <= fetched.stops[runs])
                found, runs = missing[inside], runs[inside]
                if len(found) and ahead._wait(fetched, runs):
                    fetched.copy(runs, starts[found], stops[found], [targets[row] for row in found.tolist()])
                else:
                    failed.append(found)
                missing = missing[~inside]
        return np.concatenate([missing, *failed])

    def _plan_beyond(self, seen: int | None, *, waits: bool) -> int | None:
        """Wait until more than `seen` steps are planned, and return their number; None if none will be."""
        with self._lock:
            if waits and seen == self._planned and not self._ended and self._bytes <= _MOST_BYTES:
                self._window = max(self._window, self._bytes)
                self._planner.notify()
                self._arrived.wait_for(lambda: self._stopped or self._ended or self._planned != seen)
            return None if self._stopped or self._planned == seen else self._planned

    def _wait(self, fetched: _Fetched, runs: Int64Array) -> bool:
        """Wait for runs; return False if that has failed before, so that the reader fetches them."""
        with self._lock:
            if fetched.left[runs].any() and not fetched.errors:
                if not self._chunks:  # the queue is empty, so the requests began too late
                    self._window = min(2 * self._window, _MOST_BYTES)
                    self._planner.notify()
                while not self._stopped and not fetched.errors and fetched.left[runs].any():
                    self._arrived.wait(LONGEST_SLEEP)
                for error in fetched.errors:
                    if isinstance(error, StoreError) and fetched.left[runs].any():
                        raise error
            return not fetched.left[runs].any()

    def _run(self) -> None:
        try:
            self._plan_requests()
        finally:
            with self._lock:
                self._ended = True  # no reader waits for a plan
                self._arrived.notify_all()

    def _plan_requests(self) -> None:
        while True:
            with self._lock:
                while not self._stopped and not self._drop_received() and self._bytes > self._window:
                    self._planner.wait()
                if self._stopped:
                    return
            group = self._next_group()
            last = self._planned + len(group) - 1
            fetched = [self._merge(url, ranges, last) for url, ranges in _by_url(group).items()]
            with self._lock:
                self._planned += len(group)
                self._window = self._window or 4 * sum(each.buffer.nbytes for each in fetched)
                for each in fetched:
                    self._held.setdefault(each.url, deque()).append(each)
                    self._bytes += each.buffer.nbytes
                    self._chunks.extend((each, chunk) for chunk in each.chunks)
                self._queued.notify_all()
                self._arrived.notify_all()
            if not group:
                return

    def _next_group(self) -> list[StepRanges]:
        group: list[StepRanges] = []
        nbytes = 0
        most = _GROUP_STEPS if self._planned else 1  # the first step comes soon
        try:
            while len(group) < most and nbytes < _GROUP_BYTES and (step := next(self._steps, None)) is not None:
                group.append(step)
                nbytes += sum(int(lengths.sum()) for _, _, lengths in step)
        except Exception:  # an error of the order or a table: its step raises it again
            self._steps = iter(())
        return group

    def _merge(self, url: str, ranges: list[tuple[Int64Array, Int64Array]], last: int) -> _Fetched:
        offsets, lengths = (np.concatenate(columns) for columns in zip(*ranges, strict=True))
        # Readers report ranges outside the file. They merge empty ranges with their neighbours, so these stay here.
        useful = (offsets >= 0) & (lengths >= 0) & (lengths <= self._versions[url].size - offsets)
        none = np.empty(0, np.int64)
        runs = merge_ranges(offsets[useful], lengths[useful], GAP) if useful.any() else Runs(none, none, none)
        fetched = _Fetched(url, runs, self._part_bytes, last)
        self._remote.traffic.add(wasted_bytes=max(0, fetched.buffer.nbytes - int(lengths[useful].sum())))
        return fetched

    def _drop_received(self) -> bool:
        dropped = False
        for url, held in [*self._held.items()]:
            while held and held[0].last < self._received:
                self._bytes -= held.popleft().buffer.nbytes
                dropped = True
            if not held:
                del self._held[url]  # there may be a million files
        return dropped

    def _fetch_chunk(self, owner: _Fetched, chunk: Chunk) -> None:
        try:
            client, key = client_of(owner.url, self._remote)
            receive = functools.partial(owner.write, chunk)
            client.stream(owner.url, key, self._versions[owner.url], chunk, receive, self._check)
        except Exception as error:  # the reader retries, and raises the error
            owner.errors.append(error.with_traceback(None))  # the traceback refers to this frame
        else:
            with self._lock:
                owner.end(chunk)
        with self._lock:
            self._arrived.notify_all()


def _by_url(group: list[StepRanges]) -> dict[str, list[tuple[Int64Array, Int64Array]]]:
    found: dict[str, list[tuple[Int64Array, Int64Array]]] = {}
    for step in group:
        for url, offsets, lengths in step:
            found.setdefault(url, []).append((offsets, lengths))
    return found
