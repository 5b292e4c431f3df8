"""Identification of files: by their versions for worker processes, by the bytes at both ends for fingerprints."""

import hashlib
from collections.abc import Sequence

from dataload.errors import SourceError
from dataload.storage import Remote, storage_of
from dataload.storage.errors import rewritten_error

_ENDS_BYTES = 4096
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


def ends_of_file(path: str, remote: Remote | None) -> tuple[int, str]:
    """Return the size of a file and a hash of its first and last 4 KiB, which distinguishes files of equal size."""
    with storage_of(path, remote).open(path) as file:
        ends = file.read(0, _ENDS_BYTES) + file.read(max(0, file.size - _ENDS_BYTES), _ENDS_BYTES)
        return file.size, hashlib.blake2b(ends, digest_size=8).hexdigest()
