"""Describe existing shards: write their manifest, with statistics of their fields if requested."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from dataload._util.machine import usable_cpus
from dataload._util.threads import DaemonThreads
from dataload.catalog.evidence import as_uploaded, describe_files, files_of, is_same
from dataload.catalog.facts import DataSetFacts, ShardFacts
from dataload.catalog.ledger import Log, log_of
from dataload.catalog.manifest import MANIFEST_NAME
from dataload.catalog.statistics import DataSetStatistics, FieldStatistics, merge_fields
from dataload.catalog.store import update_manifest
from dataload.convert.described import with_etag
from dataload.convert.engine import Engine, check_whole, of_total, run_all
from dataload.convert.index_logs import JOB, IndexLogs, log_path, remove_old
from dataload.convert.index_plan import Measuring, PlannedSet, ShardList, plan_index, select_planned
from dataload.convert.measuring import keep_lengths, measure
from dataload.errors import ConfigError, CorruptFileError, SourceError
from dataload.sources.discover import find_shards, split_format
from dataload.sources.file_source import FileSource
from dataload.storage import Remote, base_name, is_url, join, storage_of
from dataload.storage.errors import file_errors
from dataload.types import Array

Describe: TypeAlias = "Callable[[PlannedSet, str], ShardFacts]"

_UNLIMITED = 1 << 60  # bytes to download: indexing needs them
_MOST_THREADS = 8  # they mostly hash, at about 1 GB/s each


@dataclass(frozen=True, slots=True)
class IndexReport:
    """The path of the manifest or partition's receipt, and the data sets written to it.

    `resumed` counts shards finished by earlier runs or merged partitions. `unsaved` is the reason for writing nothing.
    """

    path: str
    data_sets: tuple[DataSetFacts, ...]
    resumed: int
    unsaved: str = ""


def index_shards(
    path: str,
    *,
    format: str | None = None,  # noqa: A002 - the usual word
    options: Mapping[str, Any] | None = None,
    part: tuple[int, int] | None = None,
    merge: bool = False,
    measuring: Measuring | None = None,
    engine: Engine | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> IndexReport:
    """Write or renew the manifest of a directory of shards; other data sets in it keep their entries.

    `path` is a directory, or a pattern or file in one. A directory without a manifest is one data set; otherwise each
    data set is renewed. An interrupted run continues from a hidden journal beside the manifest or, for URLs, in the
    node's cache. Shards at URLs are downloaded once, and deleted again unless ``remote`` sets a cache. Of the reader's
    `options`, the manifest keeps those in `STORED_OPTIONS`.

    ``part=(i, n)`` describes only the i-th of n contiguous ranges of the shards, in a log beside the shards. `merge`
    makes the manifest of all logs without reading shards; a ConfigError if one lacks shards, or a shard has changed.
    `engine` does both.

    Statistics (`measuring`) are not saved if the manifest lists no data set of exactly these shards and could not.

    `progress` is called with (shards done, shards) at the start and after each shard; with an engine, now and then.
    """
    if merge and part is not None:
        raise ConfigError("merge describes no shards: pass it without part", key="merge", value=merge)
    if engine is not None:
        check_whole(part, merge)
        return _run_parts(engine, path, format, options or {}, measuring, progress)
    given = dict(options or {})
    remote = Remote.of(given.pop("storage_options", None), given.pop("remote", None))
    # Whole shards, at their present versions.
    remote = Remote(remote.store, replace(remote.options, mode="shards", scan=_UNLIMITED))
    plan = plan_index(path, format, given, remote, measuring)
    if plan.unsaved and (merge or part is not None):
        raise ConfigError(f"parts cannot be kept: {plan.unsaved}", key="part", value=part)
    run = _Run(plan, remote, part, progress)
    return run.merge() if merge else run.describe()


def _run_parts(
    engine: Engine,
    path: str,
    name: str | None,
    options: Mapping[str, Any],
    measuring: Measuring | None,
    progress: Callable[[int, int], None] | None,
) -> IndexReport:
    entry, found = split_format(path, name)
    remote = Remote.of(options.get("storage_options"), options.get("remote"))
    shards = len(find_shards(found, None if entry is None else entry.name, manifests=False, remote=remote).files)
    task = partial(index_shards, path, format=name, options=options, measuring=measuring)
    again = "finished shards are kept: run it again to continue"
    reports = run_all(engine, task, shards, progress=of_total(progress, shards), again=again)
    return replace(task(merge=True), resumed=sum(report.resumed for report in reports))


class _Run:
    """One run over the shards of a plan or of one partition."""

    def __init__(
        self, plan: ShardList, remote: Remote, part: tuple[int, int] | None, progress: Callable[[int, int], None] | None
    ) -> None:
        self._plan, self._remote, self._part, self._progress = plan, remote, part, progress
        self._data_sets = plan.data_sets if part is None else select_planned(plan.data_sets, *part)
        self._total = sum(len(each.names) for each in self._data_sets)
        self._done = self._resumed = 0

    def describe(self) -> IndexReport:
        if self._plan.unsaved:
            return self._unsaved(self._describe({}, None), self._plan.unsaved)
        path = log_path(self._plan.directory, self._remote, self._part)
        with storage_of(path, self._remote).lock(path):
            log = log_of(path, self._remote)
            known = log.load(JOB).shards
            log.begin(JOB, known, anew=False)
            with closing(log):
                described = self._describe(known, log)
            if self._part is not None:  # the log stays until the merge
                return IndexReport(path, tuple(each.unsaved() for each in described), self._resumed)
            try:
                report = self._save(described)
            except CorruptFileError:
                raise
            except SourceError as error:
                if not self._measures:
                    raise
                return self._unsaved(described, str(error))
            log.remove()
        return report

    def merge(self) -> IndexReport:
        directory, remote = self._plan.directory, self._remote
        logs = IndexLogs.find(directory, remote)
        known = logs.load(self._plan.data_sets)
        report = self._save(self._describe(known, None, logs.changed_error))
        logs.remove(known)
        return report

    @property
    def _measures(self) -> bool:
        return any(each.measuring is not None for each in self._data_sets)

    def _save(self, described: Sequence[_DescribedSet]) -> IndexReport:
        directory = self._plan.directory
        entries = [each.saved(directory, self._remote) for each in described]
        written = update_manifest(directory, entries, self._plan.gone, remote=self._remote)
        remove_old(directory, self._remote)
        return IndexReport(written, tuple(entries), self._resumed)

    def _unsaved(self, described: Sequence[_DescribedSet], reason: str) -> IndexReport:
        path = join(self._plan.directory, MANIFEST_NAME)
        return IndexReport(path, tuple(each.unsaved() for each in described), self._resumed, reason)

    def _describe(
        self, known: Mapping[tuple[str, str], ShardFacts], log: Log | None, again: Describe | None = None
    ) -> list[_DescribedSet]:
        if self._progress is not None:
            self._progress(0, self._total)
        found: list[_DescribedSet] = []
        for each in self._data_sets:
            shards: list[ShardFacts] = []
            lengths: list[Mapping[str, Array]] = []
            fields: dict[str, FieldStatistics] = {}
            for facts in _describe_all(self._plan.directory, each, known, log, self._advance, again):
                shards.append(with_etag(each.format, facts))
                if facts.measures is not None:
                    fields = merge_fields(fields, facts.measures.fields)
                    lengths.append(facts.measures.lengths)
            entry, statistics = each.entry(self._plan.directory, shards), None
            if each.measuring is not None:
                options = each.stored(each.measured)
                statistics = DataSetStatistics(options=options, selected=each.measuring.fields, fields=fields)
            found.append(_DescribedSet(entry, statistics, lengths))
        return found

    def _advance(self, resumes: bool) -> None:
        self._done += 1
        self._resumed += resumes
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class _DescribedSet:
    """A described data set, its statistics if requested, and the lengths in each shard."""

    entry: DataSetFacts
    statistics: DataSetStatistics | None
    lengths: Sequence[Mapping[str, Array]]

    def saved(self, directory: str, remote: Remote) -> DataSetFacts:
        if self.statistics is None:
            return self.entry
        joined: dict[str, Array] = {}
        for name, field in self.statistics.fields.items():
            arrays = [each[name] for each in self.lengths if name in each]
            if field.varies_in_length and sum(map(len, arrays)) == sum(self.entry.records):
                joined[name] = np.concatenate(arrays)
        return keep_lengths(directory, self.entry, self.statistics, joined, remote)

    def unsaved(self) -> DataSetFacts:
        return self.entry if self.statistics is None else replace(self.entry, statistics=self.statistics.to_json())


def _describe_all(
    directory: str,
    data_set: PlannedSet,
    known: Mapping[tuple[str, str], ShardFacts],
    log: Log | None,
    advance: Callable[[bool], None],
    again: Describe | None = None,
) -> Iterator[ShardFacts]:
    """Describe all shards in threads, `again` if they have changed, note each in the log, and yield them in order."""
    lock = threading.Lock()

    def describe(name: str) -> ShardFacts:
        path = join(directory, name)
        facts = known.get((name, data_set.key))
        resumes = facts is not None and is_same(facts, path, data_set.remote)
        if not resumes or facts is None:
            facts = (again or _describe)(data_set, path)
        with lock:
            if not resumes and log is not None:
                log.note(facts, data_set.key)
            advance(resumes)
        return facts

    with DaemonThreads(min(_MOST_THREADS, usable_cpus())) as pool:
        futures = deque(pool.submit(describe, name) for name in data_set.names)
        while futures:
            yield futures.popleft().result()


def _describe(data_set: PlannedSet, path: str) -> ShardFacts:
    remote, name = data_set.remote, base_name(path)
    if not is_url(path):
        with file_errors(path):
            facts = describe_files(name, files_of(path), 0)
        return _measured(data_set, path, facts)
    storage = storage_of(path, remote)
    leases = [storage.lease(file) for file in files_of(path, remote)]  # reading finds the copies
    facts = as_uploaded(describe_files(name, [lease.path for lease in leases], 0), path, remote)
    measured = _measured(data_set, path, facts)
    if remote.options.cache is None:  # not to be kept
        for lease in leases:
            storage_of(lease.path).remove(lease.path)
    return measured


def _measured(data_set: PlannedSet, path: str, facts: ShardFacts) -> ShardFacts:
    with data_set.open([path], data_set.options) as source:
        content = source.shard_identities()[0] if isinstance(source, FileSource) else None
        facts = replace(facts, records=len(source), content=content)
    if data_set.measuring is None:
        return facts
    with data_set.open([path], data_set.measured) as source:
        if len(source) != facts.records:
            here = f"{path} has {len(source):,} records with these options, {facts.records:,} with those in the"
            raise ConfigError(f"{here} manifest: run `dataload index --manifest` with these first", key="option")
        return replace(facts, measures=measure(source, data_set.measuring.fields))
