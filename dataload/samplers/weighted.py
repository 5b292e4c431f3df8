"""Records drawn by weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dataload._util.memo import Memo
from dataload._util.randomness import check_seed, derive_key, hash64
from dataload.errors import ConfigError
from dataload.samplers._checks import MAX_LENGTH, check_count
from dataload.samplers._values import ArrayValue
from dataload.types import Int64Array

__all__ = ["Weighted"]

Float64Array = npt.NDArray[np.float64]

_STEPS_ON = 8


@dataclass(frozen=True, slots=True, eq=False)
class Weighted(ArrayValue):
    """`num_samples` draws an epoch, a record of twice the weight twice as likely at each.

    With replacement every position is a draw of its own. Without, records leave the urn as they are drawn
    (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006): heavy ones come early, and an
    epoch's table of 8 bytes a record is made when its first batch is.

    Attributes:
        weights: (records,) not negative, not all zero; of any scale. Kept as float64.
        num_samples: Positions per epoch.
        seed: Any integer.
        replacement: Whether a record may come more than once an epoch.

    Raises:
        ConfigError: A weight is negative or not finite, all are zero, `num_samples` is out of its range, or
            without replacement larger than the number of records with a weight.
    """

    weights: Sequence[float] | Float64Array
    num_samples: int
    seed: int
    replacement: bool = True
    _ends: Float64Array = field(init=False, repr=False, compare=False)
    _starts: Memo[Int64Array] = field(default_factory=Memo, init=False, repr=False, compare=False)
    _orders: Memo[Int64Array] = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weights = check_weights(self.weights)
        weights.setflags(write=False)
        set_field = object.__setattr__
        set_field(self, "weights", weights)
        set_field(self, "num_samples", check_count("num_samples", self.num_samples, least=0, below=MAX_LENGTH + 1))
        set_field(self, "seed", check_seed(self.seed))
        set_field(self, "_ends", np.cumsum(_scaled(weights)))
        possible = int(np.count_nonzero(weights))
        if not self.replacement and self.num_samples > possible:
            raise ConfigError(
                f"num_samples must be at most {possible}, the number of records with a weight, when they are drawn "
                f"without replacement; got {self.num_samples}",
                key="num_samples",
                value=self.num_samples,
            )

    def __len__(self) -> int:
        return self.num_samples

    @property
    def records(self) -> int:
        """Indices are below this."""
        return len(self.weights)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        if not self.replacement:
            order = self._orders.recall(epoch)
            return (self._orders.keep(epoch, self._order(epoch)) if order is None else order)[positions]
        return self._find(uniform(derive_key(self.seed, "weighted", epoch, words=1)[0], positions))

    def _find(self, shares: Float64Array) -> Int64Array:
        """The records that stand at these shares of the sum of all weights.

        Equal to ``np.searchsorted(ends, drawn, side="right")``, which with millions of weights misses the cache
        at every step of every search. A table tells where each of as many equal parts of the sum begins; from there
        it is a record or two on (Chen and Asau, "On generating random variates from an empirical distribution", 1974).
        """
        ends = self._ends
        drawn = shares * ends[-1]  # less than the sum: shares end at 1 - 2^-53, which rounds no product up to it
        starts = self._starts.recall(None)
        if starts is None:
            # A power of two: then shares are cut without rounding, and no start lies behind what is drawn.
            parts = 1 << (len(ends) - 1).bit_length()
            edges = np.arange(parts) / parts * ends[-1]
            starts = self._starts.keep(None, np.searchsorted(ends, edges, side="right"))
        found = starts[(shares * len(starts)).astype(np.int64)]
        rows = np.flatnonzero(ends[found] <= drawn)
        for _ in range(_STEPS_ON):
            if not rows.size:
                return found
            found[rows] += 1
            rows = rows[ends[found[rows]] <= drawn[rows]]
        found[rows] = np.searchsorted(ends, drawn[rows], side="right")  # many light records in one part
        return found

    def _order(self, epoch: int) -> Int64Array:
        records = np.flatnonzero(self.weights)
        key = derive_key(self.seed, "weighted-urn", epoch, words=1)[0]
        # Waiting times: exponential with the weight as rate. Who waits shortest is drawn first.
        with np.errstate(over="ignore", divide="ignore"):  # lighter than another by 300 digits: waits for ever
            waits = -_log(uniform(key, records)) / _scaled(np.asarray(self.weights))[records]
        return records[np.argsort(waits, kind="stable")[: self.num_samples]]


def check_weights(weights: object) -> Float64Array:
    """`weights` as a new float64 array.

    Raises:
        ConfigError: They are no numbers, one is negative or not finite, or all are zero.
    """
    try:
        given = np.asarray(weights)
        checked = given.astype(np.float64) if given.dtype.kind in "biufO" else np.empty(0)
    except (TypeError, ValueError, OverflowError):
        checked = np.empty(0)
    if checked.ndim != 1 or not checked.size:
        raise ConfigError(f"weights must be one number or more, got {weights!r}", key="weights", value=weights)
    wrong = np.flatnonzero(~((checked >= 0) & np.isfinite(checked)))
    if wrong.size:
        value = checked[wrong[0]].item()
        raise ConfigError(
            f"weights must be finite and not negative, got {value!r} at place {wrong[0]}", key="weights", value=value
        )
    if not checked.any():
        raise ConfigError("weights must not all be zero", key="weights", value=weights)
    return checked


def _scaled(weights: Float64Array) -> Float64Array:
    """The same proportions with the largest in [0.5, 1): no sum overflows. Exact, being a power of two apart."""
    return np.ldexp(weights, -int(np.frexp(weights.max())[1]))


def uniform(key: np.uint64, values: Int64Array) -> Float64Array:
    """A number in (0, 1) for each value: 52 bits of its hash, and half a unit of the last so that none is 0 or 1."""
    return ((hash64(key, values) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _log(values: Float64Array) -> Float64Array:
    """Natural logarithm of numbers in (0, 1), to 5e-16 of it.

    np.log differs in the last bit between processors, and a bit may swap two records. Here every operation is one
    that IEEE 754 rounds exactly: log(m 2^k) = k log 2 + 2 artanh((m - 1) / (m + 1)), by its series.
    """
    mantissa, exponent = np.frexp(values)
    small = mantissa < np.sqrt(0.5)
    mantissa = np.where(small, mantissa * 2, mantissa)
    ratio = (mantissa - 1) / (mantissa + 1)  # within 0.172
    square = ratio * ratio
    series = np.full_like(ratio, 1 / 21)
    for odd in range(19, 0, -2):
        series = series * square + 1 / odd
    return (exponent - small) * 0.6931471805599453 + 2 * ratio * series
