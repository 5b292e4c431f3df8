"""Several sources as one, one after another or mixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from numbers import Real
from typing import Any, ClassVar, NoReturn, Self, cast, get_args

import numpy as np

from dataload._util.caches import PerProcess
from dataload._util.fingerprint import digest
from dataload._util.indexing import split_by_shard
from dataload._util.settings import check_choice, check_keys, setting_error
from dataload.catalog.facts import common_classes, select_fields
from dataload.collate import default_collate, scatter_columns
from dataload.errors import ConfigError
from dataload.samplers.mixture import Stop
from dataload.samplers.weighted import check_weights
from dataload.sources.base import Source, Span, ViewSource
from dataload.sources.expression import Expression
from dataload.sources.file_source import FileSource
from dataload.sources.memory import MemorySource
from dataload.sources.prefetch import ComponentPrefetch, shared_steps, steps_within
from dataload.sources.shards import Location, shard_of
from dataload.sources.views.adapt import as_source
from dataload.sources.views.joint import JointShards, join, whole_of
from dataload.types import AheadReader, Array, Batch, FieldSpec, Int64Array, StepsAhead

_KEY = "__key__"
_MOST_SHOWN = 16
_SOURCE = "source"


class ConcatSource(ViewSource[Any]):
    """The records of several sources, one source after the other. Formats may differ, fields may not.

    Only ``__key__`` is left out if some sources have it and others do not.

    Args:
        sources: At least one built-in source.
        with_source: Whether to add the field ``source``, int32, the number of the record's source, in this order.

    Raises:
        ConfigError: No source is given. On first use: labels stand for other classes in one source than in another.
    """

    def __init__(self, sources: Sequence[Source[Any]], *, with_source: bool = False) -> None:
        if not sources:
            raise ConfigError("a ConcatSource needs at least one source, got none", key="sources", value=sources)
        self._take(sources)
        self._with_source = with_source
        self._drops_key: bool | None = None  # once it is known

    def _take(self, sources: Sequence[Source[Any]]) -> None:
        self._parents = tuple(sources)
        self._fetched = [n for n, source in enumerate(sources) if _may_read_ahead(source)]
        self._ends: Int64Array | None = None
        self._joint: PerProcess[JointShards | MemorySource | None] = PerProcess()
        self._mapped: PerProcess[tuple[list[str], Int64Array]] = PerProcess()  # files, and their versions

    @property
    def sources(self) -> tuple[Source[Any], ...]:
        """The concatenated sources, in index order."""
        return self._parents

    def over(self, sources: Sequence[Source[Any]]) -> Self:
        """Return a copy with other sources in place of these."""
        found = copy(self)
        found._take(sources)
        return found

    def _bounds(self) -> Int64Array:
        if self._ends is None:
            ends = np.cumsum([len(source) for source in self._parents], dtype=np.int64)
            fields = {f"source {n}": source.fields for n, source in enumerate(self._parents)}
            common_classes(fields.items(), "sources")
            if self._with_source and any(_SOURCE in each for each in fields.values()):
                raise ConfigError("with_source adds the field 'source', which the records have", key="with_source")
            self._ends = ends
        return self._ends

    def _without_key(self, record: Any) -> Any:
        """Return a record or a batch without its key, unless all sources have keys."""
        if self._drops_key is None:
            keyed = {_KEY in source.fields for source in self._parents if source.fields}
            self._drops_key = len(keyed) > 1
        if self._drops_key and isinstance(record, dict):
            cast("dict[str, Any]", record).pop(_KEY, None)
        return record

    def __len__(self) -> int:
        return int(self._bounds()[-1])

    def _joined(self) -> JointShards | MemorySource | None:
        return self._joint.get(lambda: join(self._parents, self._bounds()))

    def _add_mapped(self, paths: list[str], versions: dict[int, Int64Array]) -> None:
        if id(self) not in versions:
            own, versions[id(self)] = self._mapped.get(self._find_mapped)
            paths += own

    def _find_mapped(self) -> tuple[list[str], Int64Array]:
        self._bounds()  # opens each source, whose versions stay
        paths, versions = list[str](), dict[int, Int64Array]()
        super()._add_mapped(paths, versions)
        return paths, np.concatenate([np.empty((0, 3), np.int64), *versions.values()])

    def close(self) -> None:
        super().close()
        self._joint.drop()

    def _read(self, indices: Int64Array) -> list[Any]:
        records = self._records(indices)
        if self._with_source:
            for record, number in zip(records, self._numbers(indices), strict=True):
                _require_dict(record)[_SOURCE] = number
        return records

    def _records(self, indices: Int64Array) -> list[Any]:
        if (joint := self._joined()) is not None:
            return joint.read(indices)
        records: list[Any] = [None] * len(indices)
        for component, local, where in split_by_shard(self._bounds(), indices):
            for row, record in zip(where.tolist(), self._parents[component].read(local), strict=True):
                records[row] = self._without_key(record)
        return records

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        if not self._with_source or (fields is not None and _SOURCE not in fields):
            return self._columns(indices, fields)
        rest = None if fields is None else tuple(name for name in fields if name != _SOURCE)
        return {**_require_dict(self._columns(indices, rest)), _SOURCE: self._numbers(indices)}

    def _columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        if (joint := self._joined()) is not None:
            return joint.read_batch(indices, fields)
        pieces = (
            (where, self._parents[component].read_batch(local, fields))
            for component, local, where in split_by_shard(self._bounds(), indices)
        )
        if fields is None:
            pieces = ((where, self._without_key(batch)) for where, batch in pieces)
        try:
            return scatter_columns(pieces, len(indices))
        except ConfigError:  # numbers of Python, say, are all integers in one source, and floats in another
            records = self._records(indices)
            return default_collate(records if fields is None else [select_fields(each, fields) for each in records])

    def _numbers(self, indices: Int64Array) -> Array:
        return np.searchsorted(self._bounds(), indices, side="right").astype(np.int32)

    def _lasting(self, name: str, seconds: float) -> Span | None:
        spans = [each for source in self._parents if (each := source._lasting(name, seconds)) is not None]
        if len(spans) < len(self._parents) or any(spec != spans[0][0] for spec, _ in spans):
            return None

        def read(indices: Int64Array) -> Array:
            parts = split_by_shard(self._bounds(), indices)
            pieces = ((where, {name: spans[part][1](local)}) for part, local, where in parts)
            return scatter_columns(pieces, len(indices))[name]

        return spans[0][0], read

    def _matches(self, condition: Expression, indices: Int64Array | None) -> Int64Array:
        if self._with_source and _SOURCE in condition.fields:
            return self._matches_numbers(condition, np.arange(len(self)) if indices is None else indices)
        parts = split_by_shard(self._bounds(), np.arange(len(self)) if indices is None else indices)
        given = ((self._parents[part], where, None if indices is None else local) for part, local, where in parts)
        found = [where[parent._matches(condition, local)] for parent, where, local in given]
        return np.sort(np.concatenate([np.empty(0, np.int64), *found]))

    def _matches_numbers(self, condition: Expression, indices: Int64Array) -> Int64Array:
        """See `_matches`: sources decide on their fields, whose nulls they know, and numbers of sources are here."""
        numbers = self._numbers(indices)

        def decide(leaf: Expression) -> tuple[Array, Array]:
            if leaf.fields == (_SOURCE,):
                holds = leaf.matches({_SOURCE: numbers}.__getitem__)
                return holds, ~holds
            verdicts = np.zeros((2, len(indices)), np.bool_)
            for verdict, each in zip(verdicts, (leaf, ~leaf), strict=True):
                verdict[self._matches(each, indices)] = True
            return verdicts[0], verdicts[1]

        return np.flatnonzero(condition.decide(decide)[0])

    def read_ahead(
        self, steps: Iterator[StepsAhead], fields: Sequence[str] | None, *, here: bool, share: float = 1.0
    ) -> AheadReader | None:
        """See `dataload.types.ReadsAhead`; sources share the cache by their numbers of records."""
        if not self._fetched:
            return None
        ends = self._bounds().tolist()

        def start(component: int, steps: Iterator[StepsAhead]) -> AheadReader | None:
            source: Any = self._parents[component]
            own = min(1.0, share * max(1, len(source)) / max(1, len(self)))
            inside = steps_within(steps, ends[component - 1] if component else 0, ends[component])
            return source.read_ahead(inside, fields, here=here, share=own)

        return ComponentPrefetch.of(map(start, self._fetched, shared_steps(steps, len(self._fetched))))

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Fields of the first source that knows any, and ``source`` if it was asked for."""
        known = next((fields for source in self._parents if (fields := source.fields)), {})
        found = self._without_key(dict(known))
        if self._with_source:
            self._bounds()  # refuses records that have the field
        return {**found, _SOURCE: FieldSpec("int32", ())} if self._with_source else found

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of records per shard of all sources, in index order."""
        return tuple(length for source in self._parents for length in source.shard_lengths)

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(length for source in self._parents for length in source.groups)

    def _locate(self, index: int) -> Location:
        component, local = shard_of(self._bounds(), index)
        return self._parents[component].locate(local)

    def fingerprint(self) -> str:
        return digest("concat", *(source.fingerprint() for source in self._parents))

    def __repr__(self) -> str:
        return f"ConcatSource({len(self._parents)} sources)"


def concat(sources: Sequence[Any]) -> ConcatSource:
    """Return the records of several sources, one source after the other.

    Formats may differ, fields may not; ``__key__`` is left out unless all have it.

    Args:
        sources: At least one of what a `Loader` takes.

    Raises:
        ConfigError: No source is given.
        TypeError: One is not a source.
    """
    if isinstance(sources, (Source, str, Mapping)):
        raise TypeError(f"concat takes a list of sources, got {_named(sources)}")
    return ConcatSource([as_source(source) for source in sources])


def mix(
    sources: Mapping[Any, Any] | Sequence[tuple[Any, float]],
    weights: Mapping[str, float] | None = None,
    *,
    stop: Stop = "first",
    with_source: bool = False,
    max_epochs: float | Sequence[float] | Mapping[str, float] | None = None,
) -> MixedSource:
    """Return several sources as one that a `Loader` reads in these proportions.

    The records are the same as of `concat`. A loader without `sampler` draws from each source in the proportion of its
    weight, exactly in any 1,000 or so consecutive records (see `dataload.samplers.Mixture`). Each source is in order,
    or shuffled as the loader's `shuffle` says.

    Args:
        sources: ``{source: weight}``, or pairs of these; or sources by name, and `weights`. Sources are what a `Loader`
            takes. Weights need not add up to 1.
        weights: Weights by name.
        stop: When an epoch ends: before the ``"first"`` source to run out would repeat, once the ``"longest"`` has been
            served completely, or ``"never"``.
        with_source: Whether to add the field ``source``, int32, the number of the record's source, in this order.
        max_epochs: The most passes over a source in an epoch of the mix (with ``stop="never"``, in the run): one number
            for all, one for each, or by name for some. A source that is used up leaves its share to the others, in
            proportion; when all are, the epoch ends.

    Raises:
        ConfigError: No source is given, a weight is negative or missing, or `stop` is unknown.
        TypeError: One is not a source, or is a mix itself.

    Examples:
        >>> import dataload
        >>> a, b = dataload.RangeSource(1000), dataload.RangeSource(2000, start=1000)
        >>> loader = dataload.Loader(dataload.mix({a: 0.7, b: 0.3}), batch_size=1000, shuffle=True, seed=0)
        >>> int((next(iter(loader))["index"] < 1000).sum())
        700
    """
    pairs = [*_pairs(sources, weights)]
    given = [weight for _, weight in pairs]
    if any(isinstance(weight, bool) for weight in given):
        raise setting_error("weights", given, "must be numbers")
    shares = tuple(check_weights(given).tolist())
    check_choice("stop", stop, get_args(Stop))
    names = None if weights is None else [*cast("Mapping[str, Any]", sources)]
    parts = [as_source(source) for source, _ in pairs]
    return MixedSource(parts, shares, stop, names, with_source=with_source, max_epochs=max_epochs)


class MixedSource(ConcatSource):
    """A concatenation that a loader reads in given proportions; see `mix`.

    Attributes:
        weights: The weight of each source.
        stop: When an epoch ends.
        max_epochs: The most passes over each source; see `Mixture`.
        names: The name of each source; None if they were given without names.
    """

    has_proportions: ClassVar[bool] = True

    def __init__(
        self,
        sources: Sequence[Source[Any]],
        weights: tuple[float, ...],
        stop: Stop,
        names: Sequence[str] | None = None,
        *,
        with_source: bool = False,
        max_epochs: float | Sequence[float] | Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(sources, with_source=with_source)
        self.weights = weights
        self.stop: Stop = stop
        self.max_epochs = max_epochs
        self.names: tuple[str, ...] | None = None if names is None else tuple(names)

    def __getitem__(self, index: Any, /) -> Any:
        """Return one record; a part would lose the proportions."""
        found = cast("Any", super().__getitem__(index))
        return self._refuse() if isinstance(found, Source) else found

    def filter(self, *_: Any, **__: Any) -> NoReturn:
        """Raise TypeError: a part would lose the proportions."""
        self._refuse()

    def split(self, *_: Any, **__: Any) -> NoReturn:
        """Raise TypeError: a part would lose the proportions."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TypeError("a part of a mix has no proportions: slice, filter or split the sources, and mix the parts")

    def __repr__(self) -> str:
        shown = self.weights if len(self.weights) <= _MOST_SHOWN else f"({self.weights[0]}, ...)"
        return f"MixedSource({len(self.sources)} sources, weights={shown})"


def _may_read_ahead(source: Source[Any]) -> bool:
    """Return whether a source has something to fetch before it is read: not if its files are here."""
    part = whole_of(source)
    if isinstance(part, FileSource) and type(part).read_ahead is FileSource.read_ahead:
        return part.has_urls
    return hasattr(type(part), "read_ahead")  # an instance is slow to ask, and so is a protocol


def _require_dict(record: Any) -> dict[str, Any]:
    """Return a record or a batch, if it can have a further field."""
    if not isinstance(record, dict):
        message = f"with_source adds a field, and the records are of type {type(record).__name__}, not dicts of fields"
        raise ConfigError(message, key="with_source")
    return cast("dict[str, Any]", record)


def _pairs(sources: Any, weights: Mapping[str, float] | None) -> Sequence[tuple[Any, Any]]:
    """Return sources and weights, from any of the ways to give them."""
    if weights is not None:
        if not isinstance(sources, Mapping) or not isinstance(weights, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            message = (
                "weights are in pairs, mix([(a, 0.7), (b, 0.3)]), or by name, mix({'a': a, 'b': b}, {'a': 0.7, ...})"
            )
            raise ConfigError(message, key="weights", value=weights)
        check_keys("weights", weights, cast("Mapping[Any, Any]", sources))
        return [(source, weights[name]) for name, source in cast("Mapping[str, Any]", sources).items()]
    if isinstance(sources, Mapping):
        pairs = [*cast("Mapping[Any, Any]", sources).items()]
        if pairs and all(isinstance(name, str) and not isinstance(value, (Real, str)) for name, value in pairs):
            raise ConfigError("sources by name need weights by name: mix({'a': a}, {'a': 0.7})", key="weights")
    else:
        pairs: list[Any] = [] if isinstance(sources, (Source, str)) else list(sources)
    if not pairs or not all(isinstance(pair, (tuple, list)) and len(cast("list[Any]", pair)) == 2 for pair in pairs):
        message = f"mix takes sources with weights, {{a: 0.7, b: 0.3}} or [(a, 0.7), (b, 0.3)], got {_named(sources)}"
        raise ConfigError(message, key="sources")
    return pairs


def _named(sources: Any) -> str:
    several = isinstance(sources, (list, tuple, Mapping))
    return f"{type(sources).__name__} of {len(cast('list[Any]', sources))}" if several else repr(sources)
