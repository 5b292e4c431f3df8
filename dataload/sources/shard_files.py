"""The shards in a directory: what a pattern names, and whether some are missing."""

import json
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from dataload._util.indexing import expand_braces, missing_parts
from dataload.catalog.manifest import MANIFEST_NAME
from dataload.errors import ConfigError, SourceError, SourceNotFoundError, and_more
from dataload.sources.folder import is_medium, is_metadata
from dataload.storage import Remote, base_name, has_wildcards, is_url, join, list_folder, storage_of

_SHOWN = 3
_JOURNALS = ".*.convert.json"  # of conversions, which keep them beside their shards


def is_media_folder(
    directory: str,
    options: Collection[str],
    formats_of: Callable[[Sequence[str]], Sequence[object]],
    remote: Remote | None,
) -> bool:
    """Return whether a local directory has images or audio, at any depth, and no shards; or options that say so."""
    names: list[str] = []
    if is_url(directory):
        names = storage_of(directory, remote).list(directory)
    else:
        with suppress(SourceError):  # raised again by whatever reads there
            list_folder(directory, names.append)
    names.sort()
    media = [*filter(is_medium, names)]
    others = sorted({*names}.difference(media))
    shards = [name for name, of in zip(others, formats_of(others), strict=True) if of and not is_metadata(name)]
    if not media or not shards or {"labels", "pattern", "split"} & {*options}:  # options of folders
        return bool(media) and not is_url(directory)
    table = next((name for name in shards if name.endswith(".csv")), None)
    join_it = "" if table is None else f"labels={join(directory, table)!r} to join its rows to them, "
    pattern = join(directory, re.sub(r"[^/.]+(\.[^/]*)$", r"*\1", shards[0]))
    raise ConfigError(
        f"{directory} has both images or audio ({_some(media)}) and files of other formats ({_some(shards)}): say what "
        f"you mean: format='folder' for the images alone, {join_it}or a pattern such as {pattern!r} for the files",
        key="paths",
        value=directory,
    )


def _some(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names):,}: {', '.join(names[:_SHOWN])}{more}"


def expand_pattern(path: str, remote: Remote | None) -> list[str]:
    """Return the files that a pattern names, those that match it in order of name."""
    storage, far = storage_of(path, remote), is_url(path)
    names: list[str] = []
    for name in expand_braces(path):
        if has_wildcards(name) and (far or not storage.exists(name)):
            matches = [match for match in storage.glob(name) if base_name(match) != MANIFEST_NAME]
            if not matches:
                raise SourceNotFoundError(f"nothing matches the pattern {name}", path=name)
            names += matches
        elif far and name != path:
            names.append(name)  # found to be missing when it is opened, among others at the same time
        else:
            storage.identity(name)  # raises if there is nothing
            names.append(name)
    return names


def check_complete(directory: str, names: Sequence[str], remote: Remote | None) -> None:
    """Raise an error if shards of a directory without a manifest are missing, for example after a killed conversion."""
    remedy = "finish the conversion or the copy that makes the others; to open those that exist, name them by a pattern"
    if missing := missing_parts(names):
        name, count = missing
        raise SourceNotFoundError(f"the directory {directory} has no {name}{and_more(count)}: {remedy}", path=directory)
    storage = storage_of(directory, remote)
    for path in storage.glob(join(directory, _JOURNALS)) if is_url(directory) else ():
        with suppress(ValueError, KeyError, TypeError):  # is not one
            journal = json.loads(storage.read(path))
            if len(journal["finished"]) < len(journal["shards"]):
                message = f"the directory {directory} has the shards of an unfinished conversion ({base_name(path)})"
                raise SourceNotFoundError(f"{message}: {remedy}", path=directory)
