"""Find the format and the files of a data set: ``"format:path"``, patterns, directories, suffixes, content."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from os import PathLike
from typing import Any, cast

import numpy as np

from dataload._util.indexing import expand_braces, missing_parts
from dataload.catalog.evidence import find_changed, find_shard
from dataload.catalog.facts import DataSetFacts, Evidence, Found, common_classes
from dataload.catalog.manifest import (
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    renewal,
    run_of_append,
    unfinished_conversions,
)
from dataload.errors import ConfigError, CorruptFileError, DataloadError, SourceError, SourceNotFoundError, and_more
from dataload.sources.base import Source
from dataload.sources.file_source import FileSource
from dataload.sources.format import Format
from dataload.sources.options import fields_of
from dataload.sources.registry import (
    added_formats,
    all_formats,
    built_in_formats,
    by_content,
    by_suffix,
    by_suffixes,
    family_of,
    format_of_directory,
    format_of_files,
    is_media_folder,
    split_format,
    warn_of_splits,
)
from dataload.sources.shards import ListedShards
from dataload.storage import Remote, base_name, has_wildcards, is_url, join, list_names, local_path, storage_of
from dataload.storage.backend import held_by_hub
from dataload.storage.local.files import versions_of
from dataload.storage.paths import as_path, is_web_url

_SHOWN_PATTERNS, _SHOWN_NAMES, _MOST_TRIED = 10, 4, 100
_DECODING = {"codec", "db_num"}  # options that select none of the records that a shard stores
_PATTERN = re.compile(r"[*?[{]")


@dataclass(frozen=True, slots=True)
class DataSetFiles:
    """The shards of a data set, in index order and not open; an `argument` for a format without files."""

    format: Format
    files: list[str]
    listed: tuple[DataSetFacts, ...] = ()
    argument: Any = None
    remote: Remote | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """The reader's options in the manifests, which have to agree."""
        several = [entry.options for entry in self.listed if entry.format == self.format.name]
        first = next(iter(several), {})
        for options in several:
            if options != first:
                message = f"the manifests of the directories give different options, {first} and {options}"
                raise ConfigError(f"{message}: open them separately and join them with ConcatSource", key="paths")
        return first

    def known(self) -> ListedShards | None:
        """Return what the manifests say of all shards; None if they do not list all."""
        names = [name for entry in self.listed for name in entry.names]
        if len(names) != len(self.files):
            return None
        lengths = tuple(records for entry in self.listed for records in entry.records)
        several = [entry.contents or (None,) * len(entry.names) for entry in self.listed]
        marks = several[0] if len(several) == 1 else [*chain(*several)]
        several = [entry.versions for entry in self.listed if entry.versions is not None]
        versions = np.concatenate(several) if len(several) == len(self.listed) else None
        known = next((entry.fields for entry in self.listed if entry.fields), {})
        return ListedShards(lengths, known, listed=True, contents=marks if any(marks) else None, versions=versions)

    def open(self, selected: Sequence[str] | None, options: Mapping[str, Any], *, check: bool = False) -> Source[Any]:
        """Open the data set and its files, so that errors come before reads; to `check`, whatever a manifest says."""
        # Of files that a manifest describes, local ones are opened when they are first read, after the first with
        # records; those at URLs all are.
        if not self.format.takes_paths:
            source = self.format.open(self.argument, fields=selected, options=options)
            len(source)
            return source
        if any(map(is_url, self.files)) and "remote" in self.format.reader_options.names():
            options = {**options, "storage_options": None, "remote": self.remote}
        # A manifest says all; asking the first of its shards would be a request.
        recorded = {} if self.listed else self.format.find_recorded(self.files, self.remote)
        known, affecting = self.known(), {*options} - harmless_options(self.format) if options else ()
        source = self.format.open(self.files, fields=selected, options={**recorded, **self.options, **options})
        if isinstance(source, FileSource):
            source.name_classes(common_classes(((entry.pattern, entry.fields) for entry in self.listed), "paths"))
            far, is_index = {*map(is_url, self.files)}, source.paths != tuple(map(local_path, self.files))
            # What is listed may be the index, which names the shards. Local shards were looked at, see `_listed`.
            known = None if is_index or (affecting and (far == {False} or affecting - _DECODING)) else known
            if known is not None and not affecting and len(far) == 1 and not check:
                source.open_on_first_use(known)  # and compared then
                if far == {True}:
                    return source
                known = None
        try:
            len(source)  # opens the files
            if known is not None:
                if isinstance(source, FileSource):
                    source.compare(known)
                elif selected is None and not affecting:
                    for shard, facts in enumerate(zip(self.files, source.shard_lengths, strict=True)):
                        known.check(shard, *facts)
        except BaseException:
            source.close()
            raise
        return source


def harmless_options(entry: Format) -> set[str]:
    """Return the names of the reader's options that do not affect the records."""
    return {each.name for each in fields_of(entry.reader_options) if not each.metadata.get("content", True)}


def discover(paths: Any, name: str | None, options: Mapping[str, Any]) -> DataSetFiles:
    """Find the format and the files of what `dataload.open` is given, without opening it; see `find_shards`."""
    entry, rest = split_format(paths, name)
    if entry is not None and entry.parse_argument is not None:
        return DataSetFiles(entry, [], argument=entry.parse_argument(rest))
    given = {"storage_options", "remote"} & {*options}
    remote = Remote.of(options.get("storage_options"), options.get("remote")) if given else None
    return find_shards(paths, name, remote=remote, options=options)


def find_shards(
    paths: Any,
    name: str | None = None,
    *,
    manifests: bool = True,
    remote: Remote | None = None,
    options: Collection[str] = (),
) -> DataSetFiles:
    """Find the format of a data set and its files in index order, without opening it."""
    # `name` is a format that takes paths; by default suffix and content decide, or a directory's manifest if
    # `manifests`. `options` are names of given options, which may tell what a directory is.
    entry, rest = split_format(paths, name)
    if entry is not None and not entry.takes_paths:
        raise ConfigError(f"format {entry.name!r} has no files, which are needed here", key="paths", value=paths)
    items = _as_list(rest)
    remote = Remote.of() if remote is None and any(map(is_url, items)) else remote
    items = held_by_hub(items, remote)
    found = [_expand(item, entry, manifests, remote, options) for item in items]
    files = held_by_hub([file for part, _ in found for file in part], remote)
    if not files:
        raise ConfigError("no path was given: the list is empty", key="paths", value=paths)
    listed = tuple(listed for _, listed in found if listed is not None)
    if entry is None:
        entry = _listed_format(listed, files, remote) if len(listed) == len(found) else format_of_files(files, remote)
    return DataSetFiles(entry, files, listed, remote=remote)


def _listed_format(listed: Sequence[DataSetFacts], files: Sequence[str], remote: Remote | None) -> Format:
    """Return the format that manifests name, of files that are in no other."""
    names = {each.format for each in listed}
    if len(names) == 1:
        for entry in built_in_formats():
            if entry.name in names and entry.takes_paths:
                return entry
    found = format_of_files(files, remote)  # data do not choose which package is imported
    if names != {found.name}:
        message = f"the manifest says that {listed[0].pattern} has the format {listed[0].format!r}, not {found.name!r}"
        raise ConfigError(f"{message}: pass format= to choose one", key="format", value=listed[0].format)
    return found


def _as_list(paths: Any) -> list[str]:
    alone = isinstance(paths, (str, bytes, PathLike, Mapping)) or hasattr(paths, "read_batch")
    several = cast("Iterable[Any]", paths) if isinstance(paths, Iterable) and not alone else [paths]
    return [local_path(as_path(path)) for path in several]


def _expand(
    path: str, entry: Format | None, manifests: bool, remote: Remote | None, options: Collection[str]
) -> tuple[list[str], DataSetFacts | None]:
    """Return all shards that a path or pattern names, and the entry of the manifest from which they are."""
    storage = storage_of(path, remote)
    if manifests and (listed := _listed_at_url(path, entry, remote)):
        return _paths(path, listed), listed
    # A store is not asked for an object whose name is a pattern: each question is a request.
    if not (is_url(path) and _PATTERN.search(path)) and storage.exists(path):
        if storage.is_directory(path):
            listed = _listed(path, entry, remote) if manifests else None
            if listed is not None:
                return _paths(path, listed), listed
            known = all_formats()  # looked for once, because this reads the metadata of every installed package
            holder = format_of_directory(path, remote, known)
            if entry is None and is_media_folder(path, holder, options, known, remote):
                return [path], None
            if holder is None and (entry is None or entry.suffixes):  # without them, the source decides what it is
                if not manifests and (kept := _of_other_suffixes(path, entry, remote, known)) is not None:
                    return kept
                files = _shards_of_directory(path, entry, remote, known)
                warn_of_splits(path, files if manifests else ())
                return files, None
        return [path], None
    if _is_selection(path, [entry] if entry else built_in_formats(), remote):
        return [path], None  # x.array_record[2:4], which would otherwise be a pattern
    if is_web_url(path) and entry is not None and entry.is_data_set(path, remote):
        return [path], None  # web servers do not list files
    try:
        return _expand_pattern(path, remote), None
    except SourceNotFoundError:
        if entry is None and _is_selection(path, added_formats(), remote):
            return [path], None
        raise


def _expand_pattern(path: str, remote: Remote | None) -> list[str]:
    """Return the files that a pattern names, those that match it in order of name."""
    storage, far = storage_of(path, remote), is_url(path)
    names: list[str] = []
    for name in expand_braces(path):
        if has_wildcards(name) and (far or not storage.exists(name)):
            if "**" in name.split("/"):
                message = f"{name}: ** is not supported: write * for each level of folders, or pass a list of paths"
                raise ConfigError(message, key="paths", value=name)
            matches = [match for match in storage.glob(name) if base_name(match) != MANIFEST_NAME]
            if not matches:
                raise SourceNotFoundError(f"nothing matches the pattern {name}", path=name)
            names += matches
            continue
        if name == path or not far:  # others are found to be missing when they are opened, all at the same time
            storage.identity(name)  # raises if there is nothing
        names.append(name)
    return names


def _listed_at_url(path: str, entry: Format | None, remote: Remote | None) -> DataSetFacts | None:
    """Ask for the manifest before anything else if `path` may be a directory, since one request may tell everything."""
    if not is_url(path) or _PATTERN.search(path) or by_suffix(path) is not None:
        return None
    try:
        return _listed(path, entry, remote)
    except SourceError as error:  # a store may answer that what does not exist is forbidden, or a web server a page
        if isinstance(error, CorruptFileError) and not is_web_url(path):
            raise
        return None


def _listed(directory: str, entry: Format | None, remote: Remote | None) -> DataSetFacts | None:
    """Return the only data set that the manifest of a directory lists, of a format if one is given, or None."""
    manifest = read_manifest(directory, remote)
    several = _data_sets(manifest, entry)
    if manifest is None or not several:
        return None
    if len(several) > 1:
        patterns = ", ".join(listed.pattern for listed in several[:_SHOWN_PATTERNS])
        more = ", ..." if len(several) > _SHOWN_PATTERNS else ""
        message = f"{directory} has {len(several)} data sets: {patterns}{more}; open one of these patterns, or a list"
        raise ConfigError(message, key="paths", value=directory)
    (listed,) = several
    if not is_url(directory):
        return _look_at(directory, listed, manifest, entry)
    if remote is not None:  # the ETag in every request tells
        for shard in listed.shards:
            if shard.evidence.etag is not None:
                remote.expect(join(directory, shard.name), shard.bytes, shard.evidence.etag)
    return listed


def _data_sets(manifest: Manifest | None, entry: Format | None) -> list[DataSetFacts]:
    """Return what a manifest lists, of a format if one is given."""
    several = [*manifest.data_sets] if manifest is not None else []
    if entry is None:
        return several
    own = {each.name for each in built_in_formats() if family_of(each) == family_of(entry)} | {entry.name}
    return [listed for listed in several if listed.format in own]


def _look_at(directory: str, listed: DataSetFacts, manifest: Manifest, entry: Format | None) -> DataSetFacts:
    """Compare local shards with the manifest, newer ones by their ends; return its facts with their versions."""
    here, path, paths = list_names(directory), join(directory, MANIFEST_NAME), _paths(directory, listed)
    read, *_ = versions = versions_of([path, *paths])
    versions, folders = versions[1:], [shard for shard, name in enumerate(listed.names) if here.get(name)]
    found = versions[:, :2].copy()  # sizes and times
    for shard in folders:
        folder = find_shard(paths[shard])
        found[shard] = (0, 0) if folder is None else (folder.bytes, folder.evidence.mtime_ns)
    problems: list[str] = []
    if not (found.any(axis=1).all() and np.array_equal(found[:, 0], listed.bytes)):
        pairs = zip(listed.names, found.tolist(), strict=True)
        problems += listed.stale({name: Found(size, Evidence(time)) for name, (size, time) in pairs if size or time})
    newer = np.flatnonzero(found[:, 1] >= read[1]).tolist()
    for journal, names in unfinished_conversions(directory, None) if newer and not problems else ():
        if not names.isdisjoint(listed.names):  # their sizes and ends may be equal
            problems.append(f"a conversion ({base_name(journal)}) has not ended, so shards may be old or new")
    if not problems and listed.contents:
        marks = {paths[shard]: mark for shard in newer if (mark := listed.contents[shard]) is not None}
        problems += [f"{base_name(path)} has another content than in the manifest" for path in find_changed(marks)]
    if not problems:
        others = here.keys() - {MANIFEST_NAME, *(name for each in manifest.data_sets for name in each.names)}
        others = sorted(name for name in others if run_of_append(name) is None)
        problems = [
            f"{name} is not in the manifest" for name in _shards_among(others, entry, all_formats() if others else ())
        ]
    if problems:
        message = f"the manifest is stale: {problems[0]}{and_more(len(problems))}; {renewal(directory)}"
        raise CorruptFileError(message, path=path)
    return replace(listed, versions=None if folders else versions)


def _is_selection(path: str, known: Iterable[Format], remote: Remote | None) -> bool:
    """Return whether one of the formats finds an existing file and a selection of its records in `path`."""
    return any((file := entry.file(path)) != path and storage_of(file, remote).exists(file) for entry in known)


def _shards_of_directory(path: str, entry: Format | None, remote: Remote | None, known: Sequence[Format]) -> list[str]:
    """Return the shards in a directory, sorted by name: the files with the suffix of a format."""
    names = storage_of(path, remote).list(path)  # without hidden ones, such as a writer's temporary
    found = [join(path, name) for name in _shards_among(names, entry, known)]
    if not found:
        if entry is None and by_content(path, remote) is not None:
            return [path]
        wanted = f"format {entry.name!r}" if entry is not None else "a known format"
        folders = names if is_url(path) else sorted(name for name, is_folder in list_names(path).items() if is_folder)
        inner = [name for name in folders[:_MOST_TRIED] if _holds_data(join(path, name), remote, known)]
        shown = ", ".join(names[:_SHOWN_NAMES]) + ", ..." * (len(names) > _SHOWN_NAMES)
        ignored = f": it has {shown} (README and LICENSE are not data; format= reads files of other suffixes)"
        several = ", ".join(inner[:_SHOWN_PATTERNS]) + and_more(len(inner), _SHOWN_PATTERNS)
        hint = f"; open one of its data sets: {several}" if inner else ignored if names else ""
        raise SourceNotFoundError(f"the directory {path} has no files with a suffix of {wanted}{hint}", path=path)
    check_complete(path, [base_name(file) for file in found], remote)
    return found


def _of_other_suffixes(
    directory: str, entry: Format | None, remote: Remote | None, known: Sequence[Format]
) -> tuple[list[str], DataSetFacts] | None:
    """Return the shards that exist of the only data set that a manifest lists, where suffixes tell no shards."""
    names = storage_of(directory, remote).list(directory)
    several = [] if _shards_among(names, entry, known) else _data_sets(read_manifest(directory, remote), entry)
    present = {*names}
    own = [name for name in several[0].names if name in present] if len(several) == 1 else []
    if not own:
        return None
    check_complete(directory, own, remote)
    return [join(directory, name) for name in own], several[0]


def check_complete(directory: str, names: Sequence[str], remote: Remote | None) -> None:
    """Raise an error if shards of a directory without a manifest are missing, for example after a killed conversion."""
    remedy = "finish the conversion or the copy that makes the others; to open those that exist, name them by a pattern"
    if missing := missing_parts(names):
        name, count = missing
        raise SourceNotFoundError(f"the directory {directory} has no {name}{and_more(count)}: {remedy}", path=directory)
    for path, _ in unfinished_conversions(directory, remote):
        message = f"the directory {directory} has the shards of an unfinished conversion ({base_name(path)})"
        raise SourceNotFoundError(f"{message}: {remedy}", path=directory)


def _holds_data(path: str, remote: Remote | None, known: Sequence[Format]) -> bool:
    if format_of_directory(path, remote, known) is not None:
        return True
    with suppress(OSError, DataloadError):  # a file, for example
        return bool(_shards_among(storage_of(path, remote).list(path), None, known))
    return False


def _shards_among(names: Collection[str], entry: Format | None, known: Sequence[Format]) -> list[str]:
    """Return the names with the suffix of a known format, or of the given one."""
    found = [(name, of) for name, of in zip(names, by_suffixes(names, known), strict=True) if of is not None]
    if entry is not None:
        return [name for name, of in found if family_of(of) == family_of(entry)]
    others = [name for name, of in found if not of.lies_beside]
    return others or [name for name, _ in found]


def _paths(directory: str, listed: DataSetFacts) -> list[str]:
    start = join(directory, "")
    return [start + name for name in listed.names]
