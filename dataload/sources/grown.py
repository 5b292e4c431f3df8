"""Sources as they were before shards were added to their files."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from dataload._util.fingerprint import digest, prefix_digests
from dataload.sources.base import SelectionSource, SliceSource, Source, ViewSource
from dataload.sources.file_source import FileSource
from dataload.sources.views.select import Chosen

Earlier: TypeAlias = Iterator[tuple[str, Callable[[], Source[Any]]]]


class FirstShards(SliceSource[Any]):
    """The first shards of a source of files, as it was when there were no others."""

    def __init__(self, parent: FileSource[Any], count: int, fingerprint: str) -> None:
        self._lengths, self._was = parent.shard_lengths[:count], fingerprint
        super().__init__(parent, range(sum(self._lengths)))

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        return self._lengths

    def fingerprint(self) -> str:
        return self._was


def before_growth(source: Any, fingerprint: str) -> Source[Any] | None:
    """Return any source as it was when it had this fingerprint: its first records. None if it never had it."""
    return next((make() for was, make in _earlier(_without_wrapper(source)) if was == fingerprint), None)


def shard_marks(source: Any) -> Sequence[tuple[str, int]]:
    """Return the name of each file of a source, and a checksum of what the fingerprint says of it."""
    source = _without_wrapper(source)
    if isinstance(source, FirstShards):
        return shard_marks(source.parent)[: len(source.shard_lengths)]
    if isinstance(source, ViewSource):
        return [mark for parent in source._parents for mark in shard_marks(parent)]
    shards = source.described()[1] if isinstance(source, FileSource) else ()
    return [(shard[0], zlib.crc32(repr(shard).encode())) for shard in shards]


def _without_wrapper(source: Any) -> Any:
    return source if isinstance(source, Source) else getattr(source, "dataset", source)


def _earlier(source: Any) -> Earlier:
    """Yield the fingerprints of a source before shards were added, the latest first, each with what makes it."""
    if isinstance(source, FileSource):
        kind, shards, *rest = source.described()
        for count, was in reversed([*enumerate(prefix_digests(shards, kind, *rest), 1)][:-1]):
            yield was, partial(FirstShards, source, count, was)
    elif isinstance(source, SliceSource):
        span = source._span
        for _, make in _earlier(source.parent) if span.step > 0 else ():
            sliced = SliceSource(parent := make(), range(span.start, min(span.stop, len(parent)), span.step))
            yield sliced.fingerprint(), lambda sliced=sliced: sliced
    elif isinstance(source, SelectionSource):
        for was, make in _earlier(source.parent):
            rule = source._rule
            if isinstance(rule, Chosen):  # it is known by its indices
                rule = Chosen(rule.chosen[rule.chosen < len(make())])
                if not np.array_equal(rule.chosen, source.indices[: len(rule.chosen)]):
                    continue
            yield digest("selection", was, rule.identity), lambda make=make, rule=rule: SelectionSource(make(), rule)
