"""Records of different lengths in rows of one length, with what tells them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from dataload.errors import ConfigError
from dataload.types import Array, Batch, Int64Array

__all__ = ["Pack", "Packing"]

_ADDED = ("segment_ids", "positions")


class Packing(NamedTuple):
    """Where the records of a step stand in rows that hold several.

    Attributes:
        rows: (records,) int64, the row of each; rises.
        starts: (records,) int64, its first place in the row; rises within a row.
        lengths: (records,) int64, its length. What does not fit into the row is cut off.
        shape: (rows, row_length) of the batch.
    """

    rows: Int64Array
    starts: Int64Array
    lengths: Int64Array
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pack:
    """Lays records out as a `Packing` says.

    All fields are sequences along their first axis, of the record's length. Each becomes ``(rows, row_length, *rest)``.
    Added are, both ``(rows, row_length)`` int32:

    - ``segment_ids``: 1 for the places of a row's first record, 2 for those of its second, ...; 0 for filling;
    - ``positions``: the place within the record, from 0.

    Attributes:
        pad_value: What places without a record hold.

    Raises:
        ConfigError: When called, a record has another length than the packing says, dtypes differ, or a field is no
            sequence or has the name of one that is added.
    """

    pad_value: float = 0

    def __call__(self, samples: Sequence[Any], packing: Packing) -> Batch:
        """The batch of `samples`, one for each record of the packing; of none, one sample that shows the fields."""
        records = [sample if isinstance(sample, Mapping) else {"data": sample} for sample in samples]
        first = cast("Mapping[str, Any]", records[0])
        batch = {name: self._lay_out([record[name] for record in records], name, packing) for name in first}
        for name in _ADDED:
            if name in batch:
                raise ConfigError(
                    f"packing adds {name!r}, and the samples have a field of that name: rename it", key=name
                )
        segments, positions = _describe(packing)
        return {**batch, "segment_ids": segments, "positions": positions}

    def _lay_out(self, values: list[Any], name: str, packing: Packing) -> Array:
        arrays = [np.asarray(value) for value in values]
        first = arrays[0]
        row_length = packing.shape[1]
        out = np.full((*packing.shape, *first.shape[1:]), self.pad_value, first.dtype)
        places = zip(packing.rows.tolist(), packing.starts.tolist(), packing.lengths.tolist(), strict=True)
        # With no record in the packing there is one sample, and no place for it.
        for i, (row, start, length) in enumerate(places):
            array = arrays[i]
            if array.shape[:1] != (length,) or array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
                raise ConfigError(
                    f"cannot pack field {name!r}: {array.dtype} {array.shape} in record {i} of the step, expected "
                    f"{first.dtype} {(length, *first.shape[1:])} by the lengths given; choose sequences with "
                    "fields=[...], or count the lengths anew",
                    key=name,
                )
            out[row, start : start + length] = array[: row_length - start]
        return out


def _describe(packing: Packing) -> tuple[Array, Array]:
    """Segment ids and positions, (rows, row_length) int32 each."""
    rows, starts, lengths, shape = packing
    lengths = np.minimum(lengths, shape[1] - starts)
    is_new = np.diff(rows, prepend=-1) != 0
    number = np.arange(len(rows))
    segment = number - np.maximum.accumulate(np.where(is_new, number, 0)) + 1  # within the row, from 1
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = np.repeat(rows * shape[1] + starts, lengths) + within
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments.ravel()[places] = np.repeat(segment, lengths)
    positions.ravel()[places] = within
    return segments, positions
