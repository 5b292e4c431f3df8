"""Batches row by row. Pure (no I/O)."""

from collections.abc import Mapping
from typing import Any, cast

from dataload.collate import Ragged


def row_of(batch: Any, row: int) -> Any:
    """Return one row of a batch or of a column: a dict for a dict of columns, and so on inside."""
    if isinstance(batch, Ragged):
        return batch.values[batch.offsets[row] : batch.offsets[row + 1]]
    if isinstance(batch, Mapping):
        return {name: row_of(column, row) for name, column in cast("Mapping[Any, Any]", batch).items()}
    if isinstance(batch, tuple):
        return tuple(row_of(column, row) for column in cast("tuple[Any, ...]", batch))
    return batch[row]


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch or of a column; 0 if it has no columns."""
    if isinstance(batch, Ragged):
        return len(batch.offsets) - 1
    if isinstance(batch, Mapping):
        batch = tuple(cast("Mapping[Any, Any]", batch).values())
    if isinstance(batch, tuple):
        return count_rows(cast("tuple[Any, ...]", batch)[0]) if batch else 0
    return len(batch)
