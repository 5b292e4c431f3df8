"""Read the manifest of a directory, and replace it in one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress

import numpy as np

from dataload.catalog.facts import DataSetFacts
from dataload.catalog.manifest import MANIFEST_NAME, MOST_BYTES, Manifest
from dataload.catalog.statistics import DataSetStatistics
from dataload.errors import ConfigError, SourceError, SourceNotFoundError
from dataload.storage import Remote, is_url, join, storage_of

_LOCK_SECONDS = 10
_SECONDS_BETWEEN_TRIES = 0.02


def read_manifest(directory: str, remote: Remote | None = None) -> Manifest | None:
    """Return the manifest of a directory, or None if it has none."""
    path = join(directory, MANIFEST_NAME)
    if not is_url(path) and not storage_of(path).exists(path):
        return None  # before an error is made, which says what else is there
    try:
        # One request, whatever its size.
        data = storage_of(path, remote).read_ranges(path, np.zeros(1, np.int64), np.array([MOST_BYTES + 1]))[0]
    except SourceNotFoundError:
        return None
    return Manifest.parse(data, path)


def update_manifest(
    directory: str,
    entries: Iterable[DataSetFacts] | Callable[[Manifest], Iterable[DataSetFacts]],
    gone: Iterable[str] = (),
    *,
    remote: Remote | None = None,
) -> str:
    """Replace a directory's manifest in one step: add data sets, drop `gone` shards; return the manifest's path.

    A function makes the data sets from the present manifest; it is called again if that changes meanwhile.
    """
    path = join(directory, MANIFEST_NAME)
    added, missing, storage = entries if callable(entries) else tuple(entries), {*gone}, storage_of(path, remote)
    deadline = time.monotonic() + _LOCK_SECONDS
    with locked(path, remote, _LOCK_SECONDS):
        while True:
            found = storage.load(path)
            before = None if found is None else Manifest.parse(found[0], path)
            kept = [entry for entry in (before or Manifest()).data_sets if missing.isdisjoint(entry.names)]
            after = Manifest(tuple(kept))
            for entry in added(before or Manifest()) if callable(added) else added:
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


@contextmanager
def locked(path: str, remote: Remote | None, seconds: float = _LOCK_SECONDS) -> Generator[None]:
    """Hold the lock of a file, waiting up to so many seconds for it."""
    deadline = time.monotonic() + seconds
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
