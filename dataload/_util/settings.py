"""The validator of settings: a setting's annotation says what it may be, once for code, configs and documentation."""

import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError, and_more, closest

InitT = TypeVar("InitT", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Least:
    """Marks a number of at least `least`, and below another number, or below the setting of that name."""

    least: int
    below: int | str | None = None

    def limits(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return limits by the names of pydantic; `others` are the settings that a limit may name."""
        below: Any = others.get(self.below) if isinstance(self.below, str) else self.below
        bounded = _is_integer(below) and below > self.least  # else the other setting is missing, or an error by itself
        return {"ge": self.least, **({"lt": below} if bounded else {})}

    def describe(self, kind: str, limits: Mapping[str, Any]) -> str:
        """Return in words which numbers of this kind the limits allow."""
        return f"{kind} in [{self.least}, {limits['lt']})" if "lt" in limits else f"{kind} >= {self.least}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {**handler(source), **self.limits({})}


@dataclass(frozen=True, slots=True)
class Above:
    """Marks a number above `limit`, and of at most `most`; `noun` says which."""

    limit: float
    most: float | None = None
    noun: str = "a number"

    def limits(self, others: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - names none
        return {"gt": self.limit, **({} if self.most is None else {"le": self.most})}

    def describe(self, kind: str, limits: Mapping[str, Any]) -> str:  # noqa: ARG002 - `noun` says it
        return f"{self.noun} above {self.limit}" + ("" if self.most is None else f" and at most {self.most}")

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {**handler(source), **self.limits({})}


Seconds: TypeAlias = Annotated[float, Above(0, noun="a number of seconds")]
"""A duration."""

MaxBad: TypeAlias = Annotated[int, Least(0)] | Annotated[float, Above(0, most=1, noun="a share of the records")]
"""A number of bad records, or their share of all records."""

_HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
}


def setting_error(name: str, value: Any, rule: str) -> ConfigError:
    """Return the error for a setting that breaks a rule, such as "must ascend"."""
    return ConfigError(f"{name} {rule}{';' if ',' in rule else ','} got {value!r}", key=name, value=value)


def check_keys(name: str, values: Mapping[Any, Any], names: Iterable[Any]) -> None:
    """Raise ConfigError, which tells the names, unless a setting has one value for each name."""
    for what, keys in (("missing", {*names} - {*values}), ("unknown", {*values} - {*names})):
        if keys:
            some = ", ".join(map(repr, sorted(keys, key=str)[:3]))
            message = f"{name} must hold one number for each name; {what}: {some}{and_more(len(keys), 3)}"
            raise ConfigError(message, key=name, value=values)


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Return the elements of a setting, or () if it has none or is not a sequence."""
    try:
        return tuple(values)
    except TypeError:
        return ()


def check_count(name: str, value: Any, *, least: int, below: int | None = None) -> int:
    """Return `value` as an int in [least, below), or in [least, infinity) if `below` is None."""
    if type(value) is int and least <= value and (below is None or value < below):
        return value  # in a fiftieth of the time, which thousands of sources take several times each
    return check_setting(name, value, Annotated[int, Least(least, below)])


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check that the setting `name` has one of the `allowed` values; if not, suggest the closest one and list all."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}: {closest(value, allowed)}", key=name, value=value)


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, (bool, np.bool_))


_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, (bool, np.bool_))),
    int: ("an integer", _is_integer),
    float: ("a number", lambda value: not isinstance(value, bool) and isinstance(value, Real)),
    str: ("text", lambda value: isinstance(value, str)),
    NoneType: ("None", lambda value: value is None),
    Callable: ("a function", callable),
    Mapping: ("a mapping", lambda value: isinstance(value, Mapping)),
    Sequence: ("a list", lambda value: isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))),
    np.ndarray: ("an array", lambda value: isinstance(value, np.ndarray)),
    npt.NDArray: ("an array", lambda value: isinstance(value, np.ndarray)),  # numpy 2.5 no longer expands the alias
    os.PathLike: ("a path", lambda value: isinstance(value, os.PathLike)),
}
_PLAIN: dict[Any, Callable[[Any], Any]] = {bool: bool, int: operator.index, float: float}
_MANY = 1 << 64  # seeds may have 64 bits
_SCALARS = (bool, int, float, str, NoneType, Literal)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _unmarked(kind: Any) -> tuple[Any, Least | Above | None]:
    """Return a type without its marker, and the marker."""
    return cast("Any", get_args(kind)[:2]) if get_origin(kind) is Annotated else (kind, None)


def check_setting(name: str, value: Any, hint: Any, others: Mapping[str, Any] | None = None) -> Any:
    """Return a setting that its annotation allows, as a number of Python; bounds may name settings of `others`."""
    kinds, allowed, is_of_kind = _kinds(hint), list[str](), False
    items: Any
    for kind, bounds in map(_unmarked, kinds):
        origin = get_origin(kind) or kind
        if origin is Literal:
            values = get_args(kind)
            allowed += map(repr, values)
            if isinstance(value, str) and {*kinds} <= {kind, NoneType}:
                check_choice(name, value, values)
            if any(isinstance(value, type(each)) and value == each for each in values):
                return value
            continue
        if origin not in _KINDS:
            return value
        words, fits = _KINDS[origin]
        limits = bounds.limits(others or {}) if bounds else {}
        allowed += (bounds.describe(words, limits) if bounds else words).split(" or ")
        is_of_kind |= fits(value)
        if not fits(value) or not all(_HOLDS[sign](value, limit) for sign, limit in limits.items()):
            continue
        items = [*cast("Any", value).values()] if origin is Mapping else value if origin is Sequence else ()
        for item in items if isinstance(items, (list, tuple)) else ():  # others may be large, or read only once
            check_setting(name, item, get_args(kind)[-1])
        return _PLAIN[origin](value) if origin in _PLAIN and type(value) not in (int, float) else value
    if is_of_kind:  # and out of bounds
        allowed = [words for words in allowed if words != "None"]
    rule = f"{', '.join(allowed[:-1])}{' or ' if allowed[1:] else ''}{allowed[-1]}{';' if len(allowed) > 2 else ','}"
    raise ConfigError(f"{name} must be {rule} got {value!r}", key=name, value=value)


@functools.cache
def hints_of(target: Any) -> dict[str, Any]:
    """Return the annotations of a function or a class, without those that only a type checker understands."""
    if not isinstance(target, type):
        return inspect.get_annotations(target, eval_str=True)
    hints: dict[str, Any] = {}
    for kind in reversed(target.__mro__):
        with suppress(Exception):  # of a class of others, whose names may be imported for type checkers only
            hints |= inspect.get_annotations(kind, eval_str=True)
    return hints


@functools.cache
def _scalars(target: Any) -> dict[str, Any]:
    """Return the annotations of settings that are numbers, flags and texts; other settings are left to their class."""
    return {
        name: hint
        for name, hint in hints_of(target).items()
        if all((get_origin(kind) or kind) in _SCALARS for kind, _ in map(_unmarked, _kinds(hint)))
    }


@functools.cache
def _checks(target: type, kind: type) -> tuple[tuple[str, Any, Any, range], ...]:
    """Return the fields that the base class `kind` checks: name, default, hint, and integers that are fine."""
    # An order may have thousands of parts, so most settings should take a microsecond.
    hints, checks = _scalars(kind), list[tuple[str, Any, Any, range]]()
    for each in fields(target):
        if each.init and each.name in hints:
            marks = [bounds for plain, bounds in map(_unmarked, _kinds(hints[each.name])) if plain is int]
            fine = range(-_MANY, _MANY) if marks else range(0)
            if marks and isinstance(marks[0], Least):
                below = _MANY if marks[0].below is None else marks[0].below
                fine = range(marks[0].least, below) if isinstance(below, int) else range(0)
            checks.append((each.name, each.default, hints[each.name], fine))
    return tuple(checks)


def check_settings(value: Any, kind: type | None = None) -> None:
    """Check the fields that a dataclass under construction, or its base class `kind`, was given, and store numbers."""
    checks = _checks(type(value), kind or type(value))
    for name, default, hint, fine in checks:
        given = getattr(value, name)
        if given is not default and not (type(given) is int and given in fine):
            others = {other: getattr(value, other) for other, *_ in checks}
            object.__setattr__(value, name, check_setting(name, given, hint, others))


class Checked:
    """Base class of dataclasses whose settings are all checked by their annotations."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_settings(self)


def checked(init: InitT) -> InitT:
    """Decorate a constructor so that settings given by name are checked, at the first construction by annotations."""

    @functools.wraps(init)
    def check(self: Any, /, *args: Any, **settings: Any) -> None:
        hints = _scalars(init)
        for name, hint in hints.items():
            if name in settings:
                settings[name] = check_setting(name, settings[name], hint, settings)
        init(self, *args, **settings)

    return cast("InitT", check)


def check_flags(**flags: Any) -> None:
    """Check that settings are True or False: the text "false" would be true."""
    for name, value in flags.items():
        if type(value) is not bool:
            check_setting(name, value, bool)


def check_directory(path: str, key: str) -> None:
    """Check that the directory of the output file `path`, a setting called `key`, exists, before any work is done."""
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise ConfigError(f"there is no directory {directory} to write to", key=key, value=path)


def check_call(name: str, function: Any, *arguments: str, may_yield: bool = False) -> None:
    """Check that the setting `name` is a function that takes positional arguments, which `arguments` describe.

    Unless it `may_yield`, it has to return its result.
    """
    if not callable(function):
        raise setting_error(name, function, f"must be a function of {arguments[0]}")
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    if not may_yield and any(is_kind(function) for is_kind in kinds):
        raise ConfigError(f"{name} must return its result: define it without yield and async", key=name, value=function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C may have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        shown = getattr(function, "__qualname__", None) or type(function).__qualname__
        shown += f"({', '.join(signature.parameters)})"  # without defaults, which may be secret
        message = f"{name} is called with {' and '.join(arguments)}, and {shown} does not fit: {error}"
        raise ConfigError(message, key=name, value=function) from None


def check_fields(fields: Any) -> tuple[str, ...] | None:
    """Return the names of the fields to read, None for all; refuse a string, whose letters would be names."""
    if isinstance(fields, str):
        raise ConfigError(f"fields must be a list of names, got the text {fields!r}", key="fields", value=fields)
    if fields is None:
        return None
    names: Any = tuple(fields) if isinstance(fields, Iterable) and not isinstance(fields, bytes) else fields
    check_setting("fields", names, Sequence[str])
    return names
