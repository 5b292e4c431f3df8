"""Several sources as one: one after the other, or mixed by weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal, NoReturn, TypeAlias, cast, get_args

from dataload._util.checks import check_choice, setting_error
from dataload.errors import ConfigError
from dataload.sources.adapt import as_source
from dataload.sources.base import Source
from dataload.sources.concat import ConcatSource

Stop: TypeAlias = Literal["first", "longest", "never"]


def concat(sources: Sequence[Any]) -> ConcatSource:
    """Return the records of several sources, one source after the other.

    Formats may differ, fields may not; ``__key__`` is left out unless all have it.

    Args:
        sources: At least one of what a `Loader` takes.

    Raises:
        ConfigError: There is none.
        TypeError: One is no source.
    """
    if isinstance(sources, (Source, str, Mapping)):
        raise TypeError(f"concat takes a list of sources, got {_named(sources)}")
    return ConcatSource([as_source(source) for source in sources])


def mix(
    sources: Mapping[Any, Any] | Sequence[tuple[Any, float]],
    weights: Mapping[str, float] | None = None,
    *,
    stop: Stop = "first",
) -> MixedSource:
    """Return several sources as one that a `Loader` reads in these proportions.

    The records are those of `concat`. A loader without `sampler` draws from each source in the proportion of its
    weight, exactly in any 1,000 or so consecutive records (see `dataload.samplers.Mixture`). Each source is in order,
    or shuffled as the loader's `shuffle` says.

    Args:
        sources: ``{source: weight}``, or pairs of these; or sources by name, and `weights`. Sources are what a `Loader`
            takes. Weights need not add up to 1.
        weights: Weights by name.
        stop: When an epoch ends: before the ``"first"`` source to run out would repeat, once the ``"longest"`` has been
            served completely, or ``"never"``.

    Raises:
        ConfigError: There is no source, a weight is negative or missing, or `stop` is unknown.
        TypeError: One is no source, or is a mix itself.

    Examples:
        >>> import dataload
        >>> a, b = dataload.RangeSource(1000), dataload.RangeSource(2000, start=1000)
        >>> loader = dataload.Loader(dataload.mix({a: 0.7, b: 0.3}), batch_size=1000, shuffle=True, seed=0)
        >>> int((next(iter(loader))["index"] < 1000).sum())
        700
    """
    pairs = [*_pairs(sources, weights)]
    for _, weight in pairs:
        if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
            raise setting_error("weights", weight, "must be numbers from 0")
    if not any(weight for _, weight in pairs):
        raise setting_error("weights", [weight for _, weight in pairs], "must hold a number above 0")
    check_choice("stop", stop, get_args(Stop))
    return MixedSource([as_source(source) for source, _ in pairs], tuple(float(weight) for _, weight in pairs), stop)


class MixedSource(ConcatSource):
    """A concatenation that a loader reads in given proportions; see `mix`.

    Attributes:
        weights: The weight of each source.
        stop: When an epoch ends.
    """

    has_proportions: ClassVar[bool] = True

    def __init__(self, sources: Sequence[Source[Any]], weights: tuple[float, ...], stop: Stop) -> None:
        super().__init__(sources)
        self.weights = weights
        self.stop: Stop = stop

    def __getitem__(self, index: Any, /) -> Any:
        """Return one record; a part would lose the proportions."""
        return self._refuse() if isinstance(index, slice) else super().__getitem__(index)

    def filter(self, *_: Any, **__: Any) -> NoReturn:
        """Raise TypeError: a part would lose the proportions."""
        self._refuse()

    def split(self, *_: Any, **__: Any) -> NoReturn:
        """Raise TypeError: a part would lose the proportions."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TypeError("a part of a mix has no proportions: slice, filter or split the sources, and mix the parts")

    def __repr__(self) -> str:
        return f"MixedSource({len(self.sources)} sources, weights={self.weights})"


def _pairs(sources: Any, weights: Mapping[str, float] | None) -> Sequence[tuple[Any, Any]]:
    """Return sources and weights, from any of the ways to give them."""
    if weights is not None:
        if not isinstance(sources, Mapping) or {*cast("Mapping[Any, Any]", sources)} != {*weights}:
            message = "weights by name go with sources of the same names: mix({'a': a, 'b': b}, {'a': 0.7, 'b': 0.3})"
            raise ConfigError(message, key="weights", value=weights)
        return [(source, weights[name]) for name, source in cast("Mapping[str, Any]", sources).items()]
    if isinstance(sources, Mapping):
        pairs = [*cast("Mapping[Any, Any]", sources).items()]
    else:
        pairs: list[Any] = [] if isinstance(sources, (Source, str)) else list(sources)
    if not pairs or not all(isinstance(pair, (tuple, list)) and len(cast("list[Any]", pair)) == 2 for pair in pairs):
        message = f"mix takes sources with weights, {{a: 0.7, b: 0.3}} or [(a, 0.7), (b, 0.3)], got {_named(sources)}"
        raise ConfigError(message, key="sources")
    return pairs


def _named(sources: Any) -> str:
    several = isinstance(sources, (list, tuple, Mapping))
    return f"{type(sources).__name__} of {len(cast('list[Any]', sources))}" if several else repr(sources)
