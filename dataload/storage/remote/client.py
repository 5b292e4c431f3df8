"""Requests to object stores: bounded in time and number, with retries, by clients of this process."""

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

from dataload._util.caches import PerProcess
from dataload._util.lazy import load_optional
from dataload._util.threads import DaemonThreads
from dataload.errors import ChangedFileError, ConfigError, DataloadError, SourceNotFoundError, StoreError
from dataload.storage.errors import rewritten_error
from dataload.storage.paths import nameless_error
from dataload.storage.remote.requests import (
    REQUESTS_IN_TIMEOUT,
    Attempts,
    Chunk,
    can_be_interrupted,
    failure_reason,
    list_directory,
)
from dataload.storage.remote.settings import ObjectVersion, Remote, RemoteOptions, is_plain
from dataload.storage.remote.traffic import Traffic

T = TypeVar("T")

_STALLS_IN_TIMEOUT = 12
_BLOCK_BYTES = (1 << 18) + 1  # larger buffers are returned to the system, and faulted in again


class _Ended(DataloadError):
    """The receiver takes no more data."""


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
        # One extra thread for the request that `put_parts` makes within a request.
        self._pool = DaemonThreads(self._options.connections + 1, "dataload-remote")
        self._traffic = Traffic()
        self._attempts = Attempts(self._options, self._secrets, self._errors, self._pool, self._traffic)
        self._store = self._make_store({"max_retries": 0})
        self._shared: ObjectClient | None = None  # kept alive for other users

    def counted(self, traffic: Traffic) -> ObjectClient:
        found = copy.copy(self)
        found._traffic, found._shared = traffic, self
        found._attempts = replace(self._attempts, traffic=traffic)
        return found

    @cached_property
    def _upload_store(self) -> Any:
        """The store for multipart uploads, where obstore repeats each failed request itself."""
        timeout = timedelta(seconds=self._options.timeout)
        return self._make_store({"max_retries": self._options.retries, "retry_timeout": timeout})

    def _address(self) -> tuple[str, dict[str, Any]]:
        """Return the URL and the arguments of the store."""
        return self._base, self._given.arguments()

    def _make_store(self, retries: Mapping[str, Any]) -> Any:
        base = self._base
        stores: Any = load_optional("obstore.store", needed_by="URLs", extra="remote")
        if base.startswith("memory:"):
            return _memories.get(dict).setdefault(base, stores.MemoryStore())
        if base.endswith("://"):
            raise nameless_error(base)
        base, given = self._address()
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
        try:
            return self._attempts.make(
                f"look up {url}", url, lambda: ObjectVersion.of(self._obstore.head(self._store, key), url)
            )
        except SourceNotFoundError:
            return None

    def list(self, url: str, key: str) -> tuple[list[str], list[tuple[str, ObjectVersion]]]:
        """Return the directories and the objects, with their versions, of a directory."""
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
        chunks: Sequence[Chunk],
        receive: Callable[[Chunk, int, Any], Any],
    ) -> None:
        """Fetch chunks of one version concurrently; `receive` gets a chunk, and the offset and bytes of a block."""
        if len(chunks) == 1 and not can_be_interrupted():
            self.stream(url, key, version, chunks[0], partial(receive, chunks[0]))
            return
        receiving, ended = threading.Lock(), False

        def check() -> None:
            if ended:
                raise _Ended

        def get(chunk: Chunk) -> None:
            def keep(offset: int, data: Any) -> None:
                with receiving:
                    check()
                    receive(chunk, offset, data)

            self.stream(url, key, version, chunk, keep, check)

        futures: list[Future[None]] = []
        try:
            futures.extend(self._pool.submit(get, chunk) for chunk in chunks)
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
        chunk: Chunk,
        receive: Callable[[int, Any], Any],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Fetch a chunk of one version; `receive` gets the offset and bytes of blocks, which retries repeat."""
        failures: list[Exception] = []

        def get() -> None:
            check()
            result = self._request(url, key, version, chunk)
            at, begun, whole = chunk.start, time.perf_counter(), False
            try:
                block = min(_BLOCK_BYTES, chunk.stop - at + 1)
                for data in result.stream(min_chunk_size=block):
                    at += len(data)
                    if at > chunk.stop:
                        raise _too_long(url, chunk.stop - chunk.start)
                    check()
                    try:
                        receive(at - len(data), data)
                    except Exception as error:
                        failures.append(error)
                        raise _Ended from None
                    if at == chunk.stop and len(data) < block:
                        break  # only the last block is smaller; waiting for another would take time
                _check_length(at - chunk.start, chunk)
                whole = True
            finally:
                self._arrived(at - chunk.start, begun, used=whole)

        try:
            self._attempts.make(f"read bytes {chunk.start} to {chunk.stop} of {url}", url, get)
        except _Ended:
            if failures:
                raise failures.pop() from None

    def read(self, url: str, key: str, most: int) -> tuple[bytes, ObjectVersion, Any]:
        """Return an object or its first `most` bytes, its version, and the `mode` for `put` to replace it."""

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
        """Store an object; return its version and the `mode` that replaces it. FileExistsError if `mode` forbids it."""
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
                # An earlier attempt may have succeeded, and its response been lost.
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
        """Store a large object atomically by a multipart upload, and return its version."""

        def check() -> None:
            if not overwrite and self.head(url, key) is not None:
                raise FileExistsError(url)

        def parts() -> Iterator[bytes]:
            yield from read()
            # Check again: the upload took long, and obstore cannot make its end conditional, nor be called from a call.
            self._pool.submit(check).result()

        def put() -> Any:
            most = {"chunk_size": part_bytes, "max_concurrency": self._options.connections}
            check()
            return self._obstore.put(self._upload_store, key, parts(), **most)

        self._attempts.make(f"write {url}", url, put)
        return self.head(url, key)

    def delete(self, url: str, keys: Sequence[str]) -> None:
        self._attempts.make(f"delete {url}", url, lambda: self._obstore.delete(self._store, list(keys)))

    def _request(self, url: str, key: str, version: ObjectVersion, chunk: Chunk) -> Any:
        options: dict[str, Any] = {"range": (chunk.start, chunk.stop)}
        # By HTTP's rules a weak ETag never matches, so it is only compared below.
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


def _check_length(count: int, chunk: Chunk) -> None:
    if count != chunk.stop - chunk.start:  # obstore accepts a short response
        raise OSError(f"{count} of {chunk.stop - chunk.start} bytes arrived")


def _content(result: Any, url: str, size: int) -> bytes:
    data = next(result.stream(min_chunk_size=size + 1), b"")
    if len(data) > size:
        raise _too_long(url, size)
    return data


def _too_long(url: str, size: int) -> StoreError:
    return StoreError(f"cannot read {url}: the response is longer than the expected {size} bytes", path=url)


def _condition(meta: Any) -> Any:
    """Return the `mode` of a put that replaces only this version; Google's store identifies it by a number."""
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _changed(url: str, version: ObjectVersion) -> ChangedFileError:
    if not version.listed:
        return rewritten_error(url)
    message = "the object is not the version in the manifest of its directory; if the shards are right, run"
    return ChangedFileError(f"{message} `dataload index --manifest {url.rpartition('/')[0]}`", path=url)


_memories: PerProcess[dict[str, Any]] = PerProcess()
