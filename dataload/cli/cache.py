"""``dataload cache``: what dataload keeps beside data and in the cache of this machine."""

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer
from rich.filesize import decimal

from dataload.catalog.arrays import list_cache, list_data, remove
from dataload.cli.options import JsonFlag, Options, SourceOptions, command_group
from dataload.cli.output import ProgressBar, count_of, print_error, print_json, print_line, print_table
from dataload.errors import ConfigError
from dataload.sources.discover import find_shards
from dataload.storage import Remote, base_name, join
from dataload.storage.kept import Kept, noted_places
from dataload.storage.remote.backend import RemoteStorage
from dataload.storage.remote.cache import ShardCache
from dataload.storage.remote.requests import Checked, check_shard
from dataload.storage.remote.settings import RemoteOptions, node_directory, parse_bytes

Directories: TypeAlias = Annotated[
    list[str] | None, typer.Argument(help="Directories of data, local or URLs. Default: the cache and noted ones.")
]
CacheDirectory: TypeAlias = Annotated[
    str | None, typer.Option("--cache", help="The directory given as remote.cache. Default: the user's.")
]

_COLUMNS = {"kind": "left", "of": "left", "files": "right", "size": "right", "last use": "left", "held by": "left"}
_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))

cache_command: Any = command_group("Show and delete what dataload keeps beside data and of data at URLs, and check it.")


@cache_command.command("status")
def status_command(
    paths: Directories = None, option: Options = None, cache: CacheDirectory = None, json: JsonFlag = False
) -> None:
    """List what dataload keeps: shards, tables, filters, lengths, uploads, jobs, locks, and who uses them.

    Without PATHS, that is the cache, and every directory in which this user's processes have kept something.
    """
    places = _places(paths, option, cache)
    if json:
        print_json(
            ({} if paths else _facts(places[0])) | {"kept": [file._asdict() for each in places for file in each.kept]}
        )
        return
    for place in places:
        print_line(place.directory, "bold")
        rows = defaultdict[tuple[str, str], list[Kept]](list)
        for file in place.kept:
            rows[file.kind, re.sub(r"\d+", "*", file.name)].append(file)
        if rows:
            print_table(_COLUMNS, [(*key, *_row(files)) for key, files in rows.items()])
        else:
            print_line("nothing is kept")


@cache_command.command("prune")
def prune_command(
    paths: Directories = None,
    budget: Annotated[
        str | None, typer.Option(help="Keep the last used shards up to this size, such as 500GB, and tables.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete unfinished jobs that no process holds, too, after listing them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete them without asking.")] = False,
    option: Options = None,
    cache: CacheDirectory = None,
) -> None:
    """Delete what can be made again and no process holds: shards, downloads, tables, filters, uploads.

    Never deleted are what a process holds, and lengths of records that a manifest names.
    """
    if everything and budget is not None:
        raise ConfigError("--all keeps nothing: leave --budget out", key="budget")
    most = 0 if budget is None else parse_bytes("budget", budget)
    places = _places(paths, option, cache)
    jobs = [file for place in places for file in place.kept if (file.removal, file.holder) == ("all", "")]
    for file in jobs if everything else ():
        print_line(f"{file.path}: {file.kind} ({decimal(file.bytes)})")
    if not everything or (jobs and not yes and not typer.confirm("Delete these unfinished jobs?")):
        jobs = []
    for place in places:
        chosen = [file for file in place.kept if file.removal == "prune" or file in jobs]
        shards = {file.path for file in chosen if file.kind in ("shard", "download")}
        others = [file for file in chosen if file.path not in shards]
        if budget is not None:
            others = [file for file in others if file.kind not in ("table", "filter", "lengths")]
        removed = {file.path for file in remove(others, place.remote)}
        if place.root is not None and shards:
            removed |= {file.path for file in ShardCache(place.root, None).prune(most, shards)}
        gone, left = ([file for file in place.kept if (file.path in removed) == is_gone] for is_gone in (True, False))
        text = f"deleted {_sum(gone)}; {_sum(left)} left"
        print_line(f"{place.directory}: {text}, {sum(file.holder != '' for file in left)} in use")


class Place(NamedTuple):
    """A directory and what is kept of it; `root` is the cache's."""

    directory: str
    kept: list[Kept]
    remote: Remote | None = None
    root: str | None = None


def _places(paths: list[str] | None, options: list[str] | None, cache: str | None) -> list[Place]:
    if not paths:
        root, _ = _open(cache)
        noted = (Place(each, list_data(each)) for each in noted_places()) if cache is None else ()
        return [Place(root, list_cache(root), root=root), *(place for place in noted if place.kept)]
    places: list[Place] = []
    for path in paths:
        found = SourceOptions.parse(path, format=None, options=options)
        if found.remote is None:
            _check_directory(found.path, "paths")
        kept, root = list_data(found.path, found.remote), None
        if found.remote is not None:
            root, _ = _open(cache, found.remote)
            storage = RemoteStorage(found.remote)
            urls = [join(found.path, name) for name in storage.list(found.path)]
            names = {ShardCache.name(url, storage.version(url)) for url in urls if not storage.is_directory(url)}
            kept += [
                each for each in list_cache(root) if base_name(each.path).lstrip(".").removesuffix(".part") in names
            ]
        places.append(Place(found.path, kept, found.remote, root))
    return places


def _facts(place: Place) -> dict[str, Any]:
    """Return what version 0.2 told of a cache."""
    shards, parts, tables = (
        [file for file in place.kept if file.kind == kind] for kind in ("shard", "download", "table")
    )
    ages = [max(0.0, time.time() - (file.used or 0)) for file in shards]
    return {
        "directory": place.directory,
        "shards": _count(shards),
        "in_use": _count(file for file in shards if file.holder),
        "downloading": _count(file for file in parts if file.holder),
        "left_over": _count(file for file in parts if not file.holder),
        "tables": _count(tables),
        "seconds_unused": {"least": min(ages), "most": max(ages)} if ages else None,
        "files": [
            {"name": os.path.basename(file.path), "bytes": file.bytes, "used": file.used, "in_use": file.holder != ""}
            for file in sorted(shards + parts, key=lambda file: file.used or 0)
        ],
    }


def _row(files: Sequence[Kept]) -> tuple[str, ...]:
    """Return the cells of a data set: the number of files, their size, the last use, and who holds how many."""
    used, count = max(file.used or 0 for file in files), _count(files)
    holders = Counter(file.holder for file in files if file.holder)
    held = "; ".join(f"{who} ({number})" if len(files) > 1 else who for who, number in holders.items())
    age = f"{_age(max(0, time.time() - used))} ago" if used else ""
    return f"{count['count']:,}", decimal(count["bytes"]), age, held


@cache_command.command("verify")
def verify_command(
    paths: Annotated[
        list[str] | None, typer.Argument(help="URLs of data sets whose manifests have the SHA-256 of shards.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete damaged shards; they are downloaded again.")] = False,
    md5: Annotated[
        bool,
        typer.Option(
            help="Compare with ETags that look like an MD5. ETags of encrypted objects look so, but are none."
        ),
    ] = True,
    option: Options = None,
    cache: CacheDirectory = None,
    json: JsonFlag = False,
) -> None:
    """Compare shards with their lengths and known hashes.

    The SHA-256 comes from the manifests of the data sets PATHS, the MD5 from the
    ETags of objects that were uploaded to S3 or GCS in one part. The exit code
    is 1 if a shard is damaged.
    """
    root, shards = _open(cache)
    hashes = dict[str, str]()
    for path in paths or ():
        hashes |= _hashes(SourceOptions.parse(path, format=None, options=option))
    found: list[Checked] = []
    damaged = 0
    with ProgressBar("verifying") as bar:
        files = [file for file in shards.files() if not file.is_part] if shards is not None else []
        for number, file in enumerate(files, start=1):
            assert shards is not None
            result = check_shard(file, hashes.get(file.name), md5=md5)
            bar(number, len(files))
            if result is None:
                continue
            found.append(result)
            if result.problem is not None:
                damaged += 1
                if delete:
                    shards.remove(file)
                if not json:
                    with bar.hidden():
                        print_line(f"{result.path}: {result.problem}{' (deleted)' if delete else ''}")
    counts = Counter(result.by or "unknown" for result in found)
    by = {kind: counts[kind] for kind in ("sha256", "md5", "length", "unknown")}
    if json:
        bad = [{"path": each.path, "by": each.by, "problem": each.problem} for each in found if each.problem]
        print_json({"directory": root, "shards": len(found), "checked": by, "ok": not damaged, "bad": bad})
    else:
        how = f"{by['sha256']} by SHA-256, {by['md5']} by MD5, {by['length']} by length"
        how += f", {by['unknown']} with an unknown name" if by["unknown"] else ""
        (print_error if damaged else print_line)(
            f"{damaged or 'none'} damaged of {count_of(len(found), 'shard')} ({how})"
        )
    if damaged:
        raise typer.Exit(1)


def _open(given: str | None, remote: Remote | None = None) -> tuple[str, ShardCache | None]:
    """Return the directory of a cache, and its shards if it has any; nothing is created."""
    root = node_directory(remote if given is None else Remote(options=RemoteOptions(cache=given)))
    if root is None:
        raise ConfigError("there is no home directory with a cache: name it with --cache", key="cache")
    if given is not None:
        _check_directory(root, "cache")
    return root, ShardCache(root, None) if os.path.isdir(os.path.join(root, "shards")) else None


def _check_directory(path: str, key: str) -> None:
    if not os.path.isdir(path):
        raise ConfigError(f"there is no directory {path}", key=key, value=path)


def _hashes(wanted: SourceOptions) -> dict[str, str]:
    """Return the SHA-256 of shards by their names in the cache."""
    remote = wanted.remote
    if remote is None:
        raise ConfigError(f"{wanted.path} is not a URL, so its shards are not in the cache", key="paths")
    storage, found = RemoteStorage(remote), dict[str, str]()
    listed = find_shards(wanted.path, remote=remote).listed
    if not listed:
        raise ConfigError(f"{wanted.path} has no manifest: name its directory", key="paths", value=wanted.path)
    directory = wanted.path
    with suppress(ConfigError):  # web servers do not list
        storage.list(directory)  # one request in place of many
    for entry in listed:
        for name, sha256 in zip(entry.names, entry.sha256, strict=True):
            url = join(directory, name)
            if sha256 is not None and not storage.is_directory(url):
                found[ShardCache.name(url, storage.version(url))] = sha256
    return found


def _count(files: Iterable[Kept]) -> dict[str, int]:
    sizes = [file.bytes for file in files]
    return {"count": len(sizes), "bytes": sum(sizes)}


def _sum(files: Sequence[Kept]) -> str:
    return f"{count_of(len(files), 'file')} ({decimal(sum(file.bytes for file in files))})"


def _age(seconds: float) -> str:
    for unit, length in _UNITS:
        if seconds >= length:
            return count_of(int(seconds // length), unit)
    return count_of(int(seconds), "second")
