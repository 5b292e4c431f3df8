"""The rule of mixtures for any weights and limits: counts at any position follow from the position alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataload._util.caches import Memo
from dataload._util.randomness import derive_word, hash64
from dataload.samplers.common import BoolArray, Float64Array, split_by_group
from dataload.samplers.weighted import scaled, uniform
from dataload.types import Int64Array

_BLOCK_BITS = 14
_BLOCK = 1 << _BLOCK_BITS
_NEAR, _MANY = 128, 1 / 64  # a component with fewer of the turns may end inside of a block so near to its start
MOST_POSITIONS = 1 << 52
"""Positions that quotas can count: their doubles are exact below."""


class Quotas:
    """The rule for any weights: in blocks, at whose ends each component has had its share of all positions, rounded.

    A tree of components divides the turns of a node: of the first n, its lighter child gets ``floor(n * share +
    phase)``, the other one the rest. So every component is within a few turns of its share for ever, and the end of any
    block is known without the blocks before it. Within a block, each component's turns are spread as in a window.

    A component may have a limit of draws. When it is used up, the others have its turns, in proportion to their
    weights: the share of a node's child changes after as many turns of the node as all of its components have had by
    then.
    """

    def __init__(self, row: Sequence[float], seed: int, *address: int | str, limits: Int64Array | None = None) -> None:
        self.row: Float64Array = np.array(row)
        self._address, self._limits = (seed, *address), limits
        weights = scaled(self.row)
        used = np.flatnonzero(self.row)
        weights = np.maximum(weights[used], np.finfo(np.float64).tiny)
        order = np.argsort(weights, kind="stable")
        self._components = used[order]  # from light to heavy
        ends = np.concatenate([[0.0], np.cumsum(weights[order])])
        # The heavy components are spread first, so that they do not depend on how evenly many light ones are.
        self._classes = [int(n) for n in np.searchsorted(np.diff(ends) / ends[-1], (1 / 256, 1 / 16))]
        self._key = derive_word(seed, "mixture quotas 1", *address)
        most = np.full(len(used), MOST_POSITIONS) if limits is None else limits[self._components]
        self.length: int = min(MOST_POSITIONS, sum(most.tolist()))
        """Positions until all limits are reached."""
        phases = uniform(derive_word(seed, "mixture phases 1", *address), np.arange(len(used)))
        limited = _Limits.of(weights[order], most)
        self._levels = _levels(ends, phases, limited)
        self._cuts: Int64Array = _cuts(limited, ends[-1], self._levels[0].keys.imag[1:] if self._levels else ends[:0])
        self._cut_blocks: Int64Array = (self._cuts >> _BLOCK_BITS) + np.arange(1, len(self._cuts) + 1)
        self._counted: Memo[Int64Array] = Memo()
        self._blocks: Memo[tuple[Int64Array, Int64Array]] = Memo()

    def __reduce__(self) -> tuple[Any, ...]:
        # The tables would take 90 bytes a component, and 600 with limits.
        return partial(type(self), limits=self._limits), (self.row, *self._address)

    def draws(self, length: int) -> Int64Array:
        """Return the number of draws from each component in the first `length` positions, (components,) int64."""
        length = min(length, self.length)
        block = (length >> _BLOCK_BITS) + int(np.searchsorted(self._cuts, length, side="right"))
        rest = length - self._start(block)
        found = np.zeros(len(self.row), np.int64)
        found[self._components] = self._counts(block)
        if rest:
            found += np.bincount(self._block(block)[0][:rest], minlength=len(found))
        return found

    def turns(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the component at each position, and the number of earlier positions with the same component."""
        blocks = positions >> _BLOCK_BITS
        if len(self._cuts):
            blocks += np.searchsorted(self._cuts, positions, side="right")
        least = int(blocks.min(initial=MOST_POSITIONS))
        if least == blocks.max(initial=0):  # often
            among, counted = self._block(least)
            offsets = positions - self._start(least)
            return among[offsets], counted[offsets]
        components, draws = np.empty_like(positions), np.empty_like(positions)
        for block, rows in split_by_group(blocks - least):
            among, counted = self._block(block + least)
            offsets = positions[rows] - self._start(block + least)
            components[rows], draws[rows] = among[offsets], counted[offsets]
        return components, draws

    def _start(self, block: int) -> int:
        """Return the first position of a block; blocks are cut where components are used up."""
        before = int(np.searchsorted(self._cut_blocks, block, side="right"))
        is_cut = before and self._cut_blocks[before - 1] == block
        return int(self._cuts[before - 1]) if is_cut else (block - before) << _BLOCK_BITS

    def _counts(self, block: int) -> Int64Array:
        """Return the draws before a block, by component from light to heavy."""
        found = self._counted.recall(block)
        if found is None:
            counts = np.zeros(len(self._components))
            counts[0] = min(self._start(block), self.length)
            for level in self._levels:
                whole = counts[level.begins]
                light = level.split(whole)
                counts[level.begins], counts[level.middles] = light, whole - light
            found = self._counted.keep(block, counts.astype(np.int64))
        return found

    def _block(self, block: int) -> tuple[Int64Array, Int64Array]:
        """Return the component at each position of a block, and its draw there."""
        if (found := self._blocks.recall(block)) is not None:
            return found
        before, after = self._counts(block), self._counts(block + 1)
        counts = after - before
        ends = np.concatenate([[0], np.cumsum(counts)])
        places, firsts = np.arange(int(ends[-1])), ends[:-1]
        key, inner = hash64(self._key, np.array([2 * block, 2 * block + 1]))
        offsets = (places - np.repeat(firsts, counts) + uniform(key, places)) / np.repeat(counts, counts)
        order, jitter = places[:0], uniform(inner, places[: ends[self._classes[-1]]])
        for stop in (*ends[self._classes].tolist(), len(places)):
            count = len(order)
            if stop > count:  # what is spread already keeps its order; a radix sort of 16 bits is the fastest
                own = (places[:count] + jitter[:count]) / max(1, count)
                both = (np.concatenate([own, offsets[count:stop]]) * 65_535).astype(np.uint16)
                order = np.concatenate([order, places[count:stop]])[both.argsort(kind="stable")]
        draws = np.repeat(before - firsts, counts) + places
        return self._blocks.keep(block, (np.repeat(self._components, counts)[order], draws[order]))


class _Limits(NamedTuple):
    """The limited components, in the order in which they are used up."""

    leaves: Int64Array  # (limited,), numbers among all components from light to heavy
    draws: Int64Array  # (limited,)
    weights: Float64Array  # (limited,)
    times: Float64Array  # (limited,), draws per weight

    @classmethod
    def of(cls, weights: Float64Array, draws: Int64Array) -> _Limits:
        leaves = np.flatnonzero(draws < MOST_POSITIONS)
        times = draws[leaves] / weights[leaves]
        order = np.argsort(times, kind="stable")
        leaves = leaves[order]
        return cls(leaves, draws[leaves], weights[leaves], times[order])


def _cuts(limited: _Limits, whole: float, starts: Float64Array) -> Int64Array:
    """Return the positions, of those at which components are used up, at which a block ends, (cuts,), rising."""
    shares = limited.weights / np.maximum(whole - np.cumsum(limited.weights) + limited.weights, limited.weights)
    found, last = [0], 0
    for start, share in zip(starts.astype(np.int64).tolist(), shares.tolist(), strict=False):
        if start > last and start % _BLOCK and (start >= last + _NEAR or share >= _MANY):
            found.append(last := start)
    return np.array(found[1:], np.int64)


class _Level(NamedTuple):
    """The nodes of one level of a tree of components, and their tables, a row for each change of the shares."""

    begins: Int64Array  # (nodes,), first leaf
    middles: Int64Array  # (nodes,), first leaf of the heavier child
    stops: Int64Array  # (nodes,), after the last leaf
    phases: Float64Array  # (nodes,)
    rows: Int64Array  # (nodes + 1,), first row of each node
    keys: npt.NDArray[np.complex128]  # (rows,), node + turns of the node before the row * i, which order so, too
    lights: Float64Array  # (rows,), turns of the lighter child before the row
    shares: Float64Array  # (rows,), of the child that has at most half of the turns
    swaps: BoolArray  # (rows,), whether that is the heavier child

    def split(self, turns: Float64Array) -> Float64Array:
        """Return the turns of the lighter child of each node among the first turns of the node, both (nodes,)."""
        if len(self.keys) == len(self.begins):
            return np.floor(turns * self.shares + self.phases)
        row = np.searchsorted(self.keys, np.arange(len(turns)) + 1j * turns, side="right") - 1
        more = turns - self.keys.imag[row]
        part = np.floor(more * self.shares[row] + self.phases)
        return self.lights[row] + np.where(self.swaps[row], more - part, part)


def _levels(ends: Float64Array, phases: Float64Array, limits: _Limits) -> list[_Level]:
    """Return a tree over weights, whose sums are `ends`, by levels."""
    levels: list[_Level] = []
    begins, stops = np.array([0]), np.array([len(ends) - 1])
    while (is_node := stops - begins > 1).any():
        begins, stops = begins[is_node], stops[is_node]
        middles = np.searchsorted(ends, (ends[begins] + ends[stops]) / 2, side="right") - 1
        middles = np.clip(middles, begins + 1, stops - 1)
        tables = _tables(begins, middles, stops, ends, limits)
        levels.append(_Level(begins, middles, stops, phases[middles], *tables))
        begins, stops = np.concatenate([begins, middles]), np.concatenate([middles, stops])
    return levels


def _tables(
    begins: Int64Array, middles: Int64Array, stops: Int64Array, ends: Float64Array, limits: _Limits
) -> tuple[Int64Array, npt.NDArray[np.complex128], Float64Array, Float64Array, BoolArray]:
    """Return the tables of nodes, see `_Level`: a first row, and one from where each limited component is used up."""
    order = np.argsort(begins)
    node = order[np.maximum(0, np.searchsorted(begins[order], limits.leaves, side="right") - 1)]
    inside = np.flatnonzero((begins[node] <= limits.leaves) & (limits.leaves < stops[node]))
    inside = inside[np.argsort(node[inside], kind="stable")]  # by node, then by time
    node = node[inside]
    leaves, draws, weights, times = (each[inside] for each in limits)
    firsts = np.searchsorted(node, np.arange(len(begins) + 1))

    def left(is_child: BoolArray, begins: Int64Array, stops: Int64Array) -> tuple[Float64Array, Float64Array]:
        """Return the turns of a child of each node until each component is used up, and its weight from then on."""

        def sums(values: Any) -> Any:
            summed = np.concatenate([[0], np.cumsum(np.where(is_child, values, 0))])
            return summed[1:] - summed[firsts[node]]

        is_open = sums(1) < (stops - begins)[node]
        rest = is_open * np.maximum(0, (ends[stops] - ends[begins])[node] - sums(weights))
        turns = np.rint(sums(draws) + times * rest)
        return turns[np.lexsort((turns, node))], rest  # equal times may be out of order by rounding

    at, rows = firsts[:-1], firsts + np.arange(len(begins) + 1)
    light, light_rest = left(leaves < middles[node], begins, middles)
    heavy, heavy_rest = left(leaves >= middles[node], middles, stops)
    lights, starts = np.insert(light, at, 0), np.insert(light + heavy, at, 0)
    rest = np.insert(light_rest + heavy_rest, at, ends[stops] - ends[begins])
    shares = np.insert(light_rest, at, ends[middles] - ends[begins]) / np.where(rest > 0, rest, 1)
    is_last = np.zeros(len(starts), np.bool_)
    is_last[rows[1:] - 1] = True
    between = np.flatnonzero(~is_last)
    shares[between] = (lights[between + 1] - lights[between]) / np.maximum(1, starts[between + 1] - starts[between])
    swaps = shares > 0.5 + 1e-9  # without limits, the lighter child has at most half
    keys = np.repeat(np.arange(len(begins)), np.diff(rows)) + 1j * starts
    return rows, keys, lights, np.minimum(np.where(swaps, 1 - shares, shares), 0.5), swaps
