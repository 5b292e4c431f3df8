"""The clients of this process, by the store of a URL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from dataload._util.caches import PerProcess
from dataload.storage.paths import is_hub_url
from dataload.storage.remote.client import ObjectClient
from dataload.storage.remote.requests import check_process, split_url
from dataload.storage.remote.settings import Remote

_clients: PerProcess[WeakValueDictionary[tuple[Any, ...], ObjectClient]] = PerProcess()


def client_of(url: str, remote: Remote) -> tuple[ObjectClient, str]:
    """Return this process's client for the store of a URL, and the key of the object."""
    base, key = split_url(url)
    check_process()
    own = remote.clients.get(dict)
    client = own.get(base)
    if client is None and is_hub_url(base):
        from dataload.storage.remote.hub import HubClient  # few need its package

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
    from dataload.storage.remote.hub import HubClient, is_offline, offline_path

    offline = is_offline()
    for path in paths:
        if not is_hub_url(path):
            yield path
        elif offline:
            yield offline_path(path)
        else:
            client, key = client_of(path, remote) if remote is not None else (None, "")
            yield (client.held(key) if isinstance(client, HubClient) else None) or path
