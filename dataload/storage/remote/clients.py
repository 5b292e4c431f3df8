"""The clients of this process, by the store of a URL, also of data sets at the Hugging Face Hub.

`huggingface_hub` resolves the names, revisions and tokens of ``hf://datasets/ORG/NAME[@REVISION]/PATH`` as its users
know them (``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``); bytes are read by range from its URLs
``/datasets/ORG/NAME/resolve/COMMIT/PATH``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote
from weakref import WeakValueDictionary

from dataload._util.caches import PerProcess
from dataload._util.lazy import load_optional
from dataload.errors import SourceNotFoundError, StoreError
from dataload.storage.paths import is_hub_url, join, split_hub_url
from dataload.storage.remote.client import ObjectClient
from dataload.storage.remote.requests import Chunk, check_process, split_url
from dataload.storage.remote.settings import ObjectVersion, Remote

_clients: PerProcess[WeakValueDictionary[tuple[Any, ...], ObjectClient]] = PerProcess()


def client_of(url: str, remote: Remote) -> tuple[ObjectClient, str]:
    """Return this process's client for the store of a URL, and the key of the object."""
    base, key = split_url(url)
    check_process()
    own = remote.clients.get(dict)
    client = own.get(base)
    if client is None and is_hub_url(base):
        client = own[base] = HubClient(base, remote).counted(remote.traffic)  # of one commit, so it is not shared
    elif client is None:
        options = remote.options
        name = (base, remote.store.digest(), options.connections, options.timeout, options.retries)
        shared = _clients.get(WeakValueDictionary)
        found = shared.get(name) or shared.setdefault(name, ObjectClient(base, remote))
        client = own[base] = found.counted(remote.traffic)
    return client, key


def held_paths(paths: Iterable[str], remote: Remote | None) -> Iterator[str]:
    """Return local paths in place of the URLs of files that the cache of `huggingface_hub` holds; offline, of all."""
    offline = is_offline()
    for path in paths:
        if not is_hub_url(path):
            yield path
        elif offline:
            yield offline_path(path)
        else:
            client, key = client_of(path, remote) if remote is not None else (None, "")
            yield (client.held(key) if isinstance(client, HubClient) else None) or path


T = TypeVar("T")

_COMMIT = re.compile("[0-9a-f]{40}")
_BUSY = (408, 429)  # statuses below 500 after which a repeated request may succeed


def hub_error(url: str) -> StoreError:
    """Return the error of writing to the hub."""
    return StoreError(f"cannot write {url}: write a local directory, and upload it with `hf upload`", path=url)


class HubClient(ObjectClient):
    """Requests to one commit of a data set, which never changes, so no request needs a condition."""

    def __init__(self, base: str, remote: Remote) -> None:
        self._hub, self._constants = _load("huggingface_hub"), _load("huggingface_hub.constants")
        self._name, self._revision = split_hub_url(base)[1:3]
        self._token: str | None = None
        self._commits = remote.commits
        super().__init__(base, remote)

    def _address(self) -> tuple[str, dict[str, Any]]:
        given = self._given.arguments()
        client = dict(given.pop("client_options", {}))
        self._token = given.pop("token", None) or self._hub.get_token()
        if self._token:
            self._secrets.append(self._token)
            client["default_headers"] = {"Authorization": f"Bearer {self._token}", **client.get("default_headers", {})}
        if self._base not in self._commits:
            self._commits[self._base] = self._resolve()
        url = f"{self._constants.ENDPOINT}/datasets/{self._name}/resolve/{self._commits[self._base]}"
        return url, {**given, "client_options": client}

    @property
    def _where(self) -> dict[str, str]:
        return {"repo_type": "dataset", "revision": self._commits[self._base]}

    def _resolve(self) -> str:
        if _COMMIT.fullmatch(self._revision):
            return self._revision
        name, revision = self._name, self._revision
        info = self._ask(f"look up {self._base}", self._base, lambda api: api.dataset_info(name, revision=revision))
        return quote(str(info.sha), safe="")

    def held(self, key: str) -> str | None:
        """Return the path of a file that the cache of `huggingface_hub` holds, of this commit."""
        cache = self._constants.HF_HUB_CACHE
        found = self._hub.try_to_load_from_cache(self._name, key, cache_dir=cache, **self._where)
        return found if isinstance(found, str) else None

    def head(self, url: str, key: str) -> ObjectVersion | None:
        found = self._ask(f"look up {url}", url, lambda api: api.get_paths_info(self._name, key, **self._where))
        return next((_version(entry, url) for entry in found if entry.path == key and _is_file(entry)), None)

    def list(self, url: str, key: str) -> tuple[list[str], list[tuple[str, ObjectVersion]]]:
        try:
            path = key or None
            found = self._ask(f"list {url}", url, lambda api: [*api.list_repo_tree(self._name, path, **self._where)])
        except SourceNotFoundError:
            found = []
        named = [(entry.path.rpartition("/")[2], entry) for entry in found]
        folders = [name for name, entry in named if not _is_file(entry)]
        return folders, [(name, _version(entry, url)) for name, entry in named if _is_file(entry)]

    def read(self, url: str, key: str, most: int) -> tuple[bytes, ObjectVersion, Any]:
        data, version, condition = super().read(url, key, most)
        # The servers behind the hub have other ETags than it lists.
        return data, self.head(url, key) or version, condition

    def put(self, url: str, *_: Any, **__: Any) -> NoReturn:
        raise hub_error(url)

    def put_parts(self, url: str, *_: Any, **__: Any) -> NoReturn:
        self.put(url)

    def delete(self, url: str, *_: Any, **__: Any) -> NoReturn:
        self.put(url)

    def _request(self, url: str, key: str, version: ObjectVersion, chunk: Chunk) -> Any:
        result = self._obstore.get(self._store, key, options={"range": (chunk.start, chunk.stop)})
        if result.meta["size"] != version.size:
            message = f"the hub says that it has {version.size} bytes, and sends one of {result.meta['size']}"
            raise StoreError(f"cannot read {url}: {message}", path=url)
        return result

    def _ask(self, what: str, url: str, call: Callable[[Any], T]) -> T:
        errors = _load("huggingface_hub.errors")
        api: Any = self._hub.HfApi(endpoint=self._constants.ENDPOINT, token=self._token or False)

        def ask() -> Any:
            try:
                return call(api)
            except errors.GatedRepoError:
                remedy = f"accept its terms at {api.endpoint}/datasets/{self._name}, and set HF_TOKEN"
                raise StoreError(f"cannot {what}: {self._name} asks for an agreement: {remedy}", path=url) from None
            except errors.RepositoryNotFoundError:
                message = f"{api.endpoint} has no data set {self._name}; if it is private, set HF_TOKEN"
                raise SourceNotFoundError(message, path=url) from None
            except errors.RevisionNotFoundError:
                raise SourceNotFoundError(f"{self._name} has no revision {self._revision}", path=url) from None
            except errors.EntryNotFoundError:
                raise SourceNotFoundError(f"there is no {url}", path=url) from None
            except errors.HfHubHTTPError as error:
                status = error.response.status_code
                if status >= 500 or status in _BUSY:
                    raise
                raise StoreError(f"cannot {what}: {api.endpoint} answers with status {status}", path=url) from None

        return self._attempts.make(what, url, ask)


def is_offline() -> bool:
    return _load("huggingface_hub.constants").is_offline_mode()


def offline_path(url: str) -> str:
    """Return where the cache of `huggingface_hub` has what a URL names, or a SourceNotFoundError."""
    hub, cache = _load("huggingface_hub"), _load("huggingface_hub.constants").HF_HUB_CACHE
    _, name, revision, key = split_hub_url(url)
    try:
        where = {"cache_dir": cache, "revision": revision, "repo_type": "dataset"}
        folder = hub.snapshot_download(name, **where, local_files_only=True)
    except OSError:
        message = f"HF_HUB_OFFLINE is set, and {cache} has no {name} of revision {revision}"
        remedy = f"download it with `hf download --repo-type dataset {name}`, or unset HF_HUB_OFFLINE"
        raise SourceNotFoundError(f"{message}: {remedy}", path=url) from None
    return join(folder, key) if key else folder


def _load(module: str) -> Any:
    return load_optional(module, needed_by="reading hf:// URLs", extra="hub")


def _is_file(entry: Any) -> bool:
    return hasattr(entry, "blob_id")


def _version(entry: Any, url: str) -> ObjectVersion:
    tag = entry.lfs.sha256 if entry.lfs is not None else entry.blob_id
    return ObjectVersion(ObjectVersion.checked_size(entry.size, url), str(tag), has_etag=False)
