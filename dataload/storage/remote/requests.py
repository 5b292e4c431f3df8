"""Requests to object stores: ranges, retries, and checks of responses."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast
from urllib.parse import unquote, urlsplit

from dataload._util.caches import first_process
from dataload._util.failures import MACHINE_ERRNOS
from dataload._util.system import LOCK_SH
from dataload._util.threads import DaemonThreads
from dataload.errors import (
    ConfigError,
    DataloadError,
    MachineError,
    SourceError,
    SourceNotFoundError,
    StoreError,
    printable,
)
from dataload.storage.errors import rewritten_error
from dataload.storage.paths import is_hub_url, split_hub_url
from dataload.storage.remote.cache import CachedFile
from dataload.storage.remote.jobs import is_at, lock, opened
from dataload.storage.remote.settings import ObjectVersion, RemoteOptions
from dataload.storage.remote.traffic import Request, Traffic

_log = logging.getLogger("dataload")
_LONGEST_REASON = 300
_PERMANENT = re.compile(
    r"status(?: code:)? 4(?!08|29)\d\d|non-partial|NotImplemented|InvalidToken|builder error|NotSupported"
    r"|\bParse\(|expected u64|(?:Invalid|Missing)ContentLength|ParseContentRange|UnexpectedRange"
)
_SYSTEM = re.compile(r"os error (\d+)")
_THROTTLED = re.compile(r"status(?: code:)? (?:429|503)")
_NEEDS_RANGES = "; every mode of remote needs ranges: use a server that supports them, such as nginx, or copy the files"
_QUERY = re.compile(r"\?[^\s\"'<>)]*")
_CODE = re.compile(r"<Code>(\w+)</Code>|\bParse\(\s*(?:Header\(\s*)?(\w+)")  # of S3, or of hyper


def is_permanent(error: Exception, errors: Any) -> bool:
    """Return whether a retry would fail again; `errors` is the module `obstore.exceptions`."""
    kinds = ("PermissionDeniedError", "UnauthenticatedError", "NotSupportedError", "InvalidPathError")
    kinds += ("UnknownConfigurationKeyError",)
    permanent = isinstance(error, (ValueError, TypeError, *(getattr(errors, kind) for kind in kinds)))
    return permanent or _PERMANENT.search(str(error)) is not None


def failure_reason(error: BaseException, secrets: Iterable[str]) -> str:
    text = str(error)
    code = _CODE.search(text)
    # The server's response follows, which may repeat secrets of the request.
    text = " ".join(re.split(r"\n\s*\n|<\?xml|<Error>|: <", text)[0].split())
    for secret in secrets:
        text = text.replace(secret, "***")
    text = printable(_QUERY.sub("?...", text), _LONGEST_REASON, kept="")
    return f"{text or type(error).__name__}{f' ({code[1] or code[2]})' if code else ''}"


GAP = 1 << 16
"""Bytes between two ranges that are fetched too, because another request would take longer."""

SCHEMES = ("s3", "gs", "az", "http", "https", "hf", "memory")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [start, stop) of one object, at most one request; `at` is their offset for the receiver."""

    start: int
    stop: int
    at: int


def cut(starts: Iterable[int], stops: Iterable[int], most: int, first: int = 0) -> list[Chunk]:
    """Cut ranges into chunks of at most `most` bytes, to be received one after another from `first`."""
    chunks: list[Chunk] = []
    for start, stop in zip(starts, stops, strict=True):
        for begin in range(start, stop, most):
            end = min(begin + most, stop)
            chunks.append(Chunk(begin, end, first))
            first += end - begin
    return chunks


def split_url(url: str) -> tuple[str, str]:
    """Return the URL of the store and the object's key. Errors do not repeat possible secrets."""
    if is_hub_url(url):
        base, _, _, key = split_hub_url(url)
        return base, key
    parts = urlsplit(url, allow_fragments=False)
    scheme = parts.scheme.lower()
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in (*SCHEMES, "file"))
        raise ConfigError(f"{url}: URLs begin with one of {known}", key="paths", value=url)
    web = scheme in ("http", "https")
    if "@" in parts.netloc or (web and (parts.query or "#" in url)):
        raise ConfigError(
            f"a {scheme}:// URL has a user, a password, a query or a fragment, which may be secret: leave it out, and "
            "give credentials in storage_options or the environment (%23 is a # in a name)",
            key="paths",
        )
    query = f"?{parts.query}" if parts.query else ""
    key = f"{parts.path}{query}".strip("/")
    return f"{scheme}://{parts.netloc}", unquote(key) if web else key


T = TypeVar("T")

REQUESTS_IN_TIMEOUT = 4
"""The last attempt has to end before the time-out."""

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0  # seconds between attempts
_FIRST_NOTED = 8  # attempt, after about ten seconds: most outages are shorter
_INTERRUPTED_SECONDS = 0.5  # for a request that cleans up after Ctrl-C
_own_random = random.SystemRandom()  # the global generator is for transforms: a failure must not change its numbers


@dataclass(frozen=True, slots=True)
class Attempts:
    """Makes the calls of one client."""

    options: RemoteOptions
    secrets: Sequence[str]  # texts that no message may contain
    errors: Any  # the module `obstore.exceptions`
    threads: DaemonThreads  # make the calls of the main thread
    traffic: Traffic

    def make(self, what: str, url: str, call: Callable[[], T]) -> T:
        check_process()
        if not can_be_interrupted():
            return self._repeat(what, url, call)
        error = sys.exception()  # cleaning up after Ctrl-C may take requests, too
        interrupt = error if isinstance(error, KeyboardInterrupt) else None
        try:
            made = self.threads.submit(self._repeat, what, url, call)
            return made.result(None if interrupt is None else _INTERRUPTED_SECONDS)
        except TimeoutError:
            raise interrupt or StoreError(f"cannot {what}", path=url) from None

    def _repeat(self, what: str, url: str, call: Callable[[], T]) -> T:
        """Call until it succeeds. Texts of obstore may hold secrets and are not shown."""
        begun, attempts = time.monotonic(), 0
        last = begun + self.options.timeout * (1 - 1 / REQUESTS_IN_TIMEOUT)
        while True:
            attempts += 1
            try:
                return self._counted(what, call, again=attempts > 1)
            except (DataloadError, MemoryError):
                raise
            except (self.errors.NotFoundError, FileNotFoundError):
                raise SourceNotFoundError(f"there is no {url}", path=url) from None
            except self.errors.PreconditionError:
                raise rewritten_error(url) from None
            except FileExistsError:
                raise FileExistsError(url) from None
            except Exception as error:
                reason, permanent = failure_reason(error, self.secrets), is_permanent(error, self.errors)
                found = _SYSTEM.search(str(error))
            if found is not None and int(found[1]) in MACHINE_ERRNOS:
                raise MachineError(
                    f"cannot {what}: this machine lacks descriptors or memory ({reason}): raise `ulimit -n`, or lower "
                    "remote.connections",
                    path=url,
                )
            if permanent:
                remedy = _NEEDS_RANGES if "Range request not supported" in reason else ""
                raise StoreError(f"cannot {what}: {reason}{remedy}", path=url)
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (attempts - 1)) * _own_random.uniform(0.5, 1)
            if attempts > self.options.retries or time.monotonic() + wait > last:
                raise StoreError(
                    f"cannot {what}: {reason} ({attempts} attempts in {time.monotonic() - begun:.1f} s; the options "
                    "timeout and retries of remote allow more)",
                    path=url,
                )
            if attempts == _FIRST_NOTED:
                _log.warning("cannot %s: %s; trying again for up to %.0f s", what, reason, last - time.monotonic())
            time.sleep(wait)

    def _counted(self, what: str, call: Callable[[], T], *, again: bool) -> T:
        begun, failed, throttled = time.perf_counter(), True, False
        try:
            result = call()
            failed = False
        except BaseException as error:
            throttled = _THROTTLED.search(str(error)) is not None
            if type(error).__name__ == "PanicException":  # a bug or a bad setting, not the store's answer
                message = f"cannot {what}: obstore panicked with {failure_reason(error, self.secrets)}"
                raise StoreError(f"{message}: check the endpoint and the other storage_options") from None
            raise
        finally:
            request = Request(what, begun, time.perf_counter(), failed)
            self.traffic.requested(request, again=again, throttled=throttled)
        return result


def can_be_interrupted() -> bool:
    """Return whether this is the thread that Ctrl-C interrupts, which cannot happen while obstore waits."""
    return threading.get_ident() == threading.main_thread().ident and callable(signal.getsignal(signal.SIGINT))


def check_process() -> None:
    """Raise in a forked child of a process that used obstore, whose threads are gone: every call would hang."""
    if first_process("obstore") != os.getpid():
        raise SourceError(
            "this process was forked by one that had read from a URL, whose connections do not survive that: start "
            "processes with 'forkserver' or 'spawn'"
        )


_NAME = re.compile(r"[^~]*~[0-9a-f]{20}~(\d+)(?:~([0-9a-f]{32}))?")


@dataclass(frozen=True, slots=True)
class Checked:
    """A comparison of a shard with its name or hash: the evidence, `by` (None: there is none), and the difference."""

    path: str
    by: Literal["sha256", "md5", "length"] | None
    problem: str | None = None


def check_shard(file: CachedFile, sha256: str | None = None, *, md5: bool = True) -> Checked | None:
    """Compare a shard with its length and `sha256`, or else the `md5` in its name; None if it is gone."""
    with opened(file.path) as descriptor:
        # This lock prevents eviction, but does not count as a use of the shard.
        if descriptor is None or not lock(descriptor, LOCK_SH) or not is_at(descriptor, file.path):
            return None
        named = _NAME.fullmatch(file.name)
        if named is None:
            return Checked(file.path, None)
        size = os.fstat(descriptor).st_size
        if size != int(named[1]):
            return Checked(file.path, "length", f"it has {size} bytes, and the object has {named[1]}")
        by, expected = ("sha256", sha256) if sha256 else ("md5", named[2] if md5 else None)
        if expected is None:
            return Checked(file.path, "length")
        found = _digest(descriptor, by)
        differs = f"its {by.upper()} is {found}, and the object's is {expected}"
        return Checked(file.path, cast("Any", by), None if found == expected else differs)


def _digest(descriptor: int, algorithm: str) -> str:
    with open(descriptor, "rb", closefd=False) as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


_PAGE = 1000  # names that stores send at once
_MOST_NAMES = 1_000_000
_LONGEST = 1024  # characters of a key or an ETag, in any store
_REMEDY = "write a manifest (`dataload index --manifest`), or name the shards: {000..127}"


async def list_directory(
    obstore: Any, store: Any, url: str, key: str, *, page_seconds: float, group_seconds: float
) -> tuple[list[str], list[tuple[str, ObjectVersion]]]:
    """Return the directories and the objects, with their versions, of a directory; each step is limited in time."""
    found: dict[str, ObjectVersion] = {}
    begun = time.monotonic()
    depth = key.count("/") + 1 if key else 0
    pages: AsyncIterator[Any] = aiter(obstore.list(store, key or None, chunk_size=_PAGE))
    while page := await _in_time(anext(pages, None), url, page_seconds):
        for meta in page:
            if max(len(meta["path"]), len(meta["e_tag"] or "")) > _LONGEST:
                raise StoreError(
                    f"cannot list {url}: the store returned a name or an ETag of more than {_LONGEST} characters",
                    path=url,
                )
            name, *inner = meta["path"].split("/")[depth:] or [""]
            if inner or not meta["size"]:  # a directory, or the mark of one
                # Only a grouped listing skips nested names. It has no pages, so only time bounds it.
                seconds = group_seconds + time.monotonic() - begun
                listing = await _in_time(obstore.list_with_delimiter_async(store, key or None), url, seconds)
                return _grouped(listing, url, key)
            if name in found:
                raise StoreError(f"cannot list {url}: the store repeats names, such as {name}", path=url)
            found[name] = ObjectVersion.of(meta, url)
        if len(found) > _MOST_NAMES:
            raise StoreError(f"cannot list {url}: it has more than {_MOST_NAMES:,} names; {_REMEDY}", path=url)
    return [], [*found.items()]


def _grouped(listing: Any, url: str, key: str) -> tuple[list[str], list[tuple[str, ObjectVersion]]]:
    folders = [name.rstrip("/").rpartition("/")[2] for name in listing["common_prefixes"]]
    objects = [meta for meta in listing["objects"] if meta["path"] != key]  # the mark of the directory itself
    return folders, [(meta["path"].rpartition("/")[2], ObjectVersion.of(meta, url)) for meta in objects]


async def _in_time(answer: Awaitable[T], url: str, seconds: float) -> T:
    import asyncio

    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise StoreError(
            f"cannot list {url}: the list has not ended after {seconds:.0f} s; raise the option timeout of remote, or "
            f"{_REMEDY}",
            path=url,
        ) from None
