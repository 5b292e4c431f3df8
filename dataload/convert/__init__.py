"""Convert any format to any other: in shards, in bounded memory, and resumable after a kill.

```python
import dataload
from dataload.convert import convert

with dataload.open("train.tar", decode="auto") as source:
    report = convert(source, "train.array_record", shards=8)
```

A shard gets its final name once it is complete. A hidden journal beside the destination,
``.<destination>.convert.json``, stays after the end, so resuming a finished conversion does nothing.

A conversion can run in partitions, under any scheduler: ``convert(..., shards=8, part=(1, 4))`` writes the first two of
eight shards, and ``convert(..., shards=8, merge=True)`` ends the conversion when all partitions have finished.

A function given as ``map=`` resizes, tokenizes, splits or filters: it takes a sample, and returns a record, a list of
records, or `dataload.DROP`. A shard then has the records made from a range of the source.

At the end, the files are entered in ``dataload.json``, the manifest of their directory, from which `dataload.open`
takes shards, format, codec and the names of classes.
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from dataload._util.fingerprint import identify
from dataload._util.settings import check_flags
from dataload.catalog.store import read_manifest, update_manifest
from dataload.convert.engine import Engine, check_whole, conversion_parts, engine_of, run_conversion
from dataload.convert.function_values import check_values, notes_of_values
from dataload.convert.journal import Journal, Ledger
from dataload.convert.local import LocalEngine
from dataload.convert.mapping import MapFunction, RecordMap, SkippedRecords
from dataload.convert.parts import begin, begin_part, clear, merged, replaceable, without_damaged
from dataload.convert.plan import Shard, journal_path, plan_shards, select_part, summarize_paths
from dataload.convert.writing import Writing, facts_of, prepare, write_shards
from dataload.errors import ConfigError
from dataload.loader.bad_records import BadRecord, Budget
from dataload.sources.discover import find_destination
from dataload.sources.views.adapt import loadable
from dataload.storage import Remote, RemoteOptions, is_url, parent, storage_of
from dataload.storage.local.atomic import make_directory, remove_leftovers
from dataload.types import RandomAccessSource

__all__ = ["ConvertReport", "Engine", "LocalEngine", "convert"]


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
            other arguments must equal those of the partitions.
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
    _check_modes(part, resume=resume, overwrite=overwrite, merge=merge, engine=engine)
    source = loadable(source)
    entry, destination = find_destination(os.fspath(destination), format)
    mapping = RecordMap.of(map, seed=seed, on_error=on_error, max_bad=max_bad)
    budget = Budget(max_bad, error_report)
    plan = plan_shards(destination, entry, len(source), shards=shards, records_per_shard=records_per_shard)
    number, parts = part or (0, 0)
    own = plan if part is None else select_part(plan, number, parts)
    options = dict(writer_options or {})
    place = options.pop("storage_options", None) or storage_options, options.pop("remote", None) or remote
    writing = prepare(source, entry, options, keep_key, mapping)
    writing = writing.to_store(destination, *place) if is_url(destination) else writing
    requested = Journal(
        source=identify(source),
        records=len(source),
        format=entry.name,
        options=writing.settings(keep_key),
        shards=tuple((shard.name, shard.start, shard.stop) for shard in plan),
        run=secrets.token_hex(8),
        parts=parts,
        part=number,
        counted=bool(mapping),
    )
    notes = (*writing.notes, *notes_of_values(requested.options, requested.options))
    whole = journal_path(destination)
    ledger = Ledger(whole, part, writing.remote, overwrite=overwrite)
    manifest: str | None = None
    if not is_url(whole):
        make_directory(parent(whole))
    with storage_of(whole, writing.remote).lock(ledger.path):
        read_manifest(parent(whole), writing.remote)  # report a damaged one now
        if not is_url(whole):
            remove_leftovers(ledger.path)
        if engine is not None:
            engine = engine_of(engine)
            requested = replace(requested, parts=conversion_parts(engine, ledger.head, plan, resume=resume))
        if merge:
            journal = merged(ledger.head, requested, plan, writing.remote)
            done = _Done(journal, _records(own, journal))
        else:
            modes = {"resume": resume or (part is not None and not overwrite), "overwrite": overwrite}
            begun = _begin(ledger, requested, plan, writing.remote, **modes)
            if engine is not None and not begun.complete:
                task = partial(
                    convert,
                    source,
                    destination,
                    format=entry.name,
                    writer_options=options,
                    shards=shards,
                    records_per_shard=records_per_shard,
                    keep_key=keep_key,
                    map=map,
                    seed=seed,
                    on_error=on_error,
                    max_bad=max_bad,
                    error_report=error_report,
                    remote=writing.remote,
                )
                begun = replace(begun, parts=requested.parts)
                reports = run_conversion(
                    engine, task, ledger, begun, plan, writing.remote, overwrite=overwrite, progress=progress
                )
                done = _merge_reports(merged(ledger.head, requested, plan, writing.remote), reports, notes)
            else:
                replaced = replaceable(own, begun, writing.remote, **modes)
                done = _write_missing(source, own, writing, begun, ledger, replaced, progress, budget)
        if part is None:
            ledger.seal(done.journal)
            entries = [facts_of(plan, done.journal.finished, writing)]
            manifest = update_manifest(parent(whole), entries, remote=writing.remote)
            clear(ledger, done.journal, writing.remote)
    return ConvertReport(
        paths=tuple(shard.path for shard in own),
        format=entry.name,
        records=_records(own, done.journal),
        bytes=sum(shard.bytes for shard in done.journal.finished.values()),
        resumed=done.resumed,
        notes=(*dict.fromkeys((*notes, *notes_of_values(done.journal.options, requested.options), *done.notes)),),
        journal=ledger.path,
        manifest=manifest,
        skipped=sum(shard.skipped for shard in done.journal.finished.values()),
        bad_records=done.bad_records,
    )


def _begin(
    ledger: Ledger,
    requested: Journal,
    plan: Sequence[Shard],
    remote: Remote | None,
    *,
    resume: bool,
    overwrite: bool,
) -> Journal:
    if requested.part:
        begun = begin_part(ledger, requested, plan, remote, overwrite=overwrite)
    else:
        begun = begin(ledger, requested, plan, remote, resume=resume, overwrite=overwrite)
    return replace(begun, counted=requested.counted)


@dataclass(frozen=True, slots=True)
class _Done:
    """The journal of what is finished, its records from earlier runs, notes and bad records."""

    journal: Journal
    resumed: int
    notes: tuple[str, ...] = ()
    bad_records: tuple[BadRecord, ...] = ()


def _merge_reports(journal: Journal, reports: Sequence[ConvertReport], known: Sequence[str]) -> _Done:
    """Combine the reports of an engine's partitions; notes in `known` are in the report of the whole."""
    notes = [note for report in reports for note in report.notes if note not in known]
    if len(reports) == 1:
        notes.append("one shard is one part: with shards=N, or records_per_shard=N, parts run at the same time")
    bad_records = tuple(bad for report in reports for bad in report.bad_records)
    return _Done(journal, sum(report.resumed for report in reports), tuple(notes), bad_records)


def _write_missing(
    source: RandomAccessSource[Any],
    shards: Sequence[Shard],
    writing: Writing,
    begun: Journal,
    ledger: Ledger,
    replaced: set[str],
    progress: Callable[[int, int], None] | None,
    budget: Budget,
) -> _Done:
    notes = [_damaged(ledger)] if ledger.damaged else []
    journal = without_damaged(begun, shards, notes, writing.remote)
    todo = [shard for shard in shards if shard.name not in journal.finished]
    if todo and begun.complete:
        check_values(
            begun.options, writing.mapping.settings, f"{todo[0].path} has changed, and {ledger.path}", resuming=True
        )
    total = sum(shard.stop - shard.start for shard in shards)
    done = total - sum(shard.stop - shard.start for shard in todo)
    resumed = _records(shards, journal)
    budget.start(done, sum(shard.skipped for shard in journal.finished.values()))
    skipped = SkippedRecords(budget)

    def advance(records: int) -> None:
        nonlocal done
        done += records
        if progress is not None:
            progress(done, total)

    advance(0)
    journal = write_shards(source, todo, writing, journal, ledger, replaced=replaced, advance=advance, skipped=skipped)
    return _Done(journal, resumed, tuple(notes), tuple(skipped.records))


def _damaged(ledger: Ledger) -> str:
    lines = f"{ledger.damaged} damaged line{'s' if ledger.damaged > 1 else ''}"
    return f"{lines} of {ledger.log.path} did not count: their shards were written again"


def _records(shards: Sequence[Shard], journal: Journal) -> int:
    return sum(journal.finished[shard.name].records for shard in shards if shard.name in journal.finished)


def _check_modes(part: tuple[int, int] | None, *, resume: bool, overwrite: bool, merge: bool, engine: Any) -> None:
    if resume and overwrite:
        raise ConfigError("resume keeps existing files, overwrite replaces them: pass only one", key="overwrite")
    if merge and (part is not None or overwrite or resume):
        message = "merge writes no shards: pass it without part, resume and overwrite"
        raise ConfigError(message, key="merge", value=merge)
    if engine is not None:
        check_whole(part, merge)
