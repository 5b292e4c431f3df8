"""The manifest of a directory: ``dataload.json``, which lists its data sets and their shards. Pure (no I/O).

```json
{
 "version": 1,
 "data_sets": [
  {
   "pattern": "train-{000..001}.array_record",
   "format": "array_record",
   "options": {"codec": "tensorprotos"},
   "fields": {"x": {"dtype": "float32", "shape": [28, 28]}},
   "records": 3000,
   "bytes": 9408000,
   "shards": {
    "name": ["train-000.array_record", "train-001.array_record"],
    "records": [1500, 1500],
    "bytes": [4704000, 4704000],
    "etag": null,
    "sha256": ["12ab...", "34cd..."],
    "identity": [[4704000, "56ef...", "78ab..."], [4704000, "90cd...", "12ef..."]]
   }
  }
 ]
}
```

Shards are in index order. ``etag`` and ``sha256`` are lists, in which null means unknown, or null if all are unknown.
``identity`` is what the fingerprint of the data set needs to know of the content, so that it reads no shard; it may be
missing. Fields of labels may have ``classes``, the names of 0, 1, ... ``map`` describes the function of a conversion,
``statistics`` is what `DataSetStatistics` parses; both may be missing, too. Columns parse several times faster than an
object for each shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from dataload.catalog.checks import (
    ETAG,
    HEX,
    LARGEST,
    LONGEST_TEXT,
    STORED_OPTIONS,
    MapEntry,
    ShardIdentity,
    as_column,
    as_field,
    as_identity,
    as_map,
    as_object,
    as_table,
    check_name,
    check_names,
    check_texts,
    field_to_json,
    find_twice,
    is_count,
    shorten,
    wrong_value,
)
from dataload.catalog.classes import classes_of, with_classes
from dataload.catalog.statistics import DataSetStatistics
from dataload.errors import ConfigError, CorruptFileError
from dataload.types import FieldSpec

MANIFEST_NAME = "dataload.json"
"""Name of the manifest in the directory of the shards."""

MOST_BYTES = 32 << 20
"""Maximum size of a manifest, of about 200,000 shards: parsed JSON takes up to twenty times the memory."""

RENEW = f"if the shards are right, delete {MANIFEST_NAME} and run `dataload index --manifest` again"

_VERSION = 1


class ShardEntry(NamedTuple):
    """A shard in a manifest: a file or directory beside it. ETag, SHA-256 and identity are None if unknown."""

    name: str
    records: int
    bytes: int
    etag: str | None = None
    sha256: str | None = None
    identity: ShardIdentity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSetEntry:
    """A data set in a manifest: its shards by columns, in index order. It is checked when it is made.

    `pattern`, such as ``"train-{000..127}.tar"``, is its name; `bytes` are the sizes of shards. `identities` are empty
    if all are unknown, `fields` if records are bytes. `options` of the reader decide how records are decoded, see
    `STORED_OPTIONS`. `map` is the function of a conversion; `statistics` is what `DataSetStatistics` parses, when it is
    used.
    """

    pattern: str
    format: str
    names: tuple[str, ...]
    records: tuple[int, ...]
    bytes: tuple[int, ...]
    etags: tuple[str | None, ...]
    sha256: tuple[str | None, ...]
    identities: tuple[ShardIdentity | None, ...] = ()
    fields: Mapping[str, FieldSpec] = field(default_factory=dict[str, FieldSpec])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    map: MapEntry | None = None
    statistics: Mapping[str, Any] | None = None

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
        shards: Iterable[ShardEntry],
        *,
        fields: Mapping[str, FieldSpec] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build an entry from shards in index order."""
        names, records, sizes, etags, hashes, identities = tuple(zip(*shards, strict=True)) or ((),) * 6
        return cls(
            pattern=pattern,
            format=format,
            names=names,
            records=records,
            bytes=sizes,
            etags=etags,
            sha256=hashes,
            identities=identities if any(identities) else (),
            fields=dict(fields or {}),
            options=dict(options or {}),
        )

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        """The shards, in index order."""
        identities = self.identities or (None,) * len(self.names)
        columns = self.names, self.records, self.bytes, self.etags, self.sha256, identities
        return tuple(map(ShardEntry._make, zip(*columns, strict=True)))

    def stale(self, found: Mapping[str, tuple[int, str | None]]) -> Iterator[str]:
        """Yield a line for each shard that differs from the size and ETag (None: not compared) found, by name."""
        for name, size, etag in zip(self.names, self.bytes, self.etags, strict=True):
            if name not in found:
                yield f"{name} is missing"
                continue
            now, tag = found[name]
            if now != size:
                yield f"{name} has {now:,} bytes, and {size:,} in the manifest"
            elif None not in (tag, etag) and tag != etag:
                yield f"{name} has the ETag {tag}, and {etag} in the manifest"

    def to_json(self) -> dict[str, Any]:
        return {
            "pattern": self.pattern,
            "format": self.format,
            "options": self.options,
            "fields": {name: field_to_json(spec) for name, spec in self.fields.items()},
            "records": sum(self.records),
            "bytes": sum(self.bytes),
            "shards": {
                "name": self.names,
                "records": self.records,
                "bytes": self.bytes,
                "etag": self.etags if any(self.etags) else None,
                "sha256": self.sha256 if any(self.sha256) else None,
                **({"identity": self.identities} if self.identities else {}),
            },
            **({} if self.map is None else {"map": self.map._asdict()}),
            **({} if self.statistics is None else {"statistics": self.statistics}),
        }

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Build an entry from parsed JSON; raise a ConfigError if it is impossible, or totals contradict shards."""
        keys = ("pattern", "format", "options", "fields", "records", "bytes", "shards")
        table = as_table(value, "data set", keys, ["map", "statistics"])
        columns = as_table(table["shards"], "shards", ("name", "records", "bytes", "etag", "sha256"), ["identity"])
        names = as_column(columns["name"], "shards.name")
        unknown = (None,) * len(names)
        etags, hashes = (
            unknown if columns[name] is None else as_column(columns[name], f"shards.{name}")
            for name in ("etag", "sha256")
        )
        identities = as_column(columns.get("identity", []), "shards.identity")
        entry = cls(
            pattern=table["pattern"],
            format=table["format"],
            names=names,
            records=as_column(columns["records"], "shards.records"),
            bytes=as_column(columns["bytes"], "shards.bytes"),
            etags=etags,
            sha256=hashes,
            identities=tuple(identity if identity is None else as_identity(identity) for identity in identities),
            fields={name: as_field(spec, name) for name, spec in as_object(table["fields"], "fields").items()},
            options=as_object(table["options"], "options"),
            map=as_map(table.get("map")),
            statistics=as_object(table["statistics"], "statistics") if "statistics" in table else None,
        )
        for name, parts in (("records", entry.records), ("bytes", entry.bytes)):
            if type(table[name]) is not int or table[name] != sum(parts):
                raise wrong_value(name, f"{sum(parts)}, the sum of the shards,", table[name])
        return entry


@dataclass(frozen=True, slots=True)
class Manifest:
    """The data sets of a directory, which differ in pattern and share no shard."""

    data_sets: tuple[DataSetEntry, ...] = ()

    def __post_init__(self) -> None:
        if twice := find_twice([entry.pattern for entry in self.data_sets]):
            raise ConfigError(f"two data sets have the pattern {shorten(twice)}", key="manifest")
        names = [name for entry in self.data_sets for name in entry.names] if len(self.data_sets) > 1 else []
        if twice := find_twice(names):
            raise ConfigError(f"the shard {shorten(twice)} is listed twice", key="manifest")

    @classmethod
    def parse(cls, data: bytes, path: str) -> Self:
        """Parse the content of a manifest; `path` is for messages."""
        if len(data) > MOST_BYTES:
            raise CorruptFileError(f"a manifest has at most {MOST_BYTES:,} bytes", path=path)
        try:
            table = as_object(json.loads(data), "manifest")
            if type(table.get("version")) is not int or table["version"] != _VERSION:
                raise wrong_value("version", f"{_VERSION}, which this release reads,", table.get("version"))
            entries = as_table(table, "manifest", ("version", "data_sets"))["data_sets"]
            return cls(tuple(map(DataSetEntry.parse, as_column(entries, "data_sets"))))
        except ConfigError as error:
            raise CorruptFileError(f"not a valid manifest: {error}; {RENEW}", path=path) from error
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or numbers of thousands of digits
            problem = shorten(str(error))
            raise CorruptFileError(f"a manifest is JSON, but this is not ({problem}); {RENEW}", path=path) from error

    def to_bytes(self) -> bytes:
        """Return what `parse` reads."""
        # Without spaces inside: of many shards, a manifest is read by machines. A data set is a line, for diffs.
        lines = ",\n".join(json.dumps(entry.to_json(), separators=(",", ":")) for entry in self.data_sets)
        return f'{{"version":{_VERSION},"data_sets":[\n{lines}\n]}}\n'.encode()

    def with_data_set(self, entry: DataSetEntry) -> Manifest:
        """Return a manifest with `entry` in place of the data sets that share its pattern or a shard with it."""
        before = self.find(entry.pattern)
        same = before is not None and (before.format, before.shards) == (entry.format, entry.shards)
        if before is not None and same and all(entry.sha256):  # what is known of them is still right
            statistics = before.statistics if entry.statistics is None else entry.statistics
            fields = with_classes(entry.fields, classes_of(before.fields))
            entry = replace(entry, fields=fields, statistics=statistics, map=entry.map or before.map)
        mine = {*entry.names}
        kept = [other for other in self.data_sets if other.pattern != entry.pattern and mine.isdisjoint(other.names)]
        return Manifest(tuple(sorted((*kept, entry), key=lambda each: each.pattern)))

    def find(self, name: str) -> DataSetEntry | None:
        """Return the data set with that pattern, or with that shard, or None."""
        return next((entry for entry in self.data_sets if name == entry.pattern or name in entry.names), None)


def merge_manifests(parts: Iterable[Manifest]) -> Manifest:
    """Join manifests of parts: the shards of a data set of several parts follow each other in the order given."""
    merged: dict[str, DataSetEntry] = {}
    for entry in (entry for part in parts for entry in part.data_sets):
        before = merged.get(entry.pattern)
        merged[entry.pattern] = entry if before is None else _joined(before, entry)
    return Manifest(tuple(merged.values()))


def _joined(one: DataSetEntry, other: DataSetEntry) -> DataSetEntry:
    fields = one.fields or other.fields  # a part without records may not know them
    for name, mine, others in (
        ("format", one.format, other.format),
        ("options", one.options, other.options),
        ("fields", sorted(fields), sorted(other.fields or fields)),  # the first records may differ in shape
    ):
        if mine != others:
            found = f"{shorten(mine)}, {shorten(others)}"
            message = f"parts of the data set {shorten(one.pattern)} disagree about {name}: {found}"
            raise ConfigError(message, key=name)
    shards = {shard.name: shard for shard in one.shards}
    for shard in other.shards:
        if shards.setdefault(shard.name, shard) != shard:
            message = f"parts disagree about the shard {shard.name}: {shards[shard.name]}, {shard}"
            raise ConfigError(message, key="shards")
    joined = DataSetEntry.of(one.pattern, one.format, shards.values(), fields=fields, options=one.options)
    return replace(joined, statistics=_joined_statistics(one, other))


def _joined_statistics(one: DataSetEntry, other: DataSetEntry) -> dict[str, Any] | None:
    if one.statistics is None and other.statistics is None:
        return None
    if one.statistics is None or other.statistics is None:
        raise ConfigError(f"only some parts of {shorten(one.pattern)} have statistics: run all with them", key="part")
    if {*other.names} <= {*one.names}:  # a part that was done twice
        return dict(one.statistics)
    if twice := {*other.names}.intersection(one.names):
        raise ConfigError(f"two parts have statistics of the shard {shorten(min(twice))}", key="part")
    mine, others = DataSetStatistics.parse(one.statistics), DataSetStatistics.parse(other.statistics)
    return mine.merge(others).to_json()


def _check_shards(entry: DataSetEntry) -> None:
    count = len(entry.names)
    columns = {"records": entry.records, "bytes": entry.bytes, "etag": entry.etags, "sha256": entry.sha256}
    columns |= {"identity": entry.identities} if entry.identities else {}
    for name, column in columns.items():
        if len(column) != count:
            raise wrong_value(f"shards.{name}", f"{count} values, one for each name,", f"{len(column)} values")
    if not count:
        raise wrong_value("shards", "at least one shard", "none")
    for name, numbers in (("records", entry.records), ("bytes", entry.bytes)):
        if wrong := [number for number in numbers if not is_count(number)]:
            raise wrong_value(f"shards.{name}", f"integers from 0 to {LARGEST}", wrong[0])
        if sum(numbers) > LARGEST:
            raise wrong_value(f"shards.{name}", f"a sum of at most {LARGEST}", sum(numbers))
    check_names(entry.names)
    check_texts(entry.etags, ETAG, range(1, LONGEST_TEXT), "shards.etag", "printable ASCII without spaces")
    check_texts(entry.sha256, HEX, range(64, 65), "shards.sha256", "64 hexadecimal digits")


def renewal(directory: str) -> str:
    """Return what to do about a manifest that contradicts the shards."""
    return f"if the shards are right, run `dataload index --manifest {directory}`"
