"""The plan of a conversion: where it writes, and which records go into which file; and that of an index.

The latter has the data sets of a directory to describe, and whether the result can be saved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple, Self

from dataload._util.indexing import even_split, expand_braces
from dataload._util.settings import check_count, check_fields
from dataload.catalog.checks import STORED_OPTIONS, check_name
from dataload.catalog.evidence import shard_bytes
from dataload.catalog.facts import DataSetFacts, ShardFacts
from dataload.catalog.manifest import Manifest, read_manifest, run_of_append
from dataload.convert.measuring import fields_of, without_cache
from dataload.errors import ConfigError, SourceError, SourceNotFoundError
from dataload.sources.base import Source
from dataload.sources.discover import DataSetFiles, find_shards, harmless_options
from dataload.sources.format import Format
from dataload.sources.registry import find_destination, get_format, split_format
from dataload.storage import Remote, Storage, base_name, is_url, join, parent, storage_of
from dataload.storage.paths import is_web_url

_PLACEHOLDER = re.compile(r"\{shards?(?::\d*d)?\}")
_DEFAULT_NAME = "-{shard:05d}-of-{shards:05d}"


@dataclass(frozen=True, slots=True)
class Shard:
    """A file to write, with the records [start, stop) of the source; `path` is its final name."""

    path: str
    start: int
    stop: int

    @property
    def name(self) -> str:
        return base_name(self.path)

    @property
    def key(self) -> tuple[str, str]:
        return self.name, ""

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a conversion; `remote` is None for a local path."""

    entry: Format
    path: str
    remote: Remote | None = None

    @classmethod
    def of(
        cls,
        destination: str | os.PathLike[str],
        format_name: str | None,
        storage_options: Any = None,
        remote: Any = None,
    ) -> Self:
        """Parse a destination; a ConfigError if the format's writer does not write there."""
        entry, path = find_destination(destination, format_name)
        if not is_url(path):
            return cls(entry, os.path.normpath(path))
        if "remote" not in entry.writer_options.names():
            message = f"the writer of format {entry.name!r} has no option 'remote': write to a local directory"
            raise ConfigError(message, key="destination", value=path)
        if is_web_url(path):
            message = "web servers do not list files, so shards are not written there: choose a store or a directory"
            raise ConfigError(message, key="destination", value=path)
        found = Remote.of(storage_options, remote)
        return cls(entry, path, Remote(found.store, found.options))  # known versions of objects may be out of date

    def __reduce__(self) -> Any:
        return type(self).of, (self.path, self.entry.name, None, self.remote)  # formats need not pickle

    @property
    def is_shared(self) -> bool:
        """Whether other machines may write here too. This one cannot see their locks."""
        return self.remote is not None

    @property
    def directory(self) -> str:
        return parent(self.path)

    def at(self, name: str) -> str:
        """Return the path of a file beside the destination, as short as that was given."""
        return join(self.directory, name) if self.is_shared else os.path.join(os.path.dirname(self.path), name)

    @property
    def storage(self) -> Storage:
        return storage_of(self.path, self.remote)

    @property
    def journal(self) -> str:
        """Path of the journal, a hidden file beside the destination that matches no shard pattern."""
        return self.at(f".{_PLACEHOLDER.sub('N', base_name(self.path))}.convert.json")

    def log(self, number: int | str = 0, count: int = 0) -> str:
        """Return the path of the log, of the whole or of a partition; "*" stands for any partition."""
        return f"{self.journal.removesuffix('.json')}{f'.{number}-of-{count}' if count else ''}.log"

    def receipt(self, number: int, count: int) -> str:
        """Return the path of the file that a partition of version 0.2 has instead of a log."""
        return f"{self.log(number, count).removesuffix('.log')}.json"

    def plan(self, length: int, *, shards: int | None, records_per_shard: int | None) -> tuple[Shard, ...]:
        """Return the files to write, in index order; for the names, see `dataload.convert.convert`."""
        name = base_name(self.path)
        check_name(_PLACEHOLDER.sub("N", name), "destination")  # the manifest would refuse it in the end
        listed = expand_braces(name) if not _PLACEHOLDER.search(name) else [name]
        if len(listed) > 1:
            if shards not in (None, len(listed)) or records_per_shard is not None:
                message = f"{name!r} names {len(listed)} shards: leave shards and records_per_shard out"
                raise ConfigError(message, key="shards", value=shards)
            _count_shards(length, len(listed), None)
            spans = even_split(length, len(listed))
            return tuple(Shard(self.at(each), *span) for each, span in zip(listed, spans, strict=True))
        count = _count_shards(length, shards, records_per_shard)
        if not _PLACEHOLDER.search(name) and count is None:
            return (Shard(self.at(name), 0, length),)
        name = _template(name, self.entry)
        names = [_fill(name, shard, count or 1) for shard in range(count or 1)]
        if len(set(names)) < len(names):
            message = f"all {len(names)} shards would be called {names[0]!r}: put {{shard:05d}} into the name"
            raise ConfigError(message, key="destination", value=self.path)
        spans = even_split(length, len(names))
        return tuple(Shard(self.at(each), *span) for each, span in zip(names, spans, strict=True))

    def names(self, count: int | None) -> re.Pattern[str]:
        """Return a pattern of the names of `count` shards, or of any number."""
        plan = self.plan(count or 2, shards=count or 2, records_per_shard=None)
        if count is not None:
            return re.compile("|".join(re.escape(shard.name) for shard in plan))
        literals = _PLACEHOLDER.split(_template(base_name(self.path), self.entry))
        return re.compile(r"\d+".join(re.escape(text.replace("{{", "{").replace("}}", "}")) for text in literals))

    def existing(self, plan: Sequence[Shard]) -> list[str]:
        """Return the paths of shards that exist."""
        if self.remote is None:
            return [shard.path for shard in plan if os.path.exists(shard.path)]
        names: set[str] = set()
        with suppress(SourceNotFoundError):
            names.update(self.storage.list(self.directory))  # one request, also for the versions
        return [shard.path for shard in plan if shard.name in names]


def shard_of_source(plan: Sequence[Shard], source: Any) -> str | None:
    """Return a shard to write that is a file of the source, if there is one."""
    paths = {shard.name: shard.path for shard in plan}
    files = source._files() if isinstance(source, Source) else ()  # pyright: ignore[reportPrivateUsage] # for sources
    for held in (each for file, _ in files for each in (file, parent(file))):  # LMDB's are in a directory
        path = paths.get(base_name(held))
        if path is not None and os.path.realpath(path) == os.path.realpath(held):
            return path
    return None


def _template(name: str, entry: Format) -> str:
    if _PLACEHOLDER.search(name):
        return name
    known = entry.suffixes or (os.path.splitext(name)[1].lower(),)
    suffix = next((s for s in known if name.lower().endswith(s)), "")
    stem = name[: len(name) - len(suffix)]
    return f"{_literal(stem)}{_DEFAULT_NAME}{_literal(name[len(stem) :])}"


def _count_shards(length: int, shards: int | None, records_per_shard: int | None) -> int | None:
    if shards is not None and records_per_shard is not None:
        message = "shards and records_per_shard both determine the number of files: pass only one of them"
        raise ConfigError(message, key="records_per_shard", value=records_per_shard)
    if records_per_shard is not None:
        return -(-max(1, length) // check_count("records_per_shard", records_per_shard, least=1))
    if shards is not None and check_count("shards", shards, least=1) > max(1, length):
        message = f"cannot split {length} records into {shards} shards: each needs at least one record"
        raise ConfigError(message, key="shards", value=shards)
    return shards


def _literal(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")


def _fill(name: str, shard: int, shards: int) -> str:
    try:
        return name.format(shard=shard, shards=shards)
    except (KeyError, IndexError, ValueError) as error:
        allowed = "only {shard} and {shards} may stand in braces, as in 'train-{shard:05d}-of-{shards:05d}.tar'"
        message = f"{name!r} is not a valid pattern for shard names ({error}): {allowed}"
        raise ConfigError(message, key="destination", value=name) from None


def summarize_paths(paths: Sequence[str]) -> str:
    """Return numbered paths as one string, the range ``a-{000..002}.tar``, which `dataload.open` takes."""
    first, last = paths[0], paths[-1]
    if len(paths) == 1:
        return first
    for number in re.finditer(r"\d+", first) if "{" not in first else ():
        head, tail = first[: number.start()], first[number.end() :]
        end = last[len(head) : len(last) - len(tail)]
        pattern = f"{head}{{{number.group()}..{end}}}{tail}"
        fits = end.isdecimal() and abs(int(end) - int(number.group())) == len(paths) - 1  # times are far apart
        if fits and expand_braces(pattern) == list(paths):
            return pattern
    return f"{first} ... {last} ({len(paths)} files)"


def pattern_of(names: Sequence[str], typed: str = "") -> str:
    """Return the names as a range if they are numbered, else as `typed` by the user."""
    found = summarize_paths(names)
    return typed or found if " ... " in found else found


@dataclass(frozen=True, slots=True)
class Measuring:
    """The fields that `index_shards` measures (None: all), and whether to save their statistics."""

    fields: tuple[str, ...] | None = None
    save: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", check_fields(self.fields))


@dataclass(frozen=True, slots=True)
class PlannedSet:
    """A data set to describe: `pattern` is its name in the manifest, `measured` the options for reading records."""

    pattern: str
    format: Format
    names: tuple[str, ...]
    options: Mapping[str, Any]
    remote: Remote
    measuring: Measuring | None
    measured: Mapping[str, Any]

    def __reduce__(self) -> Any:  # a format may have functions that do not pickle
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return _sent_set, (values | {"format": self.format.name},)

    def stored(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that decide the content of the records, as far as a manifest can keep them."""
        return {name: value for name, value in options.items() if _fits_manifest(name, value)}

    @property
    def key(self) -> str:
        """Text for everything but the shard that decides a run's findings about it."""
        text = f"{self.format.name} {sorted(self.stored(self.options).items())!r}"
        if self.measuring is None:
            return text
        return f"{text} {sorted(self.stored(self.measured).items())!r} {self.measuring.fields!r}"

    def open(self, paths: Sequence[str], options: Mapping[str, Any]) -> Source[Any]:
        return self.format.open(paths, options=without_cache(self.format, self._here(options, paths[0])))

    def entry(self, directory: str, shards: Sequence[ShardFacts]) -> DataSetFacts:
        filled = (join(directory, shard.name) for shard in shards if shard.records)
        fields = fields_of(self.format, filled, self._here(self.options, directory))
        kept = self.stored(self.options)
        return DataSetFacts.of(self.pattern, self.format.name, shards, fields=fields, options=kept)

    def _here(self, options: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {**options, **({"remote": self.remote} if is_url(path) else {})}


def _sent_set(values: Any) -> PlannedSet:
    return PlannedSet(**(values | {"format": get_format(values["format"])}))


class ShardList(NamedTuple):
    """The plan of a run over a directory; `gone` shards no longer exist, `unsaved` is a reason for writing nothing.

    `known` are the shards in the manifest when the run was planned.
    """

    directory: str
    data_sets: Sequence[PlannedSet]
    gone: set[str]
    known: frozenset[str]
    unsaved: str = ""


def plan_index(
    path: str, format_name: str | None, options: dict[str, Any], remote: Remote, measuring: Measuring | None
) -> ShardList:
    entry, path = split_format(path, format_name)
    path = path.rstrip("/") or "/"
    is_directory = storage_of(path, remote).is_directory(path)
    before = read_manifest(path, remote) if is_directory else None  # first: its shards are among those found
    found = find_shards(path, entry.name if entry is not None else None, manifests=False, remote=remote)
    directory = _directory_of(found, path, remote)
    names = tuple(map(base_name, found.files))
    is_directory = is_directory and {*names} != {base_name(path)}
    manifest = before if is_directory else read_manifest(directory, remote)
    known = frozenset(name for each in (manifest or Manifest()).data_sets for name in each.names)
    listed = [] if manifest is None or not (is_directory or measuring is not None) else [*manifest.data_sets]
    if listed:  # without what an append that was killed has left
        runs = {None, *(run_of_append(name) for each in listed for name in each.names)}
        names = tuple(name for name in names if run_of_append(name) in runs)
    unsaved = _why_unsaved(directory, found, options, measuring)
    if measuring is not None and not is_directory:
        own = [each for each in listed if {*each.names} == {*names}]
        if not unsaved and not own and (listed or not _is_whole(directory, found, remote)):
            unsaved = f"{base_name(path)} is not a whole data set of {directory}: name the directory"
        listed = own
    planned = partial(_planned, found, options, remote, measuring)
    if len(listed) < 2:
        same = bool(listed) and {*listed[0].names} == {*names}
        order = listed[0].names if same else names
        typed = f"*{os.path.splitext(names[0])[1]}" if is_directory else base_name(path)
        typed = listed[0].pattern if same else typed
        pattern = listed[0].pattern if same and measuring is not None else pattern_of(order, typed)
        return ShardList(directory, [planned(pattern, order, listed[0] if listed else None)], set(), known, unsaved)
    present = {*names}
    if extra := present.difference(*(entry.names for entry in listed)):
        message = f"{min(extra)} is in none of the {len(listed)} data sets of {directory}: index a pattern that has it"
        raise ConfigError(message, key="paths", value=path)
    left = [(each, tuple(name for name in each.names if name in present)) for each in listed]
    data_sets = [planned(pattern_of(own, each.pattern), own, each) for each, own in left if own]
    gone = {name for entry in listed for name in entry.names}.difference(names)
    return ShardList(directory, data_sets, gone, known, unsaved)


def _directory_of(found: DataSetFiles, path: str, remote: Remote) -> str:
    """Return the directory of shards, which must be the only one and contain them as files."""
    directories = {parent(file) for file in found.files}
    if len(directories) > 1:
        message = f"a manifest lists the shards of one directory, got shards of {', '.join(sorted(directories))}"
        raise ConfigError(f"{message}: index them one by one", key="paths", value=path)
    for file in found.files:
        if found.format.is_data_set_without_shards is not None and storage_of(file, remote).is_directory(file):
            message = (
                f"{file} is a folder of single files, which a manifest does not describe: convert it to shards, or"
            )
            raise ConfigError(f"{message} pack it as a .zip", key="paths", value=path)
    shard_bytes(found.files[0], remote)  # raises for a selection of records, which is not a file
    return directories.pop()


def _why_unsaved(directory: str, found: DataSetFiles, options: Mapping[str, Any], measuring: Measuring | None) -> str:
    """Return why a manifest of the shards cannot or must not be written; empty if it can."""
    for name, value in options.items():
        if name not in harmless_options(found.format) and not _fits_manifest(name, value):
            message = f"the option {name}={value!r} cannot be stored in a manifest"
            if measuring is not None:
                return message
            raise ConfigError(f"{message}: pass it to open", key=name, value=value)
    if measuring is None:
        return ""
    if not measuring.save:
        return "it was not asked for"
    writable = is_url(directory) or os.access(directory, os.W_OK | os.X_OK)
    return "" if writable else f"the directory {directory} cannot be written to"


def _planned(
    found: DataSetFiles,
    options: Mapping[str, Any],
    remote: Remote,
    measuring: Measuring | None,
    pattern: str,
    names: Sequence[str],
    entry: DataSetFacts | None,
) -> PlannedSet:
    alike = entry is not None and entry.format == found.format.name
    # Files describe themselves only where no manifest does.
    before = entry.options if entry is not None and alike else found.format.find_recorded(found.files, remote)
    measured = kept = {**before, **options}
    if alike and measuring is not None:  # statistics do not change how a directory opens
        harmless = harmless_options(found.format)
        kept = {**before, **{name: value for name, value in options.items() if name in harmless}}
    return PlannedSet(pattern, found.format, tuple(names), kept, remote, measuring, measured)


def _is_whole(directory: str, found: DataSetFiles, remote: Remote) -> bool:
    """Return whether these are all shards of their directory, so that a manifest may list nothing else."""
    try:
        every = find_shards(directory, found.format.name, manifests=False, remote=remote).files
        names = {*map(base_name, every)}
        if names != {*map(base_name, found.files)}:
            return False
        anything = find_shards(directory, manifests=False, remote=remote).files  # slow: looks at all names
    except (SourceError, ConfigError):  # shards are missing, or have several formats
        return False
    return names == {*map(base_name, anything)}


def _fits_manifest(name: str, value: Any) -> bool:
    return name in STORED_OPTIONS and STORED_OPTIONS[name](value)
