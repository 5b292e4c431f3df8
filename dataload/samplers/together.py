"""The orders of many sources, evaluated together: a key and a length for each element. Pure (no I/O)."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dataload._util.caches import PerProcess
from dataload._util.randomness import KEY_WORDS, ROUNDS, SMALL, UInt64Array, derive_keys
from dataload.samplers.basic import GlobalShuffle, Sequential, indices_without_end
from dataload.samplers.common import BoolArray, divide, split_by_group
from dataload.storage.core import core
from dataload.types import Int64Array, Sampler


class Orders:
    """The orders of several components; each starts its next pass when it ends."""

    def __init__(self, samplers: Sequence[Sampler], before: Mapping[tuple[int, int], Sampler] | None = None) -> None:
        self.samplers: Sequence[Sampler] = samplers
        self.before: Mapping[tuple[int, int], Sampler] = before or {}
        """The order of components before they grew, by component and number of shards; see `Change.shards`."""
        self.lengths: Int64Array = np.array([*map(len, samplers)], np.int64)
        self._is_shuffled = np.array([type(each) is GlobalShuffle and each.parent is None for each in samplers])
        self._is_other = ~self._is_shuffled & np.array([type(each) is not Sequential for each in samplers])
        self._shuffles: PerProcess[_Shuffles] = PerProcess()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.samplers, self.before)

    def indices(self, components: Int64Array, draws: Int64Array, firsts: Int64Array) -> Int64Array:
        """Return what draws from components yield, given the number of each component's first pass; all (rows,)."""
        if self._is_shuffled.all():
            return self._shuffled(components, draws, firsts)
        if self._is_other.all():
            return self._one_by_one(components, draws, firsts)
        lengths = self.lengths[components]
        found = draws - (draws / lengths).astype(np.int64) * lengths  # exact, because draws are below 2^52
        for chosen, compute in ((self._is_shuffled, self._shuffled), (self._is_other, self._one_by_one)):
            if chosen.any():
                rows = np.flatnonzero(chosen[components])
                found[rows] = compute(components[rows], draws[rows], firsts)
        return found

    def _one_by_one(self, components: Int64Array, draws: Int64Array, firsts: Int64Array) -> Int64Array:
        found = np.empty_like(draws)
        for component, rows in split_by_group(components):
            found[rows] = indices_without_end(self.samplers[component], draws[rows], first_epoch=int(firsts[component]))
        return found

    def _shuffled(self, components: Int64Array, draws: Int64Array, firsts: Int64Array) -> Int64Array:
        return self._shuffles.get(lambda: _Shuffles(self.samplers, self._is_shuffled)).images(components, draws, firsts)


class Permutations(NamedTuple):
    """Permutations of several domains and keys, by number; see `permute`."""

    constants: UInt64Array  # (permutations, 2 * ROUNDS): in each round, what is added, and by what is multiplied
    images: npt.NDArray[np.int16]  # of each small domain
    ends: Int64Array  # (permutations,), n of each
    starts: Int64Array  # (permutations,), of the images

    @classmethod
    def of(cls, lengths: Int64Array) -> Self:
        """Return room for permutations of some lengths."""
        stops = np.cumsum(np.where(lengths <= SMALL, lengths, 0))
        constants = np.zeros((len(lengths), 2 * ROUNDS), np.uint64)
        return cls(constants, np.empty(int(stops[-1]), np.int16), lengths, np.append(0, stops[:-1]))

    def select(self, numbers: Int64Array, keys: UInt64Array) -> None:
        """Set permutations to those that keys select, (numbers, KEY_WORDS) uint64."""
        core().put_keys(*self, numbers, keys)

    def find(self, numbers: Int64Array, draws: Int64Array, firsts: Int64Array, passes: Int64Array) -> Int64Array:
        """Return the images of draws, (rows,), -1 where they are of another pass than the one in `passes`."""
        found = np.empty_like(draws)
        core().permute(*self, passes, firsts, numbers, draws, found)
        return found


class _Shuffles:
    """The permutations of the last pass of each component that was looked at."""

    def __init__(self, samplers: Sequence[Sampler], is_shuffled: BoolArray) -> None:
        self._seeds = [getattr(each, "seed", 0) for each in samplers]
        self._passes = np.full(len(samplers), -1)
        self._tables = Permutations.of(np.maximum(1, [*map(len, samplers)] * is_shuffled))
        self._lock = threading.Lock()

    def images(self, components: Int64Array, draws: Int64Array, firsts: Int64Array) -> Int64Array:
        """Return the images of draws from components; all (rows,)."""
        with self._lock:
            found = self._tables.find(components, draws, firsts, self._passes)
            late = np.flatnonzero(found < 0)
            if not late.size:
                return found
            components, draws, count = components[late], draws[late], len(self._passes)
            lengths = self._tables.ends[components]
            passes = (draws / lengths).astype(np.int64)
            least = int((passes + firsts[components]).min())
            pairs, numbers = _numbered((passes + firsts[components] - least) * count + components)
            later, which = divide(pairs, count)
            later += least
            keys = derive_keys([self._seeds[n] for n in which.tolist()], "shuffle", later.tolist(), KEY_WORDS)
            is_one = np.bincount(which).max() == 1
            if not is_one:  # a component is in several passes here: only the last one is kept
                tables, zeros = Permutations.of(self._tables.ends[which]), np.zeros(len(which), np.int64)
                tables.select(np.arange(len(which)), keys)
                found[late] = tables.find(numbers, draws - passes * lengths, zeros, zeros)
                lasts = len(which) - 1 - np.unique(which[::-1], return_index=True)[1]
                which, keys, later = which[lasts], keys[lasts], later[lasts]
            self._passes[which] = -1  # until both are set: Ctrl-C may come in between
            self._tables.select(which, keys)
            self._passes[which] = later
            if is_one:
                found[late] = self._tables.find(components, draws, firsts, self._passes)
            return found


def _numbered(values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distinct values of 0 or more, ascending, and the number of each among them: `np.unique`, faster."""
    span = int(values.max()) + 1
    if span > 8 * len(values):
        return np.unique(values, return_inverse=True)
    seen = np.zeros(span, np.bool_)
    seen[values] = True
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[values]
