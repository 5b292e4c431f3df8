"""``dataload cache``: the shards that this machine keeps of data at URLs."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeAlias

import typer
from rich.filesize import decimal

from dataload.cli.options import JsonFlag, Options, SourceOptions
from dataload.cli.output import ProgressBar, count_of, print_error, print_json, print_line
from dataload.errors import ConfigError
from dataload.sources.discover import find_shards
from dataload.storage import Remote, join
from dataload.storage.remote.backend import RemoteStorage
from dataload.storage.remote.cache import CachedFile, ShardCache
from dataload.storage.remote.requests import Checked, check_shard
from dataload.storage.remote.settings import RemoteOptions, node_directory, parse_bytes

CacheDirectory: TypeAlias = Annotated[
    str | None, typer.Option("--cache", help="The directory given as remote.cache. Default: the user's.")
]

_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))

cache_command: Any = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    help="Show, shrink and check the cache of data at URLs.",
)


@cache_command.command("status")
def status_command(cache: CacheDirectory = None, json: JsonFlag = False) -> None:
    """Show the shards in the cache, and those being read."""
    root, shards = _open(cache)
    files = [(file, file.is_used()) for file in (shards.files() if shards is not None else [])]
    ages = [max(0.0, time.time() - file.used) for file, _ in files if not file.is_part]
    facts: dict[str, Any] = {
        "directory": root,
        "shards": _count(file for file, _ in files if not file.is_part),
        "in_use": _count(file for file, used in files if used and not file.is_part),
        "downloading": _count(file for file, used in files if used and file.is_part),
        "left_over": _count(file for file, used in files if not used and file.is_part),
        "tables": _count(_tables(root)),
        "seconds_unused": {"least": min(ages), "most": max(ages)} if ages else None,
    }
    if json:
        listed = [{"name": file.name, "bytes": file.size, "used": file.used, "in_use": used} for file, used in files]
        print_json(facts | {"files": listed})
        return
    print_line(root, "bold")
    print_line(f"{_sum(facts['shards'], 'shard')}; in use: {_sum(facts['in_use'], 'shard')}")
    if ages:
        print_line(f"last use {_age(min(ages))} ago, of the longest unused {_age(max(ages))} ago")
    for name, text in (("downloading", "under way"), ("left_over", "left over, for `dataload cache prune`")):
        if facts[name]["count"]:
            print_line(f"{_sum(facts[name], 'download')} {text}")
    print_line(_sum(facts["tables"], "table"))


@cache_command.command("prune")
def prune_command(
    budget: Annotated[
        str | None, typer.Option(help="Keep the last used shards up to this size, such as 500GB. Default: none.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete the tables of data sets too.")] = False,
    cache: CacheDirectory = None,
) -> None:
    """Delete shards that no process reads, and abandoned downloads."""
    if everything and budget is not None:
        raise ConfigError("--all keeps nothing: leave --budget out", key="budget")
    most = 0 if budget is None else parse_bytes("budget", budget)
    root, shards = _open(cache)
    gone = shards.prune(most) if shards is not None else []
    text = f"deleted {_sum(_count(gone), 'file')}"
    if everything:
        tables = _tables(root)
        for table in tables:
            with suppress(FileNotFoundError):
                os.unlink(table.path)
        text += f" and {_sum(_count(tables), 'table')}"
    left = shards.files() if shards is not None else []
    print_line(f"{root}: {text}; {_sum(_count(left), 'file')} left, {sum(file.is_used() for file in left)} in use")


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


def _open(given: str | None) -> tuple[str, ShardCache | None]:
    """Return the directory of a cache, and its shards if it has any; nothing is created."""
    root = node_directory(Remote(options=RemoteOptions(cache=given)))
    if root is None:
        raise ConfigError("there is no home directory with a cache: name it with --cache", key="cache")
    if given is not None and not os.path.isdir(root):
        raise ConfigError(f"there is no directory {root}", key="cache", value=given)
    return root, ShardCache(root, None) if os.path.isdir(os.path.join(root, "shards")) else None


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


def _tables(root: str) -> list[CachedFile]:
    directory = os.path.join(root, "tables")
    found: list[CachedFile] = []
    with suppress(FileNotFoundError), os.scandir(directory) as files:
        for file in files:
            with suppress(FileNotFoundError):
                status = file.stat(follow_symlinks=False)
                found.append(CachedFile(file.path, status.st_size, status.st_mtime))
    return found


def _count(files: Iterable[CachedFile]) -> dict[str, int]:
    sizes = [file.size for file in files]
    return {"count": len(sizes), "bytes": sum(sizes)}


def _sum(counted: Mapping[str, int], noun: str) -> str:
    return f"{count_of(counted['count'], noun)} ({decimal(counted['bytes'])})"


def _age(seconds: float) -> str:
    for unit, length in _UNITS:
        if seconds >= length:
            return count_of(int(seconds // length), unit)
    return count_of(int(seconds), "second")
