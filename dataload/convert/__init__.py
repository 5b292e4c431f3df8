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

At the end, the files are entered in ``dataload.json``, the manifest of their directory: opening the directory then
takes shards, format and codec from there.
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from dataload._util.fingerprint import identify
from dataload.convert.blocks import read_ahead
from dataload.convert.journal import FinishedShard, Journal, JournalFile
from dataload.convert.manifest import etag_of, fields_of, identities_of, pattern_of, update_manifest
from dataload.convert.plan import Shard, journal_path, plan_shards, summarize_paths
from dataload.errors import ConfigError, SourceNotFoundError
from dataload.sources.find import find_destination, read_manifest
from dataload.sources.format import Format
from dataload.sources.manifest import DataSetEntry, ShardEntry
from dataload.storage import Remote, RemoteOptions, is_url, parent, storage_of
from dataload.storage.local.parts import remove_leftovers
from dataload.types import FieldSpec, RandomAccessSource

__all__ = ["ConvertReport", "convert"]

_KEY = "__key__"
_KEY_DIGITS = 8
_DEFAULT_CODEC = "tensorprotos"
_BYTES_FIELD = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """The result of a conversion.

    Attributes:
        paths: The files, in index order.
        format: Name of the format.
        records: Total number of records.
        bytes: Total size of the files.
        resumed: Number of records in shards that an earlier run had finished.
        notes: Decisions made along the way, as sentences.
        journal: Path of the journal, which has the SHA-256 of each file.
        manifest: Path of the directory's manifest, which has the SHA-256, too.
    """

    paths: tuple[str, ...]
    format: str
    records: int
    bytes: int
    resumed: int
    notes: tuple[str, ...]
    journal: str
    manifest: str

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
    progress: Callable[[int, int], None] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    remote: RemoteOptions | Remote | Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Write the records of a source, in index order, as files of another format.

    Values are passed to the writer unchanged, with three exceptions that the report mentions: a format that stores
    bytes gets the codec "tensorprotos" for records with fields unless `writer_options` names another; plain bytes
    become the field "data" if the format requires fields; and the ``__key__`` of tar samples is dropped if the format
    has no keys.

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
        progress: Called with (records done, total records) at the start and after each block.
        storage_options: Arguments of obstore's stores for a destination at a URL; see `dataload.open`.
        remote: Settings for a destination at a URL; see `dataload.RemoteOptions`. Shards are written in its `cache`.

    Raises:
        ConfigError: The destination exists; a record does not fit the format; or, with `resume`, the source or the
            plan has changed since the conversion began (one line per difference).
        SourceNotFoundError: The destination's directory does not exist.
        SourceError: The source cannot be read, the destination cannot be written, or another process is converting to
            the same destination.
    """
    destination = os.fspath(destination)
    if resume and overwrite:
        raise ConfigError("resume keeps existing files, overwrite replaces them: pass only one", key="overwrite")
    entry, destination = find_destination(destination, format)
    plan = plan_shards(destination, entry, len(source), shards=shards, records_per_shard=records_per_shard)
    options = dict(writer_options or {})
    place = options.pop("storage_options", None) or storage_options, options.pop("remote", None) or remote
    writing = _prepare(source, entry, options, keep_key)
    if is_url(destination):
        writing = writing.to_store(destination, *place)
    requested = Journal(
        source=identify(source),
        records=len(source),
        format=entry.name,
        options={name: _describe(value) for name, value in {**writing.options, "keep_key": keep_key}.items()},
        shards=tuple((shard.name, shard.start, shard.stop) for shard in plan),
        run=secrets.token_hex(8) if is_url(destination) else "",
    )
    path = journal_path(destination)
    notes = list(writing.notes)
    done = resumed = 0

    def advance(records: int) -> None:
        nonlocal done
        done += records
        if progress is not None:
            progress(done, len(source))

    _check_directory(path)
    directory = parent(path)
    with storage_of(path, writing.remote).lock(path):
        read_manifest(directory, writing.remote)  # a damaged one is better known now
        if not is_url(path):
            remove_leftovers(path)
        file = JournalFile(path, writing.remote)
        begun = _begin(file, path, requested, plan, writing.remote, resume=resume, overwrite=overwrite)
        journal = replace(_without_damaged(begun, plan, notes, writing.remote), run=requested.run)
        todo = [shard for shard in plan if shard.name not in journal.finished]
        resumed = len(source) - sum(shard.stop - shard.start for shard in todo)
        advance(resumed)
        replaced = _replaced(plan, begun, writing.remote, resume=resume, overwrite=overwrite)
        journal = _write_shards(source, todo, writing, journal, file, replaced=replaced, advance=advance)
        manifest = update_manifest(directory, [_manifest_entry(plan, journal, writing)], remote=writing.remote)
    return ConvertReport(
        paths=tuple(shard.path for shard in plan),
        format=entry.name,
        records=len(source),
        bytes=sum(shard.bytes for shard in journal.finished.values()),
        resumed=resumed,
        notes=tuple(notes),
        journal=path,
        manifest=manifest,
    )


@dataclass(frozen=True, slots=True)
class _Writing:
    """Everything needed to turn records into files of a format."""

    entry: Format
    options: dict[str, Any]
    counts: bool  # whether the writer wants to know the number of records in advance
    adapt: Callable[[Any, int], Any]
    notes: tuple[str, ...]
    remote: Remote | None = None  # for a destination at a URL

    def to_store(self, url: str, storage_options: Any, remote: Any) -> Self:
        """Return the same for a destination at a URL.

        Raises:
            ConfigError: The writer of the format does not write to URLs.
        """
        if "remote" not in self.entry.writer_options.names():
            message = f"the writer of format {self.entry.name!r} has no option 'remote': write to a local directory"
            raise ConfigError(message, key="destination", value=url)
        found = Remote.of(storage_options, remote)
        # What is known about objects may be out of date.
        return replace(self, remote=Remote(found.store, found.options))

    @property
    def reader_options(self) -> dict[str, Any]:
        """Options with which the records are read again."""
        codec = self.options.get("codec")
        return {"codec": codec} if isinstance(codec, str) and "codec" in self.entry.reader_options.names() else {}

    def describe(self, path: str) -> FinishedShard:
        """Describe a local shard that is about to be uploaded."""
        found = FinishedShard.of(path)
        with suppress(ConfigError):  # the reader of the format needs options that only its user knows
            return replace(found, identity=identities_of(self.entry, [path], self.reader_options)[0])
        return found

    def options_for(self, records: int) -> dict[str, Any]:
        """Return the writer's options for a shard of so many records."""
        counted = {"num_records": records} if self.counts else {}
        return {**self.options, **counted, **({} if self.remote is None else {"remote": self.remote})}


def _prepare(source: RandomAccessSource[Any], entry: Format, options: dict[str, Any], keep_key: bool) -> _Writing:
    takes_bytes, has_keys = entry.content == "bytes", entry.key_field is not None
    notes: list[str] = []
    first = source[0] if len(source) else None
    has_fields = isinstance(first, Mapping)
    if has_fields and takes_bytes and options.get("codec") is None:
        options = {**options, "codec": _DEFAULT_CODEC}
        notes.append(
            f"records are encoded with the codec {_DEFAULT_CODEC!r}: pass it again when you open files by name"
        )
    wraps = first is not None and not has_fields and not takes_bytes
    if wraps:
        notes.append(f"records have no fields: each is stored as the field {_BYTES_FIELD!r}")
    keyed = has_fields and _KEY in first
    drops = keyed and not has_keys and not keep_key
    if drops:
        notes.append(f"the field {_KEY!r} of tar samples is dropped; keep_key=True keeps it")
    # By default a tar writer numbers the samples of each shard from 0.
    numbers = has_keys and "key" not in options and not keyed
    counts = "num_records" in entry.writer_options.names() and "num_records" not in options

    def adapt(record: Any, index: int) -> Any:
        if wraps:
            record = {_BYTES_FIELD: record}
        if numbers:
            return {_KEY: f"{index:0{_KEY_DIGITS}d}", **record}
        return {name: value for name, value in record.items() if name != _KEY} if drops else record

    return _Writing(entry, options, counts, adapt, tuple(notes))


def _manifest_entry(plan: Sequence[Shard], journal: Journal, writing: _Writing) -> DataSetEntry:
    options = writing.reader_options
    settings = {} if writing.remote is None else {"remote": writing.remote}
    fields: Mapping[str, FieldSpec] = {}
    finished = [(shard, journal.finished[shard.name]) for shard in plan]
    shards = [
        ShardEntry(shard.name, shard.stop - shard.start, of.bytes, etag_of(writing.entry, of), of.sha256, of.identity)
        for shard, of in finished
    ]
    with suppress(ConfigError):  # the reader of the format needs options that only its user knows
        filled = (shard.path for shard in plan if shard.stop > shard.start)
        fields = fields_of(writing.entry, filled, {**options, **settings})
        if writing.remote is None:
            identities = identities_of(writing.entry, [shard.path for shard in plan], options)
            shards = [shard._replace(identity=found) for shard, found in zip(shards, identities, strict=True)]
    return DataSetEntry.of(
        pattern_of([shard.name for shard in plan]),
        writing.entry.name,
        shards,
        fields=fields,
        options=options,
    )


def _describe(option: Any) -> str:
    """Return text for an option that is the same in every process: an object's default repr is its address."""
    if callable(option) or type(option).__repr__ is object.__repr__:
        named = option if hasattr(option, "__qualname__") else type(option)
        return f"{named.__module__}.{named.__qualname__}"
    return repr(option)


def _check_directory(path: str) -> None:
    directory = parent(path)
    if not is_url(path) and not os.path.isdir(directory):
        raise SourceNotFoundError(f"there is no directory {directory} to write to", path=directory)


def _begin(
    file: JournalFile,
    path: str,
    requested: Journal,
    plan: Sequence[Shard],
    remote: Remote | None,
    *,
    resume: bool,
    overwrite: bool,
) -> Journal:
    """Return the journal in `file` if it can be resumed, else `requested`."""
    if overwrite:
        file.skip()
        return requested
    begun = file.load()
    if begun is not None and resume:
        if differences := "".join(f"\n  {line}" for line in begun.differences(requested)):
            message = f"cannot resume: {path} is the journal of a different conversion{differences}"
            raise ConfigError(message, key="resume")
        return begun
    unfinished = begun is not None and len(begun.finished) < len(begun.shards)
    taken = _existing(plan, remote)
    if not taken and unfinished and is_url(path):  # its run may live: no lock says so
        message = (
            f"{path} is the journal of an unfinished conversion: pass resume=True to continue it, or overwrite=True"
        )
        raise ConfigError(f"{message} to start over", key="resume", value=path)
    if taken:
        several = f" (and {len(taken) - 1} more)" if len(taken) > 1 else ""
        resuming = "resume=True to continue the interrupted conversion, or " if unfinished else ""
        message = f"{taken[0]} exists{several}: choose another name, or pass {resuming}overwrite=True to replace it"
        raise ConfigError(message, key="overwrite", value=taken[0])
    return requested


def _existing(plan: Sequence[Shard], remote: Remote | None) -> list[str]:
    """Return the paths of the plan at which there is something."""
    if not is_url(plan[0].path):
        return [shard.path for shard in plan if os.path.exists(shard.path)]
    directory = parent(plan[0].path)
    names: set[str] = set()
    with suppress(SourceNotFoundError):
        names.update(storage_of(directory, remote).list(directory))  # at once, which also tells the versions
    return [shard.path for shard in plan if shard.name in names]


def _replaced(
    plan: Sequence[Shard], begun: Journal, remote: Remote | None, *, resume: bool, overwrite: bool
) -> set[str]:
    """Return the paths that may be replaced."""
    if overwrite or (resume and remote is None):
        return {shard.path for shard in plan}
    # Without a lock, another run may be writing what is not there yet.
    known = {shard.path for shard in plan if shard.name in begun.finished}
    return known.union(_existing(plan, remote)) if resume else set()


def _without_damaged(journal: Journal, plan: Sequence[Shard], notes: list[str], remote: Remote | None) -> Journal:
    """Return `journal` without the shards that have changed since they were finished, and note each."""
    intact = dict(journal.finished)
    for shard in plan:
        if shard.name in intact and not intact[shard.name].matches(shard.path, remote):
            del intact[shard.name]
            notes.append(f"{shard.path} has changed since it was finished and was written again")
    return replace(journal, finished=intact)


def _write_shards(
    source: RandomAccessSource[Any],
    shards: Sequence[Shard],
    writing: _Writing,
    journal: Journal,
    file: JournalFile,
    *,
    replaced: set[str],
    advance: Callable[[int], None],
) -> Journal:
    """Write the shards one after another, entering each in the journal once it has its final name."""
    if not shards:
        return journal
    file.save(journal)
    try:
        for shard in shards:
            finished = _write_shard(source, shard, writing, shard.path in replaced, advance)
            journal = replace(journal, finished={**journal.finished, shard.name: finished})
            file.save(journal)
    except BaseException:
        if not journal.finished:  # there is nothing to resume
            file.remove()
        raise
    return journal


def _write_shard(
    source: RandomAccessSource[Any], shard: Shard, writing: _Writing, overwrite: bool, advance: Callable[[int], None]
) -> FinishedShard:
    local: list[FinishedShard] = []
    options = writing.options_for(shard.stop - shard.start)
    with writing.entry.create(shard.path, overwrite=overwrite, options=options) as writer:
        if writing.remote is not None:
            writer.before_publish = lambda path: local.append(writing.describe(path))
        for first, records in read_ahead(source, shard.start, shard.stop):
            for index, record in enumerate(records, first):
                try:
                    writer.write(writing.adapt(record, index))
                except ConfigError as error:
                    message = f"cannot write record {index} of the source to {shard.path}: {error}"
                    raise ConfigError(message, key=error.key, value=error.value) from error
            advance(len(records))
    return local[0].as_uploaded(shard.path, writing.remote) if local else FinishedShard.of(shard.path)
