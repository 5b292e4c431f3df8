"""Batches from samples: pure functions, which sources also use to build columns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np

from dataload._util import arrays as padding
from dataload._util.arrays import pooled_empty, stack_alike
from dataload._util.settings import setting_error
from dataload.errors import ConfigError, closest
from dataload.types import Array, Batch, BytesColumn, Int64Array

PolicyName: TypeAlias = Literal["stack", "pad", "ragged", "list"]
Policy: TypeAlias = PolicyName | Mapping[Literal["pad"], int | Sequence[int]]
"""Treatment of a field whose values differ in shape; `stack` refuses them. See `Collate`."""


class Ragged(NamedTuple):
    """Values of different lengths, one after another in one array.

    Attributes:
        values: (total, *shape), the values of all rows along the first axis.
        offsets: (rows + 1,) int64; row i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: Array
    offsets: Int64Array


@dataclass(frozen=True, slots=True)
class Collate:
    """Stacks samples into a batch, field by field.

    Arrays and numbers of equal shape become one array of shape ``(rows, *shape)``. Dicts and tuples are collated
    inside. Bytes, text, lists and other objects become a list; `pad` and `ragged` make arrays of lists. No samples give
    ``{}``.

    Attributes:
        policies: What to do if the shapes of a field differ, by field name. `pad` fills up with `pad_value` and adds
            the true lengths as ``<field>_length``, (rows,) int64; `ragged` gives a `Ragged`; `list` gives a list.
            ``{"pad": 64}`` pads the first axis to a multiple of 64, and ``{"pad": [128, 256, 512]}`` to the first of
            these lengths that is enough, so that batches have few distinct shapes.
        pad_value: The value that `pad` fills up with, or values by field: ``{"labels": -100}``, where others get 0.
            None is 0, with a warning if more than one integer field is padded.

    Raises:
        ConfigError: A policy is unknown; or, when called, the samples have different fields, or shapes or dtypes that
            their policy does not allow, a value is longer than all lengths to pad to, or `pad_value` does not fit.
    """

    policies: Mapping[str, Policy] = field(default_factory=dict[str, Policy])
    pad_value: padding.PadValue | None = None

    def __post_init__(self) -> None:
        checked = {name: _check_policy(policy, name) for name, policy in self.policies.items()}
        object.__setattr__(self, "policies", checked)
        padding.check_pad_value(self.pad_value, [name for name, policy in checked.items() if "pad" in policy])

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of `samples`, in their order."""
        batch = self._collate(list(samples), "") if samples else {}
        if self.policies and self.pad_value is None:
            padding.warn_of_padding(padded_fields(self, batch), stacklevel=2)
        return batch

    def _collate(self, samples: list[Any], name: str) -> Any:
        first = samples[0]
        if isinstance(first, Mapping):
            return self._collate_dicts(samples, name)
        if isinstance(first, tuple):
            return self._collate_tuples(cast("list[tuple[Any, ...]]", samples), name)
        policy = self.policies.get(name, "stack")
        if policy == "list" or isinstance(first, (bytes, str, bytearray, memoryview)):
            return samples
        if policy != "stack":
            arrays = _comparable([np.asarray(value) for value in samples], name, policy)
            if policy == "ragged":
                return ragged(arrays)
            value = padding.fill_of(self.pad_value, name, arrays[0].dtype)
            return padding.pad(arrays, value, policy["pad"] if isinstance(policy, Mapping) else 1, name)
        return _stack(samples, name)

    def _collate_dicts(self, samples: list[Mapping[str, Any]], name: str) -> Batch:
        first = samples[0]
        batch: Batch = {}
        for key, values in _columns(samples, name).items():
            path = _join(name, key)
            batch[key] = self._collate(values, path)
            if "pad" in self.policies.get(path, ""):  # the policy, or the key of one with lengths
                if f"{key}_length" in first:
                    raise ConfigError(
                        f"padding field {path!r} adds the true lengths as {key}_length, a field that exists: rename it",
                        key=path,
                    )
                batch[f"{key}_length"] = np.array([len(sample[key]) for sample in samples], np.int64)
        return batch

    def _collate_tuples(self, samples: list[tuple[Any, ...]], name: str) -> tuple[Any, ...]:
        lengths = {len(sample) for sample in samples}
        if len(lengths) > 1:
            raise ConfigError(f"samples are tuples of different lengths: {sorted(lengths)}", key=name or None)
        columns = zip(*samples, strict=True)
        batch = [self._collate(list(column), _join(name, i)) for i, column in enumerate(columns)]
        return _like(samples[0], batch)


default_collate: Collate = Collate()


def padded_fields(collate: Any, batch: Any) -> dict[str, str]:
    """Return the dtypes of the fields of a batch that a `Collate` or `Pack` has padded."""
    found: dict[str, str] = {}
    _map_columns(batch, lambda column, name: found.update({name: str(getattr(column, "dtype", ""))}))
    if isinstance(collate, Pack):
        return {name: dtype for name, dtype in found.items() if name not in ("segment_ids", collate.positions)}
    return {name: found[name] for name, policy in collate.policies.items() if "pad" in policy and name in found}


def ragged(arrays: Sequence[Array]) -> Ragged:
    """Return arrays one after another along the first axis, with their offsets."""
    lengths = [array.shape[0] if array.ndim else 1 for array in arrays]
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Ragged(np.concatenate([np.atleast_1d(array) for array in arrays]), offsets)


def _check_policy(policy: Any, name: str) -> Policy:
    """Return the policy of a field, with the lengths to pad to as a tuple."""
    key = f"collate.{name}"
    if isinstance(policy, Mapping):
        given = cast("Mapping[Any, Any]", policy)
        if {*given} != {"pad"}:
            raise setting_error(key, policy, 'must be a policy, or {"pad": lengths}')
        return {"pad": padding.check_padded_lengths(f"{key}.pad", given["pad"])}
    if policy not in get_args(PolicyName):
        message = f"collate policy of field {name!r} is {policy!r}: {closest(policy, get_args(PolicyName))}"
        raise ConfigError(message, key=key, value=policy)
    return policy


def _columns(samples: list[Mapping[str, Any]], name: str) -> dict[str, list[Any]]:
    """Return the values of each field; all samples must have the fields of the first."""
    first = samples[0]
    if set(map(type, samples)) == {dict} and set(map(len, samples)) == {len(first)}:
        try:  # as many fields, and those of the first among them
            return {key: list(map(itemgetter(key), samples)) for key in first}
        except KeyError:
            pass
    for row, sample in enumerate(samples):
        if sample.keys() != first.keys():
            differing = sorted(map(str, sample.keys() ^ first.keys()))
            raise ConfigError(
                f"samples in rows 0 and {row} have different fields ({', '.join(differing)} only in one): "
                "choose common ones with fields=[...]",
                key=name or None,
            )
    return {key: [sample[key] for sample in samples] for key in first}


def _stack(values: list[Any], name: str) -> Any:
    if isinstance(values[0], (bool, int, float)):
        kinds = {type(value) for value in values}
        if kinds == {int, float}:
            return np.array(values, np.float64)  # JSON writes 1 for 1.0
        if len(kinds) > 1:
            row = next(row for row, value in enumerate(values) if type(value) is not type(values[0]))
            raise _unequal(name, 0, type(values[0]).__name__, row, type(values[row]).__name__)
        return np.array(values)
    if not (isinstance(values[0], (np.ndarray, np.generic)) or hasattr(values[0], "__array__")):
        return values  # objects of the user's own classes
    stacked = stack_alike(values)
    if stacked is not None:
        return stacked
    arrays = [np.asarray(value) for value in values]
    first = arrays[0]
    for row, array in enumerate(arrays):
        if array.shape != first.shape or array.dtype != first.dtype:
            raise _unequal(name, 0, _describe(first), row, _describe(array))
    return np.stack(arrays)


def _comparable(arrays: list[Array], name: str, policy: Policy) -> list[Array]:
    """Return the arrays in their common dtype, or raise if they differ in more than `policy` allows."""
    # An empty Python list became float64, which says nothing about the dtype.
    first = next((array for array in arrays if array.size), arrays[0])
    fixed = 1 if policy == "ragged" else first.ndim  # axes from here on must agree
    what = f"cannot collate {_describe_field(name)} by {'pad' if 'pad' in policy else policy!r}"
    for row, array in enumerate(arrays):
        if array.ndim == 0:
            raise ConfigError(f"{what}: row {row} is {_describe(array)}, which has no axis", key=name or None)
        unlike = array.ndim != first.ndim or array.shape[fixed:] != first.shape[fixed:]
        if unlike or (array.size and array.dtype != first.dtype):
            other = next(i for i, candidate in enumerate(arrays) if candidate is first)
            may = "along the first axis" if policy == "ragged" else "in their extents"
            raise ConfigError(
                f"{what}: row {other} is {_describe(first)}, row {row} is {_describe(array)}; arrays may differ only "
                f"{may}",
                key=name or None,
            )
    return [array.astype(first.dtype, copy=False) for array in arrays]


def _describe(array: Array) -> str:
    return f"{array.dtype} {array.shape}"


def _describe_field(name: str) -> str:
    return f"field {name!r}" if name else "the samples"


def _unequal(name: str, row: int, one: str, other_row: int, other: str) -> ConfigError:
    return ConfigError(
        f"cannot stack {_describe_field(name)}: row {row} is {one}, row {other_row} is {other}; "
        "set a collate policy for it: pad, ragged or list",
        key=name or None,
    )


def scatter_columns(pieces: Iterable[tuple[Int64Array, Batch]], rows: int) -> Batch:
    """Return one batch from `pieces`: row numbers, (k,) int64, and columns. Every row is in exactly one piece."""
    out: Batch = {}
    nested: dict[str, list[tuple[Int64Array, Batch]]] = {}
    lazy: dict[str, list[tuple[Int64Array, BytesColumn]]] = {}
    first_row = 0
    for where, batch in pieces:
        if not out:
            first_row = int(where[0])
            out = {name: _column_like(column, rows) for name, column in batch.items()}
        if batch.keys() != out.keys():
            differing = ", ".join(sorted(batch.keys() ^ out.keys()))
            raise ConfigError(
                f"rows {first_row} and {int(where[0])} have different fields ({differing} only in one): "
                "choose common ones with fields=[...]"
            )
        for name, column in batch.items():
            target = out[name]
            if isinstance(target, list) and isinstance(column, BytesColumn):
                lazy.setdefault(name, []).append((where, column))
            elif isinstance(target, list) and isinstance(column, list):
                for row, value in zip(where.tolist(), cast("list[Any]", column), strict=True):
                    target[row] = value
            elif isinstance(target, dict) and isinstance(column, dict):
                nested.setdefault(name, []).append((where, cast("Batch", column)))
            elif (
                isinstance(target, (list, dict))
                or isinstance(column, (list, dict, BytesColumn))
                or column.shape[1:] != target.shape[1:]
                or column.dtype != target.dtype
            ):
                raise _unequal(name, first_row, _kind(target), int(where[0]), _kind(column))
            else:
                target[where] = column
    for name, parts in lazy.items():
        if sum(len(column) for _, column in parts) == rows:
            out[name] = BytesColumn.scattered(parts, rows)
            continue
        for where, column in parts:  # other pieces are lists
            for row, value in zip(where.tolist(), column, strict=True):
                out[name][row] = value
    return {**out, **{name: scatter_columns(parts, rows) for name, parts in nested.items()}}


def _kind(column: Any) -> str:
    return "not an array" if isinstance(column, (list, dict, BytesColumn)) else f"{column.dtype} {column.shape[1:]}"


def _column_like(column: Any, rows: int) -> Any:
    if isinstance(column, (list, BytesColumn)):
        return [None] * rows
    if isinstance(column, dict):
        return {}
    make = np.empty if column.dtype.hasobject else pooled_empty
    return make((rows, *column.shape[1:]), column.dtype)


def empty_like(batch: Any) -> Any:
    """Return a batch without rows, with the fields, dtypes and shapes of `batch`."""

    def empty(column: Any, _: str) -> Any:
        return Ragged(column.values[:0], np.zeros(1, np.int64)) if isinstance(column, Ragged) else column[:0]

    return _map_columns(batch, empty)


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

    return _map_columns(batch, split)


def _map_columns(batch: Any, function: Callable[[Any, str], Any], name: str = "") -> Any:
    """Return a batch with each column replaced by ``function(column, name)``; names of nested fields have dots."""
    if isinstance(batch, Mapping):
        columns = cast("Mapping[str, Any]", batch).items()
        return {key: _map_columns(column, function, _join(name, key)) for key, column in columns}
    if isinstance(batch, tuple) and not isinstance(batch, Ragged):
        return _like(batch, [_map_columns(column, function, _join(name, i)) for i, column in enumerate(batch)])
    return function(batch, name)


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _like(original: tuple[Any, ...], values: list[Any]) -> Any:
    """Return `values` as a tuple, or as a named tuple of the same class."""
    return getattr(type(original), "_make", tuple)(values)


class Packing(NamedTuple):
    """The positions of a step's records in rows that hold several records; arrays have one entry per record."""

    rows: Int64Array  # its row; ascending
    starts: Int64Array  # its first position in the row; ascending within a row
    lengths: Int64Array  # its length; the part that does not fit into the row is cut off
    shape: tuple[int, int]  # (rows, row_length) of the batch


@dataclass(frozen=True, slots=True)
class Pack:
    """Lays out several records in each row of a batch, according to a `Packing`.

    All fields are sequences along their first axis, of the record's length. Each becomes ``(rows, row_length, *rest)``.
    Two fields are added, both ``(rows, row_length)`` int32:

    - ``segment_ids``: 1 for the first record of a row, 2 for the second, ...; 0 for padding;
    - ``position_ids``: the position within the record, from 0.

    Attributes:
        pad_value: The value of padding, or values by field; see `Collate`.
        positions: Name of the field of positions. Version 0.1 called it ``"positions"``.

    Raises:
        ConfigError: When called: a field is not a sequence of the length in the packing, dtypes differ, or a field has
            the name of an added one.
    """

    pad_value: padding.PadValue | None = None
    positions: str = "position_ids"

    def __call__(self, samples: Sequence[Any], packing: Packing) -> Batch:
        """Return the batch of `samples`: one per record, or a single one that shows the fields if there are none."""
        records = [sample if isinstance(sample, Mapping) else {"data": sample} for sample in samples]
        first = cast("Mapping[str, Any]", records[0])
        padding.check_pad_value(self.pad_value, first)
        batch = {name: self._lay_out([record[name] for record in records], name, packing) for name in first}
        for name, column in zip(("segment_ids", self.positions), padding.added_columns(*packing), strict=True):
            if name in batch:
                message = f"packing adds {name!r}, and the samples have a field of that name: rename it"
                raise ConfigError(message, key=name)
            batch[name] = column
        if self.pad_value is None:
            padding.warn_of_padding(padded_fields(self, batch), stacklevel=2)
        return batch

    def _lay_out(self, values: list[Any], name: str, packing: Packing) -> Array:
        arrays = [np.asarray(value) for value in values]
        first = arrays[0]
        value, row_length = padding.fill_of(self.pad_value, name, first.dtype), packing.shape[1]
        out = np.full((*packing.shape, *first.shape[1:]), value, first.dtype)
        positions = zip(packing.rows.tolist(), packing.starts.tolist(), packing.lengths.tolist(), strict=True)
        for i, (row, start, length) in enumerate(positions):
            array = arrays[i]
            if array.shape[:1] != (length,) or array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
                raise ConfigError(
                    f"cannot pack field {name!r}: {array.dtype} {array.shape} in record {i} of the step, expected "
                    f"{first.dtype} {(length, *first.shape[1:])} from the given lengths; choose sequences "
                    "with fields=[...], or compute the lengths again",
                    key=name,
                )
            out[row, start : start + length] = array[: row_length - start]
        return out
