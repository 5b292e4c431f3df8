"""Requests to object stores: exact, repeated until the time-out, and made by clients of this process."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from dataload._util.optional import load_optional
from dataload._util.per_process import PerProcess, first_process
from dataload.errors import (
    ConfigError,
    CorruptFileError,
    DataloadError,
    SourceError,
    SourceNotFoundError,
    StoreError,
)
from dataload.storage.errors import rewritten_error
from dataload.storage.remote.failures import failure_reason, is_permanent, is_throttled
from dataload.storage.remote.requests import Piece, split_url
from dataload.storage.remote.settings import ObjectVersion, Remote, RemoteOptions, is_plain
from dataload.storage.remote.traffic import Request, Traffic

T = TypeVar("T")

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0  # seconds between attempts
_REQUESTS_IN_TIMEOUT = 4  # the last attempt has to end before the time-out
_STALLS_IN_TIMEOUT = 12
_CHUNK_BYTES = 1 << 18  # larger buffers are returned to the system, and faulted in again


class ObjectClient:
    """Requests to one store, such as a bucket, from this process. Thread-safe.

    Args:
        base: URL of the store.
        remote: Its settings.
    """

    def __init__(self, base: str, remote: Remote) -> None:
        self._options: RemoteOptions = remote.options
        self._secrets = [text for _, text in remote.store.secrets() if len(text) > 3]
        self._obstore: Any = load_optional(
            "obstore", needed_by=f"reading {base.partition(':')[0]}:// URLs", extra="remote"
        )
        self._errors: Any = load_optional("obstore.exceptions", needed_by="URLs", extra="remote")
        self._base, self._given = base, remote.store
        self._store = self._make_store({"max_retries": 0})
        self._pool = ThreadPoolExecutor(self._options.connections, "dataload-remote")
        self._traffic = Traffic()
        self._shared: ObjectClient | None = None  # kept alive for those who ask for it

    def counted(self, traffic: Traffic) -> ObjectClient:
        """Return the same client, which counts into `traffic`."""
        found = copy.copy(self)
        found._traffic, found._shared = traffic, self
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
            named = "server" if base.startswith("http") else "bucket"
            raise ConfigError(f"the URL {base} names no {named}: expected {base}NAME/PATH", key="paths", value=base)
        given = self._given.arguments()
        timeout = self._options.timeout
        client = {
            "timeout": f"{int(1000 * timeout / _REQUESTS_IN_TIMEOUT)}ms",
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
            return version_of(self._attempt(f"look up {url}", url, lambda: self._obstore.head(self._store, key)))
        except SourceNotFoundError:
            return None

    def list(self, url: str, key: str) -> tuple[list[str], list[tuple[str, ObjectVersion]]]:
        """Return the names of directories and of objects, with their versions, in a directory."""
        found = self._attempt(f"list {url}", url, lambda: self._obstore.list_with_delimiter(self._store, key or None))
        objects = [(meta["path"].rpartition("/")[2], version_of(meta)) for meta in found["objects"]]
        return [name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]], objects

    def fetch(
        self, url: str, key: str, version: ObjectVersion, pieces: Sequence[Piece], receive: Callable[[Piece, Any], Any]
    ) -> None:
        """Fetch pieces of one version of an object, several at a time, and call `receive` with each and its bytes.

        Raises:
            CorruptFileError: The object is now another version.
            StoreError: A piece has not arrived in time, or not after all retries.
        """

        def get(piece: Piece) -> None:
            receive(piece, self._get(url, key, version, piece))

        if len(pieces) == 1:
            get(pieces[0])
            return
        futures: list[Future[None]] = []
        try:
            futures.extend(self._pool.submit(get, piece) for piece in pieces)
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            for future in futures:
                if not future.cancelled():
                    future.exception()  # the receiver's memory or file is gone after this
            raise

    def stream(
        self,
        url: str,
        key: str,
        version: ObjectVersion,
        piece: Piece,
        receive: Callable[[int, Any], Any],
        check: Callable[[], None],
    ) -> None:
        """Fetch a piece of one version of an object, and call `receive` with the offset and bytes of each part of it.

        A part comes again if the request is repeated. `check` is called before each part; the request ends if it raises
        a `DataloadError`. Other errors are those of `fetch`.
        """

        def get() -> None:
            check()
            result = self._request(url, key, version, piece)
            at, begun, whole = piece.start, time.perf_counter(), False
            try:
                for data in result.stream(min_chunk_size=_CHUNK_BYTES):
                    at += len(data)
                    check()
                    receive(at - len(data), data)
                _check_length(at - piece.start, piece)
                whole = True
            finally:
                self._arrived(at - piece.start, begun, used=whole)

        self._attempt(f"read bytes {piece.start} to {piece.stop} of {url}", url, get)

    def read(self, url: str, key: str, most: int) -> tuple[bytes, ObjectVersion, Any]:
        """Return an object or its first bytes, its version, and what `put` takes to replace this version only.

        It takes one request, unless there are more bytes than `most`.
        """

        def get() -> tuple[bytes, ObjectVersion, Any]:
            result = self._obstore.get(self._store, key)
            version = version_of(result.meta)
            if version.size > most:
                return bytes(self._get(url, key, version, Piece(0, most, 0))), version, _condition(result.meta)
            begun = time.perf_counter()
            data = bytes(result.bytes())
            self._arrived(len(data), begun, used=len(data) == version.size)
            _check_length(len(data), Piece(0, version.size, 0))
            return data, version, _condition(result.meta)

        return self._attempt(f"read {url}", url, get)

    def put(self, url: str, key: str, data: bytes, mode: Any) -> tuple[ObjectVersion | None, Any]:
        """Store an object in one request; return its version, None if unknown, and what replaces this version only.

        Args:
            url: Its URL.
            key: Its key.
            data: Its content.
            mode: "create", "overwrite", or what `read` or `put` has returned.

        Raises:
            FileExistsError: The object exists, or is another version now.
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
                    if result.meta["size"] == len(data) and bytes(result.bytes()) == data:
                        return result.meta
                raise FileExistsError(url) from None

        result = self._attempt(f"write {url}", url, put)
        return version_of({**result, "size": len(data)}) if result["e_tag"] else None, _condition(result)

    def put_parts(
        self, url: str, key: str, read: Callable[[], Iterator[bytes]], part_bytes: int, *, overwrite: bool
    ) -> ObjectVersion | None:
        """Store a large object in parts, which must not exist yet unless `overwrite`, and return its version.

        It exists once its last part has arrived. A failure deletes the parts.

        Raises:
            FileExistsError: The object exists.
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

        self._attempt(f"write {url}", url, put)
        return self.head(url, key)

    def delete(self, url: str, keys: Sequence[str]) -> None:
        """Delete objects."""
        self._attempt(f"delete {url}", url, lambda: self._obstore.delete(self._store, list(keys)))

    def _get(self, url: str, key: str, version: ObjectVersion, piece: Piece) -> Any:
        def get() -> Any:
            result = self._request(url, key, version, piece)
            begun = time.perf_counter()
            data = result.bytes()
            self._arrived(len(data), begun, used=len(data) == piece.stop - piece.start)
            _check_length(len(data), piece)
            return data

        return self._attempt(f"read bytes {piece.start} to {piece.stop} of {url}", url, get)

    def _request(self, url: str, key: str, version: ObjectVersion, piece: Piece) -> Any:
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
        if not _same(version_of(result.meta), version):  # a server may ignore the condition
            raise _changed(url, version)
        return result

    def _arrived(self, nbytes: int, begun: float, *, used: bool) -> None:
        self._traffic.add(
            nbytes=nbytes, wasted_bytes=0 if used else nbytes, transfer_seconds=time.perf_counter() - begun
        )

    def _attempt(self, what: str, url: str, call: Callable[[], T]) -> T:
        """Call, again after failures that may pass, and translate errors; their own texts may hold secrets."""
        begun, attempts = time.monotonic(), 0
        last = begun + self._options.timeout * (1 - 1 / _REQUESTS_IN_TIMEOUT)
        while True:
            attempts += 1
            try:
                _check_process()
                return self._counted(what, call, again=attempts > 1)
            except DataloadError:
                raise
            except (self._errors.NotFoundError, FileNotFoundError):
                raise SourceNotFoundError(f"there is no {url}", path=url) from None
            except self._errors.PreconditionError:
                raise rewritten_error(url) from None
            except FileExistsError:
                raise FileExistsError(url) from None
            except Exception as error:
                reason, permanent = failure_reason(error, self._secrets), is_permanent(error, self._errors)
            if permanent:
                raise StoreError(f"cannot {what}: {reason}", path=url)
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (attempts - 1)) * random.uniform(0.5, 1)
            if attempts > self._options.retries or time.monotonic() + wait > last:
                raise StoreError(
                    f"cannot {what}: {reason} ({attempts} attempts in {time.monotonic() - begun:.1f} s; the options "
                    "timeout and retries of remote allow more)",
                    path=url,
                )
            time.sleep(wait)

    def _counted(self, what: str, call: Callable[[], T], *, again: bool) -> T:
        begun, failed, throttled = time.perf_counter(), True, False
        try:
            result = call()
            failed = False
        except Exception as error:
            throttled = is_throttled(error)
            raise
        finally:
            request = Request(what, begun, time.perf_counter(), failed)
            self._traffic.requested(request, again=again, throttled=throttled)
        return result


def _check_length(count: int, piece: Piece) -> None:
    if count != piece.stop - piece.start:  # obstore lets a short answer pass
        raise OSError(f"{count} of {piece.stop - piece.start} bytes arrived")


def _condition(meta: Any) -> Any:
    """Return the mode of a put that replaces only the version described; Google's store knows it by a number."""
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def version_of(meta: Any) -> ObjectVersion:
    """Return the version in obstore's description of an object."""
    tag = meta["e_tag"]
    return ObjectVersion(int(meta["size"]), tag or meta["last_modified"].isoformat(), bool(tag))


def _changed(url: str, version: ObjectVersion) -> CorruptFileError:
    if not version.listed:
        return rewritten_error(url)
    message = "the object is not the one that the manifest of its directory lists; if the shards are right, run"
    return CorruptFileError(f"{message} `dataload index --manifest {url.rpartition('/')[0]}`", path=url)


def _same(found: ObjectVersion, wanted: ObjectVersion) -> bool:
    if found.has_etag != wanted.has_etag:
        return found.size == wanted.size
    return found.size == wanted.size and found.tag.strip('"') == wanted.tag.strip('"')


_clients: PerProcess[WeakValueDictionary[tuple[Any, ...], ObjectClient]] = PerProcess()
_memories: PerProcess[dict[str, Any]] = PerProcess()


def _check_process() -> None:
    """Raise in a forked child of a process that has used obstore: its threads are gone, and every call would hang."""
    if first_process("obstore") != os.getpid():
        raise SourceError(
            "this process was forked by one that had read from a URL, whose connections do not survive that: start "
            "processes with 'forkserver' or 'spawn'"
        )


def client_of(url: str, remote: Remote) -> tuple[ObjectClient, str]:
    """Return this process's client for the store of a URL, and the key of the object.

    Raises:
        ConfigError: The URL or the options are invalid.
        MissingDependencyError: obstore is not installed.
        SourceError: This process was forked by one that has used a client.
    """
    base, key = split_url(url)
    _check_process()
    own = remote.clients.get(dict)
    client = own.get(base)
    if client is None:
        options = remote.options
        name = (base, remote.store.digest(), options.connections, options.timeout, options.retries)
        shared = _clients.get(WeakValueDictionary)
        found = shared.get(name) or shared.setdefault(name, ObjectClient(base, remote))
        client = own[base] = found.counted(remote.traffic)
    return client, key
