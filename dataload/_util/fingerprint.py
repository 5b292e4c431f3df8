"""How contents and orders are identified. Pure (no I/O)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

__all__ = ["digest", "fingerprint", "identify"]


def digest(*parts: Any) -> str:
    """32 hexadecimal digits for values whose repr is the same in every process."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def identify(source: Any) -> str:
    """The fingerprint of a source: its own, or its class and length."""
    own = getattr(source, "fingerprint", None)
    return str(own()) if callable(own) else digest(type(source).__qualname__, len(source))


def fingerprint(value: Any) -> str:
    """Identify a value object, such as a sampler: its class and its fields, arrays by their content.

    Args:
        value: A frozen dataclass (nested ones included), or anything with a `fingerprint` method or a repr.
    """
    return digest(_canonical(value))


def _canonical(value: Any) -> Any:
    own = getattr(value, "fingerprint", None)
    if callable(own):
        return own()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, _canonical(getattr(value, f.name))) for f in dataclasses.fields(value) if f.compare]
        return type(value).__qualname__, fields
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", np.ascontiguousarray(value))
        return (
            str(array.dtype),
            array.shape,
            hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest(),
        )
    if isinstance(value, (set, frozenset)):  # their order depends on PYTHONHASHSEED
        return sorted(repr(_canonical(item)) for item in cast("set[Any]", value))
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        return sorted((str(key), _canonical(item)) for key, item in cast("Mapping[Any, Any]", value).items())
    return repr(value)
