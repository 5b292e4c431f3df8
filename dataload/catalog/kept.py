"""List the files that dataload keeps beside data and in caches, and delete those that may be deleted."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

from dataload.catalog.arrays import TABLES
from dataload.catalog.manifest import MANIFEST_NAME
from dataload.errors import DataloadError
from dataload.storage import Remote, base_name, is_url, join, storage_of
from dataload.storage.kept import INVALID, UNFINISHED, Kept, list_kept, read_key, remove_kept

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
    # An index writes lengths before the manifest names them.
    unnamed = "all" if is_url(directory) or any(file.kind == "index" for file in jobs) else "prune"
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
