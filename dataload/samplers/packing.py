"""Records of different lengths packed into rows of equal length."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from dataload._util.checks import check_choice, check_count, setting_error
from dataload._util.memo import Memo
from dataload.collate import Packing
from dataload.samplers._common import ArrayValue, check_record_lengths, check_sampler, records_of, set_fields
from dataload.samplers.batch import BatchPlan, BatchPlanner, OverSampler
from dataload.types import Int64Array, Sampler

Overlong: TypeAlias = Literal["error", "truncate"]
"""How to treat records longer than a row."""

_COUNTED_AT_ONCE = 2**18  # records


class _Windows(NamedTuple):
    """Packed windows, (windows, window) each."""

    indices: Int64Array  # to read
    lengths: Int64Array  # of each record; -1 past the end of the order
    rows: Int64Array  # row of each record in its window
    starts: Int64Array  # offset of each record in its row
    counts: Int64Array  # (windows,), rows per window


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatchSampler(ArrayValue, OverSampler):
    """Rows of equal length, each packed with several records: one shape and almost no padding.

    The order is cut into windows of `window` records. Within a window, each record goes into the first row with room
    for it, or opens a new row (first fit). The rows of an epoch do not depend on the number of ranks. Their number
    depends on the order, so all windows are packed once per epoch to count them, which takes about 0.4 seconds for a
    million records. After that, any row is found by packing its window.

    The loader lays out the records and adds the columns `segment_ids` and `positions`; see `dataload.Pack`.

    Attributes:
        sampler: The order of the records.
        lengths: Length of each record, (records,), in index order. Stored as int64.
        row_length: Length of a row, in the unit of `lengths`, for example tokens.
        batch_size: Rows per step of one rank.
        window: Number of records that are packed together. A larger window fills rows better.
        overlong: Whether a record longer than a row is an ``"error"`` or is cut off (``"truncate"``).

    Raises:
        ConfigError: There are fewer lengths than records, a length is negative, a record is longer than a row and
            `overlong` is ``"error"``, or a number is out of its range.
    """

    sampler: Sampler
    lengths: Sequence[int] | Int64Array
    row_length: int
    batch_size: int
    window: int = 1024
    overlong: Overlong = "error"
    _ends: Memo[Int64Array] = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        BatchPlanner.__post_init__(self)
        check_sampler("sampler", self.sampler)
        lengths = check_record_lengths(self.lengths)
        set_fields(self, lengths=lengths)
        for name in ("row_length", "batch_size", "window"):
            check_count(name, getattr(self, name), least=1)
        if len(lengths) < records_of(self.sampler):
            rule = f"must hold one length for each of the {records_of(self.sampler)} records"
            raise setting_error("lengths", len(lengths), rule)
        check_choice("overlong", self.overlong, get_args(Overlong))
        longest = int(lengths.max(initial=0))
        if self.overlong == "error" and longest > self.row_length:
            record = int(lengths.argmax())
            rule = f"must be at least {longest}, the length of record {record}, unless overlong is 'truncate'"
            raise setting_error("row_length", self.row_length, rule)

    @property
    def order(self) -> Any:
        """All settings except ranks and batch size."""
        return self._settings("batch_size")

    @property
    def rows_per_step(self) -> int:
        """Mean records per step, because records are what a step reads."""
        mean = max(1, int(np.asarray(self.lengths).mean())) if len(self.lengths) else 1
        return self.batch_size * max(1, self.row_length // mean)

    def items(self, epoch: int) -> int:
        """Return the number of rows in an epoch."""
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
        return _Windows(indices, lengths, *first_fit(np.minimum(lengths, self.row_length), self.row_length))


def first_fit(lengths: Int64Array, row_length: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Pack lists of records independently: each record goes into the first row with room for it.

    Takes (lists, records) int64, where negative lengths are not records. Returns the row of each record, its offset in
    that row, and the number of rows per list, (lists,) int64.
    """
    lists, records = lengths.shape
    rows, starts = np.zeros_like(lengths), np.zeros_like(lengths)
    counts = np.zeros(lists, np.int64)
    room = np.full((lists, 8), row_length, np.int32)
    each = np.arange(lists)
    # First fit is sequential in the records, but all lists advance together.
    for i in range(records):
        open_rows = int(counts.max(initial=0)) + 1
        if open_rows > room.shape[1]:
            room = np.concatenate([room, np.full_like(room, row_length)], axis=1)
        need = lengths[:, i]
        row = (room[:, :open_rows] >= need[:, None]).argmax(axis=1)
        rows[:, i], starts[:, i] = row, row_length - room[each, row]
        room[each, row] -= np.maximum(need, 0).astype(np.int32)
        counts = np.maximum(counts, np.where(need >= 0, row + 1, 0))
    return rows, starts, counts
