"""Sources as they were before shards were added to their files."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from dataload._util.fingerprint import digest, identify, prefix_digests
from dataload.sources.base import SelectionSource, SliceSource, Source, ViewSource
from dataload.sources.file_source import FileSource
from dataload.sources.views.concat import ConcatSource
from dataload.sources.views.select import Chosen


class FirstShards(SliceSource[Any]):
    """The first shards of a source of files, as it was when there were no others."""

    def __init__(self, parent: FileSource[Any], count: int, fingerprint: str | None = None) -> None:
        self._lengths, self._was = parent.shard_lengths[:count], fingerprint
        super().__init__(parent, range(sum(self._lengths)))

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        return self._lengths

    def described(self) -> tuple[str, list[tuple[Any, ...]], Any, Any]:
        """See `FileSource.described`."""
        kind, shards, *rest = cast("FileSource[Any]", self.parent).described()
        return kind, shards[: len(self._lengths)], rest[0], rest[1]

    def fingerprint(self) -> str:
        return self._was or digest(*self.described())


def before_growth(source: Any, fingerprint: str, counts: Sequence[int], total: int) -> Source[Any] | None:
    """Return any source as it was before shards were added, by its fingerprint then; None if none can have been added.

    `counts` are the numbers of shards that each of its sources of files had, `total` is of all; none and 0 if unknown.
    With `counts`, other sources may have been added to it, too.
    """
    source = _without_wrapper(source)
    leaves = files_of(source)
    if len(counts) > 1:
        pairs = [(leaf, n) for leaf, n in zip(leaves, counts, strict=False) if n < len(leaf.shard_lengths)]
        return with_shards(source, pairs) if pairs and min(counts) else None
    added = sum(len(leaf.shard_lengths) for leaf in leaves) - total
    parts = source.sources if isinstance(source, ConcatSource) else (source,)
    names = [identify(part) for part in parts]
    for number, part in enumerate(parts):  # only one has grown
        files = files_of(part)
        if len(files) != 1:
            continue
        kind, shards, *rest = files[0].described()
        for count, was in reversed([*enumerate(prefix_digests(shards, kind, *rest), 1)][:-1]):
            if total and count != len(shards) - added:
                continue
            found = _over(part, {id(files[0]): FirstShards(files[0], count, was)})
            now = [] if found is None else [*names[:number], found.fingerprint(), *names[number + 1 :]]
            if found is not None and fingerprint == (digest("concat", *now) if source is not part else now[0]):
                return found if source is part else source.over([*parts[:number], found, *parts[number + 1 :]])
    if source is not parts[0] and leaves and 0 < total < len(leaves[0].shard_lengths):
        return with_shards(source, [(leaves[0], total)])  # it had all files then, and other sources were added
    return None


def with_shards(source: Any, counts: Sequence[tuple[Any, int]]) -> Source[Any] | None:
    """Return a source with only the first shards of some of its sources of files; None as in `_over`."""
    return _over(source, {id(leaf): FirstShards(leaf, count) for leaf, count in counts})


def files_of(source: Any) -> Sequence[Any]:
    """Return the sources of files, or of the first of them, that a source reads, in order."""
    source = _without_wrapper(source)
    if isinstance(source, (FileSource, FirstShards)):
        return [source]
    return [leaf for each in source._parents for leaf in files_of(each)] if isinstance(source, ViewSource) else []


def shard_marks(source: Any) -> Sequence[tuple[str, int]]:
    """Return the name of each file of a source, and a checksum of what the fingerprint says of it."""
    shards = (shard for leaf in files_of(source) for shard in leaf.described()[1])
    return [(shard[0], zlib.crc32(repr(shard).encode())) for shard in shards]


def _without_wrapper(source: Any) -> Any:
    return source if isinstance(source, Source) else getattr(source, "dataset", source)


def _over(source: Source[Any], replaced: Mapping[int, Source[Any]]) -> Source[Any] | None:
    """Return a source over files `replaced` by id; None unless each part then begins the part that it replaces."""
    if id(source) in replaced or not isinstance(source, ViewSource):
        return replaced.get(id(source), source)
    parents = [_over(parent, replaced) for parent in source._parents]
    made = [parent for parent in parents if parent is not None]
    if all(here is parent for here, parent in zip(parents, source._parents, strict=True)):
        return source
    if len(made) < len(parents) or any(isinstance(parent, ConcatSource) for parent in made):
        return None
    if isinstance(source, ConcatSource):
        return source.over(made)
    if isinstance(source, SliceSource) and (span := source._span).step > 0:
        (parent,) = made
        return SliceSource(parent, range(span.start, min(span.stop, len(parent)), span.step))
    if not isinstance(source, SelectionSource):
        return None
    (parent,) = made
    rule = source._rule
    if isinstance(rule, Chosen):  # it is known by its indices
        rule = Chosen(rule.chosen[rule.chosen < len(parent)])
        if not np.array_equal(rule.chosen, source.indices[: len(rule.chosen)]):
            return None
    return SelectionSource(parent, rule)
