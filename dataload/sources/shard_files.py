"""The shards in a directory: their sizes, and whether some are missing."""

import json
from collections.abc import Sequence
from contextlib import suppress

from dataload._util.indexing import missing_parts
from dataload.errors import SourceNotFoundError
from dataload.storage import Remote, base_name, is_url, join, storage_of

LOCK_FILE = "lock.mdb"
"""Name of a file in directories of LMDB, which rewrites it whenever the environment is opened."""

_JOURNALS = ".*.convert.json"  # of conversions, which keep them beside their shards


def shard_bytes(path: str, remote: Remote | None = None) -> int:
    """Return the size of a shard: of a file, or of all visible files in a directory except LMDB's lock."""
    storage = storage_of(path, remote)
    if not storage.is_directory(path):
        return storage.size(path)
    return sum(storage.size(join(path, name)) for name in storage.list(path) if name != LOCK_FILE)


def check_complete(directory: str, names: Sequence[str], remote: Remote | None) -> None:
    """Raise an error if shards of a directory without a manifest are missing, such as those of a killed conversion."""
    remedy = "finish the conversion or the copy that makes the others; to open those that exist, name them by a pattern"
    if missing := missing_parts(names):
        name, count = missing
        several = f" (and {count - 1} more)" if count > 1 else ""
        raise SourceNotFoundError(f"the directory {directory} has no {name}{several}: {remedy}", path=directory)
    storage = storage_of(directory, remote)
    for path in storage.glob(join(directory, _JOURNALS)) if is_url(directory) else ():
        with suppress(ValueError, KeyError, TypeError):  # is not one
            journal = json.loads(storage.read(path))
            if len(journal["finished"]) < len(journal["shards"]):
                message = f"the directory {directory} has the shards of an unfinished conversion ({base_name(path)})"
                raise SourceNotFoundError(f"{message}: {remedy}", path=directory)
