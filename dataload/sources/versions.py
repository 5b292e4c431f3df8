"""Versions of files, so that worker processes read the files that their parent opened."""

import hashlib
from collections.abc import Sequence

from dataload.errors import SourceError
from dataload.storage import storage_of
from dataload.storage.errors import rewritten_error

_BYTES = 8  # of each version: pickles of sources stay small


def versions_of(paths: Sequence[str]) -> bytes:
    """Return a hash of each file's identity, one after another; zeros for a file that is missing."""
    return b"".join(map(_version, paths))


def check_versions(paths: Sequence[str], known: bytes) -> None:
    """Raise CorruptFileError if a file is not of the version that `versions_of` returned before."""
    found = versions_of(paths)
    if found != known:
        first = next(i for i in range(len(found)) if found[i] != known[i])
        raise rewritten_error(paths[first // _BYTES])


def _version(path: str) -> bytes:
    try:
        identity = storage_of(path).identity(path)
    except SourceError:  # opening it says what is wrong
        return bytes(_BYTES)
    return hashlib.blake2b(repr(identity).encode(), digest_size=_BYTES).digest()
