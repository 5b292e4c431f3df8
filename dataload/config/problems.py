"""Errors of a config in words, from pydantic's findings; and its references to functions and to .npy files."""

import importlib
import importlib.util
import re
from collections.abc import Collection, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple, cast

from dataload.codecs.npz import parse_npy
from dataload.errors import ConfigError, CorruptFileError, closest, message_of
from dataload.storage.local.record_files import open_regular
from dataload.types import Array

Keys = tuple[str | int, ...]

NPY_PATTERN = r"\.npy$"
REFERENCE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
"""References to functions are ``"package.module:function"``."""

MISSING = object()


class Problem(NamedTuple):
    """One thing that is wrong."""

    key: str  # dotted, as in an override
    value: Any  # the value found there, or `MISSING`
    reason: str  # what was expected

    def __str__(self) -> str:
        found = "is missing" if self.value is MISSING else f"is {shorten(self.value)}"
        return f"{self.key} {found}: {self.reason}"


def shorten(value: Any, limit: int = 60) -> str:
    """Return a value as text for a message."""
    try:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    except Exception:  # Python refuses to write integers of thousands of digits; others' objects may do so, too
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def config_error(problems: Sequence[Problem], origin: str) -> ConfigError:
    """Return one error that names all problems; its key and value are those of the first."""
    first = problems[0]
    message = f"{origin}: {first}"
    if len(problems) > 1:
        message = "\n  ".join([f"{origin} has {len(problems)} errors:", *map(str, problems)])
    return ConfigError(message, key=first.key, value=None if first.value is MISSING else first.value)


@contextmanager
def named_under(section: str, names: Container[str]) -> Generator[None]:
    """Name the settings in errors as the config does: ``lanes`` becomes ``sampler.lanes`` if it is one of `names`."""
    try:
        yield
    except ConfigError as error:
        if error.key is None or error.key.partition("[")[0] not in names:
            raise
        key = f"{section}.{error.key}"
        raise ConfigError(f"{key}: {error}", key=key, value=error.value) from error


@contextmanager
def named_as(key: str, value: Any) -> Generator[None]:
    """Attribute errors to the setting `key`, whichever argument it was passed as."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error), key=key, value=value) from error


def find_problems(
    details: Sequence[Mapping[str, Any]], data: Mapping[str, Any], tables: Mapping[str, Collection[str]]
) -> list[Problem]:
    """Translate pydantic's findings on `data` into our words, one for each key; `tables` has the keys of each table."""
    found: dict[Keys, list[Mapping[str, Any]]] = {}
    for detail in details:
        found.setdefault(_locate(detail, data), []).append(detail)
    # A union gives a finding for each of its types. The type that was meant is the one that got furthest into the
    # value.
    furthest = {
        keys: some
        for keys, some in found.items()
        if not any(len(other) > len(keys) and other[: len(keys)] == keys for other in found)
    }
    return [_explain(keys, some, data, tables) for keys, some in furthest.items()]


def _locate(detail: Mapping[str, Any], data: Mapping[str, Any]) -> Keys:
    """Return the keys that lead to a finding; pydantic's own location also names the types of unions."""
    keys: list[str | int] = []
    location: Keys = tuple(detail["loc"])
    node: Any = data
    in_kind = False  # whether the kind of the sampler in `node` was passed
    for key in location:
        if location[0] == "sampler" and not in_kind and isinstance(node, dict) and node.get("kind") == key:
            in_kind = True  # the kind, even where it is also a key of the table: 'lanes'
        elif (inner := _get(node, key)) is not MISSING:
            keys.append(key)
            node, in_kind = inner, False
    if detail["type"] == "missing":
        keys.append(location[-1])
    if str(detail["type"]).startswith("union_tag"):
        keys.append("kind")
    return tuple(keys)


def _get(node: Any, key: str | int) -> Any:
    try:
        return cast("Any", node)[key] if isinstance(node, (dict, list)) else MISSING
    except (KeyError, IndexError, TypeError):
        return MISSING


def _explain(
    keys: Keys, details: Sequence[Mapping[str, Any]], data: Mapping[str, Any], tables: Mapping[str, Collection[str]]
) -> Problem:
    value = reduce(_get, keys, cast("Any", data))
    if details[0]["type"] == "extra_forbidden":
        shown = sorted(map(str, value)) if isinstance(value, dict) else value  # a table of credentials may be misplaced
        return Problem(dotted(keys), shown, _unknown(keys, details[0]["loc"], tables))
    choices, others = list[str](), list[str]()
    for detail in details:
        words = _WORDS.get(detail["type"], "{msg}").format_map({**detail, **detail.get("ctx", {})})
        named = _NAME.findall(words) if isinstance(value, str) else []
        choices += named
        others += [] if named else [_PATTERNS.get(words, words)]
    expected = " or ".join(dict.fromkeys(others))
    if choices:
        return Problem(dotted(keys), value, closest(value, choices) + (f", or {expected}" if expected else ""))
    return Problem(dotted(keys), value, f"expected {expected}")


def dotted(keys: Keys) -> str:
    """Write keys as in an override: ``source.path[0]``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _unknown(keys: Keys, location: Keys, tables: Mapping[str, Collection[str]]) -> str:
    name = str(keys[-1])
    known = next((tables[str(at)] for at in reversed(location[:-1]) if at in tables), tables[""])
    message = closest(name, known)
    if not message.startswith("did you"):  # `batch_size` at the top is the right key in the wrong place
        elsewhere = (f"{section}.{name}" for section in tables[""] if name in tables.get(section, ()))
        found = next((key for key in elsewhere if key != dotted(keys)), None)
        if found is None:
            return f"there is no such key: {message}"
        message = f"did you mean {found!r}? {message[0].upper()}{message[1:]}"
    return f"there is no such key, {message}"


_NAME = re.compile("'([^']*)'")
_PATTERNS = {REFERENCE_PATTERN: "a function as 'package.module:function'", NPY_PATTERN: "the path of a .npy file"}
_WORDS: dict[str, str] = {  # of pydantic's findings by their types, for which its messages speak of Python
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_pattern_mismatch": "{pattern}",
    "string_too_short": "text that is not empty",
    "tuple_type": "a list",
    "too_short": "a list that is not empty",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a table"),
    "greater_than_equal": "a number >= {ge:g}",
    "greater_than": "a number > {gt:g}",
    "less_than_equal": "a number <= {le:g}",
    "less_than": "a number < {lt}",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "union_tag_invalid": "{expected_tags}",
    "union_tag_not_found": "the kind of order",
    "missing": "a value",
}


def find_module(name: str) -> bool:
    """Return whether there is a module of that name to import; its parent packages are imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    except Exception:  # of a parent package: importing it says what is wrong
        return True


def resolve_reference(reference: str, key: str) -> Any:
    """Import the object that ``"package.module:name"``, the value of the setting `key`, names."""
    module_name, _, path = reference.partition(":")
    if not path:
        raise ConfigError(f"{key} is {reference!r}: expected 'module:function'", key=key, value=reference)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        reason = f"importing {module_name!r} failed ({error}); is it installed, or on PYTHONPATH?"
        if not isinstance(error, ImportError):  # the module is there, and its code raises
            reason = f"importing {module_name!r} raised {message_of(error)}"
        raise ConfigError(f"{key} is {reference!r}: {reason}", key=key, value=reference) from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            known = [known for known in getattr(found, "__dict__", ()) if not known.startswith("_")]
            reason = f"{module_name} has no {name!r}: {closest(name, known)}"
            raise ConfigError(f"{key} is {reference!r}: {reason}", key=key, value=reference) from None
    return found


def read_array(path: str, key: str) -> Array:
    """Read a one-dimensional array from the .npy file that the setting `key` names."""
    try:
        with open(path, "rb", opener=open_regular) as stream:
            array = parse_npy(stream.read())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", key=key, value=path) from error
    except CorruptFileError as error:
        raise ConfigError(f"{path} is not a .npy array: {error}", key=key, value=path) from error
    if array.ndim != 1:
        raise ConfigError(f"{path} holds an array of shape {array.shape}: expected one dimension", key=key, value=path)
    return array
