"""The shards of several sources as one data set, so that a batch over all of them is read at once."""

# What is private to sources is shared among them.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any
from weakref import ref

import numpy as np

from dataload.sources.base import SliceSource, Source, SubsetSource
from dataload.sources.directory import ShardNumbers, directory_of
from dataload.sources.file_source import FileSource
from dataload.sources.memory import MemorySource
from dataload.sources.shards import OpenShards, ShardReader, most_open_shards
from dataload.storage import is_url
from dataload.storage.core import MOST_SHARDS, PLACE_BITS
from dataload.storage.errors import memory_error
from dataload.types import Batch, Int64Array


class JointShards:
    """Several sources one after another, each of files or a part of such a source; see `join`."""

    def __init__(self, sources: Sequence[Source[Any]], bounds: Int64Array, files: Sequence[FileSource[Any]]) -> None:
        self._bounds = bounds  # the cumulative lengths of the sources
        distinct = [*{id(source): source for source in files}.values()]
        numbers = {id(source): number for number, source in enumerate(distinct)}
        self._first = distinct[0]
        self._opened = [source._data_set() for source in distinct]
        counts = [len(opened.ends) for opened in self._opened]
        self._shards = np.cumsum(counts) - counts  # the first shard of each distinct source, and its first record
        lengths = np.concatenate([np.diff(opened.ends, prepend=0) for opened in self._opened])
        records = np.array([int(opened.ends[-1]) for opened in self._opened])
        firsts = np.cumsum(records) - records
        ends = np.cumsum(lengths)
        nothing: list[ShardReader[Any] | None] = [None] * len(ends)
        fields, directory, most = self._opened[0].fields, directory_of(len(ends)), most_open_shards()
        self._joint: OpenShards[Any] = OpenShards(
            ends, fields, nothing, ref(self), type(self)._reader, most, None, directory=directory
        )
        whole = len(distinct) == len(sources) and all(map(operator.is_, sources, files))
        self._records = None if whole else ShardNumbers(len(sources))
        if self._records is not None:
            for number, (source, own) in enumerate(zip(sources, files, strict=True)):
                self._put(self._records, number, source, int(firsts[numbers[id(own)]]))

    def _put(self, records: ShardNumbers, number: int, source: Source[Any], first: int) -> None:
        """Set which records of all files belong to a source."""
        count, chain, part = len(source), list[SubsetSource[Any]](), source
        while isinstance(part, SubsetSource):
            chain.append(part)
            part = part.parent
        is_line = all(isinstance(part, SliceSource) for part in chain)
        indices = np.arange(min(count, 2) if is_line else count)
        for part in chain:
            indices = part._map(indices)
        if is_line:
            start, stop = (*indices.tolist(), 0, 0)[:2] if count != 1 else (int(indices[0]),) * 2
            records.put_line(number, start + first, stop - start, count)
        else:
            records.put(number, indices + first)

    def _reader(self, shard: int) -> ShardReader[Any]:
        source = int(np.searchsorted(self._shards, shard, side="right")) - 1
        return self._opened[source].reader(shard - int(self._shards[source]))

    def _indices(self, indices: Int64Array) -> Int64Array:
        """Return indices in all files of records of the sources."""
        if self._records is None:
            return indices
        source = np.searchsorted(self._bounds, indices, side="right")
        within = indices - np.where(source > 0, self._bounds[source - 1], 0)
        return self._records[(source << PLACE_BITS) | within]

    def read(self, indices: Int64Array) -> list[Any]:
        try:
            return self._joint.records(self._indices(indices), self._first._wanted(self._opened[0].fields))
        except MemoryError as error:
            raise memory_error(self._first, self._first.paths[0], len(indices)) from error

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        chosen = self._first._choose(fields, self._opened[0])
        try:
            return self._joint.columns(self._indices(indices), chosen)
        except MemoryError as error:
            raise memory_error(self._first, self._first.paths[0], len(indices)) from error


def join(sources: Sequence[Source[Any]], bounds: Int64Array) -> JointShards | MemorySource | None:
    """Return sources of one kind together, given their cumulative lengths: mapped files, or columns in memory."""
    if (columns := MemorySource.joined(sources)) is not None:
        return columns
    files: list[FileSource[Any]] = []
    for source in sources:
        part = whole_of(source)
        if not isinstance(part, FileSource) or type(part)._read is not FileSource._read:  # as videos read themselves
            return None
        if not _are_alike(part, files[0] if files else part):
            return None
        files.append(part)
    shards = sum(len(source.paths) for source in {*files})
    return JointShards(sources, bounds, files) if max(len(sources), shards) <= MOST_SHARDS else None


def whole_of(source: Source[Any]) -> Source[Any]:
    """Return the source that a subset, or a subset of one, was taken from; any other source itself."""
    while isinstance(source, SubsetSource):
        source = source.parent
    return source


def _are_alike(one: FileSource[Any], other: FileSource[Any]) -> bool:
    if one is other:
        return not is_url(one.paths[0])
    if type(one) is not type(other) or one._selected != other._selected or is_url(one.paths[0]):
        return False
    try:
        alike = one._content == other._content and getattr(one, "options", None) == getattr(other, "options", None)
    except ValueError:  # arrays are equal only if they are the same object
        return False
    return alike and [*one.fields] == [*other.fields]
