"""Checks of the values in a manifest, which comes with the data and is not trusted. Pure (no I/O)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import numpy as np

from dataload.codecs.codec import CODEC_NAMES
from dataload.errors import ConfigError, closest, printable
from dataload.storage.paths import are_plain, leads_elsewhere
from dataload.types import Array, FieldSpec

LARGEST = (1 << 63) - 1
LONGEST_TEXT = 4096
LONGEST_SOURCE = 64 << 10


class ContentMark(NamedTuple):
    """A mark of a shard's content, for fingerprints.

    `size` is in bytes, of the data file; `ends` a hash of its first and last 4 KiB, "" for a folder. `inner` is
    `ShardReader.identity`: None, text, or at most 16 texts. Its type is kept, because its repr is hashed.
    """

    size: int
    ends: str
    inner: Any


class PackedMarks(Sequence[ContentMark]):
    """The marks of many shards, in a fifth of the memory of a tuple: sizes, and columns of ASCII of one length."""

    def __init__(self, sizes: Sequence[int], texts: Sequence[Array]) -> None:
        self._sizes = np.array(sizes, np.int64)
        self._texts = texts

    @classmethod
    def of(cls, marks: Sequence[Any]) -> Self | None:
        """Return the marks of a manifest; None if one is not valid, or they differ in kind or length."""
        if {*map(type, marks)} != {list} or {*map(len, marks)} != {3}:
            return None
        sizes, ends, inner = zip(*marks, strict=True)
        kinds, texts = {*map(type, inner)}, list[Array]()
        if {*map(type, sizes)} != {int} or {*map(type, ends)} != {str} or kinds not in ({str}, {type(None)}):
            return None
        if min(sizes) < 0 or max(sizes) > LARGEST:
            return None
        for column in (ends, inner) if kinds == {str} else (ends,):
            text, lengths = "".join(column), {*map(len, column)}
            if len(lengths) > 1 or not 0 < max(lengths) <= LONGEST_TEXT or not text.isascii() or "\0" in text:
                return None
            texts.append(np.frombuffer(text.encode(), f"S{lengths.pop()}"))
        return cls(sizes, texts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*cast("Sequence[Any]", other)]

    def __getitem__(self, shard: Any) -> Any:
        texts = [bytes(column[shard]).decode() for column in self._texts]
        return ContentMark(int(self._sizes[shard]), texts[0], texts[1] if len(texts) > 1 else None)

    def __len__(self) -> int:
        return len(self._sizes)


class MapEntry(NamedTuple):
    """The function that made the records of a converted data set: module and name, and a hash of all that is known.

    `source` is its text, shortened if it is long; `version` is its module's. Both are empty if unknown.
    """

    name: str
    source: str
    sha256: str
    version: str


_SHOWN_CHARACTERS = 80
_MOST_HASHES = 16
_MOST_AXES = 64

ETAG = re.compile(r"[\x21-\x7e]*")  # it goes into a header of HTTP
HEX = re.compile(r"[0-9a-f]*")
DTYPE = re.compile(r"[<|=>]?[A-Za-z][A-Za-z0-9_]{0,31}(\[[A-Za-z0-9]{1,16}\])?")


def check_texts(values: Sequence[Any], allowed: re.Pattern[str], lengths: range, where: str, expected: str) -> None:
    """Check that all values are None, or text of such lengths with only the characters of `allowed`."""
    known = [value for value in values if value is not None]
    # All at once, and one by one only if that fails: a manifest may have 100,000 of them.
    fits = {*map(type, known)} <= {str} and all(length in lengths for length in {*map(len, known)})
    if not fits or not allowed.fullmatch("".join(known)):
        for text in known:
            if type(text) is not str or len(text) not in lengths or not allowed.fullmatch(text):
                raise wrong_value(where, expected, text)


def check_names(names: Sequence[str]) -> None:
    """Check that all names are names of visible files in one directory."""
    fit = {*map(type, names)} <= {str} and all(0 < length <= LONGEST_TEXT for length in {*map(len, names)})
    if not fit or not are_plain(joined := "/".join(names)) or joined.count("/") >= len(names):
        for name in names:
            check_name(name, "shards.name")
    if twice := find_twice(names):
        raise ConfigError(f"the shard {shorten(twice)} is listed twice", key="manifest")


def check_name(name: Any, where: str) -> None:
    """Check that a value is the name of a visible file in one directory."""
    if type(name) is not str or not 0 < len(name) <= LONGEST_TEXT:
        raise wrong_value(where, f"1 to {LONGEST_TEXT} characters", name)
    if leads_elsewhere(name) or name.startswith(".") or "/" in name:
        raise wrong_value(where, "a name in the directory of the manifest, not hidden and without '/',", name)


def is_count(value: Any) -> bool:
    """Return whether a value is an integer of at least 0 that fits into int64."""
    return type(value) is int and 0 <= value <= LARGEST


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) <= LARGEST


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= LONGEST_TEXT


def _are_texts(value: Any) -> bool:
    return type(value) is list and len(value) <= _MOST_HASHES and all(map(_is_text, cast("list[Any]", value)))


def _maps_to(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is dict and all(map(check, cast("dict[str, Any]", value).values()))


def _is_shape(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_int, cast("list[Any]", value)))


STORED_OPTIONS: Mapping[str, Callable[[Any], bool]] = {
    "case_sensitive": lambda value: type(value) is bool,
    "codec": lambda value: type(value) is str and value in CODEC_NAMES,
    "db_num": is_count,
    "decode": lambda value: _is_text(value) or _maps_to(_is_text)(value),
    "dtype": lambda value: type(value) is str and DTYPE.fullmatch(value) is not None and value[0] != ">",
    "end_token": _is_int,
    "ends": _is_text,
    "field": _is_text,
    "missing": _is_text,
    "pad_token": _is_int,
    "shapes": _maps_to(_is_shape),
    "stride": is_count,
    "subdatabase": _is_text,
    "window": is_count,
}
"""The options that a manifest may set, and the check of each. None names a path, a module or a resource, because a
manifest comes with the data and is not trusted."""


def wrong_value(where: str, expected: str, found: Any) -> ConfigError:
    """Return the error about a value; `where` is its key."""
    return ConfigError(f"{where}: expected {expected} but found {shorten(found)}", key=where)


def shorten(value: Any) -> str:
    """Return a value as short, printable text."""
    return printable(value if isinstance(value, str) else repr(value), _SHOWN_CHARACTERS, kept="")


def find_twice(names: Sequence[str]) -> str | None:
    """Return a name that occurs twice, or None."""
    seen: set[str] = set()
    if len({*names}) == len(names):
        return None
    return next(name for name in names if name in seen or seen.add(name))


def as_column(value: Any, where: str) -> tuple[Any, ...]:
    """Return a JSON list as a tuple."""
    if type(value) is not list:
        raise wrong_value(where, "a list", value)
    return tuple(cast("list[Any]", value))


def as_content(value: Any) -> ContentMark:
    """Return the mark of a shard's content."""
    if type(value) is list and len(parts := cast("list[Any]", value)) == 3:
        size, ends, identity = parts
        if is_count(size) and _is_text(ends) and (identity is None or _is_text(identity) or _are_texts(identity)):
            return ContentMark(size, ends, identity)
    raise wrong_value("shards.identity", "a size, a text, and a text, a list of texts or null", value)


def field_to_json(spec: FieldSpec) -> dict[str, Any]:
    """Return what `as_field` reads. Dtypes without a name, such as structured ones, are unknown there."""
    classes = {} if spec.classes is None else {"classes": spec.classes}
    return {"dtype": spec.dtype if DTYPE.fullmatch(spec.dtype) else "unknown", "shape": spec.shape, **classes}


def as_field(value: Any, name: str) -> FieldSpec:
    """Return the field of that name."""
    table = as_table(value, f"fields.{name}", ("dtype", "shape"), ["classes"])
    dtype, shape = table["dtype"], table["shape"]
    if type(dtype) is not str or not DTYPE.fullmatch(dtype):
        raise wrong_value(f"fields.{name}.dtype", "the name of a dtype", dtype)
    axes = None if shape is None else as_column(shape, f"fields.{name}.shape")
    if axes is not None and (len(axes) > _MOST_AXES or not all(axis is None or is_count(axis) for axis in axes)):
        raise wrong_value(f"fields.{name}.shape", f"up to {_MOST_AXES} extents, each null or at least 0", shape)
    classes = as_column(table["classes"], f"fields.{name}.classes") if "classes" in table else None
    for text in classes or ():
        if type(text) is not str:
            raise wrong_value(f"fields.{name}.classes", "texts", text)
    return FieldSpec(dtype, axes, classes)


def as_map(value: Any) -> MapEntry | None:
    """Return a function of a conversion; None if there is none."""
    if value is None:
        return None
    table = as_table(value, "map", MapEntry._fields)
    for name, text in table.items():
        longest = LONGEST_SOURCE if name == "source" else LONGEST_TEXT
        if type(text) is not str or len(text) > longest:
            raise wrong_value(f"map.{name}", f"text of at most {longest} characters", text)
    return MapEntry(**table)


def as_object(value: Any, where: str) -> dict[str, Any]:
    """Return a JSON object, checked to be one."""
    if type(value) is not dict:
        raise wrong_value(where, "an object", value)
    return cast("dict[str, Any]", value)


def as_table(value: Any, where: str, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Return an object that has exactly these keys, and maybe some of the optional ones."""
    table = as_object(value, where)
    for key in keys:
        if key not in table:
            raise wrong_value(where, f"the key {key!r}", f"only {', '.join(table) or 'none'}")
    for key in table:
        if key not in keys and key not in optional:
            raise ConfigError(f"{where}: unknown key {shorten(key)}: {closest(shorten(key), keys)}", key=where)
    return table
