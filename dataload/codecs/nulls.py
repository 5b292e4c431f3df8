"""Values in place of the nulls of a table, and masks that tell where they are."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from dataload._util.arrays import split_records
from dataload.codecs.arrow import (
    combined,
    is_bytes,
    is_list,
    is_text,
    load_arrow,
    numbers_of,
    pa_module,
    plain_array,
    to_column,
    without_views,
)
from dataload.errors import ConfigError, closest
from dataload.types import Array, BytesColumn, NullPolicy


class Fill(NamedTuple):
    """The value that replaces the nulls of a field, and whether a field of masks is added."""

    value: Any  # None for a neutral value
    masked: bool  # whether a field of masks is added
    named: bool  # whether the user has named the field


def mask_name(field: str) -> str:
    """Return the name of the field that tells where `field` is null."""
    return f"{field}_is_null"


def policy_of(nulls: NullPolicy, field: str) -> Fill | None:
    """Return how nulls of a field are filled, by the user's setting; None if they are errors."""
    named = isinstance(nulls, Mapping)
    chosen = nulls.get(field) if isinstance(nulls, Mapping) else nulls
    if chosen is None or (isinstance(chosen, str) and chosen == "error"):
        return None
    if isinstance(chosen, str) and chosen == "mask":
        return Fill(None, masked=True, named=named)
    return Fill(chosen.item() if isinstance(chosen, np.generic) else chosen, masked=False, named=named)


def check_names(nulls: NullPolicy, masked: Iterable[str], known: Sequence[str], owner: str) -> None:
    """Raise a ConfigError if `nulls` names an unknown field, or the mask of a field has the name of another field."""
    for name in nulls if isinstance(nulls, Mapping) else ():
        if name not in known:
            message = f"nulls names {name!r}, which {owner} does not have: {closest(name, known)}"
            raise ConfigError(message, key=f"nulls.{name}", value=name)
    for name in masked:
        if mask_name(name) in known:
            message = f"nulls='mask' adds {mask_name(name)!r}, a field that {owner} has: pass nulls={{field: value}}"
            raise ConfigError(f"{message} for {name!r}, or rename that field", key="nulls", value="mask")


def with_masks(names: Sequence[str] | None, known: Container[str], nulls: NullPolicy) -> tuple[str, ...] | None:
    """Return names of fields, each with its mask's name if it has a mask; None means all."""
    if names is None or nulls is None:
        return None if names is None else tuple(names)
    found: dict[str, None] = {}
    for name in names:
        fill, mask = policy_of(nulls, name), mask_name(name)
        found[name] = None
        if fill is not None and fill.masked and mask in known:
            found[mask] = None
    return tuple(found)


def fills_of_samples(samples: Mapping[str, Any], nulls: NullPolicy, owner: str) -> dict[str, tuple[Any, str | None]]:
    """Return what stands for nulls of Python values, given a sample of each field, and the name of its mask or None."""
    found: dict[str, tuple[Any, str | None]] = {}
    for name, sample in samples.items():
        fill = policy_of(nulls, name)
        if fill is None or (sample is None and fill.value is None):
            continue
        is_float, value = type(sample) is float, fill.value
        takes = sample is None or type(value) is type(sample) or (is_float and type(value) is int)
        if value is not None and not takes and not is_float and fill.named:
            message = f"nulls replaces nulls of {name!r} by {value!r}, and {owner} has {sample!r:.40} there"
            raise ConfigError(message, key=f"nulls.{name}", value=value)
        if value is None or (is_float and not fill.named):
            value = _neutral(sample)
        elif not takes:
            continue
        value = float(value) if is_float and type(value) is int else value
        found[name] = value, mask_name(name) if fill.masked and (fill.named or not is_float) else None
    check_names(nulls, [name for name, (_, mask) in found.items() if mask], [*samples], owner)
    return found


def _neutral(sample: Any) -> Any:
    if isinstance(sample, dict):
        return {name: _neutral(value) for name, value in cast("dict[str, Any]", sample).items()}
    return np.nan if isinstance(sample, float) else None if sample is None else type(sample)()


def fill_of(nulls: NullPolicy, field: str, kind: Any) -> Fill | None:
    """Return how nulls of a column of an Arrow type are filled; a ConfigError if a value for this field cannot be."""
    fill, numbers = policy_of(nulls, field), numbers_of(kind)
    if fill is None or (not fill.named and _has_null(numbers)):
        return None
    if fill.value is None or _fits(kind, fill):
        return fill
    if not fill.named:
        return None
    limits = ""
    if numbers is not None and numbers.dtype.kind in "iu":
        limits = f", which holds {np.iinfo(numbers.dtype).min} to {np.iinfo(numbers.dtype).max}"
    message = f"nulls replaces nulls of {field!r} by {fill.value!r}, which does not fit its type, {kind}{limits}"
    raise ConfigError(message, key=f"nulls.{field}", value=fill.value)


def _has_null(numbers: Any) -> bool:
    """Return whether a column of these numbers has a value for nulls by itself: NaN or NaT."""
    return numbers is not None and numbers.dtype.kind in "fmM" and not numbers.shape


def shows_nulls(kind: Any) -> bool:
    """Return whether values of an Arrow type are numbers or text that cannot be null, for which nulls are counted."""
    kind = getattr(kind, "value_type", kind) if pa_module().types.is_dictionary(kind) else kind
    numbers = numbers_of(kind)
    return is_text(kind) or (numbers is not None and not numbers.shape and not _has_null(numbers))


def fill_nulls(array: Any, fill: Fill) -> tuple[Any, Array]:
    """Return an Arrow array with values in place of nulls, and (rows,) bool, where a value has been put."""
    array = combined(array)
    if pa_module().types.is_dictionary(array.type):
        # Nulls may be values of the dictionary, too, which are not seen in the numbers.
        array = array.dictionary.take(array.indices) if array.dictionary.null_count else array
    elif (plain := without_views(array.type)) != array.type:
        array = array.cast(plain)
    return _filled(array, fill)


def _filled(array: Any, fill: Fill) -> tuple[Any, Array]:
    pa, kind, count = pa_module(), array.type, len(array)
    types, gone = pa.types, array.is_null().to_numpy(zero_copy_only=False)
    if isinstance(kind, pa.FixedShapeTensorType):
        storage, gone = _filled(array.storage, fill)
        return pa.ExtensionArray.from_storage(kind, storage), gone
    if types.is_struct(kind) and not any(types.is_union(each.type) for each in kind):  # `flatten` aborts at unions
        parts = [_filled(part, fill) for part in array.flatten()]
        named = [each.with_type(part.type) for each, (part, _) in zip(kind, parts, strict=True)]
        gone = np.logical_or.reduce([gone, *(inner for _, inner in parts)])
        mask = None if parts else pa.array(np.zeros(count, np.bool_))
        return pa.StructArray.from_arrays([part for part, _ in parts], fields=named, mask=mask), gone
    if is_list(kind):
        ends = np.zeros(count + 1, np.int64)
        np.cumsum(array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), out=ends[1:])
        items, inner = _filled(array.flatten(), fill)
        before = np.concatenate(([0], np.cumsum(inner)))  # items that were filled
        return pa.LargeListArray.from_arrays(pa.array(ends), items), gone | (before[ends[1:]] > before[ends[:-1]])
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        items = array.values.slice(array.offset * size, count * size)
        if gone.any():
            valid = pa.array(np.repeat(~gone, size))
            items = load_arrow("nulls", "pyarrow.compute").if_else(valid, items, pa.scalar(None, items.type))
        items, inner = _filled(items, fill)
        array = pa.Array.from_buffers(pa.list_(items.type, size), count, [None], children=[items])
        return array, gone | inner.reshape(count, size).any(axis=1)
    if not gone.any():
        return array, gone
    if types.is_dictionary(kind) and without_views(kind.value_type) != kind.value_type:
        array = pa.DictionaryArray.from_arrays(array.indices, plain_array(array.dictionary))
    scalar = _scalar(kind.value_type if types.is_dictionary(kind) else kind, fill)
    if scalar is None:
        return array, gone if fill.named else np.zeros(count, np.bool_)
    if types.is_null(kind):
        return pa.repeat(scalar, count), gone
    try:
        return array.fill_null(scalar), gone
    except pa.ArrowNotImplementedError:  # before pyarrow 24, in a dictionary of large text, such as Polars'
        return array.dictionary_decode().fill_null(scalar), gone


def _scalar(kind: Any, fill: Fill) -> Any:
    """Return what stands for nulls of a type of plain values; None if they stay nulls, or the value does not fit."""
    pa = pa_module()
    value: Any = fill.value
    types = pa.types
    is_number = types.is_integer(kind) or types.is_decimal(kind)
    if value is None:
        if is_bytes(kind):
            value = bytes(kind.byte_width) if types.is_fixed_size_binary(kind) else b""
        elif types.is_map(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
            value = []
        elif is_number or types.is_boolean(kind) or is_text(kind):
            value = False if types.is_boolean(kind) else "" if is_text(kind) else 0
        else:
            return None
    elif types.is_null(kind):
        return pa.scalar(value) if fill.named else None
    elif isinstance(value, str):
        if not is_text(kind):
            return None
    elif isinstance(value, bool):
        if not types.is_boolean(kind):
            return None
    elif types.is_floating(kind):
        return pa.scalar(float(value), kind) if fill.named else None
    elif not is_number or value != int(value):
        return None
    try:
        return pa.scalar(value if not is_number else int(value), kind)
    except (pa.ArrowException, OverflowError):
        return None


def _fits(kind: Any, fill: Fill) -> bool:
    """Return whether some of the plain values that a type is made of can be the value."""
    types = pa_module().types
    kind = getattr(kind, "storage_type", kind)
    if types.is_struct(kind):
        return any(_fits(each.type, fill) for each in kind)
    if is_list(kind) or types.is_fixed_size_list(kind) or types.is_dictionary(kind):
        return _fits(kind.value_type, fill)
    return _scalar(kind, fill) is not None


class TableColumns(NamedTuple):
    """The columns of a table in memory by name, and, (rows,) bool, where some of them have nulls."""

    columns: dict[str, Any]  # arrays or lists
    refused: dict[str, Array]  # where a column may not be read
    nulls: dict[str, Array]  # where a column is null, whatever stands there


def columns_of(table: Any, names: Sequence[str] | None, nulls: NullPolicy) -> TableColumns:
    """Return the columns of a table: any object with ``__arrow_c_stream__``."""
    found = pa_module().table(table)
    known = [name for name in found.column_names if not name.startswith("__index_level_")]  # pandas adds its index
    columns: dict[str, Any] = {}
    refused: dict[str, Array] = {}
    gone: dict[str, Array] = {}
    for name in known if names is None else names:
        if found.column_names.count(name) != 1:
            message = f"the table has several columns {name!r}" if name in known else f"there is no field {name!r}"
            raise ConfigError(f"{message}: {closest(name, known)}", key="fields", value=name)
        array = found.column(name)
        if array.null_count:
            gone[name] = array.is_null().to_numpy()
        fill = fill_of(nulls, name, array.type)
        array, filled = fill_nulls(array, fill or Fill(None, masked=False, named=False))
        if pa_module().types.is_null(array.type):
            array, filled = pa_module().array(filled), ~filled
        column = to_column(array, name)
        columns[name] = list(column) if isinstance(column, BytesColumn) else column
        if isinstance(column, Mapping):
            columns[name] = split_records(column, len(found))
        if fill is None and filled.any():
            refused[name] = filled
        elif fill is not None and fill.masked:
            columns[mask_name(name)] = filled
    masked = [name for name in columns if (fill := policy_of(nulls, name)) and fill.masked and name in known]
    check_names(nulls, masked, known, "the table")
    return TableColumns(columns, refused, gone)
