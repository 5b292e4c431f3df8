"""Several orders in stated proportions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, lcm
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from dataload._util.checks import check_choice
from dataload._util.randomness import check_seed, derive_key
from dataload.errors import ConfigError
from dataload.samplers._checks import MAX_LENGTH, check_count, check_lengths, check_sampler, records_of
from dataload.samplers._values import divide, split_by_group
from dataload.samplers.repeat import indices_without_end
from dataload.samplers.weighted import check_weights, uniform
from dataload.types import Int64Array, Sampler

__all__ = ["Mixture", "Stop"]

Stop: TypeAlias = Literal["first", "longest", "never"]
"""When an epoch of a mixture ends."""

_SHORTEST_WINDOW = 1000
_LONGEST_WINDOW = 10_000


class _Pattern(NamedTuple):
    """One window: which part stands where. An epoch repeats it.

    Attributes:
        parts: (window,) int64, number of the part at each place.
        nth: (window,) int64, how many places before it are the same part's.
        counts: (parts,) int64, places of each part.
    """

    parts: Int64Array
    nth: Int64Array
    counts: Int64Array

    def position(self, part: int, draw: int) -> int:
        """Position of a part's draw number `draw`, from 0."""
        window, nth = divmod(draw, int(self.counts[part]))
        return window * len(self.parts) + int(np.flatnonzero(self.parts == part)[nth])

    def draws(self, length: int) -> Int64Array:
        """(parts,) int64: how many of the first `length` positions are each part's."""
        windows, rest = divmod(length, len(self.parts))
        return windows * self.counts + np.bincount(self.parts[:rest], minlength=len(self.counts))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Draws from several orders, in exact proportions in every `window` positions, wherever these begin.

    For a `ConcatSource`: the indices of part j follow those of the parts before it. Within a window the draws of a part
    are spread evenly, each at a random place of its share; then the window repeats itself. A part that ends begins
    anew, with its next order.

    Attributes:
        samplers: The order of each part.
        weights: One number for each part; or a row of these for each epoch, of which the last stays.
        stop: An epoch ends before the `first` part would repeat itself, when the `longest` has been served whole
            (and so all are, at least once), or `never` (after 2^48 positions). With weights that differ by epoch, all
            epochs have the one length for which that is true of each.
        seed: Of the places in the window; any integer.
        window: Positions in which proportions are exact, up to rounding of weight * window to integers. None
            takes the shortest multiple of the weights' common denominator from 1,000 on, or 10,000.
        lengths: Records of each part of the `ConcatSource`; None takes what the samplers choose from, and is filled in.

    Raises:
        ConfigError: Samplers, weights and lengths differ in number; a weight is negative, or so small that the window
            has no place for it; a part with a weight is empty, or has less records than its sampler chooses from; an
            epoch would have more than 2^48 positions; or there is no such stop.
    """

    samplers: tuple[Sampler, ...]
    weights: tuple[float, ...] | tuple[tuple[float, ...], ...]
    stop: Stop = "first"
    seed: int = 0
    window: int | None = None
    lengths: tuple[int, ...] | None = None
    _patterns: tuple[_Pattern, ...] = field(init=False, repr=False, compare=False)  # one for each row of weights
    _length: int = field(init=False, repr=False, compare=False)
    _epochs: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of each part in one of the mixture
    _firsts: Int64Array = field(init=False, repr=False, compare=False)  # (parts,), the first index of each

    def __post_init__(self) -> None:
        self._check()
        rows = _rows(self.weights)
        window = _window(rows) if self.window is None else check_count("window", self.window, least=1)
        seed = check_seed(self.seed)
        patterns = tuple(
            _pattern(_counts(row, window), derive_key(seed, "mixture", i, words=1)) for i, row in enumerate(rows)
        )
        set_field = object.__setattr__
        set_field(self, "window", None if self.window is None else window)
        set_field(self, "seed", seed)
        set_field(self, "_patterns", patterns)
        set_field(self, "_length", self._measure())
        set_field(self, "_epochs", self._count_epochs())

    def _check(self) -> None:
        set_field = object.__setattr__
        try:
            set_field(self, "samplers", tuple(self.samplers))
        except TypeError:
            raise ConfigError(
                f"samplers must be one for each part, got {self.samplers!r}", key="samplers", value=self.samplers
            ) from None
        for i, sampler in enumerate(self.samplers):
            check_sampler(f"samplers[{i}]", sampler)
        set_field(self, "weights", _check_rows(self.weights, len(self.samplers)))
        lengths = tuple(map(records_of, self.samplers)) if self.lengths is None else self.lengths
        lengths = check_lengths("lengths", lengths)
        self._check_lengths(lengths)
        set_field(self, "lengths", lengths)
        set_field(self, "_firsts", np.cumsum([0, *lengths], dtype=np.int64))
        check_choice("stop", self.stop, get_args(Stop))

    def _check_lengths(self, lengths: tuple[int, ...]) -> None:
        if len(lengths) != len(self.samplers):
            raise ConfigError(
                f"lengths must be one for each of the {len(self.samplers)} samplers, got {len(lengths)}",
                key="lengths",
                value=lengths,
            )
        for i, (sampler, length) in enumerate(zip(self.samplers, lengths, strict=True)):
            # One that does not say its records may well repeat a few.
            records = getattr(sampler, "records", None) or 0
            if records > length:
                raise ConfigError(
                    f"lengths[{i}] must be at least {records}, what samplers[{i}] chooses from, got {length}",
                    key=f"lengths[{i}]",
                    value=length,
                )

    def _measure(self) -> int:
        """Positions per epoch."""
        ends: list[int] = []
        for pattern in self._patterns:
            used = [(j, len(sampler)) for j, sampler in enumerate(self.samplers) if pattern.counts[j]]
            for part, length in used:
                if not length:
                    raise ConfigError(
                        f"samplers[{part}] is empty: give it the weight 0", key=f"samplers[{part}]", value=length
                    )
            if self.stop == "first":
                ends.append(min(pattern.position(part, length) for part, length in used))
            else:
                ends.append(max(pattern.position(part, length - 1) + 1 for part, length in used))
        length = {"first": min(ends), "longest": max(ends), "never": MAX_LENGTH}[self.stop]
        if length > MAX_LENGTH:
            raise ConfigError(
                f"stop {self.stop!r} would make epochs of {length} positions, and {MAX_LENGTH} is the most",
                key="stop",
                value=self.stop,
            )
        return length

    def _count_epochs(self) -> tuple[int, ...]:
        """How many of its epochs each part goes through at most in one of the mixture, so that no two share one."""
        draws = np.max([pattern.draws(self._length) for pattern in self._patterns], axis=0).tolist()
        return tuple(-(-draw // max(1, len(sampler))) for draw, sampler in zip(draws, self.samplers, strict=True))

    def __len__(self) -> int:
        return self._length

    @property
    def records(self) -> int:
        """Indices are below this."""
        return int(self._firsts[-1])

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        pattern = self._patterns[min(epoch, len(self._patterns) - 1)]
        windows, places = divide(positions, len(pattern.parts))
        parts = pattern.parts[places]
        found = windows * pattern.counts[parts] + pattern.nth[places]  # numbers of the draws of each part
        for part, rows in split_by_group(parts):
            first_epoch = epoch * self._epochs[part]
            found[rows] = indices_without_end(self.samplers[part], found[rows], first_epoch=first_epoch)
        found += self._firsts[parts]
        return found


def _check_rows(weights: Any, parts: int) -> Any:
    """Weights as floats in tuples, nested as they were."""
    try:
        given = tuple(weights)
    except TypeError:
        given = ()
    # Checked as one row where they are no rows; so is what is neither.
    is_nested = bool(given) and all(
        isinstance(row, (Sequence, np.ndarray)) and not isinstance(row, str) for row in given
    )
    rows = tuple(tuple(check_weights(row).tolist()) for row in (given if is_nested else (given or weights,)))
    for row in rows:
        if len(row) != parts:
            raise ConfigError(
                f"weights must be one for each of the {parts} samplers, got {len(row)}: {row!r}",
                key="weights",
                value=row,
            )
    return rows if is_nested else rows[0]


def _rows(weights: Any) -> tuple[tuple[float, ...], ...]:
    return weights if isinstance(weights[0], tuple) else (weights,)


def _shares(row: tuple[float, ...]) -> list[Fraction]:
    total = sum(map(Fraction, row))
    return [Fraction(weight) / total for weight in row]


def _window(rows: tuple[tuple[float, ...], ...]) -> int:
    """The shortest window from 1,000 on that holds all shares as integers, or the longest."""
    shares = [share.limit_denominator(_LONGEST_WINDOW) for row in rows for share in _shares(row)]
    unit = lcm(*(share.denominator for share in shares))
    return unit * -(-_SHORTEST_WINDOW // unit) if unit <= _LONGEST_WINDOW else _LONGEST_WINDOW


def _counts(row: tuple[float, ...], window: int) -> list[int]:
    """Places of each part in a window: shares rounded down, the rest to the largest remainders."""
    exact = [share * window for share in _shares(row)]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(row)), key=lambda j: (counts[j] - exact[j], j))
    for j in by_remainder[: window - sum(counts)]:
        counts[j] += 1
    for j, weight in enumerate(row):
        if weight and not counts[j]:
            least = ceil(window / exact[j])
            raise ConfigError(
                f"window must be at least {least} for weights[{j}], {weight}, to have a place in it, got {window}",
                key="window",
                value=window,
            )
    return counts


def _pattern(counts: list[int], key: Any) -> _Pattern:
    parts = np.repeat(np.arange(len(counts)), counts)
    nth = np.concatenate([np.arange(count) for count in counts])
    # Draw i of m stands at a random place of the i-th of m equal shares: even, but in step with no number of ranks.
    places = (nth + uniform(key[0], np.arange(len(parts)))) / np.repeat(counts, counts)
    order = np.argsort(places, kind="stable")
    return _Pattern(parts[order], nth[order], np.array(counts, np.int64))
