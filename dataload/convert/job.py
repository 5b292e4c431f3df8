"""A conversion: begin or resume it, write its shards here or by an engine, and enter them in the manifest."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dataload._util.fingerprint import identify
from dataload.catalog.store import read_manifest, update_manifest
from dataload.convert.attempt import PartTask
from dataload.convert.engine import Engine, check_whole, conversion_parts, run_conversion
from dataload.convert.function_values import check_values, notes_of_values
from dataload.convert.journal import Journal, Ledger
from dataload.convert.mapping import SkippedRecords
from dataload.convert.parts import begin, begin_part, clear, merged, replaceable, without_damaged
from dataload.convert.plan import Shard, summarize_paths
from dataload.convert.writing import Writing, facts_of, write_shards
from dataload.errors import ConfigError
from dataload.loader.bad_records import BadRecord, Budget
from dataload.storage import is_url, parent, storage_of
from dataload.storage.local.atomic import make_directory, remove_leftovers
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


class Mode(NamedTuple):
    """Whether existing files are kept or replaced, and which partition runs; see `dataload.convert.convert`."""

    resume: bool
    overwrite: bool
    part: tuple[int, int] | None
    merge: bool

    def check(self, engine: object) -> None:
        """Raise a ConfigError if these exclude each other."""
        if self.resume and self.overwrite:
            raise ConfigError("resume keeps existing files, overwrite replaces them: pass only one", key="overwrite")
        if self.merge and (self.part is not None or self.overwrite or self.resume):
            message = "merge writes no shards: pass it without part, resume and overwrite"
            raise ConfigError(message, key="merge", value=self.merge)
        if engine is not None:
            check_whole(self.part, self.merge)


@dataclass(frozen=True, slots=True)
class _Done:
    """The journal of what is finished, its records from earlier runs, notes and bad records."""

    journal: Journal
    resumed: int
    notes: tuple[str, ...] = ()
    bad_records: tuple[BadRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class ConvertJob:
    """A conversion of a source. This run or partition writes the shards `own` of the `plan`."""

    source: RandomAccessSource[Any]
    path: str  # of the journal
    plan: Sequence[Shard]
    own: Sequence[Shard]
    writing: Writing
    settings: Mapping[str, str]  # everything that decides the content, as text
    mode: Mode
    budget: Budget

    def run(self, engine: Engine | None, task: PartTask, progress: Callable[[int, int], None] | None) -> ConvertReport:
        """Convert; an `engine` calls `task` for each partition."""
        remote, directory = self.writing.remote, parent(self.path)
        requested = self._requested()
        ledger = Ledger(self.path, self.mode.part, remote, overwrite=self.mode.overwrite)
        manifest: str | None = None
        if not is_url(self.path):
            make_directory(directory)
        with storage_of(self.path, remote).lock(ledger.path):
            read_manifest(directory, remote)  # report a damaged one now
            if not is_url(self.path):
                remove_leftovers(ledger.path)
            if engine is not None:
                parts = conversion_parts(engine, ledger.head, self.plan, resume=self.mode.resume)
                requested = replace(requested, parts=parts)
            if self.mode.merge:
                journal = merged(ledger.head, requested, self.plan, remote)
                done = _Done(journal, _records(self.own, journal))
            else:
                begun = self._begin(ledger, requested)
                if engine is None or begun.complete:
                    done = self._write(ledger, begun, progress)
                else:
                    done = self._run_parts(engine, task, ledger, begun, requested, progress)
            if self.mode.part is None:
                ledger.seal(done.journal)
                entries = [facts_of(self.plan, done.journal.finished, self.writing)]
                manifest = update_manifest(directory, entries, remote=remote)
                clear(ledger, done.journal, remote)
        notes = (*self._notes(requested), *notes_of_values(done.journal.options, requested.options), *done.notes)
        return ConvertReport(
            paths=tuple(shard.path for shard in self.own),
            format=self.writing.entry.name,
            records=_records(self.own, done.journal),
            bytes=sum(shard.bytes for shard in done.journal.finished.values()),
            resumed=done.resumed,
            notes=(*dict.fromkeys(notes),),
            journal=ledger.path,
            manifest=manifest,
            skipped=sum(shard.skipped for shard in done.journal.finished.values()),
            bad_records=done.bad_records,
        )

    def _requested(self) -> Journal:
        number, parts = self.mode.part or (0, 0)
        return Journal(
            source=identify(self.source),
            records=len(self.source),
            format=self.writing.entry.name,
            options=dict(self.settings),
            shards=tuple((shard.name, shard.start, shard.stop) for shard in self.plan),
            run=secrets.token_hex(8),
            parts=parts,
            part=number,
            counted=bool(self.writing.mapping),
        )

    def _notes(self, requested: Journal) -> tuple[str, ...]:
        return (*self.writing.notes, *notes_of_values(requested.options, requested.options))

    def _begin(self, ledger: Ledger, requested: Journal) -> Journal:
        overwrite, remote = self.mode.overwrite, self.writing.remote
        if requested.part:
            begun = begin_part(ledger, requested, self.plan, remote, overwrite=overwrite)
        else:
            begun = begin(ledger, requested, self.plan, remote, resume=self.mode.resume, overwrite=overwrite)
        return replace(begun, counted=requested.counted)

    def _run_parts(
        self,
        engine: Engine,
        task: PartTask,
        ledger: Ledger,
        begun: Journal,
        requested: Journal,
        progress: Callable[[int, int], None] | None,
    ) -> _Done:
        """Run all partitions, and merge them; notes of the whole are not repeated."""
        remote, overwrite = self.writing.remote, self.mode.overwrite
        begun = replace(begun, parts=requested.parts)
        reports: list[ConvertReport] = run_conversion(
            engine, task, ledger, begun, self.plan, remote, overwrite=overwrite, progress=progress
        )
        journal, known = merged(ledger.head, requested, self.plan, remote), self._notes(requested)
        notes = [note for report in reports for note in report.notes if note not in known]
        if len(reports) == 1:
            notes.append("one shard is one part: with shards=N, or records_per_shard=N, parts run at the same time")
        bad_records = tuple(bad for report in reports for bad in report.bad_records)
        return _Done(journal, sum(report.resumed for report in reports), tuple(notes), bad_records)

    def _write(self, ledger: Ledger, begun: Journal, progress: Callable[[int, int], None] | None) -> _Done:
        """Write the missing shards of this run or partition."""
        mode, remote, notes = self.mode, self.writing.remote, list[str]()
        resume = mode.resume or (mode.part is not None and not mode.overwrite)
        replaced = replaceable(self.own, begun, remote, resume=resume, overwrite=mode.overwrite)
        if ledger.damaged:
            lines = f"{ledger.damaged} damaged line{'s' if ledger.damaged > 1 else ''}"
            notes.append(f"{lines} of {ledger.log.path} did not count: their shards were written again")
        journal = without_damaged(begun, self.own, notes, remote)
        todo = [shard for shard in self.own if shard.name not in journal.finished]
        if todo and begun.complete:
            subject = f"{todo[0].path} has changed, and {ledger.path}"
            check_values(begun.options, self.writing.mapping.settings, subject, resuming=True)
        total = sum(shard.stop - shard.start for shard in self.own)
        done = total - sum(shard.stop - shard.start for shard in todo)
        self.budget.start(done, sum(shard.skipped for shard in journal.finished.values()))
        skipped = SkippedRecords(self.budget)

        def advance(records: int) -> None:
            nonlocal done
            done += records
            if progress is not None:
                progress(done, total)

        advance(0)
        complete = write_shards(
            self.source, todo, self.writing, journal, ledger, replaced=replaced, advance=advance, skipped=skipped
        )
        return _Done(complete, _records(self.own, journal), tuple(notes), tuple(skipped.records))


def _records(shards: Sequence[Shard], journal: Journal) -> int:
    return sum(journal.finished[shard.name].records for shard in shards if shard.name in journal.finished)
