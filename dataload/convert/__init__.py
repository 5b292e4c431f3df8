"""Convert any format to any other: in shards, in bounded memory, and resumable after a kill.

```python
import dataload
from dataload.convert import convert

with dataload.open("train.tar", decode="auto") as source:
    report = convert(source, "train.array_record", shards=8)
```

A shard gets its final name once it is complete. A hidden journal beside the destination,
``.<destination>.convert.json``, stays after the conversion ends: resuming a finished conversion does nothing, so a
restarted job need not know how the last run ended.

A conversion can run as parts, under any scheduler: ``convert(..., shards=8, part=(1, 4))`` writes the first two of
eight shards, and ``convert(..., shards=8, merge=True)`` ends the conversion when all parts have finished. Each part has
a journal of its own, its receipt, until then.

At the end, the files are entered in ``dataload.json``, the manifest of their directory: opening the directory then
takes shards, format and codec from there.
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataload._util.fingerprint import identify
from dataload.convert.journal import Journal, JournalFile
from dataload.convert.manifest import update_manifest
from dataload.convert.parts import begin, begin_part, close_parts, merged, replaceable, without_damaged
from dataload.convert.plan import Shard, journal_path, part_path, plan_shards, select_part, summarize_paths
from dataload.convert.writing import Writing, describe_option, manifest_entry, prepare, write_shards
from dataload.errors import ConfigError, SourceNotFoundError
from dataload.sources.find import find_destination, read_manifest
from dataload.storage import Remote, RemoteOptions, is_url, parent, storage_of
from dataload.storage.local.parts import remove_leftovers
from dataload.types import RandomAccessSource

__all__ = ["ConvertReport", "convert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """The result of a conversion.

    Attributes:
        paths: The files, in index order; of a part, only its own.
        format: Name of the format.
        records: Total number of records in them.
        bytes: Total size of the files.
        resumed: Number of records in shards that an earlier run, or a merged part, had finished.
        notes: Decisions made along the way, as sentences.
        journal: Path of the journal, which has the SHA-256 of each file.
        manifest: Path of the directory's manifest, which has the SHA-256, too; None for a part.
    """

    paths: tuple[str, ...]
    format: str
    records: int
    bytes: int
    resumed: int
    notes: tuple[str, ...]
    journal: str
    manifest: str | None

    @property
    def pattern(self) -> str:
        """All files as one string, which `dataload.open` takes if they are numbered."""
        return summarize_paths(self.paths)


def convert(
    source: RandomAccessSource[Any],
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - the word that users expect
    writer_options: Mapping[str, Any] | None = None,
    shards: int | None = None,
    records_per_shard: int | None = None,
    keep_key: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    part: tuple[int, int] | None = None,
    merge: bool = False,
    progress: Callable[[int, int], None] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    remote: RemoteOptions | Remote | Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Write the records of a source, in index order, as files of another format.

    Values are passed to the writer unchanged, with three exceptions that the report mentions: a format that stores
    bytes gets the codec "tensorprotos" for records with fields unless `writer_options` names another; plain bytes
    become the field "data" if the format requires fields; and the ``__key__`` of tar samples is dropped if the format
    has no keys. In keys of a tar archive, dots of the name and white space become ``_``. Open a folder of images with
    ``decode=None`` to copy its files into an archive, and with ``decode={}`` for other formats.

    Args:
        source: What `dataload.open` returns, or any object with ``__len__`` and ``__getitem__``.
        destination: A path in an existing directory. With `shards` or `records_per_shard`, ``-00000-of-00008`` goes
            before its suffix unless the name contains ``{shard}`` (and ``{shards}``), as in
            ``"train-{shard:05d}.tar"``. LMDB shards are directories. At a URL, each shard is written to a local file
            and then uploaded.
        format: Name of the format; by default the suffix of `destination` decides.
        writer_options: Options of the format's writer, such as ``codec``.
        shards: Number of files. Records are split evenly: the counts differ by at most one.
        records_per_shard: Maximum number of records per file, instead of `shards`; also split evenly.
        keep_key: Keep ``__key__`` as a field.
        resume: Continue an interrupted run for the same destination: keep the shards it finished and write the rest.
            If there was no such run, start from the beginning.
        overwrite: Replace existing files, each once its new content is complete.
        part: ``(i, n)`` writes only part i, counted from 1, of n: a contiguous range of the shards. Parts may run on
            different machines, in any order, and again: a part keeps the shards that it has finished.
        merge: Write no shards, but check that all parts have finished, and enter their shards in the manifest. All
            other arguments must be those of the parts.
        progress: Called with (records done, total records) at the start and after each block.
        storage_options: Arguments of obstore's stores for a destination at a URL; see `dataload.open`.
        remote: Settings for a destination at a URL; see `dataload.RemoteOptions`. Shards are written in its `cache`.

    Raises:
        ConfigError: The destination exists; a record does not fit the format; or, with `resume`, `part` or `merge`,
            the source or the plan has changed since the conversion began (one line per difference). With `merge`: a
            part has not finished, its receipt is damaged, or a shard is missing or has changed.
        SourceNotFoundError: The destination's directory does not exist.
        SourceError: The source cannot be read, the destination cannot be written, or another process is converting to
            the same destination.
    """
    _check_modes(part, resume=resume, overwrite=overwrite, merge=merge)
    entry, destination = find_destination(os.fspath(destination), format)
    plan = plan_shards(destination, entry, len(source), shards=shards, records_per_shard=records_per_shard)
    number, parts = part or (0, 0)
    own = plan if part is None else select_part(plan, number, parts)
    options = dict(writer_options or {})
    place = options.pop("storage_options", None) or storage_options, options.pop("remote", None) or remote
    writing = prepare(source, entry, options, keep_key)
    if is_url(destination):
        writing = writing.to_store(destination, *place)
    requested = Journal(
        source=identify(source),
        records=len(source),
        format=entry.name,
        options={name: describe_option(value) for name, value in {**writing.options, "keep_key": keep_key}.items()},
        shards=tuple((shard.name, shard.start, shard.stop) for shard in plan),
        run=secrets.token_hex(8) if is_url(destination) else "",
        parts=parts,
        part=number,
    )
    whole = journal_path(destination)
    file = JournalFile(whole if part is None else part_path(whole, number, parts), writing.remote)
    manifest: str | None = None
    _check_directory(whole)
    with storage_of(whole, writing.remote).lock(file.path):
        read_manifest(parent(whole), writing.remote)  # a damaged one is better known now
        if not is_url(whole):
            remove_leftovers(file.path)
        if merge:
            done = _Done(merged(file, requested, plan, writing.remote), _records(own))
        else:
            if part is None:
                begun = begin(file, requested, plan, writing.remote, resume=resume, overwrite=overwrite)
            else:
                begun = begin_part(file, whole, requested, plan, writing.remote, overwrite=overwrite)
            begun = replace(begun, run=requested.run)
            resume = resume or (part is not None and not overwrite)
            replaced = replaceable(own, begun, writing.remote, resume=resume, overwrite=overwrite)
            done = _write_missing(source, own, writing, begun, file, replaced, progress)
        if part is None:
            entries = [manifest_entry(plan, done.journal, writing)]
            manifest = update_manifest(parent(whole), entries, remote=writing.remote)
            close_parts(file, done.journal, writing.remote)
    return ConvertReport(
        paths=tuple(shard.path for shard in own),
        format=entry.name,
        records=_records(own),
        bytes=sum(shard.bytes for shard in done.journal.finished.values()),
        resumed=done.resumed,
        notes=(*writing.notes, *done.notes),
        journal=file.path,
        manifest=manifest,
    )


@dataclass(frozen=True, slots=True)
class _Done:
    """The journal of what is finished, how many of its records were finished before, and notes."""

    journal: Journal
    resumed: int
    notes: tuple[str, ...] = ()


def _write_missing(
    source: RandomAccessSource[Any],
    shards: Sequence[Shard],
    writing: Writing,
    begun: Journal,
    file: JournalFile,
    replaced: set[str],
    progress: Callable[[int, int], None] | None,
) -> _Done:
    """Write the shards that are not finished, or have changed since."""
    notes: list[str] = []
    journal = without_damaged(begun, shards, notes, writing.remote)
    todo = [shard for shard in shards if shard.name not in journal.finished]
    total = _records(shards)
    done = resumed = total - _records(todo)

    def advance(records: int) -> None:
        nonlocal done
        done += records
        if progress is not None:
            progress(done, total)

    advance(0)
    journal = write_shards(source, todo, writing, journal, file, replaced=replaced, advance=advance)
    return _Done(journal, resumed, tuple(notes))


def _records(shards: Sequence[Shard]) -> int:
    return sum(shard.stop - shard.start for shard in shards)


def _check_modes(part: tuple[int, int] | None, *, resume: bool, overwrite: bool, merge: bool) -> None:
    if resume and overwrite:
        raise ConfigError("resume keeps existing files, overwrite replaces them: pass only one", key="overwrite")
    if merge and (part is not None or overwrite or resume):
        message = "merge writes no shards: pass it without part, resume and overwrite"
        raise ConfigError(message, key="merge", value=merge)


def _check_directory(path: str) -> None:
    directory = parent(path)
    if not is_url(path) and not os.path.isdir(directory):
        raise SourceNotFoundError(f"there is no directory {directory} to write to", path=directory)
