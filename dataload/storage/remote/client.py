"""Requests to object stores: bounded, repeated until the time-out, and made by clients of this process."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from dataload._util.caches import PerProcess
from dataload._util.lazy import load_optional
from dataload._util.threads import DaemonThreads
from dataload.errors import (
    ChangedFileError,
    ConfigError,
    DataloadError,
    SourceNotFoundError,
    StoreError,
)
from dataload.storage.errors import rewritten_error
from dataload.storage.paths import nameless_error
from dataload.storage.remote.requests import (
    REQUESTS_IN_TIMEOUT,
    Attempts,
    Chunk,
    can_be_interrupted,
    check_process,
    failure_reason,
    list_directory,
    split_url,
)
from dataload.storage.remote.settings import ObjectVersion, Remote, RemoteOptions, is_plain
from dataload.storage.remote.traffic import Traffic

T = TypeVar("T")

_STALLS_IN_TIMEOUT = 12
_CHUNK_BYTES = (1 << 18) + 1  # larger buffers are returned to the system, and faulted in again


class _Ended(DataloadError):
    """The receiver takes no more parts."""


class ObjectClient:
    """Requests to the store at the URL `base`, such as a bucket, from this process. Thread-safe."""

    def __init__(self, base: str, remote: Remote) -> None:
        self._options: RemoteOptions = remote.options
        self._secrets = [text for _, text in remote.store.secrets() if len(text) > 3]
        self._obstore: Any = load_optional(
            "obstore", needed_by=f"reading {base.partition(':')[0]}:// URLs", extra="remote"
        )
        self._errors: Any = load_optional("obstore.exceptions", needed_by="URLs", extra="remote")
        self._base, self._given = base, remote.store
        self._store = self._make_store({"max_retries": 0})
        # One thread more, for the request that `put_parts` makes inside of a request.
        self._pool = DaemonThreads(self._options.connections + 1, "dataload-remote")
        self._traffic = Traffic()
        self._attempts = Attempts(self._options, self._secrets, self._errors, self._pool, self._traffic)
        self._shared: ObjectClient | None = None  # kept alive for those who ask for it

    def counted(self, traffic: Traffic) -> ObjectClient:
        """Return the same client, which counts into `traffic`."""
        found = copy.copy(self)
        found._traffic, found._shared = traffic, self
        found._attempts = replace(self._attempts, traffic=traffic)
        return found

    @cached_property
    def _upload_store(self) -> Any:
        """The store for uploads in parts, each of which obstore repeats by itself."""
        timeout = timedelta(seconds=self._options.timeout)
        return self._make_store({"max_retries": self._options.retries, "retry_timeout": timeout})

    def _make_store(self, retries: Mapping[str, Any]) -> Any:
        base = self._base
        stores: Any = load_optional("obstore.store", needed_by="URLs", extra="remote")
        if base.startswith("memory:"):
            return _memories.get(dict).setdefault(base, stores.MemoryStore())
        if base.endswith("://"):
            raise nameless_error(base)
        given = self._given.arguments()
        timeout = self._options.timeout
        client = {
            "timeout": f"{int(1000 * timeout / REQUESTS_IN_TIMEOUT)}ms",
            "read_timeout": f"{int(1000 * timeout / _STALLS_IN_TIMEOUT)}ms",
            "connect_timeout": f"{int(1000 * timeout / _STALLS_IN_TIMEOUT)}ms",
            **({"allow_http": True} if is_plain(base, given) else {}),
            **given.pop("client_options", {}),
        }
        retry = given.pop("retry_config", retries)
        try:
            return stores.from_url(base, client_options=client, retry_config=retry, **given)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            message = f"storage_options do not fit {base}: {failure_reason(error, self._secrets)}"
            raise ConfigError(message, key="storage_options") from None

    def head(self, url: str, key: str) -> ObjectVersion | None:
        """Return the version of an object, or None if there is none."""
        try:
            return self._attempts.make(
                f"look up {url}", url, lambda: ObjectVersion.of(self._obstore.head(self._store, key), url)
            )
        except SourceNotFoundError:
            return None

    def list(self, url: str, key: str) -> tuple[list[str], list[tuple[str, ObjectVersion]]]:
        """Return the names of directories and of objects, with their versions, in a directory."""
        page, group = self._options.timeout / REQUESTS_IN_TIMEOUT, self._options.timeout / _STALLS_IN_TIMEOUT

        def listed() -> Any:
            import asyncio  # nothing else needs it

            listing = list_directory(self._obstore, self._store, url, key, page_seconds=page, group_seconds=group)
            return self._pool.submit(asyncio.run, listing).result()  # this thread may have a loop

        return self._attempts.make(f"list {url}", url, listed)

    def fetch(
        self,
        url: str,
        key: str,
        version: ObjectVersion,
        pieces: Sequence[Chunk],
        receive: Callable[[Chunk, int, Any], Any],
    ) -> None:
        """Fetch pieces of one version of an object, several at a time; ChangedFileError if it is another version now.

        `receive` is called with a piece, and the offset and bytes of each part of it; see `stream`. Once this has
        returned or raised, it is not called any more.
        """
        if len(pieces) == 1 and not can_be_interrupted():
            self.stream(url, key, version, pieces[0], partial(receive, pieces[0]))
            return
        receiving, ended = threading.Lock(), False

        def check() -> None:
            if ended:
                raise _Ended

        def get(piece: Chunk) -> None:
            def keep(offset: int, data: Any) -> None:
                with receiving:
                    check()
                    receive(piece, offset, data)

            self.stream(url, key, version, piece, keep, check)

        futures: list[Future[None]] = []
        try:
            if len(pieces) == 1:
                self._pool.wait_for(lambda: get(pieces[0]))
                return
            futures.extend(self._pool.submit(get, piece) for piece in pieces)
            for future in futures:
                future.result()
        except BaseException:
            ended = True
            for future in futures:
                future.cancel()
            with receiving:  # requests go on; the receiver's memory or file is gone after this
                raise

    def stream(
        self,
        url: str,
        key: str,
        version: ObjectVersion,
        piece: Chunk,
        receive: Callable[[int, Any], Any],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Fetch a piece of one version of an object, and call `receive` with the offset and bytes of each part of it.

        A part comes again if the request is repeated. `check` is called before each part; the request ends if it raises
        a `DataloadError`. Errors of `receive` are raised as they are. Other errors are those of `fetch`.
        """
        failures: list[Exception] = []

        def get() -> None:
            check()
            result = self._request(url, key, version, piece)
            at, begun, whole = piece.start, time.perf_counter(), False
            try:
                chunk = min(_CHUNK_BYTES, piece.stop - at + 1)
                for data in result.stream(min_chunk_size=chunk):
                    at += len(data)
                    if at > piece.stop:
                        raise _too_long(url, piece.stop - piece.start)
                    check()
                    try:
                        receive(at - len(data), data)
                    except Exception as error:
                        failures.append(error)
                        raise _Ended from None
                    if at == piece.stop and len(data) < chunk:
                        break  # only the last chunk is smaller, and asking whether there is another takes time
                _check_length(at - piece.start, piece)
                whole = True
            finally:
                self._arrived(at - piece.start, begun, used=whole)

        try:
            self._attempts.make(f"read bytes {piece.start} to {piece.stop} of {url}", url, get)
        except _Ended:
            if failures:
                raise failures.pop() from None

    def read(self, url: str, key: str, most: int) -> tuple[bytes, ObjectVersion, Any]:
        """Return an object or its first bytes, its version, and what `put` takes to replace this version only.

        It takes one request, unless there are more bytes than `most`.
        """

        def get() -> tuple[bytes, ObjectVersion, Any]:
            result = self._obstore.get(self._store, key)
            version = ObjectVersion.of(result.meta, url)
            if version.size > most:
                result = self._request(url, key, version, Chunk(0, most, 0))
            expected, begun = min(most, version.size), time.perf_counter()
            data = _content(result, url, expected)
            self._arrived(len(data), begun, used=len(data) == expected)
            _check_length(len(data), Chunk(0, expected, 0))
            return data, version, _condition(result.meta)

        return self._attempts.make(f"read {url}", url, get)

    def put(self, url: str, key: str, data: bytes, mode: Any) -> tuple[ObjectVersion | None, Any]:
        """Store an object in one request; return its version, None if unknown, and what replaces this version only.

        `mode` is "create", "overwrite", or what `read` or `put` has returned. FileExistsError if the object is in the
        way.
        """
        attempts = 0

        def put() -> Any:
            nonlocal attempts
            attempts += 1
            try:
                return self._obstore.put(self._store, key, data, mode=mode, use_multipart=False)
            except self._errors.NotFoundError:
                if isinstance(mode, str):  # there is no bucket
                    raise
                raise FileExistsError(url) from None
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                # The answer to an earlier attempt, which succeeded, may have been lost.
                if attempts > 1:
                    result = self._obstore.get(self._store, key)
                    if result.meta["size"] == len(data) and _content(result, url, len(data)) == data:
                        return result.meta
                raise FileExistsError(url) from None

        result = self._attempts.make(f"write {url}", url, put)
        version = ObjectVersion.of({**result, "size": len(data)}, url) if result["e_tag"] else None
        return version, _condition(result)

    def put_parts(
        self, url: str, key: str, read: Callable[[], Iterator[bytes]], part_bytes: int, *, overwrite: bool
    ) -> ObjectVersion | None:
        """Store a large object in parts, which must not exist yet unless `overwrite`, and return its version.

        It exists once its last part has arrived. A failure deletes the parts.
        """

        def check() -> None:
            if not overwrite and self.head(url, key) is not None:
                raise FileExistsError(url)

        def parts() -> Iterator[bytes]:
            yield from read()
            # Again, because an upload takes long, and obstore cannot make its end conditional. It cannot be called
            # from inside a call either.
            self._pool.submit(check).result()

        def put() -> Any:
            most = {"chunk_size": part_bytes, "max_concurrency": self._options.connections}
            check()
            return self._obstore.put(self._upload_store, key, parts(), **most)

        self._attempts.make(f"write {url}", url, put)
        return self.head(url, key)

    def delete(self, url: str, keys: Sequence[str]) -> None:
        self._attempts.make(f"delete {url}", url, lambda: self._obstore.delete(self._store, list(keys)))

    def _request(self, url: str, key: str, version: ObjectVersion, piece: Chunk) -> Any:
        options: dict[str, Any] = {"range": (piece.start, piece.stop)}
        # A weak ETag never matches by the rules of HTTP, so it is only compared below.
        if version.has_etag and not version.tag.startswith("W/"):
            options["if_match"] = version.tag
        try:
            result = self._obstore.get(self._store, key, options=options)
        except self._errors.PreconditionError:
            raise _changed(url, version) from None
        except (self._errors.NotFoundError, FileNotFoundError):
            if version.listed:
                raise _changed(url, version) from None
            raise
        if not ObjectVersion.of(result.meta, url).matches(version):  # a server may ignore the condition
            raise _changed(url, version)
        return result

    def _arrived(self, nbytes: int, begun: float, *, used: bool) -> None:
        self._traffic.add(
            nbytes=nbytes, wasted_bytes=0 if used else nbytes, transfer_seconds=time.perf_counter() - begun
        )


def _check_length(count: int, piece: Chunk) -> None:
    if count != piece.stop - piece.start:  # obstore lets a short answer pass
        raise OSError(f"{count} of {piece.stop - piece.start} bytes arrived")


def _content(result: Any, url: str, size: int) -> bytes:
    """Return the body of an answer, which may have `size` bytes."""
    data = next(result.stream(min_chunk_size=size + 1), b"")
    if len(data) > size:
        raise _too_long(url, size)
    return data


def _too_long(url: str, size: int) -> StoreError:
    return StoreError(f"cannot read {url}: the answer is longer than the {size} bytes that it should have", path=url)


def _condition(meta: Any) -> Any:
    """Return the mode of a put that replaces only the version described; Google's store knows it by a number."""
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _changed(url: str, version: ObjectVersion) -> ChangedFileError:
    if not version.listed:
        return rewritten_error(url)
    message = "the object is not the one that the manifest of its directory lists; if the shards are right, run"
    return ChangedFileError(f"{message} `dataload index --manifest {url.rpartition('/')[0]}`", path=url)


_clients: PerProcess[WeakValueDictionary[tuple[Any, ...], ObjectClient]] = PerProcess()
_memories: PerProcess[dict[str, Any]] = PerProcess()


def client_of(url: str, remote: Remote) -> tuple[ObjectClient, str]:
    """Return this process's client for the store of a URL, and the key of the object."""
    base, key = split_url(url)
    check_process()
    own = remote.clients.get(dict)
    client = own.get(base)
    if client is None:
        options = remote.options
        name = (base, remote.store.digest(), options.connections, options.timeout, options.retries)
        shared = _clients.get(WeakValueDictionary)
        found = shared.get(name) or shared.setdefault(name, ObjectClient(base, remote))
        client = own[base] = found.counted(remote.traffic)
    return client, key
