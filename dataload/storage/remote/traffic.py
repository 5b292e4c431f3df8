"""Counters of a process's downloads on behalf of a source, and its last requests."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple, Self

_KEPT = 256  # requests until the next report
_THROTTLED = 0.01  # fraction of the requests: a store that refuses more of them is the limit
_AGAIN = 0.1  # fraction of the downloads of shards: if more are repeated, the cache is too small
_CONNECTED = 0.5  # fraction of the time: connections that are used less are idle
_TRANSFER = 0.5  # fraction of the time of requests: if bytes flow for less of it, they mostly wait for answers


@dataclass(frozen=True, slots=True)
class Downloads:
    """Data downloaded from object stores and web servers."""

    requests: int = 0  # including retries
    retries: int = 0  # requests that repeated a failed one
    throttled: int = 0  # responses with status 429 or 503, by which a store asks for fewer requests
    nbytes: int = 0  # that arrived; of a response that broke off only whole mebibytes, if it was prefetched
    wasted_bytes: int = 0  # between merged ranges, of failed responses, and of shards evicted before they were read
    request_seconds: float = 0.0  # of all requests together
    transfer_seconds: float = 0.0  # from the beginnings of the responses to their ends
    shards_found: int = 0  # in the cache when they were first needed
    shards_downloaded: int = 0  # as a whole, into the cache
    shards_again: int = 0  # downloaded again after eviction
    connections: int = 0  # maximum number of concurrent requests; a limit, not a sum

    def __add__(self, other: Self) -> Self:
        return self._combined(other, 1)

    def __sub__(self, earlier: Self) -> Self:
        return self._combined(earlier, -1)

    def _combined(self, other: Self, sign: int) -> Self:
        pairs = zip(astuple(self), astuple(other), strict=True)
        connections = max(self.connections, other.connections)
        return replace(type(self)(*(one + sign * more for one, more in pairs)), connections=connections)

    def advice(self, seconds: float, *, processes: bool) -> str:
        """Return what would help a loader that mostly downloads, as measured for `seconds`."""
        by_range = not self.shards_downloaded
        if self.throttled > _THROTTLED * self.requests:
            return (
                f"the store throttles, {self.throttled:,} of {self.requests:,} answers were 429 or 503: allow fewer "
                "remote.connections, or shuffle in a pool of more shards"
            )
        if self.shards_again > _AGAIN * self.shards_downloaded:
            return (
                f"the cache is too small, {self.shards_again:,} of {self.shards_downloaded:,} downloads of shards "
                "were of evicted ones: raise remote.budget, or shuffle in a pool of fewer shards"
            )
        used = ratio(self.request_seconds, seconds)
        if used < _CONNECTED * self.connections:
            late = f"{used:.1f} of {self.connections} connections are in use: "
            if not by_range:
                return f"{late}raise remote.budget, to download further ahead, or lower remote.part_bytes"
            if processes:
                return (
                    f"{late}worker processes fetch no ranges ahead, so use threads, or whole shards in a remote.cache"
                )
            return f"{late}the order or the consumer asks too late; whole shards in a remote.cache may help"
        rate = f"{used:.1f} connections bring {ratio(self.nbytes, seconds) / 1e6:,.1f} MB/s"
        if self.transfer_seconds < _TRANSFER * self.request_seconds:
            wait = 1e3 * ratio(self.request_seconds - self.transfer_seconds, self.requests)
            fewer = "keep whole shards in a remote.cache" if by_range else "raise remote.part_bytes"
            wasted = f", {ratio(self.wasted_bytes, self.nbytes):.0%} of it wasted" if by_range else ""
            return f"{rate}{wasted}, and answers take {wait:.0f} ms to begin: {fewer}, or allow more remote.connections"
        kept = "keep shards in a remote.cache" if by_range else "raise remote.budget, which keeps more shards"
        return f"{rate}: allow more remote.connections if the network has more, or {kept}"

    def __str__(self) -> str:
        wasted = f"{self.wasted_bytes / self.nbytes:.0%} of it wasted" if self.nbytes else "none of it wasted"
        line = (
            f"downloaded {self.nbytes / 1e6:,.1f} MB, {wasted}, by {self.requests:,} requests; "
            f"{self.retries:,} were repeated, {self.throttled:,} throttled"
        )
        if self.shards_found or self.shards_downloaded:
            line += (
                f"; {self.shards_found:,} {'shard was' if self.shards_found == 1 else 'shards were'} in the cache, "
                f"{self.shards_downloaded:,} {'was' if self.shards_downloaded == 1 else 'were'} downloaded, "
                f"{self.shards_again:,} of them again"
            )
        return line


class Request(NamedTuple):
    """A request: purpose, begin and end in seconds of `time.perf_counter`, and whether it failed."""

    what: str
    begun: float
    ended: float
    failed: bool


class Report(NamedTuple):
    """A worker process's counters and requests since its last report."""

    downloads: Downloads
    requests: list[Request]


@dataclass(slots=True)
class Traffic:
    """Adds up `Downloads` in one process. Thread-safe; `listeners` are called with each finished request."""

    connections: int = 0
    listeners: list[Callable[[Request], None]] = field(default_factory=list[Callable[[Request], None]])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _figures: Counter[str] = field(default_factory=Counter[str])
    _shards: set[str] = field(default_factory=set[str])  # found or downloaded
    _last: deque[Request] = field(default_factory=lambda: deque[Request](maxlen=_KEPT))
    _reported: Downloads = field(default_factory=Downloads)

    def add(self, **figures: float) -> None:
        with self._lock:
            self._figures.update(figures)  # pyright: ignore[reportArgumentType] # seconds may be fractions

    def requested(self, request: Request, *, again: bool, throttled: bool) -> None:
        self.add(
            requests=1, retries=again, throttled=throttled, request_seconds=max(0.0, request.ended - request.begun)
        )
        self._last.append(request)
        for listener in tuple(self.listeners):
            listener(request)

    def downloaded(self, shard: str) -> None:
        with self._lock:
            again = shard in self._shards
            self._shards.add(shard)
        self.add(shards_downloaded=1, shards_again=again)

    def found(self, shard: str) -> None:
        with self._lock:
            self._shards.add(shard)
        self.add(shards_found=1)

    def knows(self, shard: str) -> bool:
        return shard in self._shards

    def total(self) -> Downloads:
        with self._lock:
            return Downloads(**self._figures, connections=self.connections)  # pyright: ignore[reportArgumentType]

    def report(self) -> Report | None:
        """Return the counters since the last call; None if nothing has changed."""
        now = self.total()
        if now == replace(self._reported, connections=now.connections):
            return None
        found = Report(now - self._reported, [self._last.popleft() for _ in range(len(self._last))])
        self._reported = now
        return found


def ratio(part: float, whole: float) -> float:
    """Return `part` / `whole`; 0 if `whole` is 0."""
    return part / whole if whole else 0.0
