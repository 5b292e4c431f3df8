"""The orders of many sources, evaluated together: a key and a length for each element. Pure (no I/O)."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dataload._util.caches import PerProcess
from dataload._util.randomness import UInt64Array, derive_keys, hash64
from dataload.samplers.basic import GlobalShuffle, Sequential, indices_without_end
from dataload.samplers.common import FEW, KEY_WORDS, ROUNDS, SMALL, divide, rounds, split_by_group, walk
from dataload.types import Int64Array, Sampler

_LONG = 1 << 16
_PLACES = 1 << 14  # that are sorted together: their arrays stay in the CPU's cache


class Orders:
    """The orders of several components; each starts its next pass when it ends."""

    def __init__(self, samplers: Sequence[Sampler], before: Mapping[tuple[int, int], Sampler] | None = None) -> None:
        self.samplers: Sequence[Sampler] = samplers
        self.before: Mapping[tuple[int, int], Sampler] = before or {}
        """The order of components before they grew, by component and number of shards; see `Change.shards`."""
        self.lengths: Int64Array = np.array([*map(len, samplers)], np.int64)
        self._is_shuffled = np.array([type(each) is GlobalShuffle and each.parent is None for each in samplers])
        if len(samplers) <= FEW:  # a few long ones are faster one by one
            self._is_shuffled &= self.lengths < _LONG
        self._is_other = ~self._is_shuffled & np.array([type(each) is not Sequential for each in samplers])
        self._shuffles: PerProcess[_Shuffles] = PerProcess()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.samplers, self.before)

    def indices(self, components: Int64Array, draws: Int64Array, firsts: Int64Array) -> Int64Array:
        """Return what draws from components yield, given the number of each component's first pass; all (rows,)."""
        if self._is_other.all():
            return self._one_by_one(components, draws, firsts)
        lengths = self.lengths[components]
        passes = (draws / lengths).astype(np.int64)  # exact, because draws are below 2^52
        found = draws - passes * lengths
        if self._is_shuffled.all():
            return self._shuffled(components, found, passes + firsts[components])
        if self._is_shuffled.any():
            rows = np.flatnonzero(self._is_shuffled[components])
            shuffled = components[rows]
            found[rows] = self._shuffled(shuffled, found[rows], passes[rows] + firsts[shuffled])
        if self._is_other.any():
            rows = np.flatnonzero(self._is_other[components])
            found[rows] = self._one_by_one(components[rows], draws[rows], firsts)
        return found

    def _one_by_one(self, components: Int64Array, draws: Int64Array, firsts: Int64Array) -> Int64Array:
        found = np.empty_like(draws)
        for component, rows in split_by_group(components):
            found[rows] = indices_without_end(self.samplers[component], draws[rows], first_epoch=int(firsts[component]))
        return found

    def _shuffled(self, components: Int64Array, positions: Int64Array, passes: Int64Array) -> Int64Array:
        return self._shuffles.get(lambda: _Shuffles(self)).images(components, positions, passes)

    def permutations(self, components: Int64Array) -> "Permutations":
        """Return room for permutations of shuffled components."""
        return Permutations.of(np.where(self._is_shuffled, np.maximum(1, self.lengths), 1)[components])


class Permutations(NamedTuple):
    """Permutations of several domains and keys, by number; see `permute`."""

    ends: npt.NDArray[Any]  # (permutations,), n of each
    masks: npt.NDArray[Any]
    shifts: list[npt.NDArray[Any]]  # of even and odd rounds
    constants: npt.NDArray[Any]  # (rounds, 2, permutations): what is added, and by what is multiplied
    starts: Int64Array  # of the images
    widths: Int64Array  # of the images: few different ones, so at least the lengths; 0 for large domains
    images: npt.NDArray[np.int16]  # of each small domain

    @classmethod
    def of(cls, lengths: Int64Array) -> Self:
        """Return room for permutations of some lengths."""
        bits = np.maximum(1, np.frexp(lengths - 1.0)[1].astype(np.int64))
        kind: Any = np.uint32 if lengths.max() < 2**32 else np.uint64
        masks = ((1 << bits) - 1).astype(kind)
        shifts = [((bits + 1) // 2 + odd).astype(kind) for odd in (0, 1)]
        last = np.maximum(bits - 3, 0)  # the first three bits, rounded up
        widths = np.where(lengths <= SMALL, -(-lengths >> last) << last, 0)
        stops = np.cumsum(widths)
        constants, images = np.zeros((ROUNDS, 2, len(lengths)), kind), np.empty(int(stops[-1]), np.int16)
        return cls(lengths.astype(kind), masks, shifts, constants, stops - widths, widths, images)

    def select(self, numbers: Int64Array, keys: UInt64Array) -> None:
        """Make permutations those that keys select, (numbers, KEY_WORDS) uint64."""
        ends = self.ends[numbers].astype(np.int64)
        is_small = ends <= SMALL
        if not is_small.all():
            each = np.broadcast_to(np.arange(2 * ROUNDS), (len(keys), 2 * ROUNDS))
            words = hash64(keys[:, 1:], hash64(keys[:, :1], each)).astype(self.masks.dtype).T & self.masks[numbers]
            words[1::2] |= self.masks.dtype.type(1)
            self.constants[:, :, numbers] = words.reshape(ROUNDS, 2, -1)
        numbers, keys = numbers[is_small], keys[is_small]
        for width, group in split_by_group(self.widths[numbers]):
            for rows in np.array_split(group, -(-len(group) * width // _PLACES)):
                places = np.broadcast_to(np.arange(width), (len(rows), width))
                hashed = hash64(keys[rows, 1:], hash64(keys[rows, :1], places))
                is_past = places >= ends[is_small][rows, None]
                np.putmask(hashed, is_past, np.uint64(2**64 - 1))  # so that these come last
                self.images[self.starts[numbers[rows], None] + places] = hashed.argsort()

    def find(self, numbers: Int64Array, positions: Int64Array) -> Int64Array:
        """Return the images of positions, each under the permutation of its number; all (rows,)."""
        ends = self.ends[numbers]
        is_small = ends <= SMALL
        if is_small.all():
            return self.images[self.starts[numbers] + positions].astype(np.int64)
        if is_small.any():
            found = np.empty_like(positions)
            for rows in (np.flatnonzero(is_small), np.flatnonzero(~is_small)):
                found[rows] = self.find(numbers[rows], positions[rows])
            return found
        values = rounds(positions.astype(ends.dtype), self._constants(numbers))
        walking = np.flatnonzero(values >= ends)
        while walking.size > FEW:
            again = rounds(values[walking], self._constants(numbers[walking]))
            values[walking] = again
            walking = walking[again >= ends[walking]]
        for at in walking.tolist():
            values[at : at + 1] = walk([int(values[at])], int(ends[at]), [*self._constants(numbers[at])])
        return values.astype(np.int64)

    def _constants(self, numbers: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield the rounds' keys, for `rounds`."""
        mask, *shifts = (each.take(numbers, mode="wrap") for each in (self.masks, *self.shifts))  # a third faster
        for i, (add, multiply) in enumerate(self.constants):
            yield add.take(numbers, mode="wrap"), multiply.take(numbers, mode="wrap"), mask, shifts[i % 2]


class _Shuffles:
    """The permutations of the last pass of each component that was looked at."""

    def __init__(self, orders: Orders) -> None:
        count = len(orders.lengths)
        self._orders = orders
        self._seeds = [getattr(each, "seed", 0) for each in orders.samplers]
        self._passes = np.full(count, -1)
        self._tables = orders.permutations(np.arange(count))
        self._lock = threading.Lock()

    def images(self, components: Int64Array, positions: Int64Array, passes: Int64Array) -> Int64Array:
        """Return the images of positions, each in a pass of its component; all (rows,)."""
        with self._lock:
            is_late = self._passes[components] != passes
            if not is_late.any():
                return self._tables.find(components, positions)
            late, count = np.flatnonzero(is_late), len(self._passes)
            least = int(passes[late].min())
            pairs, numbers = _numbered((passes[late] - least) * count + components[late])
            later, which = divide(pairs, count)
            keys = derive_keys([self._seeds[n] for n in which.tolist()], "shuffle", (later + least).tolist(), KEY_WORDS)
            if later[0] == later[-1]:  # one pass of each component, at least of these
                now = self._passes.copy()
                now[which] = later + least
                if (now[components] == passes).all():
                    self._tables.select(which, keys)
                    self._passes = now
                    return self._tables.find(components, positions)
            rows, found = np.flatnonzero(~is_late), np.empty_like(positions)
            found[rows] = self._tables.find(components[rows], positions[rows])
            tables = self._orders.permutations(which)
            tables.select(np.arange(len(which)), keys)
            found[late] = tables.find(numbers, positions[late])
            lasts = len(which) - 1 - np.unique(which[::-1], return_index=True)[1]
            self._tables.select(which[lasts], keys[lasts])
            self._passes[which[lasts]] = later[lasts] + least
            return found


def _numbered(values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distinct values of 0 or more, ascending, and the number of each among them: `np.unique`, faster."""
    span = int(values.max()) + 1
    if span > 8 * len(values):
        return np.unique(values, return_inverse=True)
    seen = np.zeros(span, np.bool_)
    seen[values] = True
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[values]
