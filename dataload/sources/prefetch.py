"""Fetching ahead for sources that consist of others."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Self
from weakref import ref

import numpy as np

from dataload._util.clock import current_reader
from dataload._util.indexing import split_by_shard
from dataload.sources.shards import OpenShards
from dataload.storage import Remote, is_url
from dataload.storage.remote.prefetch.plan import Choice, Use, choose, measure, sharers_of
from dataload.storage.remote.prefetch.ranges import StepRanges
from dataload.types import AheadReader, Int64Array, StepsAhead

_MOST_UNUSED = 32  # blocks of steps, after which a source that none of them reads is not planned any further


def steps_within(steps: Iterator[StepsAhead], start: int, stop: int) -> Iterator[StepsAhead]:
    """Yield steps with their indices in [start, stop) of a concatenation, which may be none, relative to `start`."""
    unused = 0
    for block in steps:
        inside = (block.indices >= start) & (block.indices < stop)
        counts = np.cumsum(inside)
        ends = np.where(block.ends > 0, counts[block.ends - 1], 0) if len(counts) else block.ends
        yield replace(block, indices=block.indices[inside] - start, ends=ends)
        unused = 0 if len(counts) and counts[-1] else unused + 1
        if unused == _MOST_UNUSED:
            return


def shared_steps(steps: Iterator[StepsAhead], count: int) -> Iterator[Iterator[StepsAhead]]:
    """Yield iterators over the same steps, for readers whose threads take them at different times."""
    lock = threading.Lock()
    queues = [deque[StepsAhead]() for _ in range(count)]
    alive = [*map(ref, queues)]  # each as long as its iterator: nothing is kept for a reader that does not start

    def each(own: deque[StepsAhead]) -> Iterator[StepsAhead]:
        while True:
            with lock:
                if not own and (block := next(steps, None)) is not None:
                    for queue in [found for other in alive if (found := other()) is not None]:
                        queue.append(block)
                if not own:
                    return
                block = own.popleft()
            yield block

    return map(each, queues)


class ComponentPrefetch:
    """Several `AheadReader` as one."""

    def __init__(self, readers: Sequence[AheadReader]) -> None:
        self._readers = readers

    @classmethod
    def of(cls, started: Iterable[AheadReader | None]) -> Self | None:
        """Return the readers that `started` yields as one, None if there are none; an error closes those that run."""
        found = cls(readers := [])
        try:
            readers.extend(each for each in started if each is not None)
        except BaseException:
            found.close()
            raise
        return found if readers else None

    def received(self) -> None:
        for reader in self._readers:
            reader.received()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


_log = logging.getLogger("dataload")

_SAMPLE = 64  # records whose sizes are looked up
_PARTS = 16  # a plan says which sixteenth of a shard's time is over; finer plans only take longer to make


def read_ahead(
    files: Sequence[str],
    opened: OpenShards[Any],
    remote: Remote,
    steps: Iterator[StepsAhead],
    fields: tuple[str, ...] | None,
    *,
    here: bool,
    share: float,
) -> AheadReader | None:
    """Start to fetch what steps read, with `share` of the cache's budget; see `dataload.types.ReadsAhead`."""
    from dataload.storage.remote.backend import RemoteStorage
    from dataload.storage.remote.prefetch.ranges import RangePrefetcher
    from dataload.storage.remote.prefetch.shards import CachedShards  # most data are local

    storage = RemoteStorage(remote)
    block = next(steps, None)
    if block is None:
        return None
    steps = chain([block], steps)
    wanted = int(np.searchsorted(opened.ends, block.indices[0], side="right")) if len(block.indices) else 0
    first = opened.reader(wanted)
    whole = {
        # Others are like the first that is read, or are read as a whole without a plan.
        file: first.whole if reader is None else reader.whole
        for file, reader in zip(files, opened.readers, strict=True)
    }
    urls = [file for file in whole if is_url(file)]
    versions = dict(zip(urls, storage.versions(urls), strict=True))
    mode: str = remote.options.mode
    sharers = ranks = _ranks_of_node()
    if mode != "ranges":
        sharers = sharers_of(sum(versions[url].size for url in urls), sharers, share * storage.budget())
    if mode == "auto":
        if remote.options.budget is not None:
            storage.check_sizes(urls)
        if all(whole[file] for file in urls):
            choice = Choice("shards", "the format cannot be read by ranges")
        else:
            sizes = np.array([versions[file].size for file in urls])
            choice = _choose(
                block, opened, wanted, _numbers(files, urls), sizes, fields, int(share / sharers * storage.budget())
            )
        _log.info("%s and %d more are read as %s: %s", urls[0], len(urls) - 1, choice.mode, choice.reason)
        # For its readers in worker processes, and in this one, where other loaders may read the source.
        mode = remote.boards["mode"] = remote.modes[current_reader()] = choice.mode
    kept = urls if mode == "shards" else [file for file in urls if whole[file]]
    if kept:
        storage.check_sizes(kept)
        never_by_range = frozenset(number for number, file in enumerate(kept) if whole[file])
        shards = CachedShards(kept, [versions[file] for file in kept], never_by_range)
        return storage.read_ahead(shards, shard_uses(steps, opened.ends, _numbers(files, kept)), share, sharers, ranks)
    if not here or (len(first) and first.ranges(np.zeros(1, np.int64), fields) is None):
        return None  # the reads to come are unknown
    return RangePrefetcher(versions, step_ranges(steps, files, opened, fields, remote.options.connections), remote)


def _numbers(files: Sequence[str], chosen: Sequence[str]) -> Int64Array:
    """Return the place of each file in `chosen`, (files,) int64; -1 for one that is not there."""
    numbers = {file: number for number, file in enumerate(chosen)}
    return np.array([numbers.get(file, -1) for file in files])


def _choose(
    block: StepsAhead,
    opened: OpenShards[Any],
    wanted: int,
    of_shard: Int64Array,
    sizes: Int64Array,
    fields: tuple[str, ...] | None,
    budget: int,
) -> Choice:
    """Return how to read files, some of them by range, within a cache of `budget` bytes."""
    # `wanted` is the shard that is read first; `of_shard`, (shards,) int64, the number of its file at a URL, -1 if
    # local; `sizes`, (files,) int64, are bytes.
    lengths = np.diff(opened.ends, prepend=0)
    record_bytes = float(sizes.sum()) / max(1, int(lengths[of_shard >= 0].sum()))
    if lengths[wanted]:
        # Of a part of a file, or of some of the fields, this is less.
        sample = np.unique(np.linspace(0, lengths[wanted] - 1, _SAMPLE).astype(np.int64))
        ranges = opened.reader(wanted).ranges(sample, fields)
        if ranges is not None:
            record_bytes = float(ranges[1].sum()) / len(sample)
    reads = measure(block, opened.ends, of_shard, sizes, record_bytes, budget)
    return choose(reads.of_ranks(_ranks_of_node()), budget)


def _ranks_of_node() -> int:
    """Return the number of ranks on this machine, as set by torchrun, else 1."""
    found = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(found) if found.isdecimal() and int(found) else 1


def step_ranges(
    steps: Iterator[StepsAhead],
    files: Sequence[str],
    opened: OpenShards[Any],
    fields: tuple[str, ...] | None,
    threads: int,
) -> Iterator[StepRanges]:
    """Yield the ranges that each step reads, as far as the formats know them."""
    for block in steps:
        start = 0
        for stop in block.ends.tolist():
            ranges: list[tuple[str, Int64Array, Int64Array]] = []
            groups = [
                group for group in split_by_shard(opened.ends, block.indices[start:stop]) if is_url(files[group[0]])
            ]
            readers = opened.open_all((shard for shard, _, _ in groups), threads)
            for (shard, local, _), reader in zip(groups, readers, strict=True):
                found = reader.ranges(local, fields)
                if found is not None:
                    ranges.append((files[shard], *found))
            yield ranges
            start = stop


def shard_uses(steps: Iterator[StepsAhead], ends: Int64Array, numbers: Int64Array) -> Iterator[Sequence[Use]]:
    """Yield the shards that steps read, in order of their first use; `numbers`, (files,) int64, is -1 for others."""
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
        uses = [
            Use(count + at * together, min(count + (at + 1) * together, stop) - 1, block.epoch, shard, number)
            for at, shard, number in zip(
                (keys // shards).tolist(), (keys % shards).tolist(), counts.tolist(), strict=True
            )
        ]
        if uses:
            yield uses
        count = stop
