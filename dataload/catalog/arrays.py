"""Arrays that are slow to make and kept for later: tables of an archive's samples, results of filters.

They lie in hidden files beside the data, or, if those are at a URL or their directory is not writable, in the folder
``tables`` of the cache of the node or user. A table is called by what it describes, so a new one replaces it. A filter
is called by its address, a hash of all that it was computed from; a directory keeps `MOST_FILTERS`. Both count only as
long as the files of the data have the sizes and versions in their key. A file that cannot be written is skipped. The
environment variable ``DATALOAD_CACHE=0`` turns all of it off.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self, TypeVar

from dataload.storage import FileIdentity, Remote, absolute, base_name, is_url, parent, storage_of
from dataload.storage.array_file import INVALID, CachedTable, Place, read_arrays, write_arrays
from dataload.storage.kept import list_kept, note_place, remove_kept, touch
from dataload.storage.remote.settings import node_directory
from dataload.types import Array

T = TypeVar("T")

MOST_FILTERS = 16
"""Maximum number of results of filters and measured transforms that are kept of the data in one directory."""

MOST_BYTES = 1 << 30
"""Maximum size of these results together, except for the last one."""

TABLES = "tables"
_FILTER, _SUFFIX = "filter", ".dataload-index"
_VERSION = 1
_SETTLED_SECONDS = 2.0  # resolution of the coarsest file system clock: a later change may keep the same time


@dataclass(frozen=True, slots=True)
class IndexKey:
    """Everything that arrays were made from; they are valid while all of it is unchanged.

    Paths and inodes are not part of the key, so copies that preserve times keep their table. The file is kept beside
    `path`, or in the cache of `remote`. `files` has the size in bytes and the time of change in ns of each file, the
    data file first; of objects, a number of their version instead. `options` and `state` (other evidence that the files
    are unchanged) are compared by repr.
    """

    kind: str
    path: str
    files: tuple[tuple[int, int], ...]
    options: tuple[Any, ...]
    state: Any = None
    remote: Remote | None = None

    @classmethod
    def of(
        cls,
        kind: str,
        paths: tuple[str, ...],
        options: tuple[Any, ...] = (),
        *,
        state: Any = None,
        beside: str | None = None,
        remote: Remote | None = None,
        known: FileIdentity | None = None,
    ) -> Self | None:
        """Return the key of files, the data file first, before they are read; None if the cache is disabled.

        The version of a single file may be `known`.
        """
        if os.environ.get("DATALOAD_CACHE") == "0":
            return None
        versions = [storage_of(path, remote).identity(path) for path in paths] if known is None else [known]
        files = tuple(version[:2] for version in versions)
        return cls(kind, beside or paths[0], files, options, state, remote if is_url(paths[0]) else None)

    @classmethod
    def of_filter(cls, files: Sequence[tuple[str, Remote | None]], options: tuple[Any, ...]) -> Self | None:
        """Return the key of the result of a filter; None if the cache is disabled."""
        path, remote = files[0]
        first = cls.of(_FILTER, (path,), options, remote=remote)
        others = (storage_of(path, remote).identity(path)[:2] for path, remote in files[1:])
        return None if first is None else replace(first, files=(*first.files, *others))

    @property
    def text(self) -> str:
        """The key as text, without `path`."""
        return repr((_VERSION, sys.byteorder, self.kind, self.files, self.options, self.state))

    def places(self) -> Iterator[Place]:
        """Yield the places where the file may be, the preferred one first; their names depend on the options."""
        path, far = absolute(self.path), is_url(self.path)
        directory = parent(path)
        if self.kind == _FILTER:
            suffix = f".filter-{_short(repr(self.options), 16)}.arrays"
            hidden, described = f".dataload{suffix}", directory
        else:
            suffix = f".{_short(repr(self.options))}{_SUFFIX}" if self.options and not far else _SUFFIX
            hidden, described = f".{base_name(path)}{suffix}", f"{path} {self.options!r}" if far else path
        if not far:
            yield Place(directory, hidden, data=self.path)
        if (cache := node_directory(self.remote)) is not None:
            # Version 0.2 had no room for local tables; nothing is written there.
            for room in (TABLES,) if far else (TABLES, ""):
                yield Place(cache, _short(described) + suffix, room=room)


def _short(text: str, size: int = 8) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=size).hexdigest()


def load_cached(key: IndexKey) -> CachedTable | None:
    """Return what is stored under `key`, or None if it is missing, damaged or out of date."""
    for place in key.places():
        with suppress(*INVALID):
            found = read_arrays(place, key.text)
            if key.kind == _FILTER:
                touch(place.path)
            return found
    return None


def recall(key: IndexKey | None, unpack: Callable[[CachedTable], T | None]) -> T | None:
    """Return what `unpack` makes of the arrays stored under `key`; None if there are none, or they are not valid.

    The file may have been tampered with, so whatever `unpack` raises means that the arrays are not valid.
    """
    found = None if key is None else load_cached(key)
    with suppress(*INVALID):
        return None if found is None else unpack(found)
    return None


def remember(
    key: IndexKey | None,
    unpack: Callable[[CachedTable], T | None],
    build: Callable[[], T],
    pack: Callable[[T], CachedTable | None],
) -> T:
    """Return what was kept, or else build it and store what `pack` returns; None if that is not worth it."""
    table = recall(key, unpack)
    if table is None:
        table = build()
        packed = None if key is None else pack(table)
        if key is not None and packed is not None:
            store_cached(key, packed)
    return table


def store_cached(key: IndexKey, table: CachedTable) -> None:
    """Store arrays, if one of their places is writable.

    Files that have just changed may change again within the same tick of the file system's clock, so nothing made from
    them is stored.
    """
    if max(changed for _, changed in key.files) > time.time_ns() - int(_SETTLED_SECONDS * 1e9):
        return
    for place in key.places():
        if (place.data or place.room) and write_arrays(place, key.text, table):
            if place.data is not None:
                note_place(place.directory)
            if key.kind == _FILTER:
                _drop_filters(place)
            return


def _drop_filters(place: Place) -> None:
    """Delete the results that were not used for longest, beyond `MOST_FILTERS` or `MOST_BYTES` of the same data."""
    start = place.name.partition(".filter-")[0]
    kept = list_kept(parent(place.path), lambda name: name.startswith(f"{start}.filter-"))
    kept.sort(key=lambda each: (each.path != place.path, -(each.used or 0)))
    for number, total in enumerate(accumulate(each.bytes for each in kept)):
        if number and (number >= MOST_FILTERS or total > MOST_BYTES):
            remove_kept(kept[number])


def within(numbers: Array, stop: int) -> bool:
    """Return whether all numbers of a loaded array are in [0, stop)."""
    return not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < stop)
