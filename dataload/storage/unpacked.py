"""Compressed files, decompressed as a whole into the node's cache to be read at any offset."""

from collections.abc import Callable

import numpy as np

from dataload._util.decoding import decoding
from dataload.storage.core import can_map
from dataload.storage.paths import absolute
from dataload.storage.records import RecordFile
from dataload.storage.remote.settings import ObjectVersion, Remote
from dataload.storage.storage import storage_of
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

    Args:
        path: The compressed file.
        size: Bytes of its content.
        unpack: Decompresses the file into an array of `size` bytes, or raises an error.
        mapped: Map it into memory, if that is safe; see `can_map`.
        remote: The settings of the cache, and of data at URLs.
    """
    from dataload.storage.remote.ahead import write  # most data are not compressed
    from dataload.storage.remote.files import local_copy, open_shards
    from dataload.storage.remote.storage import node_cache

    storage, cache, name = storage_of(path, remote), node_cache(Remote() if remote is None else remote), absolute(path)
    # The version of the compressed file identifies what is in it.
    version = ObjectVersion(size, f"unpacked {storage.identity(path)!r}", has_etag=False)

    def fill(descriptor: int) -> None:
        with storage.open(path, whole=True) as file:
            data = file.read(0, file.size)
        with decoding():
            content = np.empty(size, np.uint8)
            unpack(data, content)
        write(descriptor, 0, content)

    return local_copy(
        path,
        version,
        lambda: cache.fetch(name, version, fill, open_shards().give_up),
        mapped=mapped and can_map(),
        listed=True,
        keeps_lease=lambda: True,
    )
