"""Records drawn at random by weight."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from dataload._util.caches import Memo
from dataload._util.randomness import derive_word, hash64
from dataload._util.settings import Least, check_settings, setting_error
from dataload.errors import ConfigError
from dataload.samplers.common import ArrayValue, Float64Array, Length, PerRecord, set_fields
from dataload.types import Int64Array

_LINEAR_STEPS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Weighted(ArrayValue, PerRecord):
    """Records drawn at random, each with a probability proportional to its weight.

    With replacement, every position is an independent draw. Without, a drawn record is not drawn again in that epoch
    (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006), so heavy records tend to come early;
    the first batch of an epoch computes the epoch's order, 8 bytes per record.

    Attributes:
        weights: Weight of each record, (records,), in index order: 0 or more, not all zero, on any scale. Stored as
            float64.
        num_samples: Number of draws per epoch.
        seed: Seed of the draws, any integer.
        replacement: Whether a record may be drawn more than once per epoch.

    Raises:
        ConfigError: A weight is negative or not finite, all weights are zero, or `num_samples` is out of its range or,
            without replacement, larger than the number of records with a positive weight.
    """

    weights: Sequence[Annotated[float, Least(0)]] | Float64Array
    num_samples: Length
    seed: int
    replacement: bool = True
    _ends: Float64Array = field(init=False, repr=False, compare=False)
    _starts: Memo[Int64Array] = field(default_factory=Memo, init=False, repr=False, compare=False)
    _orders: Memo[Int64Array] = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weights = check_weights(self.weights)
        weights.setflags(write=False)
        check_settings(self)
        set_fields(self, weights=weights, _ends=np.cumsum(scaled(weights)))
        possible = int(np.count_nonzero(weights))
        if not self.replacement and self.num_samples > possible:
            rule = f"must be at most {possible}, the records with a positive weight, if drawn without replacement"
            raise setting_error("num_samples", self.num_samples, rule)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return len(self.weights)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        if not self.replacement:
            order = self._orders.recall(epoch)
            return (self._orders.keep(epoch, self._order(epoch)) if order is None else order)[positions]
        return self._find(uniform(derive_word(self.seed, "weighted", epoch), positions))

    def _find(self, shares: Float64Array) -> Int64Array:
        """Return the records at these shares of the sum of all weights."""
        # Equal to ``np.searchsorted(ends, drawn, side="right")``, which misses the cache at every step of every search
        # if there are millions of weights. A table holds the first record of each of as many equal parts of the sum;
        # the record searched for is one or two further on (Chen and Asau, 1974).
        ends = self._ends
        drawn = shares * ends[-1]  # below the sum: shares end at 1 - 2^-53, so no product rounds up to it
        starts = self._starts.recall(None)
        if starts is None:
            # A power of two, so that shares are divided exactly and no start lies after the drawn value.
            parts = 1 << (len(ends) - 1).bit_length()
            edges = np.arange(parts) / parts * ends[-1]
            starts = self._starts.keep(None, np.searchsorted(ends, edges, side="right"))
        found = starts[(shares * len(starts)).astype(np.int64)]
        rows = np.flatnonzero(ends[found] <= drawn)
        for _ in range(_LINEAR_STEPS):
            if not rows.size:
                return found
            found[rows] += 1
            rows = rows[ends[found[rows]] <= drawn[rows]]
        found[rows] = np.searchsorted(ends, drawn[rows], side="right")  # a part with many light records
        return found

    def _order(self, epoch: int) -> Int64Array:
        records = np.flatnonzero(self.weights)
        key = derive_word(self.seed, "weighted-urn", epoch)
        # Exponential waiting times with the weight as rate: the shortest wait is drawn first.
        with np.errstate(over="ignore", divide="ignore"):  # a weight 300 digits below another waits forever
            waits = -_log(uniform(key, records)) / scaled(np.asarray(self.weights))[records]
        return records[np.argsort(waits, kind="stable")[: self.num_samples]]


def check_weights(weights: object) -> Float64Array:
    """Return `weights` as a new float64 array; raise ConfigError unless they are finite, 0 or more, and not all 0."""
    try:
        given = np.asarray(weights)
        checked = given.astype(np.float64) if given.dtype.kind in "biufO" else np.empty(0)
    except (TypeError, ValueError, OverflowError):
        checked = np.empty(0)
    if checked.ndim != 1 or not checked.size:
        raise setting_error("weights", weights, "must be a list of one or more numbers")
    wrong = np.flatnonzero(~((checked >= 0) & np.isfinite(checked)))
    if wrong.size:
        value = checked[wrong[0]].item()
        raise ConfigError(
            f"weights must be finite and not negative, got {value!r} at position {wrong[0]}", key="weights", value=value
        )
    if not checked.any():
        raise ConfigError("weights must not all be zero", key="weights", value=weights)
    return checked


def scaled(weights: Float64Array) -> Float64Array:
    """Scale weights by a power of two so that the largest is in [0.5, 1): exact, and no sum overflows."""
    return np.ldexp(weights, -int(np.frexp(weights.max())[1]))


def uniform(key: np.uint64, values: Int64Array) -> Float64Array:
    """Return a number in (0, 1) per value: 52 bits of its hash plus half a unit, so that none is 0 or 1."""
    return ((hash64(key, values) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _log(values: Float64Array) -> Float64Array:
    """Return the natural logarithm of numbers in (0, 1), with a relative error of 5e-16."""
    # The last bit of np.log differs between processors, and one bit may swap two records. This uses only operations
    # that IEEE 754 rounds exactly: log(m 2^k) = k log 2 + 2 artanh((m - 1) / (m + 1)), by its series.
    mantissa, exponent = np.frexp(values)
    small = mantissa < np.sqrt(0.5)
    mantissa = np.where(small, mantissa * 2, mantissa)
    ratio = (mantissa - 1) / (mantissa + 1)  # within 0.172
    square = ratio * ratio
    series = np.full_like(ratio, 1 / 21)
    for odd in range(19, 0, -2):
        series = series * square + 1 / odd
    return (exponent - small) * 0.6931471805599453 + 2 * ratio * series
