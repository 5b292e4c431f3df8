"""Write a data set as shards whose number need not be known in advance."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from dataload._util.system import usable_cpus
from dataload._util.threads import DaemonThreads
from dataload.catalog.evidence import as_published, files_of
from dataload.catalog.facts import ShardFacts
from dataload.catalog.manifest import locked, read_manifest, update_manifest
from dataload.convert.blocks import size_of
from dataload.convert.ledger import Journal
from dataload.convert.mapping import KEY, RecordMap
from dataload.convert.plan import Shard, Target
from dataload.convert.writing import KEY_DIGITS, Writing, facts_of
from dataload.errors import ConfigError, message_of
from dataload.sources.format import Format
from dataload.sources.writer import DEFAULT_CODEC, ClosedOrAborted
from dataload.storage import AtomicFile, base_name, join
from dataload.storage.errors import write_errors
from dataload.storage.local.atomic import exists_error

LOCK_SECONDS = 600  # while others rename and describe their shards
_MOST_THREADS = 8  # they mostly hash


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule by which records are divided among files; one attribute is not None. See `dataload.create`."""

    shards: int | None
    records: int | None
    bytes: int | None


class ShardedWriter(ClosedOrAborted):
    """Writes records to several files in a hidden folder, which `close` publishes in `paths`; see `dataload.create`."""

    def __init__(self, target: Target, options: Mapping[str, Any], overwrite: bool, rule: Rule) -> None:
        self.paths: tuple[str, ...] = ()
        self._state = "refused"  # -> "open" -> "closed" | "aborted"
        self._failure: Exception | None = None  # of a shard, whose records are lost
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._target, self._entry, self._rule, self._overwrite = target, target.entry, rule, overwrite
        self._writing = Writing(target, dict(options), False, _unchanged, (), RecordMap())
        self._entry.writer_options.parse(options, f"the writer of format {self._entry.name!r}")
        self._numbers_keys = self._entry.key_field is not None and options.get("key") is None
        self._storage = target.storage
        self._check_free()
        read_manifest(target.directory, target.remote)  # report a damaged one now
        self._staging: AtomicFile = self._storage.create(target.path, overwrite=True)
        self._state = "open"
        self._open: dict[int, Any] = {}  # writers by shard
        self._lengths: list[int] = []  # records by shard
        self._count = self._first = 0  # records; those before, for keys
        self._bytes = self._overhead = 0  # of the last shard; of its last record's overhead
        with write_errors(target.path):
            os.mkdir(self._staging.temporary)

    def _check_free(self) -> None:
        pattern = self._target.names(self._rule.shards)
        for name in () if self._overwrite else self._existing():
            if pattern.fullmatch(name):
                raise exists_error(join(self._target.directory, name))

    def _existing(self) -> Sequence[str]:
        directory = self._target.directory
        return self._storage.list(directory) if self._storage.is_directory(directory) else ()

    def __len__(self) -> int:
        return self._count

    def write(self, record: Any) -> None:
        """Append one record. After an error of the format, the files are unchanged."""
        with self._lock:
            self._check_open(self._target.path)
            self._check_whole()
            if self._numbers_keys and isinstance(record, Mapping) and KEY not in record:
                # By default a tar writer numbers the samples of each shard from 0.
                record = {KEY: f"{self._first + self._count:0{KEY_DIGITS}d}", **cast("Mapping[str, Any]", record)}
            payload = size_of(record)
            shard = self._choose(payload)
            writer = self._writer(shard)
            before = getattr(writer, "stored_bytes", 0)
            writer.write(record)
            if not self._count:
                self._note_codec(record)
            stored = getattr(writer, "stored_bytes", 0) - before or payload  # writers of other packages may not count
            self._bytes, self._overhead = self._bytes + stored, stored - payload
            self._lengths[shard] += 1
            self._count += 1

    def _note_codec(self, record: Any) -> None:
        """Note the codec that a writer of bytes chooses for records with fields, which the manifest tells."""
        options = self._writing.options
        if self._entry.content == "bytes" and isinstance(record, Mapping) and options.get("codec") is None:
            options["codec"] = self._entry.default_codec or DEFAULT_CODEC

    def _choose(self, payload: int) -> int:
        rule = self._rule
        if rule.shards is not None:
            return self._count % rule.shards
        last = len(self._lengths) - 1
        if last < 0 or not self._lengths[last]:
            return max(0, last)
        full = self._lengths[last] == rule.records
        if rule.bytes is not None:
            # The records of a data set have about the same overhead.
            full = self._bytes + payload + self._overhead > rule.bytes
        if not full:
            return last
        try:
            self._open.pop(last).close()
        except Exception as error:
            self._failure = error
            raise
        self._bytes = 0
        return last + 1

    def _check_whole(self) -> None:
        if self._failure is not None:
            message = f"a shard of {self._target.path} could not be completed, so nothing more can be written"
            raise ConfigError(f"{message}: {message_of(self._failure)}") from self._failure

    def _writer(self, shard: int) -> Any:
        while len(self._lengths) <= shard:
            options = self._writing.options
            self._open[len(self._lengths)] = self._entry.create(self._staged(len(self._lengths)), options=options)
            self._lengths.append(0)
        return self._open[shard]

    def _staged(self, shard: int) -> str:
        return os.path.join(self._staging.temporary, f"{shard:08d}{suffix_of(self._entry, self._target.path)}")

    def extend(self, records: Iterable[Any]) -> None:
        for record in records:
            self.write(record)

    def close(self) -> None:
        """Complete the files and give them their names, the manifest last. May be called twice."""
        with self._lock:
            if self._state != "open":
                return
            self._check_open(self._target.path)
            try:
                self._publish()
            except BaseException as error:
                self._abort_after(error)
                raise
            self._state = "closed"

    def _publish(self) -> None:
        self._check_whole()
        if not self._lengths:
            self._writer(0)
        if len(self._lengths) > max(1, self._rule.shards or 0) and not self._lengths[-1]:
            self._open.pop(len(self._lengths) - 1).abort()  # its only record was refused
            self._lengths.pop()
        count = self._rule.shards or len(self._lengths)
        with write_errors(self._target.path):
            for writer in self._open.values():
                writer.close()
            self._open.clear()
            with DaemonThreads(min(_MOST_THREADS, usable_cpus())) as pool:
                described = [*pool.map(self._writing.describe, map(self._staged, range(count)), self._lengths)]
            with self._named(count) as paths:
                self._move(paths)
                self._enter(paths, described)
        self._staging.abort()
        self.paths = tuple(paths)

    @contextmanager
    def _named(self, count: int) -> Generator[Sequence[str]]:
        """Yield the final paths of the shards, which no other process takes until the manifest lists them.

        Meanwhile a journal tells readers that some shards may be missing, or those that were there before.
        """
        target, storage = self._target, self._storage
        records = self._count if self._rule.shards else count
        plan = target.plan(records, shards=count, records_per_shard=None)
        shards = tuple((shard.name, shard.start, shard.stop) for shard in plan)
        journal = Journal(source="create", records=records, format=self._entry.name, options={}, shards=shards)
        with locked(target.journal, target.remote, LOCK_SECONDS):
            _, version = storage.load(target.journal) or (b"", None)
            storage.replace(target.journal, journal.to_bytes(), version)
            is_whole = not self._overwrite  # after an error, `_move` has removed all
            try:
                yield [shard.path for shard in plan]
                is_whole = True
            finally:
                if is_whole:
                    storage.remove(target.journal)

    def _enter(self, paths: Sequence[str], described: Sequence[ShardFacts]) -> None:
        remote = self._target.remote
        plan = [Shard(path, 0, count) for path, count in zip(paths, self._lengths, strict=True)]
        finished = {
            shard.name: as_published(found, shard.path, remote) for shard, found in zip(plan, described, strict=True)
        }
        update_manifest(self._target.directory, self._entries(plan, finished), remote=remote)

    def _entries(self, plan: Sequence[Shard], finished: Mapping[str, ShardFacts]) -> Any:
        """Return the data sets to list; see `update_manifest`."""
        return [facts_of(plan, finished, self._writing)]

    def _move(self, paths: Sequence[str]) -> None:
        files: list[tuple[str, str]] = []
        for shard, path in enumerate(paths):
            staged, find_index = self._staged(shard), self._entry.find_index
            index = find_index(path)
            # Remove an old index first: beside a new file, it would be trusted.
            new_index = find_index(staged)
            files += [("", index)] if index else []
            files += [(staged, path)]
            files += [(new_index, index)] if index and new_index else []
        existing = () if self._overwrite else {*self._existing()}
        for _, final in files:
            if base_name(final) in existing:
                raise exists_error(final)
        published: list[str] = []
        try:
            for staged, final in files:
                if not staged and self._overwrite:
                    self._storage.remove(final)
                if not os.path.exists(staged):
                    continue
                self._place(staged, final)
                published.append(final)
        except BaseException:
            for final in () if self._overwrite else published:
                self._storage.remove(final)
            raise

    def _place(self, staged: str, final: str) -> None:
        with self._storage.create(final, overwrite=self._overwrite) as part:
            os.rename(staged, part.temporary)
            for file in files_of(part.temporary):
                os.utime(file)  # readers look for unfinished conversions if a shard is newer than the manifest
            # Its writer has flushed the file, and publishing the manifest flushes the names.
            part.publish(durable=False)

    def abort(self) -> None:
        """Discard everything written, without touching the destination."""
        with self._lock:
            if self._state != "open":
                return
            self._state = "aborted"
            try:
                for writer in self._open.values():
                    writer.abort()
            finally:
                self._staging.abort()

    def __repr__(self) -> str:
        return f"ShardedWriter({self._target.path!r}, {self._count} records, {self._state})"


def suffix_of(entry: Format, path: str) -> str:
    """Return the suffix of the format that a path ends with, in lower case, or what follows the last dot."""
    return next((each for each in entry.suffixes if path.lower().endswith(each)), os.path.splitext(path)[1])


def _unchanged(record: Any, _: int, __: int | None) -> Any:
    return record
