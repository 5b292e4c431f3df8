"""Columns of batches: joined, split and emptied."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from dataload._util.arrays import pooled_empty
from dataload.errors import ConfigError, SourceError
from dataload.types import Batch, BytesColumn, Int64Array

_NOT_ARRAYS = (list, dict, tuple, BytesColumn)  # the other kinds of columns


class Ragged(NamedTuple):
    """Values of different lengths, one after another in one array.

    Attributes:
        values: (total, *shape), the values of all rows along the first axis; or a `Ragged`, of lists of lists.
        offsets: (rows + 1,) int64; row i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: Any
    offsets: Int64Array


def scatter_columns(pieces: Iterable[tuple[Int64Array, Any]], rows: int) -> Any:
    """Return one batch from `pieces`: row numbers, (k,) int64, and a batch. Every row is in exactly one piece."""
    out: Batch = {}
    kind: type[Any] = dict
    nested: dict[str, list[tuple[Int64Array, Any]]] = {}
    lazy: dict[str, list[tuple[Int64Array, BytesColumn]]] = {}
    first_row = -1
    for where, piece in pieces:
        batch = _by_name(piece)
        if first_row < 0:
            kind, first_row = type(piece), int(where[0])
            out = {name: _column_like(column, rows) for name, column in batch.items()}
        if batch.keys() != out.keys():
            differing = ", ".join(sorted(str(name) or "values without a name" for name in batch.keys() ^ out.keys()))
            raise ConfigError(
                f"rows {first_row} and {int(where[0])} have different fields ({differing} only in one): "
                "choose common ones with fields=[...], or add the missing ones in a transform"
            )
        for name, column in batch.items():
            target = out[name]
            if isinstance(target, list) and isinstance(column, BytesColumn):
                lazy.setdefault(name, []).append((where, column))
            elif isinstance(target, list) and isinstance(column, list):
                for row, value in zip(where.tolist(), cast("list[Any]", column), strict=True):
                    target[row] = value
            elif isinstance(target, dict) and isinstance(column, (dict, tuple)):
                nested.setdefault(name, []).append((where, column))
            elif (
                isinstance(target, (list, dict))
                or isinstance(column, _NOT_ARRAYS)
                or column.shape[1:] != target.shape[1:]
                or column.dtype != target.dtype
            ):
                raise unequal(name, first_row, _kind(target), int(where[0]), _kind(column))
            elif len(column) != len(where):  # numpy would repeat a single value
                raise SourceError(f"{describe_field(name)} has {len(column)} values for {len(where)} records")
            else:
                target[where] = column
    for name, parts in lazy.items():
        kinds = {type(column) for _, column in parts}
        if len(kinds) == 1 and sum(len(column) for _, column in parts) == rows:
            out[name] = kinds.pop().scattered(parts, rows)
            continue
        for where, column in parts:  # other pieces are lists, or bytes beside text
            for row, value in zip(where.tolist(), column, strict=True):
                out[name][row] = value
    for name, column in out.items():
        if isinstance(column, list) and rows and isinstance(column[0], str):
            require_text(cast("list[Any]", column), name)
    out |= {name: scatter_columns(parts, rows) for name, parts in nested.items()}
    if issubclass(kind, dict):
        return out
    return like(kind, out.values()) if issubclass(kind, tuple) else out[""]


def _by_name(batch: Any) -> Batch:
    """Return the columns of a batch by name. A tuple's columns are named by number; a single column's name is empty."""
    if isinstance(batch, tuple):
        return {str(number): column for number, column in enumerate(cast("tuple[Any, ...]", batch))}
    return cast("Batch", batch) if isinstance(batch, dict) else {"": batch}


def _kind(column: Any) -> str:
    return "not an array" if isinstance(column, _NOT_ARRAYS) else f"{column.dtype} {column.shape[1:]}"


def _column_like(column: Any, rows: int) -> Any:
    if isinstance(column, (list, BytesColumn)):
        return [None] * rows
    if isinstance(column, (dict, tuple)):
        return {}
    make = np.empty if column.dtype.hasobject else pooled_empty
    return make((rows, *column.shape[1:]), column.dtype)


def empty_like(batch: Any) -> Any:
    """Return a batch without rows, with the fields, dtypes and shapes of `batch`."""

    def empty(column: Any, _: str) -> Any:
        return Ragged(empty(column.values, _), np.zeros(1, np.int64)) if isinstance(column, Ragged) else column[:0]

    return map_columns(batch, empty)


def in_chunks(batch: Any, rows: int, chunk: int, *, strict: bool = True) -> Any:
    """Split the first axis, of ``rows * chunk`` values, in two; any other value is left as it is if not `strict`."""
    records = rows * chunk

    def split(column: Any, name: str) -> Any:
        if isinstance(column, (list, BytesColumn)) and len(cast("Sequence[Any]", column)) == records:
            return [column[start : start + chunk] for start in range(0, records, chunk)]
        array = cast("Any", column)
        shape = tuple(getattr(array, "shape", ()))
        if shape[:1] == (records,):
            return array.reshape((rows, chunk, *shape[1:]))
        if not strict:
            return column
        found = type(column).__name__ + (f" of shape {shape}" if shape else "") + (f" for {name!r}" if name else "")
        raise ConfigError(
            f"chunks of {chunk} records need arrays, tensors or lists of {records} values from collate, got {found}: "
            "use chunk=1, or a policy other than 'ragged'",
            key="chunk",
            value=chunk,
        )

    return map_columns(batch, split)


def map_columns(batch: Any, function: Callable[[Any, str], Any], name: str = "") -> Any:
    """Return a batch with each column replaced by ``function(column, name)``; names of nested fields have dots."""
    if isinstance(batch, Mapping):
        columns = cast("Mapping[str, Any]", batch).items()
        return {key: map_columns(column, function, join(name, key)) for key, column in columns}
    if isinstance(batch, tuple) and not isinstance(batch, Ragged):
        return like(type(batch), [map_columns(column, function, join(name, i)) for i, column in enumerate(batch)])
    return function(batch, name)


def join(name: str, key: object) -> str:
    """Return the path of a field in another."""
    return f"{name}.{key}" if name else str(key)


def like(kind: type[Any], values: Iterable[Any]) -> Any:
    """Return `values` as a tuple, or as a named tuple of this class."""
    return getattr(kind, "_make", tuple)(values)


def unequal(name: str, row: int, one: str, other_row: int, other: str) -> ConfigError:
    """Return the error for values of a field that do not stack."""
    one_shape = one.partition(" ")[2] == other.partition(" ")[2]
    remedy = "give it one type in a transform" if one_shape else "set a collate policy for it: pad, ragged or list"
    message = f"cannot stack {describe_field(name)}: row {row} is {one}, row {other_row} is {other}; {remedy}"
    return ConfigError(message, key=name or None)


def require_text(values: list[Any], name: str) -> None:
    """Raise a ConfigError if a field that begins with text has a value that is neither text nor None."""
    if any(not issubclass(kind, (str, type(None))) for kind in set(map(type, values))):
        row = next(row for row, value in enumerate(values) if not isinstance(value, (str, type(None))))
        raise unequal(name, 0, "str", row, type(values[row]).__name__)


_NOT_LISTED = (str, bool, int, float, tuple, Mapping)  # a column of these is checked, or is no list


def as_list(values: list[Any], name: str) -> list[Any]:
    """Return bytes, or objects of any class, unchanged; a ConfigError if one of them would be refused as the first."""
    kinds = {*map(type, values)}
    if len(kinds) > 1 and not kinds <= {str, type(None)}:
        for row, value in enumerate(values):
            if isinstance(value, _NOT_LISTED) or hasattr(value, "__array__"):
                raise unequal(name, 0, type(values[0]).__name__, row, type(value).__name__)
    return values


def describe_field(name: str) -> str:
    """Return a field's name for messages."""
    return f"field {name!r}" if name else "the samples"
