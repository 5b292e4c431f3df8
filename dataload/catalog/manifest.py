"""The manifest of a directory: ``dataload.json``, which lists its data sets and their shards.

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
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dataload.catalog.checks import (
    PackedMarks,
    as_column,
    as_content,
    as_field,
    as_map,
    as_object,
    as_table,
    field_to_json,
    find_twice,
    shorten,
    wrong_value,
)
from dataload.catalog.facts import DataSetFacts
from dataload.catalog.statistics import DataSetStatistics
from dataload.errors import ConfigError, CorruptFileError, MachineError, SourceError, SourceNotFoundError, StoreError
from dataload.storage import Remote, is_url, join, storage_of
from dataload.storage.paths import literal_pattern

MANIFEST_NAME = "dataload.json"
"""Name of the manifest in the directory of the shards."""

MOST_BYTES = 32 << 20
"""Maximum size of a manifest, of about 200,000 shards: parsed JSON takes up to twenty times the memory."""

RENEW = f"if the shards are right, delete {MANIFEST_NAME} and run `dataload index --manifest` again"

_JOURNALS = ".*.convert.json"  # of conversions, which keep them beside their shards
_VERSION = 1
_APPENDED = re.compile(r"\d-append-([0-9a-f]{8})(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The data sets of a directory, which differ in pattern and share no shard."""

    data_sets: tuple[DataSetFacts, ...] = ()

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
        remedy = RENEW
        try:
            table = as_object(json.loads(data), "manifest")
            if type(table.get("version")) is not int or table["version"] != _VERSION:
                remedy = f"if a later release wrote it, upgrade dataload; {RENEW}"
                raise wrong_value("version", f"{_VERSION}, which this release reads,", table.get("version"))
            entries = as_table(table, "manifest", ("version", "data_sets"))["data_sets"]
            return cls(tuple(map(_parse, as_column(entries, "data_sets"))))
        except ConfigError as error:
            raise CorruptFileError(f"not a valid manifest: {error}; {remedy}", path=path) from error
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or numbers of thousands of digits
            problem = shorten(str(error))
            raise CorruptFileError(f"a manifest is JSON, but this is not ({problem}); {RENEW}", path=path) from error

    def to_bytes(self) -> bytes:
        """Return what `parse` reads."""
        # Without spaces inside: of many shards, a manifest is read by machines. A data set is a line, for diffs.
        lines = ",\n".join(json.dumps(_to_json(entry), separators=(",", ":")) for entry in self.data_sets)
        return f'{{"version":{_VERSION},"data_sets":[\n{lines}\n]}}\n'.encode()

    def with_data_set(self, entry: DataSetFacts) -> Manifest:
        """Return a manifest with `entry` in place of the data sets that share its pattern or a shard with it."""
        entry = entry.keeping(self.find(entry.pattern))
        mine = {*entry.names}
        kept = [other for other in self.data_sets if other.pattern != entry.pattern and mine.isdisjoint(other.names)]
        return Manifest(tuple(sorted((*kept, entry), key=lambda each: each.pattern)))

    def find(self, name: str) -> DataSetFacts | None:
        """Return the data set with that pattern, or with that shard, or None."""
        return next((entry for entry in self.data_sets if name == entry.pattern or name in entry.names), None)


def run_of_append(name: str) -> str | None:
    """Return which run of ``create(append=True)`` has named a shard; None for others.

    Until the manifest lists it, such a shard does not belong to the data set.
    """
    found = _APPENDED.search(name)
    return None if found is None else found[1]


def renewal(directory: str) -> str:
    """Return what to do about a manifest that contradicts the shards."""
    return f"if the shards are right, run `dataload index --manifest {directory}`"


def _to_json(facts: DataSetFacts) -> dict[str, Any]:
    return {
        "pattern": facts.pattern,
        "format": facts.format,
        "options": facts.options,
        "fields": {name: field_to_json(spec) for name, spec in facts.fields.items()},
        "records": sum(facts.records),
        "bytes": sum(facts.bytes),
        "shards": {
            "name": facts.names,
            "records": facts.records,
            "bytes": facts.bytes,
            "etag": facts.etags if any(facts.etags) else None,
            "sha256": facts.sha256 if any(facts.sha256) else None,
            **({"identity": [*facts.contents]} if facts.contents else {}),
        },
        **({} if facts.made_by is None else {"map": facts.made_by._asdict()}),
        **({} if facts.statistics is None else {"statistics": facts.statistics}),
    }


def _parse(value: Any) -> DataSetFacts:
    """Build facts from parsed JSON; raise a ConfigError if it is impossible, or totals contradict shards."""
    keys = ("pattern", "format", "options", "fields", "records", "bytes", "shards")
    table = as_table(value, "data set", keys, ["map", "statistics"])
    columns = as_table(table["shards"], "shards", ("name", "records", "bytes", "etag", "sha256"), ["identity"])
    names = as_column(columns["name"], "shards.name")
    unknown = (None,) * len(names)
    etags, hashes = (
        unknown if columns[name] is None else as_column(columns[name], f"shards.{name}") for name in ("etag", "sha256")
    )
    marks = as_column(columns.get("identity", []), "shards.identity")
    facts = DataSetFacts(
        pattern=table["pattern"],
        format=table["format"],
        names=names,
        records=as_column(columns["records"], "shards.records"),
        bytes=as_column(columns["bytes"], "shards.bytes"),
        etags=etags,
        sha256=hashes,
        contents=PackedMarks.of(marks) or tuple(mark if mark is None else as_content(mark) for mark in marks),
        fields={name: as_field(spec, name) for name, spec in as_object(table["fields"], "fields").items()},
        options=as_object(table["options"], "options"),
        made_by=as_map(table.get("map")),
        statistics=as_object(table["statistics"], "statistics") if "statistics" in table else None,
    )
    for name, parts in (("records", facts.records), ("bytes", facts.bytes)):
        if type(table[name]) is not int or table[name] != sum(parts):
            raise wrong_value(name, f"{sum(parts)}, the sum of the shards,", table[name])
    return facts


def unfinished_conversions(directory: str, remote: Remote | None) -> Iterator[tuple[str, set[str]]]:
    """Yield the journal of each conversion into a directory that has not ended, and the names of its shards."""
    storage = storage_of(directory, remote)
    for path in storage.glob(join(literal_pattern(directory), _JOURNALS)):
        with suppress(ValueError, KeyError, TypeError):  # is not one
            journal = json.loads(storage.read(path))
            if len(journal["finished"]) < len(journal["shards"]):
                yield path, {name for name, *_ in journal["shards"]}


_LOCK_SECONDS = 10
_SECONDS_BETWEEN_TRIES = 0.02


def read_manifest(directory: str, remote: Remote | None = None) -> Manifest | None:
    """Return the manifest of a directory, or None if it has none."""
    path = join(directory, MANIFEST_NAME)
    if not is_url(path) and not storage_of(path).exists(path):
        return None  # before an error is made, which says what else is there
    try:
        # One request, whatever its size.
        data = storage_of(path, remote).read_ranges(path, np.zeros(1, np.int64), np.array([MOST_BYTES + 1]))[0]
    except SourceNotFoundError:
        return None
    return Manifest.parse(data, path)


def update_manifest(
    directory: str,
    entries: Iterable[DataSetFacts] | Callable[[Manifest], Iterable[DataSetFacts]],
    gone: Iterable[str] = (),
    *,
    remote: Remote | None = None,
) -> str:
    """Replace a directory's manifest in one step: add data sets, drop `gone` shards; return the manifest's path.

    A function makes the data sets from the present manifest; it is called again if that changes meanwhile.
    """
    path = join(directory, MANIFEST_NAME)
    added, missing, storage = entries if callable(entries) else tuple(entries), {*gone}, storage_of(path, remote)
    deadline = time.monotonic() + _LOCK_SECONDS
    with locked(path, remote, _LOCK_SECONDS):
        while True:
            found = storage.load(path)
            before = None if found is None else Manifest.parse(found[0], path)
            kept = [entry for entry in (before or Manifest()).data_sets if missing.isdisjoint(entry.names)]
            after = Manifest(tuple(kept))
            for entry in added(before or Manifest()) if callable(added) else added:
                after = after.with_data_set(entry)
            data = after.to_bytes()
            if len(data) > MOST_BYTES:
                message = f"{path} would have {len(data):,} bytes, and may have {MOST_BYTES:,}"
                raise ConfigError(f"{message}: keep statistics of fewer fields, or use fewer shards", key="manifest")
            try:
                if after != before:
                    storage.replace(path, data, None if found is None else found[1])
            except FileExistsError:  # other nodes ignore the lock
                if time.monotonic() > deadline:
                    message = f"other processes have been writing {path} for {_LOCK_SECONDS} seconds: try again"
                    raise SourceError(message, path=path) from None
            else:
                remove_lengths(directory, before, after, remote)
                return path


def remove_lengths(directory: str, before: Manifest | None, after: Manifest, remote: Remote | None) -> None:
    """Remove the files of lengths known only to `before`, a manifest or receipt."""
    for name in _lengths_files(before or Manifest()) - _lengths_files(after):
        storage_of(directory, remote).remove(join(directory, name))


def _lengths_files(manifest: Manifest) -> set[str]:
    names: set[str] = set()
    for entry in manifest.data_sets:
        if entry.statistics is not None:
            with suppress(ConfigError):  # damaged statistics name nothing to remove
                names |= {file.name for file in DataSetStatistics.parse(entry.statistics).lengths.values()}
    return names


@contextmanager
def locked(path: str, remote: Remote | None, seconds: float = _LOCK_SECONDS) -> Generator[None]:
    """Hold the lock of a file, waiting up to so many seconds for it."""
    deadline = time.monotonic() + seconds
    with ExitStack() as entered:
        while True:
            try:
                entered.enter_context(storage_of(path, remote).lock(path))
                break
            except SourceError as error:
                if isinstance(error, (StoreError, MachineError)) or time.monotonic() > deadline:
                    raise
                time.sleep(_SECONDS_BETWEEN_TRIES)
        yield
