"""The plan of an index: the data sets of a directory to describe, and whether the result can be saved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

from dataload._util.settings import check_fields
from dataload.catalog.checks import STORED_OPTIONS
from dataload.catalog.evidence import shard_bytes
from dataload.catalog.facts import DataSetFacts, ShardFacts
from dataload.catalog.manifest import read_manifest, run_of_append
from dataload.convert.measuring import fields_of, without_cache
from dataload.convert.plan import pattern_of
from dataload.errors import ConfigError, SourceError
from dataload.sources.base import Source
from dataload.sources.discover import DataSetFiles, find_shards, harmless_options, split_format
from dataload.sources.format import Format
from dataload.sources.registry import get_format
from dataload.storage import Remote, base_name, is_url, join, parent, storage_of


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
    """The plan of a run over a directory; `gone` shards no longer exist, `unsaved` is a reason for writing nothing."""

    directory: str
    data_sets: Sequence[PlannedSet]
    gone: set[str]
    unsaved: str = ""


def plan_index(
    path: str, format_name: str | None, options: dict[str, Any], remote: Remote, measuring: Measuring | None
) -> ShardList:
    entry, path = split_format(path, format_name)
    path = path.rstrip("/") or "/"
    found = find_shards(path, entry.name if entry is not None else None, manifests=False, remote=remote)
    directory = _directory_of(found, path, remote)
    names = tuple(map(base_name, found.files))
    is_directory = {*names} != {base_name(path)} and storage_of(path, remote).is_directory(path)
    manifest = read_manifest(directory, remote) if is_directory or measuring is not None else None
    listed = [] if manifest is None else [*manifest.data_sets]
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
        return ShardList(directory, [planned(pattern, order, listed[0] if listed else None)], set(), unsaved)
    present = {*names}
    if extra := present.difference(*(entry.names for entry in listed)):
        message = f"{min(extra)} is in none of the {len(listed)} data sets of {directory}: index a pattern that has it"
        raise ConfigError(message, key="paths", value=path)
    left = [(each, tuple(name for name in each.names if name in present)) for each in listed]
    data_sets = [planned(pattern_of(own, each.pattern), own, each) for each, own in left if own]
    gone = {name for entry in listed for name in entry.names}.difference(names)
    return ShardList(directory, data_sets, gone, unsaved)


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
        anything = find_shards(directory, manifests=False, remote=remote).files
    except (SourceError, ConfigError):  # shards are missing, or have several formats
        return False
    return {*map(base_name, every)} == {*map(base_name, anything)} == {*map(base_name, found.files)}


def _fits_manifest(name: str, value: Any) -> bool:
    return name in STORED_OPTIONS and STORED_OPTIONS[name](value)
