"""Fields of records: their specifications, and selections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dataload.errors import ConfigError, closest
from dataload.types import FieldSpec


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


def spec_of(value: Any) -> FieldSpec:
    """Return the specification of a field, from one of its values."""
    if isinstance(value, (bytes, str)):
        return FieldSpec(type(value).__name__, ())
    array = np.asarray(value)
    return FieldSpec(str(array.dtype), array.shape)
