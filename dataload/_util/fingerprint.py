"""Digests that identify data and orders across processes and releases. Pure (no I/O)."""

import dataclasses
import hashlib
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import numpy as np

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+", re.IGNORECASE)
_MAX_DEPTH = 32
ADDED: Mapping[str, bool] = {"added": True}
"""Metadata of a dataclass's field that did not exist in earlier releases: None is the same value as without it."""
_MOST_SHOWN = 12  # elements; more than a batch sampler has settings


def digest(*parts: Any) -> str:
    """Return 32 hexadecimal digits for values whose repr is the same in every process."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def prefix_digests(items: Iterable[Any], first: Any, *rest: Any) -> Iterator[str]:
    """Yield ``digest(first, items[:n], *rest)`` for n = 1, 2, ... for a list of items."""
    hashed = hashlib.blake2b(f"({first!r}, [".encode(), digest_size=16)
    tail = f"], {', '.join(map(repr, rest))})".encode()
    for number, item in enumerate(items):
        hashed.update(f"{', ' if number else ''}{item!r}".encode())
        whole = hashed.copy()
        whole.update(tail)
        yield whole.hexdigest()


def identify(source: Any) -> str:
    """Return a source's fingerprint; without that method, its class name and length, which other data may share."""
    own = getattr(source, "fingerprint", None)
    return str(own()) if callable(own) else digest(type(source).__qualname__, len(source))


def fingerprint(value: Any) -> str:
    """Identify a value object, such as a sampler, by its class and content."""
    # Content is a dataclass's fields, the object's `fingerprint()`, its own repr or, if that shows an address, its
    # pickled state. Functions, and objects that pickle refuses, count by name only.
    return digest(_canonical(value, ()))


def describe(value: Any, depth: int = 0) -> str:
    """Return a value object as text: class and shortened settings; for others only the class, to hide secrets."""
    if isinstance(value, (str, int, float, np.generic, types.NoneType)):
        return repr(value)
    ours = type(value).__module__.startswith("dataload.")
    if ours and dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < _MAX_DEPTH:
        shown = [f.name for f in dataclasses.fields(value) if f.compare and f.repr]
        settings = [(name, each) for name in shown if (each := getattr(value, name)) is not None]
        return (
            f"{type(value).__qualname__}({', '.join(f'{name}={describe(each, depth + 1)}' for name, each in settings)})"
        )
    if isinstance(value, (list, tuple)) and len(cast("list[Any]", value)) <= _MOST_SHOWN and depth < _MAX_DEPTH:
        return f"({', '.join(describe(each, depth + 1) for each in cast('list[Any]', value))})"
    if isinstance(value, (list, tuple, set, frozenset, Mapping, np.ndarray)):
        return f"{np.size(value) if isinstance(value, np.ndarray) else len(cast('list[Any]', value))} values"
    return type(value).__qualname__


def shows_address(value: Any) -> bool:
    """Return whether a value's repr contains an address, which differs between processes."""
    return _ADDRESS.search(repr(value)) is not None


def _canonical(value: Any, outer: tuple[int, ...]) -> Any:
    """Return lists and tuples whose repr depends on the content alone; `outer` has the ids of enclosing objects."""
    own = getattr(value, "fingerprint", None)
    if callable(own):
        return own()
    if isinstance(value, (str, bytes, int, float)):
        return repr(value)
    if id(value) in outer:
        return "cycle", outer.index(id(value))
    outer = (*outer, id(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        used = [
            f
            for f in dataclasses.fields(value)
            if f.compare and not (f.metadata == ADDED and getattr(value, f.name) is None)
        ]
        return type(value).__qualname__, [(f.name, _canonical(getattr(value, f.name), outer)) for f in used]
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", np.ascontiguousarray(value))
        if array.dtype.hasobject:  # the bytes of object arrays are addresses
            return str(array.dtype), array.shape, _canonical(array.tolist(), outer)
        return str(array.dtype), array.shape, hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
    if isinstance(value, (set, frozenset)):  # the order of a set depends on PYTHONHASHSEED
        return sorted(repr(_canonical(item, outer)) for item in cast("set[Any]", value))
    if isinstance(value, (list, tuple)):
        return [_canonical(item, outer) for item in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return sorted((_name(key, outer), _canonical(item, outer)) for key, item in items)
    return _attributes(value, outer) if shows_address(value) else repr(value)


def _name(key: Any, outer: tuple[int, ...]) -> str:
    return repr(_canonical(key, outer)) if not isinstance(key, (str, bytes)) and shows_address(key) else str(key)


def _attributes(value: Any, outer: tuple[int, ...]) -> Any:
    """Return the name of an object or of its class, and the object's pickled state."""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if len(outer) > _MAX_DEPTH:
        return name
    try:
        reduced: Any = value.__reduce_ex__(2)
    except Exception:  # a function, a lock or an open file has no visible state
        return name
    if isinstance(reduced, str):
        return name
    parts = [*reduced[1:5], None, None, None]  # arguments, state, items and pairs: see `object.__reduce__`
    arguments, state, items, pairs = cast("list[Any]", parts)[:4]
    content = chain(arguments, items or (), pairs or ())
    plain = [part.__qualname__ if isinstance(part, type) else part for part in content]
    return name, _canonical([plain, state], outer)
