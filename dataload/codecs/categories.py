"""Columns whose values are the numbers of classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dataload.codecs.arrow import combined, load_arrow, pa_module, without_views
from dataload.errors import ConfigError

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
