"""Convert any format to any other: in shards, in bounded memory, and resumable after a kill.

A hidden journal beside the destination, ``.<destination>.convert.json``, stays after the end.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal, NoReturn, Self

from dataload._util.fingerprint import identify
from dataload._util.settings import check_flags
from dataload.catalog.facts import DataSetFacts
from dataload.catalog.manifest import Manifest, read_manifest, update_manifest
from dataload.convert.ledger import ConversionLedger, Journal
from dataload.convert.mapping import MapFunction, RecordMap, SkippedRecords, check_values, notes_of_values
from dataload.convert.plan import Shard, Target, shard_of_source, summarize_paths
from dataload.convert.writing import Writing, facts_of, prepare, write_shards
from dataload.errors import ConfigError
from dataload.jobs.engine import Engine, LocalEngine, engine_of
from dataload.jobs.run import Done, Here, Mode, run_job
from dataload.loader.failures import BadRecord, Budget
from dataload.sources.views.adapt import loadable
from dataload.storage import Remote, RemoteOptions
from dataload.types import RandomAccessSource

__all__ = ["ConvertReport", "Engine", "LocalEngine", "convert"]


class _Package(ModuleType):
    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("dataload.convert is a package: write dataload.convert.convert(source, path)")


sys.modules[__name__].__class__ = _Package


def convert(
    source: RandomAccessSource[Any],
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - the usual word
    writer_options: Mapping[str, Any] | None = None,
    shards: int | None = None,
    records_per_shard: int | None = None,
    keep_key: bool = False,
    map: Callable[..., Any] | MapFunction | None = None,  # noqa: A002 - the usual word
    seed: int = 0,
    on_error: Literal["raise", "skip"] = "raise",
    max_bad: int | float = 0.01,
    error_report: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    part: tuple[int, int] | None = None,
    merge: bool = False,
    engine: Engine | Literal["local"] | None = None,
    progress: Callable[[int, int], None] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    remote: RemoteOptions | Remote | Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Write the records of a source, in index order, as files of another format.

    Values are passed to the writer unchanged, with three exceptions that the report mentions: a format that stores
    bytes gets the codec "tensorprotos" (TFRecord: "example") for records with fields, unless `writer_options` names
    another; plain bytes become the field "data" if the format requires fields; and the ``__key__`` of tar samples is
    dropped if the format has no keys. In keys of a tar archive, dots of the name and white space become ``_``. Open a
    folder of images with ``decode=None`` to copy its files into an archive, and with ``decode={}`` for other formats.

    Args:
        source: The result of `dataload.open`, or anything else that a `dataload.Loader` reads.
        destination: A path, whose directory is created if needed. With `shards` or `records_per_shard`,
            ``-00000-of-00008`` goes before its suffix unless the name contains ``{shard}`` (and ``{shards}``), as in
            ``"train-{shard:05d}.tar"``. A range, ``"train-{00..15}.tar"``, names all files. LMDB shards are
            directories. At a URL, each shard is written to a local file and then uploaded.
        format: Name of the format; by default the suffix of `destination` decides.
        writer_options: Options of the format's writer, such as ``codec``.
        shards: Number of files. Records are split evenly: the counts differ by at most one.
        records_per_shard: Maximum number of records per file, instead of `shards`; also split evenly. With `map`, both
            split the records of the source.
        keep_key: Keep ``__key__`` as a field.
        map: A function of a sample and optionally of its `dataload.SampleContext`, as the parameter ``context``. It
            returns a record, a list of records, or `dataload.DROP`. The first record decides on codec and fields, so
            the function may see the first samples twice. In a format with keys, a record without one gets the index of
            its sample, with ``-0003`` for the fourth of a list, as do records of a list with equal keys. The manifest
            has name, text and hash of the function; with the values that it uses and the ``version`` of its module,
            they tell whether it has changed.
        seed: Seed of the random numbers in `dataload.SampleContext`. The epoch is 0.
        on_error: ``"raise"`` the error of a record that cannot be read or mapped, or ``"skip"`` the record.
        max_bad: Maximum of bad records, of the whole or of a partition: a number, or as a float their share of the
            records read so far, checked from the 1,000th record on. 1.0 is no limit.
        error_report: A JSONL file to append bad records to; see `dataload.Loader`.
        resume: Keep the shards that an interrupted run for this destination finished, and write the rest.
        overwrite: Replace existing files, each once its new content is complete.
        part: ``(i, n)`` writes only partition i, counted from 1, of n: a contiguous range of the shards. Partitions may
            run on different machines, in any order, and again, keeping their finished shards.
        merge: Write no shards, but check that all partitions have finished, and enter their shards in the manifest. All
            other arguments must equal the partitions' arguments.
        engine: Run the conversion in partitions and merge them: "local" in processes of this machine, one for each CPU;
            `LocalEngine` has settings, and `dataload.ray.RayEngine` uses a Ray cluster. The files are the same.
        progress: Called with (records of the source done, total) at the start and after each block.
        storage_options: Arguments of obstore's stores for a destination at a URL; see `dataload.open`.
        remote: Settings for a destination at a URL; see `dataload.RemoteOptions`. Shards are written in its `cache`.

    Raises:
        ConfigError: The destination exists; a record does not fit the format; `map` returned None; with `resume`,
            `part` or `merge`, the source or the plan has changed (one line per difference); with `merge`, a partition
            has not finished, its receipt is damaged, or a shard is missing or has changed.
        TypeError: `source` is not a source, but for example a path.
        WorkerError: `map` failed, or there are more than `max_bad` bad records.
        SourceError: Reading or writing failed, or another process is converting to the same destination.
    """
    check_flags(keep_key=keep_key, resume=resume, overwrite=overwrite, merge=merge)
    mode = Mode(resume, overwrite, part, merge)
    mode.check(engine)
    mapping = RecordMap.of(map, seed=seed, on_error=on_error, max_bad=max_bad)
    options = dict(writer_options or {})
    place = options.pop("storage_options", None) or storage_options, options.pop("remote", None) or remote
    make = partial(
        ConvertJob.of,
        loadable(source),
        Target.of(destination, format, *place),
        mapping,
        shards=shards,
        records_per_shard=records_per_shard,
        options=options,
        keep_key=keep_key,
        max_bad=max_bad,
        error_report=error_report,
    )
    return run_job(make, mode, engine=engine_of(engine), progress=progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """The result of a conversion.

    Attributes:
        paths: The files, in index order; of a partition, only its own.
        format: Name of the format.
        records: Total number of records in the files.
        bytes: Total size of the files.
        resumed: Number of records in shards finished by an earlier run or a merged partition.
        notes: Decisions made along the way, as sentences.
        journal: Path of the journal, which has the SHA-256 of each file.
        manifest: Path of the directory's manifest, which has the SHA-256, too; None for a partition.
        skipped: Number of bad records of the source that were left out, also in earlier runs.
        bad_records: The bad records that this run left out.
    """

    paths: tuple[str, ...]
    format: str
    records: int
    bytes: int
    resumed: int
    notes: tuple[str, ...]
    journal: str
    manifest: str | None
    skipped: int = 0
    bad_records: tuple[BadRecord, ...] = ()

    @property
    def pattern(self) -> str:
        """All files as one string, which `dataload.open` takes if they are numbered."""
        return summarize_paths(self.paths)


def _unless_grown(entry: DataSetFacts, manifest: Manifest) -> Sequence[DataSetFacts]:
    """Return the entry to list; none if the manifest has it with more shards, which were appended."""
    listed, count = manifest.find(entry.names[0]), len(entry.names)
    grown = listed is not None and len(listed.names) > count and listed.shards[:count] == entry.shards
    return () if grown else [entry]


@dataclass(frozen=True, slots=True)
class ConvertJob:
    """A conversion of a source: a shard is a unit."""

    source: RandomAccessSource[Any]
    target: Target
    units: Sequence[Shard]
    writing: Writing
    settings: Mapping[str, str]  # everything that decides the content, as text
    budget: Budget

    @classmethod
    def of(
        cls,
        source: RandomAccessSource[Any],
        target: Target,
        mapping: RecordMap,
        *,
        shards: int | None,
        records_per_shard: int | None,
        options: Mapping[str, Any],
        keep_key: bool,
        max_bad: int | float,
        error_report: str | os.PathLike[str] | None,
    ) -> Self:
        """Plan a conversion; `options` are the writer's."""
        budget = Budget(max_bad, error_report)
        plan = target.plan(len(source), shards=shards, records_per_shard=records_per_shard)
        if len(plan) > 1 and (file := shard_of_source(plan, source)):
            message = f"{file} is a file of the source: a conversion to it would lose records if it ended early"
            raise ConfigError(f"{message}, so write to another directory", key="destination", value=file)
        writing = prepare(source, target, dict(options), keep_key, mapping)
        return cls(source, target, plan, writing, writing.settings(keep_key), budget)

    @property
    def remote(self) -> Remote | None:
        return self.target.remote

    @contextmanager
    def ledger(self, mode: Mode, engine: Engine | None) -> Generator[ConversionLedger]:
        ledger = ConversionLedger(self.target, self.units, mode)
        with self.target.storage.lock(ledger.path):
            read_manifest(self.target.directory, self.remote)  # report a damaged one now
            number, parts = mode.part or (0, 0)
            requested = Journal(
                source=identify(self.source),
                records=len(self.source),
                format=self.target.entry.name,
                options=dict(self.settings),
                shards=tuple((shard.name, shard.start, shard.stop) for shard in self.units),
                run=secrets.token_hex(8),
                parts=parts,
                part=number,
                counted=bool(self.writing.mapping),
            )
            ledger.begin(requested, engine)
            yield ledger

    def run(self, todo: Sequence[Shard], ledger: ConversionLedger, here: Here[Shard]) -> Sequence[BadRecord]:
        if ledger.journal.complete:
            subject = f"{todo[0].path} has changed, and {ledger.path}"
            check_values(ledger.journal.options, self.writing.mapping.settings, subject, resuming=True)
        self.budget.start(here.done, sum(facts.skipped for facts in here.known.values()))
        skipped = SkippedRecords(self.budget)
        write_shards(self.source, todo, self.writing, ledger.replaceable(todo), here, skipped)
        return skipped.records

    def finish(self, done: Done[Shard], ledger: ConversionLedger, mode: Mode) -> ConvertReport:
        manifest: str | None = None
        finished = {shard.name: done.facts[shard.key] for shard in done.units}
        if mode.part is None:
            ledger.seal(finished)
            entry = facts_of(self.units, finished, self.writing)
            entries = [entry] if mode.overwrite else partial(_unless_grown, entry)
            manifest = update_manifest(self.target.directory, entries, remote=self.remote)
            ledger.clear()
        notes = [*self.writing.notes]
        for options in (self.settings, ledger.journal.options):
            notes += notes_of_values(options, self.settings)
        notes += done.notes
        if ledger.parts == 1:
            notes.append("one shard is one part: with shards=N, or records_per_shard=N, parts run at the same time")
        return ConvertReport(
            paths=tuple(shard.path for shard in done.units),
            format=self.target.entry.name,
            records=sum(facts.records for facts in finished.values()),
            bytes=sum(facts.bytes for facts in finished.values()),
            resumed=sum(finished[name].records for name, _ in done.known),
            notes=(*dict.fromkeys(notes),),
            journal=ledger.path,
            manifest=manifest,
            skipped=sum(facts.skipped for facts in finished.values()),
            bad_records=done.rest,
        )
