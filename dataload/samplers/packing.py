"""Records of different lengths packed into rows of equal length."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np

from dataload._util.caches import Memo
from dataload._util.settings import Least, check_settings, setting_error
from dataload.collate import Overlong, Packing, Strategy
from dataload.collate.pack import best_fit, cut_up, first_fit
from dataload.errors import ConfigError
from dataload.samplers.batch import BatchPlan, BatchPlanner, OverSampler
from dataload.samplers.common import MAX_LENGTH, ArrayValue, check_record_lengths, check_sampler, records_of, set_fields
from dataload.types import Int64Array, Sampler

_COUNTED_AT_ONCE = 2**18  # records


class _Windows(NamedTuple):
    """Packed windows, (windows, window) each."""

    indices: Int64Array  # to read
    lengths: Int64Array  # of each record; -1 past the end of the order
    rows: Int64Array  # row of each record in its window
    starts: Int64Array  # offset of each record in its row
    counts: Int64Array  # (windows,), rows per window
    offsets: Int64Array | None  # of each record's first element in the row; None if all are 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatchSampler(ArrayValue, OverSampler):
    """Rows of equal length, each packed with several records: one shape and almost no padding.

    The order is cut into windows of `window` records, each packed by itself. The rows of a window follow each other by
    their first records, and the records of a row by their positions. The rows of an epoch do not depend on the number
    of ranks. Their number depends on the order, so all windows are packed once per epoch to count them, which takes
    about 0.4 seconds for a million records, and 1 second with best fit. After that, any row is found by packing its
    window.

    The loader lays out the records and adds the columns `segment_ids` and `positions`; see `dataload.Pack`.

    Attributes:
        sampler: The order of the records.
        lengths: Length of each record, (records,), in index order. Stored as int64.
        row_length: Length of a row, in the unit of `lengths`, for example tokens.
        batch_size: Rows per step of one rank.
        window: Number of records that are packed together. A larger window fills rows better.
        strategy: ``"first-fit"`` puts each record into the first row with room for it. ``"best-fit"`` takes the longest
            records of a window first, and puts each into the row that it fills best, which leaves less filler.
        overlong: Whether a record longer than a row is an ``"error"``, is cut off (``"truncate"``), or is cut into
            pieces (``"split"``), which are packed like other records of the same window.

    Raises:
        ConfigError: Lengths are fewer than records, a length is negative, a record is longer than a row and
            `overlong` is ``"error"``, a number is out of its range, `strategy` is unknown, or `sampler`
            is a mixture that never ends.
    """

    sampler: Sampler
    lengths: Sequence[int] | Int64Array
    row_length: Annotated[int, Least(1)]
    batch_size: Annotated[int, Least(1)]
    window: Annotated[int, Least(1)] = 1024
    overlong: Overlong = "error"
    strategy: Strategy = "first-fit"
    _ends: Memo[Int64Array] = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(self)
        BatchPlanner.__post_init__(self)
        check_sampler("sampler", self.sampler)
        if len(self.sampler) >= MAX_LENGTH:
            message = "an epoch is packed before it begins, and the sampler's epoch never ends: use another `stop`"
            raise ConfigError(message, key="sampler", value=self.sampler)
        lengths = check_record_lengths(self.lengths)
        set_fields(self, lengths=lengths)
        if len(lengths) < records_of(self.sampler):
            rule = f"must hold one length for each of the {records_of(self.sampler)} records"
            raise setting_error("lengths", len(lengths), rule)
        longest = int(lengths.max(initial=0))
        if self.overlong == "error" and longest > self.row_length:
            record = int(lengths.argmax())
            rule = (
                f"must be at least {longest}, the length of record {record}, unless overlong is 'truncate' or 'split'"
            )
            raise setting_error("row_length", self.row_length, rule)

    @property
    def order(self) -> Any:
        """All settings except ranks and batch size."""
        # The default is left out, as in states saved before there was a choice.
        return self._settings("batch_size", *(["strategy"] if self.strategy == "first-fit" else []))

    @property
    def source_lengths(self) -> tuple[int, ...] | None:
        """See `source_lengths_of`. None if the lengths, like the sampler, are for a source's first records."""
        return (len(self.lengths),) if len(self.lengths) > records_of(self.sampler) else None

    @property
    def rows_per_step(self) -> int:
        """Mean records per step, because records are what a step reads."""
        mean = max(1, int(np.asarray(self.lengths).mean())) if len(self.lengths) else 1
        return self.batch_size * max(1, self.row_length // mean)

    def items(self, epoch: int) -> int:
        ends = self._window_ends(epoch)
        return int(ends[-1]) if ends.size else 0

    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        """See `BatchPlanner.plans`."""
        items, inside = self.deal(steps, epoch=epoch)
        ends = self._window_ends(epoch)
        wanted = items[inside]
        windows = np.unique(np.searchsorted(ends, wanted, side="right"))
        packed = self._pack(windows, epoch)
        # Sort records by their row in the epoch, and within a row by position.
        present = packed.lengths >= 0
        number = (ends[windows] - packed.counts)[:, None] + packed.rows
        order = np.flatnonzero(present.ravel())
        order = order[np.argsort(number.ravel()[order], kind="stable")]
        number = number.ravel()[order]
        firsts, stops = np.searchsorted(number, items), np.searchsorted(number, items, side="right")
        plans: list[BatchPlan] = []
        for i, step in enumerate(steps):
            counts = np.where(inside[i], stops[i] - firsts[i], 0)
            chosen = order[np.repeat(firsts[i] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())]
            rows = self.batch_size if self.tail == "pad" else int(inside[i].sum())
            packing = Packing(
                rows=np.repeat(np.arange(self.batch_size), counts),
                starts=packed.starts.ravel()[chosen],
                lengths=packed.lengths.ravel()[chosen],
                shape=(rows, self.row_length),
                offsets=None if packed.offsets is None else packed.offsets.ravel()[chosen],
            )
            valid = inside[i] if self.tail == "pad" else None
            plans.append(BatchPlan(step, packed.indices.ravel()[chosen], valid, packing))
        return plans

    def _window_ends(self, epoch: int) -> Int64Array:
        """Rows of the epoch up to and including each window, (windows,) int64."""
        known = self._ends.recall(epoch)
        if known is not None:
            return known
        count = -(-len(self.sampler) // self.window)
        at_once = max(1, _COUNTED_AT_ONCE // self.window)
        parts = [
            self._pack(np.arange(start, min(start + at_once, count)), epoch).counts
            for start in range(0, count, at_once)
        ]
        return self._ends.keep(epoch, np.cumsum(np.concatenate([np.empty(0, np.int64), *parts])))

    def _pack(self, windows: Int64Array, epoch: int) -> _Windows:
        positions = windows[:, None] * self.window + np.arange(self.window)
        present = positions < len(self.sampler)
        indices = np.zeros(positions.shape, np.int64)
        indices[present] = self.sampler.indices(positions[present], epoch=epoch)
        lengths = np.where(present, np.asarray(self.lengths)[indices], -1)
        offsets: Int64Array | None = None
        if self.overlong == "split":
            indices, lengths, offsets = _split(indices, lengths, self.row_length)
        fit = first_fit if self.strategy == "first-fit" else best_fit
        sizes = np.minimum(lengths if offsets is None else lengths - offsets, self.row_length)
        return _Windows(indices, lengths, *fit(sizes, self.row_length), offsets)


def _split(indices: Int64Array, lengths: Int64Array, row_length: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return indices, lengths and offsets of the pieces of the records of each window."""
    numbers, offsets = cut_up(lengths.ravel(), row_length)
    windows = numbers // lengths.shape[1]
    counts = np.bincount(windows, minlength=len(lengths))
    place = windows, np.arange(len(numbers)) - (np.cumsum(counts) - counts)[windows]
    shape = len(lengths), int(counts.max(initial=0))
    pieces = np.zeros(shape, np.int64), np.full(shape, -1), np.zeros(shape, np.int64)
    for piece, values in zip(pieces, (indices.ravel()[numbers], lengths.ravel()[numbers], offsets), strict=True):
        piece[place] = values
    return pieces
