"""Keep the manifest of a directory, and find its entries about shards."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

from dataload.convert.journal import FinishedShard
from dataload.errors import ConfigError, SourceError
from dataload.sources.field_statistics import DataSetStatistics
from dataload.sources.fields import spec_of
from dataload.sources.file_source import FileSource
from dataload.sources.format import Format
from dataload.sources.manifest import MANIFEST_NAME, MOST_BYTES, DataSetEntry, Manifest
from dataload.sources.manifest_checks import ShardIdentity
from dataload.storage import Remote, is_url, join, storage_of
from dataload.storage.local.atomic import remove_leftovers
from dataload.types import FieldSpec

_LOCK_SECONDS = 10
_SECONDS_BETWEEN_TRIES = 0.02


def update_manifest(
    directory: str, entries: Iterable[DataSetEntry], gone: Iterable[str] = (), *, remote: Remote | None = None
) -> str:
    """Replace a directory's manifest in one step: add data sets, drop `gone` shards; return the manifest's path."""
    path = join(directory, MANIFEST_NAME)
    added, missing, storage = tuple(entries), {*gone}, storage_of(path, remote)
    deadline = time.monotonic() + _LOCK_SECONDS
    with locked(path, remote):
        if not is_url(path):
            remove_leftovers(path)  # of a process killed just after its manifest appeared
        while True:
            found = storage.load(path)
            before = None if found is None else Manifest.parse(found[0], path)
            kept = [entry for entry in (before or Manifest()).data_sets if missing.isdisjoint(entry.names)]
            after = Manifest(tuple(kept))
            for entry in added:
                after = after.with_data_set(entry)
            data = after.to_bytes()
            if len(data) > MOST_BYTES:
                message = f"{path} would have {len(data):,} bytes, and may have {MOST_BYTES:,}"
                raise ConfigError(f"{message}: keep statistics of fewer fields, or use fewer shards", key="manifest")
            try:
                if after != before:
                    storage.replace(path, data, None if found is None else found[1])
            except FileExistsError:  # other nodes ignore the lock
                if time.monotonic() > deadline:
                    message = f"other processes have been writing {path} for {_LOCK_SECONDS} seconds: try again"
                    raise SourceError(message, path=path) from None
            else:
                remove_lengths(directory, before, after, remote)
                return path


def remove_lengths(directory: str, before: Manifest | None, after: Manifest, remote: Remote | None) -> None:
    """Remove the files of lengths known only to `before`, a manifest or receipt."""
    for name in _lengths_files(before or Manifest()) - _lengths_files(after):
        storage_of(directory, remote).remove(join(directory, name))


def _lengths_files(manifest: Manifest) -> set[str]:
    names: set[str] = set()
    for entry in manifest.data_sets:
        if entry.statistics is not None:
            with suppress(ConfigError):  # damaged statistics name nothing to remove
                names |= {file.name for file in DataSetStatistics.parse(entry.statistics).lengths.values()}
    return names


def etag_of(entry: Format, shard: FinishedShard) -> str | None:
    return shard.etag if entry.directory_file is None else None


def fields_of(entry: Format, paths: Iterable[str], options: Mapping[str, Any]) -> Mapping[str, FieldSpec]:
    """Return the fields of the first shard with records; none if records are bytes."""
    for path in paths:
        with entry.open([path], options=without_cache(entry, options)) as source:
            if len(source):
                if source.fields:
                    return source.fields
                record = source[0]
                known = cast("Mapping[str, Any]", record if isinstance(record, Mapping) else {})
                return {name: spec_of(value) for name, value in known.items()}
    return {}


def identities_of(entry: Format, paths: Sequence[str], options: Mapping[str, Any]) -> list[ShardIdentity | None]:
    """Return the identities of the shards' content, for the data set's fingerprint."""
    with entry.open(paths, options=without_cache(entry, options)) as source:
        return [*source.shard_identities()] if isinstance(source, FileSource) else [None] * len(paths)


@contextmanager
def locked(path: str, remote: Remote | None) -> Generator[None]:
    deadline = time.monotonic() + _LOCK_SECONDS
    with ExitStack() as entered:
        while True:
            try:
                entered.enter_context(storage_of(path, remote).lock(path))
                break
            except SourceError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_SECONDS_BETWEEN_TRIES)
        yield


def without_cache(entry: Format, options: Mapping[str, Any]) -> dict[str, Any]:
    return {**({"cache": False} if "cache" in entry.reader_options.names() else {}), **options}
