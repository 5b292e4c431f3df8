"""A proxy with faults in front of an object store, which counts what is asked of it."""

import contextlib
import http.client
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from object_server import LoopbackServer, QuietHandler

_CHUNK = 1 << 18
_PER_HOP = {"connection", "keep-alive", "transfer-encoding"}
_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong. Probabilities are per request and apply to reads (GET) of objects unless they say otherwise.

    Attributes:
        busy: Probability of a 503, of any request.
        cut: Probability that the connection closes in the middle of the body.
        short: Probability that a 206 has half of the bytes that its Content-Range names.
        stall: Probability that the body pauses in the middle, for `stall_seconds`.
        stall_seconds: Length of a pause; `FaultProxy.resume` and the proxy's end end it.
        latency: Seconds before each answer.
        rate: Bytes per second of each connection; None means no limit.
        etag: An ETag that all objects have instead of theirs: an If-Match with another one fails.
        expiring: Whether requests need a session token that is a time in the future, in seconds since the epoch.
        keys: Regular expression that is searched in the keys to which all this applies.
        attempts: Number of times that one and the same request fails at most; None means always.
    """

    busy: float = 0
    cut: float = 0
    short: float = 0
    stall: float = 0
    stall_seconds: float = 3600
    latency: float = 0
    rate: float | None = None
    etag: str | None = None
    expiring: bool = False
    keys: str = ""
    attempts: int | None = None


@dataclass
class Counts:
    """What went through the proxy, by key: the path of the URL, which for S3 begins with the bucket.

    Attributes:
        requests: Number of requests by (method, key), LISTs not included.
        bytes: Bytes of bodies that were sent to the client.
        lists: Number of LISTs by bucket and prefix.
        faults: Number of faults by kind, such as "cut".
        ranges: The Range headers, in order of arrival.
        most_at_once: Most requests that were under way at one time.
    """

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    lists: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    ranges: list[tuple[str, str]] = field(default_factory=list)
    most_at_once: int = 0

    def gets(self, key: str) -> int:
        return sum(count for (method, name), count in self.requests.items() if method == "GET" and name.endswith(key))


class FaultProxy(LoopbackServer):
    """A proxy in front of `upstream`. The same requests meet the same faults, in whatever order they arrive.

    Attributes:
        faults: What goes wrong from now on.
        counts: What has happened since the start or the last `reset`.
        stalled: Set once a body pauses.
        fatal: The number of the request at which `kill` is called, from 0, and whether the store has served it by then;
            the client gets no answer.
    """

    def __init__(self, upstream: str, faults: Faults | None = None, *, seed: int = 0) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.faults = faults or Faults()
        self.seed = seed
        self._lock = threading.Lock()
        self._down_until = 0.0
        self.stalled = threading.Event()
        self.fatal: tuple[int, bool] | None = None
        self.kill: Callable[[], object] = lambda: None
        self._resumed = threading.Event()
        self.reset()
        super().__init__(_Handler)

    def reset(self) -> None:
        """Count from zero, and let the first of equal requests be the first again."""
        with self._lock:
            self.counts = Counts()
            self._attempts: Counter[tuple[str, ...]] = Counter()
            self._at_once = self.served = 0

    def outage(self, seconds: float = float("inf")) -> None:
        """Close all connections now, and each new one until so many seconds are over or `recover` is called."""
        self._down_until = time.monotonic() + seconds
        self.drop_connections()

    def recover(self) -> None:
        """End an outage."""
        self._down_until = 0.0

    def resume(self) -> None:
        """End all pauses, also those that would begin later."""
        self._resumed.set()

    def close(self) -> None:
        self.resume()
        super().close()

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self._down_until

    def choose(self, method: str, target: str, key: str, span: str) -> tuple[Faults, str | None, random.Random]:
        """Return the faults that apply to a request, the kind of the one it meets, and what decides its place."""
        faults = self.faults if re.search(self.faults.keys, key) else Faults()
        with self._lock:
            self._attempts[method, target, span] += 1
            attempt = self._attempts[method, target, span]
        # Without the bucket, whose name is another in each run; in Azure it follows that of the account.
        inside = re.sub(r"bucket-\w+", "", target.lstrip("/").partition("/")[2])
        decide = random.Random(f"{self.seed} {method} {inside} {span} {attempt}")
        if faults.attempts is not None and attempt > faults.attempts:
            return faults, None, decide
        kinds = ("busy", "cut", "short", "stall") if method == "GET" else ("busy",)
        drawn = [(kind, decide.random()) for kind in kinds]
        return faults, next((kind for kind, number in drawn if number < getattr(faults, kind)), None), decide

    def stall(self, seconds: float) -> None:
        """Pause a body."""
        self.stalled.set()
        self._resumed.wait(seconds)

    @contextlib.contextmanager
    def counted(self, method: str, key: str, query: str, span: str):
        asked = parse_qs(query)
        counts = self.counts
        with self._lock:
            if "list-type" in asked:
                counts.lists[f"{key}/{asked.get('prefix', [''])[0]}"] += 1
            else:
                counts.requests[method, key] += 1
                counts.ranges += [(key, span)] if span else []
            self.served += 1
            self._at_once += 1
            counts.most_at_once = max(counts.most_at_once, self._at_once)
        try:
            yield counts
        finally:
            with self._lock:
                self._at_once -= 1

    def add(self, counter: Counter[str], name: str, number: int = 1) -> None:
        with self._lock:
            counter[name] += number


class _Handler(QuietHandler):
    """Serves one connection, over one connection to the store."""

    server: FaultProxy

    def setup(self) -> None:
        super().setup()
        self._upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)

    def finish(self) -> None:
        self._upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # the client has gone away, and the server would wait for the rest
            return self._drop()
        url = urlsplit(self.path)
        key, span = unquote(url.path).strip("/"), self.headers.get("Range", "")
        proxy, method = self.server, self.command
        with proxy.counted(method, key, url.query, span) as counts:
            is_fatal = proxy.fatal is not None and proxy.served == proxy.fatal[0] + 1
            if is_fatal and not proxy.fatal[1]:
                proxy.kill()
                return self._drop()
            if proxy.is_down:
                proxy.add(counts.faults, "outage")
                return self._drop()
            faults, kind, decide = proxy.choose(method, self.path, key, span)
            proxy.closing.wait(faults.latency)
            if kind == "busy":
                proxy.add(counts.faults, kind)
                return self._answer(503, {"Retry-After": "0", "Content-Length": str(len(_BUSY))}, _BUSY)
            if faults.expiring and float(self.headers.get("X-Amz-Security-Token", 0)) < time.time():
                proxy.add(counts.faults, "expired")
                return self._answer(403, {"Content-Length": str(len(_EXPIRED))}, _EXPIRED)
            if faults.etag and self.headers.get("If-Match", faults.etag) != faults.etag:
                proxy.add(counts.faults, "etag")
                return self._answer(412, {"Content-Length": "0"})
            return self._forward(body, key, counts, faults, "fatal" if is_fatal else kind, decide)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PROPFIND = _serve

    def _forward(
        self, body: bytes, key: str, counts: Counts, faults: Faults, kind: str | None, decide: random.Random
    ) -> None:
        # The host stays as it is: it is part of what the client signed.
        passed = {name: text for name, text in self.headers.items() if name.lower() not in _PER_HOP}
        if faults.etag:
            passed = {name: text for name, text in passed.items() if name.lower() != "if-match"}
        self._upstream.request(self.command, self.path, body=body or None, headers=passed)
        found = self._upstream.getresponse()
        if kind == "fatal":
            self.server.kill()
            found.read()
            return self._drop()
        headers = {name.title(): text for name, text in found.getheaders() if name.lower() not in _PER_HOP}
        if (etag := headers.pop("Etag", None)) is not None:
            headers["ETag"] = faults.etag or etag
        length = int(headers.get("Content-Length", 0)) if self.command != "HEAD" else 0
        if found.chunked:
            data = found.read()
            return self._answer(found.status, {**headers, "Content-Length": str(len(data))}, data)
        if found.status >= 300 or not length or (kind == "short" and found.status != 206):
            kind = None
        if kind is not None:
            self.server.add(counts.faults, kind)
        sent = length // 2 if kind == "short" else length
        if kind == "short":
            headers["Content-Length"] = str(sent)
        self._answer(found.status, headers)
        place = decide.randrange(length) if kind in ("cut", "stall") else sent
        self._copy(found, place, key, counts, faults)
        if kind == "cut":
            found.close()
            return self._drop()
        if kind == "stall":
            self.server.stall(faults.stall_seconds)
        self._copy(found, sent - place, key, counts, faults)
        found.read()
        return None

    def _copy(self, found: http.client.HTTPResponse, length: int, key: str, counts: Counts, faults: Faults) -> None:
        chunk = _CHUNK if faults.rate is None else max(1, min(_CHUNK, int(faults.rate / 50)))
        due = time.monotonic()
        while length > 0 and (data := found.read(min(length, chunk))):
            self.server.add(counts.bytes, key, len(data))  # first, so that a client that has it finds it counted
            self.wfile.write(data)
            length -= len(data)
            if faults.rate is not None:
                due += len(data) / faults.rate
                self.server.closing.wait(max(0, due - time.monotonic()))

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response_only(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _drop(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(2)
