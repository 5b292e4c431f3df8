"""The cells of a table of steps by rows, and the batch plans made from them. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dataload.errors import ConfigError
from dataload.samplers._common import BoolArray
from dataload.samplers.batch import BatchPlan
from dataload.types import Array, Int64Array


class Cells(NamedTuple):
    """The content of several rows at several steps.

    Attributes:
        indices: (steps, rows, chunk) int64, indices to read.
        stream_id: (steps, rows) int64, sequence of the row's first record; -1 for a row without records.
        offset: (steps, rows) int64, offset of that record in its sequence; -1 for a row without records.
        is_first: (steps, rows, chunk) bool, True for a record that does not continue the row's previous one.
        valid: (steps, rows, chunk) bool, False for filler.
    """

    indices: Int64Array
    stream_id: Int64Array
    offset: Int64Array
    is_first: BoolArray
    valid: BoolArray


def check_rows(rows: int, world_size: int, origin: int = 0) -> None:
    """Raise ConfigError unless all ranks have equally many rows and `origin` is the start of a step.

    Args:
        rows: Rows of all ranks together.
        world_size: Number of ranks.
        origin: First item of step 0; see `BatchPlanner`.
    """
    if rows % world_size:
        raise ConfigError(
            f"rows must be a multiple of world_size, {world_size}, so that each rank has its own; got {rows}",
            key="rows",
            value=rows,
        )
    if origin % rows:
        raise ConfigError(
            f"origin must be a multiple of rows, {rows}, because steps of streams cannot be divided; got {origin}",
            key="origin",
            value=origin,
        )


def plans_of(cells: Cells, steps: range, columns: Mapping[str, Array] | None = None) -> list[BatchPlan]:
    """Return the batch plans of consecutive steps.

    Args:
        cells: The content of the rows at these steps.
        steps: Numbers of the steps.
        columns: Additional columns of each batch, (rows, ...).
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
