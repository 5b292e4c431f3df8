"""Write a data set: as one file, as shards, or as more shards of one that exists."""

from __future__ import annotations

import glob
import os
import re
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from dataload._util.indexing import expand_braces
from dataload._util.settings import check_count, check_flags
from dataload.catalog.facts import DataSetFacts, Measures, ShardFacts
from dataload.catalog.manifest import (
    MANIFEST_NAME,
    Manifest,
    locked,
    read_manifest,
    run_of_append,
    unfinished_conversions,
)
from dataload.catalog.statistics import DataSetStatistics, merge_fields
from dataload.convert.measuring import fields_of, measure, narrow, without_cache
from dataload.convert.plan import Shard, Target
from dataload.convert.sharded import LOCK_SECONDS, Rule, ShardedWriter, suffix_of
from dataload.errors import ConfigError
from dataload.sources.format import Format
from dataload.sources.registry import built_in_formats, by_suffix, find_destination, split_format
from dataload.sources.views.sequences import lengths_of, save_lengths
from dataload.sources.writer import Writer
from dataload.storage import Remote, base_name, is_url, join, local_path, parent, storage_of
from dataload.storage.paths import as_path
from dataload.storage.remote.settings import parse_bytes
from dataload.types import FieldSpec


def create(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - the usual word
    overwrite: bool = False,
    append: bool = False,
    shards: int | None = None,
    records_per_shard: int | None = None,
    bytes_per_shard: int | str | None = None,
    **options: Any,
) -> Writer | ShardedWriter:
    """Write a data set: ``with dataload.create("out.syr") as writer: writer.write(record)``.

    Nothing appears at `path` before the writer is closed without an error. With one of `shards`, `records_per_shard`
    and `bytes_per_shard`, there are several files: ``-00000-of-00008`` goes before the suffix, unless the name contains
    ``{shard}`` (and ``{shards}``), as in ``"train-{shard:05d}.tar"``. They appear together, the manifest
    ``dataload.json`` last. At a URL, all are written to local files first. Threads may share the writer, which takes
    their records as they come.

    Args:
        path: Destination, or ``"format:path"``.
        format: By default the end of the name decides.
        overwrite: Replace existing files. Shards of other names stay.
        append: Add shards, by default one, to a data set with a manifest: `path` is its directory, pattern, or what it
            was created with. They come last in index order, and readers see all of them or none. Several processes may
            append at the same time. Options that the manifest knows, such as ``codec``, may be left out.
        shards: Number of files. Record i goes to file i modulo this number, because the total is not known.
        records_per_shard: Records in each file but the last.
        bytes_per_shard: Maximum size of a file, as a number or ``"1GB"``, in records as the format stores them, before
            compression and without tables.
        options: Options of the format, see its writer class.

    Raises:
        ConfigError: The destination exists, format or option are unknown, or more than one of the three was given; to
            append, there is no manifest, or the first record has other fields than the data set.
    """
    check_flags(overwrite=overwrite, append=append)
    rules = {"shards": shards, "records_per_shard": records_per_shard, "bytes_per_shard": bytes_per_shard}
    given = [name for name, value in rules.items() if value is not None]
    if append and overwrite:
        raise ConfigError("append=True keeps what is there: leave overwrite out", key="overwrite", value=True)
    if not given and not append:
        entry, destination = find_destination(path, format)
        if (named := len(expand_braces(destination))) > 1:
            message = f"{destination!r} names {named} files: pass shards={named} to write all of them"
            raise ConfigError(message, key="shards", value=None)
        return entry.create(destination, overwrite=overwrite, options=options)
    if len(given) > 1:
        message = f"{' and '.join(given)} each determine the files: pass only one of them"
        raise ConfigError(message, key=given[-1], value=rules[given[-1]])
    size = None if bytes_per_shard is None else parse_bytes("bytes_per_shard", bytes_per_shard)
    for name in ("shards", "records_per_shard"):
        if rules[name] is not None:
            check_count(name, rules[name], least=1)
    if append:
        return Appender(as_path(path), format, options, Rule(shards if given else 1, records_per_shard, size))
    entry, destination = find_destination(path, format)
    place = options.pop("storage_options", None), options.pop("remote", None)
    target = Target.of(destination, entry.name, *place)
    return ShardedWriter(target, options, overwrite, Rule(shards, records_per_shard, size))


_TENSORFLOW = re.compile(r"-\d+-of-\d+$")  # after the suffix
_NUMBER = re.compile(r"(\d+)(-of-\d+)?(-append-[0-9a-f]{8})?$")


class Appender(ShardedWriter):
    """Writes records to new shards, which the manifest lists after the others once all are complete; see `create`."""

    def __init__(self, path: str, name: str | None, options: Mapping[str, Any], rule: Rule) -> None:
        options = dict(options)
        place = options.pop("storage_options", None), options.pop("remote", None)
        given, path = split_format(path, name)
        path = local_path(path)
        directory, self._listed = _find(path, Remote.of(*place) if is_url(path) else None)
        entry = _format_of(self._listed, given)
        first = self._listed.names[0]
        plain = _TENSORFLOW.sub("", first)
        suffix = suffix_of(entry, plain)
        if not suffix:  # "a1-00000-of-00002" is the first shard of "a1"
            plain = first
        stem, suffix = plain[: len(plain) - len(suffix)], plain[len(plain) - len(suffix) :]
        number = _NUMBER.search(stem)
        self._head, self._suffix = (stem[: number.start()] if number else f"{stem}-"), suffix
        own = {key: value for key, value in self._listed.options.items() if key in entry.writer_options.names()}
        for key in own.keys() & options.keys():
            if options[key] != own[key]:
                message = f"the data set has {key}={own[key]!r}, which its new shards must have, too: leave {key} out"
                raise ConfigError(message, key=key, value=options[key])
        target = Target.of(join(directory, f"{stem}{suffix}"), entry.name, *place)
        self._measured: Measures | None = None
        super().__init__(target, {**own, **options}, False, rule)
        self._first = sum(self._listed.records)

    def _check_free(self) -> None:
        """Do nothing: new shards get names that no existing file has."""

    def _place(self, staged: str, final: str) -> None:
        if self._target.remote is not None:
            super()._place(staged, final)
        else:
            os.rename(staged, final)  # leaves no folder, which would be found only by writers to the same name

    def write(self, record: Any) -> None:
        """Append one record; a ConfigError if the first one has other fields than the data set."""
        with self._lock:
            if self._state == "open" and not self._count and self._first:
                self._compare(record)
            super().write(record)

    def _compare(self, record: Any) -> None:
        probe = os.path.join(self._staging.temporary, f"probe{self._suffix}")
        with self._entry.create(probe, options=self._writing.options) as writer:
            writer.write(record)
        try:
            found = fields_of(self._entry, [probe], self._listed.options)
        except ConfigError:
            if self._listed.fields:
                raise
            return  # the format's reader needs options from its user, so that the manifest has no fields either
        if difference := _difference(self._listed.fields, found):
            message = f"{difference}: write records with the same fields as {self._listed.pattern}, or another data set"
            raise ConfigError(f"{message}, which ConcatSource joins to this one", key="fields")

    def _publish(self) -> None:
        if not self._count:
            self._staging.abort()
            return
        self._rule = replace(self._rule, shards=self._rule.shards and min(self._rule.shards, self._count))
        super()._publish()

    @contextmanager
    def _named(self, count: int) -> Generator[Sequence[str]]:
        """Yield the names of new shards. Of local appenders, one at a time publishes."""
        directory, remote, run = self._target.directory, self._target.remote, secrets.token_hex(4)
        if self._listed.statistics is not None:
            known = DataSetStatistics.parse(self._listed.statistics)
            options = without_cache(self._entry, known.options)
            with self._entry.open([*map(self._staged, range(count))], options=options) as source:
                self._measured = measure(source, known.selected)
        # Elsewhere, uploads take long, and the store compares versions of the manifest.
        path = self._target.at(MANIFEST_NAME)
        held = nullcontext() if remote else locked(f"{path}.append", None, LOCK_SECONDS)
        with held:
            found = self._storage.load(path)  # the latest, whatever was read before
            manifest = Manifest() if found is None else Manifest.parse(found[0], path)
            names = [name for each in manifest.data_sets for name in each.names]
            if remote is None:  # remove the shards of appenders that were killed before the manifest listed them
                runs = {*map(run_of_append, names), None}
                for name in self._existing():
                    if run_of_append(name) not in runs:
                        self._storage.remove(join(directory, name))
            stems = [name.removesuffix(self._suffix) for name in names if name.startswith(self._head)]
            numbers = [match for stem in stems if (match := _NUMBER.fullmatch(stem.removeprefix(self._head)))]
            start = max((int(each[1]) + 1 for each in numbers), default=len(self._listed.names))
            width = max((len(each[1]) for each in numbers), default=5)
            numbered = (f"{number:0{width}d}-append-{run}" for number in range(start, start + count))
            yield [self._target.at(f"{self._head}{each}{self._suffix}") for each in numbered]

    def _entries(self, plan: Sequence[Shard], finished: Mapping[str, ShardFacts]) -> Callable[[Manifest], Any]:
        (added,) = super()._entries(plan, finished)

        def grown(manifest: Manifest) -> Sequence[DataSetFacts]:
            listed = manifest.find(self._listed.names[0])
            if listed is None or listed.format != added.format:
                message = f"{self._listed.pattern} is no longer in {MANIFEST_NAME}, so nothing was added to it"
                raise ConfigError(message, key="append")
            if added.names[0] in listed.names:  # the answer to an earlier request was lost
                return ()
            shards = DataSetFacts.of(
                listed.pattern,
                listed.format,
                listed.shards + added.shards,
                fields=listed.fields,
                options=listed.options,
            )
            return [replace(shards, pattern=self._pattern(shards), statistics=self._statistics(listed))]

        return grown

    def _pattern(self, facts: DataSetFacts) -> str:
        """Return a pattern that matches all names, by which the data set is known."""
        head = glob.escape(self._head)
        tried = (facts.pattern, f"{head}[0-9]*{self._suffix}", f"{head.rstrip('-')}*{self._suffix}")
        return next((each for each in tried if all(fnmatchcase(name, each) for name in facts.names)), facts.pattern)

    def _statistics(self, listed: DataSetFacts) -> Mapping[str, Any] | None:
        """Return the statistics of the whole data set, or None if the old shards have none."""
        if listed.statistics is None or self._measured is None:
            return None
        known = DataSetStatistics.parse(listed.statistics)
        directory, remote = self._target.directory, self._target.remote
        fields, lengths = merge_fields(known.fields, self._measured.fields), {}
        for name, new in self._measured.lengths.items():
            old = lengths_of(directory, listed, known, name, remote)
            if old is not None and fields[name].varies_in_length:
                lengths[name] = save_lengths(directory, narrow(np.concatenate([old, new])), remote)
        return replace(known, fields=fields, lengths=lengths).to_json()


def _find(path: str, remote: Remote | None) -> tuple[str, DataSetFacts]:
    """Return the directory and the facts of the data set that a user names: its directory, pattern or shards."""
    directory, manifest, name = path, read_manifest(path, remote), ""
    if manifest is None:
        directory, name = parent(path), base_name(path)
        manifest = read_manifest(directory, remote)
    if manifest is None:
        directory = path if storage_of(path, remote).is_directory(path) else directory
        message = f"append=True needs a {MANIFEST_NAME}, which lists the shards, and {directory} has none"
        raise ConfigError(f"{message}: run `dataload index --manifest {directory}`", key="append", value=path)
    found = [each for each in manifest.data_sets if not name or _is_called(each, name)]
    if len(found) != 1:
        listed = ", ".join(each.pattern for each in manifest.data_sets)
        message = f"{path!r} names {len(found)} of the data sets in {directory}, which has {listed}"
        raise ConfigError(f"{message}: name one of these", key="append", value=path)
    for journal, shards in unfinished_conversions(directory, remote):  # which would leave the new shards out
        if not shards.isdisjoint(found[0].names):
            message = f"a conversion to {found[0].pattern} has not ended ({base_name(journal)})"
            raise ConfigError(f"{message}: finish it before you append", key="append", value=path)
    return directory, found[0]


def _is_called(listed: DataSetFacts, name: str) -> bool:
    named = expand_braces(name)
    if name == listed.pattern or {*named} <= {*listed.names} or all(fnmatchcase(each, name) for each in listed.names):
        return True
    entry = _known_format(listed) or by_suffix(name)
    return len(named) == 1 and entry is not None and bool(Target(entry, name).names(None).fullmatch(listed.names[0]))


def _known_format(listed: DataSetFacts) -> Format | None:
    """Return the format if it is ours: data do not choose which package is imported."""
    return next((entry for entry in built_in_formats() if entry.name == listed.format), None)


def _format_of(listed: DataSetFacts, given: Format | None) -> Format:
    entry = given or _known_format(listed) or by_suffix(listed.names[0])
    if entry is None or entry.name != listed.format:
        message = f"{listed.pattern} has the format {listed.format!r}: pass format={listed.format!r}"
        raise ConfigError(message, key="format", value=None if entry is None else entry.name)
    return entry


def _difference(known: Mapping[str, FieldSpec], found: Mapping[str, FieldSpec]) -> str:
    """Return a sentence about the first field that a data set and a record do not share, or an empty string."""
    for name in [*known, *found]:
        one, other = known.get(name), found.get(name)
        if other is None:
            return f"the record has no field {name!r}, which the data set has"
        if one is None:
            return f"the record has a field {name!r}, which the data set does not have"
        axes = {len(each.shape) for each in (one, other) if each.shape is not None}
        if len(axes) > 1 or (one.dtype != other.dtype and "unknown" not in (one.dtype, other.dtype)):
            return f"the field {name!r} is {other} in the record, and {one} in the data set"
    return ""
