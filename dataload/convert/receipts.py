"""The receipts of parts of an index: manifests of the shards that a part has described, until all are merged."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.sources.manifest import MANIFEST_NAME, DataSetEntry, Manifest, merge_manifests
from dataload.sources.shard_files import shard_bytes
from dataload.storage import Remote, is_url, join, storage_of

_NAME = re.compile(rf".*/\.{re.escape(MANIFEST_NAME)}\.(\d+)-of-(\d+)", re.DOTALL)
_MOST_NAMED = 8


def receipt_path(directory: str, number: int, count: int) -> str:
    """Return the path of the receipt of a part."""
    return join(directory, f".{MANIFEST_NAME}.{number}-of-{count}")


def save_receipt(path: str, entries: Sequence[DataSetEntry], remote: Remote | None) -> None:
    """Write the receipt of a part."""
    storage = storage_of(path, remote)
    found = storage.load(path)
    with suppress(FileExistsError):  # another run of the part has just written it
        storage.replace(path, Manifest(tuple(entries)).to_bytes(), None if found is None else found[1])


def remove_receipts(directory: str, remote: Remote | None) -> list[tuple[int, int]]:
    """Remove the receipts of all parts, and return the parts."""
    found = _found(directory, remote)
    for path in found:
        storage_of(path, remote).remove(path)
    return [*found.values()]


def merge_receipts(
    directory: str, expected: Callable[[int, int], Sequence[tuple[Any, ...]]], remote: Remote | None
) -> tuple[DataSetEntry, ...]:
    """Return the data sets that all parts together describe.

    Args:
        directory: Where the shards are.
        expected: Returns pattern, format, options and names of the data sets of a part.
        remote: The settings of data at URLs.

    Raises:
        SourceNotFoundError: There is no receipt.
        ConfigError: A receipt is missing, or that of another plan; or a shard has changed since.
        CorruptFileError: A receipt is damaged.
    """
    found = _found(directory, remote)
    counts = sorted({count for _, count in found.values()})
    if not counts:
        raise SourceNotFoundError(f"no part of an index of {directory} has finished: run the parts", path=directory)
    if len(counts) > 1:
        message = f"{directory} has receipts of {' and of '.join(map(str, counts))} parts: delete those that are wrong"
        raise ConfigError(f"{message} (.{MANIFEST_NAME}.*)", key="merge", value=directory)
    (count,) = counts
    paths = [receipt_path(directory, number, count) for number in range(1, count + 1)]
    if missing := [f"{number}/{count}" for number, path in enumerate(paths, 1) if path not in found]:
        several = f" (and {len(missing) - _MOST_NAMED} more)" if len(missing) > _MOST_NAMED else ""
        message = f"parts {', '.join(missing[:_MOST_NAMED])}{several} have no receipt: run them, again if need be"
        raise ConfigError(message, key="merge", value=missing)
    parts = [_load(path, number, count, expected, remote) for number, path in enumerate(paths, 1)]
    entries = merge_manifests(parts).data_sets
    _check_unchanged(directory, entries, remote)
    return entries


def _found(directory: str, remote: Remote | None) -> dict[str, tuple[int, int]]:
    """Return the paths of the receipts in a directory, and the part of each."""
    paths = storage_of(directory, remote).glob(join(glob.escape(directory), f".{MANIFEST_NAME}.*-of-*"))
    matches = [(join(directory, path.rpartition("/")[2]), _NAME.fullmatch(f"/{path}")) for path in paths]
    return {path: (int(match[1]), int(match[2])) for path, match in matches if match is not None}


def _load(
    path: str,
    number: int,
    count: int,
    expected: Callable[[int, int], Sequence[tuple[Any, ...]]],
    remote: Remote | None,
) -> Manifest:
    again = f"run part {number}/{count} again"
    found = storage_of(path, remote).load(path)
    if found is None:
        raise ConfigError(f"{path} has just been removed: {again}", key="merge", value=path)
    try:
        manifest = Manifest.parse(found[0], path)
    except CorruptFileError as error:
        raise CorruptFileError(f"the receipt of a part is damaged: {again}", path=path) from error
    described = [(each.pattern, each.format, dict(each.options), each.names) for each in manifest.data_sets]
    if described != [*expected(number, count)]:
        message = f"{path} is the receipt of other shards, options or parts than there are now: {again}"
        raise ConfigError(message, key="merge", value=path)
    return manifest


def _check_unchanged(directory: str, entries: Sequence[DataSetEntry], remote: Remote | None) -> None:
    storage = storage_of(directory, remote)
    if is_url(directory):
        storage.list(directory)  # tells the versions of all objects in one request
    for entry in entries:
        found: dict[str, tuple[int, str | None]] = {}
        for name in entry.names:
            path = join(directory, name)
            with suppress(SourceNotFoundError):
                found[name] = shard_bytes(path, remote), storage.etag(path)
        for line in entry.stale(found):
            message = f"cannot merge, because a shard has changed since it was indexed: {line} of its part"
            raise ConfigError(f"{message}: run that part again", key="merge", value=directory)
