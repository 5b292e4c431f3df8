"""What is wrong with a config, in words: from pydantic's findings and the JSON schema. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from dataload.config.arrays import NPY_PATTERN
from dataload.config.plain import shorten
from dataload.config.references import REFERENCE_PATTERN
from dataload.errors import ConfigError, closest

__all__ = ["MISSING", "Problem", "config_error", "find_problems", "named_as", "named_under"]

Keys = tuple[str | int, ...]
Schema = dict[str, Any]


class Problem(NamedTuple):
    """One thing that is wrong.

    Attributes:
        key: Dotted, as in an override.
        value: What was found there; `MISSING` if nothing was.
        reason: What was expected.
    """

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        found = "is missing" if self.value is MISSING else f"is {shorten(self.value)}"
        return f"{self.key} {found}: {self.reason}"


MISSING = object()


def config_error(problems: Sequence[Problem], origin: str) -> ConfigError:
    """One error that names all problems; its key and value are the first one's.

    Args:
        problems: At least one.
        origin: The file, or what else the settings came from.
    """
    first = problems[0]
    value = None if first.value is MISSING else first.value
    if len(problems) == 1:
        return ConfigError(f"{origin}: {first}", key=first.key, value=value)
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"{origin} has {len(problems)} errors:{lines}", key=first.key, value=value)


@contextmanager
def named_under(section: str, names: Container[str]) -> Generator[None]:
    """Let errors about the settings `names` name them as a config does: ``lanes`` as ``sampler.lanes``.

    Raises:
        ConfigError: The one that was raised within, of one of `names`.
    """
    try:
        yield
    except ConfigError as error:
        if error.key is None or error.key.partition("[")[0] not in names:
            raise
        key = f"{section}.{error.key}"
        raise ConfigError(f"{key}: {error}", key=key, value=error.value) from error


@contextmanager
def named_as(key: str, value: Any) -> Generator[None]:
    """Let errors be about the setting `key`, whatever the argument was called that it went into.

    Raises:
        ConfigError: The one that was raised within.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error), key=key, value=value) from error


def find_problems(details: Sequence[Mapping[str, Any]], data: Mapping[str, Any], schema: Schema) -> list[Problem]:
    """Pydantic's findings in our words, one for each key.

    Args:
        details: `ValidationError.errors()`.
        data: The settings that were checked.
        schema: JSON schema of the whole.
    """
    located = [(_locate(detail, data), str(detail["type"])) for detail in details]
    # A value that may be one of several types gives a finding for each. The one that got furthest into the
    # value is of the type that was meant.
    furthest = {keys: kind for keys, kind in located if not any(_inside(other, keys) for other, _ in located)}
    return [_explain(keys, kind, data, schema) for keys, kind in furthest.items()]


def _inside(keys: Keys, outer: Keys) -> bool:
    return len(keys) > len(outer) and keys[: len(outer)] == outer


def _locate(detail: Mapping[str, Any], data: Mapping[str, Any]) -> Keys:
    """The keys that lead to a finding; pydantic's own also name the types of a union, which no user wrote."""
    keys: list[str | int] = []
    node: Any = data
    entered = False  # whether the kind of the sampler in `node` was passed
    location: Keys = tuple(detail["loc"])
    for place, key in enumerate(location):
        if not entered and location[0] == "sampler" and isinstance(node, dict) and node.get("kind") == key:
            entered = True  # the kind, though 'lanes' is a key of its table, too
            continue
        found, inner = _step(node, key)
        if found:
            keys.append(key)
            node, entered = inner, False
        elif detail["type"] == "missing" and place + 1 == len(location):
            keys.append(key)
    if str(detail["type"]).startswith("union_tag"):
        keys.append("kind")
    return tuple(keys)


def _step(node: Any, key: str | int) -> tuple[bool, Any]:
    if isinstance(node, dict) and key in node:
        return True, cast("dict[Any, Any]", node)[key]
    if isinstance(node, list) and isinstance(key, int) and key < len(cast("list[Any]", node)):
        return True, node[key]
    return False, None


def _explain(keys: Keys, kind: str, data: Mapping[str, Any], schema: Schema) -> Problem:
    value: Any = data
    for key in keys:
        found, value = _step(value, key)
        if not found:
            value = MISSING
            break
    if kind == "extra_forbidden":
        return Problem(dotted(keys), value, _unknown(keys, data, schema))
    expected = list(_schemas_at(keys, data, schema))
    allowed = [choice for node in expected for choice in _choices(node)]
    if allowed and isinstance(value, str):
        others = [f", or {_describe(node)}" for node in expected if not _choices(node)]
        return Problem(dotted(keys), value, closest(value, allowed) + "".join(others))
    return Problem(dotted(keys), value, f"expected {' or '.join(dict.fromkeys(map(_describe, expected)))}")


def dotted(keys: Keys) -> str:
    """Keys as a user writes them in an override.

    Example:
        >>> dotted(("source", "path", 0))
        'source.path[0]'
    """
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def _unknown(keys: Keys, data: Mapping[str, Any], schema: Schema) -> str:
    name = str(keys[-1])
    known = {key for node in _schemas_at(keys[:-1], data, schema) for key in node.get("properties", {})}
    message = closest(name, known)
    # Whoever writes `batch_size` at the top has the right key in the wrong place.
    here = dotted(keys)
    elsewhere = [path for path in _all_keys(schema) if path.rpartition(".")[2] == name and path != here]
    if elsewhere and not message.startswith("did you"):
        message = f"did you mean {elsewhere[0]!r}? {message}"
    return f"there is no such key, {message}" if message.startswith("did you") else f"there is no such key. {message}"


def _all_keys(schema: Schema) -> Iterator[str]:
    """All keys, dotted, those of outer tables first; of a table that may nest in its like, only the outermost."""
    level, seen = [("", schema)], set[int]()
    while level:
        deeper: list[tuple[str, Schema]] = []
        for prefix, node in level:
            for branch in _branches(node, schema):
                if id(branch) not in seen:
                    seen.add(id(branch))
                    deeper += [(f"{prefix}{name}", inner) for name, inner in branch.get("properties", {}).items()]
        yield from (key for key, _ in deeper)
        level = [(f"{key}.", inner) for key, inner in deeper]


def _schemas_at(keys: Keys, data: Any, schema: Schema) -> Iterator[Schema]:
    """The types that are allowed at `keys`, without null."""
    nodes = list(_branches(schema, schema))
    value: Any = data
    for key in keys:
        nodes = [
            branch
            for node in _of_kind(nodes, value)
            for inner in _inner(node, key)
            for branch in _branches(inner, schema)
        ]
        _, value = _step(value, key)
    yield from _of_kind(nodes, value)


def _inner(node: Schema, key: str | int) -> Iterator[Schema]:
    if isinstance(key, int):
        if "items" in node:
            yield node["items"]
    elif key in node.get("properties", {}):
        yield node["properties"][key]
    elif isinstance(node.get("additionalProperties"), dict):
        yield node["additionalProperties"]


def _branches(node: Schema, schema: Schema) -> Iterator[Schema]:
    """`node` with its reference followed, or the types of its union."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    several = node.get("anyOf") or node.get("oneOf")
    if several is not None:
        for one in several:
            yield from _branches(one, schema)
    elif node.get("type") != "null":
        yield node


def _of_kind(nodes: list[Schema], value: Any) -> list[Schema]:
    """Of sections that differ by their ``kind``, the one that was chosen."""
    kind = value.get("kind") if isinstance(value, dict) else None
    chosen = [node for node in nodes if node.get("properties", {}).get("kind", {}).get("const") == kind]
    return chosen if kind is not None and chosen else nodes


def _choices(node: Schema) -> list[str]:
    choices = node.get("enum") or ([node["const"]] if "const" in node else [])
    return [choice for choice in choices if isinstance(choice, str)]


def _describe(node: Schema) -> str:
    """A type in words."""
    if _choices(node):
        return " or ".join(map(repr, _choices(node)))
    match node.get("type"):
        case "integer" | "number" as kind if "minimum" in node:
            return f"{_WORDS[kind]} >= {node['minimum']}"
        case "array":
            return f"a list of {_plural(node['items'])}{', at least one' if node.get('minItems') else ''}"
        case "boolean" if "const" in node:
            return str(node["const"]).lower()
        case "string" if "pattern" in node:
            return _PATTERNS[node["pattern"]][0]
        case kind:
            return _WORDS.get(str(kind), "a table")


def _plural(node: Schema) -> str:
    if "anyOf" in node:
        return " or ".join(map(_plural, node["anyOf"]))
    match node.get("type"):
        case "array":
            return f"lists of {_plural(node['items'])}"
        case "string" if "pattern" in node:
            return _PATTERNS[node["pattern"]][1]
        case kind:
            return _PLURALS.get(str(kind), "tables")


_WORDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
_PLURALS = {"integer": "whole numbers", "number": "numbers", "string": "text"}
_PATTERNS = {
    REFERENCE_PATTERN: ("a function as 'package.module:function'", "functions"),
    NPY_PATTERN: ("the path of a .npy file", "paths of .npy files"),
}
