"""The receipts of an index in partitions: manifests of the shards that a partition has described, until merged."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from dataload.catalog.evidence import find_shard
from dataload.catalog.facts import DataSetFacts
from dataload.catalog.manifest import MANIFEST_NAME, Manifest, merge_manifests
from dataload.catalog.statistics import DataSetStatistics
from dataload.catalog.store import remove_lengths
from dataload.convert.measuring import keep_lengths
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.sources.kept_statistics import lengths_of
from dataload.storage import Remote, is_url, join, storage_of
from dataload.types import Array

_NAME = re.compile(rf".*/\.{re.escape(MANIFEST_NAME)}\.(\d+)-of-(\d+)", re.DOTALL)
_MOST_NAMED = 8


def receipt_path(directory: str, number: int, count: int) -> str:
    return join(directory, f".{MANIFEST_NAME}.{number}-of-{count}")


def save_receipt(path: str, entries: Sequence[DataSetFacts], remote: Remote | None) -> None:
    storage = storage_of(path, remote)
    found = storage.load(path)
    with suppress(FileExistsError):  # another run of the partition has just written it
        storage.replace(path, Manifest(tuple(entries)).to_bytes(), None if found is None else found[1])


def remove_receipts(directory: str, manifest: Manifest, remote: Remote | None) -> list[tuple[int, int]]:
    """Remove all receipts, and files of lengths that the manifest does not list; return the partitions."""
    receipts = _found(directory, remote)
    for path in receipts:
        found = storage_of(path, remote).load(path)
        if found is not None:
            with suppress(CorruptFileError):
                remove_lengths(directory, Manifest.parse(found[0], path), manifest, remote)
        storage_of(path, remote).remove(path)
    return [*receipts.values()]


def merge_receipts(
    directory: str, expected: Callable[[int, int], Sequence[tuple[Any, ...]]], remote: Remote | None
) -> tuple[DataSetFacts, ...]:
    """Return the data sets that all partitions describe; `expected` returns what their receipts must contain."""
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
    return tuple(_with_lengths(directory, entry, parts, remote) for entry in entries)


def _with_lengths(
    directory: str, merged: DataSetFacts, parts: Sequence[Manifest], remote: Remote | None
) -> DataSetFacts:
    if merged.statistics is None:
        return merged
    own = [entry for part in parts for entry in part.data_sets if entry.pattern == merged.pattern]
    described = [(entry, DataSetStatistics.parse(entry.statistics)) for entry in own]
    statistics = DataSetStatistics.parse(merged.statistics)
    lengths: dict[str, Array] = {}
    for name, field in statistics.fields.items():
        if field.varies_in_length:
            found = [lengths_of(directory, entry, each, name, remote) for entry, each in described]
            known = [each for each in found if each is not None]
            if len(known) == len(found):
                lengths[name] = np.concatenate(known)
            elif field.records == sum(merged.records):
                message = f"the lengths of {name!r} that parts of {merged.pattern} have kept are missing"
                raise ConfigError(f"{message}: run the parts again", key="merge", value=directory)
    return keep_lengths(directory, merged, statistics, lengths, remote)


def _found(directory: str, remote: Remote | None) -> dict[str, tuple[int, int]]:
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
        statistics = [_options_of_statistics(each) for each in manifest.data_sets]
    except (CorruptFileError, ConfigError) as error:
        raise CorruptFileError(f"the receipt of a part is damaged: {again}", path=path) from error
    wanted = [*expected(number, count)]
    if all(asked is None for *_, asked in wanted):
        statistics = [None] * len(statistics)
    described = [
        (each.pattern, each.format, dict(each.options), each.names, found)
        for each, found in zip(manifest.data_sets, statistics, strict=True)
    ]
    if described != wanted:
        message = f"{path} is the receipt of other shards, options or parts than there are now: {again}"
        raise ConfigError(message, key="merge", value=path)
    return manifest


def _options_of_statistics(entry: DataSetFacts) -> dict[str, Any] | None:
    return None if entry.statistics is None else dict(DataSetStatistics.parse(entry.statistics).options)


def _check_unchanged(directory: str, entries: Sequence[DataSetFacts], remote: Remote | None) -> None:
    if is_url(directory):
        storage_of(directory, remote).list(directory)  # one request for the versions of all objects
    for entry in entries:
        looks = {name: find_shard(join(directory, name), remote) for name in entry.names}
        found = {name: look for name, look in looks.items() if look is not None}
        for line in entry.stale(found):
            message = f"cannot merge, because a shard has changed since it was indexed: {line} of its part"
            raise ConfigError(f"{message}: run that part again", key="merge", value=directory)
