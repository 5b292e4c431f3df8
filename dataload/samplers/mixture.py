"""Several orders mixed in stated proportions."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from fractions import Fraction
from math import ceil, lcm
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from dataload._util.randomness import derive_word
from dataload._util.settings import Least, as_tuple, check_setting, check_settings, setting_error
from dataload.errors import ConfigError
from dataload.samplers.basic import indices_without_end, positions_without_end
from dataload.samplers.common import (
    MAX_LENGTH,
    check_lengths,
    check_sampler,
    divide,
    records_of,
    set_fields,
    source_lengths_of,
    split_by_group,
)
from dataload.samplers.weighted import check_weights, uniform
from dataload.types import Int64Array, Sampler

Step: TypeAlias = Annotated[int, Least(1)]
"""Positions between those at which weights may change."""

Stop: TypeAlias = Literal["first", "longest", "never"]
"""The end of an epoch of a mixture."""

Row: TypeAlias = Sequence[float] | Mapping[str, float]
"""One weight per component, in order or by name."""

Changes: TypeAlias = Mapping[int, Row] | tuple[tuple[int, tuple[float, ...]], ...]
"""Weights by the position of the epoch from which they hold."""

_SHORTEST_WINDOW = 1000
_LONGEST_WINDOW = 10_000


class _Pattern(NamedTuple):
    """The components in one window, which an epoch repeats."""

    components: Int64Array  # (window,), component at each offset
    nth: Int64Array  # (window,), number of earlier offsets with the same component
    counts: Int64Array  # (components,), offsets per component

    def position(self, component: int, draw: int) -> int:
        """Return the position of a component's draw number `draw`, counted from 0."""
        window, nth = divmod(draw, int(self.counts[component]))
        return window * len(self.components) + int(np.flatnonzero(self.components == component)[nth])

    def draws(self, length: int) -> Int64Array:
        """Return the number of draws from each component in the first `length` positions, (components,) int64."""
        windows, rest = divmod(length, len(self.components))
        return windows * self.counts + np.bincount(self.components[:rest], minlength=len(self.counts))

    def turns(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the component at each position, and the number of earlier positions with the same component."""
        windows, offsets = divide(positions, len(self.components))
        components = self.components[offsets]
        return components, windows * self.counts[components] + self.nth[offsets]


class _Schedule(NamedTuple):
    """The patterns of one epoch, each from its start to the next one's."""

    starts: Int64Array  # (patterns,)
    before: Int64Array  # (patterns, components), draws from each component before the start
    patterns: tuple[_Pattern, ...]

    def position(self, component: int, draw: int) -> int | None:
        """Return the position of a component's draw number `draw`, counted from 0; None if it has fewer draws."""
        i = int(np.searchsorted(self.before[:, component], draw, side="right")) - 1
        if not self.patterns[i].counts[component]:
            return None
        return int(self.starts[i]) + self.patterns[i].position(component, draw - int(self.before[i, component]))

    def draws(self, length: int) -> Int64Array:
        """Return the number of draws from each component in the first `length` positions, (components,) int64."""
        i = int(np.searchsorted(self.starts, length, side="right")) - 1
        return self.before[i] + self.patterns[i].draws(length - int(self.starts[i]))

    def turns(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the component at each position, and the number of earlier positions with the same component."""
        ends = (positions.min(), positions.max()) if positions.size else (0, 0)
        first, last = np.searchsorted(self.starts, ends, side="right") - 1
        if first == last:  # nearly always: the positions of a block are close together
            components, draws = self.patterns[first].turns(positions - self.starts[first])
            return components, draws + self.before[first, components] if first else draws
        components, draws = np.empty_like(positions), np.empty_like(positions)
        for i, rows in split_by_group(np.searchsorted(self.starts, positions, side="right") - 1):
            components[rows], draws[rows] = self.patterns[i].turns(positions[rows] - self.starts[i])
            draws[rows] += self.before[i, components[rows]]
        return components, draws


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several orders mixed in proportions that are exact in any `window` consecutive positions.

    Use it with a `ConcatSource`, whose sources are the components in the same order. Within a window,
    the draws from a component are spread evenly, each at a random offset in its share (low discrepancy rather than coin
    flips); then the window repeats. A component that ends starts its next epoch.

    Weights may change within an epoch: ``{0: (9, 1), 50_000: (1, 1)}``. A new window begins at each change, and each
    component continues where it is.

    Attributes:
        samplers: The order of each component, or orders by name. Stored as a tuple.
        weights: One weight per component, in order or by name; or a mapping from the position in the epoch from which
            weights hold, first 0, to such weights; or a sequence of these, one per epoch, whose last item holds for
            later epochs. Stored as tuples, mappings as tuples of pairs.
        stop: When an epoch ends: before the ``"first"`` component to run out would repeat, once the ``"longest"`` one
            has been served completely (components that change to weight 0 before their end do not count), or
            ``"never"`` (after 2^48 positions). If weights differ between epochs, all epochs share one length that
            satisfies this in each.
        seed: Seed of the offsets in the window, any integer.
        window: Number of positions in which the proportions are exact, up to rounding of weight * window to integers.
            None uses the smallest multiple of the weights' common denominator that is at least 1,000, or 10,000 if
            that denominator is too large. Weights that change within an epoch each have a window of their own.
        lengths: Records of each component of the `ConcatSource`. None uses the records that each sampler chooses from.
        global_batch_size: If given, weights change at steps of this many positions instead of positions: the rows of
            all ranks per step. Not stored.

    Raises:
        ConfigError: The numbers or names of samplers, weights and lengths differ; a weight is negative, or too small
            for the window; a change of weights lies outside the epoch; a component with a positive weight is empty, or
            has fewer records than its sampler chooses from; an epoch would have more than 2^48 positions; or `stop` is
            unknown.
    """

    samplers: Sequence[Sampler] | Mapping[str, Sampler]
    weights: Row | Changes | Sequence[Row | Changes]
    stop: Stop = "first"
    seed: int = 0
    window: Annotated[int, Least(1)] | None = None
    lengths: tuple[int, ...] | None = None
    global_batch_size: InitVar[Step | None] = None
    _schedules: tuple[_Schedule, ...] = field(init=False, repr=False, compare=False)  # one per epoch, or for all
    _length: int = field(init=False, repr=False, compare=False)
    # Epochs of each component in one epoch of the mixture, so that no two of these share a component's epoch.
    _epochs: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _firsts: Int64Array = field(init=False, repr=False, compare=False)  # (components + 1,), first index of each

    def __post_init__(self, global_batch_size: int | None) -> None:
        step = check_setting("global_batch_size", 1 if global_batch_size is None else global_batch_size, Step)
        check_settings(self)
        self._check(step)
        set_fields(self, _schedules=_schedules(self.weights, self.window, self.seed))
        set_fields(self, _length=self._measure())
        draws = np.max([schedule.draws(self._length) for schedule in self._schedules], axis=0).tolist()
        epochs = tuple(-(-draw // max(1, len(sampler))) for draw, sampler in zip(draws, self.samplers, strict=True))
        set_fields(self, _epochs=epochs)

    def _check(self, step: int) -> None:
        names = tuple(self.samplers) if isinstance(self.samplers, Mapping) else None
        samplers = as_tuple(self.samplers.values() if isinstance(self.samplers, Mapping) else self.samplers)
        for i, sampler in enumerate(samplers):
            check_sampler(f"samplers[{i}]", sampler)
        if not samplers:
            raise setting_error("samplers", self.samplers, "must hold one sampler per component")
        weights = _check_weights(self.weights, len(samplers), names, step)
        lengths = tuple(map(records_of, samplers)) if self.lengths is None else self.lengths
        lengths = check_lengths("lengths", lengths)
        if len(lengths) != len(samplers):
            rule = f"must hold one length for each of the {len(samplers)} samplers"
            raise setting_error("lengths", lengths, rule)
        for i, (sampler, length) in enumerate(zip(samplers, lengths, strict=True)):
            # A sampler without `records` may repeat a few, so its length says nothing.
            records = getattr(sampler, "records", None) or 0
            if records > length:
                rule = f"must be at least {records}, the records that samplers[{i}] chooses from"
                raise setting_error(f"lengths[{i}]", length, rule)
        firsts = np.cumsum([0, *lengths], dtype=np.int64)
        set_fields(self, samplers=samplers, weights=weights, lengths=lengths, _firsts=firsts)

    def _measure(self) -> int:
        """Return the number of positions per epoch."""
        samplers, ends = cast("tuple[Sampler, ...]", self.samplers), list[int]()
        for schedule in self._schedules:
            used = np.flatnonzero(np.any([pattern.counts for pattern in schedule.patterns], axis=0)).tolist()
            for component in used:
                if not len(samplers[component]):
                    key = f"samplers[{component}]"
                    raise ConfigError(f"{key} is empty: set its weight to 0", key=key, value=0)
            if self.stop == "first":
                found = [schedule.position(component, len(samplers[component])) for component in used]
                ends.append(min(end for end in found if end is not None))
            else:
                found = [schedule.position(component, len(samplers[component]) - 1) for component in used]
                ends.append(max(last for last in found if last is not None) + 1)
        length = {"first": min(ends), "longest": max(ends), "never": MAX_LENGTH}[self.stop]
        late = max(int(schedule.starts[-1]) for schedule in self._schedules)
        if late >= length:
            raise ConfigError(
                f"weights change at position {late}, and stop={self.stop!r} ends epochs at {length}: change them "
                "earlier, give weights for each epoch, or use stop='never'",
                key="weights",
                value=late,
            )
        if length > MAX_LENGTH:
            raise ConfigError(
                f"stop={self.stop!r} makes epochs of {length} positions; the limit is {MAX_LENGTH}",
                key="stop",
                value=self.stop,
            )
        return length

    def __len__(self) -> int:
        return self._length

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return int(self._firsts[-1])

    @property
    def source_lengths(self) -> tuple[int, ...]:
        made_for = map(source_lengths_of, cast("tuple[Sampler, ...]", self.samplers))
        lengths = cast("tuple[int, ...]", self.lengths)  # see `_check`
        return tuple(n if own is None else sum(own) for own, n in zip(made_for, lengths, strict=True))

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        components, found = self._schedules[min(epoch, len(self._schedules) - 1)].turns(positions)
        samplers = cast("tuple[Sampler, ...]", self.samplers)
        for component, rows in split_by_group(components):
            first_epoch = epoch * self._epochs[component]
            found[rows] = indices_without_end(samplers[component], found[rows], first_epoch=first_epoch)
        found += self._firsts[components]
        return found

    def positions_of(self, index: int, *, epoch: int, below: int) -> Int64Array:
        """See `dataload.samplers.inverse.positions_of`."""
        samplers = cast("tuple[Sampler, ...]", self.samplers)
        component = int(np.searchsorted(self._firsts, index, side="right")) - 1
        if component == len(samplers):
            return np.empty(0, np.int64)
        schedule = self._schedules[min(epoch, len(self._schedules) - 1)]
        draws = positions_without_end(
            samplers[component],
            index - int(self._firsts[component]),
            first_epoch=epoch * self._epochs[component],
            below=int(schedule.draws(min(below, self._length))[component]),
        )
        return np.array([schedule.position(component, draw) for draw in draws.tolist()], np.int64)


def _check_weights(weights: Any, components: int, names: tuple[str, ...] | None, step: int) -> Any:
    """Return weights as floats in tuples, with the nesting they were given in, and changes as pairs."""

    def row(given: Any) -> tuple[float, ...]:
        if isinstance(given, Mapping):
            by_name = cast("Mapping[str, float]", given)
            if names is None or {*by_name} != {*names}:
                rule = "must hold weights by position in the epoch, from 0 on, or by the names of the samplers"
                raise setting_error("weights", given, rule)
            given = [by_name[name] for name in names]
        checked = tuple(check_weights(as_tuple(given) or given).tolist())
        if len(checked) != components:
            raise setting_error("weights", checked, f"must hold one weight for each of the {components} samplers")
        return checked

    def entry(given: Any) -> Any:
        pairs = _changes(given)
        if pairs is None:
            return row(given)
        for start, _ in pairs:
            if isinstance(start, bool) or not hasattr(start, "__index__") or not 0 <= start < MAX_LENGTH // step:
                rule = f"must hold weights by position in the epoch, from 0 on and below {MAX_LENGTH // step}"
                raise setting_error("weights", start, rule)
        starts = [int(start) * step for start, _ in pairs]
        changes = sorted(zip(starts, [row(held) for _, held in pairs], strict=True))
        if starts.count(0) != 1 or len({*starts}) < len(starts):
            raise setting_error("weights", [*dict(pairs)], "must hold weights for position 0, and once for each other")
        # Constant weights are the same value however they are written.
        return tuple(changes) if len(changes) > 1 else changes[0][1]

    if isinstance(weights, Mapping) or _changes(weights) is not None:
        return entry(weights)
    given = as_tuple(weights)
    # Anything that is not a row of rows is checked as a single row.
    nested = [isinstance(item, (Sequence, Mapping, np.ndarray)) and not isinstance(item, str) for item in given]
    return tuple(map(entry, given)) if given and all(nested) else row(given or weights)


def _changes(weights: Any) -> Sequence[tuple[Any, Any]] | None:
    """Return the pairs of weights that change within an epoch, or None if these weights do not."""
    if isinstance(weights, Mapping):
        items = cast("Mapping[Any, Any]", weights)
        return None if not items or any(isinstance(key, str) for key in items) else [*items.items()]
    pairs = cast("tuple[Any, ...]", weights) if isinstance(weights, tuple) else ()  # as stored
    is_pair = [isinstance(pair, tuple) and [*map(type, cast("Any", pair))] == [int, tuple] for pair in pairs]
    return pairs if pairs and all(is_pair) else None


def _schedules(weights: Any, window: int | None, seed: int) -> tuple[_Schedule, ...]:
    """Return the schedule of each epoch, for checked weights."""
    entries = weights if isinstance(weights[0], tuple) and _changes(weights) is None else (weights,)
    constant = tuple(entry for entry in entries if _changes(entry) is None)
    shared = window or (_window(constant) if constant else 0)
    schedules: list[_Schedule] = []
    for epoch, entry in enumerate(entries):
        changes = _changes(entry)
        starts, rows = (0,), (entry,)
        if changes is not None:
            starts, rows = zip(*changes, strict=True)
        patterns: list[_Pattern] = []
        for i, row in enumerate(rows):
            # The weights before a change stay in the order that they would have without it.
            address = (epoch, i) if i else (epoch,)
            key = derive_word(seed, "mixture", *address)
            patterns.append(_pattern(_counts(row, shared if changes is None else window or _window((row,))), key))
        drawn = [pattern.draws(length) for pattern, length in zip(patterns, np.diff(starts).tolist(), strict=False)]
        before = np.cumsum([np.zeros(len(rows[0]), np.int64), *drawn], axis=0)
        schedules.append(_Schedule(np.array(starts, np.int64), before, tuple(patterns)))
    return tuple(schedules)


def _shares(row: tuple[float, ...]) -> list[Fraction]:
    total = sum(map(Fraction, row))
    return [Fraction(weight) / total for weight in row]


def _window(rows: tuple[tuple[float, ...], ...]) -> int:
    """Return the shortest window of at least 1,000 in which all shares are integers, or the longest allowed."""
    shares = [share.limit_denominator(_LONGEST_WINDOW) for row in rows for share in _shares(row)]
    unit = lcm(*(share.denominator for share in shares))
    return unit * -(-_SHORTEST_WINDOW // unit) if unit <= _LONGEST_WINDOW else _LONGEST_WINDOW


def _counts(row: tuple[float, ...], window: int) -> list[int]:
    """Return the offsets per component in a window: shares rounded down, the rest by largest remainder."""
    exact = [share * window for share in _shares(row)]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(row)), key=lambda j: (counts[j] - exact[j], j))
    for j in by_remainder[: window - sum(counts)]:
        counts[j] += 1
    for j, weight in enumerate(row):
        if weight and not counts[j]:
            least = ceil(window / exact[j])
            rule = f"must be at least {least}, so that weights[{j}], {weight}, gets a position"
            raise setting_error("window", window, rule)
    return counts


def _pattern(counts: list[int], key: np.uint64) -> _Pattern:
    components = np.repeat(np.arange(len(counts)), counts)
    nth = np.concatenate([np.arange(count) for count in counts])
    # Draw i of m is at a random place in the i-th of m equal shares: even, but not periodic in the number of ranks.
    offsets = (nth + uniform(key, np.arange(len(components)))) / np.repeat(counts, counts)
    order = np.argsort(offsets, kind="stable")
    return _Pattern(components[order], nth[order], np.array(counts, np.int64))
