"""Compressed files, decompressed as a whole into the node's cache to be read at any offset."""

from collections.abc import Callable
from functools import partial

import numpy as np

from dataload._util.decoding import decoding
from dataload._util.waits import Wait
from dataload.storage.core import can_map
from dataload.storage.paths import absolute, base_name
from dataload.storage.records import RecordFile
from dataload.storage.remote.settings import ObjectVersion, Remote
from dataload.storage.storage import storage_of, unchanged
from dataload.types import BytesArray


def map_unpacked(
    path: str,
    size: int,
    unpack: Callable[[bytes, BytesArray], None],
    *,
    mapped: bool = True,
    remote: Remote | None = None,
) -> RecordFile:
    """Open a compressed file to copy records out of it. Its content is in the cache of the node, within its budget.

    `unpack` decompresses the file into an array of `size` bytes, or raises an error. For `mapped`, see `can_map`.
    """
    from dataload.storage.remote.ahead import write  # most data are not compressed
    from dataload.storage.remote.files import keep, local_copy, open_shards
    from dataload.storage.remote.storage import node_cache

    given = Remote() if remote is None else remote
    storage, cache, name = storage_of(path, remote), node_cache(given), absolute(path)
    # The version of the compressed file identifies what is in it.
    identity = storage.identity(path)
    version = ObjectVersion(size, f"unpacked {identity!r}", has_etag=False)

    def fill(descriptor: int) -> None:
        with unchanged(storage, path, identity), storage.open(path, whole=True) as file:
            data = file.read(0, file.size)
        with decoding():
            content = np.empty(size, np.uint8)
            unpack(data, content)
        write(descriptor, 0, content)

    return local_copy(
        path,
        version,
        lambda: cache.fetch(name, version, fill, open_shards().give_up, Wait(given.options.timeout)),
        mapped=mapped and can_map(),
        listed=True,
        keep=partial(keep, cache, base_name(path)),
    )
