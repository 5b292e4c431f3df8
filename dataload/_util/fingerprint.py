"""Digests that identify data, orders and functions across processes and releases. Pure (no I/O).

Digests of functions are equal in every process, and different after a change that could change their results.
"""

import builtins
import copyreg
import dataclasses
import dis
import functools
import hashlib
import importlib.util
import os
import random
import re
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


_PLAIN = frozenset({bool, int, float, complex, str, type(None), type(...), type(NotImplemented), range})
_LOCKS = frozenset({type(threading.Lock()), type(threading.RLock())})
_CHANGING = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_DYNAMIC = (eval, exec, globals, __import__, importlib.import_module, sys.modules)  # run code that a digest cannot see
_OUTSIDE = (os.environ, os.getenv, sys.argv)
_PARTS: dict[Any, tuple[str, ...]] = {
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    types.MethodType: ("__func__", "__self__"),
    functools._lru_cache_wrapper: ("__wrapped__",),  # pyright: ignore[reportPrivateUsage]
    dataclasses.Field: ("name", "default", "default_factory", "init", "repr", "hash", "compare", "metadata"),
    types.CodeType: (
        *("co_code", "co_exceptiontable", "co_consts", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
        *("co_flags", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    ),
}
# Class attributes that do not affect behaviour, or differ between processes.
_OF_CLASSES = frozenset({
    *("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__", "__annotate_func__"),
    *("__annotations_cache__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl"),
    *("__orig_bases__", "__parameters__"),
})  # fmt: skip
_OF_MODULES = ("__name__", "__file__", "__doc__", "__spec__", "__package__", "__path__")
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")
_HEAP_TYPE = 1 << 9
_MISSING = object()

_Instruction = tuple[str, Any]
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_LOADS = (*_GLOBAL, "LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")
_TWO = re.compile(r"LOAD_FAST|STORE_FAST")


def code_digest(function: Any) -> str:
    """Return a digest of everything that decides a function's results; raise ValueError if that is unknown."""
    # That is its bytecode and that of the functions and classes that it uses; their defaults, closures, attributes and
    # globals; the state or `fingerprint()` of objects; and the versions of Python and of packages.
    reader = _Reader({})
    try:
        reader.add((*sys.version_info[:2], function))
    except ValueError:
        raise
    except Exception as error:  # users' modules and classes may raise anything
        raise ValueError(f"it uses an object that cannot be inspected ({type(error).__name__}: {error})") from error
    return reader.hash.hexdigest()


class _Reader:
    """Hashes values by their behaviour; an object met before counts by its number."""

    def __init__(self, seen: Mapping[int, tuple[int, Any]]) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._seen = dict(seen)  # also holds the object, so that its id is not reused

    def add(self, value: Any) -> None:
        kind: Any = type(value)
        numbered = kind not in (tuple, types.CodeType)
        if kind in _PLAIN:
            self._put(kind.__name__, value)
        elif kind in (bytes, bytearray):
            self._put(kind.__name__, hashlib.blake2b(value).digest())
        elif kind in (set, frozenset):  # the order of a set depends on PYTHONHASHSEED
            self._put(kind.__name__, sorted(map(self._apart, value)))
        elif (kind in (np.ndarray, np.memmap) or isinstance(value, np.generic)) and not value.dtype.hasobject:
            name = "number" if isinstance(value, np.generic) else "array"
            self._put(name, str(value.dtype), value.shape, hashlib.blake2b(value.tobytes()).digest())
        elif kind in _LOCKS:
            self._put("lock")
        elif version := _installed(value):
            self._put(getattr(value, "__qualname__", getattr(value, "__name__", "")), version)
        elif numbered and id(value) in self._seen:
            self._put("seen", self._seen[id(value)][0])
        else:
            if numbered:
                self._seen[id(value)] = len(self._seen), value
            parts = _parts(value, kind)
            self._put(kind.__name__, len(parts))
            for each in parts:
                self.add(each)

    def _put(self, *parts: Any) -> None:
        self.hash.update(repr(parts).encode())

    def _apart(self, value: Any) -> str:
        reader = _Reader(self._seen)
        reader.add(value)
        return reader.hash.hexdigest()


def _parts(value: Any, kind: Any) -> Sequence[Any]:
    """Return the values that decide a value's behaviour."""
    if kind in (tuple, list):
        return value
    if kind in (dict, types.MappingProxyType):
        return [*chain.from_iterable(value.items())]
    if kind in _PARTS:
        return [getattr(value, name) for name in _PARTS[kind]]
    if kind is types.FunctionType:
        return value.__code__, value.__defaults__, value.__kwdefaults__, _in_order(vars(value)), _used(value)
    if isinstance(value, type):
        own = {name: each for name, each in vars(value).items() if name not in _OF_CLASSES}
        return value.__qualname__, kind, value.__bases__, _in_order(own)
    if isinstance(value, (types.ModuleType, *_CHANGING)):
        raise _unknown(value)
    return _state(value, kind)


def _in_order(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted(values.items(), key=lambda item: item[0]))


def _state(value: Any, kind: Any) -> Sequence[Any]:
    """Return an object's class and its pickled state or fingerprint."""
    try:
        if callable(getattr(kind, "fingerprint", None)):
            return kind.__qualname__, str(value.fingerprint())
        for name in _PICKLING:
            version = _installed(next(each for each in kind.__mro__ if name in vars(each))) or ""
            if " " in version and not version.startswith("numpy "):  # other classes may pickle addresses, as torch does
                raise _unknown(value)
        reduce: Any = copyreg.dispatch_table.get(kind)
        found: Any = value.__reduce_ex__(2) if reduce is None else reduce(value)
    except Exception as error:  # a user's method may raise anything
        raise _unknown(value) from error
    chosen = any(isinstance(getattr(kind, name, None), types.FunctionType) for name in _PICKLING)
    own = () if chosen else _in_order(getattr(value, "__dict__", {}))
    if isinstance(found, str):  # only a name: accepted if the class chose it
        if not chosen:
            raise _unknown(value)
        found = kind, (found,)
    function, arguments, state, items, pairs = (*found, None, None, None)[:5]
    if type(state) is dict and all(type(name) is str for name in state):
        state = _in_order(state)
    return kind, function, arguments, state, own, (*(items or ()),), (*(pairs or ()),)


def _used(function: types.FunctionType) -> tuple[tuple[str, Any], ...]:
    """Return the named objects that a function reaches by closures, globals, imports and attributes of modules."""
    known, variables = function.__globals__, dict[str, list[Any]]()  # values of variables; a variable may have several
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables[name] = [cell.cell_contents]
        except ValueError:
            raise ValueError(f"it uses {name!r}, which has no value yet") from None
    home = sys.modules.get(known.get("__name__", ""))
    codes = [] if home is not None and _installed(home) else [*_codes(function.__code__)]
    for _, instructions in codes:
        for at, (operation, _) in enumerate(instructions):
            for name, value in _imported(instructions[at - 2 :], known) if operation == "IMPORT_NAME" else ():
                variables.setdefault(name, []).append(value)
    for _, instructions in codes:
        for name in {name for operation, name in instructions if operation in _GLOBAL} - variables.keys():
            value = known.get(name, getattr(builtins, name, _MISSING))
            in_class = value is _MISSING and (name.startswith("__") or ("STORE_NAME", name) in instructions)
            if value is _MISSING and not in_class:
                raise ValueError(f"it uses {name!r}, which has no value yet")
            variables[name] = [] if in_class or name in _OF_MODULES else [value]
    found = {"": home if home is not None and _installed(home) else None}
    for name, values in variables.items():
        found |= {f"{name} {at}": each for at, each in enumerate(values) if not isinstance(each, types.ModuleType)}
    for code, instructions in codes:
        shared = {*code.co_cellvars, *code.co_freevars}
        for at, (operation, name) in enumerate(instructions):
            # LOAD_FAST of a shared variable loads its cell for an inner function.
            if operation in _LOADS and not (operation == "LOAD_FAST" and name in shared):
                for each in variables.get(name, ()):
                    if isinstance(each, types.ModuleType):
                        found |= [_of_module(each, instructions[at + 1 :])]
    if any(value is each for value in found.values() for each in _DYNAMIC):
        raise ValueError("it runs or imports code by name")
    if any(value is each for value in found.values() for each in _OUTSIDE):
        raise ValueError("it uses environment variables or the command line")
    return _in_order(found)


def _imported(instructions: Sequence[_Instruction], known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the variables that an import within a function sets, with their values."""
    (_, level), (_, names), (_, name), *following = instructions
    package = known.get("__package__") or str(known.get("__name__")).rpartition(".")[0]
    full = importlib.util.resolve_name("." * level + name, package)
    try:
        module: Any = __import__(full, fromlist=names or ())  # the names may include submodules, which are imported
    except ImportError:  # the function may handle it
        return
    except Exception as error:
        raise ValueError(f"it imports {full!r}, which fails") from error
    value = module
    for operation, argument in following:
        if operation == "IMPORT_FROM":
            value = getattr(module, argument, _MISSING)
            module = module if names else value
        elif operation.startswith("STORE_"):
            yield argument, value
        elif operation not in ("SWAP", "POP_TOP"):
            return


def _of_module(module: types.ModuleType, following: Sequence[_Instruction]) -> tuple[str, Any]:
    """Return the module attribute that the next instructions load, with its name, or else the module."""
    value: Any = module
    name = module.__name__
    for operation, attribute in following:
        if not isinstance(value, types.ModuleType) or operation not in _ATTRIBUTE or attribute == "__dict__":
            break
        found = getattr(value, attribute, _MISSING)
        if _installed(value) and not any(found is each for each in (*_DYNAMIC, *_OUTSIDE)):
            break
        value, name = found, f"{name}.{attribute}"
    return name, value


def _codes(code: types.CodeType) -> Iterator[tuple[types.CodeType, list[_Instruction]]]:
    """Yield a code object and its inner ones with their instructions; since Python 3.13, one may do the work of two."""
    instructions: list[_Instruction] = []
    for each in dis.get_instructions(code):
        both = _TWO.findall(each.opname) if isinstance(each.argval, tuple) else ()
        if each.opname not in ("CACHE", "EXTENDED_ARG", "NOP"):
            instructions += zip(both, each.argval, strict=True) if both else [(each.opname, each.argval)]
    yield code, instructions
    yield from chain.from_iterable(_codes(each) for each in code.co_consts if isinstance(each, types.CodeType))


def _unknown(value: Any) -> ValueError:
    if isinstance(value, types.ModuleType):
        return ValueError(f"it uses the module {value.__name__!r}")
    named = callable(value) and getattr(value, "__qualname__", None)
    return ValueError(f"it uses {named!r}" if named else f"it uses an object of {type(value).__qualname__!r}")


def _installed(value: Any) -> str | None:
    """Return package and version of a module, or of a function or class found by its name; otherwise None."""
    if isinstance(value, np.ufunc):
        return f"numpy {np.__version__}" if getattr(np, value.__name__, None) is value else None
    if isinstance(value, types.ModuleType):
        module: Any = value.__name__
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        bound = getattr(value, "__self__", None)
        module = bound.__name__ if isinstance(bound, types.ModuleType) else value.__module__ or "builtins"
        found: Any = sys.modules.get(module)
        for name in value.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is not value:  # such as a factory's function, or a bound method
            return "builtins" if isinstance(value, type) and not value.__flags__ & _HEAP_TYPE else None
    else:
        return None
    root = str(module).partition(".")[0]
    package = sys.modules.get(root)
    path = str(getattr(package, "__file__", None) or "")
    if root == "dataload":  # all releases of dataload give equal results
        return root
    if root in sys.stdlib_module_names and (not path or path.startswith(os.path.dirname(os.__file__) + os.sep)):
        return root
    version = getattr(package, "__version__", None)
    is_fixed = "site-packages" in path or "dist-packages" in path
    return f"{root} {version}" if is_fixed and isinstance(version, str) else None
