"""Requests to object stores: exact, repeated until the time-out, and made by clients of this process."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from dataload._util.optional import load_optional
from dataload._util.per_process import PerProcess, first_process
from dataload.errors import ConfigError, DataloadError, SourceError, SourceNotFoundError, printable
from dataload.storage.errors import rewritten_error
from dataload.storage.remote.settings import ObjectVersion, Remote, RemoteOptions

T = TypeVar("T")

GAP = 1 << 16
"""Bytes between two ranges that are fetched too, because another request would take longer."""

SCHEMES = ("s3", "gs", "az", "http", "https", "memory")

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0  # seconds between attempts
_REQUESTS_IN_TIMEOUT = 4  # the last attempt has to end before the time-out
_STALLS_IN_TIMEOUT = 12
_LONGEST_REASON = 300
_CHUNK_BYTES = 1 << 18  # larger buffers are returned to the system, and faulted in again
_PERMANENT = re.compile(
    r"status(?: code:)? 4(?!08|29)\d\d|non-partial|NotImplemented|InvalidToken|builder error|NotSupported"
)
_QUERY = re.compile(r"\?[^\s\"'<>)]*")
_CODE = re.compile(r"<Code>(\w+)</Code>")


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one object, at most one request.

    Attributes:
        start: Its first byte.
        stop: The byte after its last.
        at: Where the receiver wants it.
    """

    start: int
    stop: int
    at: int


def cut(starts: Iterable[int], stops: Iterable[int], most: int, first: int = 0) -> list[Piece]:
    """Cut ranges into pieces of at most `most` bytes, to be received one after another from `first`."""
    pieces: list[Piece] = []
    for start, stop in zip(starts, stops, strict=True):
        for begin in range(start, stop, most):
            end = min(begin + most, stop)
            pieces.append(Piece(begin, end, first))
            first += end - begin
    return pieces


def split_url(url: str) -> tuple[str, str]:
    """Return the URL of the store, and the key of the object in it.

    Raises:
        ConfigError: The scheme is unknown, or the URL holds what may be a secret, which the message does not repeat.
    """
    parts = urlsplit(url, allow_fragments=False)
    scheme = parts.scheme.lower()
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in (*SCHEMES, "file"))
        raise ConfigError(f"{url}: URLs begin with one of {known}", key="paths", value=url)
    web = scheme in ("http", "https")
    if "@" in parts.netloc or (web and parts.query):
        raise ConfigError(
            f"a {scheme}:// URL has a user, a password or a query, which may be secret: leave it out, and give "
            "credentials in storage_options or the environment",
            key="paths",
        )
    query = f"?{parts.query}" if parts.query else ""
    key = f"{parts.path}{query}".strip("/")
    return f"{scheme}://{parts.netloc}", unquote(key) if web else key


class ObjectClient:
    """Requests to one store, such as a bucket, from this process. Thread-safe.

    Args:
        base: URL of the store.
        remote: Its settings.
    """

    def __init__(self, base: str, remote: Remote) -> None:
        self._options: RemoteOptions = remote.options
        self._secrets = [text for _, text in remote.store.secrets() if len(text) > 3]
        self._obstore: Any = load_optional("obstore", needed_by=f"{base.partition(':')[0]}:// URLs", extra="remote")
        self._errors: Any = load_optional("obstore.exceptions", needed_by="URLs", extra="remote")
        self._store = self._make_store(base, remote)
        self._pool = ThreadPoolExecutor(self._options.connections, "dataload-remote")

    def _make_store(self, base: str, remote: Remote) -> Any:
        stores: Any = load_optional("obstore.store", needed_by="URLs", extra="remote")
        if base.startswith("memory:"):
            return _memories.get(dict).setdefault(base, stores.MemoryStore())
        given = remote.store.arguments()
        timeout = self._options.timeout
        client = {
            "timeout": f"{int(1000 * timeout / _REQUESTS_IN_TIMEOUT)}ms",
            "read_timeout": f"{int(1000 * timeout / _STALLS_IN_TIMEOUT)}ms",
            "connect_timeout": f"{int(1000 * timeout / _STALLS_IN_TIMEOUT)}ms",
            **({"allow_http": True} if _is_plain(base, given) else {}),
            **given.pop("client_options", {}),
        }
        retry = given.pop("retry_config", {"max_retries": 0})
        try:
            return stores.from_url(base, client_options=client, retry_config=retry, **given)
        except Exception as error:
            message = f"storage_options do not fit {base}: {self._reason(error)}"
            raise ConfigError(message, key="storage_options") from None

    def head(self, url: str, key: str) -> ObjectVersion | None:
        """Return the version of an object, or None if there is none."""
        try:
            return version_of(self._attempt(f"look up {url}", url, lambda: self._obstore.head(self._store, key)))
        except SourceNotFoundError:
            return None

    def read_start(self, url: str, key: str, length: int) -> tuple[ObjectVersion, bytes]:
        """Return the version of an object and its first bytes, at most `length`, usually by one request."""

        def get() -> tuple[ObjectVersion, bytes]:
            result = self._obstore.get(self._store, key)
            version = version_of(result.meta)
            if version.size > length:
                return version, bytes(self._get(url, key, version, Piece(0, length, 0)))
            data = bytes(result.bytes())
            _check_length(len(data), Piece(0, version.size, 0))
            return version, data

        return self._attempt(f"read {url}", url, get)

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
            SourceError: A piece has not arrived in time, or not after all retries.
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
            at = piece.start
            for data in result.stream(min_chunk_size=_CHUNK_BYTES):
                check()
                receive(at, data)
                at += len(data)
            _check_length(at - piece.start, piece)

        self._attempt(f"read bytes {piece.start} to {piece.stop} of {url}", url, get)

    def put(self, url: str, key: str, file: Any, *, overwrite: bool) -> None:
        """Store a file-like object or bytes, which must not exist yet unless `overwrite`.

        Raises:
            FileExistsError: The object exists.
        """
        mode = {} if overwrite else {"mode": "create"}

        def put() -> None:
            if hasattr(file, "seek"):
                file.seek(0)
            self._obstore.put(self._store, key, file, **mode)

        self._attempt(f"write {url}", url, put)

    def delete(self, url: str, keys: Sequence[str]) -> None:
        """Delete objects."""
        self._attempt(f"delete {url}", url, lambda: self._obstore.delete(self._store, list(keys)))

    def _get(self, url: str, key: str, version: ObjectVersion, piece: Piece) -> Any:
        def get() -> Any:
            data = self._request(url, key, version, piece).bytes()
            _check_length(len(data), piece)
            return data

        return self._attempt(f"read bytes {piece.start} to {piece.stop} of {url}", url, get)

    def _request(self, url: str, key: str, version: ObjectVersion, piece: Piece) -> Any:
        options: dict[str, Any] = {"range": (piece.start, piece.stop)}
        # A weak ETag never matches by the rules of HTTP, so it is only compared below.
        if version.has_etag and not version.tag.startswith("W/"):
            options["if_match"] = version.tag
        result = self._obstore.get(self._store, key, options=options)
        if not _same(version_of(result.meta), version):  # a server may ignore the condition
            raise rewritten_error(url)
        return result

    def _attempt(self, what: str, url: str, call: Callable[[], T]) -> T:
        """Call, again after failures that may pass, and translate errors; their own texts may hold secrets."""
        begun, attempts = time.monotonic(), 0
        last = begun + self._options.timeout * (1 - 1 / _REQUESTS_IN_TIMEOUT)
        while True:
            attempts += 1
            try:
                _check_process()
                return call()
            except DataloadError:
                raise
            except (self._errors.NotFoundError, FileNotFoundError):
                raise SourceNotFoundError(f"there is no {url}", path=url) from None
            except self._errors.PreconditionError:
                raise rewritten_error(url) from None
            except self._errors.AlreadyExistsError:
                raise FileExistsError(url) from None
            except Exception as error:
                reason, permanent = self._reason(error), self._is_permanent(error)
            if permanent:
                raise SourceError(f"cannot {what}: {reason}", path=url)
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (attempts - 1)) * random.uniform(0.5, 1)
            if attempts > self._options.retries or time.monotonic() + wait > last:
                raise SourceError(
                    f"cannot {what}: {reason} ({attempts} attempts in {time.monotonic() - begun:.1f} s; the options "
                    "timeout and retries of remote allow more)",
                    path=url,
                )
            time.sleep(wait)

    def _is_permanent(self, error: Exception) -> bool:
        kinds = ("PermissionDeniedError", "UnauthenticatedError", "NotSupportedError", "InvalidPathError")
        kinds += ("UnknownConfigurationKeyError",)
        permanent = isinstance(error, (ValueError, TypeError, *(getattr(self._errors, kind) for kind in kinds)))
        return permanent or _PERMANENT.search(str(error)) is not None

    def _reason(self, error: Exception) -> str:
        """Return a short text without secrets for an error of obstore."""
        text = str(error)
        code = _CODE.search(text)
        # An answer of the server, which may repeat parts of the request, follows.
        text = " ".join(re.split(r"\n\s*\n|<\?xml|<Error>|: <", text)[0].split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = printable(_QUERY.sub("?...", text), _LONGEST_REASON, kept="")
        return f"{text or type(error).__name__}{f' ({code[1]})' if code else ''}"


def _check_length(count: int, piece: Piece) -> None:
    if count != piece.stop - piece.start:  # obstore lets a short answer pass
        raise OSError(f"{count} of {piece.stop - piece.start} bytes arrived")


def version_of(meta: Any) -> ObjectVersion:
    """Return the version in obstore's description of an object."""
    tag = meta["e_tag"]
    return ObjectVersion(int(meta["size"]), tag or meta["last_modified"].isoformat(), bool(tag))


def _is_plain(base: str, given: dict[str, Any]) -> bool:
    """Return whether the user has named an http:// server; client options of ours replace those of the environment."""
    endpoints = [base, *(value for name, value in given.items() if "endpoint" in name.lower())]
    for name, value in os.environ.items():
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            if name.endswith("_ALLOW_HTTP") and value.lower() in ("1", "true"):
                return True
            endpoints += [value] if "ENDPOINT" in name else []
    return any(isinstance(endpoint, str) and endpoint.startswith("http://") for endpoint in endpoints)


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
        client = own[base] = shared.get(name) or shared.setdefault(name, ObjectClient(base, remote))
    return client, key
