"""Fields of records: specifications, selections, and the names of classes, which numbers of labels stand for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from dataload.errors import ConfigError, closest
from dataload.types import FieldSpec

_WITHOUT_DTYPE = ("bytes", "str", "unknown")


def classes_of(fields: Mapping[str, FieldSpec]) -> dict[str, tuple[str, ...]]:
    """Return the names of classes, by field, as far as they are known."""
    return {name: spec.classes for name, spec in fields.items() if spec.classes is not None}


def with_classes(fields: Mapping[str, FieldSpec], classes: Mapping[str, tuple[str, ...]]) -> dict[str, FieldSpec]:
    """Add the names of classes to integer fields that have none yet."""
    return {
        name: replace(spec, classes=classes[name])
        if name in classes and spec.classes is None and spec.dtype.startswith(("int", "uint"))
        else spec
        for name, spec in fields.items()
    }


def common_classes(parts: Iterable[tuple[str, Mapping[str, FieldSpec]]], key: str) -> dict[str, tuple[str, ...]]:
    """Return the names of classes by field; labels that mean other classes in other data are a ConfigError of `key`.

    `parts` are data that are read together: pairs of a name, for messages, and fields.
    """
    known: dict[str, tuple[str, tuple[str, ...]]] = {}
    for part, fields in parts:
        for name, classes in classes_of(fields).items():
            first, expected = known.setdefault(name, (part, classes))
            if classes != expected:
                message = f"field {name!r} stands for other classes in {first} than in {part}"
                raise ConfigError(
                    f"{message}: open the folders as one list of paths, which numbers all classes", key=key
                )
    return {name: classes for name, (_, classes) in known.items()}


def row_bytes(fields: Mapping[str, FieldSpec]) -> int:
    """Return how many bytes the arrays of a record take, as far as their shapes are known."""
    arrays = [(spec.dtype, spec.shape or ()) for spec in fields.values() if spec.dtype not in _WITHOUT_DTYPE]
    return sum(np.dtype(dtype).itemsize * math.prod(n or 1 for n in shape) for dtype, shape in arrays)


def require_known(names: Iterable[str], known: Iterable[str], owner: Any = None, *, key: str = "fields") -> None:
    """Raise a ConfigError of `key` for the first of `names` that is not `known`; `owner` lacks the field."""
    for name in names:
        if name not in known:
            lacks = "there is" if owner is None else f"{owner if isinstance(owner, str) else repr(owner)} has"
            raise ConfigError(f"{lacks} no field {name!r}: {closest(name, known)}", key=key, value=name)


def select_fields(record: Any, fields: Sequence[str]) -> dict[str, Any]:
    """Return the named fields of a record, in that order."""
    if not isinstance(record, Mapping):
        message = f"records are {type(record).__name__}, not fields: choose a codec to read fields {', '.join(fields)}"
        raise ConfigError(message, key="fields")
    try:
        return {name: record[name] for name in fields}
    except KeyError as error:
        message = f"a record has no field {error.args[0]!r}: {closest(error.args[0], record)}"
        raise ConfigError(message, key="fields", value=error.args[0]) from None


_text_of = lru_cache(str)  # numpy's takes several microseconds


def spec_of(value: Any) -> FieldSpec:
    """Return the specification of a field, from one of its values."""
    if isinstance(value, (bytes, str)):
        return FieldSpec(type(value).__name__, ())
    array = np.asarray(value)
    return FieldSpec(_text_of(array.dtype), array.shape)
