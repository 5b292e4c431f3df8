"""Columns of classes and of files: what Hugging Face's library writes about them, and how they are decoded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dataload.codecs.arrow import combined, load_arrow, pa_module, spec_of_type, without_views
from dataload.codecs.decoders import DECODERS, Decoder, find_decoder, for_extension
from dataload.errors import ConfigError, closest
from dataload.sources.arrow.format import TableOptions


def features_of(schema: Any) -> Mapping[str, Any]:
    """Return what Hugging Face's library has written about the columns."""
    try:
        found = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    except (TypeError, KeyError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def shape_of(feature: Any) -> tuple[int, ...] | None:
    """Return the shape that Hugging Face declares for a list of lists, if it is constant."""
    shape = feature.get("shape") if isinstance(feature, dict) else None
    if isinstance(shape, list) and shape and all(type(extent) is int and extent > 0 for extent in shape):
        return tuple(shape)
    return None


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
    found = array.dictionary if pa_module().types.is_dictionary(array.type) else array.unique()
    return found.cast(without_views(found.type)).drop_null()


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
