"""Several orders mixed in fixed proportions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, lcm
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from dataload._util.checks import as_tuple, check_choice, check_count, setting_error
from dataload._util.randomness import check_seed, derive_key
from dataload.errors import ConfigError
from dataload.samplers._common import check_lengths, check_sampler, divide, records_of, set_fields, split_by_group
from dataload.samplers.basic import indices_without_end
from dataload.samplers.permutation import MAX_LENGTH
from dataload.samplers.weighted import check_weights, uniform
from dataload.types import Int64Array, Sampler

Stop: TypeAlias = Literal["first", "longest", "never"]
"""When an epoch of a mixture ends."""

_SHORTEST_WINDOW = 1000
_LONGEST_WINDOW = 10_000


class _Pattern(NamedTuple):
    """The parts in one window, which an epoch repeats."""

    parts: Int64Array  # (window,), part at each offset
    nth: Int64Array  # (window,), number of earlier offsets with the same part
    counts: Int64Array  # (parts,), offsets per part

    def position(self, part: int, draw: int) -> int:
        """Return the position of a part's draw number `draw`, counted from 0."""
        window, nth = divmod(draw, int(self.counts[part]))
        return window * len(self.parts) + int(np.flatnonzero(self.parts == part)[nth])

    def draws(self, length: int) -> Int64Array:
        """Return the number of draws from each part in the first `length` positions, (parts,) int64."""
        windows, rest = divmod(length, len(self.parts))
        return windows * self.counts + np.bincount(self.parts[:rest], minlength=len(self.counts))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several orders mixed in proportions that are exact in any `window` consecutive positions.

    Use it with a `ConcatSource`: the indices of part j follow those of the parts before it. Within a window, the draws
    from a part are spread evenly, each at a random offset in its share (low discrepancy rather than coin flips); then
    the window repeats. A part that ends starts its next epoch.

    Attributes:
        samplers: The order of each part.
        weights: One weight per part, or one row of weights per epoch; later epochs use the last row.
        stop: When an epoch ends: before the ``"first"`` part to run out would repeat, once the ``"longest"`` part has
            been served completely, or ``"never"`` (after 2^48 positions). If weights differ between epochs, all epochs
            share one length that satisfies this in each.
        seed: Seed of the offsets in the window, any integer.
        window: Number of positions in which the proportions are exact, up to rounding of weight * window to integers.
            None uses the smallest multiple of the weights' common denominator that is at least 1,000, or 10,000 if
            that denominator is too large.
        lengths: Records of each part of the `ConcatSource`. None uses the number of records each sampler chooses from.

    Raises:
        ConfigError: The numbers of samplers, weights and lengths differ; a weight is negative, or too small for the
            window; a part with a positive weight is empty, or has fewer records than its sampler chooses from; an
            epoch would have more than 2^48 positions; or `stop` is unknown.
    """

    samplers: tuple[Sampler, ...]
    weights: tuple[float, ...] | tuple[tuple[float, ...], ...]
    stop: Stop = "first"
    seed: int = 0
    window: int | None = None
    lengths: tuple[int, ...] | None = None
    _patterns: tuple[_Pattern, ...] = field(init=False, repr=False, compare=False)  # one per row of weights
    _length: int = field(init=False, repr=False, compare=False)
    # Epochs of each part in one epoch of the mixture, so that no two of these share a part's epoch.
    _epochs: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _firsts: Int64Array = field(init=False, repr=False, compare=False)  # (parts + 1,), first index of each part

    def __post_init__(self) -> None:
        self._check()
        weights: Any = self.weights
        rows = weights if isinstance(weights[0], tuple) else (weights,)
        window = _window(rows) if self.window is None else check_count("window", self.window, least=1)
        seed = check_seed(self.seed)
        keys = [derive_key(seed, "mixture", i, words=1) for i in range(len(rows))]
        patterns = tuple(_pattern(_counts(row, window), key) for row, key in zip(rows, keys, strict=True))
        set_fields(self, window=None if self.window is None else window, seed=seed, _patterns=patterns)
        set_fields(self, _length=self._measure())
        draws = np.max([pattern.draws(self._length) for pattern in patterns], axis=0).tolist()
        epochs = tuple(-(-draw // max(1, len(sampler))) for draw, sampler in zip(draws, self.samplers, strict=True))
        set_fields(self, _epochs=epochs)

    def _check(self) -> None:
        samplers = as_tuple(self.samplers)
        for i, sampler in enumerate(samplers):
            check_sampler(f"samplers[{i}]", sampler)
        if not samplers:
            raise setting_error("samplers", self.samplers, "must hold one sampler per part")
        weights = _check_rows(self.weights, len(samplers))
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
        check_choice("stop", self.stop, get_args(Stop))

    def _measure(self) -> int:
        """Return the number of positions per epoch."""
        ends: list[int] = []
        for pattern in self._patterns:
            used = [(j, len(sampler)) for j, sampler in enumerate(self.samplers) if pattern.counts[j]]
            for part, length in used:
                if not length:
                    key = f"samplers[{part}]"
                    raise ConfigError(f"{key} is empty: set its weight to 0", key=key, value=length)
            if self.stop == "first":
                ends.append(min(pattern.position(part, length) for part, length in used))
            else:
                ends.append(max(pattern.position(part, length - 1) + 1 for part, length in used))
        length = {"first": min(ends), "longest": max(ends), "never": MAX_LENGTH}[self.stop]
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

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        pattern = self._patterns[min(epoch, len(self._patterns) - 1)]
        windows, offsets = divide(positions, len(pattern.parts))
        parts = pattern.parts[offsets]
        found = windows * pattern.counts[parts] + pattern.nth[offsets]  # draw numbers, per part
        for part, rows in split_by_group(parts):
            first_epoch = epoch * self._epochs[part]
            found[rows] = indices_without_end(self.samplers[part], found[rows], first_epoch=first_epoch)
        found += self._firsts[parts]
        return found


def _check_rows(weights: Any, parts: int) -> Any:
    """Return weights as floats in tuples, with the nesting they were given in."""
    given = as_tuple(weights)
    # Anything that is not a row of rows is checked as a single row.
    is_row = [isinstance(row, (Sequence, np.ndarray)) and not isinstance(row, str) for row in given]
    is_nested = bool(given) and all(is_row)
    rows = tuple(tuple(check_weights(row).tolist()) for row in (given if is_nested else (given or weights,)))
    for row in rows:
        if len(row) != parts:
            raise setting_error("weights", row, f"must hold one weight for each of the {parts} samplers")
    return rows if is_nested else rows[0]


def _shares(row: tuple[float, ...]) -> list[Fraction]:
    total = sum(map(Fraction, row))
    return [Fraction(weight) / total for weight in row]


def _window(rows: tuple[tuple[float, ...], ...]) -> int:
    """Return the shortest window of at least 1,000 in which all shares are integers, or the longest allowed."""
    shares = [share.limit_denominator(_LONGEST_WINDOW) for row in rows for share in _shares(row)]
    unit = lcm(*(share.denominator for share in shares))
    return unit * -(-_SHORTEST_WINDOW // unit) if unit <= _LONGEST_WINDOW else _LONGEST_WINDOW


def _counts(row: tuple[float, ...], window: int) -> list[int]:
    """Return the offsets per part in a window: shares rounded down, the rest by largest remainder."""
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


def _pattern(counts: list[int], key: Any) -> _Pattern:
    parts = np.repeat(np.arange(len(counts)), counts)
    nth = np.concatenate([np.arange(count) for count in counts])
    # Draw i of m is at a random place in the i-th of m equal shares: even, but not periodic in the number of ranks.
    offsets = (nth + uniform(key[0], np.arange(len(parts)))) / np.repeat(counts, counts)
    order = np.argsort(offsets, kind="stable")
    return _Pattern(parts[order], nth[order], np.array(counts, np.int64))
