"""The rules by which a mixture gives its positions to components. Pure (no I/O)."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil, floor, lcm
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from dataload._util.caches import Memo
from dataload._util.randomness import derive_word, hash64
from dataload._util.settings import setting_error
from dataload.errors import ConfigError
from dataload.samplers.common import BoolArray, Float64Array, divide, split_by_group
from dataload.samplers.weighted import scaled, uniform
from dataload.types import Int64Array

_SHORTEST_WINDOW = 1000
_LONGEST_WINDOW = 10_000
_BLOCK_BITS = 14
_BLOCK = 1 << _BLOCK_BITS
MOST_POSITIONS = 1 << 52
"""Positions that quotas can count: their doubles are exact below."""


class Pattern(NamedTuple):
    """The rule of windows: the components in one window, which repeats."""

    components: Int64Array  # (window,), component at each offset
    nth: Int64Array  # (window,), number of earlier offsets with the same component
    counts: Int64Array  # (components,), offsets per component
    row: Float64Array  # (components,), weights

    @property
    def uses(self) -> BoolArray:
        """Whether each component is drawn from, (components,)."""
        return self.counts > 0

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
        windows *= self.counts[components]
        windows += self.nth[offsets]
        return components, windows


class Quotas:
    """The rule for any weights: in blocks, at whose ends each component has had its share of all positions, rounded.

    A tree of components divides the turns of a node: of the first n, its lighter child gets ``floor(n * share +
    phase)``, the other one the rest. So every component is within a few turns of its share for ever, and the end of any
    block is known without the blocks before it. Within a block, each component's turns are spread as in a window.
    """

    def __init__(self, row: Sequence[float], seed: int, *address: int | str) -> None:
        self.row: Float64Array = np.array(row)
        self.uses: BoolArray = self.row > 0
        weights = scaled(self.row)
        used = np.flatnonzero(self.uses)
        weights = np.maximum(weights[used], np.finfo(np.float64).tiny)
        order = np.argsort(weights, kind="stable")
        self._components = used[order]  # from light to heavy
        ends = np.concatenate([[0.0], np.cumsum(weights[order])])
        # The heavy components are spread first, so that they do not depend on how evenly many light ones are.
        self._classes = [int(n) for n in np.searchsorted(np.diff(ends) / ends[-1], (1 / 256, 1 / 16))]
        self._key = derive_word(seed, "mixture quotas 1", *address)
        self._levels = _levels(ends, uniform(derive_word(seed, "mixture phases 1", *address), np.arange(len(used))))
        self._counted: Memo[Int64Array] = Memo()
        self._blocks: Memo[tuple[Int64Array, Int64Array]] = Memo()

    def position(self, component: int, draw: int) -> int:
        """Return the position of a component's draw number `draw`, counted from 0."""
        leaf = int(np.flatnonzero(self._components == component)[0])
        path = [
            (float(shares[node]), float(phases[node]), leaf < middles[node])
            for begins, middles, stops, shares, phases in self._levels
            for node in np.flatnonzero((begins <= leaf) & (leaf < stops)).tolist()
        ]

        def draws_to(block: int) -> int:
            count = (block + 1) << _BLOCK_BITS
            for share, phase, is_light in path:
                light = floor(count * share + phase)
                count = light if is_light else count - light
            return count

        block = bisect_right(range(MOST_POSITIONS >> _BLOCK_BITS), draw, key=draws_to)
        components, draws = self._block(block)
        return (block << _BLOCK_BITS) + int(np.flatnonzero((components == component) & (draws == draw))[0])

    def draws(self, length: int) -> Int64Array:
        """Return the number of draws from each component in the first `length` positions, (components,) int64."""
        block, rest = divmod(length, _BLOCK)
        found = np.zeros(len(self.uses), np.int64)
        found[self._components] = self._counts(block)
        if rest:
            found += np.bincount(self._block(block)[0][:rest], minlength=len(found))
        return found

    def turns(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the component at each position, and the number of earlier positions with the same component."""
        blocks, offsets = positions >> _BLOCK_BITS, positions & (_BLOCK - 1)
        least = int(blocks.min(initial=MOST_POSITIONS))
        components, draws = np.empty_like(positions), np.empty_like(positions)
        for block, rows in split_by_group(blocks - least):
            among, counted = self._block(block + least)
            components[rows], draws[rows] = among[offsets[rows]], counted[offsets[rows]]
        return components, draws

    def _counts(self, block: int) -> Int64Array:
        """Return the draws before a block, by component from light to heavy."""
        found = self._counted.recall(block)
        if found is None:
            counts = np.zeros(len(self._components))
            counts[0] = block << _BLOCK_BITS
            for begins, middles, _, shares, phases in self._levels:
                whole = counts[begins]
                light = np.floor(whole * shares + phases)
                counts[begins], counts[middles] = light, whole - light
            found = self._counted.keep(block, counts.astype(np.int64))
        return found

    def _block(self, block: int) -> tuple[Int64Array, Int64Array]:
        """Return the component at each position of a block, and its draw there."""
        if (found := self._blocks.recall(block)) is not None:
            return found
        before, after = self._counts(block), self._counts(block + 1)
        counts, places = after - before, np.arange(_BLOCK)
        which = np.repeat(np.arange(len(counts)), counts)
        nth = places - (np.cumsum(counts) - counts)[which]
        key, inner = hash64(self._key, np.array([2 * block, 2 * block + 1]))
        offsets = (nth + uniform(key, places)) / counts[which]
        order = places[:0]
        for stop in (*np.searchsorted(which, self._classes).tolist(), _BLOCK):
            count = len(order)
            if stop > count:  # what is spread already keeps its order; a radix sort of 16 bits is the fastest
                own = (places[:count] + uniform(inner, places[:count])) / max(1, count)
                both = (np.concatenate([own, offsets[count:stop]]) * 65_535).astype(np.uint16)
                order = np.concatenate([order, places[count:stop]])[both.argsort(kind="stable")]
        return self._blocks.keep(block, (self._components[which][order], (before[which] + nth)[order]))


def _levels(ends: Float64Array, phases: Float64Array) -> list[tuple[Any, ...]]:
    """Return a tree over weights, whose sums are `ends`, by levels: begin, middle and stop of nodes, shares, phases."""
    levels: list[tuple[Any, ...]] = []
    begins, stops = np.array([0]), np.array([len(ends) - 1])
    while (is_node := stops - begins > 1).any():
        begins, stops = begins[is_node], stops[is_node]
        middles = np.searchsorted(ends, (ends[begins] + ends[stops]) / 2, side="right") - 1
        middles = np.clip(middles, begins + 1, stops - 1)
        shares = np.minimum((ends[middles] - ends[begins]) / (ends[stops] - ends[begins]), 0.5)
        levels.append((begins, middles, stops, shares, phases[middles]))
        begins, stops = np.concatenate([begins, middles]), np.concatenate([middles, stops])
    return levels


Rule: TypeAlias = Pattern | Quotas


class Schedule(NamedTuple):
    """The rules of one epoch, each from its start to the next one's; what is before the first start is forgotten."""

    starts: Int64Array  # (rules,)
    before: Int64Array  # (rules, components), draws from each component before the start
    rules: tuple[Rule, ...]

    def position(self, component: int, draw: int) -> int:
        """Return the position of a component's draw number `draw`, counted from 0."""
        i = int(np.searchsorted(self.before[:, component], draw, side="right")) - 1
        self._check(i)
        return int(self.starts[i]) + self.rules[i].position(component, draw - int(self.before[i, component]))

    def draws(self, length: int) -> Int64Array:
        """Return the number of draws from each component in the first `length` positions, (components,) int64."""
        i = int(np.searchsorted(self.starts, length, side="right")) - 1
        return self.before[i] + self.rules[i].draws(length - int(self.starts[i])) if i >= 0 else self.before[0] * 0

    def turns(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the component at each position, and the number of earlier positions with the same component."""
        ends = (positions.min(), positions.max()) if positions.size else (self.starts[0], self.starts[0])
        first, last = np.searchsorted(self.starts, ends, side="right") - 1
        self._check(first)
        if last == 0 == self.starts[0]:  # nearly always
            return self.rules[0].turns(positions)
        components, draws = np.empty_like(positions), np.empty_like(positions)
        for i, rows in split_by_group(np.searchsorted(self.starts, positions, side="right") - 1):
            components[rows], draws[rows] = self.rules[i].turns(positions[rows] - self.starts[i])
            draws[rows] += self.before[i, components[rows]]
        return components, draws

    def _check(self, i: int) -> None:
        if i < 0:
            message = f"the weights before position {self.starts[0]:,} are not in the state: load one of that time"
            raise ConfigError(message, key="changes")


def changes_of(weights: Any) -> Sequence[tuple[Any, Any]] | None:
    """Return the pairs of weights that change within an epoch, or None if these weights do not."""
    if isinstance(weights, Mapping):
        items = cast("Mapping[Any, Any]", weights)
        return None if not items or any(isinstance(key, str) for key in items) else [*items.items()]
    pairs = cast("tuple[Any, ...]", weights) if isinstance(weights, tuple) else ()  # as stored
    is_pair = [isinstance(pair, tuple) and [*map(type, cast("Any", pair))] == [int, tuple] for pair in pairs]
    return pairs if pairs and all(is_pair) else None


def schedules(weights: Any, window: int | Literal["any"] | None, seed: int) -> tuple[Schedule, ...]:
    """Return the schedule of each epoch, for checked weights."""
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
        for i, row in enumerate(rows):
            # The weights before a change stay in the order that they would have without it.
            address = (epoch, i) if i else (epoch,)
            size = shared if changes is None else window or _window((row,))
            counts = None if size == "any" else _counts(row, size, refuses=window is not None)
            key = derive_word(seed, "mixture", *address)
            rules.append(Quotas(row, seed, *address) if counts is None else _pattern(counts, key, row))
        drawn = [rule.draws(length) for rule, length in zip(rules, np.diff(starts).tolist(), strict=False)]
        before = np.cumsum([np.zeros(len(rows[0]), np.int64), *drawn], axis=0)
        found.append(Schedule(np.array(starts, np.int64), before, tuple(rules)))
    return tuple(found)


def _shares(row: tuple[float, ...]) -> list[Fraction]:
    total = sum(map(Fraction, row))
    return [Fraction(weight) / total for weight in row]


def _window(rows: tuple[tuple[float, ...], ...]) -> int:
    """Return the shortest window of at least 1,000 in which all shares are integers, or the longest allowed."""
    shares = [share.limit_denominator(_LONGEST_WINDOW) for row in rows for share in _shares(row)]
    unit = lcm(*(share.denominator for share in shares))
    return unit * -(-_SHORTEST_WINDOW // unit) if unit <= _LONGEST_WINDOW else _LONGEST_WINDOW


def _counts(row: tuple[float, ...], window: int, *, refuses: bool) -> list[int] | None:
    """Return the offsets per component in a window: shares rounded down, the rest by largest remainder.

    A window that is too short for a weight is refused, or None is returned.
    """
    exact = [share * window for share in _shares(row)]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(row)), key=lambda j: (counts[j] - exact[j], j))
    for j in by_remainder[: window - sum(counts)]:
        counts[j] += 1
    for j, weight in enumerate(row):
        if weight and not counts[j]:
            if not refuses:
                return None
            least = ceil(window / exact[j])
            rule = f"must be 'any' or at least {least}, so that weights[{j}], {weight}, gets a position"
            raise setting_error("window", window, rule)
    return counts


def _pattern(counts: list[int], key: np.uint64, row: Sequence[float]) -> Pattern:
    components = np.repeat(np.arange(len(counts)), counts)
    nth = np.concatenate([np.arange(count) for count in counts])
    # Draw i of m is at a random place in the i-th of m equal shares: even, but not periodic in the number of ranks.
    offsets = (nth + uniform(key, np.arange(len(components)))) / np.repeat(counts, counts)
    order = np.argsort(offsets, kind="stable")
    return Pattern(components[order], nth[order], np.array(counts, np.int64), np.array(row))
