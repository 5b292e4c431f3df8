"""Describe existing shards: write their manifest, with statistics if requested, and the logs of unfinished runs."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import is_not
from typing import Any, NamedTuple, Self

import numpy as np

from dataload._util.fingerprint import digest
from dataload._util.system import usable_cpus
from dataload._util.threads import DaemonThreads, run_each
from dataload.catalog.evidence import MOST_THREADS, as_published, describe_files, files_of, hash_files, look_locally
from dataload.catalog.facts import DataSetFacts, ShardFacts
from dataload.catalog.ledger import Job, log_of
from dataload.catalog.manifest import MANIFEST_NAME, Manifest, read_manifest, remove_lengths, update_manifest
from dataload.catalog.statistics import DataSetStatistics, FieldStatistics, LengthsFile, merge_fields
from dataload.convert.measuring import measure, narrow, with_etag
from dataload.convert.plan import Measuring, PlannedSet, ShardList, plan_index
from dataload.errors import ConfigError, CorruptFileError, SourceError, SourceNotFoundError, and_more
from dataload.jobs.engine import Engine, count_parts, select_part
from dataload.jobs.run import Done, Facts, Here, Key, Ledger, Mode, run_job
from dataload.sources.base import Source
from dataload.sources.file_source import FileSource
from dataload.sources.views.sequences import save_lengths
from dataload.storage import Remote, base_name, is_url, join, storage_of
from dataload.storage.local.folders import discard_untrusted
from dataload.storage.remote.settings import node_folder

_UNLIMITED = 1 << 60  # bytes to download: indexing needs them
_MOST_THREADS = 8  # they mostly hash, at about 1 GB/s each
_SHARDS_OF_PART = 256  # small ones take 0.1 s, as does a process
_FEWEST_PARTS = 16  # of large ones
_SLOW_SECONDS = 0.005  # to describe a shard, which then mostly waits, or hashes without the GIL


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
    mode = Mode(part=part, merge=merge)
    mode.check(engine)  # before the directory is listed, once for all parts
    make = partial(IndexJob.of, *_plan(path, format, options or {}, measuring))
    return run_job(make, mode, engine=engine, progress=progress)


def _plan(
    path: str, name: str | None, options: Mapping[str, Any], measuring: Measuring | None
) -> tuple[ShardList, Remote]:
    given = dict(options)
    remote = Remote.of(given.pop("storage_options", None), given.pop("remote", None))
    # Whole shards, at their present versions.
    remote = Remote(remote.store, replace(remote.options, mode="shards", scan=_UNLIMITED))
    return plan_index(path, name, given, remote, measuring), remote


class Shard(NamedTuple):
    """A shard to describe."""

    data_set: PlannedSet
    path: str
    key: Key
    size: int = 1


@dataclass(frozen=True, slots=True)
class IndexJob:
    """The description of the shards of a directory."""

    plan: ShardList
    remote: Remote
    units: Sequence[Shard]

    @classmethod
    def of(cls, plan: ShardList, remote: Remote) -> Self:
        keys = [(each, each.key) for each in plan.data_sets]
        units = [Shard(each, join(plan.directory, name), (name, key)) for each, key in keys for name in each.names]
        return cls(plan, remote, units)

    @contextmanager
    def ledger(self, mode: Mode, engine: Engine | None) -> Generator[Ledger]:
        parts = 0 if engine is None else _count_parts(engine, len(self.units))
        if self.plan.unsaved:
            if mode.merge or mode.part or parts:
                raise ConfigError(f"parts cannot be kept: {self.plan.unsaved}", key="part", value=mode.part)
            yield Ledger()
            return
        path = log_path(self.plan.directory, self.remote, mode.part)
        with storage_of(path, self.remote).lock(path):
            keys = [unit.key for unit in self.units]
            yield (ledger := IndexLedger(self.plan.directory, self.remote, keys, mode, parts))
        ledger.end()

    def run(self, todo: Sequence[Shard], ledger: Any, here: Here[Shard]) -> tuple[()]:  # noqa: ARG002 - it is a job's
        firsts = {id(unit.data_set): unit for unit in reversed(todo)}

        def describe(unit: Shard) -> None:
            here.note(unit, _describe(unit.data_set, unit.path, sources[id(unit.data_set)]))
            here.advance(1)

        with ExitStack() as held:
            sources = {
                key: held.enter_context(unit.data_set.open([unit.path], unit.data_set.options))
                for key, unit in firsts.items()
            }
            for _ in run_each(describe, todo, min(_MOST_THREADS, usable_cpus()), _SLOW_SECONDS):
                pass
        return ()

    def finish(self, done: Done[Shard], ledger: Ledger, mode: Mode) -> IndexReport:
        directory = self.plan.directory
        groups = [[*units] for _, units in groupby(done.units, lambda unit: id(unit.data_set))]

        def entries(lengths_in: str) -> tuple[DataSetFacts, ...]:
            return tuple(_entry(directory, units, [done.facts[u.key] for u in units], lengths_in) for units in groups)

        path, unsaved = join(directory, MANIFEST_NAME), self.plan.unsaved
        is_measured = any(each.measuring is not None for each in self.plan.data_sets)
        if isinstance(ledger, IndexLedger) and mode.part is not None:
            path = ledger.path  # the log stays until the merge
        elif isinstance(ledger, IndexLedger):
            try:
                saved = listed = entries(directory)

                def with_appended(manifest: Manifest) -> Sequence[DataSetFacts]:
                    nonlocal listed
                    listed = tuple(_with_appended(entry, self.plan.known, manifest) for entry in saved)
                    return listed

                update_manifest(directory, with_appended, self.plan.gone, remote=self.remote)
                remove_old(directory, self.remote)
                ledger.clear(done.facts)
                if is_measured and any(map(is_not, saved, listed)):
                    return IndexReport(path, saved, len(done.known), "shards were added meanwhile, so run it again")
                return IndexReport(path, listed, len(done.known))
            except SourceError as error:
                if isinstance(error, CorruptFileError) or not is_measured:
                    raise
                unsaved = str(error)
        return IndexReport(path, entries(""), len(done.known), unsaved)


def _count_parts(engine: Engine, shards: int) -> int:
    """Return the number of parts; by default so few that starting a process does not take longer."""
    count = count_parts(engine, shards)
    return count if engine.parts else min(count, max(_FEWEST_PARTS, shards // _SHARDS_OF_PART))


def _entry(directory: str, units: Sequence[Shard], shards: Sequence[ShardFacts], lengths_in: str) -> DataSetFacts:
    """Return the entry of a data set in a manifest; lengths are saved in a directory, unless that is empty."""
    data_set = units[0].data_set
    entry = data_set.entry(directory, [with_etag(data_set.format, facts) for facts in shards])
    if data_set.measuring is None:
        return entry
    fields, kept = dict[str, FieldStatistics](), dict[str, LengthsFile]()
    measures = [facts.measures for facts in shards if facts.measures]
    for each in measures:
        fields = merge_fields(fields, each.fields)
    for name, field in fields.items() if lengths_in else ():
        arrays = [each.lengths[name] for each in measures if name in each.lengths]
        if field.varies_in_length and sum(map(len, arrays)) == sum(entry.records):
            kept[name] = save_lengths(lengths_in, narrow(np.concatenate(arrays)), data_set.remote)
    options, selected = data_set.stored(data_set.measured), data_set.measuring.fields
    statistics = DataSetStatistics(options=options, selected=selected, fields=fields, lengths=kept)
    return replace(entry, statistics=statistics.to_json())


def _with_appended(entry: DataSetFacts, known: frozenset[str], manifest: Manifest) -> DataSetFacts:
    """Return an entry with the shards that the manifest lists by now, but did not when the run was planned."""
    listed, old = manifest.find(entry.names[0]), known.union(entry.names)
    added = [] if listed is None else [shard for shard in listed.shards if shard.name not in old]
    if listed is None or not added or listed.format != entry.format:
        return entry
    shards = (*entry.shards, *added)  # the manifest has their statistics, if there are any
    return DataSetFacts.of(listed.pattern, entry.format, shards, fields=entry.fields, options=entry.options)


def _describe(data_set: PlannedSet, path: str, source: Source[Any]) -> ShardFacts:
    if not is_url(path):
        facts = _measured(data_set, path, _read(data_set, path, source))
        return facts if facts.sha256 else replace(facts, sha256=hash_files(files_of(path)))
    remote, storage = data_set.remote, storage_of(path, data_set.remote)
    leases = [storage.lease(file) for file in files_of(path, remote)]  # reading finds the copies
    facts = as_published(describe_files(base_name(path), [lease.path for lease in leases], 0), path, remote)
    read = _read(data_set, path, source)
    measured = _measured(data_set, path, replace(facts, records=read.records, content=read.content))
    if remote.options.cache is None:  # not to be kept
        for lease in leases:
            storage_of(lease.path).remove(lease.path)
    return measured


def _read(data_set: PlannedSet, path: str, source: Source[Any]) -> ShardFacts:
    """Return what reading a shard tells; `source` has the data set's options and reads any of its shards."""
    if isinstance(source, FileSource):
        return source.look_at(path)
    size, evidence, _ = look_locally(path)
    with data_set.open([path], data_set.options) as source:
        return ShardFacts(base_name(path), size, len(source), evidence=evidence)


def _measured(data_set: PlannedSet, path: str, facts: ShardFacts) -> ShardFacts:
    if data_set.measuring is None:
        return facts
    with data_set.open([path], data_set.measured) as source:
        if len(source) != facts.records:
            here = f"{path} has {len(source):,} records with these options, {facts.records:,} with those in the"
            raise ConfigError(f"{here} manifest: run `dataload index --manifest` with these first", key="option")
        return replace(facts, measures=measure(source, data_set.measuring.fields))


_JOB = Job("", "")  # any run may use the lines of any other

_START = f".{MANIFEST_NAME}.index"
_NAME = re.compile(rf"{re.escape(_START)}\.(\d+)-of-(\d+)\.log")
_RECEIPT = re.compile(rf"\.{re.escape(MANIFEST_NAME)}\.\d+-of-\d+")  # of version 0.2
_MOST_NAMED = 8


def log_path(directory: str, remote: Remote, part: tuple[int, int] | None) -> str:
    """Return the path of a log: beside the shards, or of a whole index at a URL in the node's cache."""
    if part is not None:
        return join(directory, f"{_START}.{part[0]}-of-{part[1]}.log")
    if not is_url(directory):
        return join(directory, f"{_START}.log")
    folder = node_folder(remote, "indexing")
    if folder is None:
        raise ConfigError("the home directory cannot keep a log: set remote.cache", key="remote.cache")
    return discard_untrusted(os.path.join(folder, f"{digest(directory)}.log"))


class IndexLedger(Ledger):
    """The log of an index, or of one part of it. There is no journal: the key of a line decides its facts."""

    again = "finished shards are kept: run it again to continue"

    def __init__(self, directory: str, remote: Remote, keys: Sequence[Key], mode: Mode, parts: int) -> None:
        self.path: str = log_path(directory, remote, mode.part)
        super().__init__(log_of(self.path, remote), parts)
        self._directory, self._remote, self._keys = directory, remote, keys
        self._parts: Sequence[str] = ()  # the logs of parts that were joined
        self._merges = mode.merge or parts > 0
        if mode.merge:
            self.changed: str = "run its part again"
            self.known: Facts = self.join()
        else:
            self.known = self.log.load(_JOB).shards

    def start(self, facts: Facts, *, in_parts: bool) -> None:  # noqa: ARG002 - other keys stay, too
        if not in_parts:
            self.log.begin(_JOB, self.known, anew=False)

    def discard(self) -> None:
        if not self.parts and not self.known:
            self.log.remove()

    def join(self) -> Facts:
        """Return the facts in all logs; a ConfigError if a shard is in none."""
        directory = self._directory
        names = [base_name(path) for path in _glob(directory, f"{_START}.*-of-*.log", self._remote)]
        counts = sorted({int(match[2]) for name in names if (match := _NAME.fullmatch(name))})
        if not counts and storage_of(self.path).exists(self.path):  # of a merge that was killed
            counts = [1]
        if not counts:
            raise SourceNotFoundError(f"no part of an index of {directory} has run: run the parts", path=directory)
        if len(counts) > 1:
            message = f"{directory} has logs of {' and of '.join(map(str, counts))} parts: delete those that are wrong"
            raise ConfigError(f"{message} ({_START}.*)", key="merge", value=directory)
        self._parts = [join(directory, name) for name in names if _NAME.fullmatch(name)]
        with DaemonThreads(MOST_THREADS) as pool:
            logs = [*pool.map(self._load, (self.path, *self._parts))]
        known = {key: facts for log in logs for key, facts in log.items()}
        (count,) = counts
        missing = [f"{n}/{count}" for n in range(1, count + 1) if {*select_part(self._keys, n, count)} - known.keys()]
        if missing:
            message = f"parts {', '.join(missing[:_MOST_NAMED])}{and_more(len(missing), _MOST_NAMED)} have not finished"
            raise ConfigError(
                f"{message} with these shards and options: run them, again if need be", key="merge", value=missing
            )
        return known

    def _load(self, path: str) -> Facts:
        return log_of(path, self._remote).load(_JOB).shards

    def clear(self, facts: Facts) -> None:
        """Delete the logs; after a merge, the log with all facts stays until the lock is released."""
        if not self._merges:
            self.log.remove()
            return
        self.log.begin(_JOB, facts, anew=True)
        for path in self._parts:
            log_of(path, self._remote).remove()

    def end(self) -> None:
        """Delete the log that a merge has left, without the lock: it may run again until its last operation."""
        if self._merges and self.is_ours():
            self.log.remove()


def remove_old(directory: str, remote: Remote) -> None:
    """Remove what version 0.2 keeps of indexes that it has not finished, and lengths that only its receipts name."""
    for path in _glob(directory, f".{MANIFEST_NAME}.*", remote):
        name, storage = base_name(path), storage_of(directory, remote)
        if _RECEIPT.fullmatch(name) and (found := storage.load(join(directory, name))) is not None:
            with suppress(CorruptFileError):
                kept = read_manifest(directory, remote) or Manifest()
                remove_lengths(directory, Manifest.parse(found[0], path), kept, remote)
        if _RECEIPT.fullmatch(name) or re.fullmatch(rf"{re.escape(_START)}(\.\d+-\d+)?", name):
            storage.remove(join(directory, name))


def _glob(directory: str, pattern: str, remote: Remote) -> Sequence[str]:
    return storage_of(directory, remote).glob(join(glob.escape(directory), pattern))
