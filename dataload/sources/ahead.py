"""Records of remote shards fetched before they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dataload.storage.remote.plan import Use
from dataload.storage.remote.settings import Remote
from dataload.types import AheadReader, Int64Array, StepsAhead

_PARTS = 16  # a plan says which sixteenth of a shard's time is over; finer plans only take longer to make


def read_ahead(
    paths: Sequence[str], ends: Int64Array, whole: Sequence[bool], remote: Remote, steps: Iterator[StepsAhead]
) -> AheadReader | None:
    """Start to fetch what steps read; see `dataload.types.ReadsAhead`.

    Args:
        paths: The file of each shard; a file may occur several times.
        ends: (paths,) int64, cumulative number of records.
        whole: Whether a shard cannot be read by range.
        remote: The settings.
        steps: The steps.
    """
    from dataload.storage.remote.ahead import Shards  # most data are local
    from dataload.storage.remote.storage import RemoteStorage

    storage = RemoteStorage(remote)
    kept = {path: None for path, all_of_it in zip(paths, whole, strict=True) if storage.uses_shards(path, all_of_it)}
    urls = {path: number for number, path in enumerate(kept)}
    if not urls:
        return None
    numbers = np.array([urls.get(path, -1) for path in paths])
    wholes = frozenset(urls[path] for path, all_of_it in zip(paths, whole, strict=True) if all_of_it and path in urls)
    shards = Shards([*urls], [storage.version(path) for path in urls], wholes)
    return storage.read_ahead(shards, shard_uses(steps, ends, numbers))


def shard_uses(steps: Iterator[StepsAhead], ends: Int64Array, numbers: Int64Array) -> Iterator[Sequence[Use]]:
    """Yield the shards that steps read, in the order of their first use.

    Args:
        steps: The steps.
        ends: (files,) int64, cumulative number of records.
        numbers: (files,) int64, the shard that each file is or is part of; -1 if it is not of interest.
    """
    mean = int(ends[-1]) // len(ends)
    count, shards = 0, int(numbers.max()) + 1
    for block in steps:
        rows = np.diff(block.ends, prepend=0)
        together = max(1, mean // (_PARTS * max(1, int(rows.max()))))
        unit = np.repeat(np.arange(len(rows)) // together, rows)
        found = numbers[np.searchsorted(ends, block.indices, side="right")]
        keys, first, counts = np.unique((unit * shards + found)[found >= 0], return_index=True, return_counts=True)
        order = np.argsort(first)
        keys, counts = keys[order], counts[order]
        stop = count + len(rows)
        yield [
            Use(count + at * together, min(count + (at + 1) * together, stop) - 1, block.epoch, shard, number)
            for at, shard, number in zip(
                (keys // shards).tolist(), (keys % shards).tolist(), counts.tolist(), strict=True
            )
        ]
        count = stop
