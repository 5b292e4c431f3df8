"""Digests that identify data and orders across processes and releases. Pure (no I/O)."""

import dataclasses
import dis
import functools
import hashlib
import os
import re
import sys
import types
from collections.abc import Mapping
from itertools import chain
from typing import Any, cast

import numpy as np

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+", re.IGNORECASE)
_MAX_DEPTH = 32
_MOST_SHOWN = 12  # elements; more than a batch sampler has settings


def digest(*parts: Any) -> str:
    """Return 32 hexadecimal digits for values whose repr is the same in every process."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def identify(source: Any) -> str:
    """Return the fingerprint of a source.

    A source without a `fingerprint` method is known by the name of its class and its length only, so a state is also
    accepted by a source of the same class and length that holds other data.
    """
    own = getattr(source, "fingerprint", None)
    return str(own()) if callable(own) else digest(type(source).__qualname__, len(source))


def fingerprint(value: Any) -> str:
    """Identify a value object, such as a sampler, by its class and its content.

    Args:
        value: A frozen dataclass, anything with a `fingerprint` method, or anything with a repr of its own. An object
            whose repr shows its address is identified by the name of its class and what pickle would keep of it;
            a function, and an object that pickle refuses, by its name alone.
    """
    return digest(_canonical(value, ()))


def describe(value: Any, depth: int = 0) -> str:
    """Return one of our value objects, such as a sampler, as text: its class and settings, of long ones the length.

    Of an object of another's class only the name is shown, because it may hold a secret.
    """
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
    """Return True if the repr of a value contains an address, so that it differs from process to process."""
    return _ADDRESS.search(repr(value)) is not None


def _canonical(value: Any, outer: tuple[int, ...]) -> Any:
    """Return lists and tuples whose repr depends on the content alone; `outer` has the ids of the objects around it."""
    own = getattr(value, "fingerprint", None)
    if callable(own):
        return own()
    if isinstance(value, (str, bytes, int, float)):
        return repr(value)
    if id(value) in outer:
        return "cycle", outer.index(id(value))
    outer = (*outer, id(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, _canonical(getattr(value, f.name), outer)) for f in dataclasses.fields(value) if f.compare]
        return type(value).__qualname__, fields
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", np.ascontiguousarray(value))
        if array.dtype.hasobject:  # its bytes are addresses
            return str(array.dtype), array.shape, _canonical(array.tolist(), outer)
        return str(array.dtype), array.shape, hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
    if isinstance(value, (set, frozenset)):  # their order depends on PYTHONHASHSEED
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
    """Return the name of an object, or of its class, and what pickle would keep of the object."""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if len(outer) > _MAX_DEPTH:
        return name
    try:
        reduced: Any = value.__reduce_ex__(2)
    except Exception:  # a function, a lock, an open file: no state to see
        return name
    if isinstance(reduced, str):
        return name
    parts = [*reduced[1:5], None, None, None]  # arguments, state, items and pairs: see `object.__reduce__`
    arguments, state, items, pairs = cast("list[Any]", parts)[:4]
    content = chain(arguments, items or (), pairs or ())
    plain = [part.__qualname__ if isinstance(part, type) else part for part in content]
    return name, _canonical([plain, state], outer)


def code_digest(function: Any) -> str:
    """Return a digest of everything that decides on the results of a function.

    That is its bytecode and that of the functions it calls, their defaults, closures and global values, the version of
    Python, and those of the installed packages that they use.

    Raises:
        ValueError: It uses something that might change unnoticed; the message names it.
    """
    return digest(sys.version_info[:2], _behaviour(function, {}))


def _behaviour(value: Any, seen: dict[int, int]) -> Any:
    """Return tuples whose repr depends on the behaviour of `value`; `seen` numbers the functions met before."""
    inner = functools.partial(_behaviour, seen=seen)
    if isinstance(value, (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType, range)):
        return type(value).__name__, repr(value)
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [*map(inner, cast("list[Any]", value))]
    if isinstance(value, (set, frozenset)):
        return "set", sorted(repr(inner(item)) for item in cast("set[Any]", value))
    if isinstance(value, dict):
        return "dict", [(inner(key), inner(item)) for key, item in cast("dict[Any, Any]", value).items()]
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return _canonical(np.asarray(value), ())
    if isinstance(value, re.Pattern):
        return "pattern", inner(cast("Any", value).pattern), value.flags
    if isinstance(value, types.CodeType):
        numbers = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
        names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
        return "code", value.co_code, value.co_exceptiontable, numbers, names, [*map(inner, value.co_consts)]
    if isinstance(value, functools.partial):
        return "partial", inner(value.func), inner(value.args), inner(value.keywords)
    if version := _installed(value):
        return getattr(value, "__qualname__", getattr(value, "__name__", "")), version
    if not isinstance(value, types.FunctionType):
        named = f"the module {value.__name__!r}" if isinstance(value, types.ModuleType) else _described(value)
        raise ValueError(f"it uses {named}, which may change without notice")  # noqa: TRY004 - no class is wrong here
    if id(value) in seen:
        return "function", seen[id(value)]
    seen[id(value)] = len(seen)
    known = value.__globals__
    used = {name: inner(known[name]) for name in sorted(_globals_of(value.__code__)) if name in known}
    cells = [inner(cell.cell_contents) for cell in value.__closure__ or ()]  # an empty one is a ValueError, too
    return "function", inner(value.__code__), inner(value.__defaults__), inner(value.__kwdefaults__), cells, used


def _described(value: Any) -> str:
    if callable(value):
        return f"{getattr(value, '__qualname__', type(value).__qualname__)!r}"
    return f"an object of {type(value).__qualname__!r}"


def _globals_of(code: types.CodeType) -> set[str]:
    """Return the global names that code and the functions inside of it look up."""
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*(_globals_of(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _installed(value: Any) -> str | None:
    """Return package and version of a module, function or class that is installed; None for anything else."""
    if isinstance(value, np.ufunc):
        return f"numpy {np.__version__}"
    if isinstance(value, types.ModuleType):
        module: Any = value.__name__
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        module = value.__module__ or "builtins"  # such as [].append, whose list cannot be seen
    else:
        return None
    root = str(module).partition(".")[0]
    bound = getattr(value, "__self__", None)
    if bound is not None and not isinstance(bound, types.ModuleType):
        return None
    package = sys.modules.get(root)
    path = str(getattr(package, "__file__", None) or "")
    if root in sys.stdlib_module_names and (not path or path.startswith(os.path.dirname(os.__file__) + os.sep)):
        return root
    version = getattr(package, "__version__", None)
    is_fixed = "site-packages" in path or "dist-packages" in path
    return f"{root} {version}" if is_fixed and isinstance(version, str) else None
