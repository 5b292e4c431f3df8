"""Batches row by row. Pure (no I/O)."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from dataload.collate import Ragged
from dataload.samplers import BatchPlan


def row_of(batch: Any, row: int, rows: int) -> Any:
    """Return one row of a batch: a dict for a dict of columns, and so on inside.

    A value without `rows` rows, such as a sum over the batch, is in each row as it is.
    """
    if isinstance(batch, Mapping):
        return {name: row_of(column, row, rows) for name, column in cast("Mapping[Any, Any]", batch).items()}
    if isinstance(batch, tuple) and not isinstance(batch, Ragged):
        return tuple(row_of(column, row, rows) for column in cast("tuple[Any, ...]", batch))
    if _length(batch) != rows:
        return batch
    if isinstance(batch, Ragged):
        return batch.values[batch.offsets[row] : batch.offsets[row + 1]]
    return batch[row]


def count_rows(batch: Any, plan: BatchPlan) -> int:
    """Return the number of rows of a batch: that of its plan, unless records were left out; 0 if it has no columns."""
    lengths = [length for _, column in columns_of(batch) if (length := _length(column)) is not None]
    planned = planned_rows(plan)
    return planned if planned in lengths else next(iter(lengths), 0)


def planned_rows(plan: BatchPlan) -> int:
    """Return the number of rows of a batch without bad records."""
    return plan.rows if plan.packing is None else plan.packing.shape[0]


def columns_of(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the columns of a batch with their names; names of inner ones are joined by dots."""
    if isinstance(batch, Mapping) or (isinstance(batch, tuple) and not isinstance(batch, Ragged)):
        pairs = cast("Any", batch.items() if isinstance(batch, Mapping) else enumerate(cast("Any", batch)))
        for key, column in pairs:
            yield from columns_of(column, f"{name}.{key}" if name else str(key))
    else:
        yield name, batch


def as_array(value: Any) -> Any:
    """Return an array or a tensor as an array, float32 if numpy lacks its dtype; anything else as it is.

    Numbers of numpy, and tensors without values, are returned as they are.
    """
    if not hasattr(value, "__array__") or not hasattr(value, "shape") or isinstance(value, np.generic):
        return value
    is_tensor = hasattr(value, "detach")  # of torch
    try:
        return np.asarray(value.detach().cpu() if is_tensor else value)
    except (TypeError, RuntimeError):
        pass
    try:
        return np.asarray(value.detach().cpu().to_dense().float()) if is_tensor else value
    except (TypeError, RuntimeError):
        return value


def _length(column: Any) -> int | None:
    """Return the number of rows of a column; None if it is a single value."""
    if isinstance(column, Ragged):
        return len(column.offsets) - 1
    has_items = hasattr(column, "__len__") and hasattr(column, "__getitem__")
    if not has_items or isinstance(column, (str, bytes)) or getattr(column, "shape", None) == ():
        return None
    return len(column)
