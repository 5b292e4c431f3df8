"""Columns of classes, facts that readers know of a schema, also from Hugging Face's library, and places of columns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple, Self

import numpy as np

from dataload.catalog.facts import require_known, with_classes
from dataload.codecs.arrow import (
    check_field,
    combined,
    is_list,
    load_arrow,
    numbers_of,
    pa_module,
    plain_array,
    spec_of_type,
    without_views,
)
from dataload.codecs.decoders import DECODERS, Decoder, find_decoder, for_extension
from dataload.codecs.nulls import check_names, fill_of, mask_name
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError, closest
from dataload.sources.arrow import TableOptions
from dataload.storage import RecordFile, base_name
from dataload.types import Array, FieldSpec, Int64Array


def features_of(schema: Any) -> Mapping[str, Any]:
    """Return what Hugging Face's library has written about the columns."""
    try:
        found = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    except (TypeError, KeyError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def shape_of(feature: Any, kind: Any) -> tuple[int, ...] | None:
    """Return the shape that Hugging Face declares for lists of lists of numbers, if it can be that of the type."""
    shape = feature.get("shape") if isinstance(feature, dict) else None
    if not isinstance(shape, list) or not all(type(extent) is int and extent > 0 for extent in shape):
        return None
    lists = 0
    while is_list(kind):
        kind, lists = kind.value_type, lists + 1
    numbers = numbers_of(kind)
    return tuple(shape) if lists and numbers and len(shape) == lists + len(numbers.shape) else None


def classes_of(feature: Any) -> tuple[str, ...] | None:
    """Return the names of classes that Hugging Face declares for a column of numbers."""
    names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
    return tuple(names) if isinstance(names, list) and all(type(name) is str for name in names) else None


def plan_decoders(schema: Any, features: Mapping[str, Any], options: TableOptions, path: str) -> dict[str, Decoder]:
    """Return the decoder of each field that has one."""
    chosen: Mapping[str, Any] = options.decode if isinstance(options.decode, Mapping) else {}
    if options.decode == "auto":
        kinds = {name: str(each.get("_type")).lower() for name, each in features.items() if isinstance(each, dict)}
        chosen = {name: kind for name, kind in kinds.items() if kind in DECODERS and name in schema.names}
    for name in chosen:
        spec = spec_of_type(schema.field(name).type) if name in schema.names else None
        if spec is None or spec.dtype != "bytes":
            known = closest(name, schema.names) if spec is None else f"it is {spec}, and decoders take bytes"
            raise ConfigError(f"decode names the field {name!r} of {path}: {known}", key="decode", value=name)
    return {
        name: for_extension(find_decoder(what, name), "", options.max_record_bytes) for name, what in chosen.items()
    }


UNKNOWN = -(1 << 63)
"""Stands for a value that is not a class, until its record is read."""


def classes_in(array: Any) -> Any:
    """Return the distinct values of an Arrow array that are not null: of a dictionary, all in its order."""
    array = combined(array)
    if pa_module().types.is_dictionary(array.type):
        return plain_array(array.dictionary).drop_null()
    return plain_array(array).unique().drop_null()  # of views, pyarrow would return "" for null


def merged_classes(parts: Iterable[Any], *, in_order: bool) -> list[Any]:
    """Return the classes of all parts, in the order in which they come, or sorted."""
    found = dict.fromkeys(value for part in parts for value in part.to_pylist())
    return [*found] if in_order else sorted(found)


def value_set(name: str, classes: Sequence[Any], kind: Any) -> Any:
    """Return classes as an Arrow array of the type of a column; a ConfigError if one does not fit or comes twice."""
    pa = pa_module()
    kind = without_views(kind.value_type if pa.types.is_dictionary(kind) else kind)
    try:
        found = pa.array([*classes], kind)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        message = f"the classes of {name!r} do not fit its type, {kind}: {error}"
        raise ConfigError(message, key=f"categories.{name}", value=classes) from error
    if len(found.unique()) < len(found):
        raise ConfigError(f"a class of {name!r} is listed twice", key=f"categories.{name}", value=classes)
    return found


def numbered(array: Any, classes: Any) -> Any:
    """Return the number of each value's class as an Arrow array of int64; `UNKNOWN` for others."""
    pc, array = load_arrow("categories", "pyarrow.compute"), combined(array)
    is_dictionary = pa_module().types.is_dictionary(array.type)
    values = array.dictionary if is_dictionary else array
    values = values.cast(without_views(values.type))
    found = pc.index_in(values, value_set=classes).cast("int64")
    unknown = pc.and_(found.is_null(), values.is_valid())
    found = pc.if_else(unknown, np.int64(UNKNOWN), found)
    return found.take(array.indices) if is_dictionary else found


def facts_of(schema: Any, options: TableOptions, path: str) -> dict[str, Any]:
    """Return what a `TableReader` knows of a schema, by its attributes."""
    unreadable = dict[str, str]()
    for number, each in enumerate(schema):
        try:
            check_field(each)
        except UnicodeDecodeError as error:
            message = f"a name in column {number} is not UTF-8: {error.object[:80]!r}"
            raise CorruptFileError(message, path=path) from error
        except UnsupportedFormatError as error:
            unreadable[each.name] = str(error)
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        message = f"{path} has several columns called {twice[0]!r}: rename them where the table is made"
        raise UnsupportedFormatError(message, path=path)
    features, fields, scalars = features_of(schema), dict[str, FieldSpec](), dict[str, np.dtype[Any]]()
    types, given = pa_module().types, options.categories
    if given == "auto":
        given = [each.name for each in schema if types.is_dictionary(each.type)]
    require_known(given or (), schema.names, path, key="categories")
    kinds = {each.name: pa_module().int64() if each.name in (given or ()) else each.type for each in schema}
    listed: Mapping[str, Sequence[Any]] = given if isinstance(given, Mapping) else {}
    fills = ((name, fill_of(options.nulls, name, kind)) for name, kind in kinds.items())
    filled = {name: fill for name, fill in fills if fill is not None}
    bases = {mask_name(name): name for name, fill in filled.items() if fill.masked}
    check_names(options.nulls, bases.values(), schema.names, path)
    shapes = {each.name: shape for each in schema if (shape := shape_of(features.get(each.name), each.type))}
    decoders = plan_decoders(schema, features, options, path)
    for each in schema:
        numbers = numbers_of(each.type)
        if numbers is not None and not numbers.shape and each.name not in (given or ()):
            scalars[each.name] = numbers.dtype
        spec = spec_of_type(each.type, shapes.get(each.name))
        fields[each.name] = FieldSpec("unknown", None) if each.name in decoders else spec
        if classes := classes_of(features.get(each.name)):
            fields = with_classes(fields, {each.name: classes})
        if mask_name(each.name) in bases:
            fields[mask_name(each.name)] = FieldSpec("bool", ())
    return {
        "_schema": schema,
        "_numbers": {name: number for number, name in enumerate(schema.names)},
        "_scalars": scalars | dict.fromkeys(bases, np.dtype(np.bool_)),
        "_shapes": shapes,
        "_decoders": decoders,
        "_fills": filled,
        "_bases": bases,
        "_fields": fields,
        "_unreadable": unreadable,
        "_numbered": frozenset(given or ()),
        "_classes": {name: value_set(name, values, schema.field(name).type) for name, values in listed.items()},
        "categories": [name for name in given or () if name not in listed],
        "_kind": ([(each.name, str(each.type)) for each in schema], shapes, [*decoders], sorted(given or ())),
    }


_NUMBERS_OR_NULLS = frozenset(("int64", "float64", "unknown"))


def differing_types(files: Iterable[tuple[str, Sized, Mapping[str, FieldSpec]]], names: Iterable[str]) -> str:
    """Return what is wrong if a field has different types in CSV files: their paths, records and fields."""
    types: dict[str, str] = {}
    examples: list[str] = []
    filled = [(base_name(path), fields) for path, own, fields in files if len(own)]
    for name in names:
        kinds = {fields[name].dtype: file for file, fields in filled if name in fields}
        if len(kinds) > 1:
            types[name] = "float64" if kinds.keys() <= _NUMBERS_OR_NULLS else "str"
            examples += [f"{name!r} is {kind} in {file}" for kind, file in kinds.items()]
    problem = f"has columns of different types ({', '.join(examples)}), which no batch can hold: pass dtypes={types}"
    return problem if types else ""


def of_batch(values: Int64Array, batch: Int64Array) -> Int64Array:
    """Return the value of the batch of each row, or of the only batch."""
    return values[:1] if len(values) == 1 else values[batch]


class Places(NamedTuple):
    """Starts of several columns in each batch of a file."""

    starts: Int64Array  # (columns, batches)
    first: Int64Array  # (batches,), of the column that comes first
    after: Int64Array  # (columns,), how far after it each column begins in most batches
    alike: Array  # (batches,) bool, whether that holds for a batch

    @classmethod
    def of(cls, starts: Int64Array) -> Self:
        first = starts.min(axis=0)
        after = starts - first
        usual = after[:, after.shape[1] // 2]  # the last batch often has fewer rows
        return cls(starts, first, usual.copy(), (after == usual[:, None]).all(axis=0))

    def gather(self, file: RecordFile, batch: Int64Array, at: Int64Array, length: int) -> Array:
        """Copy values of `length` bytes at the offsets `at` in each column to a new (columns, rows, length) uint8."""
        alike, offsets = of_batch(self.alike, batch), of_batch(self.first, batch) + at
        if alike.all():
            return file.gather_columns(offsets, self.after, length)
        others = np.flatnonzero(~alike)
        shape = len(self.starts), len(others), length
        apart = file.gather((self.starts[:, batch[others]] + at[others]).ravel(), length).reshape(shape)
        if len(others) == len(at):
            return apart
        offsets[others] = offsets[np.argmax(alike)]
        found = file.gather_columns(offsets, self.after, length)
        found[:, others] = apart
        return found
