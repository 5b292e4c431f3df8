"""Versions of files: workers read those that their parent opened, and one that is overwritten is an error."""

from collections.abc import Iterable, Sequence

import numpy as np

from dataload.storage import FileIdentity
from dataload.storage.errors import overwritten_error, rewritten_error
from dataload.types import Int64Array


def versions_of(paths: Sequence[str]) -> Int64Array:
    """Return size, time of change in ns and a hash of the inode of each file, (files, 3); zeros for a missing file."""
    return np.array([_version(path) for path in paths], np.int64).reshape(-1, 3)


def as_versions(identities: Iterable[FileIdentity]) -> Int64Array:
    """Return what `versions_of` returns for files of these identities."""
    return np.array([(each.size, each.changed, hash(each.file)) for each in identities], np.int64).reshape(-1, 3)


def check_versions(paths: Sequence[str], known: Int64Array) -> None:
    """Raise CorruptFileError if a file is not of the version that `versions_of` returned before."""
    now = versions_of(paths)
    differs = (now != known).any(axis=1) & now.any(axis=1)  # opening a missing file says what is wrong
    if differs.any():
        raise rewritten_error(paths[int(np.argmax(differs))])


def check_not_overwritten(paths: Sequence[str], known: Int64Array) -> None:
    """Raise ChangedFileError if a file was changed in place; one that was replaced or deleted is read on."""
    now = versions_of(paths)
    overwritten = (now[:, 2] == known[:, 2]) & (now != known).any(axis=1)
    if overwritten.any():
        first = int(np.argmax(overwritten))
        raise overwritten_error(paths[first], int(known[first, 1]), int(now[first, 1]))


def _version(path: str) -> tuple[int, int, int]:
    try:
        identity = FileIdentity.at(path)
    except OSError:  # opening it says what is wrong
        return 0, 0, 0
    return identity.size, identity.changed, hash(identity.file)
