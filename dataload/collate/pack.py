"""Several records in each row of a batch."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from dataload._util.arrays import to_array
from dataload._util.indexing import distinct
from dataload._util.settings import Least, check_settings, setting_error
from dataload.collate.collate import IGNORED, PadValue, check_pad_value, fill_of, laid_out, warn_of_padding
from dataload.errors import ConfigError
from dataload.types import Array, Batch, Int64Array

Overlong: TypeAlias = Literal["error", "truncate", "split"]
"""The treatment of records longer than a row."""

Strategy: TypeAlias = Literal["first-fit", "best-fit"]
"""The choice of a record's row."""

_log = logging.getLogger("dataload")
_WELL_FILLED = 0.95


class Packing(NamedTuple):
    """The positions of a step's records in rows that hold several records; arrays have one entry per record."""

    rows: Int64Array  # its row; ascending
    starts: Int64Array  # its first position in the row; ascending within a row
    lengths: Int64Array  # its length; what is longer than a row is cut off
    shape: tuple[int, int]  # (rows, row_length) of the batch
    offsets: Int64Array | None = None  # of the first element that is laid out, if long records are split; else 0

    def only(self, chosen: Any) -> "Packing":
        """Return the packing of some records, given by a mask or by numbers."""
        rows, starts, lengths, shape, offsets = self
        return Packing(
            rows[chosen], starts[chosen], lengths[chosen], shape, None if offsets is None else offsets[chosen]
        )

    @property
    def sizes(self) -> Int64Array:
        """The number of elements of each record that are laid out."""
        left = self.lengths if self.offsets is None else self.lengths - self.offsets
        return np.minimum(left, self.shape[1])


@dataclass(frozen=True, slots=True)
class Pack:
    """Lays out several records in each row of a batch.

    A `PackedBatchSampler` plans the rows from the lengths of all records. With another order, as ``collate=Pack(...)``,
    the records of each step are packed among themselves, into as many rows as they need; the log says how full the
    first batch is.

    All fields are sequences along their first axis, of the record's length. Each becomes ``(rows, row_length, *rest)``.
    Two fields are added, both ``(rows, row_length)`` int32:

    - ``segment_ids``: 1 for the first record of a row, 2 for the second, ...; 0 for padding;
    - ``position_ids``: the position within the record, from 0.

    With `varlen`, three more, as flash-attn's functions for sequences of different lengths and state space models take
    them. The padding at the end of a row counts as one more sequence:

    - ``cu_seqlens``: int32, where the sequences begin in the rows laid end to end, and the end of the last one;
    - ``max_seqlen``: int, the length of the longest sequence;
    - ``seq_idx``: ``(rows, row_length)`` int32, the number of the sequence in its row, from 0.

    Attributes:
        pad_value: The value of padding, or values by field; see `Collate`. Fields of integers that are padded with
            -100, as labels are, also get it at the first position of each record, which no position of the record
            predicts.
        positions: Name of the field of positions. Version 0.1 called it ``"positions"``.
        row_length: Length of a row, if each step is packed by itself. None makes one row that holds all records.
        overlong: What to do with a record longer than a row, if each step is packed by itself: ``"error"``,
            ``"truncate"`` cuts off its end, ``"split"`` makes several records of it.
        varlen: Whether to add ``cu_seqlens``, ``max_seqlen`` and ``seq_idx``.

    Raises:
        ConfigError: When called: a field is not a sequence of the length in the packing, dtypes differ, or a field has
            the name of an added one.
    """

    pad_value: PadValue | None = None
    positions: str = "position_ids"
    row_length: Annotated[int, Least(1)] | None = None
    overlong: Overlong = "error"
    varlen: bool = False

    def __post_init__(self) -> None:
        check_settings(self)

    def __call__(self, samples: Sequence[Any], packing: Packing | None = None) -> Batch:
        """Return the batch of `samples`: one per record, or a single one that shows the fields if there are none."""
        records = [sample if isinstance(sample, Mapping) else {"data": sample} for sample in samples]
        first = cast("Mapping[str, Any]", records[0])
        check_pad_value(self.pad_value, first)
        if packing is None:
            packing, numbers = self._plan([np.shape(next(iter(record.values()), ()))[:1] for record in records])
            records = [records[number] for number in numbers.tolist()]
        batch = {name: self._lay_out([record[name] for record in records], name, packing) for name in first}
        for name, column in self._added(packing).items():
            if name in batch:
                message = f"packing adds {name!r}, and the samples have a field of that name: rename it"
                raise ConfigError(message, key=name)
            batch[name] = column
        if self.pad_value is None:
            warn_of_padding(self.padded_fields(batch), stacklevel=2)
        return batch

    def padded_fields(self, batch: Any) -> dict[str, str]:
        """Return the dtypes of the fields of a batch that `pad_value` has filled up."""
        found = cast("Mapping[str, Any]", batch if isinstance(batch, Mapping) else {})
        added = ("segment_ids", self.positions, "cu_seqlens", "max_seqlen", "seq_idx")
        return {name: str(getattr(each, "dtype", "")) for name, each in found.items() if name not in added}

    def log_fill(self, batch: Any) -> None:
        """Log how full the rows of a batch are that was packed by itself."""
        with suppress(TypeError, KeyError, ValueError, RuntimeError):  # transforms may rename it, or move it to a GPU
            segments = np.asarray(batch["segment_ids"])
            fill = np.count_nonzero(segments) / max(1, segments.size)
            advice = ": measure lengths with `dataload stats`, and PackedBatchSampler fills rows from many steps"
            level = logging.INFO if fill >= _WELL_FILLED else logging.WARNING
            rows, length = segments.shape
            _log.log(
                level,
                "packing within a step fills %.1f%% of %d rows of %d%s",
                *(100 * fill, rows, length, advice if fill < _WELL_FILLED else ""),
            )

    def _plan(self, shapes: list[tuple[int, ...]]) -> tuple[Packing, Int64Array]:
        """Return the packing of the records of one step, and the number of each record that is laid out."""
        if () in shapes:
            raise ConfigError(f"cannot pack record {shapes.index(())} of the step: its first field is no sequence")
        lengths = np.array(shapes, np.int64).ravel()
        row_length = int(lengths.sum()) if self.row_length is None else self.row_length
        if self.overlong == "error" and (longest := int(lengths.max())) > row_length:
            rule = f"must be at least {longest}, the length of a record, unless overlong is 'truncate' or 'split'"
            raise setting_error("row_length", row_length, rule)
        numbers, offsets = cut_up(lengths, row_length) if self.overlong == "split" else (np.arange(len(lengths)), None)
        packing = Packing(np.zeros_like(numbers), np.zeros_like(numbers), lengths[numbers], (1, row_length), offsets)
        (rows,), (starts,), (count,) = best_fit(packing.sizes[None], row_length)
        order = np.argsort(rows, kind="stable")
        found = packing._replace(rows=rows, starts=starts, shape=(int(count), row_length))
        return found.only(order), numbers[order]

    def _lay_out(self, values: list[Any], name: str, packing: Packing) -> Array:
        arrays = [to_array(name, value) for value in values]
        first = arrays[0]
        value, rest, dtype = fill_of(self.pad_value, name, first.dtype), first.shape[1:], first.dtype
        lengths = packing.lengths.tolist()
        for i, length in enumerate(lengths):
            if arrays[i].shape != (length, *rest) or arrays[i].dtype != dtype:
                raise ConfigError(
                    f"cannot pack field {name!r}: {arrays[i].dtype} {arrays[i].shape} in record {i} of the step, "
                    f"expected {dtype} {(length, *rest)} from the given lengths; choose sequences "
                    "with fields=[...], or compute the lengths again",
                    key=name,
                )
        rows, length = packing.shape
        sizes, targets = packing.sizes, packing.rows * length + packing.starts
        ends = np.concatenate([[0], targets + sizes])
        gaps = np.concatenate([targets, [rows * length]]) - ends  # before each record, and after the last one
        filler = np.full((int(gaps.max()), *rest), value, dtype)
        offsets = (np.zeros_like(sizes) if packing.offsets is None else packing.offsets).tolist()
        pieces: list[Array] = []
        for array, gap, offset, size in zip(arrays, gaps.tolist(), offsets, sizes.tolist(), strict=False):
            if gap:
                pieces.append(filler[:gap])
            pieces.append(array[offset : offset + size])
        out = laid_out([*pieces, filler[: gaps[-1]]], (rows, length, *rest))
        if value == IGNORED and dtype.kind == "i" and not rest:
            out.reshape(-1)[targets[sizes > 0]] = value  # else the record before would be asked for it
        return out

    def _added(self, packing: Packing) -> dict[str, Any]:
        """Return the columns that describe the rows."""
        rows, starts, sizes, shape = packing.rows, packing.starts, packing.sizes, packing.shape
        segment = np.arange(1, len(rows) + 1) - np.searchsorted(rows, rows)  # counted from 1 within the row
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        flat = np.repeat(rows * shape[1] + starts, sizes) + within
        segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        segments.ravel()[flat] = np.repeat(segment, sizes)
        positions.ravel()[flat] = within
        added: dict[str, Any] = {"segment_ids": segments, self.positions: positions}
        if self.varlen:
            begins = rows * shape[1] + starts
            ends = np.arange(shape[0] + 1) * shape[1]
            bounds = distinct(np.concatenate([begins, begins + sizes, ends]))
            last = segments.max(axis=1, initial=0, keepdims=True)
            added["cu_seqlens"] = bounds.astype(np.int32)
            added["max_seqlen"] = int(np.diff(bounds).max(initial=0))
            added["seq_idx"] = np.where(segments > 0, segments - 1, last)
        return added


def cut_up(lengths: Int64Array, row_length: int) -> tuple[Int64Array, Int64Array]:
    """Return record number and offset of each piece of at most `row_length` elements, in order."""
    counts = np.maximum(1, -(-lengths // row_length))
    numbers = np.repeat(np.arange(len(lengths)), counts)
    return numbers, (np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)) * row_length


def first_fit(lengths: Int64Array, row_length: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Pack lists of records, (lists, records) int64, each into the first row with room for it; below 0 is none."""
    # Returns the row of each record, its offset in that row, and the number of rows per list, (lists,) int64.
    return _fit(lengths, row_length, fullest=False)


def best_fit(lengths: Int64Array, row_length: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Pack like `first_fit`, but from the longest record on, each into the fullest row with room for it."""
    longest = np.argsort(-lengths, axis=1, kind="stable")
    found, _, counts = _fit(np.take_along_axis(lengths, longest, axis=1), row_length, fullest=True)
    rows = np.empty_like(found)
    np.put_along_axis(rows, longest, found, axis=1)
    by_row = np.argsort(rows, axis=1, kind="stable")
    begins = np.diff(np.take_along_axis(rows, by_row, axis=1), axis=1, prepend=-1) > 0
    # Records lie one after the other; a row's first tells where it begins.
    sizes = np.take_along_axis(np.maximum(lengths, 0), by_row, axis=1)
    ends = np.cumsum(sizes, axis=1)
    within = ends - sizes - np.maximum.accumulate(np.where(begins, ends - sizes, 0), axis=1)
    starts = np.empty_like(rows)
    np.put_along_axis(starts, by_row, within, axis=1)
    each = np.arange(len(rows))[:, None]
    firsts = np.full((len(rows), int(rows.max(initial=0)) + 1), lengths.shape[1])
    np.minimum.at(firsts, (each, rows), np.arange(lengths.shape[1]))
    numbers = np.argsort(np.argsort(firsts, axis=1, kind="stable"), axis=1)
    return numbers[each, rows], starts, counts


def _fit(lengths: Int64Array, row_length: int, *, fullest: bool) -> tuple[Int64Array, Int64Array, Int64Array]:
    lists, records = lengths.shape
    rows, starts = np.zeros_like(lengths), np.zeros_like(lengths)
    counts = np.zeros(lists, np.int64)
    room = np.full((lists, 8), row_length, np.int32)
    each = np.arange(lists)
    # Packing is sequential in the records, but all lists advance together.
    for i in range(records):
        open_rows = int(counts.max(initial=0)) + 1
        if open_rows > room.shape[1]:
            room = np.concatenate([room, np.full_like(room, row_length)], axis=1)
        need = lengths[:, i]
        left = room[:, :open_rows]
        fits = left >= need[:, None]
        row = (np.where(fits, left, row_length + 1).argmin if fullest else fits.argmax)(axis=1)
        rows[:, i], starts[:, i] = row, row_length - room[each, row]
        room[each, row] -= np.maximum(need, 0).astype(np.int32)
        counts = np.maximum(counts, np.where(need >= 0, row + 1, 0))
    return rows, starts, counts
