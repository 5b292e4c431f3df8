"""Write the shards of a conversion, hash them meanwhile, and describe them for the manifest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, cast

from dataload._util.threads import DaemonThreads
from dataload.catalog.evidence import as_published, describe_files, files_of, hash_file
from dataload.catalog.facts import DataSetFacts, ShardFacts, classes_of, with_classes
from dataload.convert.blocks import read_ahead, read_records
from dataload.convert.mapping import KEY, VALUES, RecordMap, SkippedRecords, describe_values, numbered
from dataload.convert.measuring import contents_of, fields_of, with_etag
from dataload.convert.plan import Shard, Target, pattern_of
from dataload.errors import ConfigError
from dataload.jobs.run import Here
from dataload.loader.failures import Budget
from dataload.sources.base import Source
from dataload.sources.writer import DEFAULT_CODEC, Writer, codec_name
from dataload.storage import LocalFile, base_name
from dataload.types import FieldSpec, RandomAccessSource

KEY_DIGITS = 8
_WRITTEN_AT_ONCE = 256  # records
_BYTES_FIELD = "data"
_INTERRUPTED_SECONDS = 0.5  # to complete a shard
_MOST_CLASS_CHARACTERS = 1 << 20  # captions, which are not classes, would fill the manifest
_NOT_IN_KEYS = re.compile(r"[\s\x00]")


@dataclass(frozen=True, slots=True)
class Writing:
    """Everything needed to turn records into files of a format."""

    target: Target
    options: dict[str, Any]
    counts: bool  # whether the writer needs the number of records in advance
    adapt: Callable[[Any, int, int | None], Any]
    notes: tuple[str, ...]
    mapping: RecordMap
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # by field

    def records(
        self, source: Any, samples: Sequence[Any], first: int, skipped: SkippedRecords
    ) -> Iterator[tuple[int, Any]]:
        """Yield the records to write for consecutive samples, with their sample's index; see `RecordMap.records`."""
        if self.mapping:
            for index, number, record in self.mapping.records(source, samples, first, skipped):
                yield index, self.adapt(record, index, number)
        else:
            for index, record in enumerate(samples, first):
                yield index, self.adapt(record, index, None)

    def settings(self, keep_key: bool) -> dict[str, str]:
        """Return the settings that decide the content of the files, as text for the journal."""
        options = {**self.options, "keep_key": keep_key}
        values = {f"{name}{VALUES}": describe_values(value) for name, value in options.items() if _is_function(value)}
        return {**{name: describe_option(value) for name, value in options.items()}, **values, **self.mapping.settings}

    @property
    def reader_options(self) -> dict[str, Any]:
        codec, known = self.options.get("codec"), self.target.entry.reader_options.names()
        return {"codec": codec} if isinstance(codec, str) and "codec" in known else {}

    def describe(self, path: str, records: int, hashed: tuple[int, str] | None = None) -> ShardFacts:
        found = describe_files(base_name(path), files_of(path), records, hashed)
        with suppress(ConfigError):  # the format's reader needs options from its user
            return replace(found, content=contents_of(self.target.entry, [path], self.reader_options)[0])
        return found

    def options_for(self, records: int) -> dict[str, Any]:
        counted = {"num_records": records} if self.counts and not self.mapping else {}
        return {**self.options, **counted, **({} if self.target.remote is None else {"remote": self.target.remote})}


def prepare(
    source: RandomAccessSource[Any], target: Target, options: dict[str, Any], keep_key: bool, mapping: RecordMap
) -> Writing:
    """Decide how the records of a source become records of a format, from the first one to be written."""
    entry = target.entry
    takes_bytes, has_keys = entry.content == "bytes", entry.key_field is not None
    notes: list[str] = []
    first = _first_record(source, mapping)
    has_fields = isinstance(first, Mapping)
    if has_fields and takes_bytes and options.get("codec") is None:
        codec = entry.default_codec or codec_name(getattr(getattr(source, "options", None), "codec", None))
        options = {**options, "codec": codec or DEFAULT_CODEC}
        notes.append(f"records are encoded with the codec {options['codec']!r}")
    wraps = first is not None and not has_fields and not takes_bytes
    if wraps:
        notes.append(f"records have no fields: each is stored as the field {_BYTES_FIELD!r}")
    classes = classes_of(source.fields) if isinstance(source, Source) else {}
    for name in [name for name, known in classes.items() if sum(map(len, known)) > _MOST_CLASS_CHARACTERS]:
        del classes[name]
        notes.append(f"the names of the classes of {name!r} are too long to be kept in the manifest")
    keyed = has_fields and KEY in first
    drops = keyed and not has_keys and not keep_key
    if drops:
        notes.append(f"the field {KEY!r} of tar samples is dropped; keep_key=True keeps it")
    # By default a tar writer numbers the samples of each shard from 0.
    numbers = has_keys and "key" not in options
    counts = "num_records" in entry.writer_options.names() and "num_records" not in options

    def adapt(record: Any, index: int, number: int | None) -> Any:
        if wraps:
            record = {_BYTES_FIELD: record}
        if not (numbers or drops) or not isinstance(record, Mapping):
            return record
        fields = cast("Mapping[str, Any]", record)
        if drops:
            return {name: value for name, value in fields.items() if name != KEY}
        if KEY in fields:
            return {**fields, KEY: _clean_key(fields[KEY])}
        key = f"{index:0{KEY_DIGITS}d}"
        return {KEY: key if number is None else numbered(key, number), **fields}

    return Writing(target, options, counts, adapt, tuple(notes), mapping, classes)


def _first_record(source: RandomAccessSource[Any], mapping: RecordMap) -> Any:
    if not mapping:
        return read_records(source, 0, 1)[0] if len(source) else None
    skipped = SkippedRecords(Budget(mapping.max_bad or 0, None))  # counted again when shards are written
    for first, samples in read_ahead(mapping.reader(source), 0, len(source)):
        for _, _, record in mapping.records(source, samples, first, skipped):
            return record
    return None


def _clean_key(key: Any) -> Any:
    """Return a key fit for a tar archive and its index: without white space, and no dot in its last component."""
    if not isinstance(key, str):
        return key  # the writer refuses it
    folder, slash, name = key.rpartition("/")
    return _NOT_IN_KEYS.sub("_", f"{folder}{slash}{name.replace('.', '_')}")


def facts_of(plan: Sequence[Shard], finished: Mapping[str, ShardFacts], writing: Writing) -> DataSetFacts:
    entry, remote = writing.target.entry, writing.target.remote
    options = {**entry.find_recorded((shard.path for shard in plan), remote), **writing.reader_options}
    settings = {} if remote is None else {"remote": remote}
    fields: Mapping[str, FieldSpec] = {}
    shards = [with_etag(entry, finished[shard.name]) for shard in plan]
    with suppress(ConfigError):  # the format's reader needs options from its user
        filled = (shard.path for shard, of in zip(plan, shards, strict=True) if of.records)
        fields = fields_of(entry, filled, {**options, **settings})
        fields = with_classes(fields, writing.classes)
        if remote is None and not all(shard.content for shard in shards):
            contents = contents_of(entry, [shard.path for shard in plan], options)
            shards = [replace(shard, content=found) for shard, found in zip(shards, contents, strict=True)]
    pattern = pattern_of([shard.name for shard in plan])
    described = DataSetFacts.of(pattern, entry.name, shards, fields=fields, options=options)
    function = writing.mapping.function
    return described if function is None else replace(described, made_by=function.entry)


def _is_function(option: Any) -> bool:
    return not isinstance(option, type) and (callable(option) or type(option).__repr__ is object.__repr__)


def describe_option(option: Any) -> str:
    """Return text for an option that is the same in every process, unlike a default repr with an address."""
    if isinstance(option, type) or _is_function(option):
        named = option if hasattr(option, "__qualname__") else type(option)
        return f"{named.__module__}.{named.__qualname__}"
    return repr(option)


def write_shards(
    source: RandomAccessSource[Any],
    shards: Sequence[Shard],
    writing: Writing,
    replaceable: set[str],
    here: Here[Shard],
    skipped: SkippedRecords,
) -> None:
    """Write the shards one after another, and note each once it has its name."""
    running: Future[None] | None = None
    with DaemonThreads(2) as pool:  # completes a shard, and hashes it meanwhile
        try:
            for shard in shards:
                with ExitStack() as held:
                    overwrite = shard.path in replaceable
                    complete = _write_shard(held, pool, source, shard, writing, overwrite, here.advance, skipped)
                    if running is not None:
                        running.result()
                    # Flushing and hashing release the GIL, so the next shard is written at the same time.
                    running = pool.submit(_enter, here, shard, complete, held.pop_all())
            if running is not None:
                running.result()
        except BaseException as error:
            if running is not None:
                with suppress(Exception):  # report the first error
                    running.result(_INTERRUPTED_SECONDS if isinstance(error, KeyboardInterrupt) else None)
            raise


def _enter(here: Here[Shard], shard: Shard, complete: Callable[[ExitStack], ShardFacts], held: ExitStack) -> None:
    here.note(shard, complete(held))


def _write_shard(
    held: ExitStack,
    pool: DaemonThreads,
    source: RandomAccessSource[Any],
    shard: Shard,
    writing: Writing,
    overwrite: bool,
    advance: Callable[[int], None],
    skipped: SkippedRecords,
) -> Callable[[ExitStack], ShardFacts]:
    """Write the records of a shard; return the function that closes its writer, which `held` holds."""
    entry, remote, before = writing.target.entry, writing.target.remote, len(skipped.records)
    options = writing.options_for(shard.stop - shard.start)
    writer = held.enter_context(entry.create(shard.path, overwrite=overwrite, options=options))
    hashing: Future[tuple[int, str]] | None = None
    local: ShardFacts | None = None

    def before_publish(path: str) -> None:
        nonlocal hashing, local
        if remote is not None:
            local = writing.describe(path, len(writer))
        elif len(files := files_of(path)) == 1:
            hashing = pool.submit(hash_file, LocalFile(files[0]))  # while it is flushed to the disk and renamed

    writer.before_publish = before_publish
    at_once = 1 if writing.mapping else _WRITTEN_AT_ONCE  # a function may return the same array again and again
    for first, samples in read_ahead(writing.mapping.reader(source), shard.start, shard.stop):
        records = writing.records(source, samples, first, skipped)
        while block := [*islice(records, at_once)]:
            _write_block(writer, block)
        advance(len(samples))
    left_out = len(skipped.records) - before

    def complete(closing: ExitStack) -> ShardFacts:
        closing.close()
        if local is None:
            hashed = None if hashing is None else hashing.result()
            return replace(writing.describe(shard.path, len(writer), hashed), skipped=left_out)
        return replace(as_published(local, shard.path, remote), skipped=left_out)

    return complete


def _write_block(writer: Writer, block: Sequence[tuple[int, Any]]) -> None:
    before = len(writer)
    try:
        writer.extend([record for _, record in block])
    except ConfigError as error:
        message = f"cannot write record {block[len(writer) - before][0]} of the source to {writer.path}: {error}"
        raise ConfigError(message, key=error.key, value=error.value) from error
