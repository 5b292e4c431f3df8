"""Times of records, by which windows take the record at an instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dataload.catalog.facts import require_known
from dataload.errors import ConfigError
from dataload.sources.base import Source
from dataload.types import Array, Int64Array

_TICKS = 1_000_000  # per second
_TIME = "time"
_MOST_KEYS = 1 << 62
_MOST_TICKS = 1 << 53  # 285 years; float64 holds all numbers up to there


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """The times of records, (records,) int64 microseconds, and instants 1 / `fps` seconds apart.

    `keys`, ascending over all sequences, are the times within a sequence plus `span` for each one before it.
    """

    times: Int64Array
    keys: Int64Array
    sequences: Int64Array
    span: int
    fps: float

    @classmethod
    def of(cls, parent: Source[Any], lengths: Int64Array, fps: float) -> Self:
        """Read the times of all records of sequences of these lengths, (sequences,) int64.

        Raises:
            ConfigError: The records have no field ``time``, it has no times, or times fall within a sequence.
        """
        require_known([_TIME], parent.fields, key="fps")
        times = _ticks_of(parent.read_batch(np.arange(len(parent)), [_TIME])[_TIME] if len(parent) else [])
        sequences = np.repeat(np.arange(len(lengths)), lengths)
        falls = np.flatnonzero((np.diff(times) < 0) & (np.diff(sequences) == 0))
        if len(falls):
            message = f"record {falls[0] + 1} is earlier than the record before it in the same sequence"
            raise ConfigError(message, key="fps", value=fps)
        since = times - times[np.repeat(np.cumsum(lengths) - lengths, lengths)]
        span = int(since.max(initial=0)) + 1
        if span * len(lengths) > _MOST_KEYS:
            longest = (
                f"the times of a sequence span {span / _TICKS:,.0f} seconds, too long for {len(lengths):,} sequences"
            )
            raise ConfigError(f"{longest}: is one of its times 0, or in another unit?", key="fps", value=fps)
        return cls(times, since + sequences * span, sequences, span, fps)

    def _ticks(self, offsets: Any) -> Int64Array:
        return np.rint(np.multiply(offsets, _TICKS / self.fps)).astype(np.int64)

    def records(
        self, anchors: Int64Array, offsets: Int64Array, firsts: Int64Array, stops: Int64Array
    ) -> tuple[Int64Array, Array]:
        """Return the records at instants around anchors, and which of these are outside; both (rows, offsets)."""
        instants = self.times[anchors][:, None] + self._ticks(offsets)
        first, last = self.times[firsts][:, None], self.times[stops - 1][:, None]
        inside = np.clip(instants, first, last)
        keys = inside - first + self.sequences[anchors][:, None] * self.span
        return np.searchsorted(self.keys, keys, side="right") - 1, inside != instants

    def inside(self, firsts: Int64Array, stops: Int64Array, before: int, after: int) -> tuple[Int64Array, Int64Array]:
        """Return the range [low, high) of records of each sequence with `before` to `after` instants in it."""
        filled = stops > firsts
        lows, highs = firsts.copy(), firsts.copy()
        first, last = self.times[firsts[filled]], self.times[stops[filled] - 1]
        base = self.sequences[firsts[filled]] * self.span - first
        early = np.clip(first - self._ticks(before), first, last + 1) + base
        late = np.clip(last - self._ticks(after), first - 1, last + 1) + base
        lows[filled] = np.clip(np.searchsorted(self.keys, early, side="left"), firsts[filled], stops[filled])
        highs[filled] = np.clip(np.searchsorted(self.keys, late, side="right"), firsts[filled], stops[filled])
        return lows, highs


def _ticks_of(column: Any) -> Int64Array:
    """Return times in microseconds, given in seconds or as numpy's times, (records,)."""
    column = np.asarray(column)
    column = column.reshape(len(column)) if column.shape[1:] == (1,) else column
    if column.dtype.kind in "mM":
        known, ticks = ~np.isnat(column), column.astype(f"{column.dtype.kind}8[us]").astype(np.int64)
    else:
        exact = np.multiply(column.astype(np.float64), _TICKS)
        known = np.abs(exact) < _MOST_TICKS  # nor NaN
        ticks = np.rint(np.where(known, exact, 0)).astype(np.int64)
    if column.ndim != 1:
        raise ConfigError(
            f"the field {_TIME!r} has several values in a record: windows need one time for each", key="fps"
        )
    if not known.all():
        row = int(np.argmin(known))
        raise ConfigError(
            f"the field {_TIME!r} of record {row} is {column[row]}, which is not a time in seconds", key="fps"
        )
    return ticks
