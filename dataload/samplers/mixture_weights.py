"""Weights and limits of a mixture, and the rules by which it gives its positions to components. Pure (no I/O)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from fractions import Fraction
from math import isnan, lcm
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from dataload._util.randomness import derive_word
from dataload._util.settings import as_tuple, check_keys, setting_error
from dataload.errors import ConfigError
from dataload.samplers.common import MAX_LENGTH, Float64Array, divide, split_by_group
from dataload.samplers.quotas import MOST_POSITIONS, Quotas
from dataload.samplers.weighted import check_weights, scaled, uniform
from dataload.types import Int64Array

_SHORTEST_WINDOW = 1000
_LONGEST_WINDOW = 10_000
_BLOCK = 1 << 14  # positions that the inverse looks at together


class Pattern(NamedTuple):
    """The rule of windows: the components in one window, which repeats."""

    components: Int64Array  # (window,), component at each offset
    nth: Int64Array  # (window,), number of earlier offsets with the same component
    counts: Int64Array  # (components,), offsets per component
    row: Float64Array  # (components,), weights
    length: int = MOST_POSITIONS

    def draws(self, length: int) -> Int64Array:
        """Return the number of draws from each component in the first `length` positions, (components,) int64."""
        windows, rest = divmod(length, len(self.components))
        return windows * self.counts + np.bincount(self.components[:rest], minlength=len(self.counts))

    def turns(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the component at each position, and the number of earlier positions with the same component."""
        windows, offsets = divide(positions, len(self.components))
        components = self.components[offsets]
        windows *= self.counts[components]
        windows += self.nth[offsets]
        return components, windows


Rule: TypeAlias = Pattern | Quotas


class Schedule(NamedTuple):
    """The rules of one epoch, each from its start to the next one's; what is before the first start is forgotten."""

    starts: Int64Array  # (rules,)
    before: Int64Array  # (rules, components), draws from each component before the start
    rules: tuple[Rule, ...]

    @property
    def length(self) -> int:
        """Positions until all components that have a weight are used up."""
        ends = [start + rule.length for start, rule in zip(self.starts.tolist(), self.rules, strict=True)]
        early = (end for end, start in zip(ends[:-1], self.starts[1:].tolist(), strict=True) if end < start)
        return min(MOST_POSITIONS, next(early, ends[-1]))

    def draws(self, length: int) -> Int64Array:
        """Return the number of draws from each component in the first `length` positions, (components,) int64."""
        i = int(np.searchsorted(self.starts, length, side="right")) - 1
        return self.before[i] + self.rules[i].draws(length - int(self.starts[i])) if i >= 0 else self.before[0] * 0

    def turns(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the component at each position, and the number of earlier positions with the same component."""
        ends = (positions.min(), positions.max()) if positions.size else (self.starts[0], self.starts[0])
        first, last = np.searchsorted(self.starts, ends, side="right") - 1
        if first < 0:
            raise forgotten(f"position {self.starts[0]:,}")
        if last == 0 == self.starts[0]:  # nearly always
            return self.rules[0].turns(positions)
        components, draws = np.empty_like(positions), np.empty_like(positions)
        for i, rows in split_by_group(np.searchsorted(self.starts, positions, side="right") - 1):
            components[rows], draws[rows] = self.rules[i].turns(positions[rows] - self.starts[i])
            draws[rows] += self.before[i, components[rows]]
        return components, draws

    def positions_of(self, component: int, wanted: Int64Array, below: int) -> Int64Array:
        """Return the positions of some draws from a component, ascending, which are below a position."""
        first, found = int(self.starts[0]), [np.empty(0, np.int64)]
        while wanted.size:  # the block with the first of them, and all that it holds
            starts = range(first + _BLOCK, below, _BLOCK)  # of the other blocks
            low = bisect_right(starts, wanted[0], key=lambda start: self.draws(start)[component])
            block = np.arange(first + low * _BLOCK, min(first + (low + 1) * _BLOCK, below))
            components, drawn = self.turns(block)
            found.append(block[(components == component) & np.isin(drawn, wanted[:_BLOCK])])
            wanted = wanted[len(found[-1]) :]
        return np.concatenate(found)


def forgotten(where: str) -> ConfigError:
    """Return the error for the order before a change whose state has no earlier ones."""
    remedy = "load one of that time, or the log of changes (load_changes, --changes)"
    return ConfigError(f"the weights before {where} are not in the state: {remedy}", key="changes")


def changes_of(weights: Any) -> Sequence[tuple[Any, Any]] | None:
    """Return the pairs of weights that change within an epoch, or None if these weights do not."""
    if isinstance(weights, Mapping):
        items = cast("Mapping[Any, Any]", weights)
        return None if not items or any(isinstance(key, str) for key in items) else [*items.items()]
    pairs = cast("tuple[Any, ...]", weights) if isinstance(weights, tuple) else ()  # as stored
    is_pair = [isinstance(pair, tuple) and [*map(type, cast("Any", pair))] == [int, tuple] for pair in pairs]
    return pairs if pairs and all(is_pair) else None


def schedules(
    weights: Any, window: int | Literal["any"] | None, seed: int, limits: Int64Array | None = None
) -> tuple[Schedule, ...]:
    """Return the schedule of each epoch, for checked weights and the most draws from each component in an epoch."""
    window = window if limits is None else "any"
    entries = weights if isinstance(weights[0], tuple) and changes_of(weights) is None else (weights,)
    constant = tuple(entry for entry in entries if changes_of(entry) is None)
    shared = window or (_window(constant) if constant else 0)
    found: list[Schedule] = []
    for epoch, entry in enumerate(entries):
        changes = changes_of(entry)
        starts, rows = (0,), (entry,)
        if changes is not None:
            starts, rows = zip(*changes, strict=True)
        rules: list[Rule] = []
        before = [np.zeros(len(rows[0]), np.int64)]
        for i, row in enumerate(rows):
            # The weights before a change stay in the order that they would have without it.
            address = (epoch, i) if i else (epoch,)
            size = shared if changes is None else window or _window((row,))
            counts = None if size == "any" else _counts(row, size, refuses=window is not None)
            if counts is None:
                rules.append(Quotas(row, seed, *address, limits=None if limits is None else limits - before[i]))
            else:
                rules.append(_pattern(counts, derive_word(seed, "mixture", *address), row))
            if i + 1 < len(rows):
                before.append(before[i] + rules[i].draws(int(starts[i + 1]) - int(starts[i])))
        found.append(Schedule(np.array(starts, np.int64), np.array(before), tuple(rules)))
    return tuple(found)


def _as_integers(row: tuple[float, ...]) -> list[int]:
    """Return integers in the proportions of weights, exactly."""
    ratios = [weight.as_integer_ratio() for weight in row]
    unit = max(below for _, below in ratios)  # a power of 2
    return [above * (unit // below) for above, below in ratios]


def _window(rows: tuple[tuple[float, ...], ...]) -> int:
    """Return the shortest window of at least 1,000 in which all shares are integers, or the longest allowed."""
    unit = 1
    for whole in map(_as_integers, rows):
        for part in {*whole}:
            unit = lcm(unit, Fraction(part, sum(whole)).limit_denominator(_LONGEST_WINDOW).denominator)
            if unit > _LONGEST_WINDOW:
                return _LONGEST_WINDOW
    return unit * -(-_SHORTEST_WINDOW // unit)


def _counts(row: tuple[float, ...], window: int, *, refuses: bool) -> list[int] | None:
    """Return the offsets per component in a window: shares rounded down, the rest by largest remainder.

    A window that is too short for a weight is refused, or None is returned.
    """
    whole = _as_integers(row)
    total = sum(whole)
    counts, rests = map(list, zip(*(divmod(part * window, total) for part in whole), strict=True))
    by_remainder = sorted(range(len(row)), key=lambda j: (-rests[j], j))
    for j in by_remainder[: window - sum(counts)]:
        counts[j] += 1
    for j, weight in enumerate(row):
        if weight and not counts[j]:
            if not refuses:
                return None
            rule = f"must be 'any' or at least {-(-total // whole[j])}, so that weights[{j}], {weight}, gets a position"
            raise setting_error("window", window, rule)
    return counts


def _pattern(counts: list[int], key: np.uint64, row: Sequence[float]) -> Pattern:
    components = np.repeat(np.arange(len(counts)), counts)
    nth = np.concatenate([np.arange(count) for count in counts])
    # Draw i of m is at a random place in the i-th of m equal shares: even, but not periodic in the number of ranks.
    offsets = (nth + uniform(key, np.arange(len(components)))) / np.repeat(counts, counts)
    order = np.argsort(offsets, kind="stable")
    return Pattern(components[order], nth[order], np.array(counts, np.int64), np.array(row))


Row: TypeAlias = Sequence[float] | Mapping[str, float]
"""One weight per component, in order or by name."""

Changes: TypeAlias = Mapping[int, Row] | tuple[tuple[int, tuple[float, ...]], ...]
"""Weights by the position of the epoch from which they hold."""

MaxEpochs: TypeAlias = float | Sequence[float] | Mapping[str, float]
"""The most passes over each component; for all, in order, or by name for some. Infinity is no limit."""


def check_rows(weights: Any, components: int, names: tuple[str, ...] | None, step: int) -> Any:
    """Return weights as floats in tuples, with the nesting they were given in, and changes as pairs."""

    def row(given: Any) -> tuple[float, ...]:
        if isinstance(given, Mapping):
            by_name = cast("Mapping[str, float]", given)
            if names is None:
                rule = f"must be {components} numbers in order, or by position from 0 on: the samplers have no names"
                raise setting_error("weights", given, rule)
            check_keys("weights", by_name, names)
            given = [by_name[name] for name in names]
        checked = tuple(check_weights(as_tuple(given) or given).tolist())
        if len(checked) != components:
            raise setting_error("weights", checked, f"must hold one weight for each of the {components} samplers")
        return checked

    def entry(given: Any) -> Any:
        pairs = changes_of(given)
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

    if isinstance(weights, Mapping) or changes_of(weights) is not None:
        return entry(weights)
    if isinstance(weights, Set):
        raise setting_error("weights", weights, "must have an order")
    given = as_tuple(weights)
    # Anything that is not a row of rows is checked as a single row.
    nested = [isinstance(item, (Sequence, Mapping, np.ndarray)) and not isinstance(item, str) for item in given]
    return tuple(map(entry, given)) if given and all(nested) else row(given or weights)


def by_row(weights: Any, change: Callable[[Any], Any]) -> Any:
    """Return weights, of epochs and positions, with each row changed."""
    if (pairs := changes_of(weights)) is not None:
        return tuple((start, change(row)) for start, row in pairs)
    if isinstance(weights[0], (tuple, Mapping)):
        return tuple(by_row(row, change) for row in weights)
    return change(weights)


def rows_of(weights: Any) -> list[tuple[float, ...]]:
    """Return all rows of weights, of epochs and positions."""
    rows: list[tuple[float, ...]] = []
    by_row(weights, rows.append)
    return rows


def blend_weights(sizes: Sequence[float], *, temperature: float = 1.0, min_share: float = 0.0) -> tuple[float, ...]:
    """Return weights of sources by their sizes, for `Mixture` or `dataload.mix`; they add up to 1.

    Args:
        sizes: Records, or tokens, of each source; or any weights. A source of size 0 gets weight 0.
        temperature: Weights are in proportion to ``sizes ** (1 / temperature)``: 1 keeps the proportions of the sizes,
            greater ones even them out. ``lengths ** 0.3`` is ``temperature=1 / 0.3``.
        min_share: The least share of a source that is not empty. Those below get it, the others share the rest.

    Raises:
        ConfigError: The sizes are no weights, `temperature` is less than 1, or the shares add up to more than 1.

    Examples:
        >>> [round(weight, 3) for weight in blend_weights([9, 900, 8100], temperature=2, min_share=0.05)]
        [0.05, 0.237, 0.712]
    """
    weights = scaled(check_weights(sizes))
    if not temperature >= 1:
        rule = "must be at least 1: weights are sizes ** (1 / temperature), so sizes ** 0.3 is temperature=1 / 0.3"
        raise setting_error("temperature", temperature, rule)
    used = weights > 0
    if not 0 <= min_share * int(used.sum()) <= 1:
        raise setting_error("min_share", min_share, f"must be from 0 to 1 / {int(used.sum())}, the number of sources")
    weights = weights ** (1 / temperature)
    shares, is_low = weights / weights.sum(), ~used
    while (now := used & (is_low | (shares < min_share))).any() and not np.array_equal(now, is_low & used):
        is_low = now
        rest = np.where(is_low, 0, weights)
        shares = np.where(is_low, min_share, (1 - min_share * is_low.sum()) * rest / (rest.sum() or 1))
    return tuple(shares.tolist())


def check_max_epochs(given: Any, components: int, names: tuple[str, ...] | None) -> tuple[float, ...] | None:
    """Return the most passes over each component; None if no component has a limit."""
    if given is None:
        return None
    rule = f"must be one number for all, or for each of the {components} samplers, or numbers by the names of some"
    if isinstance(given, Mapping):
        by_name = cast("Mapping[str, float]", given)
        if names is None or not {*by_name} <= {*names}:
            raise setting_error("max_epochs", given, rule)
        given = [by_name.get(name, np.inf) for name in names]
    values = as_tuple(given) if isinstance(given, (Sequence, np.ndarray)) else (given,) * components
    if len(values) != components:
        raise setting_error("max_epochs", given, rule)
    for value in values:
        number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not number or isnan(value) or value <= 0:
            raise setting_error("max_epochs", value, "must be numbers above 0; float('inf') is no limit")
    return tuple(map(float, values)) if np.isfinite(values).any() else None
