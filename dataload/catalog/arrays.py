"""Arrays that are slow to make and kept for later: tables of archives, results of filters, lengths of many files.

The lengths of many files are one list, which is kept as the result of a filter is.

They lie in hidden files beside the data, or, if those are at a URL or their directory is not writable, in the folder
``tables`` of the cache of the node or user. A table is called by what it describes, so a new one replaces it. A filter
is called by its address, a hash of all that it was computed from; a directory keeps `MOST_FILTERS`. Both count only as
long as the files of the data have the sizes and versions in their key. A file that cannot be written is skipped. The
environment variable ``DATALOAD_CACHE=0`` turns all of it off.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self, TypeVar

import numpy as np

from dataload.catalog.manifest import MANIFEST_NAME
from dataload.errors import DataloadError
from dataload.storage import FileIdentity, Remote, absolute, base_name, is_url, join, parent, storage_of
from dataload.storage.kept import (
    INVALID,
    UNFINISHED,
    CachedTable,
    Kept,
    Place,
    list_kept,
    note_place,
    read_arrays,
    read_key,
    remove_kept,
    touch,
    write_arrays,
)
from dataload.storage.remote.settings import node_directory
from dataload.types import Array

T = TypeVar("T")

MOST_FILTERS = 16
"""Maximum number of results of filters and measured transforms, and lists, kept of the data in one directory."""

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
    if seconds_until_settled(key) > 0:
        return
    for place in key.places():
        if (place.data or place.room) and write_arrays(place, key.text, table):
            if place.data is not None:
                note_place(place.directory)
            if key.kind == _FILTER:
                _drop_filters(place)
            return


def seconds_until_settled(key: IndexKey) -> float:
    """Return for how long nothing that is made from these files is stored, see `store_cached`: at most 2."""
    left = max(changed for _, changed in key.files) / 1e9 + _SETTLED_SECONDS - time.time()
    return min(max(0.0, left), _SETTLED_SECONDS)


def _drop_filters(place: Place) -> None:
    """Delete the results that were not used for longest, beyond `MOST_FILTERS` or `MOST_BYTES` of the same data."""
    start = place.name.partition(".filter-")[0]
    kept = list_kept(parent(place.path), lambda name: name.startswith(f"{start}.filter-"))
    kept.sort(key=lambda each: (each.path != place.path, -(each.used or 0)))
    for number, total in enumerate(accumulate(each.bytes for each in kept)):
        if number and (number >= MOST_FILTERS or total > MOST_BYTES):
            remove_kept(kept[number])


def require(*holds: Any) -> None:
    """Raise a ValueError unless all of these hold, everywhere in arrays: loaded arrays are then not valid."""
    if not all(map(np.all, holds)):
        raise ValueError("not valid")


def within(numbers: Array, stop: int) -> bool:
    """Return whether all numbers of a loaded array are in [0, stop)."""
    return not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < stop)


_KINDS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "table": r"\.?(.+?)(?:\.[0-9a-f]{16})?\.dataload-index",
        "filter": r"(?:\.dataload|[0-9a-f]{16})\.filter-[0-9a-f]{32}\.arrays()",
        "lengths": r"\.dataload\.lengths-[0-9a-f]{32}\.npy()",
        "unfinished": UNFINISHED.pattern,
        "conversion": r"\.(.+)\.convert(?:\.\d+-of-\d+)?\.(?:json|log)(?:\.lock)?",
        "index": r"\.dataload\.json\.(?:index(?:\.\d+(?:-of)?-\d+)?(?:\.log)?|\d+-of-\d+)(?:\.lock)?()",
        "lock": r"\.dataload\.json(?:\.append)?\.lock()",
    }.items()
}
_ROOMS = {"uploads": "upload", "locks": "lock", "indexing": "index", "jobs": "reader", "plans": "plan"}


def list_data(directory: str, remote: Remote | None = None) -> list[Kept]:
    """Return what is kept beside the data in a directory."""
    files = [*map(_classify, list_kept(directory, _match, remote))]
    jobs = _as_jobs(file for file in files if file.kind in ("conversion", "index"))
    found = [file for file in files if file.kind not in ("conversion", "index")]
    heads = {file.name: join(directory, f".{file.name}.convert.json") for file in jobs if file.kind == "conversion"}
    complete = {name: _is_complete(head, remote) for name, head in heads.items()}
    for file in jobs:
        if complete.get(file.name) and file.path == heads[file.name]:
            found.append(file._replace(kind="journal", removal="never"))
        elif file.kind == "index" or complete[file.name] is not None:  # files of other programs are not ours
            found.append(file)
    # An index, and an append, write lengths before the manifest names them.
    is_due = any(file.kind == "index" or (file.kind == "lock" and file.holder) for file in files)
    unnamed = "all" if is_url(directory) or is_due else "prune"
    path = join(directory, MANIFEST_NAME)
    manifest = (storage_of(path, remote).load(path) or (b"", None))[0]
    for number, file in enumerate(found):
        if file.kind == "lengths":
            named = base_name(file.path).encode() in manifest  # which may be damaged
            found[number] = file._replace(removal="never" if named else unnamed)
    return sorted(found)


def list_cache(root: str) -> list[Kept]:
    """Return what is kept in the cache of a node or user."""
    found = [
        file._replace(kind="download" if base_name(file.path)[0] == "." else "shard", name=_stem(file, "~"))
        for file in list_kept(join(root, "shards"), living=True)
    ]
    found += map(_classify, list_kept(root, _KINDS["table"].fullmatch))  # of version 0.2
    found += map(_classify, list_kept(join(root, TABLES), _match))
    for room, kind in _ROOMS.items():
        files = list_kept(join(root, room), living=kind in ("reader", "plan"))
        if kind == "upload":
            files = [each for folder in files for each in list_kept(folder.path)]
        files = [file._replace(kind=kind, name=_stem(file, ".") if kind == "index" else "") for file in files]
        found += _as_jobs(files) if kind == "index" else files
    return found


def remove(found: Iterable[Kept], remote: Remote | None = None) -> list[Kept]:
    """Delete what is kept, except files that a process holds; return what was deleted."""
    others, jobs = list[Kept](), defaultdict[tuple[str, str], list[Kept]](list)
    for file in sorted(found, key=lambda file: file.path.endswith(".convert.json")):  # the heads last
        is_of_job = file.removal == "all" and not file.path.endswith(".lock")
        (jobs[file.kind, file.name] if is_of_job else others).append(file)
    gone: list[Kept] = []
    for files in jobs.values():
        with ExitStack() as locks, suppress(DataloadError):  # a job that has begun meanwhile keeps all
            for file in files:
                locks.enter_context(storage_of(file.path, remote).lock(file.path))
            gone += [file for file in files if remove_kept(file, remote)]
    return gone + [file for file in others if remove_kept(file, remote)]


def _stem(file: Kept, mark: str) -> str:
    return base_name(file.path).lstrip(".").partition(mark)[0]


def _match(name: str) -> tuple[str, str] | None:
    """Return the kind of a file that dataload keeps, and the name in its name."""
    return next(((kind, match[1]) for kind, pattern in _KINDS.items() if (match := pattern.fullmatch(name))), None)


def _classify(file: Kept) -> Kept:
    kind, name = _match(base_name(file.path)) or ("", "")
    with suppress(*INVALID):
        if kind == "table" and read_key(file.path).split(", ")[2] == "'filter'":  # of version 0.2
            kind = "filter"
    return file._replace(kind=kind, name=name)


def _is_complete(head: str, remote: Remote | None) -> bool | None:
    """Return whether a conversion is complete; None if the file is not the journal of one."""
    try:
        table: Any = json.loads((storage_of(head, remote).load(head) or (b"", None))[0])
        return len(table["finished"]) == len(table["shards"])
    except (DataloadError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _as_jobs(files: Iterable[Kept]) -> list[Kept]:
    """Return the files of jobs. A process that holds one file of a job holds all of them."""
    files = [*files]
    holders = {(file.kind, file.name): file.holder for file in files if file.holder}
    return [file._replace(holder=holders.get((file.kind, file.name), ""), removal="all") for file in files]
