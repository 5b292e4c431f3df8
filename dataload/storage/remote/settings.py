"""Settings of remote data, and the folder of the node's cache."""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from importlib import import_module
from os import PathLike
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, cast

from dataload._util.caches import PerProcess
from dataload._util.settings import Least, Seconds, check_count, check_setting, check_settings
from dataload.errors import ConfigError, SourceError, StoreError, closest
from dataload.storage.local.folders import trusted_folder, user_directory
from dataload.storage.paths import is_url, local_path
from dataload.storage.remote.traffic import Traffic

Mode: TypeAlias = Literal["auto", "ranges", "shards"]
Size: TypeAlias = Annotated[int, Least(1)] | str

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[kmgtp]i?)b?", re.IGNORECASE)
_PREFIX = re.compile(r"(aws|amz|google|gcs|gs|azure)_")
_PUBLIC = {
    *("account_name", "allow_http", "allow_invalid_certificates", "application_credentials", "base_url", "bucket"),
    *("bucket_name", "checksum_algorithm", "client_options", "config", "conditional_put", "connect_timeout"),
    *("container_name", "copy_if_not_exists", "credential_provider", "default_region", "disable_tagging", "endpoint"),
    *("endpoint_url", "fabric_workspace", "http1_only", "http2_only", "imdsv1_fallback", "metadata_endpoint"),
    *("pool_idle_timeout", "pool_max_idle_per_host", "read_timeout", "region", "request_payer", "retry_config"),
    *("s3_express", "service_account", "service_account_path", "skip_signature", "storage_account_name", "timeout"),
    *("unsigned_payload", "use_azure_cli", "use_emulator", "use_fabric_endpoint", "user_agent"),
    *("virtual_hosted_style_request", "backoff", "headers_follow_redirects", "max_retries", "init_backoff"),
    *("max_backoff", "base"),
}
"""Arguments of obstore's stores that hold no secret; all others may."""

_SAFE_HEADERS = {
    *("authorization", "cookie", "proxy-authorization"),  # not sent when redirected to another origin
    *("accept", "accept-language", "cache-control", "pragma", "referer", "user-agent"),
    *("x-amz-request-payer", "x-goog-user-project"),
}


def parse_bytes(name: str, value: Any) -> int:
    """Return a number of bytes, at least 1, given as one or as text such as "500GB" or "64 MiB"."""
    if not isinstance(value, str):
        return check_count(name, value, least=1)
    found = _SIZE.fullmatch(value.strip())
    unit = found[2].lower() if found else ""
    number = float(found[1]) * (1024 if unit.endswith("i") else 1000) ** " kmgtp".index(unit[:1] or " ") if found else 0
    if number < 1:
        message = f"{name} must be a number of bytes such as 500GB or 64MiB, got {value!r}"
        raise ConfigError(message, key=name, value=value)
    return int(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Settings for reading data at URLs.

    Local files, including ``file://`` URLs, are read in place, so a program or config that sometimes reads local data
    may keep these settings. Only compressed MDS shards are cached, decompressed, wherever they are. Sizes are stored as
    numbers of bytes.

    Attributes:
        cache: Directory for whole shards, shared by the processes of a node; by default ``dataload`` in the user's
            cache directory.
        budget: Maximum size of the cache, such as ``"500GB"``. By default it leaves a twentieth of the disk free if
            `cache` is given; in the user's cache directory it takes a tenth of the free bytes.
        mode: ``"shards"`` downloads whole shards into the cache, ``"ranges"`` fetches only the bytes that are read.
            With ``"auto"`` a loader chooses when it starts, by the order, the sizes and the budget (see
            `dataload.storage.remote.prefetch.plan.choose`), refuses if neither is fast, and logs its choice;
            without a loader, shards are used if a cache is given or the format needs them, otherwise ranges.
        scan: Maximum bytes to download when opening a data set, such as ``"1GB"``, if only whole shards tell how many
            records they have: tar archives without an index, LMDB, compressed ArrayRecord. A manifest avoids it.
        connections: Maximum number of concurrent requests of a process.
        part_bytes: Maximum size of one request, such as ``"8MiB"``.
        timeout: Seconds for a range to arrive, all retries included.
        retries: Maximum number of retries of a failed request.
    """

    cache: str | PathLike[str] | None = None
    budget: Size | None = None
    mode: Mode = "auto"
    scan: Size = 10**9
    connections: Annotated[int, Least(1)] = 16
    part_bytes: Size = 8 << 20
    timeout: Seconds = 120.0
    retries: Annotated[int, Least(0)] = 20

    def __post_init__(self) -> None:
        check_settings(self)
        if self.cache is not None:
            check_setting("cache", self.cache, str | PathLike)
            directory = os.path.expanduser(local_path(os.fspath(self.cache)))
            if not directory or "\0" in directory or is_url(directory):
                message = f"cache must be a directory of this machine, got {directory!r}"
                raise ConfigError(message, key="cache", value=directory)
            object.__setattr__(self, "cache", directory)
        for name in ("budget", "scan", "part_bytes"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else parse_bytes(name, value))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(each.name for each in fields(cls))

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> RemoteOptions:
        for name in given:
            if name not in cls.names():
                raise ConfigError(f"remote has no option {name!r}: {closest(name, cls.names())}", key="remote")
        return cls(**given)


class StoreOptions:
    """Keyword arguments of obstore's stores; secrets are neither shown nor pickled."""

    __slots__ = ("_given",)

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)

    def arguments(self) -> dict[str, Any]:
        found = dict(self._given)
        follows = found.pop("headers_follow_redirects", False)
        client = found.get("client_options")
        headers = (client.get("default_headers") or {}) if isinstance(client, Mapping) else {}
        if not follows and (
            unsafe := sorted({str(name) for name in headers if str(name).lower() not in _SAFE_HEADERS})
        ):
            raise ConfigError(
                f"storage_options.client_options.default_headers has {', '.join(unsafe)}, which a redirect would "
                "send to another server: use Authorization or Cookie, which are not sent on, or pass "
                "storage_options={'headers_follow_redirects': True} if it holds no secret or the server is trusted",
                key="storage_options",
            )
        provider = found.get("credential_provider")
        if isinstance(provider, str):
            provider = _import_provider(provider)
        if provider is not None:
            found["credential_provider"] = provider() if isinstance(provider, type) else provider
        return found

    def secrets(self) -> list[tuple[str, str]]:
        return _secrets(self._given)

    def digest(self) -> str:
        return hashlib.blake2b(repr(sorted(self._given.items(), key=str)).encode(), digest_size=16).hexdigest()

    def __bool__(self) -> bool:
        return bool(self._given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreOptions) and self._given == other._given

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._given)))

    def __repr__(self) -> str:
        return f"StoreOptions({', '.join(sorted(self._given))})"

    def __copy__(self) -> StoreOptions:
        return self

    def __deepcopy__(self, _: Any) -> StoreOptions:
        return self

    def __reduce__(self) -> Any:
        if names := sorted({name for name, _ in self.secrets()}):
            _refuse(f"storage_options has {', '.join(names)}, which may be secret and is not sent to other processes")
        provider = self._given.get("credential_provider")
        if provider is not None and not isinstance(provider, str) and not _is_importable(provider):
            _refuse(
                "credential_provider is not a function or class of an importable module, so other processes lack it"
            )
        return StoreOptions, (self._given,)


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"{what}: set the environment variables of the store (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, "
        "AZURE_STORAGE_ACCOUNT_KEY, HF_TOKEN, ...), or give "
        'credential_provider="module:function", which each process imports',
        key="storage_options",
    )


def _import_provider(reference: str) -> Callable[..., Any]:
    module, colon, name = reference.partition(":")
    try:
        found: Any = import_module(module) if colon and name else None
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"credential_provider {reference!r} must be an importable 'module:function': {error}"
        raise ConfigError(message, key="storage_options.credential_provider", value=reference) from error
    return found


def _is_importable(provider: Any) -> bool:
    try:
        return _import_provider(f"{provider.__module__}:{provider.__qualname__}") is provider
    except (AttributeError, ConfigError):
        return False


def _secrets(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            inner = cast("Mapping[str, Any]", value)
            public = _is_public(name)
            found += _secrets(inner) if public else [(name, str(item)) for item in inner.values()]
        elif not _is_public(name) or (isinstance(value, str) and re.search(r"[@?]", value)):
            found.append((name, value.decode(errors="replace") if isinstance(value, bytes) else str(value)))
    return found


def _is_public(name: str) -> bool:
    return _PREFIX.sub("", name.lower(), count=1) in _PUBLIC


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """Version of an object: size in bytes, and ETag (or time of the last change without one).

    `has_etag` says whether requests can demand `tag`; `listed` that a manifest, not the store, gave the version.
    """

    size: int
    tag: str
    has_etag: bool
    listed: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, meta: Any, url: str) -> ObjectVersion:
        size, tag = cls.checked_size(meta["size"], url), meta["e_tag"]
        return cls(size, tag or meta["last_modified"].isoformat(), bool(tag))

    @staticmethod
    def checked_size(size: Any, url: str) -> int:
        if not 0 <= int(size) < 1 << 63:
            raise StoreError(f"the store reports an impossible size of {url}: {size} bytes", path=url)
        return int(size)

    def matches(self, other: ObjectVersion) -> bool:
        """Return whether both may be the same version, if one lacks the ETag or its quotes."""
        same = self.has_etag != other.has_etag or self.tag.strip('"') == other.tag.strip('"')
        return same and self.size == other.size

    @property
    def number(self) -> int:
        """A number below 2**56 that differs between versions."""
        return int.from_bytes(hashlib.blake2b(f"{self.tag}\0{self.size}".encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True, slots=True)
class Remote:
    """A source's settings and knowledge of data at URLs, which are sent to other processes with the source.

    `versions` by URL, None for a missing object, are fixed at the first look: a later change is an error. `boards`
    tells readers the plan for shards (``"board"``) and what mode ``"auto"`` stands for (``"mode"``); in this process,
    `modes` says so, and `ranges` has the range prefetchers, by loader. `commits` has the commit that a revision at the
    Hugging Face Hub stands for, by the URL of the data set: it is asked for once. `opening` has the shards of a data
    set being opened, if their format or lengths are unknown. `clients`, by store, end with this object or by `release`.
    """

    store: StoreOptions = field(default_factory=lambda: StoreOptions({}))
    options: RemoteOptions = field(default_factory=RemoteOptions)
    versions: dict[str, ObjectVersion | None] = field(
        default_factory=dict[str, "ObjectVersion | None"], compare=False, repr=False
    )
    listings: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]], compare=False, repr=False)
    boards: dict[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)
    commits: dict[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)
    modes: dict[int, str] = field(default_factory=dict[int, str], compare=False, repr=False)
    ranges: dict[int, list[Any]] = field(default_factory=dict[int, list[Any]], compare=False, repr=False)
    opening: list[str] = field(default_factory=list[str], compare=False, repr=False)
    clients: PerProcess[dict[str, Any]] = field(default_factory=PerProcess[dict[str, Any]], compare=False, repr=False)
    traffics: PerProcess[Traffic] = field(default_factory=PerProcess[Traffic], compare=False, repr=False)

    @property
    def traffic(self) -> Traffic:
        return self.traffics.get(lambda: Traffic(self.options.connections))

    @property
    def reads_ahead(self) -> bool:
        return "board" in self.boards or bool(self.ranges)

    def expect(self, url: str, size: int, etag: str) -> None:
        """Note the version of an object that a manifest lists, which saves a request."""
        self.versions.setdefault(url, ObjectVersion(size, etag, True, listed=True))

    def lacks(self, url: str) -> bool:
        """Return whether the listing of its directory is known and has neither such an object nor such a directory."""
        directory, _, name = url.rstrip("/").rpartition("/")
        names = self.listings.get(directory)
        if names is None:
            return False
        place = bisect_left(names, name)
        return names[place : place + 1] != (name,)

    def add_name(self, url: str) -> None:
        """Add an object that was written to the listings of its directories that are known, which saves requests."""
        while "/" in url:
            directory, _, name = url.rpartition("/")
            if self.lacks(url):
                names = self.listings[directory]
                place = bisect_left(names, name)
                self.listings[directory] = (*names[:place], name, *names[place:])
            url = directory

    @contextmanager
    def learning(self, paths: Iterable[str]) -> Generator[None]:
        """Limit downloads that only learn what shards contain to the option `scan`."""
        self.opening[:] = (path for path in paths if is_url(path))
        try:
            yield
        finally:
            self.opening.clear()

    def release(self) -> None:
        """Close connections and threads that are not shared; the next use makes new ones."""
        self.clients.drop()

    def __reduce__(self) -> Any:
        known = self.versions, self.listings, self.boards, self.commits
        return Remote, (self.store, self.options, *map(dict, known))  # copies: threads that read learn more

    @classmethod
    def of(cls, storage_options: Any = None, remote: Any = None) -> Remote:
        """Return the settings for the options ``storage_options=`` and ``remote=``, which may be a `Remote`."""
        if isinstance(remote, Remote):
            return remote
        for name, value in (("storage_options", storage_options), ("remote", remote)):
            if not (value is None or isinstance(value, (Mapping, StoreOptions, RemoteOptions))):
                raise ConfigError(f"{name} must be a table of options, got {type(value).__name__}", key=name)
        store = storage_options if isinstance(storage_options, StoreOptions) else StoreOptions(storage_options or {})
        return cls(store, remote if isinstance(remote, RemoteOptions) else RemoteOptions.parse(remote or {}))


def node_directory(remote: Remote | None) -> str | None:
    """Return the directory of the node's cache of remote data, which may not exist; None if there is none to use."""
    chosen = None if remote is None else remote.options.cache
    return user_directory() if chosen is None else os.path.abspath(chosen)


def node_folder(remote: Remote, *names: str) -> str | None:
    """Create a folder in the node's cache and return its path; None if none was named and the home cannot hold one."""
    root = node_directory(remote)
    with suppress(SourceError) if remote.options.cache is None else nullcontext():
        return None if root is None else trusted_folder(root, *names)
    return None


def is_plain(base: str, given: dict[str, Any]) -> bool:
    """Return whether the user has named an http:// server; our client options override the environment's."""
    endpoints = [base, *(value for name, value in given.items() if "endpoint" in name.lower())]
    for name, value in os.environ.items():
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            if name.endswith("_ALLOW_HTTP") and value.lower() in ("1", "true"):
                return True
            endpoints += [value] if "ENDPOINT" in name else []
    return any(isinstance(endpoint, str) and endpoint.startswith("http://") for endpoint in endpoints)
