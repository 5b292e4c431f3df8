"""What rows have at several steps, and the plans that follow. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError
from dataload.samplers import BatchPlan
from dataload.types import Array, Int64Array

__all__ = ["BoolArray", "Cells", "check_rows", "join", "plans_of"]

BoolArray: TypeAlias = npt.NDArray[np.bool_]


class Cells(NamedTuple):
    """What several rows have at several steps.

    Attributes:
        indices: (steps, rows, chunk) int64, what to read.
        stream_id: (steps, rows) int64, number of the sequence of the row's first record; -1 for a row without
            any.
        offset: (steps, rows) int64, place of that record in its sequence; -1 likewise.
        is_first: (steps, rows, chunk) bool, whether what stands here does not continue what stood before it.
        valid: (steps, rows, chunk) bool, False for what only fills up the batch.
    """

    indices: Int64Array
    stream_id: Int64Array
    offset: Int64Array
    is_first: BoolArray
    valid: BoolArray


def join(parts: list[Cells]) -> Cells:
    """The rows of several, one after another."""
    return Cells(*(np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)))


def check_rows(rows: int, world_size: int, origin: int = 0) -> None:
    """See whether each rank has as many rows.

    Args:
        rows: Rows of all ranks.
        world_size: Number of ranks.
        origin: See `BatchPlanner`.

    Raises:
        ConfigError: It has not; or steps are counted from the middle of one.
    """
    if rows % world_size:
        raise ConfigError(
            f"rows must be a multiple of world_size, {world_size}, so that each rank has its own; got {rows}",
            key="rows",
            value=rows,
        )
    if origin % rows:
        raise ConfigError(
            f"origin must be a multiple of rows, {rows}, for steps of streams have no parts; got {origin}",
            key="origin",
            value=origin,
        )


def plans_of(cells: Cells, steps: range, columns: Mapping[str, Array] | None = None) -> list[BatchPlan]:
    """The plans of consecutive steps.

    Args:
        cells: What the rows have.
        steps: Numbers of the steps.
        columns: Other columns of each batch, (rows, ...).
    """
    chunk = cells.indices.shape[2]
    is_first, valid = (mask[:, :, 0] if chunk == 1 else mask for mask in (cells.is_first, cells.valid))
    return [
        BatchPlan(
            step,
            cells.indices[i].ravel(),
            valid[i],
            chunk=chunk,
            columns={
                "stream_id": cells.stream_id[i],
                "offset": cells.offset[i],
                "is_first": is_first[i],
                **(columns or {}),
            },
        )
        for i, step in enumerate(steps)
    ]
