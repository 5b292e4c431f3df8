"""What a plan adds to its batch: chunks as an axis, the mask of what only fills up, and columns of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

from dataload.collate import Ragged
from dataload.errors import ConfigError
from dataload.samplers import BatchPlan

__all__ = ["complete", "in_chunks"]


def complete(batch: Any, plan: BatchPlan) -> Any:
    """A batch as its plan says: see `BatchPlan`. One that is no mapping then stands under "data".

    Args:
        batch: Collated samples, the records of a chunk one after another.
        plan: The rows.

    Raises:
        ConfigError: A field has a name that is added, or is something that cannot be cut into chunks.
    """
    if plan.valid is None and plan.columns is None:
        return batch
    if plan.chunk > 1:
        batch = in_chunks(batch, plan.rows, plan.chunk, _refuse)
    fields = cast("Mapping[str, Any]", batch) if isinstance(batch, Mapping) else {"data": batch}
    added = {**(plan.columns or {}), **({} if plan.valid is None else {"valid": plan.valid})}
    for name in added:
        if name in fields:
            raise _taken(name, plan)
    # Copies: a batch is its consumer's, who may write to it, and these are parts of what many steps have.
    return {**fields, **{name: column.copy() for name, column in added.items()}}


def _taken(name: str, plan: BatchPlan) -> ConfigError:
    if plan.columns is None:
        return ConfigError(
            "tail='pad' adds the mask 'valid' to each batch, and the samples have a field of that name: rename it, or "
            "choose tail='drop' or 'partial'",
            key="tail",
            value="pad",
        )
    return ConfigError(
        f"streams add {name!r} to each batch, and the samples have a field of that name: rename it", key=name
    )


def in_chunks(batch: Any, rows: int, chunk: int, unfit: Callable[[Any, int, int, str], Any], name: str = "") -> Any:
    """Let the first axis be two: rows, and places in their chunks.

    Args:
        batch: Columns of ``rows * chunk`` values: arrays, tensors and lists, in mappings and tuples.
        rows: Rows.
        chunk: Places of each.
        unfit: Gives what shall stand for something else, from it, `rows`, `chunk` and the name of its field.
        name: Of the field that `batch` is.
    """
    records = rows * chunk
    if isinstance(batch, Mapping):
        columns = cast("Mapping[str, Any]", batch).items()
        return {
            key: in_chunks(value, rows, chunk, unfit, f"{name}.{key}" if name else str(key)) for key, value in columns
        }
    if isinstance(batch, tuple) and not isinstance(batch, Ragged):
        values = cast("tuple[Any, ...]", batch)
        parts = [
            in_chunks(value, rows, chunk, unfit, f"{name}.{i}" if name else str(i)) for i, value in enumerate(values)
        ]
        return getattr(values, "_make", tuple)(parts)  # a named tuple stays one
    if isinstance(batch, list) and len(cast("list[Any]", batch)) == records:
        values = cast("list[Any]", batch)
        return [values[start : start + chunk] for start in range(0, records, chunk)]
    array = cast("Any", batch)
    shape = tuple(getattr(array, "shape", ()))
    fits = not isinstance(batch, Ragged) and shape[:1] == (records,)
    return array.reshape((rows, chunk, *shape[1:])) if fits else unfit(array, rows, chunk, name)


def _refuse(found: Any, rows: int, chunk: int, name: str) -> NoReturn:
    shape = tuple(getattr(found, "shape", ()))
    what = type(found).__name__ + (f" of shape {shape}" if shape else "")
    raise ConfigError(
        f"chunks of {chunk} records need arrays, tensors or lists of {rows * chunk} values from collate, got {what}"
        f"{f' for {name!r}' if name else ''}: use chunk=1, or another policy than 'ragged'",
        key="chunk",
        value=chunk,
    )
