"""Facts about fields, shards and data sets, and their comparison with what lies there. Pure (no I/O)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from dataload.catalog.checks import (
    ETAG,
    HEX,
    LARGEST,
    LONGEST_TEXT,
    STORED_OPTIONS,
    ContentMark,
    MapEntry,
    check_name,
    check_names,
    check_texts,
    is_count,
    wrong_value,
)
from dataload.catalog.statistics import FieldStatistics
from dataload.errors import ConfigError, closest
from dataload.types import Array, FieldSpec, Int64Array

_WITHOUT_DTYPE = ("bytes", "str", "unknown")


def classes_of(fields: Mapping[str, FieldSpec]) -> dict[str, tuple[str, ...]]:
    """Return the names of classes, by field, as far as they are known."""
    return {name: spec.classes for name, spec in fields.items() if spec.classes is not None}


def with_classes(fields: Mapping[str, FieldSpec], classes: Mapping[str, tuple[str, ...]]) -> dict[str, FieldSpec]:
    """Add the names of classes to integer fields that have none yet."""
    return {
        name: replace(spec, classes=classes[name])
        if name in classes and spec.classes is None and spec.dtype.startswith(("int", "uint"))
        else spec
        for name, spec in fields.items()
    }


def common_classes(parts: Iterable[tuple[str, Mapping[str, FieldSpec]]], key: str) -> dict[str, tuple[str, ...]]:
    """Return the names of classes by field; labels that mean other classes in other data are a ConfigError of `key`.

    `parts` are data that are read together: pairs of a name, for messages, and fields.
    """
    known: dict[str, tuple[str, tuple[str, ...]]] = {}
    for part, fields in parts:
        for name, classes in classes_of(fields).items():
            first, expected = known.setdefault(name, (part, classes))
            if classes != expected:
                message = f"field {name!r} stands for other classes in {first} than in {part}"
                raise ConfigError(
                    f"{message}: open the folders as one list of paths, which numbers all classes", key=key
                )
    return {name: classes for name, (_, classes) in known.items()}


def row_bytes(fields: Mapping[str, FieldSpec]) -> int:
    """Return how many bytes the arrays of a record take, as far as their dtypes and shapes are known."""
    arrays = [(spec.dtype, spec.shape or ()) for spec in fields.values() if spec.dtype not in _WITHOUT_DTYPE]
    return sum(_item_bytes(dtype) * math.prod(n or 1 for n in shape) for dtype, shape in arrays)


def _item_bytes(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:  # such as a structured one
        return 0


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


_text_of = lru_cache(str)  # numpy's takes several microseconds


def spec_of(value: Any) -> FieldSpec:
    """Return the specification of a field, from one of its values."""
    if isinstance(value, (bytes, str)):
        return FieldSpec(type(value).__name__, ())
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # such as lists of different lengths in a list, or torch's bfloat16
        return FieldSpec("unknown", None)
    return FieldSpec(_text_of(array.dtype), array.shape)


class Evidence(NamedTuple):
    """Cheap evidence that a shard is unchanged where it lies; it says nothing about copies.

    `mtime_ns`, in ns since 1970, is the latest of a directory's files; 0 if unknown, as in object stores. `etag` is
    None if unknown, and for local files.
    """

    mtime_ns: int = 0
    etag: str | None = None


class Measures(NamedTuple):
    """The statistics of records by field, and the `lengths`, (records,) unsigned, of fields that all records have."""

    fields: Mapping[str, FieldStatistics]
    lengths: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """Facts about a shard, a file or directory; None is unknown.

    `bytes` and `sha256` are of the file, or of all visible files of a directory in order of name, except LMDB's lock.
    Only jobs know `skipped`, the number of source records left out, and `measures`. Equal facts may have different
    evidence.
    """

    name: str
    bytes: int
    records: int
    sha256: str | None = None
    content: ContentMark | None = None
    evidence: Evidence = field(default=Evidence(), compare=False)
    skipped: int = field(default=0, compare=False)
    measures: Measures | None = field(default=None, compare=False)


class Found(NamedTuple):
    """A shard as one look finds it: size in bytes, evidence, and the mark of its content if it was read."""

    bytes: int
    evidence: Evidence = Evidence()
    content: ContentMark | None = None


def compare(facts: ShardFacts, found: Found | None) -> Literal["same", "changed", "unknown"]:
    """Return whether a shard, None if missing, is still what is known of it. Equal size alone is "unknown"."""
    if found is None or found.bytes != facts.bytes:
        return "changed"
    before, now = facts.evidence, found.evidence
    if before.etag is not None and now.etag is not None:
        return "same" if before.etag == now.etag else "changed"
    if before.mtime_ns and before.mtime_ns == now.mtime_ns:
        return "same"
    if facts.content is not None and found.content is not None:
        return "same" if is_same_content(facts.content, found.content) else "changed"
    return "unknown"


def is_same_content(one: ContentMark, other: ContentMark) -> bool:
    """Return whether two marks are equal; in one from a manifest, tuples have become lists."""
    return json.dumps(one, default=str) == json.dumps(other, default=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSetFacts:
    """Facts about a data set, as in a manifest: its shards by columns, in index order. It is checked when it is made.

    `pattern`, such as ``"train-{000..127}.tar"``, is its name; `bytes` are the sizes of shards. `contents` are empty
    if all are unknown, `fields` if records are bytes. `options` of the reader decide how records are decoded, see
    `STORED_OPTIONS`. `made_by` is the function of a conversion; `statistics` is what `DataSetStatistics` parses, when
    it is used. `versions`, (shards, 3) int64, are of local files when the manifest was read, and not in it; None if a
    shard is a folder.
    """

    pattern: str
    format: str
    names: tuple[str, ...]
    records: tuple[int, ...]
    bytes: tuple[int, ...]
    etags: tuple[str | None, ...]
    sha256: tuple[str | None, ...]
    contents: Sequence[ContentMark | None] = ()
    fields: Mapping[str, FieldSpec] = field(default_factory=dict[str, FieldSpec])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    made_by: MapEntry | None = None
    statistics: Mapping[str, Any] | None = None
    versions: Int64Array | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_name(self.pattern, "pattern")
        check_name(self.format, "format")
        _check_shards(self)
        for name, value in self.options.items():
            if name not in STORED_OPTIONS:
                raise wrong_value("options", f"one of {', '.join(sorted(STORED_OPTIONS))}", name)
            if not STORED_OPTIONS[name](value):
                raise wrong_value(f"options.{name}", "a value of this option", value)

    @classmethod
    def of(
        cls,
        pattern: str,
        format: str,  # noqa: A002 - the attribute's name
        shards: Iterable[ShardFacts],
        *,
        fields: Mapping[str, FieldSpec] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Join the facts of shards in index order."""
        several = tuple(shards)
        return cls(
            pattern=pattern,
            format=format,
            names=tuple(shard.name for shard in several),
            records=tuple(shard.records for shard in several),
            bytes=tuple(shard.bytes for shard in several),
            etags=tuple(shard.evidence.etag for shard in several),
            sha256=tuple(shard.sha256 for shard in several),
            contents=tuple(shard.content for shard in several) if any(shard.content for shard in several) else (),
            fields=dict(fields or {}),
            options=dict(options or {}),
        )

    @property
    def shards(self) -> tuple[ShardFacts, ...]:
        """The facts of each shard, in index order."""
        contents = self.contents or (None,) * len(self.names)
        columns = self.names, self.bytes, self.records, self.sha256, contents, (Evidence(0, tag) for tag in self.etags)
        return tuple(map(ShardFacts, *columns))

    def stale(self, found: Mapping[str, Found]) -> Iterator[str]:
        """Yield a line for each shard that is missing in `found`, by name, or has changed."""
        for shard in self.shards:
            now = found.get(shard.name)
            if now is None:
                yield f"{shard.name} is missing"
            elif now.bytes != shard.bytes:
                yield f"{shard.name} has {now.bytes:,} bytes, and {shard.bytes:,} in the manifest"
            elif compare(shard, now) == "changed":
                yield f"{shard.name} has the ETag {now.evidence.etag}, and {shard.evidence.etag} in the manifest"

    def keeping(self, before: DataSetFacts | None) -> DataSetFacts:
        """Return these facts with what `before` knows of the same shards: statistics, classes and the function."""
        if before is None or (before.format, before.shards) != (self.format, self.shards) or not all(self.sha256):
            return self
        return replace(
            self,
            fields=with_classes(self.fields, classes_of(before.fields)),
            statistics=before.statistics if self.statistics is None else self.statistics,
            made_by=self.made_by or before.made_by,
        )


def _check_shards(facts: DataSetFacts) -> None:
    count = len(facts.names)
    columns = {"records": facts.records, "bytes": facts.bytes, "etag": facts.etags, "sha256": facts.sha256}
    columns |= {"identity": facts.contents} if facts.contents else {}
    for name, column in columns.items():
        if len(column) != count:
            raise wrong_value(f"shards.{name}", f"{count} values, one for each name,", f"{len(column)} values")
    if not count:
        raise wrong_value("shards", "at least one shard", "none")
    for name, numbers in (("records", facts.records), ("bytes", facts.bytes)):
        if wrong := [number for number in numbers if not is_count(number)]:
            raise wrong_value(f"shards.{name}", f"integers from 0 to {LARGEST}", wrong[0])
        if sum(numbers) > LARGEST:
            raise wrong_value(f"shards.{name}", f"a sum of at most {LARGEST}", sum(numbers))
    check_names(facts.names)
    check_texts(facts.etags, ETAG, range(1, LONGEST_TEXT), "shards.etag", "printable ASCII without spaces")
    check_texts(facts.sha256, HEX, range(64, 65), "shards.sha256", "64 hexadecimal digits")
