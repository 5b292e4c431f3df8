"""A conversion as a job: its plan, its shards, and their entry in the manifest."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from dataload._util.fingerprint import identify
from dataload.catalog.facts import DataSetFacts
from dataload.catalog.manifest import Manifest, read_manifest, update_manifest
from dataload.convert.journal import Journal
from dataload.convert.ledger import ConversionLedger
from dataload.convert.mapping import RecordMap, SkippedRecords, check_values, notes_of_values
from dataload.convert.plan import Shard, Target, summarize_paths
from dataload.convert.writing import Writing, facts_of, prepare, write_shards
from dataload.jobs.engine import Engine
from dataload.jobs.run import Done, Here, Mode
from dataload.loader.bad_records import BadRecord, Budget
from dataload.storage import Remote
from dataload.types import RandomAccessSource


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
