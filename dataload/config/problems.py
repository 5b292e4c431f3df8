"""Errors of a config in words: from pydantic's findings and the JSON schema. Pure (no I/O)."""

from collections.abc import Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple, cast

from dataload.config.references import NPY_PATTERN, REFERENCE_PATTERN
from dataload.errors import ConfigError, closest

Keys = tuple[str | int, ...]
Schema = dict[str, Any]

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


def find_problems(details: Sequence[Mapping[str, Any]], data: Mapping[str, Any], schema: Schema) -> list[Problem]:
    """Translate pydantic's findings (`ValidationError.errors()`) on `data` into our words, one for each key."""
    located = [(_locate(detail, data), str(detail["type"])) for detail in details]
    # A union gives a finding for each of its types. The type that was meant is the one that got furthest into the
    # value.
    furthest = {
        keys: kind
        for keys, kind in located
        if not any(len(other) > len(keys) and other[: len(keys)] == keys for other, _ in located)
    }
    return [_explain(keys, kind, data, schema) for keys, kind in furthest.items()]


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


def _explain(keys: Keys, kind: str, data: Mapping[str, Any], schema: Schema) -> Problem:
    value = reduce(_get, keys, cast("Any", data))
    if kind == "extra_forbidden":
        shown = sorted(map(str, value)) if isinstance(value, dict) else value  # a table of credentials may be misplaced
        return Problem(dotted(keys), shown, _unknown(keys, data, schema))
    expected = _schemas_at(keys, data, schema)
    allowed = [choice for node in expected for choice in _choices(node)]
    if allowed and isinstance(value, str):
        others = [f", or {_describe(node)}" for node in expected if not _choices(node)]
        return Problem(dotted(keys), value, closest(value, allowed) + "".join(others))
    return Problem(dotted(keys), value, f"expected {' or '.join(dict.fromkeys(map(_describe, expected)))}")


def dotted(keys: Keys) -> str:
    """Write keys as in an override: ``source.path[0]``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _unknown(keys: Keys, data: Mapping[str, Any], schema: Schema) -> str:
    *outer, name = keys
    known = {key for node in _schemas_at(tuple(outer), data, schema) for key in node.get("properties", {})}
    message = closest(str(name), known)
    if not message.startswith("did you"):  # `batch_size` at the top is the right key in the wrong place
        elsewhere = (
            f"{section}.{name}"
            for section, inner in schema["properties"].items()
            for branch in _branches(inner, schema)
            for table in (_branches(branch["items"], schema) if "items" in branch else [branch])
            if name in table.get("properties", {})
        )
        found = next((key for key in elsewhere if key != dotted(keys)), None)
        if found is None:
            return f"there is no such key. {message}"
        message = f"did you mean {found!r}? {message}"
    return f"there is no such key, {message}"


def _schemas_at(keys: Keys, data: Any, schema: Schema) -> list[Schema]:
    """Return the types that are allowed at `keys`, without null."""
    nodes = _branches(schema, schema)
    value: Any = data
    for key in keys:
        nodes = _of_kind(nodes, value)
        if isinstance(key, int):
            inner = [node.get("items") for node in nodes]
        else:
            inner = [node.get("properties", {}).get(key, node.get("additionalProperties")) for node in nodes]
        nodes = [branch for node in inner if isinstance(node, dict) for branch in _branches(node, schema)]
        value = _get(value, key)
    return _of_kind(nodes, value)


def _branches(node: Schema, schema: Schema) -> list[Schema]:
    """Return `node` with its reference followed, or the types of its union."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    several = node.get("anyOf") or node.get("oneOf")
    if several is not None:
        return [branch for one in several for branch in _branches(one, schema)]
    return [] if node.get("type") == "null" else [node]


def _of_kind(nodes: list[Schema], value: Any) -> list[Schema]:
    """Return the section of the ``kind`` that was chosen, of sections that differ by it."""
    kind = value.get("kind") if isinstance(value, dict) else None
    chosen = [node for node in nodes if kind and node.get("properties", {}).get("kind", {}).get("const") == kind]
    return chosen or nodes


def _choices(node: Schema) -> list[str]:
    choices = node.get("enum") or [node.get("const")]
    return [choice for choice in choices if isinstance(choice, str)]


def _describe(node: Schema, *, several: bool = False) -> str:
    """Return the type of one value, or of `several`, in words."""
    if "anyOf" in node:
        return " or ".join(_describe(branch, several=several) for branch in node["anyOf"])
    if _choices(node):
        return " or ".join(map(repr, _choices(node)))
    kind = node.get("type")
    if kind == "array":
        items = _describe(node["items"], several=True)
        return (
            f"lists of {items}" if several else f"a list of {items}{', at least one' if node.get('minItems') else ''}"
        )
    if kind == "boolean" and "const" in node:
        return str(node["const"]).lower()
    word = _WORDS.get(node.get("pattern", kind), ("a table", "tables"))[several]
    limits = {} if several else {"minimum": ">=", "exclusiveMinimum": ">"}
    return word + "".join(f" {sign} {node[limit]:g}" for limit, sign in limits.items() if limit in node)


_WORDS = {
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true or false"),
    "string": ("text", "text"),
    REFERENCE_PATTERN: ("a function as 'package.module:function'", "functions"),
    NPY_PATTERN: ("the path of a .npy file", "paths of .npy files"),
}
